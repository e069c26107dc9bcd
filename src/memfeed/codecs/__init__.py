"""Rows as compressed bytes, and back: lossless (zstd, LZ4), and images as JPEG."""

from memfeed.codecs.jpeg import Jpeg
from memfeed.codecs.lossless import Lz4, Zstd

__all__ = ["Jpeg", "Lz4", "Zstd"]
