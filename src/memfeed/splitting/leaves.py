"""Values that go through a pipeline: trees and their leaves, and leaves as a store keeps them."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict, UserList
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import optree
import torch
import torch.utils._pytree as pytree

from memfeed.errors import SchemaError, SplitError, brief
from memfeed.schema import kept_tensors, values
from memfeed.schema.compare import Difference, equal
from memfeed.schema.containers import NAMESPACE, open_any
from memfeed.schema.graphs import is_graph
from memfeed.schema.names import Path, display
from memfeed.schema.tensordicts import is_tensor_collection
from memfeed.schema.values import OTHER_MODES, PLAIN_MODES, class_of, is_pil


@dataclass(frozen=True)
class Form:
    """The containers of a tree. Two trees of equal forms have containers of the same classes, keys and lengths.

    Args:
        spec: of the containers that optree opens.
        inner: for each of its leaves, the class and the form of a container of another class, and what it holds beside
            its content; None for a leaf.
        close: builds these containers of their content.
    """

    spec: Any
    inner: tuple[tuple[type, Form, _Beside] | None, ...]
    close: tuple[Callable[[Any], Any] | None, ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Form) and (self.spec, self.inner) == (other.spec, other.inner)

    __hash__ = None  # type: ignore[assignment]

    @property
    def count(self) -> int:
        """The number of leaves."""
        return sum(1 if inner is None else inner[1].count for inner in self.inner)

    def paths(self) -> list[Path]:
        """Return the path of each leaf, of keys, positions and field names."""
        found: list[Path] = []
        for accessor, inner in zip(self.spec.accessors(), self.inner, strict=True):
            path = tuple(one.field if isinstance(one, optree.NamedTupleEntry) else one.entry for one in accessor)
            found += [path] if inner is None else [(*path, *rest) for rest in inner[1].paths()]
        return found

    def build(self, leaves: Sequence[Any]) -> Any:
        """Return the tree of these leaves."""
        return self._build(iter(leaves))

    def _build(self, leaves: Any) -> Any:
        parts = (
            next(leaves) if inner is None or close is None else close(inner[1]._build(leaves))
            for inner, close in zip(self.inner, self.close, strict=True)
        )
        return optree.tree_unflatten(self.spec, list(parts))


class _Beside:
    """The attributes that a container has beside its content: what is made of other leaves is a copy that has them.

    Comparing it with others, of a container that is alike, raises SplitError: no store would have them of each sample.
    """

    def __init__(self, value: Any, content: Any) -> None:
        self._cls, inner = type(value), getattr(value, "__dict__", {})
        node = pytree.SUPPORTED_NODES.get(type(value))
        if node is not None:
            inner, content = {"context": node.flatten_fn(value)[1]}, ()
        elif is_graph(value):
            inner = {key: part for store in value.stores for key, part in vars(store).items() if key != "_mapping"}
            content = ("_parent", "_key", "_cached_attr")
        elif isinstance(value, UserDict | UserList):
            content = ("data",)
        elif is_tensor_collection(value) or (isinstance(value, Mapping) and not isinstance(value, dict)):
            inner = {}
        own = content if dataclasses.is_dataclass(value) or not isinstance(content, Mapping | list) else ()
        self._found = {key: part for key, part in inner.items() if key not in own and key[:2] != "__"}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Beside):
            return False
        mine, theirs = self._found, other._found
        for key in (*mine, *(key for key in theirs if key not in mine)):
            pair = mine.get(key, self), theirs.get(key, self)
            if (callable(pair[0]) and not isinstance(pair[0], type)) or not equal(*pair):
                raise SplitError(
                    f"found the attribute {key!r} of a {self._cls.__name__}, which a store does not keep and which is "
                    "not the same in all samples; expected it to be a field, or part of the content"
                )
        return True

    __hash__ = None  # type: ignore[assignment]


def take_apart(tree: Any) -> tuple[list[Any], Form]:
    """Return the leaves of a tree and its form. Dicts keep the order of their keys."""
    found, spec = optree.tree_flatten(tree, is_numbers, none_is_leaf=True, namespace=NAMESPACE)
    leaves: list[Any] = []
    inner: list[tuple[type, Form, _Beside] | None] = []
    closes: list[Callable[[Any], Any] | None] = []
    for one in found:
        container = None if is_sized(one) or is_numbers(one) else _opened(one)
        if container is None:
            leaves.append(one)
            inner.append(None)
            closes.append(None)
            continue
        content, close = container
        parts, form = take_apart(content)
        leaves += parts
        inner.append((type(one), form, _Beside(one, content)))
        closes.append(close)
    return leaves, Form(spec, tuple(inner), tuple(closes))


def is_numbers(value: Any) -> bool:
    """Return True for a list of numbers, or of lists or tuples of as many numbers each: one leaf of any length."""
    if not isinstance(value, list) or class_of(value) is not list:
        return False
    first = type(value[0]) if value else float
    if first in (list, tuple):
        if {*map(type, value)} != {first} or len({*map(len, value)}) != 1:
            return False
        return {type(number) for row in value for number in row} in ({int}, {float})
    return first in (int, float, bool, complex) and {*map(type, value)} <= {first}


def _opened(value: Any) -> tuple[Any, Callable[[Any], Any]] | None:
    """Return the content of a container, and a function that builds one of other content; None for a leaf."""
    if is_tensor_collection(value) and not value.is_memmap():
        return dict(value.items()), partial(_with_entries, value)
    return open_any(value)


def _with_entries(value: Any, entries: dict[str, Any]) -> Any:
    new = value.clone(recurse=False)
    for key, entry in entries.items():
        new.set(key, entry)
    return new


def leaves_of(tree: Any) -> list[Any]:
    """Return the leaves of a tree."""
    return take_apart(tree)[0]


# --- kinds, and leaves as a store keeps them


class Kind(NamedTuple):
    """The properties of a leaf beside its numbers: a store keeps them once for all rows of a form.

    Args:
        name: "tensor", "array", "array hwc" (an image with channels last), "PIL RGB" and the like, the class of a
            tv_tensor, "value" for numbers and text, "encoded" for the bytes of an image file.
        dtype: of tensors and arrays.
        rank: the number of dims of tensors and arrays.
        options: format and the like of a tv_tensor.
    """

    name: str
    dtype: str = ""
    rank: int = 0
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def is_image(self) -> bool:
        """True for what may be an image or a mask: PIL images, tensors and arrays of two dims or more."""
        is_plain = self.name in ("value", "numbers", "BoundingBoxes", "KeyPoints", META) or self.name.startswith(
            "rows of "
        )
        return not is_plain and (self.rank >= 2 or self.name == "encoded")


ORIENTATION = 0x0112
"""The tag of Exif that says how an image is to be turned."""

META = "MetaTensor"
"""The name of the kind of MONAI's tensors, of which a store keeps what they hold beside their numbers as text."""

