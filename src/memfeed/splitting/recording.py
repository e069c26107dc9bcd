"""Record what a dataset does with the results of its pipelines: torch and NumPy operations on them, as a tape.

Operations on them are noted and can be made again. What takes values out of them (``item()``, ``bool()``, pixels of an
image) is refused: it cannot be made again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from memfeed.errors import SplitError
from memfeed.schema.values import is_pil
from memfeed.splitting.leaves import copied, take_apart
from memfeed.splitting.traced import (
    ARRAY,
    AS_SUBCLASS,
    MARKED,
    TAKEN_OUT,
    TracedArray,
    is_marked,
    marked,
    of_plain,
    plain,
    traced_array,
)

_AS_ARRAY, _CONTIGUOUS = np.asarray, np.ascontiguousarray
Node = tuple[int, int]
"""The entry of a tape that made a value, and its place among the values of that entry."""
_DESCRIBES = frozenset(
    {"__get__", "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "is_contiguous",
     "is_floating_point", "is_complex", "is_pinned", "element_size", "get_device", "__len__", "__hash__", "data_ptr"}
)  # fmt: skip


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

    def refuse(self, reason: str) -> NoReturn:
        """Raise SplitError. It is kept, in case that the dataset handles the exception."""
        self.refused = self.refused or reason
        raise SplitError(f"found that {reason}")

    def mark(self, leaf: Any, node: Node) -> Any:
        """Return a value of its own for a leaf that `node` made; any other object is not it."""
        if leaf is None:
            return leaf  # there is only one: if it depends on a draw, the proof finds it
        leaf = marked(leaf, self)
        if isinstance(leaf, TracedArray):
            self._arrays.append(leaf)
        self._know(leaf, node)
        return leaf

    def node_of(self, leaf: Any) -> Node | None:
        """Return the node that made a leaf; None for one that no entry of the tape made."""
        node = self._nodes.get(id(leaf))
        if node is None and self._arrays:
            node = self._node_of_memory(leaf)
        if node is None and is_marked(leaf):
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
        if type(leaf) is not np.ndarray and not is_torch:
            return None
        if leaf.ndim == 0 or (is_torch and (leaf.requires_grad or leaf.dtype is torch.bfloat16)):
            return None
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
        leaves, form = take_apart((args, kwargs))
        links = [self.node_of(leaf) for leaf in leaves]
        if not any(links):
            return run(args, kwargs)
        args, kwargs = form.build([plain(leaf) if isinstance(leaf, MARKED) else leaf for leaf in leaves])
        result = run(args, kwargs)
        made, made_form = take_apart(result)
        is_values = all(isinstance(one, torch.Tensor | np.ndarray | np.generic) or one is None for one in made)
        name = getattr(function, "__name__", str(function))
        if not is_values:
            if name in _DESCRIBES:
                return result
            self.refuse(TAKEN_OUT.format(name))
        values = [copied(leaf) if link is None else None for leaf, link in zip(leaves, links, strict=True)]
        self.tape.append(Entry(function, form, links, values, made_form))
        kept = []
        for index, one in enumerate(made):
            known = one
            if isinstance(one, np.ndarray | np.generic):
                written = next((leaf for leaf in leaves if isinstance(leaf, TracedArray) and _shares(leaf, one)), None)
                known = written if written is not None and name != "__getitem__" else self._traced(one)
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
        setattr(np, "array", ARRAY)  # noqa: B010
        setattr(np, "asarray", _AS_ARRAY)  # noqa: B010
        setattr(np, "ascontiguousarray", _CONTIGUOUS)  # noqa: B010
        setattr(torch.Tensor, "as_subclass", AS_SUBCLASS)  # noqa: B010
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Note no operation within the block, which is a call that is made again as a whole.

        torch need not tell of its operations there, some thirty a call. It does if other code has entered a mode since,
        because modes end in the reverse order.
        """
        is_last = _get_current_function_mode() is self  # type: ignore[no-untyped-call]
        self.is_inside = True
        if is_last:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            self.is_inside = False
            if is_last:
                super().__enter__()  # type: ignore[no-untyped-call]

    def _traced(self, array: Any) -> TracedArray:
        self._arrays.append(traced_array(_AS_ARRAY(array), self))
        return self._arrays[-1]

    def array(self, *args: Any, **kwargs: Any) -> Any:
        """Make an array as ``np.array`` does, and note it if it is made of a result of a pipeline."""
        if self.is_inside or not self._nodes:
            return ARRAY(*args, **kwargs)
        return self.operate(to_array, args, kwargs, of_plain(ARRAY))

    def asarray(self, *args: Any, **kwargs: Any) -> Any:
        """Make an array as ``np.asarray`` does, and note it if it is made of an image or array of a pipeline."""
        first = args[0] if args else None
        is_copied = is_pil(first) and is_marked(first)
        is_copied = is_copied or (isinstance(first, TracedArray) and len(args) + len(kwargs) > 1)
        return (self.array if is_copied else _AS_ARRAY)(*args, **kwargs)

    def ascontiguousarray(self, *args: Any, **kwargs: Any) -> Any:
        """Make an array as ``np.ascontiguousarray`` does, and note it if it is made of an array of a pipeline."""
        if self.is_inside or not (args and isinstance(args[0], TracedArray)):
            return _CONTIGUOUS(*args, **kwargs)
        return self.operate(_CONTIGUOUS, args, kwargs, of_plain(_CONTIGUOUS))

    def as_subclass(self, tensor: torch.Tensor, cls: Any) -> Any:
        """Give a tensor another class, as ``tv_tensors.Image(x)`` does, and note it for a result of a pipeline."""
        if self.is_inside or not self._nodes:
            return AS_SUBCLASS(tensor, cls)
        return self.operate(AS_SUBCLASS, (tensor, cls), {}, lambda args, _: AS_SUBCLASS(*args))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Make and note an operation of torch."""
        kwargs = kwargs or {}
        if self.is_inside or not self._nodes:
            return func(*args, **kwargs)
        return self.operate(func, args, kwargs, lambda args, kwargs: func(*args, **kwargs))


def _shares(known: np.ndarray[Any, Any], made: Any) -> bool:
    """Return True if an operation returned the array that it wrote to (``out=``)."""
    return isinstance(made, np.ndarray) and made.ctypes.data == known.ctypes.data and made.strides == known.strides \
        and made.shape == known.shape and made.dtype == known.dtype  # fmt: skip


def to_array(*args: Any, **kwargs: Any) -> Any:
    """Return the array that ``np.array`` makes of these arguments."""
    return ARRAY(*args, **kwargs)


def _view(array: Any, *options: int) -> Any:
    """Return a view of an array with its axes in the order of all `options` but the last, which asks for a tensor."""
    *axes, is_torch = options
    viewed = array.transpose(axes)
    return torch.from_numpy(viewed) if is_torch else viewed
