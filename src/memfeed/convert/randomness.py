"""Find out if a dataset's samples are random: a store keeps one draw of them for every epoch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from memfeed.errors import RandomDataError, SchemaError
from memfeed.schema import values
from memfeed.schema.fields import display
from memfeed.schema.infer import infer
from memfeed.schema.tree import Flattener
from memfeed.system import random_state

REPEATED = 3  # samples that are read a second time under another seed
_SEEDS = (20_011, 40_031)


def read_checked(dataset: Any, index: int, read: Callable[[], Any], repeat: bool) -> Any:
    """Return ``read()``, which reads sample `index`. Raise RandomDataError if the sample is random.

    It is random if its values differ when it is read again under another seed, or if it draws from a global generator
    in a way that depends on the generator's state. It is read again if it draws, or if `repeat`. Seeds the global
    generators: call this within `random_state.preserved`.
    """
    random_state.seed(_SEEDS[0])
    before = random_state.save()
    sample = read()
    after = random_state.save()
    drawn = [name for name in before._fields if getattr(before, name) != getattr(after, name)]
    if not drawn and not repeat:
        return sample
    random_state.seed(_SEEDS[1])
    again = read()
    left = random_state.save()
    difference = differing_leaf(sample, again)
    if difference is not None:
        raise _random(dataset, f"reading sample {index} twice gave different values in field {difference}")
    # a dataset that seeds a generator itself leaves it in the same state both times, which is not random
    drawn = [name for name in drawn if getattr(after, name) != getattr(left, name)]
    if drawn:
        raise _random(dataset, f"reading sample {index} drew from the global generator of {' and '.join(drawn)}")
    return sample


def check_iterable(dataset: Any) -> None:
    """Raise RandomDataError if an iterable that can be iterated again gives other samples under another seed."""
    one_pass, another = iter(dataset), iter(dataset)
    if one_pass is another:
        return  # it can be iterated only once
    with random_state.seeded(_SEEDS[0]):
        first = list(itertools.islice(one_pass, REPEATED))
        random_state.seed(_SEEDS[1])
        second = list(itertools.islice(another, REPEATED))
        if len(second) < len(first):
            raise SchemaError(
                f"found {len(first)} samples or more in the first pass over the iterable and {len(second)} in another; "
                "expected each iter() to start from the beginning: make __iter__ open its source itself"
            )
        for index, (one, other) in enumerate(zip(first, second, strict=True)):
            leaf = differing_leaf(one, other)
            if leaf is not None:
                raise _random(dataset, f"iterating twice gave different values in field {leaf} of sample {index}")


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
