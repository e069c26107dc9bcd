"""What is left of a pipeline that was cut: transforms of memfeed where they do the same, else the steps themselves."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from memfeed.errors import SplitError, listed
from memfeed.schema.names import Path
from memfeed.schema.recipe import PER_SAMPLE, RecipeStep
from memfeed.splitting.counterparts import as_field, counterpart
from memfeed.splitting.parts import Rest
from memfeed.splitting.steps import (
    albumentations_compose,
    inner_of,
    is_albumentations,
    is_keyed,
    name_of,
    names_of,
    run,
    seed_step,
)
from memfeed.splitting.values import Value, difference, to_tensor
from memfeed.system import random_state
from memfeed.transforms import PerSample, Transform
from memfeed.transforms.recipe import make_transform, on_of


def rest_of(
    steps: Sequence[Any], inputs: Sequence[Sequence[Value]], paths: tuple[Path, ...]
) -> tuple[list[RecipeStep], list[Transform]]:
    """Return the rest of a pipeline, as a recipe and as transforms."""
    recipe: list[RecipeStep] = []
    transforms: list[Transform] = []
    run_start: int | None = None
    for index in range(len(steps) + 1):
        made = counterpart(steps[index], inputs[index], paths) if index < len(steps) else []
        if made is None:
            run_start = index if run_start is None else run_start
            continue
        if run_start is not None:
            own = steps[run_start:index]
            transforms.append(_per_sample(own, inputs[run_start], inputs[index], paths))
            recipe.append(RecipeStep(name=PER_SAMPLE, on=paths, shown=names_of(own)))
            run_start = None
        recipe += made
        transforms += map(make_transform, made)
    return recipe, transforms


def _per_sample(
    steps: Sequence[Any], before: Sequence[Value], after: Sequence[Value], paths: tuple[Path, ...]
) -> PerSample:
    """Return the original steps as a transform, compared with them on the probed samples."""
    for step in steps:
        if not is_keyed(step, before[0] if step is steps[0] else _through(steps, step, before[0])):
            raise SplitError(
                f"found that {name_of(step)} gives other results under the same seed; expected it to draw from a "
                "global generator (of torch, NumPy or random): a generator or a counter of its own cannot be seeded "
                "for each sample"
            )
    sizes = {tuple(as_field(image).shape) for value in after for image in value.images()[:1]}
    one_size = len(sizes) == 1
    if is_albumentations(steps[0]):
        inner = [inner_of(step) for step in steps]
        return PerSample(albumentations_compose(steps[0], inner), one_size=one_size, on=on_of(paths))
    rest = Rest(steps, before[0])
    for value in before:
        with random_state.preserved():
            random_state.seed(1)
            found = rest(*(to_tensor(image).clone() for image in value.images()))
            random_state.seed(1)
            _seed_as_rest(steps)
            expected = run(steps, value.copied()).images()
        if any(difference(one, other) > 0 for one, other in zip(found, expected, strict=True)):
            raise SplitError(
                f"found that {rest} makes something else of stored images ({listed(rest.kinds)}) than of the dataset's "
                "own; expected the same: move these steps before the first random one, or out of the pipeline"
            )
    return PerSample(rest, one_size=one_size, on=on_of(paths))


def _seed_as_rest(steps: Sequence[Any]) -> None:
    for step in steps:
        seed_step(step, random.getrandbits(31))


def _through(steps: Sequence[Any], until: Any, value: Value) -> Value:
    with random_state.preserved():
        return run(list(steps)[: list(steps).index(until)], value.copied())
