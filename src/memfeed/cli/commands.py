"""The commands of ``memfeed`` beside ``cache``: each calls a function of the same name and prints what it returned."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

import memfeed
from memfeed.cli.cache_command import ALLOW_HELP, Allow, FormOption, OnError, ShowProgress, parse_forms
from memfeed.cli.error_lines import UsageError
from memfeed.system.messages import format_bytes, printable, require

SLOWER = 1
"""The exit status of ``--compare`` if a loop became slower."""


def append(
    store: Annotated[Path, typer.Argument(help="The directory of the store.")],
    dataset: Annotated[str, typer.Argument(metavar="MODULE:FACTORY", help="The dataset of the new samples.")],
    length: Annotated[int | None, typer.Option(min=1, metavar="N", help="Take N samples of an iterable.")] = None,
    workers: Annotated[int | None, typer.Option(min=0, metavar="N", help="Processes. Default: as measured.")] = None,
    on_error: Annotated[OnError, typer.Option(help="If a sample raises: stop, or skip the sample.")] = OnError.RAISE,
    form: FormOption = None,
    allow: Annotated[list[Allow] | None, typer.Option(help=ALLOW_HELP)] = None,
    split: Annotated[bool, typer.Option("--split", help="For a store that was made with --split.")] = False,
    progress: ShowProgress = None,
) -> None:
    """Add every sample of a dataset to a store, after its rows, which are not copied.

    Each call adds its samples; after a kill the same call goes on.
    """
    from memfeed.cli.user_code import load_dataset

    made = memfeed.append(
        store,
        load_dataset(dataset),
        forms=parse_forms(form),
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
    progress: ShowProgress = None,
) -> None:
    """Write the rows of several stores into a new one, sharing their bytes where the file system can."""
    if len(places) < 2:
        raise UsageError(f"found {places[0]}; expected one or more stores and the new one: memfeed concat A B OUT")
    typer.echo(repr(memfeed.concat(places[:-1], places[-1], progress=progress)))


def recode(
    store: Annotated[Path, typer.Argument(help="The directory of the store.")],
    out: Annotated[Path, typer.Argument(help="The store to write.")],
    form: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[FIELD=]FORM",
            help="The form of a field, or of all: jpeg:95, zstd, lz4 or raw. Others need the dataset: memfeed cache. "
            "May be repeated.",
        ),
    ] = None,
    progress: ShowProgress = None,
) -> None:
    """Write a store in other forms, without its dataset: jpeg:95, zstd, lz4 or raw, for all fields or by name.

    The same command resumes an interrupted one.
    """
    if not form:
        raise UsageError("found no --form; expected one or more: memfeed recode A B --form zstd")
    typer.echo(repr(memfeed.recode(store, out, parse_forms(form), progress=progress)))


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
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the same as an HTML page, with thumbnails of images.")
    ] = None,
) -> None:
    """Show the fields of a store, their size on disk, and the first rows.

    --augment writes to the directory of --pictures, or to the current one. Of a store at an address only the manifest
    is read: no rows are shown.
    """
    if html is not None and html.suffix != ".html":  # the file is replaced: perhaps a device, or one of a store
        raise UsageError(f"found --html {str(html)!r}; expected a name that ends in .html")
    if pictures is not None and pictures.exists() and not pictures.is_dir():
        raise UsageError(f"found --pictures {str(pictures)!r}, which is a file; expected a directory, which may be new")
    from memfeed.cli.store_summary import summarise, summarise_address  # they import torch, which takes seconds
    from memfeed.remote.connections import is_address

    if not is_address(store):
        summarise(Path(store), rows, pictures, augment, epochs, html)
        return
    if pictures is not None or augment is not None:
        raise UsageError("found --pictures or --augment with an address; expected a store on this machine: pull it")
    summarise_address(store, html)


def verify(
    store: Annotated[str, typer.Argument(help="The directory of the store, or its address.")],
    progress: ShowProgress = None,
) -> None:
    """Read every byte of a store and compare it with the checksums. The exit status is 2 if the store is damaged."""
    from memfeed.remote.connections import is_address, parse_address

    if is_address(store):
        from memfeed.remote.layout import verify as verify_address
        from memfeed.system.progress import Progress

        address, started = parse_address(store), time.perf_counter()
        with Progress(address.name, None, unit="B", progress=progress) as bar:
            remote = verify_address(store, bar.advance_to)
        _report(address, "", sum(remote.manifest.files.values()), started)
        return
    opened = memfeed.open(store)
    total_bytes = sum(opened._view.manifest.files.values()) if opened._view.manifest is not None else opened.nbytes
    started = time.perf_counter()
    opened.verify(progress=progress)
    _report(store, "", total_bytes, started)


def _report(name: object, done: str, total_bytes: int, started: float) -> None:
    seconds = max(time.perf_counter() - started, 1e-9)
    typer.echo(f"{printable(name)}: ok, {done}{format_bytes(total_bytes)} at {format_bytes(total_bytes / seconds)}/s")


def push(
    store: Annotated[Path, typer.Argument(help="The directory of the store.")],
    address: Annotated[str, typer.Argument(help="Where to: s3://bucket/name, gs://, az://, file://.")],
    remove_old: Annotated[
        bool, typer.Option("--remove-old", help="Afterwards remove the objects of older and interrupted pushes.")
    ] = False,
    progress: ShowProgress = None,
) -> None:
    """Write a store to an address. The same command resumes an interrupted push.

    Readers of the address see the store when all of it is there. Credentials come from the environment.
    """
    from memfeed.remote.connections import parse_address

    shown, started = parse_address(address), time.perf_counter()
    sent = memfeed.push(store, address, remove_old=remove_old, progress=progress)
    _report(shown, "sent ", sent, started)


def pull(
    address: Annotated[str, typer.Argument(help="The store's address: s3://bucket/name, gs://, az://, https://.")],
    store: Annotated[Path, typer.Argument(help="The directory to write.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing store.")] = False,
    progress: ShowProgress = None,
) -> None:
    """Copy a store from an address to this machine. The same command resumes an interrupted pull."""
    pulled = memfeed.pull(address, store, overwrite=overwrite, progress=progress)
    typer.echo(repr(pulled))


def demo(
    images: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Images, one directory per class. Default: generated photos.")
    ] = None,
    count: Annotated[int, typer.Option(min=1, metavar="N", help="Use at most N images.")] = 1000,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The PNG file to write.")] = Path("memfeed-demo.png"),
    workers: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Worker processes of both. Default: one per core.")
    ] = None,
    progress: ShowProgress = None,
) -> None:
    """Train five epochs from DataLoader and five from memfeed; print the times and draw them."""
    from memfeed.cli.demo import run

    run(images, count=count, out=out, workers=workers, progress=progress)


def bench(
    places: Annotated[
        list[str], typer.Argument(metavar="MODULE:FACTORY", help="The dataset, or the DataLoader, of today.")
    ],
    step: Annotated[
        str | None,
        typer.Option(metavar="MODULE:STEP", help="A function of a batch, or one without arguments that makes it."),
    ] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, metavar="N", help="Of a dataset. Default: 32.")] = None,
    workers: Annotated[int | None, typer.Option(min=0, metavar="N", help="Of a dataset. Default: 0.")] = None,
    device: Annotated[str | None, typer.Option(metavar="DEVICE", help="Where batches go before the step.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, metavar="N", help="How often the data is read.")] = None,
    seconds: Annotated[
        float, typer.Option(min=1, metavar="S", help="About what it may take; a slow dataset takes longer.")
    ] = 40.0,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the store would be, for its free space.")] = Path(),
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write what was measured as JSON.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write it as one page.")] = None,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Run no loop: print the forms that a store may have.")
    ] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Compare two files of --json. Exit status 1: a loop became slower.")
    ] = False,
) -> None:
    """Measure whether memfeed would make a program faster. Takes about a minute.

    The first line says: helps, does not help, or cannot tell. With --compare the arguments are two files of --json.
    """
    if compare:
        _compare(places)
        return
    if len(places) != 1:
        raise UsageError(f"found {' '.join(places)!r}; expected one module:factory (or --compare A.json B.json)")
    for path, suffix in ((json, ".json"), (html, ".html"), (png, ".png")):
        if path is not None and (path.suffix != suffix or not path.absolute().parent.is_dir()):
            raise UsageError(f"found {str(path)!r}; expected a name that ends in {suffix}, in a directory that exists")
    if png is not None:
        require("plots", "matplotlib")  # before a minute of measuring
    from memfeed.cli.user_code import load_dataset, load_transform
    from memfeed.verdict.bench import bench as measure

    dataset = load_dataset(places[0])
    if dry_run:
        from memfeed.system.torch_loader import DataLoader
        from memfeed.verdict.sample_cost import print_forms

        print_forms(dataset.dataset if isinstance(dataset, DataLoader) else dataset, {"split": "auto"}, out)
        return
    verdict = measure(
        dataset,
        None if step is None else load_transform(step),
        batch_size=batch_size,
        workers=workers,
        device=device,
        epochs=epochs,
        seconds=seconds,
        out=out,
    )
    for line in str(verdict).splitlines():
        typer.echo(printable(line))
    for path in (json, html, png):
        if path is not None:
            verdict.save(path)


def _compare(places: list[str]) -> None:
    from memfeed.verdict.verdict import compare, load_verdict

    if len(places) != 2:
        raise UsageError(
            f"found {len(places)} files beside --compare; expected two: memfeed bench --compare A.json B.json"
        )
    lines, is_slower = compare(*map(load_verdict, places))
    for line in lines:
        typer.echo(printable(line))
    if is_slower:
        raise typer.Exit(SLOWER)


def doctor(
    path: Annotated[Path, typer.Argument(help="The directory that stores are kept in.")] = Path(),
) -> None:
    """Measure memory, disk, bus and limits of this machine; for each low figure say what to do."""
    from memfeed.verdict.doctor import examine

    for one in examine(path):
        advice = f"\n  {'':<36}-> {one.advice}" if one.advice else ""
        typer.echo(printable(f"{'!' if one.advice else ' '} {one.name:<36}{one.value}") + advice)
