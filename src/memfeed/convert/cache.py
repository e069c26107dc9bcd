"""`memfeed.cache`: from a dataset to an open store. To an address: build on this machine, then push."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec
import xxhash

from memfeed.building.build import Build
from memfeed.convert.budget import forms_that_fit, within_budget
from memfeed.convert.changes import Watched
from memfeed.convert.conversion import open_or_convert
from memfeed.convert.forms import Rounded
from memfeed.convert.inputs import Input, RayRows, classify_input, refuse_copy, refuse_mapped_columns
from memfeed.convert.lazily import keep_of_filling, open_or_fill
from memfeed.convert.options import ConvertOptions, options_of
from memfeed.convert.ray_engine import import_ray
from memfeed.convert.repair import repair_store, require_repairable
from memfeed.convert.splits import keep_of, split_input, store_at, with_rest
from memfeed.convert.staleness import require_unchanged
from memfeed.errors import SpaceError, StaleStoreError, StoreError, StoreNotFoundError
from memfeed.remote.connections import Address, is_address, parse_address
from memfeed.remote.layout import read_manifest
from memfeed.remote.push_pull import pull, push
from memfeed.schema.fields import Kind
from memfeed.schema.tensordicts import is_a
from memfeed.store import format
from memfeed.store.store import Store
from memfeed.system.files import local_path
from memfeed.system.messages import format_bytes, path_text
from memfeed.system.progress import write_line
from memfeed.system.temporary import TemporaryDirectory

if TYPE_CHECKING:
    from memfeed.splitting.split import Split


def cache_at(
    address: str | os.PathLike[str] | Address, build: Callable[[Path], Store], *, replace: bool, progress: bool | None
) -> Store:
    """Return the store that ``build`` makes or opens in `build_directory`, after it was pushed to ``address``.

    A store that is at the address and not on this machine is pulled first. Raises StaleStoreError if another store than
    the one on this machine is at the address, unless ``replace``.
    """
    to = parse_address(address)
    if to.kind == "http":
        raise StoreError(f"{to}: found a web server, which memfeed only reads; expected s3://, gs://, az:// or file://")
    local = build_directory(to)
    try:
        digest = read_manifest(to).digest
    except StoreNotFoundError:
        digest = None
    if digest is not None and not replace and not local.exists() and not format.build_path(local).exists():
        pull(to, local, progress=progress)
    store = build(local)
    if digest is not None and not digest.startswith(store.digest) and not replace:
        raise StaleStoreError(
            f"{to}: found another store than that of this dataset on this machine ({local}); expected the same: remove "
            f"the one on this machine (rm -r {shlex.quote(str(local))}), or replace the one at the address: "
            "overwrite=True"
        )
    push(store.path, to, progress=progress)
    return store


def build_directory(address: Address) -> Path:
    """Return where a store for ``address`` is built: below ``$XDG_CACHE_HOME/memfeed``, or ``~/.cache/memfeed``."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base, "memfeed", f"{xxhash.xxh3_64_hexdigest(str(address).encode())}-{address.name}")


