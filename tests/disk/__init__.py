"""Disks that fail, for the tests: errors at any write, and power losses at any moment.

They watch what this process does to files through `memfeed.system.files`; worker processes are not watched.
"""

from disk.faults import Faults
from disk.powerloss import Recorder, Replay
from disk.watch import Operation

__all__ = ["Faults", "Operation", "Recorder", "Replay"]
