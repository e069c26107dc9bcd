"""The demo: time one epoch of a small CNN from `DataLoader(ImageFolder)` and from memfeed.

``photos`` makes the images, ``compare`` trains on them, ``training`` times one epoch, ``result`` holds the times and
prints them, ``chart`` draws them.
"""

from memfeed.demo.compare import run
from memfeed.demo.result import EpochTiming, Result

__all__ = ["EpochTiming", "Result", "run"]
