"""What a loader is made of: tasks, reading ahead, making batches in a thread or not, its place and its state."""
