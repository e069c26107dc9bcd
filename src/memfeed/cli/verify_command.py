"""``memfeed verify``: compare every byte of a store with its checksums."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

import memfeed
from memfeed.system.units import format_bytes, printable


def verify(
    store: Annotated[str, typer.Argument(help="The directory of the store, or its address.")],
    progress: Annotated[bool, typer.Option(help="Show a progress bar.")] = True,
) -> None:
    """Read every byte of a store and compare it with the checksums. The exit status is 2 if the store is damaged."""
    from memfeed.remote.address import is_address
    from memfeed.system.progress import Progress

    if is_address(store):
        _verify_address(store, progress)
        return
    opened = memfeed.open(store)
    total_bytes = sum(opened._view.manifest.files.values()) if opened._view.manifest is not None else 0
    started = time.perf_counter()
    with Progress(Path(store).name, total_bytes, unit="B", shown=progress and total_bytes > 0) as bar:
        opened.verify(bar.advance_to)
    _report(store, total_bytes, started)


def _verify_address(text: str, progress: bool) -> None:
    from memfeed.remote.address import parse_address
    from memfeed.remote.chunks import verify as verify_address
    from memfeed.system.progress import Progress

    address, started = parse_address(text), time.perf_counter()
    with Progress(address.name, None, unit="B", shown=progress) as bar:
        store = verify_address(text, bar.advance_to)
    _report(str(address), sum(store.manifest.files.values()), started)


def _report(name: str, total_bytes: int, started: float) -> None:
    seconds = max(time.perf_counter() - started, 1e-9)
    typer.echo(f"{printable(name)}: ok, {format_bytes(total_bytes)} at {format_bytes(total_bytes / seconds)}/s")
