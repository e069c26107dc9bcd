"""``memfeed push`` and ``memfeed pull``: copy a store to an address, and from one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

import memfeed
from memfeed.system.units import format_bytes, printable


def push(
    store: Annotated[Path, typer.Argument(help="The directory of the store.")],
    address: Annotated[str, typer.Argument(help="Where to: s3://bucket/name, gs://, az://, file://.")],
    remove_old: Annotated[
        bool, typer.Option("--remove-old", help="Afterwards remove the objects of older and interrupted pushes.")
    ] = False,
    progress: Annotated[bool, typer.Option(help="Show a progress bar.")] = True,
) -> None:
    """Write a store to an address. The same command resumes an interrupted push.

    Readers of the address see the store when all of it is there. Credentials come from the environment.
    """
    from memfeed.remote.address import parse_address

    shown, started = parse_address(address), time.perf_counter()
    sent = memfeed.push(store, address, remove_old=remove_old, progress=progress)
    seconds = max(time.perf_counter() - started, 1e-9)
    typer.echo(f"{printable(shown)}: ok, sent {format_bytes(sent)} at {format_bytes(sent / seconds)}/s")


def pull(
    address: Annotated[str, typer.Argument(help="The store's address: s3://bucket/name, gs://, az://, https://.")],
    store: Annotated[Path, typer.Argument(help="The directory to write.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing store.")] = False,
    progress: Annotated[bool, typer.Option(help="Show a progress bar.")] = True,
) -> None:
    """Copy a store from an address to this machine. The same command resumes an interrupted pull."""
    pulled = memfeed.pull(address, store, overwrite=overwrite, progress=progress)
    typer.echo(repr(pulled))
