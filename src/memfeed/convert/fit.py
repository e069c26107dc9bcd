"""Fit new samples to the columns of a store that exists."""

from __future__ import annotations

import msgspec

from memfeed.convert.probe import ProbeResult
from memfeed.convert.staleness import schema_difference
from memfeed.errors import SchemaError
from memfeed.schema.fields import Schema
from memfeed.schema.infer import Inferred
from memfeed.schema.tree import Flattener


def fit(result: ProbeResult, like: Schema) -> ProbeResult:
    """Return the probed samples with the schema ``like`` in place of the one that was inferred from them.

    Raises SchemaError that names the field if they do not fit.
    """
    found = result.inferred
    own, want = [field.path for field in found.schema], [field.path for field in like]
    # the samples may have a simpler structure than those that were stored, whose structure then decides
    structure = like.structure if found.structure == found.schema.structure else found.structure
    try:
        if structure is found.structure and own != want:
            raise SchemaError("")
        flattener = Flattener(structure)
        for sample in result.probed.samples:
            flattener(sample)
    except SchemaError as error:
        raise _misfit(schema_difference(found.schema, like) or str(error)) from None
    if own == want:
        # any value of JSON fits a field of JSON values
        fields = [then if then.kind == "json" else now for now, then in zip(found.schema, like, strict=True)]
        difference = schema_difference(Schema(fields=tuple(fields), structure=found.schema.structure), like)
        if difference:
            raise _misfit(difference)
    fields = [msgspec.structs.replace(field, lengths_of=None) for field in like]
    casts = frozenset(want.index(own[index]) for index in found.casts if own[index] in want)
    schema = Schema(fields=tuple(fields), structure=like.structure)
    fitted = Inferred(schema, structure, casts, frozenset(range(len(fields))))
    return msgspec.structs.replace(result, inferred=fitted)


def _misfit(difference: str) -> SchemaError:
    return SchemaError(
        f"found samples that do not fit the store: {difference}. Change the samples (dtypes= casts), or write a new "
        "store of all samples with memfeed.cache"
    )
