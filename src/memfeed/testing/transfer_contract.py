"""What every way of batches to a device keeps: see `memfeed.transfer.transfer.Crossing`."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from memfeed.schema.jagged import jagged_tensor
from memfeed.testing.equality import equal
from memfeed.transfer.transfer import Transfer

STEPS = 30


class TransferContract:
    """Derive, and give the fixture ``crossing``.

    Example::

        class TestMine(memfeed.testing.TransferContract):
            @pytest.fixture
            def crossing(self):
                return StreamTransfer(MyStreams(), {})
    """

    @pytest.fixture
    def crossing(self) -> Transfer:
        """The way to test, new for every test."""
        raise NotImplementedError("found no fixture crossing; expected the derived class to define one")

    def send(self, crossing: Transfer, step: int) -> tuple[list[Any], Any, list[Any]]:
        """A batch on its way: its leaves, the event, and what they are to be."""
        with crossing.aside():
            crossing.begin()
            leaves = _leaves(crossing, step)
            want = [_copied(leaf) for leaf in leaves]
            return crossing.send(leaves), crossing.mark(), want

    def test_batches_arrive_as_they_were_gathered(self, crossing: Transfer) -> None:
        """One after another."""
        for step in range(STEPS):
            leaves, event, want = self.send(crossing, step)
            assert equal(crossing.arrive(leaves, event), want)

    @pytest.mark.parametrize("ahead", [1, 2, 5])
    def test_memory_is_not_used_again_before_its_copy_is_done(self, crossing: Transfer, ahead: int) -> None:
        """Several under way."""
        under_way = []
        for step in range(STEPS):
            under_way.append(self.send(crossing, step))
            if len(under_way) > ahead:
                leaves, event, want = under_way.pop(0)
                assert equal(crossing.arrive(leaves, event), want)
        for leaves, event, want in under_way:
            assert equal(crossing.arrive(leaves, event), want)

    def test_what_arrived_is_never_written_again(self, crossing: Transfer) -> None:
        """The caller keeps all batches."""
        held = []
        for step in range(STEPS):
            leaves, event, want = self.send(crossing, step)
            held.append((crossing.arrive(leaves, event), want))
        assert all(equal(batch, want) for batch, want in held)

    def test_several_threads_send_at_once(self, crossing: Transfer) -> None:
        """As several iterators of one loader do."""

        def work(first: int) -> None:
            for step in range(first, first + STEPS):
                leaves, event, want = self.send(crossing, step)
                if not equal(crossing.arrive(leaves, event), want):
                    wrong.append(step)

        wrong: list[int] = []
        threads = [threading.Thread(target=work, args=(STEPS * n,)) for n in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []

    def test_a_write_to_one_leaf_leaves_the_backward_of_another_alone(self, crossing: Transfer) -> None:
        """Whatever memory they share."""
        for _ in range(5):  # the first ones find out how large a batch is
            with crossing.aside():
                crossing.begin()
                lenders = crossing.lenders(2)
                sent = crossing.send([lender.lease((8,), torch.float32).fill_(1) for lender in lenders])
                event = crossing.mark()
            one, other = crossing.arrive(sent, event)
        weight = torch.ones(8, requires_grad=True, device=one.device)
        loss = (weight * one).sum()
        other.add_(1)
        loss.backward()

    def test_jagged_leaves_of_equal_lengths_still_add_up(self, crossing: Transfer) -> None:
        """They share their offsets."""
        leaves, event, _ = self.send(crossing, 3)
        batch = crossing.arrive(leaves, event)
        assert batch[2].offsets() is batch[3].offsets()


def _leaves(crossing: Transfer, step: int) -> list[Any]:
    """What a gather gives: tensors in leased memory, and some beside it."""
    lenders = crossing.lenders(6)
    images = lenders[0].lease((4, 3, 5), torch.uint8).fill_(step)
    labels = lenders[1].lease((4,), torch.int64).copy_(torch.arange(4) + 10 * step)
    values = lenders[2].lease((6, 2), torch.float32).fill_(step / 7)
    offsets = torch.tensor([0, 1, 1, 4, 6])
    others = lenders[3].lease((6,), torch.int16).copy_(torch.arange(6) + step)
    flat = lenders[4].lease((5,), torch.float64).fill_(step)
    pieces, texts = [flat[:2], None, flat[2:].view(3, 1)], [f"row {row} of {step}" for row in range(4)]
    empty = lenders[5].lease((4, 0), torch.float32)
    return [images, labels, jagged_tensor(values, offsets), jagged_tensor(others, offsets), pieces, texts, empty]


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, list):
        return [_copied(part) for part in leaf]
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.is_nested:
        return jagged_tensor(leaf.values().clone(), leaf.offsets().clone())  # type: ignore[attr-defined]
    return leaf.clone()
