"""One turn of a loop: waiting for a batch, its transfer, and the step, each on its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

import optree
import torch

from memfeed.verdict.results import Turn

Batches = Iterable[Any]


class _Marks:
    """Moments on the CPU, or in the stream of a CUDA device, which computes later than Python runs."""

    def __init__(self, device: torch.device | None) -> None:
        self.device = device if device is not None and device.type == "cuda" else None

    def mark(self) -> Any:
        if self.device is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def finish(self) -> None:
        """Wait until all moments have come."""
        if self.device is not None:
            torch.cuda.synchronize(self.device)

    def seconds(self, one: Any, other: Any) -> float:
        return float(other - one) if self.device is None else float(one.elapsed_time(other)) / 1000


def run_turn(
    make: Callable[[], Batches],
    row_counts: list[int],
    step: Callable[[Any], Any] | None,
    device: torch.device | None,
    *,
    first_batches: int,
    seconds: float,
    is_transferred: bool = False,
) -> Turn:
    """Run epochs until ``seconds`` have passed, at least one; return what a row took after the first batches.

    Args:
        make: returns what one epoch iterates over.
        row_counts: the rows of each of its batches.
        first_batches: so many are left out: those that workers make while they start. All count if there are no others.
        is_transferred: True if batches come on the device.
    """
    first_batches = first_batches if len(row_counts) > first_batches else 0
    marks, parts, rows, first_seconds = _Marks(device), [0.0, 0.0, 0.0], 0, []
    started = time.perf_counter()
    while not rows or time.perf_counter() - started < seconds:
        begun = time.perf_counter()
        last, moments = marks.mark(), []
        for number, batch in enumerate(make()):
            if not number:
                first_seconds.append(time.perf_counter() - begun)
            arrived = marks.mark()
            if device is not None and not is_transferred:
                batch = move(batch, device)
            moved = marks.mark()
            if step is not None:
                step(batch)
            done = marks.mark()
            if number >= first_batches:
                moments.append((last, arrived, moved, done))
            last = done
        marks.finish()
        for moment in moments:
            for part in range(3):
                parts[part] += marks.seconds(moment[part], moment[part + 1])
        rows += sum(row_counts[first_batches:])
    waiting, transfer, computing = (part / rows for part in parts)
    first = median(first_seconds)
    return Turn(first, first - waiting * sum(row_counts[: max(1, first_batches)]), waiting, transfer, computing, rows)


def move(batch: Any, device: torch.device) -> Any:
    """Return the batch on the device: all its tensors, in tuples, lists and dicts, and objects with ``to``."""

    def one(leaf: Any) -> Any:
        return leaf.to(device, non_blocking=True) if hasattr(leaf, "to") else leaf

    return optree.tree_map(one, batch)


def batch_rows(row_count: int, batch_size: int) -> list[int]:
    """Return the rows of each batch of an epoch."""
    return [min(batch_size, row_count - start) for start in range(0, row_count, batch_size)]
