"""The steps of a pipeline, of every library, and which of them draw random numbers."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from typing import Any

import torch

from memfeed.splitting.values import Value, difference
from memfeed.system import random_state

_SEEDS = 8  # of a step with a generator of its own


def steps_of(pipeline: Any) -> list[Any]:
    """Return the steps of a pipeline, in order; a function that is no sequence is one step.

    Steps of albumentations are returned as a Compose of one step each, which keeps the options of their Compose.
    """
    if isinstance(pipeline, list | tuple):
        return [step for part in pipeline for step in steps_of(part)]
    if is_albumentations(pipeline):
        if type(pipeline).__name__ != "Compose":
            return [sys.modules["albumentations"].Compose([pipeline])]
        if getattr(pipeline, "p", 1.0) < 1:
            return [pipeline]
        return [albumentations_compose(pipeline, [step]) for step in pipeline.transforms]
    if isinstance(pipeline, torch.nn.Sequential):
        return steps_of(list(pipeline))
    inner: Any = getattr(pipeline, "transforms", None)
    if type(pipeline).__name__ == "Compose" and is_sequence(inner):
        return steps_of(list(inner))
    # an object that holds nothing but a Compose, as the presets of torchvision's references
    if type(inner).__name__ == "Compose" and len(vars(pipeline)) == 1:
        return steps_of(inner)
    return [pipeline]


def is_sequence(value: Any) -> bool:
    """Return True for a list or tuple of functions, or a ModuleList."""
    return isinstance(value, list | tuple | torch.nn.ModuleList) and all(map(callable, value))


def is_albumentations(step: Any) -> bool:
    """Return True for a transform of albumentations, which takes and returns images by name."""
    return hasattr(step, "set_random_seed") and (hasattr(step, "add_targets") or hasattr(step, "targets"))


def albumentations_compose(like: Any, steps: Sequence[Any]) -> Any:
    """Return a Compose of these steps with the options of another Compose."""
    compose = copy.copy(like)
    compose.transforms = [copy.deepcopy(step) for step in steps]
    return compose


def inner_of(step: Any) -> Any:
    """Return the transform itself, of a Compose of one step."""
    return step.transforms[0] if is_albumentations(step) and len(getattr(step, "transforms", ())) == 1 else step


def name_of(step: Any) -> str:
    """Return the name of a step, for messages."""
    step = inner_of(step)
    return str(getattr(step, "__name__", type(step).__name__))


def names_of(steps: Sequence[Any]) -> str:
    """Return the names of steps, for messages."""
    return ", ".join(map(name_of, steps))


def run(steps: Sequence[Any], value: Value) -> Value:
    """Return what the steps make of `value`, which they may write to."""
    for step in steps:
        value = value.after(step(*value.args, **value.kwargs))
    return value


def seed_step(step: Any, seed: int) -> None:
    """Seed the generator of a step that has its own: of albumentations or MONAI."""
    for name in ("set_random_seed", "set_random_state"):
        if callable(setter := getattr(step, name, None)):
            setter(seed)
            return


def has_generator(step: Any) -> bool:
    """Return True for a step whose own generator can be seeded."""
    return hasattr(step, "set_random_seed") or hasattr(step, "set_random_state")


def is_random(step: Any, inputs: Sequence[Value]) -> bool:
    """Return True if a step draws from a global generator, or gives other results under another seed."""
    inner = inner_of(step)
    if is_albumentations(step) and getattr(inner, "p", 1.0) < 1:
        return True
    if any(cls.__name__ in ("Randomizable", "RandomizableTrait") for cls in type(inner).__mro__):  # of MONAI
        return True
    with random_state.preserved():
        for value in inputs:
            random_state.seed(0)
            before = random_state.save()
            seed_step(step, 0)
            first = run([step], value.copied())
            if not is_albumentations(step) and random_state.save() != before:
                return True
            for seed in range(1, _SEEDS if has_generator(step) else 2):
                random_state.seed(seed)
                seed_step(step, seed)
                if differ(first, run([step], value.copied())):
                    return True
    return False


def is_keyed(step: Any, value: Value) -> bool:
    """Return True if a step gives the same again under the same seed."""
    results = []
    with random_state.preserved():
        for _ in range(2):
            random_state.seed(1)
            seed_step(step, 1)
            results.append(run([step], value.copied()))
    return not differ(*results)


def differ(one: Value, other: Value) -> bool:
    """Return True if two values have different images."""
    left, right = one.images(), other.images()
    return len(left) != len(right) or any(difference(a, b) > 0 for a, b in zip(left, right, strict=True))
