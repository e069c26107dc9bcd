"""Keep the results of a function on disk, for many processes."""
