"""Dataset to store: look at it, read its samples with worker processes, write them into a build."""
