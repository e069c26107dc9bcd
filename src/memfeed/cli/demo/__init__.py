"""The demo: time a few epochs of a small CNN from `DataLoader(dataset)` and from `memfeed.Loader(dataset, cache=...)`.

``side_by_side`` makes the images and trains on them, ``result`` holds the times, writes them as JSON, and draws them.
"""

from memfeed.cli.demo.result import EpochTiming, Result
from memfeed.cli.demo.side_by_side import run

__all__ = ["EpochTiming", "Result", "run"]
