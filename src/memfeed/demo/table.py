"""The race as a table."""

from __future__ import annotations

from rich.table import Table

from memfeed.demo.result import Result
from memfeed.system.units import format_bytes, format_seconds

FOOTNOTE = (
    "Both laps train the same model on the same images, with the same batch size and crops of 224 x 224, on half of "
    "the cores if there is no GPU (with all of them DataLoader is slower still: its workers need some). Files are in "
    "memory from the start. The start of workers counts in the epoch, as it does for you. Data wait is the time until "
    "the next batch is on the device. Break-even is the first epoch by whose end conversion and training together took "
    "less time than DataLoader."
)


def table(result: Result) -> Table:
    """What was measured, side by side."""
    plain, fed = result.dataloader, result.memfeed
    shown = Table(title=title(result), title_justify="left", title_style="bold")
    shown.add_column("one epoch")
    shown.add_column("DataLoader", justify="right")
    shown.add_column("memfeed", justify="right")
    shown.add_column("ratio", justify="right")
    shown.add_row("samples/s", f"{plain.rate:,.0f}", f"{fed.rate:,.0f}", f"[bold]{result.ratio:.1f}x[/]")
    shown.add_row("epoch", format_seconds(plain.seconds), format_seconds(fed.seconds), f"{1 / result.ratio:.2f}x")
    shown.add_row("data wait, share of the step", f"{plain.wait_share:.0%}", f"{fed.wait_share:.0%}", "")
    shown.add_row("bytes", format_bytes(result.image_bytes), format_bytes(result.store_bytes), "", end_section=True)
    shown.add_row("cache time, once", "", format_seconds(result.cache_seconds), "")
    shown.add_row("break-even", "", break_even(result), "")
    return shown


def title(result: Result) -> str:
    """What raced, and where."""
    workers = f"{result.workers} workers" if result.workers != 1 else "1 worker"
    return f"{result.dataloader.samples:,} images, batches of {result.batch_size}, {workers}, {result.machine}"


def break_even(result: Result) -> str:
    """When the conversion has paid for itself, in words."""
    epoch = result.break_even_epoch
    return "never" if epoch is None else f"in epoch {epoch:,}"