def cache(
    dataset: Any,
    path: str | os.PathLike[str] | None = None,
    *,
    fields: str | Sequence[str] | Mapping[Any, Kind] | None = None,
    forms: Any = None,
    budget: int | str | None = None,
    types: type[Any] | Iterable[type[Any]] = (),
    split: bool | str = False,
    metadata: dict[str, Any] | None = None,
    length: int | None = None,
    workers: int | str | None = None,
    worker_init_fn: Callable[[int], None] | None = None,
    on_error: Literal["raise", "skip"] = "raise",
    allow: str | Collection[str] = (),
    overwrite: bool = False,
    lazily: bool = False,
    progress: bool | None = None,
) -> Store:
    """Write every sample of a dataset once into a store at ``path``, and open it. A store that exists is only opened.

    It is compared with samples of the dataset, and with the data in its attributes, see ``docs/inputs.md``;
    `memfeed.open` opens it without.

    ``dataset`` is a map-style dataset (``len`` and ``[]``), an iterable, or columns: a tensor or
    array, a TensorDataset, a TensorDict, a tensorclass, a data frame or series of pandas or polars, an Arrow table or
    dataset, the path of a Parquet file or of a folder of them, an h5py file, group or dataset, or a tuple or dict of
    these. Columns are copied in chunks, in one process. ``docs/inputs.md`` lists what is stored of each.

    Args:
        path: the store's directory; None makes a temporary one, removed with the last store object that uses it. An
            address (``s3://bucket/ants.mf``): the store is built in a directory of its own below
            ``$XDG_CACHE_HOME/memfeed`` (``~/.cache/memfeed``), stays there, and is pushed; see ``docs/remote.md``.
        fields: a name for each leaf of a sample, in order; or ``{name: kind}`` to fix how a leaf is stored ("fixed",
            "jagged", "list", "json", ...), which also forbids its dims to vary otherwise.
        forms: in which form each field is stored: ``{field: form}``, or one form for all fields that it suits. A form
            is one of these, or a tuple of several, as ``(256, "jpeg:95")``; see ``docs/forms.md``:

            - "raw": as it is. This is the default.
            - "jpeg:95", "lz4", "zstd", or an object of `memfeed.codecs`: each row is compressed, and decoded when a
              batch is made. "jpeg" changes pixels a little, the others change nothing.
            - a dtype, to cast; a cast that would change a value is refused. The key ``float`` stands for all float
              tensors of a map-style dataset, which torch.float16 or torch.bfloat16 rounds.
            - of images of several sizes that a random step resizes (``split``): "full", all pixels; an int, shrunk to
              that short side; "encoded", the bytes of their files, decoded in every epoch.

            A field that is not named takes the form that an existing store has. With ``budget`` also "lossy", which
            allows forms that change pixels.
        budget: the most bytes that a new store may take, as "60GB": some samples are stored in each form and read, and
            the fastest form that fits is taken for all fields for which ``forms`` names none. A line says which.
        types: tensorclass, dataclass or namedtuple classes, one or several, that samples and batches come back as, as
            for `memfeed.open`. Those in the samples are known. A class that no sample has replaces the outermost
            container: with ``types=Photo`` each tuple (image, label) becomes a Photo of these two fields.
        split: True stores what the fixed part of the dataset's pipeline returns (torchvision's Compose as its
            ``transform`` or ``transforms``, albumentations, lists of functions), and returns the rest, from its first
            random step, as ``store.transform``, which `Loader` applies. "auto" does so where there is a random step.
            Another str is the name of the attribute that holds the pipeline. See ``docs/splitting.md``.
        metadata: a dict of JSON values of yours, at most 1 MiB, which ``store.metadata`` returns. None keeps that of an
            existing store, also with ``overwrite``; {} drops it.
        length: take the first so many samples of an iterable, which may be one without an end. Without it an iterable
            is read to its end; if it has a ``len``, it must yield as many samples.
        workers: processes that read and write rows; None chooses, and starts none where they would import the program
            again (macOS, Python 3.14 and newer). An iterable is read in one process unless a number
            is given: then its ``__iter__`` must yield only the share of its worker, see
            ``torch.utils.data.get_worker_info``. "ray" lets tasks of Ray read and write the rows of a map-style
            dataset, on all machines of a cluster, one for each CPU, "ray:8" at most 8 at once: ``path`` must be on a
            file system that they share. See ``docs/ray.md``.
        worker_init_fn: called in each worker process with its number before it reads, as DataLoader does. Processes of
            Ray may share a number.
        on_error: "skip" leaves out samples for which a map-style dataset raises; ``store.skipped`` lists them.
        allow: what is refused otherwise, one or several: "random" stores one draw of random samples, "copy" copies data
            that is memory-mapped on disk already.
        overwrite: replace an existing store. Its readers keep the columns they use; who opens it gets the new one.
        progress: True shows a progress bar on stderr (in a file or a pipe a line each 10 %), None if that is a terminal
            or a notebook, False none. False also leaves out the lines that say what is done, such as the budget.
        lazily: return at once a store that is filled while it is read, of a map-style dataset: the workers read the
            rows that a `Loader` needs next, then all others, and commit the store when the last row is there. Several
            processes of one machine may do so together at one path. ``docs/filling.md`` says what such a store can do.

    Returns:
        The open store. What it returns is memory-mapped and read-only; see `Store`. For a DatasetDict of Hugging Face
        a dict of stores by the names of its splits, each in a directory of that name below ``path``.

    Raises:
        ValueError: arguments that contradict each other, or have no meaning.
        RandomDataError: random samples, unless ``allow`` says so. SplitError: a pipeline that cannot be cut, or that
        needs ``forms``. StaleStoreError: the existing store differs from the
        dataset, or has other ``metadata``. CopyError: the data is memory-mapped already. SchemaError: a sample that no
        column can hold, or that differs from the others (sample index, field). SampleError: the dataset raised; the
        cause is its exception. BuildError: a worker died. SpaceError: the disk has too little free space. StoreError:
        ``path`` is something else. CorruptStoreError: the existing store is damaged.

    After an error the rows that were written stay in ``NAME.build``, and the same call resumes from there.
    """
    options = options_of(
        dataset, fields=fields, forms=forms, budget=budget, types=types, split=split, metadata=metadata, length=length,
        workers=workers, worker_init_fn=worker_init_fn, on_error=on_error, allow=allow, overwrite=overwrite,
        lazily=lazily, is_watched=lazily, progress=progress,
    )  # fmt: skip
    if lazily and overwrite:
        raise ValueError("found lazily=True with overwrite=True; expected a new path, or lazily alone")
    if options.on_ray and (lazily or path is None):
        raise ValueError(
            f"found workers={workers!r} with lazily=True or without a path; expected a path on a file system that all "
            f"nodes share: cache(dataset, path, workers={workers!r})"
        )
    if options.on_ray:
        import_ray()
    return _cache_each(dataset, path, options)


