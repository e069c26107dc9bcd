"""The arguments of `memfeed.cache`, `memfeed.append` and `memfeed.repair`, checked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from torch.utils.data import IterableDataset

from memfeed.convert.forms import Forms, forms_of
from memfeed.errors import FieldError, SchemaError, brief
from memfeed.schema import codec
from memfeed.schema.fields import DEEPEST, Kind, Schema
from memfeed.schema.recipe import RecipeStep
from memfeed.schema.tree import as_types
from memfeed.store.dataset_attributes import Keep, metadata_problem
from memfeed.system.messages import parse_bytes
from memfeed.system.progress import is_shown

WorkerInit = Callable[[int], None] | None
"""A function that each worker process calls with its number before it reads, as DataLoader's ``worker_init_fn``."""


class ConvertOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of `memfeed.cache`, and what follows from them."""

    fields: Sequence[str] | Mapping[Any, Kind] | None = None
    types: tuple[type, ...] = ()
    split: bool | str = False
    keep: Keep | None = None  # of the images: that of ``forms``, or of the store that exists
    forms: Forms = Forms()
    budget: int | None = None  # bytes of a new store
    is_sample: bool = False  # a few samples are stored to measure a form
    metadata: Mapping[str, Any] | None = None  # None keeps that of the store that is replaced
    length: int | None = None
    workers: int | None = None
    on_error: str = "raise"
    allow_random: bool = False
    copy_existing: bool = False
    overwrite: bool = False
    repair: bool = False  # see `memfeed.repair`
    progress: bool | None = None  # see `memfeed.system.progress`
    lazily: bool = False
    is_watched: bool = False  # the dataset is compared when an epoch begins
    on_ray: bool = False  # tasks of Ray read and write the rows
    worker_init_fn: WorkerInit = None
    recipe: tuple[RecipeStep, ...] | None = None  # what was left out of the dataset's pipeline
    like: Schema | None = None  # that of the store to which the rows will be appended

    @property
    def skips_errors(self) -> bool:
        """True if samples for which the dataset raises are left out."""
        return self.on_error == "skip"

    @property
    def says(self) -> bool:
        """True if lines that say what is done are printed."""
        return self.progress is not False


def options_of(
    dataset: Any,
    *,
    fields: str | Sequence[str] | Mapping[Any, Kind] | None = None,
    forms: Any = None,
    budget: int | str | None = None,
    types: type[Any] | Iterable[type[Any]] = (),
    metadata: dict[str, Any] | None = None,
    workers: int | str | None = None,
    allow: str | Collection[str] = (),
    **others: Any,
) -> ConvertOptions:
    """Return the arguments of `memfeed.cache` as options. Raise ValueError for those of no meaning."""
    chosen = forms_of(forms)
    on_ray, worker_count = _ray_and_workers(workers)
    allowed = _allowed(allow)
    options = ConvertOptions(
        **others,
        fields=_fields(fields),
        keep=chosen.keep,
        forms=chosen,
        budget=parse_bytes("budget", budget),
        types=as_types(types),
        metadata=None if metadata is None else check_metadata(metadata),
        workers=worker_count,
        on_ray=on_ray,
        allow_random="random" in allowed,
        copy_existing="copy" in allowed,
    )
    _check(dataset, options)
    return options


def _fields(fields: Any) -> tuple[str, ...] | Mapping[Any, Kind] | None:
    """Return the names of all leaves, in order, or their kinds by name. Raise FieldError for anything else."""
    if fields is None or isinstance(fields, Mapping):
        return fields
    names = (fields,) if isinstance(fields, str) else fields
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name for name in names):
        raise FieldError(
            f'found fields={brief(fields)}; expected a name for each leaf of a sample, in order, as fields=["image"], '
            'or kinds by name, as fields={"boxes": "jagged"}'
        )
    return tuple(names)


def _ray_and_workers(workers: int | str | None) -> tuple[bool, int | None]:
    """Return True for Ray, and the number of processes or tasks."""
    if isinstance(workers, str):
        name, colon, count = workers.partition(":")
        if name == "ray" and (not colon or (count.isdecimal() and int(count) > 0)):
            return True, int(count) if colon else None
    elif workers is None or (isinstance(workers, int) and workers >= 0):
        return False, workers
    raise ValueError(
        f'found workers={workers!r}; expected 0 or more, None to choose, or "ray" or "ray:8" for tasks of Ray'
    )


def _allowed(allow: str | Collection[str]) -> frozenset[str]:
    found = (allow,) if isinstance(allow, str) else allow
    if not isinstance(found, Collection) or not all(one in ("random", "copy") for one in found):
        raise ValueError(f'found allow={allow!r}; expected "random" or "copy", or both: allow=("random", "copy")')
    return frozenset(found)


def _check(dataset: Any, options: ConvertOptions) -> None:
    """Raise ValueError for arguments that contradict each other, or have no meaning."""
    on_error, workers, length, keep = options.on_error, options.workers, options.length, options.keep
    if not (options.worker_init_fn is None or callable(options.worker_init_fn)):
        raise ValueError(
            f"found worker_init_fn={brief(options.worker_init_fn)}; expected a function of a worker's number"
        )
    if on_error not in ("raise", "skip"):
        raise ValueError(f'found on_error={on_error!r}; expected "raise" or "skip"')
    if options.forms.lossy and options.budget is None:
        raise ValueError(
            'found forms="lossy" without budget=; expected both, because a budget chooses the form: budget="60GB"; or '
            'a form by hand: forms="jpeg:95"'
        )
    has_rows = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if workers and isinstance(dataset, Iterator) and not has_rows and not isinstance(dataset, IterableDataset):
        raise ValueError(
            f"found workers={workers} for an iterator, which every worker would iterate whole; expected 0, or an "
            "IterableDataset that yields each worker its share, see torch.utils.data.get_worker_info"
        )
    if length is not None and workers is not None and workers > 1:
        raise ValueError(
            f"found length={length} with workers={workers}, of which each iterates its own share of the samples; "
            "expected workers=0 to take the first ones"
        )
    if keep is not None and not options.split:
        raise ValueError(
            f"found forms={keep!r} without split; expected both: cache(dataset, path, split=True, forms={keep!r})"
        )
    is_shown(options.progress)  # raises for what has no meaning


def check_metadata(metadata: Any) -> dict[str, Any]:
    """Return a copy of the user's ``metadata=``. Raise SchemaError, naming the key, unless it is a JSON dict."""
    if not isinstance(metadata, dict):
        raise SchemaError(f"found metadata={brief(metadata)}; expected a dict of JSON values")
    try:
        codec.encode_json(metadata)
    except SchemaError as error:
        place, value = _first_bad("metadata", metadata, DEEPEST)
        raise SchemaError(
            f"found {place} = {brief(value)}; expected None, bool, int, finite float, str, list, or dict with str keys "
            f"({brief(str(error), 100)})"
        ) from None
    problem = metadata_problem(metadata)
    if problem:
        raise SchemaError(
            f"found {problem}; expected less: keep large values in a file of their own, and its path here"
        )
    copied: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(metadata))
    return copied


def _first_bad(place: str, value: Any, depth: int) -> tuple[str, Any]:
    """Return the innermost value that is no JSON, and how to write it."""
    parts = value.items() if type(value) is dict else enumerate(value) if type(value) is list else ()
    for key, part in parts:
        if type(value) is dict and type(key) is not str:
            return f"{place} with the key {brief(key)}", part
        try:
            codec.encode_json(part)
        except SchemaError:
            return _first_bad(f"{place}[{brief(key)}]", part, depth - 1) if depth else (place, value)
    return place, value
