"""``memfeed cache``: convert a dataset of the user, or a tree of images, to a store."""

from __future__ import annotations

import re
import shlex
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

import memfeed
from memfeed.cli.error_lines import UsageError
from memfeed.system.messages import printable

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


FormOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[FIELD=]FORM",
        help="The form of a field, or of all: a dtype, jpeg:95, zstd, lz4, raw; of images full, encoded, or their "
        "short side; 256+jpeg:95 for two; with --budget lossy. float=float16 rounds all floats. May be repeated.",
    ),
]


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
    form: FormOption = None,
    budget: Annotated[
        str | None, typer.Option(metavar="SIZE", help="The most bytes of a new store, as 60GB: its form is chosen.")
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
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write nothing: measure the forms that the store may have.")
    ] = False,
    progress: ShowProgress = None,
) -> None:
    """Convert a dataset to a store, once.

    MODULE is in the current directory or installed. FACTORY is the dataset, or a function that returns it.
    """
    from memfeed.cli.user_code import load_classes, load_dataset
    from memfeed.convert.inputs import IMAGE_FIELDS, image_folder, to_pixels

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
    names = tuple(name.strip() for name in fields.split(",")) if fields else None
    what: dict[str, Any] = {
        "fields": IMAGE_FIELDS if names is None and images is not None else names,
        "split": split,
        "forms": parse_forms(form),
        "types": load_classes(types or ()),
        "on_error": on_error.value,
        "allow": [one.value for one in allow or ()],
    }
    if dry_run:
        from memfeed.verdict.sample_cost import print_forms

        print_forms(dataset, what, Path(places[-1]))
        return
    if repair:
        if length is not None or workers is not None or budget is not None or allow or overwrite:
            raise UsageError(
                "found --repair with --length, --workers, --budget, --allow or --overwrite; expected it with the "
                "options that say how the samples are stored"
            )
        del what["allow"]
        store = memfeed.repair(dataset, places[-1], **what, progress=progress)
    else:
        store = memfeed.cache(
            dataset,
            places[-1],
            **what,
            length=length,
            budget=budget,
            workers=_parse_workers(workers),
            overwrite=overwrite,
            progress=progress,
        )
    typer.echo(repr(store))
    if images is not None:
        shown = [f"{label} {printable(name)}" for label, name in enumerate(dataset.classes[:MOST_CLASSES])]
        typer.echo(f"  classes: {', '.join(shown)}{', ...' if len(dataset.classes) > MOST_CLASSES else ''}")
    if store.skipped:
        path = printable(shlex.quote(str(store.path)))
        typer.echo(f"  samples skipped: {len(store.skipped):,} (memfeed inspect {path} lists them)")


def _parse_workers(text: str | None) -> int | str | None:
    """Return the number, or "ray" or "ray:N". Raise UsageError for anything else."""
    if text is None or re.fullmatch(r"ray(:[1-9]\d*)?", text):
        return text
    if text.isdecimal():
        return int(text)
    raise UsageError(f"--workers: found {text!r}; expected a number of processes, or ray or ray:8 for tasks of Ray")


def parse_forms(texts: list[str] | None) -> Any:
    """Return the ``forms=`` of ``--form`` options, parts joined by ``+`` as a tuple.

    Raise UsageError if several are for all fields.
    """
    from memfeed.schema.fields import DTYPES

    given: dict[Any, Any] = {}
    for text in texts or ():
        field, _, form = text.rpartition("=")
        name: Any = float if field == "float" else field or None
        if name in given or (given and None in {name, *given}):
            raise UsageError(
                f"found --form {' --form '.join(texts or ())}; expected one form for all fields, or one for each field"
            )
        parts = [int(part) if part.isdigit() else DTYPES.get(part, part) for part in form.split("+")]
        given[name] = parts[0] if len(parts) == 1 else tuple(parts)
    return given.get(None, given or None)
