"""Batches to a device: what waits for what, and what the received batches hold."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memfeed.testing import TransferContract
from memfeed.transfer.transfer import STAGING_BUFFERS, StreamTransfer, Transfer
from slow_device import GARBAGE, SlowDevice
from support import equal

DTYPES = [torch.uint8, torch.bool, torch.int16, torch.float16, torch.bfloat16, torch.float32, torch.int64,
          torch.float64, torch.complex128, torch.float8_e4m3fn]  # fmt: skip


def copies(leaf):
    return [part.clone() for part in leaf]


def memory(transfer, shape, dtype):
    """Return memory for the one column of a batch."""
    return transfer.allocators(1)[0].allocate(shape, dtype)


class TestContract(TransferContract):
    steps = 10  # the staging buffers go round three times

    @pytest.fixture(params=["none", "cpu", "streams", "one buffer"])
    def transfer(self, request):
        if request.param in ("none", "cpu"):
            return Transfer(None if request.param == "none" else torch.device("cpu"))
        return StreamTransfer(SlowDevice(), {}, staging_buffers=1 if request.param == "one buffer" else STAGING_BUFFERS)


def test_the_gather_does_not_wait_while_a_staging_buffer_is_free():
    device = SlowDevice()
    transfer = StreamTransfer(device, {})
    for _ in range(STAGING_BUFFERS):
        transfer.begin_batch()
        transfer.send_batch([memory(transfer, (64,), torch.uint8).fill_(1)])
    assert device.done == 0
    transfer.begin_batch()
    assert device.done == 1, "only the oldest copy"


def test_a_batch_that_could_not_be_gathered_leaves_its_buffer_to_the_next():
    device = SlowDevice()
    transfer = StreamTransfer(device, {}, staging_buffers=1)
    for step in range(5):
        transfer.begin_batch()
        memory(transfer, (100,), torch.uint8)  # then, for example, a corrupt row
        transfer.begin_batch()
        sent = transfer.send_batch([memory(transfer, (64,), torch.uint8).fill_(step)])
        assert transfer.receive_batch(sent, transfer.record_event())[0].tolist() == [step] * 64
    assert device.locked_bytes < 1000


def test_leaves_that_are_no_whole_lease_are_copied_too():
    transfer = StreamTransfer(SlowDevice(), {})
    for step in range(4):
        transfer.begin_batch()
        leased = memory(transfer, (4, 6), torch.int32).copy_(torch.arange(24).view(4, 6) + step)
        leaves = [leased.t(), leased[1:3], torch.arange(5) + step, torch.tensor(step)]
        expected = copies(leaves)
        sent = transfer.send_batch(leaves)
        assert equal(transfer.receive_batch(sent, transfer.record_event()), expected)


def test_a_batch_is_garbage_before_it_is_waited_for():
    transfer = StreamTransfer(SlowDevice(), {})
    transfer.begin_batch()
    sent = transfer.send_batch([memory(transfer, (64,), torch.uint8).fill_(1)])
    event = transfer.record_event()
    assert sent[0].tolist() == [GARBAGE] * 64, "else these tests show nothing"
    assert transfer.receive_batch(sent, event)[0].tolist() == [1] * 64


def test_a_batch_is_one_copy_and_small_leaves_get_memory_of_their_own():
    device = SlowDevice()
    transfer = StreamTransfer(device, {})
    allocators = transfer.allocators(4, [1000, 900, 8, 8])
    for step in range(6):
        transfer.begin_batch()
        shapes = ((8, 1000), torch.uint8), ((8, 900), torch.uint8), ((8,), torch.int64), ((8,), torch.int64)
        images, masks, labels, others = (
            one.allocate(*shape).fill_(step) for one, shape in zip(allocators, shapes, strict=True)
        )
        before = device.copies
        sent = transfer.send_batch([images, masks, labels, others])
        received = transfer.receive_batch(sent, transfer.record_event())
        assert device.copies - before == 2, "the large leaves, and the small ones"
        assert len({leaf.untyped_storage().data_ptr() for leaf in received}) == 2
        assert received[2].untyped_storage().nbytes() == 128, "the labels do not keep the images alive"
        assert received[2].tolist() == [step] * 8
    locked = device.locked_bytes
    for _ in range(20):
        transfer.begin_batch()
        allocators[0].allocate((8, 1000), torch.uint8)
    assert device.locked_bytes == locked, "staging buffers are used again"


def test_many_columns_of_one_size_are_one_copy():
    device = SlowDevice()
    transfer = StreamTransfer(device, {})
    allocators = transfer.allocators(200, [24] * 200)
    for step in range(2 * STAGING_BUFFERS):
        transfer.begin_batch()
        leaves = [one.allocate((16, 3), torch.float64).fill_(step + at) for at, one in enumerate(allocators)]
        before, expected = device.copies, [leaf.clone() for leaf in leaves]
        sent = transfer.send_batch(leaves)
        assert device.copies - before <= (3 if step < STAGING_BUFFERS else 1)
        assert equal(transfer.receive_batch(sent, transfer.record_event()), expected)


def test_labels_beside_text_do_not_keep_the_text_alive():
    transfer = StreamTransfer(SlowDevice(), {})
    text, labels = transfer.allocators(2, [None, 8])
    transfer.begin_batch()
    sent = transfer.send_batch([text.allocate((10_000,), torch.uint8), labels.allocate((8,), torch.int64)])
    assert sent[1].untyped_storage().nbytes() == 64


def test_a_batch_larger_than_all_before_is_copied_too():
    transfer = StreamTransfer(SlowDevice(), {})
    for size in (10, 1000, 5, 100_000, 1000):
        transfer.begin_batch()
        leaves = [memory(transfer, (size,), torch.uint8).copy_(torch.arange(size) % 251) for _ in range(3)]
        expected = [leaf.clone() for leaf in leaves]
        sent = transfer.send_batch(leaves)
        assert equal(transfer.receive_batch(sent, transfer.record_event()), expected)


@settings(max_examples=80)
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 5), max_size=3),
    rows=st.integers(1, 9),
    at=st.integers(0, 3),
    selected=st.lists(st.integers(0, 8), max_size=7),
    narrow=st.booleans(),
)
def test_rows_of_tables_are_selected_on_the_device(dtype, shape, rows, at, selected, narrow):
    step = int(np.prod(shape))
    whole = torch.randint(0, 2, ((rows * step + at) * dtype.itemsize,), dtype=torch.uint8).view(dtype)
    table = whole[at : at + rows * step].view(rows, *shape)  # not every table begins at a multiple of 16
    index = torch.tensor([row % rows for row in selected], dtype=torch.int32 if narrow else torch.int64)
    transfer = StreamTransfer(SlowDevice(), {1: table})
    transfer.begin_batch()
    sent = transfer.send_batch([memory(transfer, (2,), torch.int64).fill_(5), None], {1: index})
    first, found = transfer.receive_batch(sent, transfer.record_event())
    assert first.tolist() == [5, 5]
    assert (found.dtype, found.shape) == (dtype, (len(selected), *shape))
    expected = torch.stack([table[row] for row in index.tolist()]) if selected else table[:0]
    assert torch.equal(found.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))
