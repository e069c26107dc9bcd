"""For those who test what they build on memfeed: contracts as test classes, a device that is slow, disks that fail.

A contract is a class of tests over a fixture; derive from it and say what the fixture is (this needs pytest). Faults
are errors at any write, and power losses at any moment: they watch what this process does to files through
`memfeed.files`; worker processes are not watched. ``import memfeed`` does not import this.
"""

from memfeed.testing.crossing import CrossingContract
from memfeed.testing.equality import equal
from memfeed.testing.faults import Faults
from memfeed.testing.powerloss import Recorder, Replay
from memfeed.testing.slow_device import SlowDevice
from memfeed.testing.store import StoreContract
from memfeed.testing.watch import Operation

__all__ = [
    "CrossingContract",
    "Faults",
    "Operation",
    "Recorder",
    "Replay",
    "SlowDevice",
    "StoreContract",
    "equal",
]
