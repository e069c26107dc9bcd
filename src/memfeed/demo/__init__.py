"""The demo: one epoch of a small CNN from `DataLoader(ImageFolder)`, and the same epoch from memfeed.

``photos`` makes the images, ``race`` runs and measures, ``result`` holds the numbers, ``table`` and ``picture`` show
them.
"""

from memfeed.demo.result import Lap, Result
from memfeed.demo.run import run

__all__ = ["Lap", "Result", "run"]
