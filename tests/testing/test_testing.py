"""The contracts hold for what we write, and fail for what breaks them."""

import pytest
import torch

import memfeed
from memfeed.testing import StoreContract, TransferContract, equal
from memfeed.transfer.transfer import StreamTransfer
from slow_device import SlowDevice
from support import Labelled, Made, Pair, Point, rich_sample


class TestStore(StoreContract):
    types = (Point, Labelled, Pair)

    @pytest.fixture
    def samples(self):
        return [rich_sample(row) for row in range(9)]

    @pytest.fixture
    def path(self, tmp_path, samples):
        memfeed.cache(Made(samples), tmp_path / "a.mf", progress=False)
        return tmp_path / "a.mf"


def test_a_store_of_other_samples_breaks_the_contract(tmp_path):
    samples = [rich_sample(row) for row in range(4)]
    store = memfeed.cache(Made(samples), tmp_path / "a.mf", progress=False)
    with pytest.raises(AssertionError):
        StoreContract().test_it_holds_the_samples(store, samples[:3])
    with pytest.raises(AssertionError):
        StoreContract().test_it_holds_the_samples(store, samples[::-1])


class Impatient(SlowDevice):
    """Its events do not wait."""

    def run(self, number):
        pass


def test_a_device_whose_events_do_not_wait_breaks_the_contract():
    with pytest.raises(AssertionError):
        TransferContract().test_batches_arrive_as_they_were_gathered(StreamTransfer(Impatient(), {}))


class Hasty(SlowDevice):
    """Its memory is not kept until it was copied from."""

    def page_locked(self, nbytes):
        return torch.zeros(nbytes, dtype=torch.uint8)

    def mark(self):
        event = super().mark()
        event.synchronize = lambda: None
        return event

    def arrive(self, event, tensors):
        self.run(event._number)


def test_a_slab_that_is_used_too_early_breaks_the_contract():
    with pytest.raises(AssertionError):
        TransferContract().test_memory_is_not_used_again_before_its_copy_is_done(
            StreamTransfer(Hasty(), {}, staging_buffers=1), 2
        )


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        (torch.ones(2), torch.ones(1, 2)),
        ([torch.ones(1)], (torch.ones(1),)),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (torch.tensor([1.0], dtype=torch.float8_e4m3fn), torch.tensor([2.0], dtype=torch.float8_e4m3fn)),
    ],
)
def test_what_is_not_equal(a, b):
    assert not equal(a, b)
    assert equal(a, a)
    assert equal(b, b)
