"""Any function of single values, fused with the transforms around it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from memfeed.errors import TransformError
from memfeed.transforms.batch_fields import On
from memfeed.transforms.params.geometry import Imagewise
from memfeed.transforms.planning import Uniform
from memfeed.transforms.transform import ImageTransform


@dataclass(frozen=True, eq=False)
class Mapped(Imagewise):
    """A function of each value of n images.

    Args:
        fn: gives a tensor of the same shape.
        dtype: that `fn` makes of the images'.
    """

    fn: Callable[[torch.Tensor], torch.Tensor]
    dtype: torch.dtype

    def output_shape(self, shape: torch.Size) -> torch.Size:
        """What images of `shape` become: of the same shape."""
        return shape

    def output_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What `fn` makes."""
        return self.dtype

    def one(self, image: torch.Tensor, sample: int) -> torch.Tensor:
        """One image [c, h, w]."""
        return self.fn(image)

    def all(self, image: torch.Tensor) -> torch.Tensor:
        """All images [n, c, h, w], on any device."""
        return self.fn(image)


COMPILED_ON = ("cuda",)
"""Device types. On the CPU compiling made gamma correction of an image 6 % faster, a chain of seven operations 22 %
slower and 255 - x four times slower, after 2 to 23 s of compiling."""

Function: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


class Pointwise(ImageTransform):
    """Apply a function of single values, within the fused pass.

    On the CPU it is called as it is, image by image, in the cache. On CUDA it is compiled (`torch.compile`) when it
    is first used, and called as it is where that does not work, or does not give the same; repr says which. A function
    that you have compiled yourself is called as it is, pickles if the original does, and is compiled anew where it is
    unpickled.

    Args:
        fn: takes images as they are then, [c, h, w] or [n, c, h, w], or a part of one, and gives a tensor of the same
            shape, of any dtype: each value depends on the value in its place and on nothing else. It does not write to
            what it is given, and may be called in the loader's thread.
        on: the field, see `Transform`.

    Raises:
        TransformError: `fn` is not callable; later, it gives no tensor or another shape, or it turns out on the first
            image that its values depend on others, or on chance.

    >>> Compose([RandomCrop(224), ToDtype(torch.float32, scale=True), Pointwise(lambda x: x**2.2)])  # doctest: +SKIP
    """

    def __init__(self, fn: Function, *, on: On = None) -> None:
        super().__init__(on=on)
        if not callable(fn):
            raise TransformError(
                f"Pointwise got a {type(fn).__name__}; expected a function of a tensor; e.g. lambda x: x.clamp(0, 1)"
            )
        self.fn = fn
        self._roads: dict[str, tuple[Function, str]] = {}
        self._made: dict[torch.dtype, torch.dtype] = {}
        self._checked = False

    def make_params(self, shape: torch.Size, dtype: torch.dtype, uniform: Uniform) -> Mapped:
        """Nothing to draw; which dtype comes out is seen from one pixel."""
        if dtype not in self._made:
            self._made[dtype] = self._call(torch.zeros(1, shape[1], 1, 1, dtype=dtype)).dtype
        return Mapped(self._call_checked, self._made[dtype])

    def extra_repr(self) -> str:
        """The function and how it is called on which device, for repr."""
        roads = [f"{how} on {kind}" for kind, (_, how) in self._roads.items()]
        return ", ".join([str(getattr(self.fn, "__qualname__", self.fn)), *roads])

    def _call_checked(self, image: torch.Tensor) -> torch.Tensor:
        if not self._checked and image.numel():
            self._check(image[0] if image.ndim == 4 else image)
        return self._call(image)

    def _call(self, image: torch.Tensor) -> torch.Tensor:
        kind = image.device.type
        if kind not in self._roads:
            compiling = kind in COMPILED_ON and not hasattr(self.fn, "_torchdynamo_orig_callable")
            self._roads[kind] = _compiled(self.fn, image) if compiling else (self.fn, "eager")
        made: Any = self._roads[kind][0](image)
        if not isinstance(made, torch.Tensor) or made.shape != image.shape:
            found = list(made.shape) if isinstance(made, torch.Tensor) else f"a {type(made).__name__}"
            raise TransformError(
                f"{self} gave {found} for images {list(image.shape)}; expected a tensor of the same shape; "
                "derive from memfeed.transforms.Transform for what is not done value by value"
            )
        return made

    def _check(self, image: torch.Tensor) -> None:
        """Compare what becomes of a part of an image [c, h, w] alone with what becomes of it in the whole."""
        _, h, w = image.shape
        part = slice(None), slice(h // 4, h - h // 8), slice(w // 4, w - w // 8)  # off the middle: a flip keeps that
        given = image.clone()
        whole = self._call(given)[part]
        try:
            alone = self.fn(image[part].clone())
        except RuntimeError as error:
            raise TransformError(
                f"{self} failed on a part of an image ({error}); expected a function that takes each value by itself; "
                "derive from memfeed.transforms.Transform for any other"
            ) from error
        # not bit by bit: where a vectorised loop ends and a scalar one takes over depends on the shape
        same = alone.shape == whole.shape and _agree(alone, whole)
        if not same or not torch.equal(given, image):
            found = "made other values of a part of an image than of the whole" if not same else "wrote to its argument"
            raise TransformError(
                f"{self} {found}; expected a function that takes each value by itself, without chance, and makes a new "
                "tensor; derive from memfeed.transforms.Transform for any other"
            )
        # an image of one value says nothing of a function that subtracts the mean
        self._checked = bool((image != image[0, 0, 0]).any())

    def __getstate__(self) -> dict[str, Any]:
        fn = getattr(self.fn, "_torchdynamo_orig_callable", None)
        return {**self.__dict__, "fn": fn or self.fn, "_roads": {}, "_compiled": fn is not None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        compiled = state.pop("_compiled")
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if compiled:
            self.fn = torch.compile(self.fn)


def _compiled(fn: Function, image: torch.Tensor) -> tuple[Function, str]:
    """The function compiled, where that works and gives what the function gives; and what became of it."""
    try:
        made: Function = torch.compile(fn, dynamic=True)
        one, other = made(image), fn(image)
        if one.dtype == other.dtype and _agree(one, other):
            return made, "compiled"
        return fn, "eager (compiled, it gives other values)"
    except Exception as error:  # of any kind: the tracer's, the compiler's, or what is not there
        return fn, f"eager (compiling failed: {type(error).__name__})"


def _agree(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether values are the same but for rounding; compiled code rounds once where 16 bits round after every step."""
    halves = one.dtype.is_floating_point and one.dtype.itemsize <= 2
    rtol, atol = (3e-2, 1e-2) if halves else (1e-3, 1e-6)
    return torch.allclose(one.double(), other.double(), rtol, atol, equal_nan=True)
