"""The base class of transforms: a module that applies its operation to one field of a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import groupby
from typing import Any, TypeVar, overload

import numpy as np
import torch
from numpy.typing import NDArray

from memfeed.errors import TransformError, brief
from memfeed.random import Keys
from memfeed.schema.fields import Schema
from memfeed.schema.jagged import RaggedList, RowViews
from memfeed.schema.names import Path
from memfeed.system.buffers import Allocator
from memfeed.transforms.backends.passes import fused, kernel_for
from memfeed.transforms.batch_fields import (
    BatchField,
    GivenNames,
    On,
    Windows,
    find_all,
    mark_ragged,
    own_ragged,
    replace,
    require_decision,
    steps_of,
    without_steps,
)
from memfeed.transforms.layouts import check_operations, follow, in_format, open_field, owned
from memfeed.transforms.operation import (
    DrawFromStream,
    FusedPass,
    KeyedDraws,
    Operation,
    Step,
    TransformResult,
    run_fused,
    run_plain,
    shape_of,
)
from memfeed.transforms.params.geometry import Geometry, Imagewise
from memfeed.transforms.params.sizes import Images, ImageShape
from memfeed.transforms.params.value_changes import Affine

B = TypeVar("B")
T = TypeVar("T", bound="Transform")


class Transform(Operation):
    """A transform of image batches [n, c, h, w] whose random parameters can be keyed by row.

    A subclass writes two methods, `make_params` and `transform`. Images on the CPU, and on CUDA if Triton is
    installed, take the fused path as far as the parameters allow. The result is that of one transform after another.
    Train and eval mode make no difference, as in torchvision.

    Images of several sizes are a list of tensors [c, h, w]. They become one batch where a transform gives them one size
    (RandomResizedCrop, RandomCrop, CenterCrop, Resize to height and width), else a list again. Images may also be
    [n, h, w], without a channel dim. What else a transform takes (volumes [n, c, d, h, w], vectors [n, d]), its
    docstring says. A transform of your own sees only images of one size at a time; if its outputs have one size
    whatever it gets, say so: ``makes_one_size = True``.

    Args:
        on: the field to work on: its name, key or position, or a tuple of keys, which is one path. Of a list of
            fields, as ["image", "mask"], the first are the images, and the others follow their pixels: masks
            ([n, h, w] or [n, c, h, w], by nearest neighbour), boxes (x1, y1, x2, y2: [n, k, 4] or jagged) and keypoints
            (x, y of a pixel: [n, k, 2] or jagged); numbers and vectors ([n], [n, k]) do not change. None: the only
            field that looks like images, [n, c, h, w] with 1 to 4 channels; if pixels move beside a field that might
            follow them (of the images' size, [n, k, 4] or [n, k, 2]), that is an error. Of windows (``Store.windows``,
            [n, steps, c, h, w]) all steps of a sample get the same parameters.
    """

    def __init__(self, *, on: On = None) -> None:
        super().__init__(on=on)
        self.schema: Schema | None = None
        self._asked: dict[str, dict[str, int]] = {}  # numbers drawn for a batch, by the repr of `on` and by stream
        self._seen: dict[str, tuple[torch.Size, torch.dtype]] = {}  # by the repr of `on`, which may be a list

    @overload
    def apply(self: T, fn: Callable[[torch.nn.Module], Any]) -> T: ...
    @overload
    def apply(
        self,
        batch: B,
        keys: Keys,
        *,
        allocator: Allocator | None = None,
        given_names: GivenNames | None = None,
        windows: Windows = (),
        ragged: Collection[Path] | None = None,
    ) -> B: ...
    def apply(  # type: ignore[misc]  # mypy misses that `batch` and `fn` together take what Module.apply's `fn` takes
        self,
        batch: Any = None,
        keys: Keys | None = None,
        *,
        allocator: Allocator | None = None,
        given_names: GivenNames | None = None,
        windows: Windows = (),
        ragged: Collection[Path] | None = None,
        fn: Any = None,
    ) -> Any:
        """Transform one field of a batch. With one callable argument, do what `torch.nn.Module.apply` does.

        Args:
            batch: a batch of a loader: a tensor, or any nesting of containers, TensorDicts and tensorclasses.
            keys: one key per sample; the same key always draws the same parameters.
            allocator: gives the memory of the output on the CPU. None for memory that is used again by a later call
                once no tensor or array shares it any more. So the caller may keep an output as long as it likes.
            given_names: `{path: name}`, more names that `on=` may use: those that ``fields=`` gave.
            windows: the paths of fields that are windows, [n, steps, ...]: all steps of a sample get its parameters.
            ragged: the paths of the fields that are lists of tensors; None to tell such lists from containers by their
                shapes.

        Returns:
            A batch of the same structure with that field replaced. The batch passed in does not change.

        Raises:
            FieldError: the field does not exist.
            TransformError: more than one field can be meant, or none, or the field does not fit.
        """
        if fn is not None or (keys is None and callable(batch)):
            return super().apply(batch if fn is None else fn)
        if keys is None:
            raise TransformError(
                f"{type(self).__name__}.apply got a {type(batch).__name__} and no keys; expected apply(batch, keys); "
                "call the transform itself, with a tensor, to draw from torch's global generator"
            )
        run = partial(self._run, allocator=allocator)
        return self._on_fields(batch, keys, run, given_names, windows, ragged)

    def reference(self, batch: B, keys: Keys, *, windows: Windows = ()) -> B:
        """Do what `apply` does, one transform after another: the slow path that tests compare the fused one with."""

        def plain(steps: list[Step], image: Images, draw: DrawFromStream) -> TransformResult:
            image, geometries = run_plain(steps, image, draw)
            return in_format(image, self.memory_format), geometries

        result: B = self._on_fields(batch, keys, plain, None, windows, None)
        return result

    def forward(self, image: Any) -> Any:
        """Transform images, a tensor or a list of them, with parameters from torch's global generator.

        What `on` says does not matter. On the CPU the memory of the output is used again by a later call once no tensor
        or array shares it any more.

        Raises:
            TransformError: not images, or the parts of a Compose work on different fields.
        """
        is_list = isinstance(image, list) and all(isinstance(row, torch.Tensor) for row in image)
        if not isinstance(image, torch.Tensor) and not is_list:
            raise TransformError(
                f"{type(self).__name__} was called with a {type(image).__name__}; expected a tensor [n, c, h, w]; "
                "use apply(batch, keys) for other batches"
            )
        image = RaggedList(image) if is_list else image
        steps = self._steps()
        if any(step.operation.of_whole_batches for step in steps):
            seed = int(torch.randint(2**62, (), device="cpu"))
            return self.apply(image, Keys(seed, 0, torch.arange(len(image), device="cpu")))
        fields = {repr(step.on): step.on for step in steps}
        if len(fields) > 1:
            raise TransformError(
                f"{type(self).__name__} was called with one tensor and works on the fields "
                f"{brief([fields[shown] for shown in sorted(fields)], 120)}; expected one field; use apply(batch, keys)"
            )
        if isinstance(image, torch.Tensor) and image.ndim == 3 and len(image) in (1, 3, 4):
            raise TransformError(
                "the tensor has rank 3; expected images [n, c, h, w]; unsqueeze(0) a single image, "
                "unsqueeze(1) images without channels"
            )
        opened = open_field(image, "the tensor")
        check_operations([step.operation for step in steps], opened, "the tensor")
        if isinstance(opened.images, torch.Tensor):
            self._seen = {repr(step.on): (opened.images.shape[1:], opened.images.dtype) for step in steps}
        changed = self._run(steps, opened.images, partial(_draw_globally, len(image)), allocator=None)[0]
        return own_ragged(opened.close(changed))

    def params(
        self,
        ids: Sequence[int] | torch.Tensor,
        epoch: int = 0,
        *,
        seed: int = 0,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> dict[str, Any]:
        """Return the parameters that rows of the store get in an epoch: one entry per row in each array.

        Args:
            ids: row numbers in the store.
            epoch: of the loader.
            seed: of the loader.
            shape: (c, h, w) of the images; None for that of the last batch.
            dtype: of the images; None for that of the last batch, or uint8.

        Returns:
            What `make_params` returned, by class and index in that class ("RandomCrop.0"): a Window, Resampled, Warped,
            Jitter, Erased, Affine, or the parameters of a transform of your own.

        Raises:
            TransformError: no shape is given, and no batch was transformed yet.

        >>> RandomCrop(2).params([7, 8], epoch=3, shape=(3, 4, 4))["RandomCrop.0"].top.shape  # doctest: +SKIP
        (2,)
        """
        rows = torch.as_tensor(ids, dtype=torch.int64, device="cpu").reshape(-1)
        keys, found = Keys(seed, epoch, rows), {}
        imagewise = (step for step in self._steps() if not step.operation.of_whole_batches)
        for on, steps in groupby(imagewise, key=lambda step: step.on):
            seen = self._seen.get(repr(on))
            if shape is None and seen is None:
                raise TransformError(
                    "found no earlier batch to take the shape from; expected shape=(c, h, w), or a batch first"
                )
            size = torch.Size((len(rows), *(shape or seen[0])))  # type: ignore[index]
            kind = dtype or (seen[1] if seen else torch.uint8)
            for step in steps:
                params = found[step.stream] = step.make_params(size, kind, KeyedDraws(keys))
                if isinstance(params, Imagewise):
                    size, kind = params.output_shape(size), params.output_dtype(kind)
                kind = params.dtype if isinstance(params, Affine) else kind
        return found

    def _run(
        self, steps: list[Step], image: Images, uniform: DrawFromStream, *, allocator: Allocator | None
    ) -> TransformResult:
        if not len(image) and isinstance(image, list):
            return image, []
        fused_pass = self._fused_pass(image, allocator)
        if fused_pass is None:
            image, geometries = run_plain(steps, image, uniform)
        else:
            image, geometries = run_fused(steps, image, uniform, fused_pass)
        return in_format(image, self.memory_format), geometries

    def _fused_pass(self, image: Images | RowViews, allocator: Allocator | None) -> FusedPass | None:
        """Return the backend for images on this device; None if it has none."""
        if isinstance(image, RowViews):
            return partial(fused, memory_format=self.memory_format, allocator=allocator)
        rows = image if isinstance(image, list) else [image]
        # It writes into a buffer, which gradients cannot flow through. It goes image by image, slow for vectors [n, d].
        if any(row.requires_grad for row in rows) or rows[0].ndim == 2:
            return None
        if rows[0].device.type == "cpu":
            return partial(fused, memory_format=self.memory_format, allocator=allocator)
        kernel = kernel_for(image)
        return None if kernel is None else partial(kernel.fused_list, memory_format=self.memory_format)

    def fields_read(self) -> list[Any]:
        """Return the fields of a batch that its steps name in ``on=``, or that the first of them takes out of it."""
        steps = self._steps()
        if steps and (paths := steps[0].operation.paths_read) is not None:
            return list(paths)
        return [one for step in steps for one in (step.on if isinstance(step.on, list) else [step.on])]

    @property
    def runs_anywhere(self) -> bool:
        """True if a loader may run it in a thread ahead of its caller."""
        return all(step.operation.thread_safe for step in self._steps())

    @property
    def takes_views(self) -> bool:
        """True if a loader may pass it views of a store's rows: nothing in it writes to them, or hands them on."""
        operations = [step.operation for step in self._steps()]
        return not any(one.of_whole_batches and not one.passes_views for one in operations)

    def _steps(self) -> list[Step]:
        return [Step(self, self.on, f"{type(self).__name__}.0")]

    def _on_fields(
        self,
        batch: Any,
        keys: Keys,
        run: Callable[[list[Step], Images, DrawFromStream], TransformResult],
        given: GivenNames | None,
        windows: Windows,
        ragged: Collection[Path] | None,
    ) -> Any:
        has_lists = ragged is None or bool(ragged)
        if has_lists:
            batch = mark_ragged(batch, len(keys.rows), ragged)
        for (on, is_whole), steps in groupby(
            self._steps(), key=lambda step: (step.on, step.operation.of_whole_batches)
        ):
            if is_whole:
                for step in steps:
                    is_found = given and on is not None and not step.operation.takes_bytes
                    known = find_all(batch, on, given) if is_found else on
                    batch = step.operation.change_batch(batch, keys, step.stream, known)
                has_lists = True
                continue
            field, *others = find_all(batch, on, given, windows)
            whole = without_steps(field, windows)
            opened = open_field(whole, f"field {field}")
            images, of_images, steps_here = opened.images, keys, list(steps)
            check_operations([step.operation for step in steps_here], opened, f"field {field}")
            if not isinstance(images, list):
                self._seen[repr(on)] = images.shape[1:], images.dtype
            if len(keys.rows) != len(field.tensor):
                raise TransformError(
                    f"field {field} has {len(field.tensor)} samples for {len(keys.rows)} keys; "
                    "expected one key per sample; pass the rows of this batch"
                )
            if whole is not field.tensor:  # all steps of a sample have its key
                of_images = keys.part(np.repeat(np.arange(len(keys.rows)), field.tensor.shape[1]))
            try:
                changed, geometries = run(
                    steps_here, images, KeyedDraws(of_images, self._asked.setdefault(repr(on), {}))
                )
            except TransformError as error:
                raise TransformError(f"field {field}: {error}") from None
            if on is None and geometries:
                require_decision(batch, field, given, windows)
            image = opened.close(owned(changed, whole))
            has_lists |= isinstance(image, RaggedList)
            moved = image if whole is field.tensor else image.view(*field.tensor.shape[:2], *image.shape[1:])
            batch = replace(batch, field, moved)
            for other in others:
                if isinstance(other.tensor, RowViews):
                    other = dataclasses.replace(other, tensor=other.tensor.owned())
                batch = replace(batch, other, _follow(other, field, geometries, shape_of(images), windows))
        return own_ragged(batch) if has_lists else batch


