"""Wait for the rows of a store that is being filled: the one thing that a loader adds for such a store."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator

import numpy as np
import torch

from memfeed.loading.gather_tasks import GatherTask
from memfeed.store.row_supply import ReadRequest, RowSupply
from memfeed.store.store import Store

ROWS_AHEAD = 1 << 16  # rows of the order that the filling processes are told ahead of the loader
ROWS_AT_ONCE = 1 << 13  # that they are told at once, far ahead: neighbours among them are fetched by one request
SAMPLER_BATCHES_AHEAD = 16  # of a user's sampler, which draws them in the caller's thread


def present_tasks(tasks: Iterator[GatherTask], store: Store, *, has_own_order: bool) -> Iterator[GatherTask]:
    """Yield ``tasks`` once their rows are there. Those of the next ones are asked for ahead, if processes read them.

    If the store masks rows, one that was skipped is replaced by another, and ``valid`` is False for it.
    """
    supply, reader, held = store._view.supply, store._view.reader(), deque[GatherTask]()
    if supply is None:
        yield from map(_all_valid, tasks)
        return
    if supply.in_caller:  # nobody is told: a user's sampler is drawn as DataLoader without workers draws it
        for task in tasks:
            yield _present(task, supply, reader, masks=store._backing.masks_rows)
        return
    rows_held, untold = 0, list[GatherTask]()
    is_finalizing = sys.is_finalizing  # an iterator that lives on ends after the modules have lost their names
    try:
        for task in tasks:
            held.append(task)
            untold.append(task)
            rows_held += len(task.ids)
            is_soon = rows_held <= ROWS_AHEAD or not has_own_order
            if is_soon or sum(len(one.ids) for one in untold) >= ROWS_AT_ONCE:
                _tell(untold, supply, reader)
            while held and (rows_held > ROWS_AHEAD or (not has_own_order and len(held) > SAMPLER_BATCHES_AHEAD)):
                rows_held -= len(held[0].ids)
                yield _present(held.popleft(), supply, reader, masks=store._backing.masks_rows)
        _tell(untold, supply, reader)
        while held:
            yield _present(held.popleft(), supply, reader, masks=store._backing.masks_rows)
    finally:
        if not is_finalizing():
            supply.forget(reader)


def _tell(untold: list[GatherTask], supply: RowSupply, reader: ReadRequest) -> None:
    for task in untold:
        supply.want(reader, task.ids)
    untold.clear()


def _present(task: GatherTask, supply: RowSupply, reader: ReadRequest, *, masks: bool) -> GatherTask:
    """Return a task whose rows are all there."""
    present = supply.wait(reader, task.ids)
    if present is not None:
        task = task._replace(ids=np.where(present, task.ids, supply.substitute_row()))
    if not masks:
        return task
    task = _all_valid(task)
    return task if present is None else task._replace(valid=task.valid & torch.from_numpy(present))  # type: ignore[operator]


def _all_valid(task: GatherTask) -> GatherTask:
    """Return a task that says which rows count."""
    if task.valid is not None:
        return task
    return task._replace(valid=torch.ones(len(task.ids), dtype=torch.bool, device="cpu"))
