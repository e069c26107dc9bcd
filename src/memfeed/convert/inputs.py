"""The input of a conversion: a dataset and how to read it. A tree of image files is read as torchvision does.

A ``ray.data.Dataset`` is an iterable. Ray is not imported: who has such a dataset has done so.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from torch.utils.data import IterableDataset, StackDataset, Subset

from memfeed.convert.changes import Watched
from memfeed.convert.watchdog import Watchdog
from memfeed.errors import NO_LENGTH, CopyError, RandomDataError, SampleError, SchemaError, SplitError, length_of
from memfeed.schema.containers import flatten, tensors_in
from memfeed.schema.tensordicts import is_a, is_tensordict
from memfeed.store import in_memory
from memfeed.store.in_memory import Columns
from memfeed.store.store import Store
from memfeed.system.descriptors import separate_positions
from memfeed.system.files import local_path
from memfeed.system.mapped_memory import file_lookup
from memfeed.system.messages import require
from memfeed.system.signals import is_of_handler
from memfeed.system.torch_loader import DataLoader
from memfeed.tables.table_column import TableColumn


class RayRows:
    """The rows of a ``ray.data.Dataset``, dicts by column, in the order of its source.

    Ray Data yields blocks in the order in which its tasks end, unless the dataset's context says otherwise. So this
    sets ``preserve_order`` there, for this dataset only. What the pipeline itself draws each time (``random_shuffle``
    without a seed) is found by iterating twice, as for each iterable that can be.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        dataset.context.execution_options.preserve_order = True

    def __iter__(self) -> Iterator[Any]:
        yield from self._dataset.iter_rows()


class Input(msgspec.Struct, frozen=True):
    """A dataset and how to read it; ``length`` is the number of samples, None for an iterable.

    ``watched`` is the dataset as the user gave it, where its attributes are compared.
    """

    dataset: Any
    kind: Literal["columns", "map", "iterable"]
    length: int | None
    watched: Watched | None = None


def classify_input(dataset: Any) -> Input:
    """Return how to read `dataset`. Raise SchemaError if it is no dataset, or an empty one."""
    separate_positions()  # the dataset may open files when this process reads samples, before it forks workers
    columns = None if isinstance(dataset, Store) else in_memory.as_columns(dataset)
    if columns is not None:
        given = Input(columns, "columns", len(columns))
    elif isinstance(dataset, str | os.PathLike):
        raise SchemaError(
            f"found {str(dataset)!r:.100}; expected a dataset, a Parquet file or a folder of those. For a folder of "
            "images: memfeed.cache(torchvision.datasets.ImageFolder(folder, transform), path)"
        )
    elif isinstance(dataset, bytes | dict):
        raise SchemaError(
            f"found a {dataset.__class__.__name__}; expected a dataset with len and [], an iterable of samples, "
            "or tensors, arrays or tables (or a tuple or dict of them) with one row per sample"
        )
    elif isinstance(dataset, type):
        raise SchemaError(
            f"found the class {dataset.__name__} itself; expected a dataset, an instance of it: "
            f"memfeed.cache({dataset.__name__}(...), path)"
        )
    elif isinstance(dataset, DataLoader) and dataset.batch_size is not None:
        raise SchemaError(
            f"found a {type(dataset).__name__}, which yields batches of {dataset.batch_size}; expected the dataset "
            "that it reads: loader.dataset. To store whole batches as rows: (batch for batch in loader)"
        )
    elif isinstance(dataset, torch.Tensor | np.ndarray | np.generic) and dataset.ndim == 0:
        raise SchemaError(
            f"found one value of dtype {dataset.dtype}, without a dim for rows; expected a tensor or array [rows, ...]"
        )
    elif is_a(dataset, "ray.data", "Dataset"):
        given = Input(RayRows(dataset), "iterable", None)
    elif hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and not isinstance(dataset, IterableDataset):
        given = Input(dataset, "map", length_of(dataset))
    elif hasattr(dataset, "__iter__"):
        given = Input(dataset, "iterable", None)
    elif hasattr(dataset, "__getitem__"):
        raise SchemaError(f"found {dataset.__class__.__name__}, which has [] and {NO_LENGTH}")
    else:
        raise SchemaError(
            f"found {dataset.__class__.__name__}, which has neither len and [] nor iter; expected a dataset"
        )
    if given.length == 0 and is_tensordict(dataset) and not dataset.batch_dims:
        raise SchemaError(
            f"found a {type(dataset).__name__} with batch_size [], which has no rows; expected one with rows: "
            "td.batch_size = [n]"
        )
    if given.length == 0:
        raise SchemaError(
            f"found an empty dataset (0 samples) of {type(dataset).__name__}; expected at least one, which shows the "
            "columns of its store: check the folder, the split or the filter that it was made with, and leave out its "
            "loader where len(dataset) == 0"
        )
    return given


