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
        wide = tensor.dtype in (torch.int64, torch.float64, torch.complex128) and not jax.config.jax_enable_x64
        if wide or tensor.dtype is torch.bool:  # JAX has no 64 bits without jax_enable_x64: as jnp.asarray does it
            return jax.numpy.asarray(tensor.cpu().numpy())
        return jax.dlpack.from_dlpack(tensor.contiguous())

    return to_jax
