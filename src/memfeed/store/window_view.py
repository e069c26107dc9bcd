"""Make the view of ``Store.windows``: check its arguments, find the episodes, make the schema and the columns."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Mapping, Sequence
from itertools import count, islice
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from memfeed.errors import FieldError, RowError
from memfeed.schema.codec import Int64Array
from memfeed.schema.fields import Field, Node, Path, Schema, display
from memfeed.store.backing import Backing
from memfeed.store.columns import Column
from memfeed.store.gather import Gather, all_rows
from memfeed.store.view import View
from memfeed.store.windows import Episodes, MaskColumn, WindowColumn
from memfeed.system.buffers import Fresh

MOST_STEPS = 1 << 20


class WindowArgument(NamedTuple):
    """One argument of ``Store.windows``: the leaves at ``path``, and the offsets at which they are given."""

    name: str
    path: Path
    offsets: Int64Array


def window_backing(view: View, offsets: Any, within: Any, complete: bool) -> Backing:
    """Return the schema and the columns of the view that ``store.windows`` returns; see there."""
    row_count = view.base_length
    asked = parse(offsets, view.schema, row_count)
    column = None if within is None else view.columns[view.schema.field_index(within)]
    rows = None if view.has_all_rows else view.base_rows(np.arange(len(view)))
    episodes = find_episodes(column, len(view), rows)
    schema, columns = with_windows(view.schema, view.columns, row_count, asked, episodes, masks=not complete)
    arguments = {one.path: tuple(one.offsets.tolist()) for one in asked}, within, complete
    return Backing(
        path=view.path,
        schema=schema,
        row_count=row_count,
        digest=hashlib.blake2b(f"{view.source_digest()} {arguments}".encode(), digest_size=8).hexdigest(),
        open_column=columns.__getitem__,
        manifest=view.manifest,
        owner=view,
        remake=(window_backing, (view, *arguments)),
        description=describe(asked, within, complete=complete),
        check_dataset=lambda _: view.check_dataset(),
    )


def complete_rows(columns: Sequence[Any]) -> Int64Array:
    """Return the rows whose windows are all complete, in order."""
    windows = [column for column in columns if column.base is not column]
    offsets = np.concatenate([one.offsets for one in windows])
    found: Int64Array = windows[0].episodes.complete_rows(int(offsets.min()), int(offsets.max()))
    return found


def parse(offsets: Any, schema: Schema, row_count: int) -> list[WindowArgument]:
    """Return the windows that a user asks for. Raises FieldError, RowError for what cannot be given as windows."""
    if not isinstance(offsets, Mapping) or not offsets:
        raise FieldError(
            f"found {type(offsets).__name__} {offsets!r:.80}; expected the offsets of one or more fields: "
            'store.windows({"image": [-1, 0], "action": range(16)}, within="episode")'
        )
    windows: list[WindowArgument] = []
    taken: set[int] = set()
    for key, given in offsets.items():
        indices = schema.field_indices(key)
        fields = [schema.fields[index] for index in indices]
        path = _container(key, fields[0].path)
        for index, field in zip(indices, fields, strict=True):
            if field.kind != "fixed" or field.optional:
                raise FieldError(
                    f"found windows of field {field.name}, which is {field.describe()}; expected a field whose rows "
                    "have one shape: leave it out of windows(), then it is given at the row itself"
                )
            if index in taken:
                raise FieldError(f"found two windows of field {field.name}; expected one list of offsets for it")
            taken.add(index)
        windows.append(
            WindowArgument(fields[0].name if len(fields) == 1 else display(path), path, _offsets(key, given))
        )
    return [one._replace(offsets=one.offsets.clip(-row_count, row_count)) for one in windows]


def _container(key: Any, leaf: Path) -> Path:
    """Return the path that a user's ``key`` means: that of a ``leaf``, or of a container of it."""
    for depth in range(len(leaf), 0, -1):
        if key in (leaf[:depth], display(leaf[:depth])) or leaf[:depth] == (key,):
            return leaf[:depth]
    return leaf  # the key is the name that fields= gave, or there is one value


