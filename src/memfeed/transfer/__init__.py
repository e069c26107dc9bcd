"""From CPU memory to a device."""

from memfeed.transfer.crossing import Crossing, Direct, Streamed
from memfeed.transfer.devices import check_device
from memfeed.transfer.move import to_device
from memfeed.transfer.streams import Streams, room, streams_of

__all__ = ["Crossing", "Direct", "Streamed", "Streams", "check_device", "room", "streams_of", "to_device"]