def expected_length(given: Input, length: int | None) -> int | None:
    """Return how many rows a store of this input has: ``length=``, else what its ``len`` says; None if not known."""
    if length is not None or given.length is not None:
        return length if given.length is None else given.length
    try:
        return len(given.dataset)
    except (TypeError, NotImplementedError):  # what an iterable without a length raises
        return None


def refuse_copy(dataset: Any, target: Path, copy_existing: bool) -> None:
    """Raise CopyError if the data is memory-mapped on disk already, unless the user asked for a copy elsewhere."""
    at = str(dataset.path) if isinstance(dataset, Store) else in_memory.existing_path(dataset)
    if at is None:
        return
    source = Path(at).resolve()
    if target.resolve() == source or source in target.resolve().parents or target.resolve() in source.parents:
        raise CopyError(f"{target}: found the source of the data itself; expected another path to copy it to")
    if not copy_existing:
        raise CopyError(
            f"found data that is memory-mapped already, at {at}; expected a dataset to decode: "
            f"train from it as it is with memfeed.open({at!r}), or copy it: "
            "memfeed.cache(data, path, allow='copy')"
        )


def refuse_mapped_columns(given: Input, target: Path, copy_existing: bool) -> None:
    """Raise CopyError for columns, or a list of samples, that are mapped from files: see `refuse_copy`."""
    file = _mapped_file(given.dataset)
    if file is None:
        return
    if target.resolve() in Path(file).resolve().parents:
        raise CopyError(f"{target}: found the source of the data itself; expected another path to copy it to")
    if not copy_existing:
        is_readable = given.kind == "columns" and given.dataset.is_plain
        in_place = "train from it as it is with memfeed.Loader(data), or " if is_readable else "to "
        raise CopyError(
            f"found data that is memory-mapped already, from {file}; expected a dataset to decode: {in_place}copy it: "
            "memfeed.cache(data, path, allow='copy')"
        )


def _mapped_file(data: Any) -> str | None:
    """Return the file that columns, or the first sample of a list, are mapped from; None for other data."""
    if isinstance(data, Columns):
        tree = data.parts
    elif isinstance(data, list | tuple) and data:
        tree = data[0]
    else:
        return None
    lookup = file_lookup()
    try:
        return next((file for part in _parts(tree) if (file := _named_file(part) or _found_file(part, lookup))), None)
    except RecursionError:  # a sample that contains itself: the probe says so
        return None


def _parts(tree: Any) -> Iterator[Any]:
    yield from (leaf for leaf in flatten(tree)[0] if isinstance(leaf, np.ndarray | TableColumn))
    yield from tensors_in(tree)


def _named_file(part: Any) -> str | None:
    """Return the file that the object itself names, on every system."""
    while isinstance(part, np.ndarray):
        if isinstance(part, np.memmap) and part.filename:
            return str(part.filename)
        part = part.base
    try:
        return str(part.filename) if getattr(part, "filename", None) else None
    except RuntimeError:  # tensordict: a map without a file
        return None


def _found_file(part: Any, lookup: Any) -> str | None:
    if isinstance(part, TableColumn):
        addresses = part.addresses()
    elif isinstance(part, np.ndarray):
        addresses = [part.__array_interface__["data"][0]] if part.size else []
    else:
        is_in_memory = isinstance(part, torch.Tensor) and part.device.type == "cpu" and part.layout == torch.strided
        addresses = [part.data_ptr()] if is_in_memory and not part.is_nested and part.numel() else []
    return next((file for address in addresses if (file := lookup(address)) is not None), None)


def read_sample(dataset: Any, index: int, watchdog: Watchdog, worker: int = 0) -> Any:
    """Return ``dataset[index]``. Raise SampleError with the index if the dataset raises."""
    watchdog.begin_read(worker, index)
    try:
        return dataset[index]
    except (SchemaError, SplitError):
        raise  # of a column of a table; of a sample that is not as those that a cut was proven on
    except (Exception, SystemExit, GeneratorExit) as error:
        if not watchdog.worker_count and (not isinstance(error, Exception) or is_of_handler(error)):
            # as plain indexing would: it ends the program, or a time limit of the caller's. A worker would end without
            # saying at which sample
            raise
        raise SampleError(
            f"sample {index}: the dataset raised {type(error).__name__}: {error}; "
            'fix the dataset, or leave such samples out with on_error="skip"'
        ) from error
    finally:
        watchdog.end_read(worker)