def _offsets(key: Any, given: Any) -> Int64Array:
    try:
        asked = list(islice(given, MOST_STEPS + 1))  # a range may be longer than memory
        is_mask = any(
            isinstance(offset, bool | np.bool_) or getattr(offset, "dtype", None) is torch.bool for offset in asked
        )
        found = [] if is_mask else [operator.index(offset) for offset in asked]
    except TypeError:
        found = []
    if not 0 < len(found) <= MOST_STEPS or any(abs(offset) >= 1 << 62 for offset in found):
        raise RowError(
            f"found the offsets {given!r:.80} for {key!r}; expected a list or range of ints, counted in rows: "
            "[-1, 0] (of seconds: [round(s * frames_per_second) for s in seconds]), "
            f"at most {MOST_STEPS:,} of them"
        )
    return np.array(found, np.int64)


def find_episodes(column: Column | None, row_count: int, rows: Int64Array | None) -> Episodes:
    """Return the episodes of the ``rows`` of a store (None for all of them).

    ``column`` has an int for each row that is the same in the rows of an episode; None for one sequence of all rows.
    Raises FieldError for a column of something else, RowError where the rows of an episode are not neighbours.
    """
    if rows is not None:
        ordered = np.sort(rows)
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        if len(twice):
            raise RowError(
                f"found row {int(twice[0])} of the base store twice in this subset; expected each row once: call "
                "windows(...) first, then subset(rows)"
            )
    if column is None:
        return Episodes(np.zeros(min(row_count, 1), np.int64), row_count, rows)
    field = column.field
    if field.kind != "fixed" or field.row_elements != 1 or field.dtype.startswith(("float", "bfloat", "complex")):
        raise FieldError(
            f"found within={field.name!r}, which is {field.describe()}; expected a field with one int for each row, "
            "the same in all rows of an episode; within=None takes the whole store as one sequence"
        )
    ids = all_rows(column) if rows is None else Gather([column], [Fresh()])(rows)[0]
    values = ids.reshape(-1).numpy()
    starts = np.concatenate([[0], np.flatnonzero(values[1:] != values[:-1]) + 1])[: len(values)]
    names, first = np.unique(values[starts], return_index=True)
    if len(names) < len(starts):
        again = int(np.setdiff1d(np.arange(len(starts)), first)[0])
        name, row = values[starts[again]], int(starts[again])
        raise RowError(
            f"found row {row} of {field.name} {name} after rows of others (it began at row "
            f"{int(starts[first[np.searchsorted(names, name)]])}); expected the rows of each beside each other: call "
            "windows(...) before subset or split, or order the rows first: "
            f"store.subset(store.column({field.name!r}).argsort(stable=True)).windows(...)"
        )
    return Episodes(starts, row_count, rows)


def describe(windows: Sequence[WindowArgument], within: Any, *, complete: bool) -> str:
    """Return the arguments of ``Store.windows`` as text: ``windows: image [-1, 0], within episode``."""
    shown = [f"{one.name} {_shortened(one.offsets.tolist())}" for one in windows[:5]]
    shown += [f"{len(windows) - 5} more"] if len(windows) > 5 else []
    where = "the whole store" if within is None else display((within,) if isinstance(within, str | int) else within)
    return f"windows: {', '.join(shown)}, within {where}{', complete' if complete else ''}"


def _shortened(offsets: Sequence[int]) -> str:
    if len(offsets) > 8:
        return f"[{', '.join(map(str, offsets[:3]))}, ..., {offsets[-1]}]"
    return str(list(offsets))


# --- schema and columns


