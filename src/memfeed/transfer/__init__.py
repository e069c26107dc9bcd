"""From CPU memory to a device."""

from memfeed.transfer.devices import check_device
from memfeed.transfer.move import to_device

__all__ = ["check_device", "to_device"]
