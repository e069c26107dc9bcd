"""What to gather next: the rows of the batches of an epoch, from its order or from a user's sampler.

A task is a gather: one batch, or several small ones. Each batch has a mark, the place in the epoch behind it, from
which the epoch can be gone on with.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from memfeed.errors import LoaderError, RowError
from memfeed.loading.samplers import Generators
from memfeed.order.orders import Order
from memfeed.order.shards import Steps
from memfeed.schema.codec import Int64Array

BaseRows = Callable[[Int64Array], Int64Array]


LastBatch = Literal["keep", "drop", "pad"]


class Drawn(NamedTuple):
    """A place in the epoch of a user's sampler: how many rows (of a batch sampler, batches) it has drawn.

    ``start`` are the random generators as they were before, ``hash`` is that of the rows.
    """

    row: int
    start: str
    hash: str


Mark = int | Drawn
"""A place in an epoch; under our own orders how many rows all ranks together have read before it."""


class GatherTask(NamedTuple):
    """One gather: base rows ``ids``, to be split into batches of ``size``, and the mark behind each.

    ``positions`` are those of the rows in the epoch, where a row can come twice; ``valid`` is False for rows that fill
    up a last batch.
    """

    ids: Int64Array
    size: int
    marks: Sequence[Mark]
    positions: Int64Array | None = None
    valid: torch.Tensor | None = None


def of_order(
    order: Order, steps: Steps, begin: int, base_rows: BaseRows | None, at_once: int, *, repeats: bool
) -> Iterator[GatherTask]:
    """An epoch in our own order, from row ``begin`` on; ``at_once`` batches to a task where they are whole.

    ``repeats`` says that the order may visit a row twice.
    """
    for run in steps.runs(begin, at_once):
        last = run.row + run.steps * run.stride
        follow = run.size == run.stride and last <= steps.rows  # positions that follow each other: one rank
        positions = None
        if not follow or repeats or steps.pad_last:
            starts = run.start + run.stride * np.arange(run.steps)
            positions = (starts[:, None] + np.arange(run.size)).ravel()
        ids = order(run.start, last) if positions is None or follow else _at(order, run.row, last, positions)
        yield GatherTask(
            ids if base_rows is None else base_rows(ids),
            run.size,
            range(run.row + run.stride, last + 1, run.stride) if last <= steps.rows else (steps.rows,),
            positions if repeats else None,
            torch.from_numpy(positions < steps.rows) if steps.pad_last and positions is not None else None,
        )


def _at(order: Order, first: int, last: int, positions: Int64Array) -> Int64Array:
    """The rows at positions of [first, last); those beyond the end of the epoch are its first rows again."""
    rows = order(first, min(last, order.n))
    if last <= order.n:
        return rows[positions - first]
    again = order(0, min(last - order.n, order.n))
    at = np.where(positions < order.n, positions - first, len(rows) + (positions - order.n) % len(again))
    return np.concatenate([rows, again])[at]


def of_sampler(
    sampler: Iterable[Any], size: int | None, last: LastBatch, begin: Drawn | None, base_rows: BaseRows
) -> Iterator[GatherTask]:
    """An epoch in the order of a user's sampler, or batch sampler (``size`` None), from ``begin`` on.

    A last batch that is smaller is kept, dropped, or filled up with its own rows.

    Raises LoaderError if the sampler, started again as it was, draws other rows than it did; RowError for what is no
    row.
    """
    generators = Generators(sampler)
    hasher = hashlib.blake2b(digest_size=8)
    if begin is None:
        begin = Drawn(0, generators.states(), "")
        drawing, rows = iter(sampler), 0
    else:
        with generators.as_they_were(begin.start):
            drawing = iter(sampler)
            seen = rows = 0
            while seen < begin.row:
                drawn = _draw(drawing, None if size is None else min(size, begin.row - seen))
                if drawn is None:
                    break
                hasher.update(drawn.tobytes())
                seen += 1 if size is None else len(drawn)
                rows += len(drawn)
        if seen != begin.row or (begin.hash and hasher.hexdigest() != begin.hash):
            raise LoaderError(
                f"found that the sampler ({type(sampler).__name__}) draws other rows than before when started again; "
                "expected the same ones, to resume where it was: give it a generator of its own, or draw all rows at "
                "its start"
            )
    at = begin.row
    while (drawn := _draw(drawing, size)) is not None:
        count, valid = len(drawn), None
        if last == "drop" and size is not None and count < size:
            return
        hasher.update(drawn.tobytes())
        at += 1 if size is None else count
        if last == "pad" and size is not None:
            drawn, valid = np.resize(drawn, size), torch.arange(size) < count
        positions = np.arange(rows, rows + len(drawn))
        rows += count
        mark = Drawn(at, begin.start, hasher.hexdigest())
        yield GatherTask(base_rows(drawn), max(len(drawn), 1), (mark,), positions, valid)


def _draw(drawing: Iterator[Any], size: int | None) -> Int64Array | None:
    """The rows of the next batch, int64; None at the end."""
    if size is None:
        batch = next(drawing, None)
        return None if batch is None else _numbers(batch)
    held = [row for _, row in zip(range(size), drawing, strict=False)]
    return _numbers(held) if held else None


def _numbers(rows: Any) -> Int64Array:
    """What a sampler yielded, as int64 [k]. Raises RowError for anything but ints."""
    try:
        return np.array([operator.index(row) for row in rows], np.int64)
    except (TypeError, OverflowError) as error:
        raise RowError(f"found {rows!r} from a sampler; expected row numbers ({error})") from None
