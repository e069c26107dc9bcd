"""Move tensors to a device, in as few copies as possible."""
