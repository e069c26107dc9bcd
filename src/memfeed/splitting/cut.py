"""Cut the pipeline of a dataset: the fixed part stays in the dataset, the rest becomes a transform of batches."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from memfeed.errors import SplitError, brief, listed
from memfeed.schema.infer import infer
from memfeed.schema.names import Path, display
from memfeed.schema.recipe import PER_SAMPLE, RecipeStep
from memfeed.schema.tree import Flattener
from memfeed.splitting.counterparts import as_field, counterpart
from memfeed.splitting.parts import Fixed, ShortSide, read_file
from memfeed.splitting.places import Place, find_places, with_attribute, with_pipeline
from memfeed.splitting.probe import Call, is_called, record, whole_pipeline
from memfeed.splitting.rest import rest_of
from memfeed.splitting.steps import (
    inner_of,
    is_albumentations,
    is_random,
    name_of,
    names_of,
    run,
    steps_of,
)
from memfeed.splitting.values import Value, difference, kind_of, to_tensor
from memfeed.system import random_state
from memfeed.transforms import Compose, Transform
from memfeed.transforms.decode import decode
from memfeed.transforms.recipe import make_transform

_RESIZES = re.compile(r"Resiz|Scale(?!Intensity)|SizedCrop|MaxSize|ShortestSize|Zoom")


@dataclass(frozen=True, eq=False)
class Split:
    """A dataset that was cut.

    Args:
        dataset: a copy of it whose pipeline has its fixed part only.
        transform: the rest of the pipeline, for a loader; None if nothing is left.
        recipe: `transform` as a store keeps it.
        line: what was cut where, for people.
    """

    dataset: Any
    transform: Transform | None
    recipe: tuple[RecipeStep, ...]
    line: str


@dataclass(frozen=True, eq=False)
class Probed:
    """A pipeline and what went through it in some samples.

    Args:
        places: where it is.
        steps: its steps.
        inputs: for each step, and for the end, what it got in each sample.
        calls: what the dataset passed to it and made of its result.
    """

    places: list[Place]
    steps: list[Any]
    inputs: list[list[Value]]
    calls: list[Call]

    @property
    def paths(self) -> tuple[Path, ...]:
        """The fields of its images."""
        return self.calls[0].paths

    def first_random(self) -> int:
        """Return the index of the first random step, or the number of steps."""
        found = (i for i, step in enumerate(self.steps) if is_random(step, self.inputs[i]))
        return next(found, len(self.steps))


def split(dataset: Any, indices: Sequence[int], name: str | None, keep: Any, how: str) -> Split:
    """Cut the pipeline of a dataset before its first random step.

    Args:
        dataset: a map-style dataset.
        indices: of samples to compare the split pipeline with the original.
        name: the attribute that holds the pipeline; None to find it.
        keep: what to store of images that a later step resizes, see `memfeed.cache`; None if nothing is chosen.
        how: the line that chooses, for the error that asks for a choice.

    Raises:
        SplitError: there is no pipeline that can be cut, or a choice is needed.
    """
    probed = _probed_pipeline(dataset, indices, name)
    if keep == "encoded":
        return _split_encoded(dataset, probed, indices)
    random_at = probed.first_random()
    at = _cut_at(probed, random_at)
    try:
        return _split_at(dataset, probed, at, random_at, indices, keep, how)
    except SplitError:
        if at == random_at:
            raise
    return _split_at(dataset, probed, random_at, random_at, indices, keep, how)  # after the steps that change the dtype


def has_random_step(dataset: Any, indices: Sequence[int]) -> bool:
    """Return True if the dataset has a pipeline with a random step.

    Raises SplitError and SchemaError if its pipeline cannot be cut, whether it is random or not.
    """
    if not find_places(dataset):
        return False
    probed = _probed_pipeline(dataset, indices, None)
    return probed.first_random() < len(probed.steps)


def _probed_pipeline(dataset: Any, indices: Sequence[int], name: str | None) -> Probed:
    """Return the one pipeline of a dataset that has random steps, or that is its only one."""
    groups = _groups(find_places(dataset, name))
    if len(groups) > 1:  # some are not used
        groups = [places for places in groups if is_called(dataset, places, indices[0])]
    if not groups:
        where = f"attribute {name!r}" if name is not None else "attribute transform or transforms"
        raise SplitError(
            f"found no pipeline in {type(dataset).__name__}, nor in the datasets inside it: no {where} that can be "
            'called; expected one: name the attribute that holds it, split="augment"'
        )
    inner = [_probe(dataset, places, indices, finds_fields=False) for places in groups[1:]]
    if any(one.first_random() < len(one.steps) for one in inner):
        found = listed([f"{places[0]} ({names_of(steps_of(places[0].pipeline))})" for places in groups], 150)
        raise SplitError(
            f"found {len(groups)} pipelines, {found}; expected one, or random steps only in the outermost: what an "
            "outer one does comes after them. Put all steps into one pipeline, or name it: split='NAME'"
        )
    return _probe(dataset, groups[0], indices)


def _groups(places: list[Place]) -> list[list[Place]]:
    """Return places that hold the same pipeline together, as the parts of a ConcatDataset."""
    groups: list[list[Place]] = []
    for place in places:
        for group in groups:
            one = group[0].pipeline
            if one is place.pipeline or (" at 0x" not in repr(one) and repr(one) == repr(place.pipeline)):
                group.append(place)
                break
        else:
            groups.append([place])
    return groups


def _probe(dataset: Any, places: list[Place], indices: Sequence[int], *, finds_fields: bool = True) -> Probed:
    steps = steps_of(places[0].pipeline)
    calls = record(dataset, places, whole_pipeline(places[0]), indices, finds_fields=finds_fields)
    inputs = [[call.given for call in calls]]
    with random_state.preserved():
        random_state.seed(0)
        for step in steps:
            inputs.append([run([step], value.copied()) for value in inputs[-1]])
            _require_one_sample(step, *inputs[-2:])
    return Probed(places, steps, inputs, calls)


def _require_one_sample(step: Any, before: Sequence[Value], after: Sequence[Value]) -> None:
    """Raise SplitError for a step that makes several samples of one, as crops of MONAI do."""
    for given, made in zip(before, after, strict=True):
        result = made.result()
        if isinstance(result, list) and not isinstance(given.result(), list):
            raise SplitError(
                f"found that {name_of(step)} makes a list of {len(result)} samples of one; expected one: use a crop "
                "that returns one sample (RandSpatialCropd in place of RandSpatialCropSamplesd), and a larger batch"
            )


def _cut_at(probed: Probed, random_at: int) -> int:
    """Return the index of the step before which to cut: steps to a larger dtype that have a counterpart come after."""
    for at in range(random_at):
        before, after = (_image_bytes(probed.inputs[i]) for i in (at, at + 1))
        if not before or after <= before:  # without bytes: the image is yet to be read
            continue
        is_array = kind_of(probed.inputs[at][0].images()[0]) == "array"
        if is_array and not is_albumentations(probed.steps[at]):  # channels are last
            continue
        kept = [counterpart(probed.steps[i], probed.inputs[i], probed.paths) for i in range(at, random_at)]
        if all(one is not None for one in kept):
            return at
    return random_at


def _image_bytes(values: Sequence[Value]) -> int:
    """Return the bytes of one pixel of the first image; 0 without images."""
    images = values[0].images()
    return to_tensor(images[0]).element_size() if images else 0


def _split_at(
    dataset: Any, probed: Probed, at: int, random_at: int, indices: Sequence[int], keep: Any, how: str
) -> Split:
    fixed, rest = probed.steps[:at], probed.steps[at:]
    inputs = probed.inputs[at:]
    if not all(value.images() for value in inputs[0]):
        raise SplitError(
            f"found that {name_of(rest[0])}, which is random, gets no image ({brief(inputs[0][0].result(), 80)}); "
            "expected a pipeline that reads the image in steps before the first random one: make two functions of it"
        )
    if keep is None:
        _require_no_choice(probed, at, random_at, how)
    if isinstance(keep, int):
        fixed = [*fixed, ShortSide(keep)]
        inputs = _inputs_after([run([fixed[-1]], value.copied()) for value in inputs[0]], rest)
    is_arrays = bool(rest) and is_albumentations(rest[0])
    if is_arrays and type(inner_of(rest[-1])).__name__ == "ToTensorV2":
        fixed = [*fixed, rest[-1]]  # stored channels first
    cut = with_pipeline(dataset, probed.places, _in_place(Fixed(fixed), probed))
    try:
        calls = record(cut, probed.places, Fixed(fixed), indices)
    except SplitError:
        raise
    except Exception as error:  # of any kind: the dataset got another type than before
        raise SplitError(
            f"found that the dataset raised {type(error).__name__} ({brief(str(error), 80)}) when its pipeline "
            f"{probed.places[0]} ended before {name_of(rest[0])}; expected it to return what its pipeline returns: "
            "move what it does afterwards into the pipeline"
        ) from error
    paths = calls[0].paths
    if paths != probed.paths:
        raise SplitError(
            f"found images in {paths} after the cut and in {probed.paths} before; expected the same fields"
        )
    recipe, transforms = rest_of(rest, inputs, paths)
    transform = Compose(transforms) if transforms else None
    return Split(cut, transform, tuple(recipe), _line(probed, fixed, rest, recipe))


def _split_encoded(dataset: Any, probed: Probed, indices: Sequence[int]) -> Split:
    """Return the dataset with the bytes of its image files in place of images, and all of its pipeline as a transform.

    It needs a ``loader`` that opens a file, as torchvision's DatasetFolder has one. Raises SplitError without it.
    """
    owner, given = probed.places[0].owner, [call.given.images() for call in probed.calls]
    kinds = {kind_of(image) for images in given for image in images}
    if not callable(getattr(owner, "loader", None)) or kinds != {"PIL RGB"} or len(given[0]) != 1:
        raise SplitError(
            f"found keep='encoded' for {type(owner).__name__}, whose pipeline gets "
            f"{listed(sorted(kinds)) or 'no image'}; expected "
            "one PIL image in RGB, and a dataset.loader(path) that opens its file, as torchvision's ImageFolder has: "
            "keep=256 stores smaller images"
        )
    cut = with_pipeline(dataset, probed.places, _in_place(Fixed([]), probed))
    for place in probed.places:
        cut = with_attribute(cut, place.path, "loader", read_file)
    for index, images in zip(indices, given, strict=True):
        sample = cut[index]
        structure = infer([sample]).structure
        found = dict(zip(structure.leaves(), Flattener(structure)(sample), strict=True)).get(probed.paths[0])
        if not isinstance(found, bytes) or difference(decode(found), images[0]) > 0:
            raise SplitError(
                f"found that the file of sample {index} decodes to another image than the dataset gives; expected the "
                "same: the dataset changes it before its pipeline. Choose keep=256 or keep='full'"
            )
    first = RecipeStep(name="Decode", on=probed.paths)
    recipe, transforms = rest_of(probed.steps, probed.inputs, probed.paths)
    transform = Compose([make_transform(first), *transforms])
    return Split(cut, transform, (first, *recipe), _line(probed, [read_file], probed.steps, [first, *recipe]))


def _in_place(fixed: Fixed, probed: Probed) -> Any:
    return [fixed] if isinstance(probed.places[0].pipeline, list | tuple) else fixed


def _inputs_after(first: list[Value], steps: Sequence[Any]) -> list[list[Value]]:
    inputs = [first]
    with random_state.preserved():
        random_state.seed(0)
        for step in steps:
            inputs.append([run([step], value.copied()) for value in inputs[-1]])
    return inputs


def _require_no_choice(probed: Probed, at: int, random_at: int, how: str) -> None:
    """Raise SplitError if images of several sizes would be stored whole."""
    sizes = [tuple(as_field(value.images()[0]).shape[-2:]) for value in probed.inputs[at]]
    resizing = next((step for step in probed.steps[random_at:] if _RESIZES.search(name_of(step))), None)
    if resizing is None or len({*sizes}) < 2:
        return
    first = name_of(probed.steps[random_at])
    cause = name_of(resizing) if resizing is probed.steps[random_at] else f"{name_of(resizing)} after {first}"
    raw = sum(to_tensor(value.images()[0]).numel() for value in probed.inputs[at]) / len(sizes) / 1e3
    short = sum(min(size) for size in sizes) / len(sizes)
    small = raw * min(1.0, (256 / short) ** 2)
    raise SplitError(
        f"found {cause}, random or after a random step, so images of several sizes are stored whole. "
        f"Expected a choice: keep='full' (about {raw:,.0f} KB an image), keep=256 (short side, {small:,.0f} KB, "
        f"{min(1.0, 256 / short):.2f} of the resolution), or keep='encoded' (the files' bytes, decoded in every epoch)"
        f": {how}"
    )


def _line(probed: Probed, fixed: Sequence[Any], rest: Sequence[Any], recipe: Sequence[RecipeStep]) -> str:
    """Return what was cut where."""
    stored = names_of(fixed) or "the images as they are"
    batched = [one.name for one in recipe if one.name != PER_SAMPLE]
    own = [one.shown for one in recipe if one.name == PER_SAMPLE]
    parts = [f"batched: {', '.join(batched)}"] if batched else []
    parts += [f"sample by sample, as they are: {', '.join(own)}"] if own else []
    where = f"before {name_of(rest[0])}" if rest else "nowhere"
    fields = ", ".join(map(display, probed.paths))
    return f"split {probed.places[0]} {where}: stored after {stored}; each epoch, on {fields}: {'; '.join(parts)}"
