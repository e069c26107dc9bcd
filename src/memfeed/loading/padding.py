"""Padding of jagged fields: to the longest row of the batch, with a mask of the values that are real."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from memfeed.errors import LoaderError
from memfeed.schema.assemble import assembler
from memfeed.schema.fields import Node, Path, Schema
from memfeed.schema.jagged import ragged_dim_of
from memfeed.store.lengths import fill_values, is_jagged
from memfeed.store.ragged_gather import pad_rows
from memfeed.system.buffers import Fresh


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
            _move_after(parent, path[-1], mask_name(path[-1]))
    return batch


def _move_after(items: dict[Any, Any], key: Any, moved: Any) -> None:
    later = [name for name in items if name != moved]
    for name in later[later.index(key) + 1 :]:
        items[name] = items.pop(name)
