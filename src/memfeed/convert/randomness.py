"""Find out if a dataset's samples are random: a store keeps one draw of them for every epoch."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from memfeed.convert.write_run import WritePlan
from memfeed.errors import RandomDataError, SampleError, SchemaError
from memfeed.schema import values
from memfeed.schema.containers import map_leaves
from memfeed.schema.fields import display
from memfeed.schema.infer import infer
from memfeed.schema.tree import Flattener
from memfeed.system import random_state

REPEATED = 3  # samples that are read a second time under another seed, at least
REPEATS_OF_DRAWS = 4
RECHECK_SECONDS = 1.0


def read_checked(dataset: Any, index: int, read: Callable[[], Any], repeat: bool) -> Any:
    """Return a copy of ``read()``, which reads sample `index`. Raise RandomDataError if the sample is random.

    It is random if its values differ when it is read again under another seed. It is read again once if `repeat`, and
    four times if reading it drew from a global generator: a random flip changes nothing half of the time. Seeds the
    global generators: call this within `random_state.preserved`.
    """
    random_state.seed(_seed(index, 0))
    before = random_state.save()
    sample = map_leaves(values.copy_value, read())  # the dataset may fill the same memory again
    repeats = REPEATS_OF_DRAWS if random_state.save() != before else int(repeat)
    for attempt in range(repeats):
        random_state.seed(_seed(index, attempt + 1))
        difference = differing_leaf(sample, read())
        if difference is not None:
            raise _random(dataset, _differs(index, difference))
    return sample


def check_iterable(dataset: Any) -> None:
    """Raise RandomDataError if an iterable that can be iterated again gives other samples under another seed."""
    one_pass, another = iter(dataset), iter(dataset)
    if one_pass is another:
        return  # it can be iterated only once
    with random_state.seeded(_seed(0, 0)):
        first = [map_leaves(values.copy_value, sample) for sample in itertools.islice(one_pass, REPEATED)]
        random_state.seed(_seed(0, 1))
        second = [map_leaves(values.copy_value, sample) for sample in itertools.islice(another, REPEATED)]
        if len(second) < len(first):
            raise SchemaError(
                f"found {len(first)} samples or more in the first pass over the iterable and {len(second)} in another; "
                "expected each iter() to start from the beginning: make __iter__ open its source itself"
            )
        for index, (one, other) in enumerate(zip(first, second, strict=True)):
            leaf = differing_leaf(one, other)
            if leaf is not None:
                raise _random(dataset, f"iterating twice gave different values in field {leaf} of sample {index}")


class Draws:
    """Notices, while a dataset is converted, samples that draw from a global generator, and reads these again.

    The probe reads only some samples. This finds a random sample anywhere, if it draws from a global generator. Each
    process spends at most ``RECHECK_SECONDS`` on reading again: where all samples draw and none of those differs, the
    others are not read again.
    """

    def __init__(self, dataset: Any, plan: WritePlan) -> None:
        self._dataset, self._seconds_left = dataset, RECHECK_SECONDS if plan.refuse_random else 0.0
        self._paths = list(plan.flattener.structure.leaves())
        self._before: random_state.RandomState | None = None

    def begin(self) -> None:
        """Remember the state of the generators before some samples are read."""
        self._before = random_state.save() if self._seconds_left > 0 else None

    def check(self, read: Mapping[int, Sequence[Any]], read_again: Callable[[int], Sequence[Any]]) -> None:
        """Raise RandomDataError if one of the samples `read` since ``begin`` is random.

        `read` has the leaves of each sample by its index, and ``read_again(index)`` returns them of another read.
        """
        if self._before is None or random_state.save() == self._before:
            return
        started = time.monotonic()
        with random_state.preserved():
            random_state.seed(_seed(next(iter(read), 0), 1))
            for index, leaves in read.items():
                if time.monotonic() - started > self._seconds_left:
                    break
                try:
                    again = read_again(index)
                except SampleError:  # a sample that raises now and then is not random
                    continue
                for path, one, other in zip(self._paths, leaves, again, strict=True):
                    if not _is_same(one, other):
                        raise _random(self._dataset, _differs(index, display(path)))
        self._seconds_left -= time.monotonic() - started


def _seed(index: int, attempt: int) -> int:
    """Return another seed for each read of each sample: a rare draw must not be missed in all samples alike."""
    return (20_011 + 104_729 * index + 7_919 * attempt) % (1 << 32)


def _differs(index: int, field: str) -> str:
    return f"reading sample {index} twice gave different values in field {field}"


def _random(dataset: Any, found: str) -> RandomDataError:
    transforms = describe_transforms(dataset)
    shown = f" (its transform: {transforms})" if transforms else ""
    return RandomDataError(
        f"found random samples: {found}{shown}; "
        "expected samples that are the same each time, because a store keeps what the dataset returns once, for every "
        "epoch. Move the random part (crops, flips, jitter, noise) to Loader(..., transform=...), which draws again "
        "for every sample and epoch; or pass allow_random=True to keep this one draw for all epochs"
    )


def differing_leaf(one: Any, other: Any) -> str | None:
    """Return the displayed path of the first leaf in which two samples differ, None if they are equal (NaN too)."""
    try:
        structure = infer([one]).structure
    except SchemaError:
        return None  # no store can hold this sample: the conversion says so later, with more detail
    try:
        structure = infer([one, other]).structure
    except SchemaError:
        return "(its structure)"
    flattener = Flattener(structure)
    for path, a, b in zip(structure.leaves(), flattener(one), flattener(other), strict=True):
        if not _is_same(a, b):
            return display(path)
    return None


def _is_same(a: Any, b: Any) -> bool:
    left, right = values.as_tensor(a), values.as_tensor(b)
    if left is None or right is None:
        return bool(a == b) or repr(a) == repr(b)  # NaN differs from itself, also within a list
    return values.bytes_equal(left, right)


def describe_transforms(dataset: Any) -> str:
    """Return the transforms of a dataset and of those it wraps, as they print."""
    shown: list[str] = []
    seen: set[int] = set()
    while dataset is not None and id(dataset) not in seen:
        seen.add(id(dataset))
        for name in ("transform", "target_transform", "transforms"):
            value = getattr(dataset, name, None)
            if value is not None and not (shown and name == "transforms"):  # torchvision's contains the other two
                shown.append(repr(value))
        dataset = getattr(dataset, "dataset", None)
    return " ".join(" ".join(shown).split())
