"""Transforms of memfeed that do what a step of torchvision or albumentations does, compared on probe samples."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from memfeed.errors import TransformError
from memfeed.random import Keys
from memfeed.schema.recipe import TRANSFORMS, RecipeStep
from memfeed.splitting.generators import Generators
from memfeed.splitting.leaves import from_stored, kind_of, to_stored
from memfeed.splitting.library_steps import Asked, fill_of, transforms_for
from memfeed.splitting.step_values import Value, as_field, have_same_others, largest_difference
from memfeed.transforms import Erased, Gray, Jitter, Resampled, Transform, Warped, Window
from memfeed.transforms.from_recipe import make_transform

_SEEDS = 16  # of a step that changes several images
_ROWS = 4  # keys whose parameters are compared
_LEVELS = 1.0  # of 8 bits, by which integer images may differ: resampling rounds
_MEAN_LEVELS = 0.5  # by which a tensor and a PIL image may differ on average after a resize
_FLOAT_LEVELS = 0.05
_MOVED = 1e-4  # of the pixels: a nearest one may be its neighbour where a coordinate lies between two


def counterpart(step: Any, inputs: Sequence[Value], paths: Sequence[tuple[str | int, ...]]) -> list[RecipeStep] | None:
    """Return the transforms that do what a step does, as a recipe; None if there are none.

    ``inputs`` are what the step got in some probe samples, ``paths`` the fields of their images. With the same drawn
    parameters, the step's own functions and the transforms must make the same of these: integers may differ by one,
    because resampling rounds.
    """
    asked = transforms_for(step)
    if asked is None or not all(value.images() for value in inputs):
        return None
    recipe = [
        RecipeStep(name=one.name, arguments=dict(one.arguments), on=on) for one in asked for on in _fields(one, paths)
    ]
    local = [tuple((str(paths.index(path)),) for path in one.on) for one in recipe]
    try:
        transforms = [
            make_transform(msgspec.structs.replace(one, on=on)) for one, on in zip(recipe, local, strict=True)
        ]
        is_same = all(_agrees(step, transforms, value, row) for value in inputs for row in range(_ROWS))
        is_same = is_same and (not any(map(_draws, transforms)) or _changes_the_same(step, transforms, inputs[0]))
    except (TransformError, TypeError, ValueError, RuntimeError):  # it does not take these images, or arguments
        return None
    return recipe if is_same else None


def _fields(asked: Asked, paths: Sequence[tuple[str | int, ...]]) -> list[tuple[tuple[str | int, ...], ...]]:
    if asked.of_masks:
        return [(path,) for path in paths[1:]]
    return [tuple(paths) if TRANSFORMS[asked.name].moves else (paths[0],)]


def _draws(transform: Transform) -> bool:
    return TRANSFORMS[type(transform).__name__].draws


def _changes_the_same(step: Any, transforms: Sequence[Transform], value: Value) -> bool:
    """Return True if the step itself changes those of several images that the transforms change, each time it does.

    Of a plain tensor beside an Image, for example, torchvision's v2 changes nothing.
    """
    images = value.images()
    if len(images) == 1:
        return True
    moved = {name for transform in transforms for (name,) in transform.fields_read()}
    generators = Generators(step)
    noise = np.random.RandomState(0)
    given = value.with_images([_noise_like(image, noise) for image in images])
    with generators.preserved():
        for seed in range(_SEEDS):
            generators.seed(seed)
            made = given.after(step).images()
            pairs = zip(given.images(), made, strict=True)
            changed = [largest_difference(as_field(one), as_field(other)) != 0 for one, other in pairs]
            if any(changed[i] != (changed[0] and str(i) in moved) for i in range(1, len(changed))):
                return False
    return True


def _noise_like(image: Any, noise: np.random.RandomState) -> Any:
    kind = kind_of(image)
    parts = to_stored(image, kind)
    shape, is_float = parts[0].shape, parts[0].dtype.is_floating_point
    values = noise.rand(*shape) if is_float else noise.randint(0, 2 if parts[0].dtype is torch.bool else 256, shape)
    return from_stored([torch.from_numpy(np.asarray(values)).to(parts[0].dtype), *parts[1:]], kind)


def _agrees(step: Any, transforms: Sequence[Transform], value: Value, row: int) -> bool:
    """Return True if the transforms and the step make the same of a value, with the parameters of one key."""
    batch: Any = {str(i): as_field(leaf)[None] for i, leaf in enumerate(value.images())}
    keys, theirs = Keys(0, 0, torch.tensor([row], device="cpu")), None
    params: Any = None
    for transform in transforms:
        image = batch[transform.fields_read()[0][0]]
        drawn = transform.params([row], shape=image.shape[1:], dtype=image.dtype)
        params = next(iter(drawn.values()))
        if isinstance(params, Window) and not _fills_alike(step, params.fill, value.images()):
            return False
        batch = transform.apply(batch, keys)
        if _draws(transform):
            theirs = value.with_images([_replayed(step, transform, params, leaf) for leaf in value.images()])
    theirs = value.after(step) if theirs is None else theirs
    results = theirs.images()
    if not have_same_others(value, theirs) or len(results) != len(batch):
        return False
    for index, leaf in enumerate(results):
        expected, found = as_field(leaf), batch[str(index)][0]
        if found.shape == (1, *expected.shape):  # a mask that lost its channel is another one
            return False
        if isinstance(params, Warped) and (index or params.mode == "nearest"):
            if float((expected != found).double().mean()) > _MOVED:
                return False
            continue
        image = value.images()[index]
        is_mixed = isinstance(params, Resampled) and params.antialias and not params.mode.startswith("nearest")
        if is_mixed and not index and kind_of(image).name.startswith("PIL"):
            mean = float((expected.double() - found).abs().mean()) if expected.shape == found.shape else math.inf
            if mean > _MEAN_LEVELS:
                return False
            v2: Any = importlib.import_module("torchvision.transforms.v2.functional")  # v1 resizes tensors as floats
            expected = _resized(v2, step, params, as_field(image))
        exact = 0.0 if index else _FLOAT_LEVELS if expected.dtype.is_floating_point else _LEVELS
        if largest_difference(expected, found) > exact:
            return False
    return True


def _resized(functions: Any, step: Any, params: Resampled, image: Any) -> Any:
    """Return what the functions of torchvision make of an image: Pillow resizes its own, see docs/splitting.md."""
    options = {} if kind_of(image).name.startswith("PIL") else {"antialias": params.antialias}
    size = [params.height, params.width]
    return functions.resized_crop(image, *_box(params), size, interpolation=step.interpolation, **options)


def _box(params: Resampled | Erased) -> list[int]:
    return [int(a[0]) for a in (params.top, params.left, params.box_height, params.box_width)]


def _replayed(step: Any, transform: Transform, params: Any, leaf: Any) -> Any:
    """Return the image that the functions of the step's own library make, with the parameters that were drawn."""
    if type(step).__module__.startswith("albumentations"):
        return _cut_array(leaf, params)
    module = "torchvision.transforms.v2" if ".v2" in type(step).__module__ else "torchvision.transforms"
    functions: Any = importlib.import_module(f"{module}.functional")
    if kind_of(leaf).name == "Mask" and not isinstance(params, Window | Resampled | Warped):
        return leaf
    if isinstance(params, Window):
        return _windowed(functions, leaf, params)
    if isinstance(params, Resampled):
        return _resized(functions, step, params, leaf)
    if isinstance(params, Jitter):
        names = list(params.factors)
        for index in params.order[0].tolist():
            name = names[index]
            leaf = getattr(functions, f"adjust_{name}")(leaf, float(params.factors[name][0]))
        return leaf
    if isinstance(params, Gray):
        channels = 3 if kind_of(leaf).name == "PIL RGB" or as_field(leaf).shape[0] == 3 else 1
        return functions.rgb_to_grayscale(leaf, num_output_channels=channels) if params.chosen[0] else leaf
    if isinstance(params, Erased):
        box = _box(params)
        fill = torch.as_tensor(params.fill, dtype=leaf.dtype, device=leaf.device).reshape(-1, 1, 1)
        return functions.erase(leaf, *box, fill) if box[2] else leaf
    if type(transform).__name__ == "RandomRotation":
        angle = math.degrees(math.atan2(params.matrix[0, 1, 0], params.matrix[0, 0, 0]))
        return functions.rotate(leaf, angle, step.interpolation, False, step.center, step.fill)
    if isinstance(params, Warped):
        given = _affine_arguments(params, step.center)
        return functions.affine(leaf, *given, step.interpolation, step.fill, center=step.center)
    raise TransformError(f"{type(transform).__name__} has parameters that cannot be compared")


