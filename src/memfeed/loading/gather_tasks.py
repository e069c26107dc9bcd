"""The gathers of an epoch: which rows are read together, in our own order or in that of a user's sampler.

One gather makes one batch, or several small ones. Each batch comes with the position reached after it, from which the
epoch can be resumed.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.utils.data import DistributedSampler

from memfeed.errors import LoaderError, RowError, brief
from memfeed.loading.position import Position, SamplerPosition
from memfeed.loading.samplers import SamplerGenerators, parts_of
from memfeed.order.buckets import LengthBatches
from memfeed.order.orders import Order, Rows
from memfeed.order.pieces import RankPieces
from memfeed.order.shards import RankShards, StepRun
from memfeed.schema.codec import Int64Array

BaseRows = Callable[[Int64Array], Int64Array]
LastBatch = Literal["keep", "drop", "pad"]
SPAN_ROWS = 1 << 16  # positions that all ranks read together; of more, only this rank's own are asked for


class GatherTask(NamedTuple):
    """One gather, to be split into batches.

    Args:
        ids: rows of the base store, int [k].
        rows: the same rows as the loader counts them: rows of its store, which may be a view; int [k].
        size: rows of each batch.
        positions: the position reached after each batch.
        visits: the positions of the rows in the epoch, int64 [k], where a row can come twice; else None.
        valid: False for the rows that only fill up a last batch, bool [k]; None where all count.
        lengths: the rows of each list, where a batch sampler drew a list of lists of rows; else None.
    """

    ids: Int64Array
    rows: Int64Array
    size: int
    positions: Sequence[Position]
    visits: Int64Array | None = None
    valid: torch.Tensor | None = None
    lengths: Sequence[int] | None = None

    def of_lists(self) -> Iterator[GatherTask]:
        """Yield a task for each of the lists. None of them is a batch, so none has a position."""
        stop = 0
        for length in self.lengths or ():
            part = slice(stop, stop := stop + length)
            visits, valid = self.visits, self.valid
            yield GatherTask(
                self.ids[part],
                self.rows[part],
                max(length, 1),
                self.positions,
                None if visits is None else visits[part],
                None if valid is None else valid[part],
            )


def tasks_of_order(
    order: Order, shards: RankShards, begin: int, base_rows: BaseRows | None, at_once: int, *, repeats: bool
) -> Iterator[GatherTask]:
    """Yield the gathers of an epoch in our own order, from row ``begin`` on.

    ``at_once`` whole batches go into one task. ``repeats`` says that the order may visit a row twice.
    """
    for run in shards.runs(begin, at_once):
        last = run.row + run.steps * run.stride
        consecutive = run.size == run.stride and last <= shards.rows  # one rank reads all positions
        places, pads = None, shards.last == "pad"
        if not consecutive or repeats or pads:
            starts = run.start + run.stride * np.arange(run.steps)
            places = (starts[:, None] + np.arange(run.size)).ravel()
        rows = order(run.start, last) if places is None or consecutive else rows_of_run(order, run, places)
        yield GatherTask(
            rows if base_rows is None else base_rows(rows),
            rows,
            run.size,
            range(run.row + run.stride, last + 1, run.stride) if last <= shards.rows else (shards.rows,),
            places if repeats else None,
            torch.from_numpy(places < shards.rows) if pads and places is not None else None,
        )


def tasks_of_batches(
    batches: LengthBatches, shards: RankShards, begin: int, base_rows: BaseRows | None, *, repeats: bool
) -> Iterator[GatherTask]:
    """Yield the gathers of an epoch whose batches are drawn already, from batch ``begin`` on.

    ``shards`` counts batches. After the end the first batches come again, so that the ranks stay in step.
    """
    for run in shards.runs(begin, 1):
        rows, places = batches[run.start % batches.n]
        yield GatherTask(
            rows if base_rows is None else base_rows(rows),
            rows,
            len(rows),
            (min(run.row + run.stride, shards.rows),),
            places if repeats else None,
            torch.full((len(rows),), run.start < batches.n, device="cpu") if shards.last == "pad" else None,
        )


def rows_of_run(order: Order, run: StepRun, places: Int64Array) -> Rows:
    """Return the rows at ``places``, those of a run; after the end of the epoch its first rows come again.

    What is held meanwhile does not grow with the number of ranks.
    """
    if isinstance(order, RankPieces):
        return order.at(places % order.n)
    stop = run.start + (run.steps - 1) * run.stride + run.size
    if stop <= order.n and stop - run.row <= SPAN_ROWS:
        return order(run.row, stop)[places - run.row]
    # copies: an order may give views of many more rows
    parts = [_around(order, start, run.size).copy() for start in places[:: run.size].tolist()]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _around(order: Order, start: int, count: int) -> Rows:
    """Return ``count`` rows from position ``start`` on, going on at the beginning after the end."""
    parts = []
    while count:
        start %= order.n
        parts.append(order(start, min(start + count, order.n)))
        start, count = start + len(parts[-1]), count - len(parts[-1])
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def tasks_of_sampler(
    sampler: Iterable[Any],
    size: int | None,
    last: LastBatch,
    begin: SamplerPosition | None,
    base_rows: BaseRows,
    why_no_lists: str = "",
) -> Iterator[GatherTask]:
    """Yield the gathers of an epoch in the order of a user's sampler, or batch sampler (``size`` None).

    A last batch that is smaller is kept, dropped, or filled up with its own rows. Raises LoaderError if the sampler,
    started again from the saved random states, draws other rows than before; RowError for what is no row number, and
    for lists of lists of rows if ``why_no_lists`` says why they are no batch.
    """
    generators, hasher = SamplerGenerators(sampler), hashlib.blake2b(digest_size=8)
    # ranks share one state, and each draws rows of its own
    hashes = not any(isinstance(one, DistributedSampler) for one in parts_of(sampler))
    if begin is None:
        begin = SamplerPosition(0, generators.states(), "")
        drawing, row_count = iter(sampler), 0
    else:
        states = begin.generators or generators.states()  # none are known where batches are skipped before the first
        drawing, row_count = _redrawn(sampler, size, last, begin, generators, hasher)
        begin = begin._replace(generators=states)
    at = begin.row
    while (batch := _draw(drawing, size)) is not None:
        drawn, lengths = batch
        count, valid = len(drawn), None
        if lengths is not None and why_no_lists:
            raise RowError(f"found lists of {lengths[0]} rows from a sampler; expected row numbers: {why_no_lists}")
        if last == "drop" and size is not None and count < size:
            return
        if hashes:
            hasher.update(drawn.tobytes())
        at += 1 if size is None else count
        if last == "pad" and size is not None:
            drawn, valid = np.resize(drawn, size), torch.arange(size, device="cpu") < count
        visits = np.arange(row_count, row_count + len(drawn))
        row_count += count
        position = SamplerPosition(at, begin.generators, hasher.hexdigest() if hashes else "")
        yield GatherTask(base_rows(drawn), drawn, max(len(drawn), 1), (position,), visits, valid, lengths)


def _redrawn(
    sampler: Iterable[Any],
    size: int | None,
    last: LastBatch,
    begin: SamplerPosition,
    generators: SamplerGenerators,
    hasher: Any,
) -> tuple[Iterator[Any], int]:
    """Draw again what was drawn before ``begin``. Return the sampler's iterator there, and the rows it gave."""
    with generators.in_states(begin.generators) if begin.generators else nullcontext():
        drawing = iter(sampler)
        seen = row_count = 0
        while seen < begin.row:
            batch = _draw(drawing, None if size is None else min(size, begin.row - seen))
            if batch is None:
                break
            drawn = batch.rows
            hasher.update(drawn.tobytes())
            seen += 1 if size is None else len(drawn)
            row_count += len(drawn)
    if seen < begin.row and not begin.drawn_hash:  # batches were skipped, or rows that each rank draws are not hashed
        most = 0 if size is None or last == "drop" else size - 1  # the last batch may be smaller
        if begin.row > seen + most:
            raise LoaderError(
                f"found that the sampler ({type(sampler).__name__}) draws {seen} {'rows' if size else 'batches'}; "
                f"expected at least {begin.row - most}, to go on after the position: skip fewer batches, or pass the "
                "sampler of the saved state"
            )
        return drawing, row_count
    if seen != begin.row or (begin.drawn_hash and hasher.hexdigest() != begin.drawn_hash):
        raise LoaderError(
            f"found that the sampler ({type(sampler).__name__}) draws other rows than before when started again; "
            "expected the same ones, to resume from the saved position: give it a generator of its own, or draw all "
            "rows at its start"
        )
    return drawing, row_count


class _Drawn(NamedTuple):
    """The rows of a batch, int64 [k], and the rows of each list where they came as a list of lists; else None."""

    rows: Int64Array
    lengths: Sequence[int] | None


def _draw(drawing: Iterator[Any], size: int | None) -> _Drawn | None:
    """Return the rows of the next batch; None at the end."""
    if size is None:
        batch = next(drawing, None)
        return None if batch is None else _drawn(batch)
    held = [row for _, row in zip(range(size), drawing, strict=False)]
    return _drawn(held) if held else None


def _drawn(batch: Any) -> _Drawn:
    """Return the rows that a sampler yielded. Raises RowError for anything but ints, and lists of ints."""
    batch = list(batch)
    if batch and all(isinstance(one, list | tuple) for one in batch):
        return _Drawn(_row_numbers([row for one in batch for row in one]), [len(one) for one in batch])
    return _Drawn(_row_numbers(batch), None)


def _row_numbers(rows: Sequence[Any]) -> Int64Array:
    try:
        return np.array([operator.index(row) for row in rows], np.int64)
    except (TypeError, OverflowError) as error:
        raise RowError(f"found {brief(rows)} from a sampler; expected row numbers ({error})") from None
