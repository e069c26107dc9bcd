"""The command line: ``memfeed cache``, ``inspect``, ``verify``, ``demo``."""

from memfeed.cli.app import main

__all__ = ["main"]
