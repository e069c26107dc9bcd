"""The results of a random step, each of a class of its own, so that they can be told from all other values.

A tensor is known by its identity; an array is a `TracedArray`, an image or a number an instance of a derived class.
They report what is done with them to the recording of their sample (`memfeed.splitting.recording`).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import numpy as np
import torch

from memfeed.schema.values import class_of, is_pil
from memfeed.splitting.leaves import leaves_of, take_apart

ARRAY, AS_SUBCLASS = np.array, torch.Tensor.as_subclass
"""Functions of NumPy and torch that others stand for while a sample is recorded."""
TAKEN_OUT = (
    "the dataset takes a value out of its pipeline's result ({}), which cannot be made again for each epoch; compute "
    "it in the pipeline, or from the batch"
)


class Recorder(Protocol):
    """The receiver of what marked values report."""

    is_inside: bool

    def refuse(self, reason: str) -> NoReturn:
        """Raise SplitError."""

    def operate(self, function: Callable[..., Any], args: Any, kwargs: Any, run: Callable[..., Any]) -> Any:
        """Return ``run(args, kwargs)``, and note that operation."""

    def array(self, *args: Any, **kwargs: Any) -> Any:
        """Make an array as ``np.array`` does, and note it."""


def is_marked(value: Any) -> bool:
    """Return True for a value of a class of this module: what a random step returned, other than a tensor or None."""
    return hasattr(type(value), "_stands_for")


def marked(leaf: Any, recording: Recorder) -> Any:
    """Return a copy of a leaf by which it is known. What is of no class that can be marked is returned itself."""
    kind = type(leaf)
    if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
        return traced_array(leaf.view(np.ndarray).copy(), recording)
    if isinstance(leaf, torch.Tensor):
        if kind is not torch.Tensor and vars(leaf):  # such as the format of boxes
            return copy.deepcopy(leaf)
        with torch._C.DisableTorchFunction():
            return AS_SUBCLASS(leaf.detach().clone(), kind)
    if is_pil(leaf):
        traced: Any = leaf.copy()
        traced.__class__ = _traced_class(traced.__class__)
        traced.__dict__["_recording"] = recording
        return traced
    if kind not in _MARKED:
        return leaf
    value = _MARKED[kind](leaf)
    if kind in (list, bool):
        value._recording = recording
    return value


def plain(value: Any) -> Any:
    """Return a value as its dataset knows it. Arrays share the memory, images are copies."""
    if isinstance(value, TracedArray):
        return value.view(np.ndarray)
    if isinstance(value, _MarkedBool):
        return int(value) == 1
    if isinstance(value, MARKED):
        return class_of(value)(value)
    if not is_marked(value):
        return value
    image: Any = object.__new__(class_of(value))
    image.__dict__.update({name: part for name, part in value.__dict__.items() if name != "_recording"})
    return image.copy()


class _MarkedInt(int):
    """An int that came out of a pipeline: equal small ints are one object."""

    _stands_for = int


class _MarkedBool(int):
    """A bool that came out of a pipeline. The dataset's code must not decide by it."""

    _stands_for = bool
    _recording: Recorder | None = None

    def __bool__(self) -> bool:
        """Refuse, because the decision would not be made again."""
        if self._recording is not None and not self._recording.is_inside:
            self._recording.refuse(
                "the dataset decides by a bool that a random step returned, which cannot be done again for each epoch; "
                "decide in the step, and let it return the image, the text or the number"
            )
        return int(self) == 1

    def __repr__(self) -> str:
        return repr(int(self) == 1)


class _MarkedFloat(float):
    """A float that came out of a pipeline."""

    _stands_for = float


class _MarkedStr(str):
    """A str that came out of a pipeline."""

    __slots__ = ()
    _stands_for = str


