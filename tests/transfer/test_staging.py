"""Staging buffers as data: where leaves lie, what crosses in one copy, and when memory may be used again."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memfeed.transfer.packing import ALIGNMENT
from memfeed.transfer.transfer import StagingBuffer, small_columns
from slow_device import SlowDevice


class Counted(SlowDevice):
    """Counts the copies and the pieces of memory."""

    def __init__(self):
        super().__init__()
        self.sizes, self.pieces = [], []

    def copy(self, source):
        self.sizes.append(source.numel())
        return super().copy(source)

    def allocate_staging(self, nbytes):
        self.pieces.append(nbytes)
        return super().allocate_staging(nbytes)


@pytest.mark.parametrize(
    ("sizes", "small"),
    [
        ([], []),
        ([100], [False]),
        ([100, 25], [False, False]),
        ([100, 24], [False, True]),
        ([100, 0], [False, True]),
        ([None, 255, 256], [False, True, False]),
        ([None, 8192], [False, False]),
        ([0, 0], [False, False]),
    ],
)
def test_small_columns(sizes, small):
    assert small_columns(sizes) == small


def sent(buffer, device, parts):
    copied = buffer.copy_to_device(parts)
    device.record_event().synchronize()
    return copied


@settings(max_examples=40)
@given(
    batches=st.lists(
        st.lists(st.tuples(st.integers(0, 300), st.booleans(), st.sampled_from([0, 500])), max_size=5), max_size=4
    )
)
def test_leaves_are_aligned_apart_and_arrive(batches):
    device = Counted()
    buffer = StagingBuffer(device)
    for batch in batches:
        buffer.begin()
        leaves = [
            buffer.allocate((n,), torch.uint8, is_small=small, expected_bytes=expected) for n, small, expected in batch
        ]
        for value, leaf in enumerate(leaves):
            leaf.fill_(value + 1)
            assert not leaf.numel() or leaf.storage_offset() % ALIGNMENT == 0
        found = sent(buffer, device, leaves)
        assert [leaf.tolist() for leaf in found] == [[i + 1] * n for i, (n, _, _) in enumerate(batch)]


def test_two_copies_for_a_batch_one_for_the_small_leaves():
    device = Counted()
    buffer = StagingBuffer(device)
    buffer.begin()
    leaves = [buffer.allocate((1000,), torch.uint8), buffer.allocate((8,), torch.int64, is_small=True)]
    sent(buffer, device, [*leaves, leaves[1]])
    assert sorted(device.sizes) == [64, 1000]


def test_a_larger_batch_takes_two_copies_once():
    device = Counted()
    buffer = StagingBuffer(device)
    for size in (100, 1000, 1000):
        buffer.begin()
        parts = [buffer.allocate((size,), torch.uint8) for _ in range(2)]
        sent(buffer, device, [part.fill_(1) for part in parts])
    count = len(device.sizes)
    buffer.begin()
    sent(buffer, device, [buffer.allocate((1000,), torch.uint8).fill_(1) for _ in range(2)])
    assert len(device.sizes) == count + 1


def test_room_for_what_is_expected_is_taken_at_once():
    device = Counted()
    buffer = StagingBuffer(device)
    buffer.begin()
    for _ in range(4):
        buffer.allocate((500,), torch.uint8, expected_bytes=2000)
    assert len(device.pieces) == 1


def test_leaves_from_elsewhere_are_added():
    device = Counted()
    buffer = StagingBuffer(device)
    buffer.begin()
    image = buffer.allocate((4, 100), torch.uint8).fill_(3)
    own = [image[1:3], image.t(), torch.arange(3), torch.tensor(5), torch.empty(0, 7)]
    found = sent(buffer, device, own)
    assert [one.tolist() for one in found] == [one.tolist() for one in own]
    assert buffer._small.used_bytes > 0  # the numbers are small beside the image


def test_memory_is_not_used_again_before_its_copy_is_done():
    device = SlowDevice()
    buffer = StagingBuffer(device)
    buffer.begin()
    found = buffer.copy_to_device([buffer.allocate((8,), torch.uint8).fill_(1)])
    assert device.done == 0
    buffer.begin()
    assert device.done > 0
    buffer.allocate((8,), torch.uint8).fill_(9)
    assert found[0].tolist() == [1] * 8


def test_a_write_to_one_leaf_keeps_the_gradients_of_another():
    device = Counted()
    buffer = StagingBuffer(device)
    buffer.begin()
    one, other = sent(buffer, device, [buffer.allocate((4,), torch.float32).fill_(1) for _ in range(2)])
    weight = torch.ones(4, requires_grad=True)
    loss = (weight * one).sum()
    other.add_(1)
    loss.backward()
    assert weight.grad.tolist() == [1] * 4
