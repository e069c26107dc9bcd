"""The transform Tail: the operations of torch and NumPy that a dataset makes with the results of its pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from memfeed.random import Keys
from memfeed.schema import values
from memfeed.schema.compare import equal
from memfeed.schema.ragged_list import RaggedList
from memfeed.schema.row_views import RowViews
from memfeed.splitting.leaves import Kind, copied, from_stored, leaves_of, to_stored
from memfeed.splitting.recording import Entry, Node
from memfeed.transforms.batch_fields import On
from memfeed.transforms.transform import Transform

B = TypeVar("B")


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
            made = {node: _column([self._as_field(node, row[node]) for row in rows]) for node in self.results}
        return {**fields, **{name: made[node] for node, name in self.results.items()}}  # type: ignore[return-value]

    def extra_repr(self) -> str:
        """Return the names of the operations, for repr."""
        return ", ".join(getattr(entry.function, "__name__", str(entry.function)) for entry in self.entries.values())

    def _row(self, columns: Mapping[Node, Any], row: int) -> dict[Node, Any]:
        return {node: from_stored([copied(columns[node][row])], kind) for node, (_, kind) in self.given.items()}

    def _as_field(self, node: Node, leaf: Any) -> Any:
        """Return a value that was written to as its field has it; a new one as it is."""
        return to_stored(leaf, self.given[node][1])[0] if node in self.given else leaf

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


def _column(rows: Sequence[Any]) -> Any:
    """Return the values of all samples as one field: a tensor if they have one shape, else a list."""
    tensors = [row if isinstance(row, torch.Tensor) else values.as_tensor(np.asarray(row)) for row in rows]
    if len({(tuple(one.shape), one.dtype) for one in tensors if one is not None}) == 1:
        return torch.stack([one for one in tensors if one is not None])
    return RaggedList(tensors)
