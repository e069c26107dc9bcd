"""Record what a dataset does with the results of its pipelines: torch and NumPy operations on them, as a tape.

While a sample is read, a result of a random step can be told from all other values: a tensor by its identity, an array
as a `TracedArray`, an image and a number as one of a derived class. Operations on them are noted and can be made again.
What takes values out of them (``item()``, ``bool()``, pixels of an image) is refused: it cannot be made again.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from memfeed.errors import SplitError

Node = tuple[int, int]
"""The entry of a tape that made a value, and its place among the values of that entry."""
_DESCRIBES = frozenset(
    {"__get__", "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "is_contiguous",
     "is_floating_point", "is_complex", "is_pinned", "element_size", "get_device", "__len__", "__hash__", "data_ptr"}
)  # fmt: skip


class _MarkedInt(int):
    """An int that came out of a pipeline: equal small ints are one object."""


class _MarkedBool(int):
    """A bool that came out of a pipeline. The dataset's code must not decide by it."""

    _recording: Recording | None = None

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


class _MarkedStr(str):
    """A str that came out of a pipeline."""

    __slots__ = ()


class _MarkedList(list[Any]):
    """A list of numbers that came out of a pipeline."""

    _recording: Recording | None = None

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        """Return the numbers as an array; that is noted."""
        return _ARRAY(list(self), dtype) if self._recording is None else self._recording.array(self, dtype)


_MARKED: dict[type, type] = {
    bool: _MarkedBool, int: _MarkedInt, float: _MarkedFloat, str: _MarkedStr, list: _MarkedList
}  # fmt: skip
_PLAIN: dict[type, type] = {mark: plain for plain, mark in _MARKED.items()}


@dataclass
class Entry:
    """One entry of a tape: an operation, or a call of a step or pipeline.

    Args:
        function: of torch or NumPy; or the `Callee` of the dataset.
        form: of its arguments, as (args, kwargs). Of a call these are the arguments of its random part.
        links: for each leaf of its arguments the node that made it; None for a leaf that no entry made.
        values: copies of these leaves; of linked ones None.
        made: the form of its result.
        cuts: of a call, how often its random part began.
        before: of a call, the states of the generators where its random part began.
        after: of a call, those at its end.
        writes: True if a call changed what an earlier entry had made, in place.
    """

    function: Any
    form: Any
    links: list[Node | None]
    values: list[Any]
    made: Any = None
    cuts: int = 0
    before: Any = None
    after: Any = None
    writes: bool = False


def plain_type(value: Any) -> type:
    """Return the class that a value has for its dataset, without what this module adds to it."""
    kind = type(value)
    if issubclass(kind, TracedArray | np.memmap):  # a row of a mapped file is an array like any other
        return np.ndarray
    found: Any = _PLAIN.get(kind) or getattr(kind, "_untraced", kind)
    return found  # type: ignore[no-any-return]


def plain(value: Any) -> Any:
    """Return a value as its dataset knows it. Arrays share the memory, images are copies."""
    if isinstance(value, TracedArray):
        return value.view(np.ndarray)
    kind = type(value)
    if kind is _MarkedBool:
        return int(value) == 1
    if kind in _PLAIN:
        return _PLAIN[kind](value)
    return _untraced_image(value) if hasattr(kind, "_untraced") else value


