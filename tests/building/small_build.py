"""A build of a few rows, for the tests of this room."""

import torch

from memfeed.schema import codec
from memfeed.schema.infer import infer
from support import equal

SCHEMA = infer([{"x": torch.arange(3), "r": torch.arange(2)}, {"x": torch.arange(3), "r": torch.arange(1)}]).schema


def packed(first, count):
    columns = (
        [torch.arange(3) + i for i in range(first, first + count)],
        [torch.arange(i % 4) for i in range(first, first + count)],
    )
    return [codec.pack(field, values) for field, values in zip(SCHEMA, columns, strict=True)]


def is_right(store, rows):
    return all(equal(store[r], {"x": torch.arange(3) + i, "r": torch.arange(i % 4)}) for r, i in enumerate(rows))
