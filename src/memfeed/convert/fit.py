"""Fit new samples to the columns of a store that exists."""

from __future__ import annotations

import msgspec

from memfeed.convert.probe import ProbeResult
from memfeed.errors import SchemaError
from memfeed.schema.compare import leaves_like
from memfeed.schema.fields import Schema
from memfeed.schema.infer import Inferred


def fit(result: ProbeResult, like: Schema) -> ProbeResult:
    """Return the probed samples with the schema ``like`` in place of the one that was inferred from them.

    Raises SchemaError that names the field if they do not fit.
    """
    found = result.inferred
    try:
        leaves_like(result.probed.samples, found, like)
    except SchemaError as error:
        raise SchemaError(
            f"found samples that do not fit the store: {error}. Change the samples (dtypes= casts), or write a new "
            "store of all samples with memfeed.cache"
        ) from None
    own, want = [field.path for field in found.schema], [field.path for field in like]
    fields = [msgspec.structs.replace(field, lengths_of=None) for field in like]
    casts = frozenset(want.index(own[index]) for index in found.casts if own[index] in want)
    schema = Schema(fields=tuple(fields), structure=like.structure)
    fitted = Inferred(schema, found.structure_like(like), casts, frozenset(range(len(fields))))
    return msgspec.structs.replace(result, inferred=fitted)
