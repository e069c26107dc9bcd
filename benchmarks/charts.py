"""The charts of the docs, each drawn from one JSON file that a benchmark wrote."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt  # after the choice of a backend without windows
from matplotlib.ticker import EngFormatter

OURS, OURS_COLD = "#0b7a75", "#8fd0cc"
THEIRS, THEIRS_COLD = "#6b7280", "#c7cbd1"
GIGABYTES, ROWS = "GB/s", "rows/s"
LIMITS = ("bare index_select loop", "contiguous copy")
INK, FAINT = "#1f2933", "#7b8794"
STYLE = {
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": FAINT,
    "ytick.color": INK,
    "axes.edgecolor": "#cbd2d9",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "font.family": "DejaVu Sans",
}


def read(path: Path) -> dict[str, Any]:
    """Return the results of a benchmark."""
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def machine_line(result: dict[str, Any]) -> str:
    """Describe the machine in one line."""
    m = result["machine"]
    gpu = f"{m['gpu']}, " if "gpu" in m else ""
    memfeed = f"memfeed {m['memfeed']}, " if m["memfeed"] else ""  # none where it was imported from a clone
    return (
        f"{m['cpu']}, {m['cores']} cores, {m['memory_bytes'] / 2**30:.0f} GiB, {gpu}Python {m['python']}, "
        f"torch {m['torch']}, {memfeed}{m['date']}, load average at the end {m['load_average'][0]:.1f}"
    )


def tutorial(source: Path, target: Path) -> None:
    """Draw images/s of the DataLoader, by workers, and of memfeed: train and val, two batch sizes, warm and cold."""
    result = read(source)
    sizes = result["input"]["batch_sizes"]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(2, len(sizes), figsize=(11, 6.6), squeeze=False)
        for row, (name, part) in zip(axes, result["parts"].items(), strict=True):
            for axis, size in zip(row, sizes, strict=True):
                _tutorial_panel(axis, name, part, size)
        figure.suptitle(
            "The tensorclass tutorial's photographs: images per second, higher is better",
            x=0.02, y=0.985, ha="left", fontsize=14, fontweight="bold",
        )  # fmt: skip
        figure.text(
            0.02, 0.925,
            "Dark bars: page cache warm, median of whole epochs. Light bars: the same after the page cache was emptied "
            "(best DataLoader and memfeed).",
            fontsize=9.5, color=FAINT,
        )  # fmt: skip
        figure.text(0.02, 0.015, machine_line(result), fontsize=8, color=FAINT)
        figure.subplots_adjust(left=0.115, right=0.955, top=0.80, bottom=0.095, hspace=0.52, wspace=0.36)
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, dpi=150)
        plt.close(figure)


def _tutorial_panel(axis: Any, name: str, part: dict[str, Any], size: int) -> None:
    found = part[f"batch_{size}"]
    warm, cold = found["images_per_second"], found["cold_images_per_second"]
    most = max([*warm.values(), *cold.values()])
    for number, (contender, rate) in enumerate(warm.items()):
        ours = "memfeed" in contender
        axis.barh(number - 0.17, rate, 0.44, color=OURS if ours else THEIRS)
        label = f"{rate:,.0f}" + (f"   {found['ratio']:,.0f}x the best DataLoader" if ours else "")
        inside = rate > 0.6 * most
        axis.text(
            rate - 0.012 * most if inside else rate + 0.012 * most, number - 0.17, label,
            ha="right" if inside else "left", va="center", fontsize=9,
            color="white" if inside else INK, fontweight="bold" if ours else "normal",
        )  # fmt: skip
        if contender in cold:
            chilled = cold[contender]
            axis.barh(number + 0.2, chilled, 0.22, color=OURS_COLD if ours else THEIRS_COLD)
            note = f"{chilled:,.0f}" + (f"   cold: {found['cold_ratio']:,.0f}x" if ours else "")
            axis.text(max(chilled, 0) + 0.012 * most, number + 0.2, note, va="center", fontsize=7.5, color=FAINT)
    axis.set_yticks(range(len(warm)), [_short(contender) for contender in warm])
    axis.invert_yaxis()
    axis.tick_params(length=0)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axis.set_xlim(0, most * 1.04)
    axis.locator_params(axis="x", nbins=5)
    printed = part["tutorial_printed"]
    what = {"train": "random crop, flip, normalise", "val": "pre-transformed"}[name]
    axis.set_title(f"{name} ({what}), batches of {size}", loc="left", fontsize=10.5, fontweight="bold", pad=18)
    axis.text(
        0, 1.035,
        f"{part['images']} images; the tutorial printed {printed[0]:,.0f} and {printed[1]:,.0f}, "
        f"{printed[1] / printed[0]:.1f}x",
        transform=axis.transAxes, fontsize=8.5, color=FAINT,
    )  # fmt: skip


def _short(contender: str) -> str:
    if "memfeed" in contender:
        return "memfeed"
    workers = contender.split(", ")[1]
    return f"DataLoader\n{'1 worker' if workers == '1 workers' else workers}"


def loader(source: Path, target: Path) -> None:
    """Draw the rows per second of every program, one panel per workload."""
    result = read(source)
    works = result["works"]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(-(-len(works) // 2), 2, figsize=(12, 10.2), squeeze=False)
        for axis, (name, found) in zip(axes.flat, works.items(), strict=False):
            _loader_panel(axis, name, found)
        for axis in axes.flat[len(works) :]:
            axis.axis("off")
        figure.suptitle(
            "Shuffled epochs from warm memory: million rows per second",
            x=0.02, y=0.985, ha="left", fontsize=14, fontweight="bold",
        )  # fmt: skip
        figure.text(
            0.02, 0.945, "The light bars are limits: they fill one or two buffers over and over; no batch to keep.",
            fontsize=9.5, color=FAINT,
        )  # fmt: skip
        figure.text(0.02, 0.012, machine_line(result), fontsize=8, color=FAINT)
        figure.subplots_adjust(left=0.175, right=0.97, top=0.88, bottom=0.06, hspace=0.5, wspace=0.42)
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, dpi=150)
        plt.close(figure)


def _loader_panel(axis: Any, name: str, found: dict[str, Any]) -> None:
    rates = {who: found["rows"] / seconds / 1e6 for who, seconds in found["median_seconds"].items()}
    most = max(rates.values())
    for number, (who, rate) in enumerate(rates.items()):
        mine, limit = who == "memfeed.Loader", "buffer" in who
        axis.barh(number, rate, 0.64, color=OURS if mine else THEIRS_COLD if limit else THEIRS)
        times = found["ratios"][who]
        note = "" if mine else f"  memfeed: {times:,.0f}x" if times >= 10 else f"  memfeed: {times:.2f}x"
        axis.text(
            rate + 0.012 * most, number, f"{rate:,.3g}{note}",
            va="center", fontsize=8.5, fontweight="bold" if mine else "normal",
        )  # fmt: skip
    names = ["\n(".join(re.split(r", (?=\w+ buffer)|\(", who)) + ")" * ("buffer" in who) for who in rates]
    axis.set_yticks(range(len(rates)), names, fontsize=8.5)
    axis.invert_yaxis()
    axis.tick_params(length=0)
    axis.set_xlim(0, 1.6 * most)  # room for what is written beside the longest bar
    axis.locator_params(axis="x", nbins=5)
    axis.set_title(name, loc="left", fontsize=10.5, fontweight="bold", pad=18)
    axis.text(0, 1.035, found["about"], transform=axis.transAxes, fontsize=8.5, color=FAINT)


def others(source: Path, target: Path) -> None:
    """Draw rows/s of memfeed, plain PyTorch and the other libraries, one panel per workload, on logarithmic axes."""
    result = read(source)
    works, exact = result["works"], result["exact_shuffle"]
    rates = [part["rows_per_second"] for part in works.values()]
    names = sorted({name for rate in rates for name in rate}, key=lambda name: -rates[0].get(name, 0))
    for first in ("bare index_select loop", "memfeed.Loader"):
        names.remove(first)
        names.insert(0, first)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, len(works), figsize=(11, 1.9 + 0.33 * len(names)), sharey=True, squeeze=False)
        for axis, (work, part) in zip(axes[0], works.items(), strict=True):
            _others_panel(axis, work, part, names)
        axes[0, 0].set_yticks(range(len(names)), [name if exact[name] else f"{name} *" for name in names])
        axes[0, 0].invert_yaxis()
        height = figure.get_size_inches()[1]
        figure.suptitle(
            "Shuffled epochs of other loading libraries: rows per second, higher is better",
            x=0.02, y=1 - 0.12 / height, va="top", ha="left", fontsize=14, fontweight="bold",
        )  # fmt: skip
        figure.text(
            0.02, 1 - 0.62 / height,
            "Page cache warm, axes logarithmic. The light bar is a limit: it reuses one buffer and gives no batch to "
            "keep.  * shuffles within a buffer or block, not over all rows.",
            fontsize=9, color=FAINT,
        )  # fmt: skip
        figure.text(0.02, 0.1 / height, machine_line(result), fontsize=8, color=FAINT)
        figure.subplots_adjust(left=0.235, right=0.985, top=1 - 1.3 / height, bottom=0.6 / height, wspace=0.08)
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, dpi=150)
        plt.close(figure)


def _others_panel(axis: Any, work: str, part: dict[str, Any], names: list[str]) -> None:
    rates = part["rows_per_second"]
    least, most = min(rates.values()), max(rates.values())
    for number, name in enumerate(names):
        if name not in rates:
            continue
        rate, times, mine, limit = rates[name], part["ratios"][name], name == "memfeed.Loader", name in LIMITS
        axis.barh(number, rate, 0.66, color=OURS if mine else THEIRS_COLD if limit else THEIRS)
        note = "" if mine else f"   memfeed: {times:.2f} of it" if times < 1 else f"   memfeed: {times:,.1f}x"
        axis.annotate(
            f"{rate:,.0f}{note}", (rate, number), (4, 0), textcoords="offset points",
            va="center", fontsize=8.5, fontweight="bold" if mine else "normal",
        )  # fmt: skip
    axis.set_xscale("log")
    start = 10 ** math.floor(math.log10(least / 2))
    axis.set_xlim(start, most * (most / start) ** 0.9)  # room for what is written beside the longest bar
    axis.tick_params(length=0, which="both")
    axis.set_xticks([10**e for e in range(round(math.log10(start)), math.floor(math.log10(most)) + 1)])
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    axis.set_title(work, loc="left", fontsize=10.5, fontweight="bold", pad=18)
    axis.text(
        0, 1.02, f"{part['rows']:,} uint8 {part['shape']} and a label, batches of {part['batch_size']}",
        transform=axis.transAxes, fontsize=8.5, color=FAINT,
    )  # fmt: skip


def curves(source: Path, target: Path) -> None:
    """Draw the rates of memfeed and of a bare loop against sizes and cores, quiet and busy, on logarithmic axes."""
    result = read(source)
    labels = {"row size": "bytes a row", "columns": "columns", "store size": "bytes of the store", "cores": "threads"}
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(2, 2, figsize=(11, 7.6))
        for axis, (name, points) in zip(axes.flat, result["curves"].items(), strict=True):
            _curves_panel(axis, points, GIGABYTES if name != "columns" else ROWS)
            axis.set_xlabel(labels[name])
            axis.set_title(f"by {name}", loc="left", fontsize=10.5, fontweight="bold")
        axes[0, 0].legend(frameon=False, fontsize=8.5)
        figure.suptitle(
            "Shuffled epochs from warm memory, against sizes and cores",
            x=0.02, y=0.985, ha="left", fontsize=14, fontweight="bold",
        )  # fmt: skip
        figure.text(
            0.02, 0.925, "Light: while a process spins on every core. The loop reuses one buffer and keeps no batch.",
            fontsize=9.5, color=FAINT,
        )  # fmt: skip
        figure.text(0.02, 0.012, machine_line(result), fontsize=8, color=FAINT)
        figure.subplots_adjust(left=0.08, right=0.97, top=0.86, bottom=0.1, hspace=0.42, wspace=0.22)
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, dpi=150)
        plt.close(figure)


def forms(source: Path, target: Path) -> None:
    """Draw rows/s of each form of a store against the bytes that a disk reads in a second, on logarithmic axes."""
    result = read(source)
    measured, a_row = result["disk_rows_per_second"], result["bytes_a_row"]
    if measured is None:
        return
    warm = {form: result["images_per_second"][f"memfeed, {form}"] for form in a_row}
    colors = dict(zip(a_row, ("#6b7280", "#0b7a75", "#d97706", "#7c3aed"), strict=True))
    rates = [10 ** (7 + 0.02 * step) for step in range(151)]  # from 10 MB/s to 10 GB/s
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(9, 5.4))
        for form, color in colors.items():
            axis.plot(rates, [min(warm[form], rate / a_row[form]) for rate in rates], color=color, linewidth=1.4)
            points = measured[form]
            axis.plot([float(rate) for rate in points], [*points.values()], "o", color=color, label=form)
        crossings = {form: rate for form, rate in result["crossing_bytes_per_second"].items() if rate}
        fastest = max(crossings, key=lambda form: warm[form], default="")
        for form, rate in crossings.items():
            above = form == fastest
            axis.plot([rate], [warm[form]], "x", color=INK, markersize=8, markeredgewidth=2)
            axis.annotate(
                f"{form}\n{rate / 1e6:,.0f} MB/s", (rate, warm[form]), (-6, 6) if above else (7, -4),
                textcoords="offset points", va="bottom" if above else "top", ha="right" if above else "left",
                fontsize=8.5,
            )  # fmt: skip
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlabel("bytes that the disk reads in a second")
        axis.set_ylabel(ROWS)
        axis.grid(axis="y", color="#e4e7eb", linewidth=0.6)
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        axis.yaxis.set_major_formatter(EngFormatter(sep=""))
        axis.minorticks_off()
        axis.legend(frameon=False, fontsize=9, loc="lower right")
        figure.suptitle(
            "Forms of a store on a slow disk: photographs, random crops, batches of 64",
            x=0.02, y=0.985, ha="left", fontsize=13, fontweight="bold",
        )  # fmt: skip
        figure.text(
            0.02, 0.905,
            "Points: whole epochs, page cache empty, reads limited by a control group. Lines are computed: the rows\n"
            "that the disk reads, at most those that come from memory.  x: where a coded form and raw 256 cross.",
            fontsize=9, color=FAINT, va="center",
        )  # fmt: skip
        figure.text(0.02, 0.012, machine_line(result), fontsize=7.5, color=FAINT)
        figure.subplots_adjust(left=0.09, right=0.975, top=0.85, bottom=0.15)
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, dpi=150)
        plt.close(figure)


def _curves_panel(axis: Any, points: list[dict[str, Any]], unit: str) -> None:
    colors = {
        ("memfeed.Loader", "quiet"): OURS,
        ("memfeed.Loader", "busy"): OURS_COLD,
        ("index_select loop", "quiet"): THEIRS,
        ("index_select loop", "busy"): THEIRS_COLD,
    }
    for (who, load), color in colors.items():
        rates = []
        for one in points:
            rows = one["rows"] / one[load]["median_seconds"][who]
            rates.append(rows if unit == ROWS else rows * one["row_bytes"] / 1e9)
        axis.plot([one["at"] for one in points], rates, "o-", color=color, markersize=4, label=f"{who}, {load}")
    axis.set_xscale("log", base=2 if max(one["at"] for one in points) < 100 else 10)
    axis.set_yscale("log")
    axis.set_ylabel(unit)
    axis.grid(axis="y", color="#e4e7eb", linewidth=0.6)
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    axis.yaxis.set_major_formatter(EngFormatter(sep=""))
    axis.minorticks_off()


def fleet(source: Path, target: Path) -> None:
    """Draw what a rank takes, what a fleet requests, what a cache keeps, and how long it waits, against ranks."""
    result = read(source)
    about, ranks = result["input"], result["ranks"]
    colors = {"steps": THEIRS, "pieces": OURS}
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(2, 3, figsize=(13, 7.6))
        for axis, key, scale, title in (
            (axes[0, 0], "resident_bytes", 1e-6, "memory of a rank, MB"),
            (axes[0, 1], "batch_seconds", 1e3, "order, deal and plan of a batch of a rank, ms"),
        ):
            for deal, color in colors.items():
                for width, rows in enumerate(about["sizes"], 1):
                    points = [o for o in ranks if (o["deal"], o["rows"], o["shuffle"]) == (deal, rows, "blocks")]
                    axis.plot(
                        [o["ranks"] for o in points], [o[key] * scale for o in points], "o-",
                        color=color, markersize=3, linewidth=0.6 * width, label=f"{deal}, {rows:.0e} rows",
                    )  # fmt: skip
            axis.set_title(title, loc="left", fontsize=10.5, fontweight="bold")
            axis.set_ylim(bottom=0)
        axes[0, 0].legend(frameon=False, fontsize=7)
        for deal, color in colors.items():
            points = result["requests"][deal]
            gets = [one["gets_per_second"] for one in points]
            axes[0, 2].plot([one["ranks"] for one in points], gets, "o-", color=color, markersize=4, label=deal)
            axes[1, 0].plot(about["parts"], result["hit_rates"][deal], "o-", color=color, markersize=4, label=deal)
        axes[0, 2].axhline(about["limit"], color=INK, linewidth=0.8, linestyle="--", label="an S3 prefix's limit")
        axes[0, 2].set_yscale("log")
        axes[0, 2].set_title("GET requests a second, all ranks", loc="left", fontsize=10.5, fontweight="bold")
        axes[1, 0].set_title("second epoch from the cache, by its size", loc="left", fontsize=10.5, fontweight="bold")
        axes[1, 0].set_xlabel("cache / store")
        for (ahead, times), shade in zip(
            result["epoch_time"]["times"].items(), (THEIRS, OURS_COLD, OURS), strict=False
        ):
            label = f"{ahead} batches ahead"
            axes[1, 1].plot(about["worlds"], times, "o-", color=shade, markersize=4, label=label)
        axes[1, 1].set_title("steps / training alone, with stragglers", loc="left", fontsize=10.5, fontweight="bold")
        names = [f"{o['deal']}, {o['row_bytes']:,} B,\n{o['block_chunks']} a block" for o in result["shapes"]]
        axes[1, 2].barh(
            names, [o["gets_per_second"] for o in result["shapes"]], color=[colors[o["deal"]] for o in result["shapes"]]
        )
        axes[1, 2].axvline(about["limit"], color=INK, linewidth=0.8, linestyle="--")
        axes[1, 2].set_xscale("log")
        axes[1, 2].set_xlim(left=100)
        axes[1, 2].invert_yaxis()
        axes[1, 2].tick_params(axis="y", labelsize=8)
        title = f"GET requests a second, {about['worlds'][-1]:,} ranks"
        axes[1, 2].set_title(title, loc="left", fontsize=10.5, fontweight="bold")
        for axis in (*axes[0], axes[1, 1]):
            axis.set_xscale("log", base=2)
            axis.set_xlabel("ranks")
        for axis in (axes[0, 2], axes[1, 0], axes[1, 1]):
            axis.legend(frameon=False, fontsize=8.5)
        figure.suptitle(
            "1 to 4,096 ranks, simulated without the bytes", x=0.02, y=0.985, ha="left", fontsize=14, fontweight="bold"
        )
        figure.text(0.02, 0.012, machine_line(result), fontsize=8, color=FAINT)
        figure.subplots_adjust(left=0.05, right=0.98, top=0.89, bottom=0.1, hspace=0.38, wspace=0.26)
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, dpi=150)
        plt.close(figure)