class ImageTransform(Transform):
    """A transform whose parameters are Imagewise and do all of the work."""

    def transform(self, image: torch.Tensor, params: Imagewise) -> torch.Tensor:
        """Apply `params` to images [n, c, h, w]."""
        return params.all(image)


def check_probability(p: float) -> float:
    """Return `p` as a float. Raise TransformError unless it is a probability."""
    if not isinstance(p, int | float | np.number) or not 0.0 <= p <= 1.0:  # False for NaN too
        raise TransformError(f"p={p!r}; expected a probability from 0 to 1; e.g. 0.5 for every other image")
    return float(p)


def _follow(
    other: BatchField, field: BatchField, geometries: Sequence[Geometry], shape: ImageShape, windows: Windows
) -> Any:
    """Apply what was done to the images of `field`, which have `shape` [n, c, h, w] without steps, to another field."""
    tensor, steps = without_steps(other, windows), steps_of(other, windows)
    if steps == steps_of(field, windows):
        moved = follow(dataclasses.replace(other, tensor=tensor), geometries, shape)
        return moved if steps is None else moved.view(*other.tensor.shape[:2], *moved.shape[1:])
    if tensor.ndim <= 2:  # numbers and vectors stay
        return other.tensor
    raise TransformError(
        f"field {other} follows {field}, at other steps; expected windows of both at the same offsets: "
        f"store.windows({{{field.names[-1]!r}: offsets, {other.names[-1]!r}: offsets}}, within=...)"
    )


def _draw_globally(n: int, stream: str, draws: int, samples: NDArray[np.int64] | None) -> NDArray[np.float64]:
    count = n if samples is None else len(samples)
    numbers: NDArray[np.float64] = torch.rand(count, draws, dtype=torch.float64, device="cpu").numpy()
    return numbers
