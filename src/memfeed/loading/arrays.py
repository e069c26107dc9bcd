"""Batches of tensors as arrays of NumPy or JAX, which share the memory of the tensors where they can."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import optree
import torch

from memfeed.errors import LoaderError
from memfeed.schema.assemble import NAMESPACE
from memfeed.schema.containers import map_leaves
from memfeed.schema.jagged import jagged_rows
from memfeed.schema.tensordicts import is_tensordict
from memfeed.system.extras import require


def converter(kind: str) -> Callable[[Any], Any] | None:
    """Return a function from a batch of tensors to a batch of arrays; None for "torch".

    A jagged tensor becomes a list of arrays, one per row; a TensorDict becomes a dict. Raises ModuleNotFoundError
    without JAX.
    """
    if kind == "torch":
        return None
    to_array = _to_numpy if kind == "numpy" else _jax_importer()

    def array(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return [to_array(row) for row in jagged_rows(value)] if value.is_nested else to_array(value)

    def plain(value: Any) -> Any:
        return value.to_dict() if is_tensordict(value) else value

    def convert(batch: Any) -> Any:
        opened = optree.tree_map(plain, batch, is_leaf=is_tensordict, none_is_leaf=True, namespace=NAMESPACE)
        return map_leaves(array, opened)

    return convert


def _to_numpy(tensor: torch.Tensor) -> Any:
    if tensor.dtype is torch.bfloat16 or "float8" in str(tensor.dtype):
        raise LoaderError(f'found {tensor.dtype} with as_="numpy", which NumPy does not have; expected another dtype')
    return tensor.cpu().numpy()


def _jax_importer() -> Callable[[torch.Tensor], Any]:
    require("jax", "jax")
    jax: Any = import_module("jax")

    def to_jax(tensor: torch.Tensor) -> Any:
        if tensor.device.type != "cpu" and not _has_backend(jax, tensor.device.type):
            tensor = tensor.cpu()
        if not jax.config.jax_enable_x64:  # JAX has no 64 bits without it: as jnp.asarray does it
            tensor = tensor.to(_NARROW.get(tensor.dtype, tensor.dtype))
        if tensor.dtype is torch.bool:  # not every version of DLPack has it
            return to_jax(tensor.view(torch.uint8)).astype(bool)
        return jax.dlpack.from_dlpack(tensor.contiguous())

    return to_jax


_NARROW = {torch.int64: torch.int32, torch.float64: torch.float32, torch.complex128: torch.complex64}


def _has_backend(jax: Any, device_type: str) -> bool:
    """Return True if JAX can hold arrays on devices of this type; else they are copied to the CPU."""
    try:
        return bool(jax.devices("gpu" if device_type == "cuda" else device_type))
    except RuntimeError:
        return False
