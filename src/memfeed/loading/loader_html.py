"""A loader for people: in one line, and as HTML with its settings, what waits for what, and its store.

It begins no epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from memfeed.errors import brief
from memfeed.store.store_html import or_error, parts
from memfeed.system.html_parts import MOST_FIELDS, Html, bar_row, element, fragment, joined, key, table
from memfeed.system.messages import format_bytes, format_short

WAITING, OWN = "waiting for the next batch", "the program's own time between two batches"
LITTLE = 0.1
"""A program that waits less than this share of its time is not held up by its data."""
VALUE_WIDTH = 200


def loader_text(loader: Any) -> str:
    """Return the `repr` of a loader."""
    settings = loader._effective_settings()
    rank, world_size = settings.ranks()
    ranks = "" if world_size == 1 else f"rank {rank} of {world_size}, "
    batches = "" if settings.by_length else f"batch_size={loader.batch_size}, "
    return (
        f"Loader({len(loader.store):,} rows, {batches}{loader._epochs.order_name(settings)}, "
        f"seed={loader._clock.seed}, {ranks}{count_text(loader)} batches an epoch, "
        f"device={loader.device or 'cpu'}, placement={placement_text(loader)})"
    )


def count_text(loader: Any) -> str:
    """Return the number of batches in an epoch; "?" with a sampler without a length."""
    try:
        return f"{len(loader):,}"
    except (TypeError, ValueError):
        return "?"


def placement_text(loader: Any) -> str:
    """Return where columns are kept; before an epoch, the placement that was asked for."""
    return loader._epochs.reader.describe_placements() or repr(loader.placement)


def loader_html(loader: Any) -> Html:
    """Return a loader for a notebook."""
    return fragment(_parts(loader))


def stats_html(stats: Mapping[str, Any]) -> Html:
    """Return what `Loader.stats` returned, for a notebook."""
    return fragment(stats_parts(stats))


def _parts(loader: Any) -> Iterator[Html]:
    yield element("h1", f"Loader: {len(loader.store):,} rows, {count_text(loader)} batches an epoch")
    yield table(("setting", "value"), _settings(loader), "text")
    stats = loader.stats()
    if stats["epoch"] is not None:
        yield from stats_parts(stats)
    yield from parts(loader.store._view)


def _settings(loader: Any) -> Iterator[tuple[str, object]]:
    settings = loader._effective_settings()
    if not settings.by_length:
        yield "batch_size", loader.batch_size
    yield "order", loader._epochs.order_name(settings)
    seed = loader._clock.seed
    yield "seed", "drawn when the first epoch begins" if seed is None else seed
    rank, world_size = settings.ranks()
    if world_size > 1:
        yield "rank", f"{rank} of {world_size}"
    yield "device", str(loader.device or "cpu")
    yield "placement", placement_text(loader)
    given = {name: getattr(loader, name) for name in ("transform", "last", "bucket_by", "pad", "cache")}
    for name, value in given.items():
        if value is not None:
            yield name, or_error(partial(brief, value, VALUE_WIDTH))


def stats_parts(stats: Mapping[str, Any]) -> Iterator[Html]:
    """Yield the parts of a page about what `Loader.stats` returned."""
    if stats["epoch"] is None:
        yield element("h1", "No epoch has begun")
    else:
        yield from _epoch(stats)
    yield element("h2", "Where columns are kept")
    kept = [(name, where, stats["placement"][name]) for name, where in list(stats["columns"].items())[:MOST_FIELDS]]
    yield table(("column", "kept in", "why"), kept, "text")
    if len(stats["columns"]) > MOST_FIELDS:
        yield element("p", f"and {len(stats['columns']) - MOST_FIELDS:,} more columns", "pale")
    if stats["epoch"] is not None:
        yield from _plan(stats)


def _epoch(stats: Mapping[str, Any]) -> Iterator[Html]:
    seconds, share = stats["seconds"], stats["wait_share"]
    yield element("h1", f"Epoch {stats['epoch']:,}: {stats['samples_per_second']:,.0f} rows/s")
    yield element(
        "p",
        f"{stats['batches']:,} batches, {stats['samples']:,} rows, {format_bytes(stats['bytes'])} gathered "
        f"({format_bytes(stats['bytes_per_second'])}/s)",
        "pale",
    )
    if not seconds:
        yield element("p", "Times are known from the second batch on.")
        return
    yield element("h2", f"{format_short(seconds)} from the first batch on")
    yield element("p", joined([key("waiting", WAITING), key("computing", OWN)]))
    shown = f"{format_short(seconds * share)}, {share:.0%}"
    yield bar_row("waiting for data", [("waiting", share), ("computing", 1 - share)], shown)
    if share < LITTLE:
        yield element("p", "The program waits little: batches are there when it asks for them.")
    elif share < 1 - LITTLE:
        yield element("p", "The program waits for data in this part of its time, and computes in the other.")
    else:
        yield element("p", "The program waits for data nearly all of the time.")


def _plan(stats: Mapping[str, Any]) -> Iterator[Html]:
    plan = stats["plan"]
    cold = {True: "some were not when the epoch began", False: "all were when the epoch began"}
    lines = [
        ("batches are", plan["batches"]),
        ("small batches by one gather", plan["batches_per_gather"]),
        ("rows in the page cache", cold.get(stats["cold"], "not known")),
        ("rows are read ahead", "yes" if plan["read_ahead"] == "on" else "no"),
        *((f"threads: {name}", number) for name, number in plan["threads"].items()),
    ]
    yield element("h2", "How batches are made")
    yield table(("choice", "found"), lines, "text")
