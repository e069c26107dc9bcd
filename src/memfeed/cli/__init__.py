"""The command line: ``memfeed cache``, ``inspect``, ``verify``, ``demo``. ``app`` knows them all."""

from memfeed.cli.app import main

__all__ = ["main"]