NONE = Kind("value", "NoneType")
"""The kind of None. Another sample may have a value in its place."""


def kind_of(leaf: Any) -> Kind:
    """Return the kind of a leaf. Raise SplitError for one that no store can hold and give back as it was."""
    if is_pil(leaf):
        if leaf.mode not in _MODES:
            raise SplitError(
                f"found a PIL image of the mode {leaf.mode}; expected one of {', '.join(_MODES)}: convert it in the "
                "dataset, with image.convert('RGB')"
            )
        if "transparency" in leaf.info:
            raise SplitError(
                "found a PIL image with a transparent colour beside its pixels; expected pixels alone: convert it in "
                "the dataset, with image.convert('RGBA')"
            )
        return Kind(f"PIL {leaf.mode}", _DTYPES_OF_MODES.get(leaf.mode, "uint8"), 3)
    if isinstance(leaf, torch.Tensor):
        name = kept_tensors.class_name(leaf) or ("tensor" if type(leaf) is torch.Tensor else "")
        name = META if kept_tensors.kept_name(leaf) == META else name
        if not name or leaf.requires_grad or leaf.device.type != "cpu":
            raise SplitError(
                f"found a {type(leaf).__name__} ({leaf.device}) in what is stored of a sample; expected a plain tensor "
                "on the CPU, which a store gives back as it was"
            )
        options = tuple(kept_tensors.options_of(leaf).items()) if is_sized(leaf) else ()
        return Kind(name, str(leaf.dtype), leaf.ndim, options)
    if isinstance(leaf, np.ndarray | np.generic):
        shape: tuple[int, ...] = leaf.shape
        name = "array hwc" if len(shape) == 3 and 1 <= shape[-1] <= 4 else "array"
        return Kind(name if isinstance(leaf, np.ndarray) else "numpy scalar", str(leaf.dtype), leaf.ndim)
    if is_numbers(leaf):
        first = leaf[0] if leaf else 0.0
        is_rows = isinstance(first, list | tuple)
        numbers = type(first) if not isinstance(first, list | tuple) else type(first[0]) if first else float
        return Kind(f"rows of {type(first).__name__}" if is_rows else "numbers", numbers.__name__, 2 if is_rows else 1)
    kind = class_of(leaf)
    if kind not in (int, float, bool, str, bytes, type(None)):
        raise SplitError(
            f"found {brief(leaf, 60)} of the class {type(leaf).__name__} in what is stored of a sample; expected "
            "tensors, arrays, PIL images, numbers and text"
        )
    return Kind("value", kind.__name__)


def require_comparable(differs: Difference) -> None:
    """Raise SplitError if two samples differ in an object that equals only itself: nothing says that it changed."""
    cls: Any = type(differs.found)
    if cls.__eq__ is object.__eq__:
        raise SplitError(
            f"found an object of {cls.__module__}.{cls.__qualname__} in field {display(differs.path)} of a sample, "
            "which equals no other one, so it is not known whether two samples are the same; expected tensors, arrays, "
            "numbers, text, containers of them, or a class with an __eq__ that compares what its objects hold"
        )


_DTYPES = {"int": torch.int64, "float": torch.float64, "bool": torch.bool, "complex": torch.complex128}
_DTYPES_OF_MODES = {"I;16": "uint16", "I": "int32", "F": "float32"}
_MODES = PLAIN_MODES + OTHER_MODES