class Recording(TorchFunctionMode):
    """The tape of one sample, recorded while this is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.tape: list[Entry] = []
        self.refused = ""
        self.is_inside = False  # of a call, which is made again as a whole
        self._nodes: dict[int, Node] = {}
        self._kept: list[Any] = []  # no other object gets the identity of one of these
        self._arrays: list[TracedArray] = []

    def refuse(self, reason: str) -> None:
        """Raise SplitError. It is kept, in case that the dataset handles the exception."""
        self.refused = self.refused or reason
        raise SplitError(f"found that {reason}")

    def mark(self, leaf: Any, node: Node) -> Any:
        """Return a value of its own for a leaf that `node` made; any other object is not it."""
        kind = type(leaf)
        if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
            leaf = leaf.view(np.ndarray).copy().view(TracedArray)
            leaf._recording = self
            self._arrays.append(leaf)
        elif isinstance(leaf, torch.Tensor):
            leaf = _cloned(leaf)
        elif kind in _MARKED:
            leaf = _MARKED[kind](leaf)
            if kind in (list, bool):
                leaf._recording = self
        elif hasattr(leaf, "getbands") and hasattr(leaf, "load"):
            leaf = _traced_image(leaf, self)
        elif leaf is None:
            return leaf  # there is only one: if it depends on a draw, the proof finds it
        self._know(leaf, node)
        return leaf

    def node_of(self, leaf: Any) -> Node | None:
        """Return the node that made a leaf; None for one that no entry of the tape made."""
        node = self._nodes.get(id(leaf))
        if node is None and self._arrays:
            node = self._node_of_memory(leaf)
        if node is None and (isinstance(leaf, TracedArray) or type(leaf) in _PLAIN or hasattr(type(leaf), "_untraced")):
            self.refuse(
                "the dataset changes a result of its pipeline by an operation of NumPy or Pillow that cannot be made "
                "again for each epoch; move it into the pipeline, or use one of torch"
            )
        return node

    def has_nodes(self) -> bool:
        """Return True once a random step has returned something."""
        return bool(self._nodes)

    def _know(self, value: Any, node: Node) -> None:
        self._nodes[id(value)] = node
        self._kept.append(value)

    def _node_of_memory(self, leaf: Any) -> Node | None:
        """Return the node of a view of a traced array: all of it, with its axes in any order, as an array or tensor."""
        is_torch = type(leaf) is torch.Tensor and leaf.device.type == "cpu" and leaf.layout == torch.strided
        if not leaf_is_array(leaf) and not is_torch:
            return None
        if leaf.ndim == 0 or (is_torch and (leaf.requires_grad or leaf.dtype is torch.bfloat16)):
            return None
        from memfeed.splitting.leaves import take_apart

        array = leaf.numpy() if is_torch else leaf
        for known in self._arrays:
            if known.ctypes.data != array.ctypes.data or known.dtype != array.dtype or known.ndim != array.ndim:
                continue
            axes = tuple(known.strides.index(s) if s in known.strides else -1 for s in array.strides)
            if sorted(axes) == list(range(known.ndim)) and tuple(known.shape[axis] for axis in axes) == array.shape:
                source = self._nodes[id(known)]
                form, made = take_apart(((0, *axes, 0), {}))[1], take_apart(0)[1]
                links: list[Node | None] = [source, *[None] * (len(axes) + 1)]
                self.tape.append(Entry(_view, form, links, [None, *axes, is_torch], made))
                node = len(self.tape) - 1, 0
                self._know(leaf, node)
                return node
        return None

    def operate(self, function: Callable[..., Any], args: Any, kwargs: Any, run: Callable[..., Any]) -> Any:
        """Return ``run(args, kwargs)``, an operation, and note it if it works on a result of a pipeline."""
        from memfeed.splitting.leaves import copied, take_apart

        leaves, form = take_apart((args, kwargs))
        links = [self.node_of(leaf) for leaf in leaves]
        if not any(links):
            return run(args, kwargs)
        args, kwargs = form.build([plain(leaf) if type(leaf) in _PLAIN else leaf for leaf in leaves])
        result = run(args, kwargs)
        made, made_form = take_apart(result)
        is_values = all(isinstance(one, torch.Tensor | np.ndarray | np.generic) or one is None for one in made)
        name = getattr(function, "__name__", str(function))
        if not is_values:
            if name in _DESCRIBES:
                return result
            self.refuse(
                f"the dataset takes a value out of its pipeline's result ({name}), which cannot be made again for each "
                "epoch; compute it in the pipeline, or from the batch"
            )
        values = [copied(leaf) if link is None else None for leaf, link in zip(leaves, links, strict=True)]
        self.tape.append(Entry(function, form, links, values, made_form))
        kept = []
        for index, one in enumerate(made):
            known = one
            if isinstance(one, np.ndarray | np.generic):
                written = next((leaf for leaf in leaves if isinstance(leaf, TracedArray) and _shares(leaf, one)), None)
                known = written if written is not None and name not in ("__getitem__",) else self._traced(one)
            if known is not None:
                self._know(known, (len(self.tape) - 1, index))
            kept.append(known)
        return made_form.build(kept)

    def __enter__(self) -> Recording:
        setattr(np, "array", self.array)  # noqa: B010 - it copies a traced array and tells nobody
        setattr(np, "asarray", self.asarray)  # noqa: B010 - so it does with an image, or for another dtype
        setattr(np, "ascontiguousarray", self.ascontiguousarray)  # noqa: B010 - and so does this one
        # torch tells no mode of it; a bound method would not get the tensor
        setattr(torch.Tensor, "as_subclass", lambda tensor, cls: self.as_subclass(tensor, cls))  # noqa: B010
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        setattr(np, "array", _ARRAY)  # noqa: B010
        setattr(np, "asarray", _AS_ARRAY)  # noqa: B010
        setattr(np, "ascontiguousarray", _CONTIGUOUS)  # noqa: B010
        setattr(torch.Tensor, "as_subclass", _AS_SUBCLASS)  # noqa: B010
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def array(self, *args: Any, **kwargs: Any) -> Any:
        """Make an array as ``np.array`` does, and note it if it is made of a result of a pipeline."""
        if self.is_inside or not self._nodes:
            return _ARRAY(*args, **kwargs)
        return self.operate(to_array, args, kwargs, _of_plain(_ARRAY))

    def asarray(self, *args: Any, **kwargs: Any) -> Any:
        """Make an array as ``np.asarray`` does, and note it if it is made of an image or array of a pipeline."""
        first = args[0] if args else None
        is_copied = hasattr(type(first), "_untraced") or (
            isinstance(first, TracedArray) and len(args) + len(kwargs) > 1
        )
        return (self.array if is_copied else _AS_ARRAY)(*args, **kwargs)

    def ascontiguousarray(self, *args: Any, **kwargs: Any) -> Any:
        """Make an array as ``np.ascontiguousarray`` does, and note it if it is made of an array of a pipeline."""
        if self.is_inside or not (args and isinstance(args[0], TracedArray)):
            return _CONTIGUOUS(*args, **kwargs)
        return self.operate(_CONTIGUOUS, args, kwargs, _of_plain(_CONTIGUOUS))

    def as_subclass(self, tensor: torch.Tensor, cls: Any) -> Any:
        """Give a tensor another class, as ``tv_tensors.Image(x)`` does, and note it for a result of a pipeline."""
        if self.is_inside or not self._nodes:
            return _AS_SUBCLASS(tensor, cls)
        return self.operate(_AS_SUBCLASS, (tensor, cls), {}, lambda args, _: _AS_SUBCLASS(*args))

    def _traced(self, array: Any) -> TracedArray:
        traced = _AS_ARRAY(array).view(TracedArray)
        traced._recording = self
        self._arrays.append(traced)
        return traced

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Make and note an operation of torch."""
        kwargs = kwargs or {}
        if self.is_inside or not self._nodes:
            return func(*args, **kwargs)
        return self.operate(func, args, kwargs, lambda args, kwargs: func(*args, **kwargs))


