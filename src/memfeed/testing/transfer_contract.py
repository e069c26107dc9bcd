"""The contract of a transfer of batches to a device: see `memfeed.transfer.transfer.Transfer`."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from memfeed.schema.jagged import jagged_tensor
from memfeed.testing.store_contract import equal
from memfeed.transfer.transfer import Transfer


class TransferContract:
    """Tests of a transfer. Derive, and define the fixture ``transfer``.

    Example::

        class TestMine(memfeed.testing.TransferContract):
            @pytest.fixture
            def transfer(self):
                return StreamTransfer(MyStreams(), {})
    """

    steps = 30  # batches that each test sends, and each thread

    @pytest.fixture
    def transfer(self) -> Transfer:
        """Return the transfer to test, a new one for each test."""
        raise NotImplementedError("found no fixture transfer; expected the derived class to define one")

    def send(self, transfer: Transfer, step: int) -> tuple[list[Any], Any, list[Any]]:
        """Send a batch; return its leaves, the event to wait for, and the expected leaves."""
        with transfer.on_side_stream():
            transfer.begin_batch()
            leaves = _gather(transfer, step)
            expected = [_copy(leaf) for leaf in leaves]
            return transfer.send_batch(leaves), transfer.record_event(), expected

    def test_batches_arrive_as_they_were_gathered(self, transfer: Transfer) -> None:
        """Send one batch after another."""
        for step in range(self.steps):
            leaves, event, expected = self.send(transfer, step)
            assert equal(transfer.receive_batch(leaves, event), expected)

    @pytest.mark.parametrize("ahead", [1, 2, 5])
    def test_memory_is_not_used_again_before_its_copy_is_done(self, transfer: Transfer, ahead: int) -> None:
        """Send several batches before the first is received."""
        sent = []
        for step in range(self.steps):
            sent.append(self.send(transfer, step))
            if len(sent) > ahead:
                leaves, event, expected = sent.pop(0)
                assert equal(transfer.receive_batch(leaves, event), expected)
        for leaves, event, expected in sent:
            assert equal(transfer.receive_batch(leaves, event), expected)

    def test_a_received_batch_is_never_written_again(self, transfer: Transfer) -> None:
        """Keep all batches, and compare them at the end."""
        received = []
        for step in range(self.steps):
            leaves, event, expected = self.send(transfer, step)
            received.append((transfer.receive_batch(leaves, event), expected))
        assert all(equal(batch, expected) for batch, expected in received)

    def test_several_threads_send_at_once(self, transfer: Transfer) -> None:
        """Send from five threads, as several iterators of one loader do."""

        def work(first: int) -> None:
            for step in range(first, first + self.steps):
                leaves, event, expected = self.send(transfer, step)
                if not equal(transfer.receive_batch(leaves, event), expected):
                    wrong.append(step)

        wrong: list[int] = []
        threads = [threading.Thread(target=work, args=(self.steps * n,)) for n in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []

    def test_a_write_to_one_leaf_does_not_break_the_backward_of_another(self, transfer: Transfer) -> None:
        """Write to a leaf that may share memory with another, between its forward and its backward."""
        for _ in range(5):  # in the first ones the transfer learns how large a batch is
            with transfer.on_side_stream():
                transfer.begin_batch()
                allocators = transfer.allocators(2)
                sent = transfer.send_batch([one.allocate((8,), torch.float32).fill_(1) for one in allocators])
                event = transfer.record_event()
            first, second = transfer.receive_batch(sent, event)
        weight = torch.ones(8, requires_grad=True, device=first.device)
        loss = (weight * first).sum()
        second.add_(1)
        loss.backward()

    def test_jagged_leaves_of_equal_lengths_still_add_up(self, transfer: Transfer) -> None:
        """Check that they share their offsets."""
        leaves, event, _ = self.send(transfer, 3)
        batch = transfer.receive_batch(leaves, event)
        assert batch[2].offsets() is batch[3].offsets()


def _gather(transfer: Transfer, step: int) -> list[Any]:
    """Return leaves as a gather does: tensors in leased memory, and some with their own memory."""
    allocators = transfer.allocators(6)
    images = allocators[0].allocate((4, 3, 5), torch.uint8).fill_(step)
    labels = allocators[1].allocate((4,), torch.int64).copy_(torch.arange(4) + 10 * step)
    values = allocators[2].allocate((6, 2), torch.float32).fill_(step / 7)
    offsets = torch.tensor([0, 1, 1, 4, 6])
    others = allocators[3].allocate((6,), torch.int16).copy_(torch.arange(6) + step)
    flat = allocators[4].allocate((5,), torch.float64).fill_(step)
    pieces, texts = [flat[:2], None, flat[2:].view(3, 1)], [f"row {row} of {step}" for row in range(4)]
    empty = allocators[5].allocate((4, 0), torch.float32)
    return [images, labels, jagged_tensor(values, offsets), jagged_tensor(others, offsets), pieces, texts, empty]


def _copy(leaf: Any) -> Any:
    if isinstance(leaf, list):
        return [_copy(part) for part in leaf]
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.is_nested:
        return jagged_tensor(leaf.values().clone(), leaf.offsets().clone())  # type: ignore[attr-defined]
    return leaf.clone()
