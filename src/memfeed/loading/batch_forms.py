"""The forms of a batch: padded, as arrays of NumPy or JAX, of one row, or as a list of samples for a user's collate_fn.

Arrays share the memory of the tensors where they can. A batch of one row has tensors of varying shape as [1, *shape],
as DataLoader gives them. The samples of a list have the form in which the dataset returned them.

With a transform of the user's own the samples are the stored ones, and the transform takes what the collate_fn returns.
The store's own transform is a part of the dataset's pipeline: it runs first, on the gathered batch, and the finished
batch is taken apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import msgspec
import numpy as np
import optree
import torch

from memfeed.errors import LoaderError, TransformError
from memfeed.loading.bind import Bound, UserTransform, followed_images, is_keyed
from memfeed.schema.assemble import NAMESPACE, assembler
from memfeed.schema.containers import map_leaves
from memfeed.schema.fields import Node, Path, Schema
from memfeed.schema.jagged import jagged_rows, jagged_values, ragged_dim_of
from memfeed.schema.samples import Canvases, FinishedSamples, SampleMaker
from memfeed.schema.tensordicts import is_tensordict
from memfeed.schema.tree import Flattener
from memfeed.store.gather import ReadSamples
from memfeed.store.lengths import fill_values, is_jagged
from memfeed.store.ragged_gather import pad_rows
from memfeed.store.store import Store
from memfeed.system.buffers import Fresh
from memfeed.system.messages import require


class PaddedField(NamedTuple):
    """A field that is padded: its index and path, and the value that fills up its rows."""

    field_index: int
    path: Path
    value: Any


def padded_fields(pad: Any, schema: Schema) -> tuple[PaddedField, ...]:
    """Return the fields that ``pad`` fills up, by index. Raises LoaderError or FieldError for what cannot be padded."""
    indices = [index for index, field in enumerate(schema) if is_jagged(field)]
    values = fill_values(pad, schema, indices, "pad")
    padded = tuple(PaddedField(index, schema.fields[index].path, value) for index, value in values.items())
    with_masks(schema.structure, [one.path for one in padded])
    return padded


def mask_name(key: str | int) -> str:
    """Return the key of a field's mask, which stands beside the field."""
    return f"{key}_mask"


def with_masks(node: Node, paths: Sequence[Path], path: Path = ()) -> Node:
    """Return a structure with a mask after each leaf at ``paths``.

    Raises LoaderError where a leaf is not in a dict or TensorDict, or the key of its mask is there already.
    """
    keys: list[str | int] = []
    children: list[Node] = []
    if path in paths and not path:
        raise _not_in_a_dict("the sample itself")
    for key, child in node.items():
        keys.append(key)
        children.append(with_masks(child, paths, (*path, key)))
        if child.kind == "leaf" and (*path, key) in paths:
            if node.kind not in ("dict", "tensordict"):
                raise _not_in_a_dict(f"{key!r} of a {node.kind}")
            if mask_name(key) in node.keys:
                raise LoaderError(
                    f'found a field "{mask_name(key)}" and pad=, which adds one; expected another name for the field'
                )
            keys.append(mask_name(key))
            children.append(Node(kind="leaf"))
    return msgspec.structs.replace(node, keys=tuple(keys) if node.keys else (), children=tuple(children))


def _not_in_a_dict(what: str) -> LoaderError:
    return LoaderError(
        f"found pad= for {what}; expected a field of a dict or TensorDict, where its mask gets a key: make the store "
        'of samples like {"tokens": tokens, "label": label}'
    )


def padding_beside_collate() -> LoaderError:
    """Return the error for padded fields where there are no gathered batches to pad."""
    return LoaderError(
        "found pad= and a collate_fn, or batch_size=None; expected batches of the loader's own: leave pad= out, or "
        "make the batches with batch_size= and change them with transform="
    )


def masked_assembler(
    structure: Node, types: Sequence[type], padded: Sequence[PaddedField]
) -> Callable[[Sequence[Any]], Any]:
    """Return a function that builds a batch of its leaves, one per field, and then one mask per padded field."""
    inner = assembler(with_masks(structure, [one.path for one in padded]), types, batched=True)
    field_count = sum(1 for _ in structure.leaves())
    mask_of = {one.field_index: field_count + at for at, one in enumerate(padded)}
    order = [at for index in range(field_count) for at in ((index, mask_of[index]) if index in mask_of else (index,))]
    return lambda leaves: inner([leaves[at] for at in order])


