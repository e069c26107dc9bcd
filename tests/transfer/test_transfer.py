"""Batches on their way to a device: what waits for what, and what they are made of when they arrive."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memfeed.testing import TransferContract
from memfeed.transfer.transfer import STAGING_BUFFERS, StreamTransfer, SyncTransfer
from slow_device import GARBAGE, SlowDevice
from support import equal

DTYPES = [torch.uint8, torch.bool, torch.int16, torch.float16, torch.bfloat16, torch.float32, torch.int64,
          torch.float64, torch.complex128, torch.float8_e4m3fn]  # fmt: skip


def copied(leaf):
    return [part.clone() for part in leaf]


class TestContract(TransferContract):
    @pytest.fixture(params=["direct", "cpu", "streamed", "one buffer"])
    def crossing(self, request):
        if request.param in ("direct", "cpu"):
            return SyncTransfer(None if request.param == "direct" else torch.device("cpu"))
        return StreamTransfer(SlowDevice(), {}, staging_buffers=1 if request.param == "one buffer" else STAGING_BUFFERS)


def test_the_gather_does_not_wait_while_a_slab_is_free():
    device = SlowDevice()
    crossing = StreamTransfer(device, {})
    for _ in range(STAGING_BUFFERS):
        crossing.begin()
        crossing.send([crossing.lease((64,), torch.uint8).fill_(1)])
    assert device.done == 0
    crossing.begin()
    assert device.done == 1, "only the oldest copy"


def test_a_batch_that_could_not_be_gathered_leaves_its_slab_to_the_next():
    device = SlowDevice()
    crossing = StreamTransfer(device, {}, staging_buffers=1)
    for step in range(5):
        crossing.begin()
        crossing.lease((100,), torch.uint8)  # and then a corrupt row, say
        crossing.begin()
        sent = crossing.send([crossing.lease((64,), torch.uint8).fill_(step)])
        assert crossing.arrive(sent, crossing.mark())[0].tolist() == [step] * 64
    assert device.locked_bytes < 1000


def test_leaves_that_are_no_whole_lease_cross_too():
    crossing = StreamTransfer(SlowDevice(), {})
    for step in range(4):
        crossing.begin()
        leased = crossing.lease((4, 6), torch.int32).copy_(torch.arange(24).view(4, 6) + step)
        leaves = [leased.t(), leased[1:3], torch.arange(5) + step, torch.tensor(step)]
        want = copied(leaves)
        sent = crossing.send(leaves)
        assert equal(crossing.arrive(sent, crossing.mark()), want)


def test_nothing_is_there_before_it_is_waited_for():
    crossing = StreamTransfer(SlowDevice(), {})
    crossing.begin()
    sent = crossing.send([crossing.lease((64,), torch.uint8).fill_(1)])
    event = crossing.mark()
    assert sent[0].tolist() == [GARBAGE] * 64, "else these tests show nothing"
    assert crossing.arrive(sent, event)[0].tolist() == [1] * 64


def test_a_batch_is_one_copy_and_small_leaves_get_memory_of_their_own():
    device = SlowDevice()
    crossing = StreamTransfer(device, {})
    for number in range(6):
        crossing.begin()
        images = crossing.lease((8, 1000), torch.uint8).fill_(number)
        masks = crossing.lease((8, 900), torch.uint8).fill_(number)
        labels = crossing.lease((8,), torch.int64).fill_(number)
        before = device.copies
        sent = crossing.send([images, masks, labels])
        arrived = crossing.arrive(sent, crossing.mark())
        if number >= STAGING_BUFFERS:  # the first round finds out how large a slab has to be
            assert device.copies - before == 2, "the slab, and the labels out of it"
            storages = {leaf.untyped_storage().data_ptr() for leaf in arrived[:2]}
            assert len(storages) == 1
        assert arrived[2].untyped_storage().nbytes() == 64, "who keeps labels keeps no images"
        assert arrived[2].tolist() == [number] * 8
    locked = device.locked_bytes
    for _ in range(20):
        crossing.begin()
        crossing.lease((8, 1000), torch.uint8)
    assert device.locked_bytes == locked, "slabs are used again"


def test_a_batch_larger_than_all_before_crosses_too():
    crossing = StreamTransfer(SlowDevice(), {})
    for size in (10, 1000, 5, 100_000, 1000):
        crossing.begin()
        leaves = [crossing.lease((size,), torch.uint8).copy_(torch.arange(size) % 251) for _ in range(3)]
        want = [leaf.clone() for leaf in leaves]
        sent = crossing.send(leaves)
        assert equal(crossing.arrive(sent, crossing.mark()), want)


@settings(deadline=None, max_examples=80)
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 5), max_size=3),
    rows=st.integers(1, 9),
    at=st.integers(0, 3),
    picked=st.lists(st.integers(0, 8), max_size=7),
    narrow=st.booleans(),
)
def test_rows_of_tables_are_picked_on_the_device(dtype, shape, rows, at, picked, narrow):
    step = int(np.prod(shape))
    whole = torch.randint(0, 2, ((rows * step + at) * dtype.itemsize,), dtype=torch.uint8).view(dtype)
    table = whole[at : at + rows * step].view(rows, *shape)  # not every table begins at a multiple of 16
    index = torch.tensor([row % rows for row in picked], dtype=torch.int32 if narrow else torch.int64)
    crossing = StreamTransfer(SlowDevice(), {1: table})
    crossing.begin()
    sent = crossing.send([crossing.lease((2,), torch.int64).fill_(5), None], index)
    first, found = crossing.arrive(sent, crossing.mark())
    assert first.tolist() == [5, 5]
    assert (found.dtype, found.shape) == (dtype, (len(picked), *shape))
    want = torch.stack([table[row] for row in index.tolist()]) if picked else table[:0]
    assert torch.equal(found.reshape(-1).view(torch.uint8), want.reshape(-1).view(torch.uint8))
