"""``memfeed verify``: every byte against its checksum."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

import memfeed
from memfeed.system.progress import Progress
from memfeed.system.units import format_bytes


def verify(
    store: Annotated[Path, typer.Argument(help="The store's directory.")],
    progress: Annotated[bool, typer.Option(help="Show a progress bar.")] = True,
) -> None:
    """Read every byte of a store and compare it with the checksums; exit status 2 if it is damaged."""
    opened = memfeed.open(store)
    size = sum(opened.manifest.files.values()) if opened.manifest is not None else 0
    done = 0
    started = time.perf_counter()
    with Progress(store.name, size, unit="B", shown=progress and size > 0) as bar:

        def advance(now: int, total: int) -> None:
            nonlocal done
            bar.advance(now - done)
            done = now

        opened.verify(advance)
    seconds = max(time.perf_counter() - started, 1e-9)
    typer.echo(f"{store}: ok, {format_bytes(size)} at {format_bytes(size / seconds)}/s")
