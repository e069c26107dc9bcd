"""``memfeed cache``: convert a dataset of the user, or a tree of images, to a store."""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import memfeed
from memfeed.cli.error_lines import UsageError
from memfeed.system.units import printable

if TYPE_CHECKING:
    import torch

MOST_CLASSES = 20


class OnError(str, Enum):
    """The values of ``--on-error``."""

    SKIP = "skip"
    RAISE = "raise"


class Allow(str, Enum):
    """The values of ``--allow``."""

    RANDOM = "random"
    COPY = "copy"


ALLOW_HELP = "random: accept random samples, drawn once. copy: copy data that is memory-mapped. May be repeated."


ShowProgress = Annotated[
    bool | None,
    typer.Option("--progress/--no-progress", help="Show a progress bar, or nothing.", show_default="on a terminal"),
]


class Floats(str, Enum):
    """The values of ``--floats``."""

    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


def cache(
    places: Annotated[
        list[str], typer.Argument(metavar="[MODULE:FACTORY] OUT", help="The dataset to read, the store to write.")
    ],
    images: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Read images, one directory per class. Leave out MODULE:FACTORY.")
    ] = None,
    resize: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="With --images: 256 (the short side), or 256x192 (height x width)."),
    ] = None,
    length: Annotated[int | None, typer.Option(min=1, metavar="N", help="Take N samples of an iterable.")] = None,
    workers: Annotated[
        str | None,
        typer.Option(metavar="N", help="Processes. Default: as measured. ray, ray:N: tasks of a Ray cluster."),
    ] = None,
    on_error: Annotated[OnError, typer.Option(help="If a sample raises: stop, or skip the sample.")] = OnError.RAISE,
    fields: Annotated[str | None, typer.Option(metavar="A,B,...", help="Names for the leaves of a tuple.")] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(metavar="FIELD=DTYPE", help="Cast a field. May be repeated.")
    ] = None,
    types: Annotated[
        list[str] | None,
        typer.Option(metavar="MODULE:CLASS", help="The class that samples come back as. May be repeated."),
    ] = None,
    allow: Annotated[list[Allow] | None, typer.Option(help=ALLOW_HELP)] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing store.")] = False,
    repair: Annotated[bool, typer.Option("--repair", help="Recompute only the damaged rows of a store.")] = False,
    split: Annotated[
        bool, typer.Option("--split", help="Store the fixed part of the dataset's pipeline, and describe the rest.")
    ] = False,
    keep: Annotated[
        str | None,
        typer.Option(metavar="WHAT", help="With --split, of images: full, encoded, or their short side in pixels."),
    ] = None,
    floats: Annotated[Floats | None, typer.Option(help="Round floats to 16 bits.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write nothing: measure the forms that the store may have.")
    ] = False,
    progress: ShowProgress = None,
) -> None:
    """Convert a dataset to a store, once.

    MODULE is in the current directory or installed. FACTORY is the dataset, or a function that returns it.
    """
    from memfeed.cli.user_code import load_classes, load_dataset
    from memfeed.convert.image_folder import FIELDS, image_folder, to_pixels

    if len(places) != (2 if images is None else 1):
        raise UsageError(
            f"found {' '.join(places)!r}; expected `memfeed cache module:factory OUT`, "
            "or `memfeed cache --images DIR OUT`"
        )
    if images is None and resize is not None:
        raise UsageError("found --resize without --images; expected both: resize in the dataset itself")
    if dry_run and (repair or length is not None):
        raise UsageError(
            "found --dry-run with --repair or --length; expected it with the options that choose how a map-style "
            "dataset is stored"
        )
    dataset = load_dataset(places[0]) if images is None else image_folder(images, to_pixels(resize))
    dtypes: dict[Any, Any] = dict(parse_dtype(text) for text in dtype or ())
    if floats is not None:
        dtypes[float] = _torch_dtype(floats.value)
    names = tuple(name.strip() for name in fields.split(",")) if fields else None
    what: dict[str, Any] = {
        "fields": FIELDS if names is None and images is not None else names,
        "split": split,
        "keep": int(keep) if keep is not None and keep.isdigit() else keep,
        "dtypes": dtypes or None,
        "types": load_classes(types or ()),
        "on_error": on_error.value,
        "allow": [one.value for one in allow or ()],
    }
    if dry_run:
        from memfeed.verdict.forms import print_forms

        print_forms(dataset, what, Path(places[-1]))
        return
    if repair:
        if length is not None or workers is not None or keep is not None or allow or overwrite:
            raise UsageError(
                "found --repair with --length, --workers, --keep, --allow or --overwrite; expected it with the options "
                "that say how the samples are stored"
            )
        del what["keep"], what["allow"]
        store = memfeed.repair(dataset, places[-1], **what, progress=progress)
    else:
        store = memfeed.cache(
            dataset,
            places[-1],
            **what,
            length=length,
            workers=_parse_workers(workers),
            overwrite=overwrite,
            progress=progress,
        )
    typer.echo(repr(store))
    if images is not None:
        shown = [f"{label} {printable(name)}" for label, name in enumerate(dataset.classes[:MOST_CLASSES])]
        typer.echo(f"  classes: {', '.join(shown)}{', ...' if len(dataset.classes) > MOST_CLASSES else ''}")
    if store.skipped:
        typer.echo(f"  samples skipped: {len(store.skipped):,} (memfeed inspect {printable(store.path)} lists them)")


def _torch_dtype(name: str) -> torch.dtype:
    from memfeed.schema.fields import DTYPES

    return DTYPES[name]


def _parse_workers(text: str | None) -> int | str | None:
    """Return the number, or "ray" or "ray:N". Raise UsageError for anything else."""
    if text is None or re.fullmatch(r"ray(:[1-9]\d*)?", text):
        return text
    if text.isdecimal():
        return int(text)
    raise UsageError(f"--workers: found {text!r}; expected a number of processes, or ray or ray:8 for tasks of Ray")


def parse_dtype(text: str) -> tuple[str, torch.dtype]:
    """Return the field and the dtype of ``field=dtype``. Raise UsageError for anything else."""
    from memfeed.schema.fields import DTYPES

    field, _, name = text.rpartition("=")
    if not field or name not in DTYPES:
        raise UsageError(
            f"found --dtype {text!r}; expected field=dtype, for example mask=uint8, with one of {', '.join(DTYPES)}"
        )
    return field, DTYPES[name]
