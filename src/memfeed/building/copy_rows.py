"""Write a finished store of rows that can be read, such as memoized results."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from memfeed.building.build import Build
from memfeed.building.claim import claim
from memfeed.schema.codec import Int64Array, Packed
from memfeed.schema.values import bytes_of
from memfeed.store.backing import Backing
from memfeed.store.column import Column

_AT_ONCE = 64 << 20  # bytes of rows in memory


def copy_rows(backing: Backing, path: Path) -> None:
    """Write all rows of ``backing`` into a new store at ``path``. Raises SpaceError if the disk is full."""
    count = backing.row_count or 0
    columns = [backing.column(index) for index in range(len(backing.schema))]
    step = max(1, _AT_ONCE // max(1, sum(column.mean_row_bytes for column in columns)))
    with claim(path) as root:
        build = Build.begin(root, backing.schema, count, None)
        writer = build.writer()
        for first in range(0, count, step):
            rows = np.arange(first, min(first + step, count))
            writer.write(first, len(rows), [_packed(column, rows) for column in columns])
        writer.close()
        build.commit(path)


def _packed(column: Column, rows: Int64Array) -> Packed:
    field = column.field
    if field.kind == "fixed":
        out = torch.empty(len(rows), *field.row_shape, dtype=field.torch_dtype, device="cpu")
        return Packed([bytes_of(column.gather_into(rows, out))], None)
    located = column.locate(rows)
    data = np.empty(located.nbytes, np.uint8)
    column.copy(located.starts, located.lengths.clip(0), data)  # type: ignore[attr-defined]  # every such column can
    return Packed([data], located.dims)
