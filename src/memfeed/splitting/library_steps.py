"""Read the attributes of a step of torchvision or albumentations as transforms of memfeed.

A step has the name of the transform that does the same here, but for `_OUR_NAMES`. `memfeed.splitting.counterparts`
proves that both do the same.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from memfeed.schema.fields import dtype_name
from memfeed.splitting.generators import is_installed


class Asked(NamedTuple):
    """One transform that a step asks for.

    Args:
        name: of a class in `memfeed.schema.recipe.TRANSFORMS`.
        arguments: of it, as JSON.
        of_masks: True if it changes the masks alone, False if it begins with the image.
    """

    name: str
    arguments: Mapping[str, Any]
    of_masks: bool = False


Arguments = dict[str, Any]
Reader = Callable[[Any], Arguments | list[Asked] | None]


def transforms_for(step: Any) -> list[Asked] | None:
    """Return the transforms that together do what a step does, for comparison; None if none are known."""
    table = next((table for module, table in _TABLES if _is_class_of(step, module)), {})
    name = type(step).__name__
    try:
        found = table[name](step) if name in table else None
    except (AttributeError, TypeError, ValueError):  # another version of the library, with other attributes
        return None
    if not isinstance(found, dict):
        return found
    return [Asked(_OUR_NAMES.get(name, name), found)]


def _is_class_of(step: Any, module: str) -> bool:
    """Return True if the class of a step is that of a library, and nobody has changed what it does.

    A method may have another one in its place, in the object or in a class.
    """
    library, cls = sys.modules.get(module), type(step)
    own = vars(step) if hasattr(step, "__dict__") else {}
    hooks = any(own.get(name) for name in own if name.endswith("_hooks"))
    methods = {
        name: getattr(value, "__func__", value)
        for base in reversed(cls.__mro__)
        for name, value in vars(base).items()
        if isinstance(getattr(value, "__func__", value), types.FunctionType)
    }
    is_own_code = not methods.keys() & own.keys() and all(map(is_installed, methods.values()))
    return getattr(library, cls.__name__, None) is cls and not hooks and is_own_code


def _interpolation(step: Any) -> str:
    return str(getattr(step.interpolation, "value", step.interpolation))


def fill_of(fill: Any, image: Any = None) -> Any:
    """Return a fill as a number or numbers: of an image, or of the first type; of v2 it is a dict by type."""
    if isinstance(fill, dict):
        fill = next(iter(fill.values()), 0) if image is None else fill.get(type(image), fill.get("others"))
    return 0 if fill is None else list(fill) if isinstance(fill, list | tuple) else fill


def _attributes(step: Any, *names: str) -> Arguments:
    """Return attributes of a step that have the names of our arguments. Tuples become lists, as JSON has them."""
    values = {name: getattr(step, name) for name in names}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _reads(*names: str) -> Reader:
    return lambda step: _attributes(step, *names)


def _random_crop(step: Any) -> Arguments | None:
    if step.padding_mode != "constant":
        return None
    padding = list(step.padding) if isinstance(step.padding, list | tuple) else step.padding
    if ".v2" in type(step).__module__ and padding:  # kept as left, right, top, bottom, but given in another order
        padding = [padding[0], padding[2], padding[1], padding[3]]
    pads = bool(step.pad_if_needed)
    return {"size": list(step.size), "padding": padding, "pad_if_needed": pads, "fill": fill_of(step.fill)}


def _jitter(step: Any) -> Arguments:
    factors = _attributes(step, "brightness", "contrast", "saturation", "hue")
    return {name: 0 if pair is None else pair for name, pair in factors.items()}


def _erasing(step: Any) -> Arguments | None:
    is_noise = isinstance(step.value, str) or step.value is None  # other noise than ours
    return None if is_noise else _attributes(step, "p", "scale", "ratio", "value")


def _resampling(step: Any) -> Arguments:
    return {"interpolation": _interpolation(step), "antialias": step.antialias is not False}


def _resize(step: Any) -> Arguments:
    size = list(step.size) if isinstance(step.size, list | tuple) else step.size
    size = size[0] if isinstance(size, list) and len(size) == 1 else size
    return {"size": size, "max_size": step.max_size, **_resampling(step)}


def _to_dtype(step: Any) -> Arguments | list[Asked] | None:
    if not isinstance(step.dtype, dict):
        return {"dtype": dtype_name(step.dtype), "scale": bool(getattr(step, "scale", False))}
    asked = []
    for kind, dtype in step.dtype.items():
        name = kind if isinstance(kind, str) else kind.__name__
        if dtype is None:
            continue
        if name == "Image":
            scale = bool(step.scale) and dtype.is_floating_point
            asked.append(Asked("ToDtype", {"dtype": dtype_name(dtype), "scale": scale}))
        elif name == "Mask":
            asked.append(Asked("ToDtype", {"dtype": dtype_name(dtype)}, of_masks=True))
        else:
            return None
    return asked


def _turning(step: Any) -> Arguments:
    return {**_attributes(step, "degrees", "center"), "interpolation": _interpolation(step), "fill": fill_of(step.fill)}


def _normalized_arrays(step: Any) -> Arguments | None:
    if getattr(step, "normalization", "standard") != "standard" or step.max_pixel_value != 255.0 or step.p < 1:
        return None
    return _attributes(step, "mean", "std")


def _cropped_arrays(step: Any) -> Arguments | None:
    if getattr(step, "pad_if_needed", False) or step.p < 1:
        return None
    return {"size": [step.height, step.width]}


def _nothing(step: Any) -> list[Asked]:
    return []  # of what a batch is already


_TORCHVISION: dict[str, Reader] = {
    "CenterCrop": _reads("size"),
    "ColorJitter": _jitter,
    "ConvertImageDtype": lambda step: {"dtype": dtype_name(step.dtype), "scale": True},
    "Normalize": _reads("mean", "std"),
    "PILToTensor": _nothing,
    "RandomAffine": lambda step: {**_attributes(step, "translate", "scale", "shear"), **_turning(step)},
    "RandomCrop": _random_crop,
    "RandomErasing": _erasing,
    "RandomGrayscale": _reads("p"),
    "RandomHorizontalFlip": _reads("p"),
    "RandomResizedCrop": lambda step: {**_attributes(step, "size", "scale", "ratio"), **_resampling(step)},
    "RandomRotation": lambda step: None if step.expand else _turning(step),
    "RandomVerticalFlip": _reads("p"),
    "Resize": _resize,
    "ToDtype": _to_dtype,
    "ToImage": _nothing,
    "ToPureTensor": _nothing,
    "ToTensor": lambda step: {"dtype": "float32", "scale": True},
}
_ALBUMENTATIONS: dict[str, Reader] = {
    "CenterCrop": _cropped_arrays,
    "HorizontalFlip": _reads("p"),
    "Normalize": _normalized_arrays,
    "RandomCrop": _cropped_arrays,
    "ToTensorV2": _nothing,
    "VerticalFlip": _reads("p"),
}
_TABLES = (
    ("torchvision.transforms", _TORCHVISION),
    ("torchvision.transforms.v2", _TORCHVISION),
    ("albumentations", _ALBUMENTATIONS),
    ("albumentations.pytorch", _ALBUMENTATIONS),
)
_OUR_NAMES = {
    "ConvertImageDtype": "ToDtype",
    "HorizontalFlip": "RandomHorizontalFlip",
    "ToTensor": "ToDtype",
    "VerticalFlip": "RandomVerticalFlip",
}
"""The transforms of memfeed that have another name than the step."""
