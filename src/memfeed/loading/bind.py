"""How a loader calls a user's transform: keyed, plain, or on one field."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from memfeed.errors import TransformError
from memfeed.schema.fields import Schema
from memfeed.system.buffers import Pool
from memfeed.transforms import Transform
from memfeed.transforms.batch_fields import find, replace

UserTransform = Callable[[Any], Any] | Mapping[Any, Callable[[torch.Tensor], torch.Tensor]] | None
Bound = Callable[[Any, Any], Any]


def bind(transform: UserTransform, schema: Schema | None = None, pool: Pool | None = None) -> Bound | None:
    """One function of (batch, keys) for what a user gave as ``transform``; None for none.

    A ``memfeed.transforms`` transform gets the keys, so that its randomness depends on nothing but them; any other
    callable gets the batch; ``{field: callable}`` calls each on that field's tensor. Raises TransformError for
    anything else, FieldError for a field that ``schema`` does not have. Outputs of our own transforms are leased from
    ``pool``.
    """
    if transform is None:
        return None
    if isinstance(transform, Transform):
        keyed = transform
        if pool is None:
            return lambda batch, keys: keyed.apply(batch, keys)
        lend = pool.lease
        return lambda batch, keys: keyed.apply(batch, keys, empty=lend)
    if isinstance(transform, Mapping):
        each = []
        for name, function in transform.items():
            if not callable(function):
                raise TransformError(f"transform= gives {type(function).__name__} for {name!r}; expected a callable")
            # fields= may have given a tuple's leaf a name that the batch, a list, does not know
            each.append((name if schema is None else schema.fields[schema.field_index(name)].path, function))

        def on_fields(batch: Any, _: object) -> Any:
            for path, function in each:
                field = find(batch, path)
                batch = replace(batch, field, function(field.tensor))
            return batch

        return on_fields
    if callable(transform):
        plain = transform
        return lambda batch, _: plain(batch)
    raise TransformError(
        f"found {type(transform).__name__} as transform=; expected a memfeed.transforms transform, a callable that "
        "takes a batch, or {field: callable}"
    )
