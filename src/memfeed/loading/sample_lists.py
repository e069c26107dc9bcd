"""Make the samples of a batch for a user's collate_fn, in the form in which the dataset returned them.

With a transform of the user's own the samples are the stored ones, and the transform takes what the collate_fn returns.
The store's own transform is a part of the dataset's pipeline: it runs first, on the gathered batch, and the finished
batch is taken apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from memfeed.errors import TransformError
from memfeed.loading.bind import followed_images, is_keyed
from memfeed.schema.assemble import assembler
from memfeed.schema.fields import Schema
from memfeed.schema.samples import Canvases, FinishedSamples, SampleMaker
from memfeed.schema.tensordicts import is_tensordict
from memfeed.schema.tree import Flattener
from memfeed.store.read_samples import ReadSamples
from memfeed.store.store import Store

CollateSamples = Callable[[Any, Canvases], Any]
"""Takes a finished batch, or the leaves of one that nothing has transformed, and the canvas sizes beside it."""


def finished_schema(transform: object, stored: Schema) -> Schema:
    """Return the schema of what the store's own transform makes of the samples of a store.

    Its attribute ``schema`` describes samples of another structure; without one, or if it is None, the structure is
    that of the ``stored`` samples. Raises TransformError for any other value.
    """
    found = getattr(transform, "schema", None)
    if found is None:
        return stored
    if not isinstance(found, Schema):
        raise TransformError(
            f"found a {type(found).__name__} as {type(transform).__name__}.schema; expected a "
            "memfeed.schema.fields.Schema of the samples that it returns, or None"
        )
    return found


def giving_samples(transform: Any) -> Any:
    """Return the store's own transform; if it makes samples one by one, as one that does not collate them."""
    return transform.giving_samples() if hasattr(transform, "giving_samples") else transform


def finished_maker(transform: object, store: Store) -> SampleMaker:
    """Return the maker of samples of batches that the store's own ``transform`` has finished."""
    schema = finished_schema(transform, store.schema)
    followed = followed_images(transform, schema) if schema is store.schema and is_keyed(transform) else {}
    return SampleMaker(schema, store._view.types, followed, getattr(transform, "leaf_makers", {}))


def as_returned(collate_fn: Any, store: Store, batch_size: int | None, batch_sampler: Any) -> Any:
    """Return a user's collate_fn, in an `AsReturned` if samples of a whole store had arrays or PIL images."""
    has_them = bool(store._backing.leaf_makers) and store.transform is None
    single = batch_size is None and batch_sampler is None
    return AsReturned(collate_fn, store, single) if has_them else collate_fn


class AsReturned:
    """Calls a user's collate_fn with samples whose arrays and PIL images are such again, as the dataset returned them.

    Trainers that make a DataLoader of a loader's parts call it too, in other processes.
    """

    def __init__(self, collate_fn: Callable[[Any], Any], store: Store, single: bool) -> None:
        self.collate_fn, self._single = collate_fn, single
        self._schema, self._types = store.schema, store._view.types
        self._makers = store._backing.leaf_makers

    def __call__(self, samples: Any) -> Any:
        """Return the batch of a list of samples, or of one sample."""
        return self.collate_fn(self._made(samples) if self._single else list(map(self._made, samples)))

    def _made(self, sample: Any) -> Any:
        leaves = Flattener(self._schema.structure)(sample)
        made = [self._makers.get(f.path, _unchanged)(leaf) for f, leaf in zip(self._schema, leaves, strict=True)]
        return assembler(self._schema.structure, self._types, batched=False)(made)


def _unchanged(leaf: Any) -> Any:
    return leaf


def canvases_for(maker: SampleMaker, store: Store, leaves: Canvases) -> Canvases:
    """Return the leaves of canvas sizes by the fields of finished samples, where these have the same paths."""
    paths = {store.schema.fields[index].path: leaf for index, leaf in leaves.items()}
    fields = [(index, maker.schema.fields[index].path) for index in maker.canvas_fields]
    return {index: paths[path] for index, path in fields if path in paths}


def collate_finished(
    collate_fn: Callable[[Any], Any], transform: object, store: Store, *, single: bool
) -> CollateSamples:
    """Return a function that calls a user's collate_fn with the samples of a finished batch; ``single``: with one."""
    maker = finished_maker(transform, store)

    def collate(batch: Any, canvases: Canvases) -> Any:
        if isinstance(batch, FinishedSamples):
            return collate_fn(batch[0] if single else list(batch))
        samples = maker.samples_of(batch, canvases_for(maker, store, canvases))
        return collate_fn(next(samples) if single else as_list(samples, batch, store))

    return collate


def collate_stored(collate_fn: Callable[[Any], Any], store: Store, *, single: bool) -> CollateSamples:
    """Return a function that calls a user's collate_fn with stored samples, of their leaves; ``single``: with one."""

    def collate(leaves: Any, _: Canvases) -> Any:
        samples = store._view.sample_maker.samples_of_leaves(leaves)
        if single:
            return collate_fn(next(samples))
        has_methods = store.schema.structure.kind in ("tensordict", "tensorclass")
        return collate_fn(as_list(samples, store._view.assemble_batch(leaves) if has_methods else None, store))

    return collate


def as_list(samples: Iterable[Any], batch: Any, store: Store) -> list[Any]:
    """Return samples as a collate_fn gets them: those of TensorDicts have the methods of their batch."""
    if not is_tensordict(batch):
        return list(samples)
    nothing = np.empty(0, np.int64)
    return ReadSamples(samples, batch, nothing, nothing, store, {})
