"""The transforms of a pipeline as JSON: names of classes of memfeed, and their arguments. No code, and no pickle.

A recipe may come from a stranger, so it is checked before a transform is made: its arguments by the table of
`TRANSFORMS`, its fields by the schema of the store.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from memfeed.errors import brief
from memfeed.schema.fields import DTYPES, HEAP_OF_BYTES, Field, display

MOST_PIXELS = 1 << 26  # of an image that a transform makes
_MOST_SIDE = 1 << 15
_MOST_CHANNELS = 1 << 12
_LARGEST = 1e6  # of angles, factors, fills and the like


class Argument(NamedTuple):
    """The check of one argument, and what it expects, in words."""

    is_right: Callable[[Any], bool]
    expected: str


class Described(NamedTuple):
    """A class of `memfeed.transforms`, described without importing it.

    Args:
        arguments: its arguments, without ``on``.
        dims: the numbers of dims beside the channels that its images may have: 0 for vectors.
        moves: True if it moves pixels, so that the other fields of a step follow the images.
        draws: True if it draws random numbers.
        channels: the numbers of channels that it takes; () for any.
    """

    arguments: Mapping[str, Argument]
    dims: tuple[int, ...] = (2,)
    moves: bool = False
    draws: bool = False
    channels: tuple[int, ...] = ()


def numbers(value: Any) -> list[Any]:
    """Return the numbers of an argument that is one number or several."""
    return list(value) if isinstance(value, list | tuple) else [value]


def _is_int(value: Any, least: float, most: float) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_number(value: Any, least: float = -_LARGEST, most: float = _LARGEST) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and least <= value <= most  # False for NaN; ints of any size compare


def _are(value: Any, lengths: Sequence[int], is_right: Callable[[Any], bool]) -> bool:
    return isinstance(value, list | tuple) and len(value) in lengths and all(map(is_right, value))


def _or_none(argument: Argument) -> Argument:
    return Argument(lambda value: value is None or argument.is_right(value), f"{argument.expected}, or null")


def _size(lengths: Sequence[int]) -> Argument:
    def is_side(value: Any) -> bool:
        return _is_int(value, 1, _MOST_SIDE)

    def is_right(value: Any) -> bool:
        sides = numbers(value)
        if len(sides) not in lengths or not all(map(is_side, sides)):
            return False
        return int(math.prod(sides * 2 if len(sides) == 1 else sides)) <= MOST_PIXELS

    most = f"an int from 1 to {_MOST_SIDE}, or {' or '.join(map(str, lengths[1:]))} of them"
    return Argument(is_right, f"{most}, for at most {MOST_PIXELS:,} pixels")


def _pair(least: float, most: float) -> Argument:
    def is_right(value: Any) -> bool:
        return _are(value, [2], lambda one: _is_number(one, least, most)) and value[0] <= value[1]

    return Argument(is_right, f"two numbers from {least:g} to {most:g}, the smaller one first")


def _one_or_pair(least: float, most: float, most_alone: float = _LARGEST) -> Argument:
    pair = _pair(least, most)
    return Argument(
        lambda value: _is_number(value, 0, most_alone) or pair.is_right(value),
        f"a number from 0 to {most_alone:g}, or {pair.expected}",
    )


def _several(lengths: Sequence[int], least: float = -_LARGEST) -> Argument:
    return Argument(
        lambda value: _are(value, lengths, lambda one: _is_number(one, least)),
        f"numbers from {least:g} to {_LARGEST:g}",
    )


def _one_of(*values: str) -> Argument:
    return Argument(lambda value: type(value) is str and value in values, f"one of {', '.join(values)}")


def _fill(*names: str) -> Argument:
    listed = _several(range(1, _MOST_CHANNELS + 1))
    return Argument(
        lambda value: _is_number(value) or listed.is_right(value) or (type(value) is str and value in names),
        f"a number up to {_LARGEST:g}, or one for each channel" + "".join(f', or "{name}"' for name in names),
    )


_FLAG = Argument(lambda value: type(value) is bool, "true or false")
_PROBABILITY = Argument(lambda value: _is_number(value, 0, 1), "a number from 0 to 1")
_RATIO = _pair(1e-3, 1e3)
_PADDING = Argument(
    lambda value: _are(numbers(value), (1, 2, 4), lambda one: _is_int(one, 0, _MOST_SIDE)),
    f"an int from 0 to {_MOST_SIDE}, or 2 or 4 of them",
)
_SAMPLED = _one_of("bilinear", "bicubic", "nearest", "nearest-exact")
_TURNED = {
    "degrees": _one_or_pair(-_LARGEST, _LARGEST),
    "interpolation": _one_of("bilinear", "nearest"),
    "center": _or_none(_several([2])),
    "fill": _fill(),
}
_DTYPE = _one_of(*(name for name in DTYPES if not name.startswith(("float8", "complex"))))
_FACTOR = _one_or_pair(0, _LARGEST)

TRANSFORMS: Mapping[str, Described] = {
    "CenterCrop": Described({"size": _size((1, 2, 3))}, dims=(2, 3), moves=True),
    "ColorJitter": Described(
        {**dict.fromkeys(("brightness", "contrast", "saturation"), _FACTOR), "hue": _one_or_pair(-0.5, 0.5, 0.5)},
        draws=True, channels=(1, 3),
    ),
    "Decode": Described({}),
    "Normalize": Described(
        {"mean": _several(range(1, _MOST_CHANNELS + 1)), "std": _several(range(1, _MOST_CHANNELS + 1), 1e-6)},
        dims=(0, 2, 3),
    ),
    "RandomAffine": Described(
        {
            **_TURNED,
            "translate": _or_none(
                Argument(lambda value: _are(value, [2], _PROBABILITY.is_right), "two numbers from 0 to 1")
            ),
            "scale": _or_none(_pair(1e-3, 1e3)),
            "shear": _or_none(
                Argument(
                    lambda value: _is_number(value, 0) or _is_shear(value), "a number, or 1, 2 or 4 of them in order"
                )
            ),
        },
        moves=True, draws=True,
    ),
    "RandomCrop": Described(
        {"size": _size((1, 2, 3)), "padding": _or_none(_PADDING), "pad_if_needed": _FLAG, "fill": _fill()},
        dims=(2, 3), moves=True, draws=True,
    ),
    "RandomErasing": Described(
        {"p": _PROBABILITY, "scale": _pair(0, 1), "ratio": _RATIO, "value": _fill("random")}, draws=True
    ),
    "RandomGrayscale": Described({"p": _PROBABILITY}, draws=True, channels=(1, 3)),
    "RandomHorizontalFlip": Described(
        {"p": _PROBABILITY, "alternate": _FLAG}, dims=(2, 3), moves=True, draws=True
    ),
    "RandomResizedCrop": Described(
        {
            "size": _size((1, 2)),
            "scale": _pair(1e-6, 1e3),
            "ratio": _RATIO,
            "interpolation": _SAMPLED,
            "antialias": _FLAG,
        },
        moves=True, draws=True,
    ),
    "RandomRotation": Described(_TURNED, moves=True, draws=True),
    "RandomVerticalFlip": Described({"p": _PROBABILITY}, dims=(2, 3), moves=True, draws=True),
    "Resize": Described(
        {
            "size": _size((1, 2)),
            "interpolation": _SAMPLED,
            "max_size": _or_none(
                Argument(lambda value: _is_int(value, 1, _MOST_SIDE), f"an int from 1 to {_MOST_SIDE}")
            ),
            "antialias": _FLAG,
        },
        moves=True,
    ),
    "ToDtype": Described({"dtype": _DTYPE, "scale": _FLAG}, dims=(0, 2, 3)),
}  # fmt: skip
"""The classes of `memfeed.transforms` that a recipe may name."""

REQUIRED = frozenset({"size", "dtype", "mean", "std", "degrees"})
"""Names of arguments that have no default, in each class that takes them."""


def arguments_problem(name: str, arguments: Mapping[str, Any]) -> str:
    """Return a phrase that says what is wrong with the arguments of a class, or an empty string."""
    table = TRANSFORMS[name].arguments
    for key, value in arguments.items():
        if key not in table:
            return f"the argument {key!r:.60}; expected {' or '.join(table) or 'none'}"
        if not table[key].is_right(value):
            return f"{key}={_shown(value)}; expected {table[key].expected}"
    missing = [key for key in table if key in REQUIRED and key not in arguments]
    return f"no {missing[0]}; expected {table[missing[0]].expected}" if missing else _together(name, arguments)


def _together(name: str, arguments: Mapping[str, Any]) -> str:
    """Return a phrase that says what is wrong with arguments that depend on each other, or an empty string."""
    if name == "Normalize" and len(arguments["mean"]) != len(arguments["std"]):
        return f"{len(arguments['mean'])} means and {len(arguments['std'])} stds; expected as many"
    if name == "ToDtype" and arguments.get("scale") and not DTYPES[arguments["dtype"]].is_floating_point:
        return f"dtype={arguments['dtype']} and scale; expected floats to scale to"
    if name == "Resize" and (longest := arguments.get("max_size")) is not None:
        sides = numbers(arguments["size"])
        if len(sides) > 1 or longest <= sides[0]:
            return f"max_size={longest}; expected it with one int as size, and larger than that"
    return ""


def _is_shear(value: Any) -> bool:
    if _are(value, [1], lambda one: _is_number(one, 0)):
        return True
    pair = _pair(-_LARGEST, _LARGEST)
    return _are(value, (2, 4), _is_number) and pair.is_right(value[:2]) and pair.is_right(value[-2:])


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.60}"
    except ValueError:  # an int of more digits than Python prints
        return "a very long int"


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