def repair(
    dataset: Any,
    path: str | os.PathLike[str],
    *,
    fields: str | Sequence[str] | Mapping[Any, Kind] | None = None,
    forms: Any = None,
    types: type[Any] | Iterable[type[Any]] = (),
    split: bool | str = False,
    on_error: Literal["raise", "skip"] = "raise",
    progress: bool | None = None,
) -> Store:
    """Check every byte of the store at ``path``, recompute the rows whose bytes are damaged, and open it.

    Only these rows are read from the dataset, and a few more, to compare. The repaired store replaces the old one in
    one step; its readers keep the columns they use. If no row is damaged, the store stays as it is.

    Args:
        dataset: the one that the store was made from.
        path: the store's directory, or its address: then the store on this machine is repaired and pushed.
        fields, forms, types, split, on_error, progress: as they were passed to `memfeed.cache`.

    Returns:
        The open store, see `memfeed.cache`.

    Raises:
        StoreError: no store, or one whose rows cannot be recomputed one by one (of an iterable, for example).
        StaleStoreError: the dataset has changed: the undamaged part of such a row differs.
        CorruptStoreError: damage that cannot be undone, for example of the checksums. BuildError: an unfinished build
        is beside the store. Also what `memfeed.cache` raises of the dataset.
    """
    options = options_of(
        dataset, fields=fields, forms=forms, types=types, split=split, on_error=on_error, allow="copy", repair=True,
        progress=progress,
    )  # fmt: skip
    return _cache_each(dataset, path, options)


def _cache_each(dataset: Any, path: Any, options: ConvertOptions) -> Store:
    """Return the store of a dataset, or a dict of the stores of the splits of a DatasetDict."""
    is_text = isinstance(dataset, str | os.PathLike | Address)
    if is_text and path is not None and not isinstance(path, str | os.PathLike | Address):
        name = "repair" if options.repair else "cache"
        raise TypeError(
            f"found a path, and then an object of {type(path).__name__}; expected the dataset, and then the path: "
            f"memfeed.{name}(dataset, {str(dataset)!r:.150})"
        )
    if options.repair:
        require_repairable(dataset, path)
    if not is_a(dataset, "datasets", "DatasetDict", "IterableDatasetDict"):
        return cache_one(dataset, path, options)
    folder = path if path is None or is_address(path) else local_path(path)
    if isinstance(folder, Path) and (folder / format.MANIFEST).exists():
        raise StoreError(
            f"{folder}: found a store; expected a folder for the stores of {', '.join(dataset)}: choose another path"
        )
    stores = {name: cache_one(part, folder and f"{folder}/{name}", options) for name, part in dataset.items()}
    return cast("Store", stores)  # a checker of types cannot know which of both


def cache_one(dataset: Any, path: str | os.PathLike[str] | None, options: ConvertOptions) -> Store:
    """Return the store of one dataset; see `cache`."""
    if path is not None and is_address(path):
        if options.lazily:
            raise ValueError(
                "found lazily=True with an address; expected a path: a store is pushed when it is complete"
            )
        return cache_at(
            path,
            lambda local: cache_one(dataset, local, options),
            replace=options.overwrite or options.repair,
            progress=options.progress,
        )
    owner = None
    if path is None:
        owner = TemporaryDirectory()
        path = owner.path / "store.mf"
    exists = os.path.exists(path_text(path))
    target = format.resolve(path, to_write=options.overwrite or options.repair or not exists)
    refuse_copy(dataset, target, options.copy_existing)
    given = classify_input(dataset)
    watched = None if isinstance(given.dataset, RayRows) else Watched(dataset, target if owner is None else None)
    given = msgspec.structs.replace(given, watched=watched)
    stored = None if options.overwrite else store_at(target)
    options = _with_budget(dataset, given, stored, options, target)
    options = _with_kept_form(stored, options, target)
    cut = split_input(given, stored, options, target)
    if cut is not None:
        marked, called = cut.dataset.cut.marked, cut.dataset.cut.called()
        watched.read_cut(marked, called, cut.steps_after)  # type: ignore[union-attr]  # no rows of Ray
        given = msgspec.structs.replace(given, dataset=cut.dataset)
    options = _after_cut(cut, options)
    if options.forms.floats is not None and given.kind == "map":
        given = msgspec.structs.replace(given, dataset=Rounded(given.dataset, options.forms.floats))
    if isinstance(given.dataset, RayRows):
        options = msgspec.structs.replace(options, on_ray=False)  # one process writes rows that come in order
    _require_options_of(given, options)
    refuse_mapped_columns(given, target, options.copy_existing)
    try:
        if options.lazily:
            store = open_or_fill(target, given, options, owner, stored)
        else:
            repaired = repair_store(target, given, options) if options.repair else None
            store = open_or_convert(target, given, options, owner, stored) if repaired is None else repaired
    except SpaceError as error:
        if options.is_sample or given.kind != "map" or Build.is_begun(format.build_path(target)) or target.exists():
            raise
        fitting = forms_that_fit(dataset, target, options, cache_one)
        raise SpaceError(error.errno, f"{error.strerror}{fitting}") from error
    if watched is not None and options.says and (spent := watched.spent()):
        write_line(
            f"memfeed: {spent}, so that a changed dataset is noticed; what no sample depends on may be kept elsewhere"
        )
    if options.is_watched and watched is not None:
        watched.follow()
        store._backing.check_dataset = partial(require_unchanged, given, options, cut is not None)
        store._backing.dataset, store._backing.leaf_makers = watched.dataset, watched.leaf_makers
        store._backing.device = watched.device if cut is None else cut.device
    return store if cut is None else with_rest(store, cut)


