"""Turn a user's `transform=` into one function of a batch and its keys."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import TypeIs

from memfeed.errors import FieldError, LoaderError, TransformError, brief
from memfeed.schema.fields import Schema, display
from memfeed.system.buffers import Allocator

if TYPE_CHECKING:
    from memfeed.store.store import Store
    from memfeed.transforms import Transform
    from memfeed.transforms.batch_fields import Windows

UserTransform = Callable[[Any], Any] | Mapping[Any, Callable[[torch.Tensor], torch.Tensor]] | None
Bound = Callable[[Any, Any], Any]


def is_keyed(transform: object) -> TypeIs[Transform]:
    """Return True for a ``memfeed.transforms`` transform: one exists only where somebody imported them."""
    transforms = sys.modules.get("memfeed.transforms.transform")
    return transforms is not None and isinstance(transform, transforms.Transform)


def bind(
    transform: UserTransform,
    schema: Schema | None = None,
    allocator: Allocator | None = None,
    windows: Windows = (),
    views: bool = False,
) -> Bound | None:
    """Return one function of (batch, keys) for a user's ``transform``; None for None, and for {}.

    A ``memfeed.transforms`` transform gets the keys, so that its random numbers depend on nothing else, memory from
    ``allocator``, and the paths of the fields that are ``windows``. With ``views`` batches may hold rows of a map,
    which are copied where it does not replace them. Any other callable gets the batch. ``{field:
    callable}`` calls each callable with the tensor of its field, which may have the name that ``schema`` gives it;
    images of several sizes are passed one by one. Raise TransformError for anything else, and FieldError for a field
    that ``schema`` does not have.
    """
    if transform is None or transform == {}:
        return None
    ragged = None if schema is None else schema.list_paths()
    if is_keyed(transform):
        if schema is not None:
            _require_corners(transform, schema)
        keyed, names = transform, {} if schema is None else schema.given_names()
        options: dict[str, Any] = {"given_names": names, "windows": windows, "ragged": ragged}
        if not views:
            return lambda batch, keys: keyed.apply(batch, keys, allocator=allocator, **options)
        from memfeed.transforms.batch_fields import own_ragged

        return lambda batch, keys: own_ragged(keyed.apply(batch, keys, allocator=allocator, **options))
    if isinstance(transform, Mapping):
        from memfeed.transforms.batch_fields import mark_ragged, own_ragged
        from memfeed.transforms.per_sample import Call

        calls = []
        for name, function in transform.items():
            if not callable(function):
                raise TransformError(f"transform= gives {type(function).__name__} for {name!r}; expected a callable")
            calls.append(Call(function, on=name if schema is None else schema.fields[schema.field_index(name)].path))

        def on_fields(batch: Any, keys: Any) -> Any:
            batch = mark_ragged(batch, 0, ragged) if ragged else batch
            for call in calls:
                batch = call.change_batch(batch, keys, "", call.on)
            return own_ragged(batch)

        return on_fields
    if callable(transform):
        plain = transform
        return lambda batch, _: plain(batch)
    raise TransformError(
        f"found {type(transform).__name__} as transform=; expected a memfeed.transforms transform, a callable that "
        "takes a batch, or {field: callable}"
    )


def transform_of(given: UserTransform, store: Store) -> UserTransform:
    """Return the transform of a loader: the one given, else the store's own.

    A view without any of the fields of the store's own has none. LoaderError for a view with some of them.
    """
    transform = store.transform if given is None else None
    if transform is None:
        return given
    named = transform.fields_read()
    kept = [_has_field(store.schema, one) for one in named]
    if named and not any(kept):
        return None
    if not all(kept):
        raise LoaderError(
            f"found a view without the field {brief(named[kept.index(False)])}, which the store's own transform "
            "changes; expected all of its fields, or a transform of yours: Loader(view, transform=...), {} for none"
        )
    return transform


def _has_field(schema: Schema, name: Any) -> bool:
    """Return True if a view has the field that a step names; a step without a name finds its field itself."""
    try:
        return name is None or bool(schema.field_indices(name))
    except FieldError:
        return False


def followed_images(transform: Transform, schema: Schema) -> dict[int, int]:
    """Return the index of the images that each field follows through a transform, by the index of that field."""
    steps = transform._steps()
    if steps and steps[0].operation.paths_read is not None:  # they name fields that it makes of those of the store
        return {}
    return {
        index: schema.field_indices(step.on[0])[0]  # type: ignore[arg-type]  # a step's fields are names here
        for step in steps
        if isinstance(step.on, list)
        for name in step.on[1:]
        for index in schema.field_indices(name)  # type: ignore[arg-type]
    }


def _require_corners(transform: Transform, schema: Schema) -> None:
    """Raise TransformError if `transform` would move boxes whose format, which the store keeps, is not XYXY."""
    followers = followed_images(transform, schema)
    for path, node in schema.structure.of_kind("tv_tensor"):
        box_format = (node.value or {}).get("format", "XYXY")
        if box_format != "XYXY" and any(schema.fields[index].path[: len(path)] == path for index in followers):
            raise TransformError(
                f"field {display(path)} has boxes of the format {box_format}; expected XYXY, which transforms move: in "
                "the dataset, write boxes = v2.functional.convert_bounding_box_format(boxes, new_format='XYXY')"
            )
