"""Store to batches, epoch by epoch."""