def _with_budget(
    dataset: Any, given: Input, stored: Store | None, options: ConvertOptions, target: Path
) -> ConvertOptions:
    """Return the options with the forms of a new store that fit its budget; print a line about one that is larger."""
    if options.budget is None:
        return options
    if stored is not None:
        if stored.nbytes > 1.05 * options.budget and options.says:
            write_line(
                f"memfeed: {target} has {format_bytes(stored.nbytes)}, more than the budget of "
                f"{format_bytes(options.budget)}, and stays as it is: memfeed recode writes a smaller one"
            )
        return options
    if given.kind != "map":
        raise ValueError(
            f"found budget= for {type(dataset).__name__}; expected a map-style dataset (len and []), of which some "
            'samples are measured: choose a form by hand, as forms="zstd"'
        )
    return within_budget(dataset, target, options, cache_one)


def _with_kept_form(stored: Store | None, options: ConvertOptions, target: Path) -> ConvertOptions:
    """Return the options with the form in which the existing store, or the unfinished one, has its images."""
    made_with = keep_of_filling(target) if options.lazily and stored is None else keep_of(stored)
    if None not in (options.keep, made_with) and options.keep != made_with:
        raise StaleStoreError(
            f"{target}: found a store made with forms={made_with!r}; expected forms={options.keep!r}, as here: leave "
            "forms= out to take the store as it is, or give another path. With cache(), overwrite=True writes it again"
        )
    return msgspec.structs.replace(options, keep=options.keep or made_with)


def _after_cut(cut: Split | None, options: ConvertOptions) -> ConvertOptions:
    """Return the options of the fixed part of a pipeline, or of one that is not cut; print what was decided."""
    if cut is None and options.keep is not None and options.says:
        write_line(f"memfeed: forms={options.keep!r} has no effect: no random step resizes what is stored")
    elif cut is not None and options.says:
        write_line(f"memfeed: {cut.line}")
    if cut is None:
        return msgspec.structs.replace(options, keep=None)
    return msgspec.structs.replace(options, recipe=cut.recipe, keep=cut.keep)


def _require_options_of(given: Input, options: ConvertOptions) -> None:
    """Raise ValueError for options that have no meaning for this kind of input."""
    what = "columns" if given.kind == "columns" else "an iterable"
    if options.forms.floats is not None and given.kind != "map":
        raise ValueError(
            f"found forms={{float: {options.forms.floats}}} for {what}; expected a dataset with len "
            f"and []: round the tensors yourself, tensor.to({options.forms.floats})"
        )
    if isinstance(given.dataset, RayRows) and options.workers:
        raise ValueError(
            f"found workers={options.workers} for a ray.data.Dataset, whose rows the tasks of Ray Data compute; "
            "expected no workers=: choose their number in the dataset, as in ds.map(function, concurrency=8)"
        )
    if options.on_ray and given.kind != "map":
        raise ValueError(
            f'found workers="ray" for {what}; expected a dataset '
            "with len and [], whose rows tasks can compute by number: leave workers= out"
        )
    length = options.length
    if length is not None and (not isinstance(length, int) or length < 1):
        raise ValueError(f"found length={length!r}; expected 1 row or more, or None to read an iterable to its end")
    if length is not None and given.kind != "iterable":
        raise ValueError(
            f"found length={length} for a dataset of {given.length} samples with numbers; expected it for an iterable "
            f"only: pass torch.utils.data.Subset(dataset, range({length}))"
        )
