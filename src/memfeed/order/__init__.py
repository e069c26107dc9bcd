"""In which order an epoch visits rows: integers only."""
