"""The transforms of a pipeline as JSON: names of classes of memfeed, and their arguments. No code, and no pickle.

A recipe may come from a stranger, so it is checked before a transform is made: its arguments by the table of
`recipe_arguments`, its fields by the schema of the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from memfeed.errors import brief
from memfeed.schema.fields import DTYPES, HEAP_OF_BYTES, Field, display
from memfeed.schema.recipe_arguments import MOST_PIXELS, TRANSFORMS, arguments_problem, numbers

PER_SAMPLE = "PerSample"
"""The name of a step that holds a user's functions, which a store cannot keep; its ``shown`` says what they are."""

MOST_STEPS = 256
_SPATIAL_DIMS = {1: 0, 2: 2, 3: 2, 4: 3}  # by the rank of a row


class RecipeStep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One transform: the name of its class, its arguments as JSON, and the paths of its fields, the images first.

    ``shown`` describes functions of the user's, for people.
    """

    name: str
    arguments: dict[str, Any] = {}
    on: tuple[tuple[str | int, ...], ...] = ()
    shown: str = ""


class _Images(msgspec.Struct):
    """The known properties of a field before a step: its dtype, and the shape of one row, channels first."""

    dtype: str
    shape: tuple[int | None, ...]

    @property
    def channels(self) -> int | None:
        """The number of channels; None if it varies."""
        return 1 if len(self.shape) == 2 else self.shape[0]


def recipe_problem(steps: Sequence[RecipeStep], fields: Sequence[Field]) -> str:
    """Return a phrase that says what is wrong with a recipe for rows of these fields, or an empty string."""
    if len(steps) > MOST_STEPS:
        return f"{len(steps):,} transforms, above {MOST_STEPS}"
    known = {field.path: field for field in fields}
    images = {field.path: _images_of(field) for field in fields}
    is_changed = False  # by functions of the user's: what they return is not known, and nothing is made of the recipe
    for step in steps:
        if step.name not in TRANSFORMS and step.name != PER_SAMPLE:
            return f"a transform {step.name!r:.60}, which memfeed does not have"
        problem = _fields_problem(step, known)
        if not problem and step.name == PER_SAMPLE:
            is_changed, problem = True, "arguments, which it does not take" if step.arguments else ""
        elif not problem:
            problem = arguments_problem(step.name, step.arguments)
            if not problem and not is_changed:
                problem = _images_problem(step, known[step.on[0]], images)
        if problem:
            return f"a transform {step.name} with {problem}"
    return ""


def _fields_problem(step: RecipeStep, known: dict[tuple[str | int, ...], Field]) -> str:
    """Return a phrase that says what is wrong with the fields of a step, or an empty string."""
    if not step.on:
        return "no fields; expected on with the path of its images"
    if len(set(step.on)) < len(step.on):
        return "the same field twice"
    missing = next((path for path in step.on if path not in known), None)
    if missing is not None:
        return f"the field {brief(display(missing))}; expected one that the store has"
    text = next((path for path in step.on[1:] if known[path].kind in HEAP_OF_BYTES and step.name != PER_SAMPLE), None)
    if text is not None:
        return f"the field {brief(display(text))} ({known[text].kind}); expected numbers, which follow the images"
    return ""


def _images_of(field: Field) -> _Images | None:
    """Return the images of a field as a transform sees them; None if it holds no images."""
    has_images = field.kind in ("fixed", "jagged", "list") and field.form == "tensor" and not field.optional
    return _Images(field.dtype, field.shape) if has_images else None


def _images_problem(step: RecipeStep, field: Field, images: dict[tuple[str | int, ...], _Images | None]) -> str:
    """Return why a step cannot be done with its field, or an empty string; note what the field is afterwards."""
    path, shown = step.on[0], brief(display(step.on[0]))
    if step.name == "Decode":
        if field.kind != "bytes" or images[path] is not None or len(step.on) > 1:
            return f"the field {shown} ({field.kind}); expected one of bytes"
        images[path] = _Images("uint8", (3, None, None))
        return ""
    found = images[path]
    if found is None:
        return f"the field {shown} ({field.kind}); expected images"
    described = f"the field {shown} ({found.dtype} {list(found.shape)})"
    least = 1 if field.kind == "fixed" else 2
    dims = _SPATIAL_DIMS.get(len(found.shape) if len(found.shape) >= least else 0)
    if dims not in TRANSFORMS[step.name].dims or 0 in found.shape:
        return f"{described}; expected images [channels, height, width]"
    dtype = DTYPES[found.dtype]
    if dtype is torch.bool or dtype.is_complex or found.dtype.startswith("float8"):
        return f"{described}; expected integers or floats of 16 bits or more"
    problem = _channels_problem(step, found)
    if problem:
        return f"{problem} for {described}"
    if step.name == "ToDtype":
        found.dtype = step.arguments["dtype"]
    elif step.name == "Normalize" and not dtype.is_floating_point:
        found.dtype = "float32"
    return ""


def _channels_problem(step: RecipeStep, found: _Images) -> str:
    """Return a phrase for the part of a step that does not fit the channels or dtype of its images, or ""."""
    arguments, channels = step.arguments, found.channels
    if step.name == "Resize" and (pixels := _resized_pixels(arguments, found.shape[-2:])) > MOST_PIXELS:
        return f"size={arguments['size']}, {pixels:,} pixels; expected at most {MOST_PIXELS:,}"
    taken = TRANSFORMS[step.name].channels
    if taken and channels not in (*taken, None):
        return f"{channels} channels; expected {' or '.join(map(str, taken))}"
    if step.name == "Normalize" and channels not in (len(arguments["mean"]), None):
        return f"{len(arguments['mean'])} means; expected one for each channel"
    dtype = DTYPES[found.dtype]
    for name in ("fill", "value"):
        value = arguments.get(name, 0)
        if value == "random":
            return "" if dtype.is_floating_point else 'value="random"; expected floats'
        filled = numbers(value)
        if len(filled) > 1 and channels not in (len(filled), None):
            return f"{len(filled)} numbers as {name}; expected one, or one for each channel"
        limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
        if not all(limits.min <= number <= limits.max for number in filled):
            return f"{name}={value!r:.60}; expected a value that {found.dtype} has"
    return ""


def _resized_pixels(arguments: dict[str, Any], sides: Sequence[int | None]) -> int:
    """Return how many pixels an image of these sides has after a Resize, more or less; 0 if its sides vary."""
    sizes = numbers(arguments["size"])
    if len(sizes) > 1 or None in sides:
        return 0
    shorter, longer = sorted(side for side in sides if side is not None)
    size: int = sizes[0]
    long = size * longer // shorter
    return size * min(long, arguments.get("max_size") or long)
