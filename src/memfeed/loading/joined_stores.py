"""Several stores as one, which a loader reads: their rows in turn, or mixed by weight."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from memfeed.errors import LoaderError, SchemaError
from memfeed.order.choice import check_weights
from memfeed.schema.codec import Int64Array
from memfeed.schema.compare import common_schema
from memfeed.schema.fields import Schema
from memfeed.store.backing import Backing, PartTransforms
from memfeed.store.columns import Column
from memfeed.store.store import Store
from memfeed.store.view import View
from memfeed.system.messages import say_once


class JoinedStore(Store):
    """Several stores as one, their rows in turn. It pickles as its parts.

    Attributes:
        parts: the stores.
        weights: the share of the rows of an epoch that comes from each; None for each row once.
    """

    parts: list[Store]
    weights: list[float] | None

    def __reduce__(self) -> tuple[Any, ...]:
        return join, (self.parts, self.weights)


def has_own_transform(store: Store) -> bool:
    """Return True if `Store.transform` is one, or an error that says where to get it."""
    return store._backing.transform is not None or bool(store._view.recipe)


def join(stores: Sequence[Store], weights: list[float] | None = None) -> Store:
    """Return one store of the rows of all stores, those of ``stores[0]`` first, for a loader to read. Copies nothing.

    Raises LoaderError for stores whose schemas differ, and says in which field; and for weights that do not sum to 1.
    """
    if weights is not None:
        check_weights(weights)
    if len(stores) == 1:
        return stores[0]
    first = stores[0]
    try:
        schema = common_schema([(store.path, store.schema) for store in stores])
    except SchemaError as error:
        raise LoaderError(f"{error}. A loader reads stores of one schema: select() the fields they share") from None
    for store in stores[1:]:
        _require_equal_windows(first, store)
        mine, theirs = (getattr(one, "classes", None) for one in (first, store))
        if None not in (mine, theirs) and mine != theirs:
            say_once(
                f"memfeed: {store.path} has other classes, or in another order, than {first.path}: one label may "
                "mean two of them; make all stores with the same list of classes"
            )
    views = [store._view for store in stores]
    backing = _joined_backing(schema, views)
    if any(map(has_own_transform, stores)):
        backing.transform = PartTransforms(stores)
    # views of whole stores need no list of rows
    rows: Int64Array | None = None
    if not all(view.has_all_rows for view in views):
        begins = np.cumsum([0, *(view.base_length for view in views)])
        rows = np.concatenate([begin + view.all_rows() for begin, view in zip(begins, views, strict=False)])
    whole = JoinedStore(View(backing, views[0].types, rows=rows))
    whole.parts, whole.weights = list(stores), weights
    return whole


def _joined_backing(schema: Schema, views: Sequence[View]) -> Backing:
    def check_dataset(_: Backing) -> None:
        for view in views:
            view.check_dataset()

    digest = hashlib.blake2b("+".join(view.source_digest() for view in views).encode(), digest_size=8).hexdigest()
    parts = list(zip(*(view.columns for view in views), strict=True))
    return Backing(
        None, schema, sum(view.base_length for view in views), digest, _maker(schema, parts), owner=list(views),
        remake=(_joined_backing, (schema, views)), check_dataset=check_dataset,
    )  # fmt: skip


def _maker(schema: Schema, parts: Sequence[tuple[Column, ...]]) -> Callable[[int], Column]:
    def make(field_index: int) -> Column:
        field, columns = schema.fields[field_index], parts[field_index]
        if len({column.layout for column in columns}) > 1:
            raise LoaderError(
                f"found field {field.name} kept in different ways ({', '.join(type(c).__name__ for c in columns)}); "
                "expected stores saved in one way: memfeed.cache(..., allow='copy') makes one of each"
            )
        return columns[0].joined(field, columns)

    return make


def _require_equal_windows(one: Store, other: Store) -> None:
    for mine, theirs in zip(one._view.columns, other._view.columns, strict=True):
        found = [None if column.offsets is None else column.offsets.tolist() for column in (mine, theirs)]
        if found[0] != found[1]:
            raise LoaderError(
                f"found windows of {mine.field.name} at other offsets in {other.path} than in {one.path}; expected "
                "the same: call windows(...) of each store with the same offsets"
            )
