"""Values of a sample: what kind of value one is, and conversions that change no value.

A leaf may be a tensor, a numpy array, a PIL image, a Python number, a str, bytes, a list of numbers or a JSON value.
"""

from __future__ import annotations

import copy
import sys
import warnings
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from memfeed.errors import SchemaError
from memfeed.schema import kept_tensors
from memfeed.schema.containers import tensors_in
from memfeed.schema.fields import DTYPES, Form, dtype_name
from memfeed.schema.kept_tensors import copy_kept, kept_name
from memfeed.schema.tensordicts import is_a, is_tensor_collection

Bytes = npt.NDArray[np.uint8]
SCALAR_DTYPES: dict[type, str] = {bool: "bool", int: "int64", float: "float64", complex: "complex128"}
NUMPY_DTYPES = {name: np.dtype(name) for name in DTYPES if not name.startswith(("bfloat", "float8"))}
_SMALL_BYTES = 1 << 16  # a read-only array up to this size is copied, which avoids torch's warning


class ValueSpec(NamedTuple):
    """The kind, dtype, shape and form of one value; ``kind`` is "array", "str", "bytes" or "json"."""

    kind: str
    dtype: str = "uint8"
    shape: tuple[int, ...] = ()
    form: Form = "tensor"

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}" if self.kind == "array" else self.kind


def class_of(value: Any) -> type:
    """Return the class of a value as its dataset knows it.

    A class that takes the place of another one, to notice what is done with its values, names that as ``_stands_for``.
    A row of a mapped file is an array like any other.
    """
    kind = type(value)
    found: type = np.ndarray if kind is np.memmap else getattr(kind, "_stands_for", kind)
    return found


PLAIN_MODES = ("RGB", "L", "RGBA")
"""The modes of Pillow that the number of channels tells."""

OTHER_MODES = ("1", "LA", "P", "CMYK", "YCbCr", "HSV", "LAB", "I;16", "I", "F")
"""Those of which an image is made again of its channels, if its mode is known, and its palette."""


class Picture(NamedTuple):
    """The mode of a PIL image: "RGB" for any of `PLAIN_MODES`, "" for one that is not made again.

    Images of the mode P have a ``palette``, the bytes of its colours.
    """

    mode: str = ""
    palette: bytes = b""

    def __str__(self) -> str:
        if self.mode in PLAIN_MODES:
            return f"one of the modes {', '.join(PLAIN_MODES)}"
        return f"the mode {self.mode}" + (" with the same palette, and no transparent colour" if self.palette else "")


def is_pil(value: Any) -> bool:
    """Return True for an image of Pillow."""
    image = sys.modules.get("PIL.Image")  # never imported here: a value can be an image only if it is loaded
    return image is not None and isinstance(value, image.Image)


def picture_of(image: Any) -> Picture:
    """Return what a PIL image has beside its channels."""
    if image.mode in PLAIN_MODES:
        return Picture("RGB")
    is_known = image.mode in OTHER_MODES and "transparency" not in image.info
    if image.mode != "P" or not is_known:
        return Picture(image.mode if is_known else "")
    image.load()
    return Picture("P" if image.palette.mode == "RGB" else "", bytes(image.getpalette("RGB") or b""))


def _pil_array(image: Any) -> npt.NDArray[Any]:
    """Return [c, h, w]; uint8 for the 8-bit modes, palette indices for a palette, as torchvision's pil_to_tensor."""
    array = np.asarray(image)
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    if array.dtype == np.bool_:
        array = array.astype(np.uint8) * 255
    return array[None] if array.ndim == 2 else array.transpose(2, 0, 1)


def holds_more(value: Any) -> bool:
    """Return True for a tensor or array of a class that may hold more than its numbers, which no column keeps."""
    if not isinstance(value, torch.Tensor):
        return isinstance(value, np.ma.MaskedArray)
    is_plain = type(value) in (torch.Tensor, torch.nn.Parameter) or is_a(value, "tensordict", "MemoryMappedTensor")
    return not (is_plain or value.is_nested or kept_tensors.class_name(value))


