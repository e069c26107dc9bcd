"""The contract fails for devices that break it; tests/transfer and tests/cuda show what holds it."""

import pytest
import torch

from memfeed.testing import TransferContract
from memfeed.transfer.transfer import StreamTransfer
from slow_device import SlowDevice


class EventsDoNotWait(SlowDevice):
    def run(self, position):
        pass


def test_a_device_whose_events_do_not_wait_breaks_the_contract():
    with pytest.raises(AssertionError):
        TransferContract().test_batches_arrive_as_they_were_gathered(StreamTransfer(EventsDoNotWait(), {}))


class ReusesMemory(SlowDevice):
    """Does not wait for a copy before the memory is used again."""

    def allocate_page_locked(self, nbytes):
        return torch.zeros(nbytes, dtype=torch.uint8)

    def record_event(self):
        event = super().record_event()
        event.synchronize = lambda: None
        return event

    def wait_before_use(self, event, tensors):
        self.run(event.position)


def test_a_staging_buffer_that_is_used_too_early_breaks_the_contract():
    with pytest.raises(AssertionError):
        TransferContract().test_memory_is_not_used_again_before_its_copy_is_done(
            StreamTransfer(ReusesMemory(), {}, staging_buffers=1), 2
        )
