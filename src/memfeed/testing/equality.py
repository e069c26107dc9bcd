"""Compare two samples or batches."""

from __future__ import annotations

from typing import Any

from memfeed.schema import compare


def equal(a: Any, b: Any) -> bool:
    """Return True if structure, types, dtypes and values are equal, bit by bit. The keys of a dict may be in any order.

    An array or image equals the tensor that a store returns for it. Tensors may be on different devices. The rule in
    full is that of `memfeed.schema.compare`, with ``as_stored``.
    """
    return compare.equal(a, b, as_stored=True)