def _affine_arguments(params: Warped, center: Any) -> tuple[float, list[int], float, list[float]]:
    """Return angle, moves, scale and shears of a map: one of the two choices that make it, if it shears along y."""
    middle = np.zeros(2) if center is None else np.subtract(center, (params.width / 2, params.height / 2))
    forward = np.linalg.inv(params.matrix[0, :, :2])
    moves = np.rint(forward @ (middle - params.matrix[0, :, 2]) - middle).astype(int).tolist()
    across, down = forward.T
    scale, length = math.sqrt(np.linalg.det(forward)), math.hypot(*across)
    along_y = math.acos(min(1.0, scale / length))
    angle = math.atan2(across[1], across[0]) + along_y
    turned = scale * np.array([-math.sin(angle), math.cos(angle)])
    along_x = math.atan(-((down - turned) @ across) / length**2)
    return math.degrees(angle), moves, scale, [math.degrees(along_x), math.degrees(along_y)]


def _fills_alike(step: Any, fill: Any, images: Sequence[Any]) -> bool:
    """Return True if a crop that pads fills images with `fill` and masks with 0: a drawn window may show no padding."""
    pads = getattr(step, "padding", None) or getattr(step, "pad_if_needed", False)
    return not pads or all(fill_of(step.fill, leaf) == (0 if at else fill) for at, leaf in enumerate(images))


