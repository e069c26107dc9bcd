"""The machine below: files, the page cache, memory, signals, progress."""