def check_class(value: Any, where: str = "") -> None:
    """Raise SchemaError for a tensor or array of which a column would lose something; ``where`` begins the message."""
    if not holds_more(value):
        return
    cls = type(value)
    if isinstance(value, torch.Tensor):
        lost = ", ".join(["the class", *(name.lstrip("_") for name in getattr(value, "__dict__", ()))])
        line = "x.as_tensor()" if hasattr(cls, "as_tensor") else "x.as_subclass(torch.Tensor)"
    else:
        lost, line = "the mask", "x.filled(0)"
    raise SchemaError(
        f"{where}found {cls.__name__} (of {cls.__module__}), of which a store would lose {lost:.100}; expected a plain "
        f"tensor or array: return {line} in the dataset, and what you need of the rest as fields of their own"
    )


def as_tensor(value: Any) -> torch.Tensor | None:
    """Return a tensor, array or image as a dense CPU tensor, which may share its memory; None for any other value.

    Raises SchemaError for a tensor that is not dense, for an array of a dtype that no column can have, and for a class
    of either that holds more than numbers.
    """
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_nested or value.is_quantized or value.is_meta:
            reasons = ("nested", value.is_nested), ("quantized", value.is_quantized), ("meta", value.is_meta)
            kind = next((name for name, applies in reasons if applies), str(value.layout))
            line = "return a dense tensor per sample (rows may have different lengths)"
            if value.layout != torch.strided:
                line = "return x.to_dense(), or its indices and values"
            raise SchemaError(f"found a {kind} tensor; expected a dense one with data: {line}")
        check_class(value)
        plain = value if type(value) is torch.Tensor else value.as_subclass(torch.Tensor)
        return plain.detach().cpu().resolve_conj().resolve_neg()
    if isinstance(value, str | bytes):  # numpy has subclasses of both
        return None
    if isinstance(value, np.ndarray | np.generic):
        check_class(value)
        array = np.asarray(value)
        if array.dtype.newbyteorder("=") not in NUMPY_DTYPES.values():
            raise SchemaError(
                f"found a numpy value of dtype {array.dtype}; expected a bool or a number (no object, str or time): "
                "convert it in the dataset"
            )
        array = array.astype(array.dtype.newbyteorder("="), copy=False)
        if any(stride < 0 or stride % array.itemsize for stride in array.strides):
            array = array.copy()  # torch has neither; a part of a structured array has strides of the second kind
        if array.flags.writeable:
            return torch.from_numpy(array)
        if array.nbytes < _SMALL_BYTES:
            return torch.from_numpy(array.copy())
        with warnings.catch_warnings():  # nothing here writes to it, and it may be a map larger than memory
            warnings.simplefilter("ignore")
            return torch.from_numpy(array)
    if is_pil(value):
        return torch.from_numpy(np.array(_pil_array(value), order="C"))
    return None


def scalar_dtype(value: Any) -> str | None:
    """Return the dtype of a Python number, also of one of a derived class, as an IntEnum; None for any other value."""
    name = SCALAR_DTYPES.get(type(value))
    if name is not None or isinstance(value, np.generic):
        return name
    return next((SCALAR_DTYPES[cls] for cls in (int, float, complex) if isinstance(value, cls)), None)


def number_list_dtype(value: Any) -> str | None:
    """Return the dtype of a list of Python numbers that all have one type; None for any other value."""
    if type(value) is not list or not value:
        return None
    types = {type(item) for item in value}
    return SCALAR_DTYPES.get(types.pop()) if len(types) == 1 else None


def describe(value: Any) -> ValueSpec | None:
    """Return the spec of a value that is a leaf by itself; None for a container, and for None.

    Raises SchemaError for a value that no column can hold.
    """
    name = scalar_dtype(value)
    if name is not None:
        if name == "int64" and not -(2**63) <= value < 2**63:
            raise SchemaError(f"found the int {value}; expected one that fits int64: return a tensor or a float")
        return ValueSpec("array", name, (), "scalar")
    if isinstance(value, str):
        return ValueSpec("str")
    if isinstance(value, bytes | bytearray):
        return ValueSpec("bytes")
    tensor = as_tensor(value)
    if tensor is not None:
        return ValueSpec("array", dtype_name(tensor.dtype), tuple(tensor.shape))
    return None


def describe_list(value: Any) -> ValueSpec | None:
    """Return the spec of a list of Python numbers of one type, as one leaf; None for any other value.

    The dtype of an empty list is "".
    """
    if type(value) is list and not value:
        return ValueSpec("array", "", (0,), "list")
    name = number_list_dtype(value)
    return None if name is None else ValueSpec("array", name, (len(value),), "list")


