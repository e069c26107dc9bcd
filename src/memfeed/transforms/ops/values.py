"""Transforms of values: ToDtype, Normalize and Pointwise, a function of single values, fused with its neighbours."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from memfeed.errors import TransformError
from memfeed.transfer.packing import upload
from memfeed.transforms.batch_fields import On
from memfeed.transforms.operation import DrawUniform
from memfeed.transforms.params.value_changes import Affine, Mapped, largest_value
from memfeed.transforms.transform import ImageTransform, Transform


class ToDtype(Transform):
    """Cast the images. They may be volumes [n, c, d, h, w] or vectors [n, d] too.

    Args:
        dtype: to cast to.
        scale: divide integer images by the largest value of their dtype (255 for uint8), which maps them to [0, 1].
            Float images are only cast, as in torchvision.
        on: the field, see `Transform`.

    Raises:
        TransformError: `scale` with a dtype that is not floating point.
    """

    spatial_dims = (0, 2, 3)

    def __init__(self, dtype: torch.dtype, scale: bool = False, *, on: On = None) -> None:
        super().__init__(on=on)
        if not isinstance(dtype, torch.dtype):
            raise TransformError(f"ToDtype({dtype!r:.60}); expected a dtype of torch; e.g. torch.float32")
        if scale and not dtype.is_floating_point:
            raise TransformError(f"ToDtype({dtype}, scale=True); expected a float dtype to scale to; leave scale out")
        self.dtype = dtype
        self.scale = scale

    def make_params(self, shape: torch.Size, dtype: torch.dtype, uniform: DrawUniform) -> Affine:
        """Draw nothing."""
        largest = largest_value(dtype) if self.scale else 1
        if largest == 1:
            return Affine(self.dtype)
        return Affine(self.dtype, scale=(1 / largest,) * shape[1], shift=(0.0,) * shape[1])

    def transform(self, image: torch.Tensor, params: Affine) -> torch.Tensor:
        """Cast images [n, c, h, w], then divide them."""
        largest = largest_value(image.dtype) if self.scale else 1
        image = image.to(self.dtype)
        return image if largest == 1 else image / largest

    def extra_repr(self) -> str:
        """Return the parameters, for repr."""
        return f"{self.dtype}, scale={self.scale}"


class Normalize(Transform):
    """Subtract `mean` and divide by `std`, per channel; both in units of an image in [0, 1].

    Integer images become float32 and are divided by the largest value of their dtype first (255 for uint8), so no
    ToDtype is needed before. Float images are not divided, and keep their dtype. Volumes [n, c, d, h, w] and vectors
    [n, d] are normalised likewise; each entry of a vector is a channel.

    Args:
        mean: one float per channel.
        std: likewise, none of them 0.
        on: the field, see `Transform`.

    Raises:
        TransformError: mean and std differ in length, or are not finite, or a std is 0; later, images with another
            number of channels.
    """

    _shown = ("mean", "std")
    spatial_dims = (0, 2, 3)

    def __init__(self, mean: Sequence[float], std: Sequence[float], *, on: On = None) -> None:
        super().__init__(on=on)
        self.mean = tuple(float(value) for value in mean)
        self.std = tuple(float(value) for value in std)
        if len(self.mean) != len(self.std) or not self.mean:
            raise TransformError(
                f"mean has {len(self.mean)} values and std has {len(self.std)}; "
                "expected one per channel in both; e.g. three each for RGB images"
            )
        if not all(map(math.isfinite, self.mean + self.std)) or 0.0 in self.std:
            raise TransformError(
                f"mean={self.mean}, std={self.std}; expected finite numbers and no std of 0; "
                "use a std of 1 for a channel that is constant"
            )

    def make_params(self, shape: torch.Size, dtype: torch.dtype, uniform: DrawUniform) -> Affine:
        """Draw nothing."""
        if shape[1] != len(self.mean):
            raise TransformError(
                f"images have {shape[1]} channels, mean and std {len(self.mean)} values; "
                "expected one value per channel; give as many, and see that channels come before height and width"
            )
        largest = largest_value(dtype)
        return Affine(
            dtype if dtype.is_floating_point else torch.float32,
            scale=tuple(1 / (largest * std) for std in self.std),
            shift=tuple(-mean / std for mean, std in zip(self.mean, self.std, strict=True)),
        )

    def transform(self, image: torch.Tensor, params: Affine) -> torch.Tensor:
        """Scale images [n, c, ...] to [0, 1], subtract the mean, divide by the std."""
        largest = largest_value(image.dtype)
        image = image.to(params.dtype) / largest
        ones = [1] * (image.ndim - 2)
        mean = upload(torch.tensor(self.mean, dtype=image.dtype, device="cpu"), image.device).view(-1, *ones)
        std = upload(torch.tensor(self.std, dtype=image.dtype, device="cpu"), image.device).view(-1, *ones)
        return (image - mean) / std


COMPILED_ON = ("cuda",)
"""Device types. On the CPU a compiled gamma correction of an image was 6 % faster, a chain of seven operations 22 %
slower and 255 - x four times slower, after 2 to 23 s of compilation."""

Function: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


class Pointwise(ImageTransform):
    """Apply a function of single values, within the fused pass.

    On the CPU it is called without changes, on one image after another, while the image is in the cache. On CUDA it is
    compiled (`torch.compile`) when it is first used. If that fails, or gives other values, it is called without
    changes; repr shows which. A function that you compiled yourself is called without changes, can be pickled if the
    original can, and is compiled again when it is unpickled.

    Args:
        fn: takes images at that step, [c, h, w] or [n, c, h, w] (of volumes [c, d, h, w] or [n, c, d, h, w], of vectors
            [n, d]), or a part of one, and returns a tensor of the same shape, of any dtype. Each value depends on the
            value at its position and on nothing else. The function does not write to its argument, and may be called in
            the loader's thread.
        on: the field, see `Transform`.

    Raises:
        TransformError: `fn` is not callable; later, it returns no tensor or another shape, or a check of the first
            image shows that its values depend on others, or on chance.

    >>> Compose([RandomCrop(224), ToDtype(torch.float32, scale=True), Pointwise(lambda x: x**2.2)])  # doctest: +SKIP
    """

    spatial_dims = (0, 2, 3)

    def __init__(self, fn: Function, *, on: On = None) -> None:
        super().__init__(on=on)
        if not callable(fn):
            raise TransformError(
                f"Pointwise got a {type(fn).__name__}; expected a function of a tensor; e.g. lambda x: x.clamp(0, 1)"
            )
        self.fn = fn
        self._calls: dict[str, tuple[Function, str]] = {}
        self._output_dtypes: dict[torch.dtype, torch.dtype] = {}
        self._checked = False

    def make_params(self, shape: torch.Size, dtype: torch.dtype, uniform: DrawUniform) -> Mapped:
        """Draw nothing. Call the function with one pixel to learn the dtype of its output."""
        if dtype not in self._output_dtypes:
            pixel = torch.zeros(1, shape[1], *[1] * (len(shape) - 2), dtype=dtype, device="cpu")
            self._output_dtypes[dtype] = self._call(pixel).dtype
        return Mapped(partial(self._call_checked, len(shape)), self._output_dtypes[dtype])

    def extra_repr(self) -> str:
        """Return the function and how it is called on each device, for repr."""
        calls = [f"{how} on {kind}" for kind, (_, how) in self._calls.items()]
        return ", ".join([str(getattr(self.fn, "__qualname__", self.fn)), *calls])

    def _call_checked(self, batch_dims: int, image: torch.Tensor) -> torch.Tensor:
        """Call the function with an image, or with a batch, which has so many dims."""
        if not self._checked and image.numel():
            self._check(image[0] if image.ndim == batch_dims else image)
        return self._call(image)

    def _call(self, image: torch.Tensor) -> torch.Tensor:
        kind = image.device.type
        if kind not in self._calls:
            compiles = kind in COMPILED_ON and not hasattr(self.fn, "_torchdynamo_orig_callable")
            self._calls[kind] = _compile(self.fn, image) if compiles else (self.fn, "eager")
        result: Any = self._calls[kind][0](image)
        if not isinstance(result, torch.Tensor) or result.shape != image.shape:
            found = list(result.shape) if isinstance(result, torch.Tensor) else f"a {type(result).__name__}"
            raise TransformError(
                f"{self} gave {found} for images {list(image.shape)}; expected a tensor of the same shape; "
                "derive from memfeed.transforms.Transform for what is not done value by value"
            )
        return result

    def _check(self, image: torch.Tensor) -> None:
        """Compare the output for a part of an image [c, ...] with that part of the output for the whole image.

        A function may have a number for each channel, so a part of a vector [d] is its first half with another rest.
        """
        # The part is not in the middle, which a flip would keep.
        part = slice(None), *(slice(size // 4, size - size // 8) for size in image.shape[1:])
        other = image[part].clone()
        if image.ndim == 1:
            part = (slice(0, len(image) // 2),)
            other[len(image) // 2 :] = 0
        given = image.clone()
        whole = self._call(given)[part]
        try:
            alone = self.fn(other)
            alone = alone[part] if image.ndim == 1 else alone
        except RuntimeError as error:
            raise TransformError(
                f"{self} failed on a part of an image ({error}); expected a function that takes each value by itself; "
                "derive from memfeed.transforms.Transform for any other"
            ) from error
        # Not bit by bit: the shape decides which values a vectorised loop computes, and which a scalar loop.
        is_same = alone.shape == whole.shape and _agree(alone, whole)
        if not is_same or not torch.equal(given, image):
            found = "wrote to its argument" if is_same else "made other values of a part of an image than of the whole"
            raise TransformError(
                f"{self} {found}; expected a function that takes each value by itself, without chance, and makes a new "
                "tensor; derive from memfeed.transforms.Transform for any other"
            )
        # An image of one value does not show whether a function subtracts the mean: check the next one again.
        self._checked = bool((image != image.flatten()[0]).any())

    def __getstate__(self) -> dict[str, Any]:
        fn = getattr(self.fn, "_torchdynamo_orig_callable", None)
        return {**self.__dict__, "fn": fn or self.fn, "_calls": {}, "_compiled": fn is not None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        compiled = state.pop("_compiled")
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if compiled:
            self.fn = torch.compile(self.fn)


def _compile(fn: Function, image: torch.Tensor) -> tuple[Function, str]:
    """Return the compiled function, or `fn` if that fails or gives other values; and which, in words."""
    try:
        compiled: Function = torch.compile(fn, dynamic=True)
        one, other = compiled(image), fn(image)
        if one.dtype == other.dtype and _agree(one, other):
            return compiled, "compiled"
        return fn, "eager (compiled, it gives other values)"
    except Exception as error:  # any kind: from the tracer, from the compiler, or because one is missing
        return fn, f"eager (compiling failed: {type(error).__name__})"


def _agree(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if values are equal except for rounding. In 16 bits eager code rounds at each step, compiled once."""
    is_half = one.dtype.is_floating_point and one.dtype.itemsize <= 2
    rtol, atol = (3e-2, 1e-2) if is_half else (1e-3, 1e-6)
    return torch.allclose(one.double(), other.double(), rtol, atol, equal_nan=True)