def next_sample(
    samples: Iterator[Any], index: int, watchdog: Watchdog, worker: int | None = None, advice: str = ""
) -> Any:
    """Return sample `index` of an iterable. Raise StopIteration at its end, SampleError if the iterable raises."""
    watchdog.begin_read(worker or 0, index)
    try:
        return next(samples)
    except (StopIteration, RandomDataError):
        raise
    except Exception as error:
        if not watchdog.worker_count and is_of_handler(error):
            raise  # as above
        name = "" if worker is None else f" of worker {worker}"
        raise SampleError(
            f"sample {index}{name}: the iterable raised {type(error).__name__}: {error}{advice}"
        ) from error
    finally:
        watchdog.end_read(worker or 0)


def reading_together(dataset: Any) -> Any:
    """Return the dataset or the part of it that reads samples together; None if all are read one by one.

    Torch's own ``__getitems__`` read one by one where no part has another.
    """
    if type(dataset) is StackDataset:
        parts = dataset.datasets.values() if isinstance(dataset.datasets, dict) else dataset.datasets
        return next((found for found in map(reading_together, parts) if found is not None), None)
    if type(dataset) is Subset:
        return reading_together(dataset.dataset)
    return dataset if callable(getattr(dataset, "__getitems__", None)) else None


IMAGE_FIELDS = ("image", "label")
"""The names of the fields of a sample of `image_folder`."""


def image_folder(root: str | os.PathLike[str], transform: Callable[[Any], Any] | None = None) -> Any:
    """Return torchvision's `ImageFolder`: (image, label) samples, classes numbered in the order of their sorted names.

    A file that cannot be decoded raises an OSError that names it. Raises ModuleNotFoundError without [vision],
    FileNotFoundError or NotADirectoryError for a tree without images.
    """
    require("vision", "torchvision", "PIL")
    from torchvision.datasets import ImageFolder

    folder = local_path(root)
    try:
        return ImageFolder(str(folder), transform=transform, loader=_load_image)
    except (FileNotFoundError, NotADirectoryError) as error:
        found = error if error.filename is None else error.strerror  # that there is no such folder
        raise type(error)(
            f"{root}: expected one sub-folder of images per class, as {folder / 'cats' / '1.jpg'}; found: {found}"
        ) from None


def to_pixels(resize: str | None = None) -> Callable[[Any], Any]:
    """Return a function that converts a PIL image to a uint8 tensor [3, h, w].

    Args:
        resize: "256" scales the short side to 256 pixels and keeps the aspect ratio, "256x192" scales to that height
            and width, None keeps the size.

    Raises:
        ValueError: ``resize`` has another form.
    """
    size = None if resize is None else _size(resize)
    require("vision", "torchvision", "PIL")
    from torchvision import transforms

    steps = [] if size is None else [transforms.Resize(size)]
    composed: Callable[[Any], Any] = transforms.Compose([*steps, transforms.PILToTensor()])
    return composed


def _size(text: str) -> int | tuple[int, int]:
    match = re.fullmatch(r"([1-9]\d{0,4})(?:x([1-9]\d{0,4}))?", text)
    if match is None:
        raise ValueError(
            f"found the size {text!r}; expected the short side in pixels, as 256, or height x width, as 256x256"
        )
    return int(match[1]) if match[2] is None else (int(match[1]), int(match[2]))


def _load_image(path: str) -> Any:
    from torchvision.datasets.folder import default_loader

    try:
        return default_loader(path)
    except Exception as error:  # Pillow raises SyntaxError, ValueError and others of its own for bad files
        raise OSError(f"{path}: found no image that can be decoded ({type(error).__name__}: {error})") from error


def has_one_pass(dataset: Any) -> bool:
    """Return True for an iterator that iter() does not change: it goes on where it was, so it has no second epoch."""
    before = dict(getattr(dataset, "__dict__", {}))
    if not isinstance(dataset, Iterator) or iter(dataset) is not dataset:
        return False
    after = getattr(dataset, "__dict__", {})
    return before.keys() == after.keys() and all(after[name] is value for name, value in before.items())
