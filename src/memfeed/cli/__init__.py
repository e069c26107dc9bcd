"""The command line: ``memfeed cache``, ``inspect``, ``verify``, ``demo``. One module per command, and ``app``."""

from memfeed.cli.app import main

__all__ = ["main"]
