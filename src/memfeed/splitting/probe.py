"""Record what a pipeline gets and returns while samples are read, and where in a sample its images are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from memfeed.errors import SplitError, brief
from memfeed.schema.infer import infer
from memfeed.schema.names import Path
from memfeed.schema.tree import Flattener
from memfeed.splitting.parts import Fixed
from memfeed.splitting.places import Place, with_pipeline
from memfeed.splitting.values import Value, difference, is_image, kind_of
from memfeed.system import random_state

CARRIED = ("Image", "Mask", "Video", "array", "tensor")


class Recorder:
    """Calls a pipeline, and keeps a copy of what it got and what it returned."""

    def __init__(self, pipeline: Callable[..., Any]) -> None:
        self.pipeline, self.calls = pipeline, list[Call]()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the pipeline."""
        given = Value(args, kwargs)
        copied = given.copied()
        result = self.pipeline(*args, **kwargs)
        self.calls.append(Call(copied, given.after(result)))
        return result


@dataclass(frozen=True, eq=False)
class Call:
    """A copy of what a pipeline got, and what it returned, with the sample that came of it and the images' fields."""

    given: Value
    result: Value
    paths: tuple[Path, ...] = field(default=())


def is_called(dataset: Any, places: list[Place], index: int) -> bool:
    """Return True if reading a sample calls the pipeline at these places."""
    recorder, recorded = _with_recorder(dataset, places, whole_pipeline(places[0]))
    with random_state.preserved():
        recorded[index]
    return bool(recorder.calls)


def whole_pipeline(place: Place) -> Callable[..., Any]:
    """Return the pipeline as one function; that of a list calls its parts in turn."""
    return Fixed(place.pipeline) if isinstance(place.pipeline, list | tuple) else place.pipeline


def _with_recorder(dataset: Any, places: list[Place], pipeline: Callable[..., Any]) -> tuple[Recorder, Any]:
    recorder = Recorder(pipeline)
    is_list = isinstance(places[0].pipeline, list | tuple)
    return recorder, with_pipeline(dataset, places, [recorder] if is_list else recorder)


def record(
    dataset: Any,
    places: list[Place],
    pipeline: Callable[..., Any],
    indices: Sequence[int],
    *,
    finds_fields: bool = True,
) -> list[Call]:
    """Return the calls of `pipeline`, put at `places`, for some samples. The global generators are restored.

    Raises SplitError unless each sample calls it once and returns its images as they are.
    """
    recorder, recorded = _with_recorder(dataset, places, pipeline)
    calls = []
    with random_state.preserved():
        for index in indices:
            recorder.calls.clear()
            sample = recorded[index]
            if len(recorder.calls) != 1:
                raise SplitError(
                    f"found that reading sample {index} called the pipeline {places[0]} {len(recorder.calls)} times; "
                    "expected one call per sample: name the attribute that holds the pipeline, split='NAME', or store "
                    "the fixed part by a dataset of yours"
                )
            call = recorder.calls[0]
            paths = paths_of(sample, call.result, places[0], index) if finds_fields else ()
            calls.append(Call(call.given, call.result, paths))
    if any(call.paths != calls[0].paths for call in calls):
        raise SplitError(
            f"found images of {places[0]} in other fields of some samples; expected the same fields in all"
        )
    return calls


def paths_of(sample: Any, result: Value, place: Place, index: int) -> tuple[Path, ...]:
    """Return the field of the sample in which each image of `result` is, as it is or with its channels moved."""
    structure = infer([sample]).structure
    leaves = list(zip(structure.leaves(), Flattener(structure)(sample), strict=True))
    found: list[Path] = []
    images = result.images()
    for image in images:
        if kind_of(image) not in CARRIED and not kind_of(image).startswith("PIL "):
            raise SplitError(
                f"found {kind_of(image)} in what the pipeline {place} returned; expected images and masks, which a "
                "split pipeline carries: store the fixed part by a dataset of yours, and pass the random steps as "
                'Loader(store, transform=memfeed.transforms.Compose([...], on=["image", "boxes"]))'
            )
        candidates = [path for path, leaf in leaves if leaf is image] or [
            path for path, leaf in leaves if is_image(leaf) and _equal(leaf, image)
        ]
        path = next((path for path in candidates if path not in found), None)
        if path is None:
            raise SplitError(
                f"found that sample {index} does not have the {kind_of(image)} that its pipeline {place} returned; "
                "expected it as it is: the dataset changes it afterwards. Move that change into the pipeline (for "
                "arrays: ToTensorV2 at its end)"
            )
        found.append(path)
    if not found:
        raise SplitError(
            f"found no image in what the pipeline {place} returned ({brief(result.result())}); expected an image, a "
            "tensor or an array"
        )
    return tuple(found)


def _equal(leaf: Any, image: Any) -> bool:
    if difference(leaf, image) == 0:
        return True
    is_moved = kind_of(image) == "array" and image.ndim == 3
    return is_moved and difference(leaf, image.transpose(2, 0, 1)) == 0