class _MarkedList(list[Any]):
    """A list of numbers that came out of a pipeline."""

    _stands_for = list
    _recording: Recorder | None = None

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        """Return the numbers as an array; that is noted."""
        return ARRAY(list(self), dtype) if self._recording is None else self._recording.array(self, dtype)


_MARKED: dict[type, Any] = {
    bool: _MarkedBool, int: _MarkedInt, float: _MarkedFloat, str: _MarkedStr, list: _MarkedList
}  # fmt: skip
MARKED = tuple(_MARKED.values())
"""The classes of numbers, text and lists."""


def traced_array(array: Any, recording: Recorder) -> TracedArray:
    """Return a view of an array whose operations are noted."""
    traced: TracedArray = array.view(TracedArray)
    traced._recording = recording
    return traced


class TracedArray(np.ndarray[Any, Any]):
    """An array that came out of a pipeline. Operations on it are noted, and give another one."""

    _stands_for = np.ndarray
    _recording: Recorder | None = None

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """Make and note a ufunc."""
        return _operate(ufunc if method == "__call__" else getattr(ufunc, method), inputs, kwargs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Make and note a function of NumPy."""
        return _operate(func, args, kwargs)

    def __iter__(self) -> Any:
        return (self[index] for index in range(len(self)))

    @property
    def T(self) -> Any:  # noqa: N802
        """The transposed array."""
        return self.transpose()

    def __reduce__(self) -> Any:
        return self.view(np.ndarray).__reduce__()


def _operate(function: Any, args: Any, kwargs: Any) -> Any:
    recording = next(
        (one._recording for one in leaves_of((args, kwargs)) if isinstance(one, TracedArray) and one._recording), None
    )

    run = of_plain(function)
    if recording is None or recording.is_inside:
        return run(args, kwargs)
    return recording.operate(function, args, kwargs, run)


def of_plain(function: Any) -> Callable[[Any, Any], Any]:
    """Return a function that calls a function of NumPy with arguments that are not traced."""

    def run(args: Any, kwargs: Any) -> Any:
        leaves, form = take_apart((args, kwargs))
        args, kwargs = form.build([plain(leaf) for leaf in leaves])
        return function(*args, **kwargs)

    return run


def _noted(name: str) -> Callable[..., Any]:
    function = getattr(np.ndarray, name)

    @functools.wraps(function)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _operate(function, (self, *args), kwargs)

    return method


def _refused(name: str) -> Callable[..., Any]:
    function = getattr(np.ndarray, name)

    @functools.wraps(function)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        recording = self._recording
        if recording is not None and not recording.is_inside:
            recording.refuse(TAKEN_OUT.format(name))
        return function(self.view(np.ndarray), *args, **kwargs)

    return method


for _name in (
    "__getitem__", "__setitem__", "astype", "copy", "transpose", "reshape", "swapaxes", "ravel", "flatten", "squeeze",
    "clip", "mean", "sum", "max", "min", "std", "var", "any", "all", "argmax", "argmin", "round", "repeat", "take",
    "dot", "prod", "cumsum", "diagonal", "fill", "sort", "partition", "put", "nonzero", "argsort", "compress",
):  # fmt: skip
    setattr(TracedArray, _name, _noted(_name))
for _name in (
    "item", "tolist", "tobytes", "__bool__", "__float__", "__int__", "__index__", "__complex__", "dump", "dumps",
    "tofile",
):  # fmt: skip
    setattr(TracedArray, _name, _refused(_name))


@functools.cache
def _traced_class(cls: type) -> type:
    def load(self: Any) -> Any:
        recording = self.__dict__.get("_recording")
        if recording is not None and not recording.is_inside:
            recording.refuse(
                "the dataset reads the pixels of the image that its pipeline returned, which cannot be made again for "
                "each epoch; move what it does with them into the pipeline (ToTensor, for example)"
            )
        return cls.load(self)  # type: ignore[attr-defined]

    return type(cls.__name__, (cls,), {"load": load, "_stands_for": cls, "__module__": cls.__module__})