def to_stored(leaf: Any, kind: Kind) -> list[Any]:
    """Return a leaf as what a store keeps of it: one value, or two for a tv_tensor with a canvas, a palette image
    or a MetaTensor.

    Tensors may share the memory of the leaf.
    """
    if kind.name == "PIL P":
        palette = leaf.getpalette("RGB") or []
        return [values.as_tensor(leaf), torch.tensor(palette, dtype=torch.uint8, device="cpu")]
    if is_sized(leaf):
        numbers, canvas = kept_tensors.parts_of(leaf)
        return [numbers.detach(), torch.tensor(canvas, device="cpu")]
    if kind.name == META:
        try:
            return list(kept_tensors.open_kept(leaf))
        except SchemaError as error:
            raise SplitError(str(error)) from None
    if kind.name == "encoded":
        return [leaf]
    if kind.name == "numbers" or kind.name.startswith("rows of "):
        return [
            torch.tensor(list(leaf), dtype=_DTYPES[kind.dtype], device="cpu").reshape(
                [len(leaf), -1] if kind.rank == 2 else [-1]
            )
        ]
    if kind.name == "array hwc":
        return [torch.from_numpy(np.array(leaf.view(np.ndarray).transpose(2, 0, 1), order="C"))]
    if kind.name == "value":
        return [
            0 if leaf is None else int(leaf) if kind.dtype == "int" else float(leaf) if kind.dtype == "float" else leaf
        ]
    return [to_tensor(leaf)]


def to_tensor(leaf: Any) -> torch.Tensor:
    """Return an image as a tensor: PIL images [c, h, w], tensors and arrays as they are."""
    tensor = values.as_tensor(leaf)
    if tensor is None:
        raise SplitError(f"found {brief(leaf)} in a pipeline; expected an image, a tensor or an array")
    return tensor


def stored_count(kind: Kind) -> int:
    """Return how many values `to_stored` gives for a leaf of this kind."""
    return 2 if kind.name in ("PIL P", META, *kept_tensors.SIZED) else 1


def from_stored(parts: Sequence[Any], kind: Kind) -> Any:
    """Return the leaf that `to_stored` took apart; it may share the memory of `parts`."""
    name, first = kind.name, parts[0]
    if name == "value":
        return None if kind.dtype == "NoneType" else first.item() if isinstance(first, torch.Tensor) else first
    if name == "encoded":
        from memfeed.transforms.decode import decode

        return _pil(decode(first), "RGB")
    if name.startswith("PIL "):
        image = _pil(first, name[4:])
        if name == "PIL P":
            image.putpalette(bytes(parts[1].numpy()), "RGB")
        return image
    if name == "tensor":
        return first
    if name == "numbers":
        return first.tolist()
    if name.startswith("rows of "):
        return [tuple(row) if name.endswith("tuple") else row for row in first.tolist()]
    if name == "numpy scalar":
        return first.numpy()[()]
    if name == "array hwc":
        return np.ascontiguousarray(first.numpy().transpose(1, 2, 0))
    if name == "array":
        return first.numpy()
    if name == META:
        return kept_tensors.make_kept(name, parts)
    if name in kept_tensors.SIZED:
        return kept_tensors.sized_wrapper(name, dict(kind.options))((first, parts[1].tolist()))
    wrap = kept_tensors.name_wrapper(name)
    return first if wrap is None else wrap(first)


def is_sized(leaf: Any) -> bool:
    """Return True for boxes or key points of torchvision, which have the size of their image."""
    return isinstance(leaf, torch.Tensor) and kept_tensors.class_name(leaf) in kept_tensors.SIZED


def copied(leaf: Any) -> Any:
    """Return a copy of a leaf that a step may write to."""
    if isinstance(leaf, np.ndarray):
        return leaf.view(np.ndarray).copy() if class_of(leaf) is np.ndarray else leaf.copy()
    if is_pil(leaf):
        return leaf.copy()
    if isinstance(leaf, torch.Tensor):
        if kept_tensors.kept_name(leaf) == META:
            made = leaf.as_subclass(torch.Tensor).detach().clone().as_subclass(type(leaf))
            made.__dict__ = copy.deepcopy(vars(leaf))
            return made
        return leaf.detach().clone() if not is_sized(leaf) else copy.deepcopy(leaf)
    return copy.deepcopy(leaf)


def copied_tree(tree: Any) -> Any:
    """Return a copy of a tree whose leaves a step may write to."""
    leaves, form = take_apart(tree)
    return form.build([copied(leaf) for leaf in leaves])


def _pil(tensor: torch.Tensor, mode: str) -> Any:
    from PIL import Image

    array = np.ascontiguousarray(tensor[0].numpy() if len(tensor) == 1 else tensor.numpy().transpose(1, 2, 0))
    if mode == "1":
        return Image.fromarray(array).convert("1")
    if Image.getmodebands(mode) != len(tensor):  # an image of another mode than those that were read first
        mode = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}[len(tensor)]
    image = Image.fromarray(array)
    return image if image.mode == mode else Image.frombytes(mode, image.size, array.tobytes())
