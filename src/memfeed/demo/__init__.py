"""The demo: time one epoch of a small CNN from `DataLoader(ImageFolder)` and from memfeed.

``photos`` makes the images, ``compare`` trains on them, ``training`` times one epoch, ``result`` holds the times and
prints them, ``chart`` draws them.
"""

from memfeed.demo.result import EpochTiming, Result
from memfeed.demo.side_by_side import run

__all__ = ["EpochTiming", "Result", "run"]
