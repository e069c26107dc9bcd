"""The gathers of an epoch: which rows are read together, in our own order or in that of a user's sampler.

One gather makes one batch, or several small ones. Each batch comes with the position reached after it, from which the
epoch can be resumed.

A gather task becomes a group of batches: gather the rows, send them to the device, run the stages.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.utils.data import DistributedSampler, default_collate

from memfeed.errors import LoaderError, RowError, brief
from memfeed.loading.host_labels import HostLabels, KnownLabels
from memfeed.loading.placement import DeviceDecoder, Placement
from memfeed.loading.position import Position, SamplerPosition
from memfeed.loading.samplers import SamplerGenerators, parts_of
from memfeed.loading.stages import Arrival, Draft, Stages
from memfeed.order.buckets import LengthBatches
from memfeed.order.orders import Order, Rows
from memfeed.order.pieces import RankPieces, RankShards, StepRun
from memfeed.random import Keys
from memfeed.schema.codec import Int64Array
from memfeed.store.gather import Gather, split
from memfeed.transfer.transfer import Lag, Transfer

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
            drawn, _ = batch
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


def _draw(drawing: Iterator[Any], size: int | None) -> tuple[Int64Array, list[int] | None] | None:
    """Return the rows of the next batch, int64 [k], and how many each list has in a list of lists; None at the end.

    Raises RowError for anything but ints, and lists of ints.
    """
    if size is None:
        batch = next(drawing, drawing)
        if batch is drawing:
            return None
        try:
            drawn = iter(batch)
        except TypeError:
            raise RowError(f"found {brief(batch)} from a batch sampler; expected a list of row numbers") from None
        rows = list(drawn)
    else:
        rows = [row for _, row in zip(range(size), drawing, strict=False)]
        if not rows:
            return None
    lengths = None
    if rows and all(isinstance(one, list | tuple) for one in rows):
        lengths = [len(one) for one in rows]
        rows = [row for one in rows for row in one]
    try:
        if bool in set(map(type, rows)):  # (flag, row) is an index for a dataset of the user's
            raise TypeError("a bool is none")
        return np.array([operator.index(row) for row in rows], np.int64), lengths
    except (TypeError, OverflowError) as error:
        raise RowError(f"found {brief(rows)} from a sampler; expected row numbers ({error})") from None


class BatchGroup(NamedTuple):
    """Batches of one gather, in order, each with the position reached after it.

    To iterate ``batches`` runs what is left to do in the caller's thread. ``row_count`` is the rows of each batch.
    """

    batches: Iterable[Any]
    positions: Sequence[Position]
    row_count: int


@dataclass(frozen=True)
class BatchMaker:
    """Make the batches of gather tasks.

    Args:
        gather: rows to leaves.
        at_once: how many batches come from one gather.
        stages: leaves to batches.
        assemble: the stage that every batch goes through, for batches that need no other.
        transfer: the way to the device.
        placement: where the columns are.
        lag: keeps the device near the caller, from one epoch to the next; None without a transfer.
        labels: checks labels before they are on the device; None where no transform needs that.
        decoders: the columns whose rows the device decodes, by field index.
    """

    gather: Gather
    at_once: int
    stages: Stages
    assemble: Callable[[Sequence[Any]], Any]
    transfer: Transfer
    placement: Placement
    lag: Lag | None = None
    labels: HostLabels | None = None
    decoders: Mapping[int, DeviceDecoder] = field(default_factory=dict)

    def groups(self, tasks: Iterator[GatherTask], epoch: int, seed: int) -> Iterator[BatchGroup]:
        """Yield the batches of ``tasks``, their keys of ``epoch`` and ``seed``; may run in any thread."""
        for task in tasks:
            if task.lengths is not None:
                yield BatchGroup(self._batch_of_lists(task, epoch, seed), task.positions, len(task.ids))
            elif self.lag is None:
                yield from self._host_groups(task, (seed, epoch))
            else:
                yield from self._stream_groups(task, (seed, epoch), self.lag)

    def _batch_of_lists(self, task: GatherTask, epoch: int, seed: int) -> Iterator[Any]:
        """Return what DataLoader makes of ``dataset[rows]`` of each list, in an iterator of one batch."""
        groups = list(self.groups(task.of_lists(), epoch, seed))

        def collated() -> Iterator[Any]:
            yield default_collate([batch for group in groups for batch in group.batches])

        return collated()

    def _host_groups(self, task: GatherTask, key: tuple[int, int]) -> Iterator[BatchGroup]:
        """Yield the batches of a task that the CPU gathers; a device without streams gets them from the caller."""
        row_count = len(task.ids) // len(task.positions)
        together = self.at_once > 1 and len(task.positions) > 1
        leaves_of_batches = (self.gather.split if together else self.gather.several)(task.ids, task.size)
        if together and self.stages.is_plain and not self.stages.in_caller:
            yield BatchGroup(map(self.assemble, leaves_of_batches), task.positions, row_count)
            return
        yield from self._staged(leaves_of_batches, task, 0, key, None)

    def _stream_groups(self, task: GatherTask, key: tuple[int, int], lag: Lag) -> Iterator[BatchGroup]:
        """Yield the batches of a task that go to a device with streams, ``at_once`` of them in each copy."""
        count = len(task.positions) if self.at_once > 1 else 1
        for first in range(0, len(task.positions), count):
            ids = task.ids[first * task.size : (first + count) * task.size]
            with self.transfer.on_side_stream():
                note_taken = partial(lag.take, lag.begin()) if self.stages.is_plain else None
                self.transfer.begin_batch()
                leaves = self.gather(ids)
                labels = None if self.labels is None else self.labels.copied(leaves)
                leaves = self.transfer.send_batch(leaves, self.placement.index(ids))
                for field_index, decoder in self.decoders.items():
                    leaves[field_index] = decoder(ids)
                arrival = Arrival(leaves, self.transfer.record_event())
            leaves_of_batches = split(leaves, task.size, count) if count > 1 else iter([leaves])
            if not self.stages.is_plain:
                del leaves
                yield from self._staged(leaves_of_batches, task, first, key, arrival, lag, labels)
                continue
            drafts = map(partial(_plain_draft, self.assemble, arrival, note_taken), leaves_of_batches)
            positions = task.positions[first : first + count]
            yield BatchGroup(self.stages.finish(drafts), positions, len(ids) // len(positions))
            del leaves, leaves_of_batches, arrival, drafts  # hold nothing that the caller may have dropped

    def _staged(
        self,
        leaves_of_batches: Iterator[Sequence[Any]],
        task: GatherTask,
        first: int,
        key: tuple[int, int],
        arrival: Arrival | None,
        lag: Lag | None = None,
        labels: KnownLabels | None = None,
    ) -> Iterator[BatchGroup]:
        """Run the stages ahead of the caller's for each batch from batch ``first`` of the task on.

        ``labels`` are those of all these batches; None where the leaves have them.
        """
        for at, leaves in enumerate(leaves_of_batches, first):
            part = slice(at * task.size, (at + 1) * task.size)
            valid = None if task.valid is None else task.valid[part].clone()
            keys = self._keys(task, part, key) if self.stages.needs_keys else None
            rows = torch.from_numpy(task.rows[part].astype(np.int64)) if self.stages.needs_rows else None
            draft = Draft(leaves, keys, valid, rows, arrival)
            if self.labels is not None:
                within = slice((at - first) * task.size, (at - first + 1) * task.size)
                known = self.labels.copied(leaves) if labels is None else {p: one[within] for p, one in labels.items()}
                draft.labels = partial(self.labels.known_to_transforms, known, task.ids[part], task.rows[part])
            del leaves
            with self.transfer.on_side_stream():
                if lag is not None:
                    draft.note_taken = partial(lag.take, lag.begin())
                self.stages.run_ahead(draft)
            yield BatchGroup(self.stages.finish([draft]), (task.positions[at],), len(task.ids[part]))
            del draft

    def _keys(self, task: GatherTask, part: slice, key: tuple[int, int]) -> Keys:
        """Return the keys of one batch under a seed and epoch. A row that comes twice differs by its visit."""
        visits: Any = 0 if task.visits is None else torch.from_numpy(task.visits[part])
        return Keys(*key, torch.from_numpy(task.ids[part].astype(np.int64, copy=False)), visits)


def _plain_draft(
    assemble: Callable[[Sequence[Any]], Any],
    arrival: Arrival,
    note_taken: Callable[[], None] | None,
    leaves: Sequence[Any],
) -> Draft:
    # a function of its own, without a reference to the columns: they may have to make room
    return Draft(assemble(leaves), None, None, arrival=arrival, note_taken=note_taken)
