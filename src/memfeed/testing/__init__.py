"""For those who test what they build on memfeed: contracts as test classes, and a device that is slow on purpose.

Needs pytest. A contract is a class of tests over a fixture; derive from it and say what the fixture is.
"""

from memfeed.testing.crossing import CrossingContract
from memfeed.testing.equality import equal
from memfeed.testing.slow_device import SlowDevice
from memfeed.testing.store import StoreContract

__all__ = ["CrossingContract", "SlowDevice", "StoreContract", "equal"]
