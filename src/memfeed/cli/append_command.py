"""``memfeed append`` and ``memfeed concat``: more rows for a store, and several stores as one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import memfeed
from memfeed.cli.cache_command import ALLOW_HELP, Allow, OnError, parse_dtype
from memfeed.cli.error_lines import UsageError


def append(
    store: Annotated[Path, typer.Argument(help="The directory of the store.")],
    dataset: Annotated[str, typer.Argument(metavar="MODULE:FACTORY", help="The dataset of the new samples.")],
    length: Annotated[int | None, typer.Option(min=1, metavar="N", help="Take N samples of an iterable.")] = None,
    workers: Annotated[int | None, typer.Option(min=0, metavar="N", help="Processes. Default: as measured.")] = None,
    on_error: Annotated[OnError, typer.Option(help="If a sample raises: stop, or skip the sample.")] = OnError.RAISE,
    dtype: Annotated[
        list[str] | None, typer.Option(metavar="FIELD=DTYPE", help="Cast a field. May be repeated.")
    ] = None,
    allow: Annotated[list[Allow] | None, typer.Option(help=ALLOW_HELP)] = None,
    split: Annotated[bool, typer.Option("--split", help="For a store that was made with --split.")] = False,
    progress: Annotated[bool, typer.Option(help="Show the expected size and a progress bar.")] = True,
) -> None:
    """Add every sample of a dataset to a store, after its rows, which are not copied.

    Each call adds its samples; after a kill the same call goes on.
    """
    from memfeed.cli.user_code import load_dataset

    made = memfeed.append(
        store,
        load_dataset(dataset),
        dtypes=dict(parse_dtype(text) for text in dtype) if dtype else None,
        length=length,
        workers=workers,
        on_error=on_error.value,
        allow=[one.value for one in allow or ()],
        split=split,
        progress=progress,
    )
    typer.echo(repr(made))


def concat(
    places: Annotated[list[Path], typer.Argument(metavar="STORE... OUT", help="The stores, and the one to write.")],
    progress: Annotated[bool, typer.Option(help="Say what is written.")] = True,
) -> None:
    """Write the rows of several stores into a new one, sharing their bytes where the file system can."""
    if len(places) < 2:
        raise UsageError(f"found {places[0]}; expected one or more stores and the new one: memfeed concat A B OUT")
    typer.echo(repr(memfeed.concat(places[:-1], places[-1], progress=progress)))
