"""Find out if samples can be stored: whether they are random, share memory, or depend on their worker.

A store keeps one draw of a random sample for every epoch. A dataset that fills one buffer for all samples has only the
last of them. A sample may ask `torch.utils.data.get_worker_info` for its worker: the seed of a worker of a DataLoader
is another one in each epoch, and so may be the worker that reads a sample.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils import worker as torch_worker

from memfeed.convert.changes import OwnStateError, Watched
from memfeed.convert.inputs import has_one_pass, read_sample, reading_together
from memfeed.convert.watchdog import Watchdog
from memfeed.convert.write_run import WritePlan
from memfeed.errors import RandomDataError, SampleError, SchemaError, listed
from memfeed.schema import values
from memfeed.schema.compare import Difference, difference, equal
from memfeed.schema.containers import map_leaves
from memfeed.schema.fields import Path, display
from memfeed.schema.infer import infer
from memfeed.schema.tree import open_container
from memfeed.splitting.generators import GLOBAL, Generators, drawing_line, kept_draw
from memfeed.system.signals import is_of_handler

_IMMUTABLE = (type(None), bool, int, float, complex, str, bytes, np.generic)


def share_memory(samples: Iterable[Any]) -> bool:
    """Return True if two of some samples are in the same memory, or have the same list, dict or other object."""
    seen: set[int] = set()
    for sample in samples:
        places: set[int] = set()
        _collect(sample, places)
        if places & seen:
            return True
        seen |= places
    return False


def _collect(value: Any, places: set[int]) -> None:
    """Add the addresses of what can be written to in a sample: tensors, arrays, and objects that can change."""
    if isinstance(value, _IMMUTABLE):
        return
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided and not value.is_nested and value.numel():
            places.add(value.data_ptr())
        return
    if isinstance(value, np.ndarray):
        if value.size:
            places.add(value.__array_interface__["data"][0])
        return
    if not isinstance(value, tuple):
        if id(value) in places:  # it occurs twice, or contains itself
            return
        places.add(id(value))
    try:
        opened = open_container(value)
    except SchemaError:  # the conversion refuses this sample, with its index
        return
    for part in opened[1] if opened is not None else ():
        _collect(part, places)


_asked = 0


class _CountingInfo(torch_worker.WorkerInfo):
    """Counts how often the number of the worker or its seed is asked for."""

    def __getattribute__(self, name: str) -> Any:
        global _asked
        if name in ("id", "seed"):
            _asked += 1
        return super().__getattribute__(name)


def set_worker_info(worker: int, worker_count: int, seed: int, dataset: Any) -> None:
    """Let this process be a worker for `get_worker_info`. Torch has no public way to set that."""
    torch_worker._worker_info = _CountingInfo(id=worker, num_workers=worker_count, seed=seed, dataset=dataset)


def times_asked() -> int:
    """Return how often this process has asked for the number or the seed of its worker."""
    return _asked


@contextlib.contextmanager
def as_worker(worker: int, worker_count: int, seed: int, dataset: Any) -> Iterator[None]:
    """Let this process be a worker within the block; then it is what it was before."""
    before = torch_worker._worker_info
    set_worker_info(worker, worker_count, seed, dataset)
    try:
        yield
    finally:
        torch_worker._worker_info = before


def as_another_worker() -> contextlib.AbstractContextManager[None]:
    """Let this worker have another number and another seed within a block, as in another epoch."""
    info: Any = torch_worker._worker_info
    if info is None:
        return contextlib.nullcontext()
    return as_worker((info.id + 1) % info.num_workers, info.num_workers, info.seed + info.num_workers, info.dataset)


Read = Callable[[], Any]
REPEATED = 3  # samples that are read a second time under another seed, at least
REPEATS_OF_DRAWS = 4
_ASKS = ", as it depends on torch.utils.data.get_worker_info()"
RECHECK_SECONDS = 1.0
_STREAM_BLOCK = 16  # samples of an iterable
_TOGETHER = 8  # samples that are read by __getitems__ too, for as long as they take less than the following
_TOGETHER_SECONDS = 0.1


def read_checked(
    dataset: Any, index: int, read: Read, generators: Generators, repeat: bool, watched: Watched | None, is_first: bool
) -> Any:
    """Return a copy of ``read()``, which reads sample `index`. Raise RandomDataError if the sample is random.

    It is random if its values differ when it is read again under another seed, or if reading it drew from a global
    generator that it had not seeded itself: a rare flip would be kept as it happened to be. Draws from its own
    generators alone are no reason: albumentations draws before steps that always run. It is read again once if
    `repeat`, and four times if it drew from any of the ``generators``: a dataset that draws no more has kept what it
    drew. ``watched`` knows if the dataset's data has changed.
    """
    with generators.preserved():
        before = generators.seeded(index, 0)
        sample = map_leaves(values.copy_value, read())  # the dataset may fill the same memory again
        has_drawn = bool(generators.moved(before, end := generators.save()))
        is_kept = has_drawn and not is_first  # the first sample may draw for all of them
        for attempt in range(REPEATS_OF_DRAWS if has_drawn else int(repeat)):
            begin = generators.seeded(index, attempt + 1)
            differs = _difference(sample, map_leaves(values.copy_value, read()))  # a copy of a Parameter is a tensor
            if differs is not None:
                if has_drawn:
                    raise _random(dataset, _differs(index, differs.path))
                raise _own(dataset, _differs(index, differs.path), watched.changed_by_reading() if watched else [])
            # a dataset that seeds a generator itself leaves it in one state, whatever the seed was before
            again = generators.save()
            if generators.moved(begin, again) & generators.moved(end, again) & GLOBAL:
                raise _draws(dataset, index, generators)
            is_kept = is_kept and not generators.moved(begin, again)
        if is_kept and generators.drawn_from(before, end):
            raise _random(dataset, kept_draw(index))
    return sample


def _own(dataset: Any, found: str, attributes: Sequence[str]) -> OwnStateError:
    """Return the error for a sample that differs though no global generator moved."""
    if not attributes:
        hint = (
            "no global generator moved: it has a generator of its own, or writes to its own data (then return a copy)"
        )
        return OwnStateError(*_random(dataset, f"{found}, and {hint}").args)
    first = attributes[0] if attributes[0].isidentifier() else "data"
    changed = listed([f"dataset.{one}" for one in attributes])
    return OwnStateError(
        f"found that the dataset changes its own data when it is read: {found}, no generator moved, and {changed} has "
        "other values than before; expected data that stays as it is, because a store keeps what is read first. Write "
        f"to a copy in __getitem__: x = self.{first}[i].clone(), or .copy() of an array; or pass allow='random' to "
        "keep what comes first"
    )


def require_same_together(dataset: Any, rows: Sequence[int]) -> None:
    """Raise SchemaError if samples that are read together, as DataLoader reads a batch, differ from ``dataset[i]``.

    Without ``__getitems__`` they are read one by one. Some of ``rows`` are read, for a moment.
    """
    inner, started = reading_together(dataset), time.monotonic()
    if inner is None:
        return
    generators = Generators(dataset)
    with generators.preserved(), contextlib.suppress(SampleError):
        generators.seed(0)
        alone: list[Any] = []
        for row in rows[:_TOGETHER]:
            if len(alone) < 2 or time.monotonic() - started < _TOGETHER_SECONDS:
                alone.append(map_leaves(values.copy_value, read_sample(dataset, row, Watchdog(0))))
        generators.seed(0)
        try:
            batch = dataset.__getitems__(list(rows[: len(alone)]))
            together = [] if isinstance(batch, dict) else list(batch)
        except Exception as error:  # they are read one by one then
            if is_of_handler(error):
                raise
            return
        found = f"a {type(batch).__name__}" if isinstance(batch, dict) else ""
        if not found and share_memory(together):
            return  # as above
        if not found and len(together) != len(alone):
            found = f"{len(together)} samples of {len(alone)}"
        for row, one, other in () if found else zip(rows, alone, together, strict=False):
            differs = _difference(one, other)
            if differs is not None:
                found = f"another sample {row} than dataset[{row}]: {differs}"
                break
        if found:
            raise SchemaError(
                f"found that {type(inner).__name__}.__getitems__, by which a batch is read, gives {found}; expected "
                "the samples that dataset[i] gives, because a store keeps each by itself: pad, mix and draw for a "
                "whole batch in a collate_fn"
            )


def check_iterable(dataset: Any) -> StreamDraws:
    """Raise RandomDataError if an iterable gives other samples under another seed, unless it is its own iterator.

    Return what notices later samples that are random, and those of an iterable that is its own iterator.
    """
    generators = Generators(dataset)
    with generators.preserved():
        start, one_pass, states = generators.seeded(0), iter(dataset), generators.save()
        begin, another, others = generators.seeded(1), iter(dataset), generators.save()
        if one_pass is another:
            return StreamDraws(dataset, generators, generators.moved(start, begin) - generators.moved(states, others))
        generators.restore(states)
        first = [map_leaves(values.copy_value, sample) for sample in itertools.islice(one_pass, REPEATED)]
        end = generators.save()
        generators.restore(others)
        second = [map_leaves(values.copy_value, sample) for sample in itertools.islice(another, REPEATED)]
        last = generators.save()
        if len(second) < len(first):
            raise SchemaError(
                f"found {len(first)} samples or more in the first pass over the iterable and {len(second)} in another; "
                "expected each iter() to start from the beginning: make __iter__ open its source itself"
            )
        for index, (one, other) in enumerate(zip(first, second, strict=True)):
            differs = _difference(one, other)
            if differs is not None:
                where = f"in field {display(differs.path)} of sample {index}"
                raise _random(dataset, f"iterating twice gave different values {where}")
        if generators.moved(begin, last) & generators.moved(end, last):
            raise _random(dataset, "iterating draws random numbers, though it gave the same values so far")
        return StreamDraws(dataset, generators, generators.moved(start, end))


class StreamDraws:
    """Notices that an iterable draws after the samples that `check_iterable` compares: a shuffle buffer, for example.

    Args:
        dataset: the iterable.
        generators: that it had before it was iterated.
        seeded: those that it seeds itself when it is iterated.
    """

    def __init__(self, dataset: Any, generators: Generators, seeded: set[int]) -> None:
        self._dataset, self._generators, self._seeded = dataset, generators, seeded

    def __reduce__(self) -> Any:
        return StreamDraws, (self._dataset, Generators(), self._seeded & GLOBAL)

    def __iter__(self) -> Iterator[Any]:
        """Iterate in another process. Its generators begin in the same states in each epoch, but the global ones."""
        self._generators, self._seeded = Generators(), self._seeded & GLOBAL
        return self.watched(iter(self._dataset))

    def watched(self, samples: Iterator[Any]) -> Iterator[Any]:
        """Yield samples. Raise RandomDataError if a generator that the iterable does not seed has moved meanwhile."""
        before, count = self._generators.save(), 0
        for count, sample in enumerate(samples, 1):
            if count % _STREAM_BLOCK == 0:
                self._check(before, count)
            yield sample
        self._check(before, count)

    def _check(self, before: list[Any], count: int) -> None:
        if self._generators.moved(before, self._generators.save()) - self._seeded and not has_one_pass(self._dataset):
            raise _random(self._dataset, f"iterating draws random numbers among its first {count} samples")


class Draws:
    """Notices, while a dataset is converted, samples that draw from a generator, and reads these again.

    The probe reads only some samples. This finds a random sample anywhere, if it draws from a global generator or from
    one that the dataset holds, or asks for the seed of its worker. Each process spends at most ``RECHECK_SECONDS`` on
    reading again: where all samples draw and none of those differs, the others are not read again.
    """

    def __init__(self, dataset: Any, plan: WritePlan) -> None:
        self._dataset, self._seconds_left = dataset, RECHECK_SECONDS if plan.refuse_random else 0.0
        self._paths = list(plan.flattener.structure.leaves())
        self._generators: Generators | None = None
        self._before: list[Any] | None = None
        self._has_read, self._asked = False, 0

    def begin(self) -> None:
        """Remember the state of the generators before some samples are read."""
        self._before = None
        if self._seconds_left <= 0:
            return
        if self._generators is None or not self._has_read:
            self._has_read = self._generators is not None  # the first sample may make generators
            self._generators = Generators(self._dataset)
        self._before, self._asked = self._generators.save(), times_asked()

    def check(self, read: Mapping[int, Sequence[Any]], read_again: Callable[[int], Sequence[Any]]) -> None:
        """Raise RandomDataError if one of the samples `read` since ``begin`` is random.

        `read` has the leaves of each sample by its index, and ``read_again(index)`` returns them of another read.
        """
        if self._before is None or self._generators is None:
            return
        started, end, generators, index = time.monotonic(), self._generators.save(), self._generators, 0
        asks = times_asked() != self._asked
        drew = generators.moved(self._before, end)
        if not asks and not drew:
            return
        with generators.preserved(), as_another_worker():
            begin = generators.seeded(next(iter(read), 0), 1)
            for index, leaves in read.items():
                if time.monotonic() - started > self._seconds_left:
                    break
                try:
                    again = read_again(index)
                except SampleError:  # a sample that raises now and then is not random
                    continue
                for path, one, other in zip(self._paths, leaves, again, strict=True):
                    if not equal(one, other):
                        raise _random(self._dataset, _differs(index, path) + _ASKS * (asks and not drew))
            else:
                last = generators.save()
                if drew & generators.moved(begin, last) & generators.moved(end, last) & GLOBAL:
                    raise _draws(self._dataset, self._drawing(read, read_again), generators)
        self._seconds_left -= time.monotonic() - started

    def _drawing(self, indices: Iterable[int], read_again: Callable[[int], Sequence[Any]]) -> int:
        """Return the first of some samples that draws from a global generator; one of them does."""
        assert self._generators is not None
        index = 0
        for index in indices:
            before = self._generators.save()
            with contextlib.suppress(SampleError):
                read_again(index)
            if self._generators.moved(before, self._generators.save()) & GLOBAL:
                break
        return index


def _difference(sample: Any, again: Any) -> Difference | None:
    """Return where two reads of a sample differ. None too if no store can hold it: the conversion says so later."""
    try:
        infer([sample])
    except SchemaError:
        return None
    return difference(sample, again)


def _differs(index: int, path: Path) -> str:
    return f"reading sample {index} twice gave different values in field {display(path)}"


def _draws(dataset: Any, index: int, generators: Generators) -> RandomDataError:
    where = drawing_line(dataset.__getitem__, [index], generators)
    found = f"reading sample {index} draws random numbers{where}, though it gave the same values so far"
    return _random(dataset, found)


def _random(dataset: Any, found: str) -> RandomDataError:
    shown = f" (its transform: {transforms})" if (transforms := describe_transforms(dataset)) else ""
    return RandomDataError(
        f"found random samples: {found}{shown}; "
        "expected samples that are the same each time, because a store keeps what the dataset returns once, for every "
        "epoch. Move the random part (crops, flips, jitter, noise) to Loader(..., transform=...), which draws again "
        "for every sample and epoch; or pass allow='random' to memfeed.cache to keep this one draw for all epochs; or "
        "read the dataset by a DataLoader"
    )


def describe_transforms(dataset: Any) -> str:
    """Return the transforms of a dataset and of those it wraps, as they print."""
    shown, seen = list[str](), set[int]()
    while dataset is not None and id(dataset) not in seen:
        seen.add(id(dataset))
        for name in ("transform", "target_transform", "transforms"):
            value = getattr(dataset, name, None)
            if value is not None and not (shown and name == "transforms"):  # torchvision's contains the other two
                shown.append(repr(value))
        dataset = getattr(dataset, "dataset", None)
    return " ".join(" ".join(shown).split())
