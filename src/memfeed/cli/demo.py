"""``memfeed demo``: the race between DataLoader and memfeed, on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def demo(
    images: Annotated[
        Path | None, typer.Option(help="Your own tree of images, one directory per class; default: made for the race.")
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="How many images to race over, at most.")] = 1000,
    out: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("memfeed-demo.png"),
    workers: Annotated[int | None, typer.Option(min=0, help="DataLoader's workers; default: one per core.")] = None,
    progress: Annotated[bool, typer.Option(help="Show progress bars.")] = True,
) -> None:
    """Train one epoch from DataLoader and one from memfeed, side by side, and draw the result."""
    from memfeed.demo import run

    run(images, count=count, out=out, workers=workers, progress=progress, console=Console(highlight=False))
