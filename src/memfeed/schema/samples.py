"""Take batches apart into samples, each in the form in which the dataset returned it.

The inverse of collating: `memfeed.schema.assemble` puts batches together from the same leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch

from memfeed.errors import TransformError, brief
from memfeed.schema.assemble import assembler
from memfeed.schema.fields import Field, Node, Path, Schema, display
from memfeed.schema.graphs import graph_parts, is_graph_batch
from memfeed.schema.jagged import jagged_rows
from memfeed.schema.tensordicts import is_a
from memfeed.schema.tree import Flattener

Canvases = Mapping[int, Any]
"""Leaves of canvas sizes by the index of their field, each of all rows of a batch, which has no place for them."""


class FinishedSamples(list[Any]):
    """The samples of a batch, from a transform that makes them one by one: they need not be collated first."""


class SampleMaker:
    """Makes samples of one schema from batches, or from the leaves of batches.

    Args:
        schema: of the samples.
        types: the record classes of samples and batches, as `memfeed.open` takes them.
        moved_with: by the index of a field of canvas sizes, the index of the images whose size it has: those that a
            transform moved boxes or key points with.
        makers: by the path of a field, what makes a leaf of a sample of its row in a batch.
    """

    def __init__(
        self,
        schema: Schema,
        types: Iterable[type] = (),
        moved_with: Mapping[int, int] | None = None,
        makers: Mapping[Path, Callable[[Any], Any]] | None = None,
    ) -> None:
        self.schema, self.moved_with, self._makers = schema, moved_with or {}, makers or {}
        self.assemble = assembler(schema.structure, types, batched=False)
        self._flatten = _BatchFlattener(schema)

    @cached_property
    def canvas_fields(self) -> list[int]:
        """The indices of the fields with the canvas sizes of boxes and key points, which batches do not have."""
        paths = {path for path, _ in self.schema.structure.of_kind("tv_tensor")}
        return [index for index, one in enumerate(self.schema) if one.path[:-1] in paths and one.path[-1] != "values"]

    def canvases(self, leaves: Sequence[Any]) -> Canvases:
        """Return the leaves of canvas sizes, which the batch itself does not have."""
        return {index: leaves[index] for index in self.canvas_fields}

    def samples_of_leaves(self, leaves: Sequence[Any]) -> Iterator[Any]:
        """Return the samples of a batch, given its leaves, one per field; they share the memory of the leaves."""
        rows = [rows_of_leaf(field, leaf) for field, leaf in zip(self.schema, leaves, strict=True)]
        counts = {field.name: len(values) for field, values in zip(self.schema, rows, strict=True)}
        if len({*counts.values()}) > 1:
            raise TransformError(
                f"found fields of {brief(counts, 120)} rows; expected as many rows of each field: a transform that "
                "leaves rows out must do so in every field"
            )
        for index, field in enumerate(self.schema):
            if field.path in self._makers:
                rows[index] = list(map(self._makers[field.path], rows[index]))
        return map(self.assemble, map(list, zip(*rows, strict=True)))

    def samples_of(self, batch: Any, canvases: Canvases) -> Iterator[Any]:
        """Return the samples of a batch. Their tensors are views of the batch.

        Leaves of the batch may differ from their fields in dtype and shape. A number or a list of numbers is again one
        of Python, unless it has become a tensor of more dims. Boxes and key points get the size of the image that they
        moved with, or that of ``canvases``, unless they have one of their own.

        Raises:
            TransformError: the batch is nested in another way than samples of the schema, a value that has no rows, or
                boxes whose canvas size is not known.
        """
        leaves = self._flatten(batch)
        for index in self.canvas_fields:
            leaves[index] = self._canvas(index, leaves, canvases)
        return self.samples_of_leaves(leaves)

    def _canvas(self, index: int, leaves: Sequence[Any], canvases: Canvases) -> Any:
        values = leaves[index - 1]
        if isinstance(values, list) and values and all(hasattr(row, "canvas_size") for row in values):
            return [list(row.canvas_size) for row in values]
        if index in self.moved_with:
            at = self.moved_with[index]
            return [list(image.shape[-2:]) for image in rows_of_leaf(self.schema.fields[at], leaves[at])]
        if index in canvases:
            return canvases[index]
        path = self.schema.fields[index].path[:-1]
        raise TransformError(
            f"found {display(path)} without the size of its image; expected a list of torchvision's own tensors, one "
            "for each row, in a batch whose schema is not that of the store"
        )


def rows_of_leaf(field: Field, leaf: Any) -> list[Any]:
    """Return the rows of a field of a batch as samples have them; tensors are views of ``leaf``."""
    if isinstance(leaf, np.ndarray):
        leaf = torch.from_numpy(leaf)
    if isinstance(leaf, torch.Tensor) and leaf.ndim:
        if field.form == "scalar" and leaf.ndim == 1:
            numbers: list[Any] = leaf.tolist()
            return numbers
        rows = jagged_rows(leaf) if leaf.is_nested else list(leaf.unbind(0))
    elif isinstance(leaf, list | tuple) or (isinstance(leaf, np.ndarray) and leaf.ndim):
        rows = list(leaf)
    elif is_a(leaf, "tensordict", "NonTensorStack", "NonTensorData"):
        rows = leaf.tolist()
    else:
        raise TransformError(
            f"found a {type(leaf).__name__} as field {field.name} of a batch; expected a tensor or a list with one "
            "value for each row"
        )
    if field.form == "tensor":
        return rows
    # one of more dims is no longer the number or the list that the dataset returned: shares of classes, say
    return [row.tolist() if isinstance(row, torch.Tensor) and row.ndim == len(field.shape) else row for row in rows]


class _BatchFlattener(Flattener):
    """Takes batches apart into one leaf per field of a schema, where samples have these: None for canvas sizes."""

    stands_for: ClassVar[Mapping[str, str]] = {"tuple": "list", "dataclass": "dict", "tensorclass": "tensordict"}

    def __init__(self, schema: Schema) -> None:
        super().__init__(schema.structure)
        self.fields = schema.fields

    def _walk(self, node: Node, value: Any, path: Path, leaves: list[Any]) -> None:
        if node.kind == "leaf":
            leaves.append(value)
        elif node.kind == "tv_tensor":
            leaves += [value, None]
        elif node.kind == "tensor":
            raise self._mismatch(path, f"a batch of {node.name}, of which only its library knows the rows", "samples")
        elif node.kind == "graph":
            leaves += self._rows_of_graphs(node, value, path, len(leaves))
        elif node.kind not in ("none", "shared"):
            super()._walk(node, value, path, leaves)

    def _rows_of_graphs(self, node: Node, batch: Any, path: Path, first: int) -> Iterator[list[Any]]:
        """Yield the leaves from field ``first`` on: those of each graph, in lists."""
        if not is_graph_batch(batch):
            raise self._mismatch(path, type(batch).__name__, "a Batch of graphs")
        rows = []
        for graph in batch.to_data_list():
            own: list[Any] = []
            parts = graph_parts(graph)
            for key, child in node.items():
                self._walk(child, parts[str(key)], (*path, key), own)
            rows.append(own)
        for field, column in zip(self.fields[first:], zip(*rows, strict=True), strict=False):
            if field.shape:
                yield list(column)
            else:  # PyTorch Geometric gave a number a dim, to collate it
                yield [row[0] if isinstance(row, torch.Tensor) and row.shape == (1,) else row for row in column]

    def _mismatch(self, path: Path, found: str, expected: str, hint: str = "") -> Exception:
        where = f" at {display(path)}" if path else ""
        return TransformError(
            f"found {found}{where} in a transformed batch; expected {expected}, as in the samples of the store: a "
            "transform that changes their structure describes what it returns by its attribute `schema`"
        )
