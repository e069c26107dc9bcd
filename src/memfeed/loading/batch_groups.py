"""From gather tasks to groups of batches: gather the rows, send them to the device, run the stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import default_collate

from memfeed.loading.gather_tasks import GatherTask
from memfeed.loading.host_labels import BatchLabels, HostLabels, KnownLabels
from memfeed.loading.placement import Placement
from memfeed.loading.position import Position
from memfeed.loading.stages import Arrival, Draft, Stages
from memfeed.random import Keys
from memfeed.store.gather import Gather, split
from memfeed.transfer.transfer import Lag, Transfer

if TYPE_CHECKING:
    from memfeed.loading.device_decode import DeviceDecoder


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
                draft.labels = BatchLabels(self.labels, known, task.ids[part], task.rows[part])
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
