"""Rows as compressed bytes, and back: lossless (zstd, LZ4), and images as JPEG."""