def pad_batch(batch: Any, padded: Sequence[PaddedField]) -> Any:
    """Pad the jagged fields of a batch that is put together already, in place. Returns the batch."""
    for _, path, value in padded:
        parent = batch
        for key in path[:-1]:
            parent = parent[key]
        jagged = parent[path[-1]]
        offsets = jagged.offsets().numpy()
        lengths, dim = offsets[1:] - offsets[:-1], ragged_dim_of(jagged)
        parent[path[-1]], mask = pad_rows(jagged.values(), lengths, value, Fresh(), Fresh(), dim)
        parent[mask_name(path[-1])] = mask
        if isinstance(parent, dict):  # the order of the keys is that of a loader's batches
            keys = list(parent)
            for key in keys[keys.index(path[-1]) + 1 : -1]:
                parent[key] = parent.pop(key)
    return batch


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


class OneRow:
    """Makes the tensors of a batch of one row plain. Batches of more rows stay as they are.

    A transform of fields sees a field of images as it does in larger batches: one by one if they differ in size. So
    its batch is made plain after it. A function of the batch gets one that is plain.

    Args:
        schema: of the stored samples; that of a transform counts for what it returns, if it makes other samples.
        transform: what the batches go through.
        is_wanted: False for a loader whose batches of one row stay as they are.
    """

    def __init__(self, schema: Schema, transform: UserTransform, is_wanted: bool) -> None:
        found = getattr(transform, "schema", None)
        made = found if isinstance(found, Schema) else schema
        is_ragged = any(field.kind in ("list", "jagged") for field in made)
        is_after = is_keyed(transform) or (isinstance(transform, Mapping) and bool(transform))
        self._paths = made.list_paths()
        # of a nested tensor the length takes 30 us, so that of another field is preferred
        self._counted = next((at for at, field in enumerate(schema) if field.kind != "jagged"), 0)
        self.is_before, self.is_after = (is_wanted and is_ragged and at for at in (not is_after, is_after))

    def before(self, assemble: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a function of the leaves of a batch that calls ``assemble``, and makes the batch plain if due."""
        if not self.is_before:
            return assemble

        def assemble_plain(leaves: Sequence[Any]) -> Any:
            batch = assemble(leaves)
            return self.plain(batch) if _row_count(leaves[self._counted]) == 1 else batch

        return assemble_plain

    def after(self, bound: Bound | None) -> Bound | None:
        """Return a transform that makes plain what ``bound`` returns, if that is due."""
        if bound is None or not self.is_after:
            return bound
        transform = bound

        def transform_plain(batch: Any, keys: Any) -> Any:
            found = transform(batch, keys)
            return self.plain(found) if self._has_one_row(found, keys) else found

        return transform_plain

    def _has_one_row(self, batch: Any, keys: Any) -> bool:
        from memfeed.transforms.batch_fields import mark_ragged, tensors

        if keys is not None:
            return len(keys.rows) == 1
        field = next(tensors(mark_ragged(batch, 1, self._paths)), None)
        return field is not None and _row_count(field.tensor) == 1

    def plain(self, batch: Any) -> Any:
        """Return a batch of one row with its tensors as [1, *shape]. A row without a value stays [None]."""
        from memfeed.transforms.batch_fields import mark_ragged, replace, tensors

        batch = mark_ragged(batch, 1, self._paths)
        for field in list(tensors(batch)):
            rows = field.tensor
            if isinstance(rows, torch.Tensor):
                if not rows.is_nested:
                    continue
                # of a jagged tensor without a look at its offsets, for which a GPU would wait
                row = jagged_values(rows)
                if row is None:
                    row = rows.values() if rows.layout is torch.jagged else rows.unbind()[0]
            else:
                row = rows[0]
            batch = replace(batch, field, list(rows) if row is None else row.unsqueeze(0))
        return batch


def _row_count(rows: Any) -> int:
    if isinstance(rows, torch.Tensor) and type(rows) is not torch.Tensor and hasattr(rows, "offsets"):
        return len(rows.offsets()) - 1
    return len(rows)


CollateSamples = Callable[[Any, Canvases], Any]
"""Takes a finished batch, or the leaves of one that nothing has transformed, and the canvas sizes beside it."""


def finished_schema(transform: object, stored: Schema) -> Schema:
    """Return the schema of what the store's own transform makes of the samples of a store.

    Its attribute ``schema`` describes samples of another structure; without one, or if it is None, the structure is
    that of the ``stored`` samples. Raises TransformError for any other value.
    """
    found = getattr(transform, "schema", None)
    if found is None:
        return stored
    if not isinstance(found, Schema):
        raise TransformError(
            f"found a {type(found).__name__} as {type(transform).__name__}.schema; expected a "
            "memfeed.schema.fields.Schema of the samples that it returns, or None"
        )
    return found


def giving_samples(transform: Any) -> Any:
    """Return the store's own transform; if it makes samples one by one, as one that does not collate them."""
    return transform.giving_samples() if hasattr(transform, "giving_samples") else transform


def finished_maker(transform: object, store: Store) -> SampleMaker:
    """Return the maker of samples of batches that the store's own ``transform`` has finished."""
    schema = finished_schema(transform, store.schema)
    followed = followed_images(transform, schema) if schema is store.schema and is_keyed(transform) else {}
    return SampleMaker(schema, store._view.types, followed, getattr(transform, "leaf_makers", {}))


def as_returned(collate_fn: Any, store: Store, batch_size: int | None, batch_sampler: Any) -> Any:
    """Return a user's collate_fn, in an `AsReturned` if samples of a whole store had arrays or PIL images."""
    has_them = bool(store._backing.leaf_makers) and store.transform is None
    single = batch_size is None and batch_sampler is None
    return AsReturned(collate_fn, store, single) if has_them else collate_fn


class AsReturned:
    """Calls a user's collate_fn with samples whose arrays and PIL images are such again, as the dataset returned them.

    Trainers that make a DataLoader of a loader's parts call it too, in other processes.
    """

    def __init__(self, collate_fn: Callable[[Any], Any], store: Store, single: bool) -> None:
        self.collate_fn, self._single = collate_fn, single
        self._schema, self._types = store.schema, store._view.types
        self._makers = store._backing.leaf_makers

    def __call__(self, samples: Any) -> Any:
        """Return the batch of a list of samples, or of one sample."""
        return self.collate_fn(self._made(samples) if self._single else list(map(self._made, samples)))

    def _made(self, sample: Any) -> Any:
        leaves = Flattener(self._schema.structure)(sample)
        pairs = zip((self._makers.get(field.path) for field in self._schema), leaves, strict=True)
        made = [leaf if make is None else make(leaf) for make, leaf in pairs]
        return assembler(self._schema.structure, self._types, batched=False)(made)


def canvases_for(maker: SampleMaker, store: Store, leaves: Canvases) -> Canvases:
    """Return the leaves of canvas sizes by the fields of finished samples, where these have the same paths."""
    paths = {store.schema.fields[index].path: leaf for index, leaf in leaves.items()}
    fields = [(index, maker.schema.fields[index].path) for index in maker.canvas_fields]
    return {index: paths[path] for index, path in fields if path in paths}


def collate_finished(
    collate_fn: Callable[[Any], Any], transform: object, store: Store, *, single: bool
) -> CollateSamples:
    """Return a function that calls a user's collate_fn with the samples of a finished batch; ``single``: with one."""
    maker = finished_maker(transform, store)

    def collate(batch: Any, canvases: Canvases) -> Any:
        if isinstance(batch, FinishedSamples):
            return collate_fn(batch[0] if single else list(batch))
        samples = maker.samples_of(batch, canvases_for(maker, store, canvases))
        return collate_fn(next(samples) if single else as_list(samples, batch, store))

    return collate


def collate_stored(collate_fn: Callable[[Any], Any], store: Store, *, single: bool) -> CollateSamples:
    """Return a function that calls a user's collate_fn with stored samples, of their leaves; ``single``: with one."""

    def collate(leaves: Any, _: Canvases) -> Any:
        samples = store._view.sample_maker.samples_of_leaves(leaves)
        if single:
            return collate_fn(next(samples))
        has_methods = store.schema.structure.kind in ("tensordict", "tensorclass")
        return collate_fn(as_list(samples, store._view.assemble_batch(leaves) if has_methods else None, store))

    return collate


def as_list(samples: Iterable[Any], batch: Any, store: Store) -> list[Any]:
    """Return samples as a collate_fn gets them: those of TensorDicts have the methods of their batch."""
    if not is_tensordict(batch):
        return list(samples)
    nothing = np.empty(0, np.int64)
    return ReadSamples(samples, batch, nothing, nothing, store, {})
