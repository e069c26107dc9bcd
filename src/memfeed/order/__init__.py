"""The order in which an epoch visits rows, and the share of each rank: integers only."""
