"""``memfeed verify``: compare every byte of a store with its checksums."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

import memfeed
from memfeed.system.units import format_bytes, printable


def verify(
    store: Annotated[Path, typer.Argument(help="The directory of the store.")],
    progress: Annotated[bool, typer.Option(help="Show a progress bar.")] = True,
) -> None:
    """Read every byte of a store and compare it with the checksums. The exit status is 2 if the store is damaged."""
    from memfeed.system.progress import Progress

    opened = memfeed.open(store)
    total_bytes = sum(opened.manifest.files.values()) if opened.manifest is not None else 0
    started = time.perf_counter()
    with Progress(store.name, total_bytes, unit="B", shown=progress and total_bytes > 0) as bar:
        opened.verify(bar.advance_to)
    seconds = max(time.perf_counter() - started, 1e-9)
    typer.echo(f"{printable(store)}: ok, {format_bytes(total_bytes)} at {format_bytes(total_bytes / seconds)}/s")