def cast_exactly(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``tensor`` in another dtype; raise SchemaError if this would change a value."""
    cast = tensor.to(dtype)
    back = cast.to(tensor.dtype)
    same = back == tensor
    if is_integer(dtype) and is_integer(tensor.dtype):
        # casting back is no test between signed and unsigned: -1 becomes 255 and -1 again
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        array = tensor.numpy()  # numpy compares with Python ints of any size exactly
        same &= torch.from_numpy(np.asarray((array >= low) & (array <= high)))
    if tensor.is_floating_point() or tensor.is_complex():
        same |= torch.isnan(back) & torch.isnan(tensor)
    if not bool(same.all()):
        changed = tensor.reshape(-1)[int((~same).reshape(-1).to(torch.uint8).argmax())]
        raise SchemaError(
            f"found the value {changed.item()}, which {dtype_name(dtype)} would change (a lossy cast); "
            "choose a wider dtype in forms=, or cast in the dataset"
        )
    return cast


def is_integer(dtype: torch.dtype) -> bool:
    """Return True for a dtype of integers."""
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def copy_value(leaf: Any) -> Any:
    """Return a leaf that shares no memory with ``leaf``, which its dataset may write to again.

    A leaf of a structure may be a list or dict: a json value, or a list of numbers. A tensor that holds more than
    numbers is returned itself: `as_tensor` refuses it, where its field is known.
    """
    if type(leaf) in SCALAR_DTYPES or type(leaf) in (str, bytes):
        return leaf
    if isinstance(leaf, torch.Tensor):
        if _has_numpy_memory(leaf):
            # torch would divide an image among threads, which wait for each other on busy cores
            return torch.from_numpy(np.array(leaf.detach().numpy(), order="C"))
        if kept_name(leaf):
            return copy_kept(leaf)
        if holds_more(leaf):
            return leaf
        try:
            return leaf.detach().clone()
        except RuntimeError as error:  # torch cannot copy its dtype (int4, say)
            if "not implemented" not in str(error):
                raise
            raise SchemaError(
                f"found a tensor of {leaf.dtype}, which torch cannot copy; expected a dtype with whole bytes: "
                "return sample.view(torch.uint8)"
            ) from None
    if is_tensor_collection(leaf):
        return leaf if any(map(holds_more, tensors_in(leaf))) else leaf.clone()
    if isinstance(leaf, np.ndarray):
        return leaf.copy()
    if type(leaf) is list and SCALAR_DTYPES.keys() >= set(map(type, leaf)):
        return list(leaf)
    copied = copy.deepcopy(leaf) if isinstance(leaf, list | dict | bytearray) or is_pil(leaf) else leaf
    if is_pil(leaf) and leaf.palette is not None and leaf.palette.mode == "RGBA":
        copied.putpalette(leaf.getpalette("RGBA"), "RGBA")  # the copy has no transparency; `leaf.copy()` has no class
    return copied


def _has_numpy_memory(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and not (tensor.is_nested or tensor.is_conj() or tensor.is_neg())
        and tensor.dtype in _NUMPY_DTYPES
    )


_NUMPY_DTYPES = frozenset(getattr(torch, name) for name in NUMPY_DTYPES)


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """Return the bytes of a dense tensor; they share its memory if it is contiguous."""
    count = tensor.numel()
    if not count:
        return np.empty(0, np.uint8)
    if count > 1 and _has_numpy_memory(tensor) and not tensor.requires_grad:
        # in a third of the time of what follows; and torch would divide a copy among threads, see `copy_value`
        plain: Bytes = np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8)
        return plain
    # a single element counts as contiguous whatever its strides are, and then its bytes cannot be viewed
    flat = tensor.contiguous().as_strided((tensor.numel(),), (1,))
    array: Bytes = flat.view(torch.uint8).numpy()
    return array


def is_contiguous(value: Any) -> bool:
    """Return True for a tensor or array whose memory ``as_tensor`` and ``bytes_of`` give without a copy."""
    if type(value) is np.ndarray:
        return value.flags.c_contiguous and value.dtype.isnative
    return (
        type(value) is torch.Tensor
        and value.device.type == "cpu"
        and value.layout == torch.strided
        and not (value.is_nested or value.is_quantized or value.is_conj() or value.is_neg())
        and value.is_contiguous()
    )
