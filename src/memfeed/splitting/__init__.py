"""Cut the pipeline of a dataset before its first random step: what is stored, and what a loader does in each epoch."""
