"""``memfeed inspect``: print the fields of a store, its first rows, and pictures of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from memfeed.cli.error_lines import UsageError


def inspect(
    store: Annotated[
        str, typer.Argument(help="The directory of a store, or one that TensorDict.memmap() wrote, or an address.")
    ],
    rows: Annotated[int, typer.Option(min=0, metavar="N", help="Show the first N rows.")] = 3,
    pictures: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the images of these rows there, as small PNG files.")
    ] = None,
    augment: Annotated[
        str | None,
        typer.Option(metavar="MODULE:TRANSFORM", help="Draw the images before and after this transform, in one PNG."),
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, metavar="N", help="With --augment: the epochs to draw.")] = 5,
) -> None:
    """Show the fields of a store, their size on disk, and the first rows.

    --augment writes to the directory of --pictures, or to the current one. Of a store at an address only the manifest
    is read: no rows are shown.
    """
    from memfeed.cli.store_summary import summarise, summarise_address  # they import torch, which takes seconds
    from memfeed.remote.address import is_address

    if not is_address(store):
        summarise(Path(store), rows, pictures, augment, epochs)
        return
    if pictures is not None or augment is not None:
        raise UsageError("found --pictures or --augment with an address; expected a store on this machine: pull it")
    summarise_address(store)
