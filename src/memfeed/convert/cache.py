"""`memfeed.cache`: from a dataset to an open store."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import msgspec
import torch

from memfeed.convert.at_address import cache_at
from memfeed.convert.attributes import check_metadata
from memfeed.convert.conversion import TemporaryDirectory, open_or_convert
from memfeed.convert.inputs import ConvertOptions, classify_input, refuse_copy, refuse_mapped_columns, require_length
from memfeed.convert.lazily import open_or_fill
from memfeed.convert.ray_engine import import_ray
from memfeed.convert.ray_rows import RayRows
from memfeed.convert.repair import repair_store
from memfeed.convert.rounding import Rounded
from memfeed.convert.splits import check_keep, keep_of, not_split, split_input, still_random, store_at, with_rest
from memfeed.errors import RandomDataError, StoreError
from memfeed.remote.address import is_address
from memfeed.schema.fields import Kind
from memfeed.schema.tree import as_types
from memfeed.store import format
from memfeed.store.store import Store
from memfeed.system.files import local_path
from memfeed.system.progress import write_line
from memfeed.tables.column import is_a


def cache(
    dataset: Any,
    path: str | os.PathLike[str] | None = None,
    *,
    fields: Sequence[str] | Mapping[Any, Kind] | None = None,
    dtypes: Mapping[Any, torch.dtype] | None = None,
    types: type[Any] | Iterable[type[Any]] = (),
    split: bool | str = False,
    keep: int | Literal["full", "encoded"] | None = None,
    floats: torch.dtype | None = None,
    metadata: dict[str, Any] | None = None,
    length: int | None = None,
    workers: int | None = None,
    on_error: Literal["raise", "skip"] = "raise",
    allow_random: bool = False,
    copy_existing: bool = False,
    check: bool = True,
    overwrite: bool = False,
    repair: bool = False,
    progress: bool = True,
    lazily: bool = False,
    engine: Literal["ray"] | None = None,
    worker_init_fn: Callable[[int], None] | None = None,
    type: None = None,
) -> Store:
    """Write every sample of a dataset once into a store at ``path``, and open it. A store that exists is only opened.

    ``dataset`` is a map-style dataset (``len`` and ``[]``), an iterable, or columns: a tensor or
    array, a TensorDataset, a TensorDict, a tensorclass, a data frame or series of pandas or polars, an Arrow table or
    dataset, the path of a Parquet file or of a folder of them, an h5py file, group or dataset, or a tuple or dict of
    these. Columns are copied in chunks, in one process. ``docs/inputs.md`` lists what is stored of each.

    Args:
        path: the store's directory; None makes a temporary one, removed with the last store object that uses it. An
            address (``s3://bucket/ants.mf``): the store is built in a directory of its own below
            ``$XDG_CACHE_HOME/memfeed`` (``~/.cache/memfeed``), stays there, and is pushed; see ``docs/remote.md``.
        fields: names for the leaves of a tuple sample, in order; or ``{path: kind}`` to fix how a leaf is stored
            ("fixed", "jagged", "list", "json", ...), which also forbids its dims to vary otherwise.
        dtypes: ``{field: dtype}`` to cast; a cast that would change a value is refused.
        types: tensorclass, dataclass or namedtuple classes, one or several, that samples and batches come back as, as
            for `memfeed.open`. Those in the samples are known. A class that no sample has replaces the outermost
            container: with ``types=Photo`` each tuple (image, label) becomes a Photo of these two fields.
        split: True stores what the fixed part of the dataset's pipeline returns (torchvision's Compose as its
            ``transform`` or ``transforms``, albumentations, lists of functions), and returns the rest, from its first
            random step, as ``store.transform``, which `Loader` applies. "auto" does so where there is a random step.
            Another str is the name of the attribute that holds the pipeline. See ``docs/splitting.md``.
        keep: with ``split``, what to store of images of several sizes that the rest resizes: "full", as decoded; an
            int, shrunk to that short side in pixels; "encoded", the bytes of their files, decoded in every epoch. None
            takes what an existing store was made with.
        floats: torch.float16 or torch.bfloat16 rounds the float tensors of a map-style dataset to it, and batches have
            that dtype: half the bytes of float32.
        metadata: a dict of JSON values of yours, at most 1 MiB, which ``store.metadata`` returns. None keeps that of an
            existing store, also with ``overwrite``; {} drops it.
        length: take the first so many samples of an iterable, which may be one without an end. Without it an iterable
            is read to its end; if it has a ``len``, it must yield as many samples.
        workers: processes that read and write rows; None chooses. An iterable is read in one process unless a number
            is given: then its ``__iter__`` must yield only the share of its worker, see
            ``torch.utils.data.get_worker_info``.
        on_error: "skip" leaves out samples for which a map-style dataset raises; ``store.skipped`` lists them.
        allow_random: store one draw of random samples instead of refusing them.
        copy_existing: copy data that is memory-mapped on disk already instead of refusing to.
        check: compare an existing store with samples of the dataset; False opens it without.
        overwrite: replace an existing store. Its readers keep the columns they use; who opens it gets the new one.
        repair: check every byte of the existing store, and recompute only the rows whose bytes are damaged. The
            repaired store replaces the old one as with ``overwrite``.
        progress: print the budget and a progress bar on stderr.
        lazily: return at once a store that is filled while it is read, of a map-style dataset: the workers read the
            rows that a `Loader` needs next, then all others, and commit the store when the last row is there. Several
            processes of one machine may do so together at one path. ``docs/filling.md`` says what such a store can do.
        engine: "ray" lets tasks of Ray read and write the rows of a map-style dataset, on all machines of a cluster:
            ``path`` must be on a file system that they share. ``workers`` is the number of tasks at once, None: one for
            each CPU of the cluster. See ``docs/ray.md``.
        worker_init_fn: called in each worker process with its number before it reads, as DataLoader does. Processes of
            Ray may share a number.

    Returns:
        The open store. What it returns is memory-mapped and read-only; see `Store`. For a DatasetDict of Hugging Face
        a dict of stores by the names of its splits, each in a directory of that name below ``path``.

    Raises:
        ValueError: arguments that contradict each other, or have no meaning.
        RandomDataError: random samples, unless ``allow_random``. SplitError: a pipeline that cannot be cut, or that
        needs ``keep``. StaleStoreError: the existing store differs from the
        dataset, or has other ``metadata``. CopyError: the data is memory-mapped already. SchemaError: a sample that no
        column can hold, or that differs from the others (sample index, field). SampleError: the dataset raised; the
        cause is its exception. BuildError: a worker died. SpaceError: the disk has too little free space. StoreError:
        ``path`` is something else. CorruptStoreError: damage that ``repair`` cannot undo.

    After an error the rows that were written stay in ``NAME.build``, and the same call resumes from there.
    """
    if type is not None:
        raise TypeError(f"found type=, which is called types= now: write types={getattr(type, '__name__', type)}")
    check_arguments(dataset, on_error, workers, length, split, keep)
    if repair and (path is None or overwrite or not check):
        raise ValueError("found repair=True without a path, or with overwrite=True or check=False; expected it alone")
    if lazily and (overwrite or repair):
        raise ValueError("found lazily=True with overwrite=True or repair=True; expected a new path, or lazily alone")
    if engine not in (None, "ray"):
        raise ValueError(f'found engine={engine!r}; expected "ray", or None for the processes of this machine')
    if engine is not None and (lazily or repair or workers == 0 or path is None):
        raise ValueError(
            'found engine="ray" with lazily=True, repair=True, workers=0 or without a path; expected a path on a file '
            'system that all nodes share: cache(dataset, path, engine="ray")'
        )
    if engine is not None:
        import_ray()
    checked = None if metadata is None else check_metadata(metadata)
    options = ConvertOptions(
        fields, dtypes, checked, as_types(types), workers, on_error == "skip", allow_random, check, overwrite,
        progress, length, keep=keep, worker_init=worker_init_fn, on_ray=engine is not None,
    )  # fmt: skip
    if not is_a(dataset, "datasets", "DatasetDict", "IterableDatasetDict"):
        return cache_one(dataset, path, options, copy_existing, repair, split, lazily, floats)
    if is_address(path):
        parts = {
            name: cache_one(part, f"{path}/{name}", options, copy_existing, repair, split, lazily, floats)
            for name, part in dataset.items()
        }
        return cast("Store", parts)
    folder = None if path is None else local_path(path)
    if folder is not None and (folder / format.MANIFEST).exists():
        raise StoreError(
            f"{folder}: found a store; expected a folder for the stores of {', '.join(dataset)}: choose another path"
        )
    stores = {
        name: cache_one(
            part, None if folder is None else folder / name, options, copy_existing, repair, split, lazily, floats
        )
        for name, part in dataset.items()
    }
    return cast("Store", stores)  # a checker of types cannot know which of both


def check_arguments(
    dataset: Any, on_error: str, workers: int | None, length: int | None, split: bool | str, keep: Any
) -> None:
    """Raise ValueError for arguments of `cache` that contradict each other, or have no meaning."""
    if on_error not in ("raise", "skip"):
        raise ValueError(f'found on_error={on_error!r}; expected "raise" or "skip"')
    if workers is not None and (not isinstance(workers, int) or workers < 0):
        raise ValueError(f"found workers={workers!r}; expected 0 or more, or None to choose")
    if workers and isinstance(dataset, Iterator):
        raise ValueError(
            f"found workers={workers} for an iterator, which every worker would iterate whole; expected 0, or an "
            "IterableDataset that yields each worker its share, see torch.utils.data.get_worker_info"
        )
    if length is not None and workers is not None and workers > 1:
        raise ValueError(
            f"found length={length} with workers={workers}, of which each iterates its own share of the samples; "
            "expected workers=0 to take the first ones"
        )
    if keep is not None and not split:
        raise ValueError(
            f"found keep={keep!r} without split; expected both: cache(dataset, path, split=True, keep={keep!r})"
        )
    check_keep(keep)


def cache_one(
    dataset: Any,
    path: str | os.PathLike[str] | None,
    options: ConvertOptions,
    copy_existing: bool,
    repair: bool,
    split: bool | str,
    lazily: bool,
    floats: torch.dtype | None,
) -> Store:
    """Return the store of one dataset; see `cache`."""
    if path is not None and is_address(path):
        if lazily:
            raise ValueError(
                "found lazily=True with an address; expected a path: a store is pushed when it is complete"
            )
        return cache_at(
            path,
            lambda local: cache_one(dataset, local, options, copy_existing, repair, split, lazily, floats),
            replace=options.overwrite or repair,
            progress=options.progress,
        )
    owner = None
    if path is None:
        owner = TemporaryDirectory()
        path = owner.path / "store.mf"
    target = format.resolve(path, to_write=options.overwrite or repair or not os.path.exists(path))
    refuse_copy(dataset, target, copy_existing)
    given = classify_input(dataset)
    stored = None if options.overwrite else store_at(target)
    options = msgspec.structs.replace(options, keep=options.keep or keep_of(stored))
    cut = split_input(given, stored, split, options, lazily=lazily)
    if cut is None:
        options = msgspec.structs.replace(options, keep=None)
    else:
        given, options = classify_input(cut.dataset), msgspec.structs.replace(options, recipe=cut.recipe)
        if options.progress:
            write_line(f"memfeed: {cut.line}")
    if floats is not None:
        if given.kind != "map":
            raise ValueError(f"found floats={floats} for a dataset without len and []; expected dtypes= for columns")
        given = classify_input(Rounded(given.dataset, floats))
    refuse_mapped_columns(given, target, copy_existing)
    require_length(given, options.length)
    is_rows = isinstance(given.dataset, RayRows)
    if is_rows and options.worker_count:
        raise ValueError(
            f"found workers={options.worker_count} for a ray.data.Dataset, whose rows the tasks of Ray Data compute; "
            "expected no workers=: choose their number in the dataset, as in ds.map(function, concurrency=8)"
        )
    if is_rows:
        options = msgspec.structs.replace(options, on_ray=False)  # one process writes rows that come in order
    if options.on_ray and given.kind != "map":
        raise ValueError(
            f'found engine="ray" for {"columns" if given.kind == "columns" else "an iterable"}; expected a dataset '
            "with len and [], whose rows tasks can compute by number: leave engine= out"
        )
    try:
        if lazily:
            store = open_or_fill(target, given, options, owner)
        else:
            repaired = repair_store(target, given, options) if repair else None
            store = open_or_convert(target, given, options, owner) if repaired is None else repaired
    except RandomDataError as error:
        raise (not_split(error, given, split) if cut is None else still_random(error, cut)) from None
    return store if cut is None else with_rest(store, cut)