def leaf_is_array(leaf: Any) -> bool:
    """Return True for a plain array of NumPy."""
    return type(leaf) is np.ndarray


def _shares(known: np.ndarray[Any, Any], made: Any) -> bool:
    """Return True if an operation returned the array that it wrote to (``out=``)."""
    return isinstance(made, np.ndarray) and made.ctypes.data == known.ctypes.data and made.strides == known.strides \
        and made.shape == known.shape and made.dtype == known.dtype  # fmt: skip


def _cloned(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) is not torch.Tensor and vars(tensor):  # such as the format of boxes
        return copy.deepcopy(tensor)
    with torch._C.DisableTorchFunction():
        return _AS_SUBCLASS(tensor.detach().clone(), type(tensor))


_ARRAY, _AS_ARRAY, _CONTIGUOUS, _AS_SUBCLASS = np.array, np.asarray, np.ascontiguousarray, torch.Tensor.as_subclass


def to_array(*args: Any, **kwargs: Any) -> Any:
    """Return what ``np.array`` makes of these arguments."""
    return _ARRAY(*args, **kwargs)


def _view(array: Any, *options: int) -> Any:
    """Return a view of an array with its axes in the order of all `options` but the last, which asks for a tensor."""
    *axes, is_torch = options
    viewed = array.transpose(axes)
    return torch.from_numpy(viewed) if is_torch else viewed


class TracedArray(np.ndarray[Any, Any]):
    """An array that came out of a pipeline. Operations on it are noted, and give another one."""

    _recording: Recording | None = None

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
    from memfeed.splitting.leaves import leaves_of

    recording = next(
        (one._recording for one in leaves_of((args, kwargs)) if isinstance(one, TracedArray) and one._recording), None
    )

    run = _of_plain(function)
    if recording is None or recording.is_inside:
        return run(args, kwargs)
    return recording.operate(function, args, kwargs, run)


def _of_plain(function: Any) -> Callable[[Any, Any], Any]:
    """Return what calls a function of NumPy with arguments that are not traced."""
    from memfeed.splitting.leaves import take_apart

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
            recording.refuse(
                f"the dataset takes a value out of its pipeline's result ({name}), which cannot be made again for each "
                "epoch; compute it in the pipeline, or from the batch"
            )
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


# --- images of Pillow


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

    return type(cls.__name__, (cls,), {"load": load, "_untraced": cls, "__module__": cls.__module__})


def _traced_image(image: Any, recording: Recording) -> Any:
    traced = image.copy()
    cls: Any = type(traced)
    traced.__class__ = _traced_class(cls)
    traced.__dict__["_recording"] = recording
    return traced


def _untraced_image(image: Any) -> Any:
    cls = type(image)._untraced
    own = object.__new__(cls)
    own.__dict__.update({name: value for name, value in image.__dict__.items() if name != "_recording"})
    return own.copy()
