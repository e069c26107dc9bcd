"""``memfeed bench`` and ``memfeed doctor``: would memfeed help, and what does this machine give."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from memfeed.cli.error_lines import UsageError
from memfeed.system.messages import printable, require

SLOWER = 1
"""The exit status of ``--compare`` if a loop became slower."""


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
    seconds: Annotated[float, typer.Option(min=1, metavar="S", help="About what it may take.")] = 40.0,
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
        from torch.utils.data import DataLoader

        from memfeed.verdict.forms import print_forms

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
