"""The demo: time one epoch of a small CNN from `DataLoader(ImageFolder)` and from memfeed.

``photos`` makes the images, ``side_by_side`` trains on them, ``result`` holds the times, ``chart`` draws
them.
"""

from memfeed.cli.demo.result import EpochTiming, Result
from memfeed.cli.demo.side_by_side import run

__all__ = ["EpochTiming", "Result", "run"]