def _windowed(functions: Any, leaf: Any, params: Window) -> Any:
    if not params.hflip.any() and not params.vflip.any():
        height, width = as_field(leaf).shape[-2:]
        top, left = int(params.top[0]), int(params.left[0])
        padding = [max(0, -left), max(0, -top), max(0, left + params.width - width),
                   max(0, top + params.height - height)]  # fmt: skip
        if any(padding):
            leaf = functions.pad(leaf, padding, fill=params.fill)
        return functions.crop(leaf, top + padding[1], left + padding[0], params.height, params.width)
    return functions.hflip(leaf) if params.hflip[0] else functions.vflip(leaf)


def _cut_array(leaf: Any, params: Any) -> Any:
    """Return the window of an array [h, w, ...] or of a tensor [c, h, w]."""
    if not isinstance(params, Window):
        raise TransformError("only windows of arrays can be compared")
    top, left = int(params.top[0]), int(params.left[0])
    rows, columns = slice(top, top + params.height), slice(left, left + params.width)
    axes = (0, 1) if isinstance(leaf, np.ndarray) else (leaf.ndim - 2, leaf.ndim - 1)
    piece = leaf[(slice(None),) * axes[0] + (rows, columns)]
    flips = [axis for axis, flip in zip(axes, (params.vflip[0], params.hflip[0]), strict=True) if flip]
    if isinstance(leaf, np.ndarray):
        return np.ascontiguousarray(np.flip(piece, tuple(flips))) if flips else piece
    return piece.flip(flips) if flips else piece
