"""A store in the making: rows in any order from many processes, presence, sync points, commit.

A build lives in ``NAME.build`` beside the store it becomes. Whatever dies, the next one to open it goes on from the
rows that are there.
"""

from memfeed.build.build import Build, Settings, runs
from memfeed.build.claim import claim, clear
from memfeed.build.commit import finish_interrupted, sweep
from memfeed.build.rows import ABSENT, DURABLE, SKIPPED, WRITTEN, Rows

__all__ = [
    "ABSENT",
    "DURABLE",
    "SKIPPED",
    "WRITTEN",
    "Build",
    "Rows",
    "Settings",
    "claim",
    "clear",
    "finish_interrupted",
    "runs",
    "sweep",
]