def with_windows(
    schema: Schema,
    columns: Sequence[Column],
    row_count: int,
    windows: Sequence[WindowArgument],
    episodes: Episodes,
    masks: bool,
) -> tuple[Schema, list[Column]]:
    """Return the schema and the columns of a view with ``windows``, and with ``masks`` a mask beside each.

    ``columns`` are those of the base store, which has ``row_count`` rows.
    """
    leaves: list[int | WindowArgument] = []
    structure = _structure(schema, windows if masks else (), leaves)
    steps = {index: one for one in windows for index in schema.field_indices(one.path)}
    new_index = {leaf: at for at, leaf in enumerate(leaves) if isinstance(leaf, int)}
    fields: list[Field] = []
    made: list[Column] = []
    for leaf, path in zip(leaves, structure.leaves(), strict=True):
        if isinstance(leaf, WindowArgument):
            size = len(leaf.offsets)
            field = Field(path=path, name=f"{leaf.name}_mask", stem="", kind="fixed", dtype="bool", shape=(size,))
            column: Column = MaskColumn(field, row_count, leaf.offsets, episodes)
        else:
            old, column = schema.fields[leaf], columns[leaf]
            group = None if old.lengths_of is None else new_index[old.lengths_of]
            field = msgspec.structs.replace(old, path=path, lengths_of=group)
            if leaf in steps:
                offsets = steps[leaf].offsets
                field = msgspec.structs.replace(field, shape=(len(offsets), *old.shape), form="tensor")
                column = WindowColumn(field, column, row_count, offsets, episodes)
        fields.append(field)
        made.append(column)
    return Schema(fields=tuple(fields), structure=structure), made


def _structure(schema: Schema, windows: Iterable[WindowArgument], leaves: list[int | WindowArgument]) -> Node:
    """Return the structure with a mask beside the leaf or container of each window; collect its ``leaves``."""
    indices = count()

    def build(node: Node, path: Path) -> Node:
        if node.kind == "leaf":
            leaves.append(next(indices))
            return node
        inside = [one for one in windows if one.path[: len(path)] == path]
        here = [one for one in inside if one.path[:-1] == path]
        before = len(leaves)
        children = [build(child, (*path, key)) for key, child in node.items()]
        node = msgspec.structs.replace(node, children=tuple(children), batch_dims=0 if inside else node.batch_dims)
        if not here:
            return node
        kind, keys = _keys_of(node, [leaves[at] for at in range(before, len(leaves))], schema, here[0])
        for one in here:
            key = keys[[key for key, _ in node.items()].index(one.path[-1])]
            mask = f"{key}_mask"
            if mask in keys:
                raise FieldError(
                    f"found a field {mask!r} beside {key!r}, whose mask needs that key; expected another name for the "
                    "field: complete=True gives no masks, select(...) leaves the field out"
                )
            leaves.append(one)
            children.append(Node(kind="leaf"))
            keys = (*keys, mask)
        return Node(kind=kind, keys=keys, children=tuple(children))

    if any(not one.path for one in windows):
        raise FieldError(
            "found samples of one value, which have no place for a mask; expected samples that are dicts: "
            "complete=True gives only the rows whose windows are complete, without masks"
        )
    return build(schema.structure, ())


def _keys_of(
    node: Node, leaves: Sequence[int | WindowArgument], schema: Schema, window: WindowArgument
) -> tuple[Any, tuple[Any, ...]]:
    """Return the kind and the keys of a container that gets a mask. A record becomes a dict, as in ``Store.select``."""
    if node.kind in ("tensordict", "tensorclass"):
        return "tensordict", node.keys
    if node.keys:
        return "dict", node.keys
    fields = [schema.fields[leaf] for leaf in leaves if isinstance(leaf, int)]
    if len(fields) == len(node.children) and all(field.name != display(field.path) for field in fields):
        return "dict", tuple(field.name for field in fields)
    raise FieldError(
        f"found the field {window.name} in a {node.kind} without names, which has no place for a mask; expected dicts, "
        'or names given with cache(..., fields=("image", "action")): complete=True gives only the rows whose windows '
        "are complete, without masks"
    )
