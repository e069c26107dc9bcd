"""``memfeed demo``: time one training epoch with DataLoader and one with memfeed, on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    images: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Images, one directory per class. Default: generated photos.")
    ] = None,
    count: Annotated[int, typer.Option(min=1, metavar="N", help="Use at most N images.")] = 1000,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The PNG file to write.")] = Path("memfeed-demo.png"),
    workers: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Worker processes of DataLoader. Default: one per core.")
    ] = None,
    progress: Annotated[bool, typer.Option(help="Show progress bars.")] = True,
) -> None:
    """Train one epoch from DataLoader and one from memfeed; print the times and draw them."""
    from memfeed.demo import run

    run(images, count=count, out=out, workers=workers, progress=progress)
