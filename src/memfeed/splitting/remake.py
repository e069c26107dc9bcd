"""The transforms at the two ends of the rest of a pipeline that was cut (``cache(split=True)``).

Arrange and Assemble lead from the fields of a store to those of a pipeline, and to finished batches, where finished
samples have another structure than what is stored of them: two views of one stored image, for example. Remake makes
each sample of a batch again from what is stored, by the dataset's own random steps. Tail has the operations of torch
and NumPy that a dataset makes with the results of its pipeline.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from memfeed.errors import TransformError
from memfeed.random import Keys, uniform
from memfeed.schema import values
from memfeed.schema.assemble import assembler
from memfeed.schema.compare import equal
from memfeed.schema.fields import Field, Schema
from memfeed.schema.jagged import RaggedList, RowViews, jagged_batches
from memfeed.schema.names import Path
from memfeed.schema.samples import FinishedSamples
from memfeed.schema.tree import Flattener
from memfeed.splitting.cut import Cut
from memfeed.splitting.leaves import Kind, copied, from_stored, leaves_of, to_stored
from memfeed.splitting.recording import Entry, Node
from memfeed.splitting.stored_layout import Named
from memfeed.transforms.batch_fields import On
from memfeed.transforms.transform import Transform

B = TypeVar("B")


class Arrange(Transform):
    """Return a dict of the fields of a batch under other names. One field may have several names.

    Args:
        fields: for each new name the path of a field in the batch. All other fields are left out.

    Raises:
        TransformError: the batch has no such field.
    """

    of_whole_batches = passes_views = True

    def __init__(self, fields: Mapping[str, Sequence[str | int]]) -> None:
        super().__init__()
        self.fields = {name: tuple(path) for name, path in fields.items()}
        self.paths_read = list(self.fields.values())

    def change_batch(self, batch: B, keys: Keys, stream: str, on: On) -> B:
        """Return the dict; see `Operation.change_batch`."""
        arranged: Any = {name: _at(batch, path) for name, path in self.fields.items()}
        return arranged  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        """Return the fields, for repr."""
        return ", ".join(f"{name} <- {'.'.join(map(str, path))}" for name, path in self.fields.items())


class Assemble(Transform):
    """Build the finished batch from a dict of its leaves.

    Args:
        leaves: for each leaf of the batch the key of a field, in the order of the fields of `schema`.
        channels_last: keys of the images that come out as [n, h, w, c].
        schema: of the finished samples.
        types: classes of their containers, as for `memfeed.open`.
    """

    of_whole_batches = passes_views = True

    def __init__(
        self, leaves: Sequence[str], channels_last: Iterable[str], schema: Schema, types: Iterable[type] = ()
    ) -> None:
        super().__init__()
        self.leaves, self.channels_last, self.schema = list(leaves), frozenset(channels_last), schema
        self._assemble = assembler(schema.structure, types, batched=True, forms=[field.form for field in schema.fields])

    def change_batch(self, batch: B, keys: Keys, stream: str, on: On) -> B:
        """Build the batch; see `Operation.change_batch`."""
        given: Any = batch
        leaves, seen = [], set[str]()
        for key in self.leaves:
            leaf = _with_channels_last(given[key]) if key in self.channels_last else given[key]
            leaves.append(_copy(leaf) if key in seen else leaf)  # a leaf of a batch has memory of its own
            seen.add(key)
        return self._assemble(leaves)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        """Return the leaves, for repr."""
        return ", ".join(self.leaves)


class Remake(Transform):
    """Make each sample again, as the proof of the cut did, and collate the samples: slow, and right for any pipeline.

    Args:
        cut: has the random steps, and the generators that they draw from, which are seeded by the key of each sample.
        layout: of what is stored.
        schema: of the finished samples.
        types: classes of their containers.
        shown: the names of the steps.
    """

    thread_safe = False  # it runs the user's code and sets the global generators
    of_whole_batches = True
    is_batched = False
    gives_samples = False

    def __init__(self, cut: Cut, layout: Named, schema: Schema, types: Iterable[type], shown: str) -> None:
        super().__init__()
        self._cut, self._layout, self._fields, self._names = cut, layout, schema.fields, shown
        self.schema = schema
        self._flattener = Flattener(schema.structure)
        self._assemble = assembler(schema.structure, types, batched=True, forms=[field.form for field in schema.fields])
        self.paths_read = [(name,) for names in layout.names for name in names]

    def giving_samples(self) -> Remake:
        """Return this transform, which gives the samples themselves, a `FinishedSamples`, and no batch of them."""
        other = copy.copy(self)
        other.gives_samples = True
        return other

    def change_batch(self, batch: B, keys: Keys, stream: str, on: On) -> B:
        """Make the samples and collate them; see `Operation.change_batch`."""
        given: Any = batch
        rows = _rows(given, len(keys.rows))
        seeds = (uniform(keys, stream)[:, 0] * 2**53).astype(np.int64).tolist()
        generators, samples = self._cut.generators, []
        with generators.preserved():
            for row, seed, stored in zip(keys.rows.tolist(), seeds, rows, strict=True):
                pattern, kept = self._layout.loaded(stored)
                generators.seed(seed)
                try:
                    sample = self._cut.rebuild(pattern, kept)
                except Exception as error:
                    if hasattr(error, "add_note"):
                        error.add_note(f"in the random steps {self._names}, on row {row} of the store")
                    raise
                samples.append(sample)
        if self.gives_samples:
            return FinishedSamples(samples)  # type: ignore[return-value]
        leaves = [self._flattener(sample) for sample in samples]
        device = next((leaf.device for leaf in given.values() if isinstance(leaf, torch.Tensor)), torch.device("cpu"))
        by_field = zip(self._fields, zip(*leaves, strict=True), strict=True)
        columns = [_column(field, column, device) for field, column in by_field]
        return self._assemble(columns)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        """Return the names of the steps, for repr."""
        return self._names


def _rows(batch: Any, count: int) -> list[dict[str, Any]]:
    """Return the stored samples of a batch; tensors share its memory."""
    columns = {name: _values(leaf) for name, leaf in batch.items()}
    return [{name: column[row] for name, column in columns.items()} for row in range(count)]


def _values(leaf: Any) -> Sequence[Any]:
    """Return the value of each row of a field, on the CPU."""
    leaf = _owned(leaf)
    if isinstance(leaf, torch.Tensor):
        leaf = leaf.cpu()
        return leaf.unbind() if leaf.is_nested or leaf.ndim else [leaf]
    return [one.cpu() if isinstance(one, torch.Tensor) else one for one in leaf]


def _column(field: Field, rows: Sequence[Any], device: torch.device) -> Any:
    """Return the leaves of all samples as a batch has them; a list of tensors where they cannot be one."""
    if field.kind in ("str", "bytes", "json"):
        return list(rows)
    if field.form == "scalar" and not any(row is None for row in rows):
        return torch.tensor(rows, dtype=field.torch_dtype, device=device)
    tensors = [None if row is None else _as_tensor(row, field).to(device) for row in rows]
    present = [one for one in tensors if one is not None]
    if field.kind == "fixed" and len({one.shape for one in present}) == 1 and len(present) == len(rows):
        return torch.stack(present)
    if field.kind == "jagged" and len(present) == len(rows) and _fit(present, field):
        dim = field.ragged_dim
        lengths = np.array([one.shape[dim] for one in present], np.int64)
        return jagged_batches(torch.cat(present, dim).reshape(-1), lengths, len(rows), field, {})[0]
    return RaggedList(tensors)


def _as_tensor(row: Any, field: Field) -> torch.Tensor:
    tensor = values.as_tensor(row)
    return torch.tensor(row, dtype=field.torch_dtype, device="cpu") if tensor is None else tensor


def _fit(tensors: Sequence[torch.Tensor], field: Field) -> bool:
    """Return True if tensors differ in no other dim than that which varies in a field."""
    return all(
        one.ndim == len(field.shape)
        and all(dim in (None, size) for dim, size in zip(field.shape, one.shape, strict=True))
        for one in tensors
    )


class Tail(Transform):
    """Make operations on each sample of a batch, or on the batch at once where that gives the same bits.

    Args:
        entries: the operations, by their numbers on the tape.
        given: the values that they work on: the field and the kind of each.
        results: the fields of what they make, by node.
        probes: values of `given` in some samples, to find out if the batch may be changed at once.
    """

    of_whole_batches = True

    def __init__(
        self,
        entries: Mapping[int, Entry],
        given: Mapping[Node, tuple[str, Kind]],
        results: Mapping[Node, str],
        probes: Sequence[Mapping[Node, Any]],
    ) -> None:
        super().__init__()
        self.entries, self.given, self.results = dict(entries), dict(given), dict(results)
        self.is_batched = self._may_be_batched(probes)

    def change_batch(self, batch: B, keys: Keys, stream: str, on: On) -> B:
        """Add the results to the batch, a dict; see `Operation.change_batch`."""
        fields: Any = batch
        columns = {node: _owned(fields[name]) for node, (name, _) in self.given.items()}
        if self.is_batched and all(isinstance(column, torch.Tensor) for column in columns.values()):
            made = self._at_once(columns)
        else:
            rows = [self._of_sample(self._row(columns, j)) for j in range(len(keys.rows))]
            made = {}
            for node in self.results:
                leaves = [row[node] for row in rows]
                if node in self.given:  # it was written to: as its field has it
                    leaves = [to_stored(leaf, self.given[node][1])[0] for leaf in leaves]
                made[node] = _rows_as_field(leaves)
        return {**fields, **{name: made[node] for node, name in self.results.items()}}  # type: ignore[return-value]

    def extra_repr(self) -> str:
        """Return the names of the operations, for repr."""
        return ", ".join(getattr(entry.function, "__name__", str(entry.function)) for entry in self.entries.values())

    def _row(self, columns: Mapping[Node, Any], row: int) -> dict[Node, Any]:
        return {node: from_stored([copied(columns[node][row])], kind) for node, (_, kind) in self.given.items()}

    def _of_sample(self, made: dict[Node, Any]) -> dict[Node, Any]:
        """Return the results for one sample, whose values are written to where an operation does so."""
        for number, entry in self.entries.items():
            given = [
                copied(v) if link is None else made[link] for link, v in zip(entry.links, entry.values, strict=True)
            ]
            args, kwargs = entry.form.build(given)
            made.update(((number, i), leaf) for i, leaf in enumerate(leaves_of(entry.function(*args, **kwargs))))
        return made

    def _at_once(self, columns: Mapping[Node, Any]) -> dict[Node, Any]:
        nodes = list(columns)

        def of_rows(*leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
            made = self._of_sample(dict(zip(nodes, leaves, strict=True)))
            return tuple(made[node] for node in self.results)

        found = torch.vmap(of_rows)(*(columns[node].clone() for node in nodes))
        return dict(zip(self.results, found, strict=True))

    def _may_be_batched(self, probes: Sequence[Mapping[Node, Any]]) -> bool:
        if any(kind.name != "tensor" for _, kind in self.given.values()):
            return False
        try:
            rows = [self._of_sample({node: copied(probe[node]) for node in self.given}) for probe in probes]
            columns = {node: torch.stack([probe[node] for probe in probes]) for node in self.given}
            made = self._at_once(columns)
        except (RuntimeError, TypeError, ValueError, AttributeError):  # of several shapes, or no operation of batches
            return False
        results = [(made[node][j], row[node]) for j, row in enumerate(rows) for node in self.results]
        return all(type(other) is torch.Tensor and equal(one.contiguous(), other) for one, other in results)


def _owned(column: Any) -> Any:
    return column.owned() if isinstance(column, RowViews | RaggedList) else column


def _rows_as_field(rows: Sequence[Any]) -> Any:
    """Return the values of all samples as one field: a tensor if they have one shape, else a list."""
    tensors = [row if isinstance(row, torch.Tensor) else values.as_tensor(np.asarray(row)) for row in rows]
    if len({(tuple(one.shape), one.dtype) for one in tensors if one is not None}) == 1:
        return torch.stack([one for one in tensors if one is not None])
    return RaggedList(tensors)


def _at(batch: Any, path: Path) -> Any:
    value = batch
    for key in path:
        try:
            value = getattr(value, key) if isinstance(key, str) and hasattr(type(value), "_fields") else value[key]
        except (KeyError, IndexError, TypeError):
            raise TransformError(
                f"found no field {'.'.join(map(str, path))} in a batch; expected the fields of the store that the "
                "transform belongs to"
            ) from None
    return value


def _with_channels_last(images: Any) -> Any:
    images = _owned(images)
    if isinstance(images, list):
        return RaggedList(row.permute(1, 2, 0).contiguous() for row in images)
    return images.permute(0, 2, 3, 1).contiguous()


def _copy(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.clone()
    if isinstance(leaf, RowViews):
        return leaf.owned()
    if isinstance(leaf, RaggedList):
        return RaggedList(None if row is None else row.clone() for row in leaf)
    return list(leaf) if isinstance(leaf, list) else leaf
