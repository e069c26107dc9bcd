"""The first page of the benchmarks: twelve ratios, the missed ones first, and where everything else is."""

from __future__ import annotations

import re
from typing import Any

Result = dict[str, Any]

DETAILS = "benchmarks_details.md"

PREFACE = """# Benchmarks

`benchmarks/report.py` writes this page and [the details](benchmarks_details.md) from the JSON files in
`benchmarks/results/`. `make bench` runs all benchmarks and writes both. Each benchmark first checks that all programs
give equal results, then runs them in turns. Ratios are medians of the ratios of each round. Compare ratios, not times:
times depend on the machine.

**When not to use memfeed.** For data that is read once: writing a store costs more than reading the data, however large
its rows are. For small tensors that are in memory already, with rows of a few bytes: index the tensor. For many columns
of a few bytes each: put them into one column of vectors, which is read in one piece. memfeed helps if samples are
expensive to make (decoding, resizing, tokenising) and are read in more than one epoch, or if they do not fit in memory.
[bench.md](bench.md) measures your program.
"""

RATIOS = [
    ("tutorial", "train, batches of 64", "memfeed's rate / that of DataLoader with its best number of workers",
     "photographs, a random resized crop; the store is written, and in memory"),
    ("first_epoch", "photographs: total, filled while it is read / DataLoader", "memfeed's time / DataLoader's",
     "photographs, three epochs from the first one to the finished store, nothing between the batches"),
    ("convert", "cache / DataLoader epoch, 0 workers", "time to convert / an epoch of DataLoader",
     "photographs, both in one process"),
    ("loader", "tiny: numpy loop takes", "a NumPy loop's time / memfeed's", "an int64 a row, all in memory"),
    ("loader", "large images: bare loop, one buffer takes", "a bare loop's time / memfeed's",
     "images of 196 KB in memory; the loop fills one buffer again and again"),
    ("others", "large images: faster than FFCV", "memfeed's rate / FFCV's",
     "images of 196 KB, not compressed, in memory"),
    ("augment", "FFCV takes", "memfeed's rate / FFCV's", "images of 196 KB, a random resized crop, normalised floats"),
    ("augment", "torchvision v2 with its best workers takes", "memfeed's rate / torchvision's",
     "images of 196 KB, a random resized crop, normalised floats"),
    ("cold", "4,000 images of 196 KB: bare loop, page faults take", "a bare loop's time / memfeed's",
     "images of 196 KB, shuffled, from a disk"),
    ("sequences", "short documents: packed, numba takes at most so many times as long",
     "time of packed blocks / of rows of one length", "documents of 10 to 90 tokens in blocks of 2,048"),
    ("windows", "the faster DataLoader takes", "DataLoader's time / memfeed's",
     "windows of robot data, rows kept once"),
    ("remote", "shuffle=True: first epoch, of the bandwidth", "memfeed's rate / the server's",
     "a store in object storage, first epoch, shuffled"),
]  # fmt: skip
"""Benchmark, target, what is divided by what, and in which regime."""

TOPICS = {
    "Photographs, from the file to the batch": [
        "tutorial",
        "first_epoch",
        "convert",
        "transforms",
        "augment",
        "weight",
    ],
    "Reading rows": ["loader", "others", "cold", "scale", "busy", "curves"],
    "Documents and time": ["sequences", "windows"],
    "Writing and checking stores": ["columnar", "verify", "ray", "torture"],
    "Addresses and ranks": ["remote", "remote-faults", "fleet"],
    "Functions and coded rows": ["memoize", "coded_rows", "forms"],
    "Devices": [
        "device-cuda",
        "device-cuda-photographs",
        "device-cpu",
        "kernels",
        "to_device-cuda",
        "to_device",
    ],
    "What an import takes": ["imports"],
}
"""Topic -> the results of its sections, in the order of the details."""


def ratios(results: dict[str, Result]) -> list[list[str]]:
    """Return the lines of the ratios whose results are there: the missed ones first."""
    found = []
    for name, target, what, regime in RATIOS:
        for check in results.get(name, {}).get("checks", []):
            if check["what"] == target:
                sign, verdict = ("≥" if check["at_least"] else "≤"), "reached" if check["passed"] else "**missed**"
                line = [regime, what, f"**{check['found']:.2f}**", f"{sign} {check['limit']:.3g}", verdict]
                found.append((check["passed"], line))
    return [line for _, line in sorted(found, key=lambda one: one[0])]


def anchor(title: str) -> str:
    """Return the name that a link to a heading has."""
    return re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")


def first_page(results: dict[str, Result], titles: dict[str, str]) -> str:
    """Return the first page. ``titles`` has the heading of each result's section."""
    checks = [check for result in results.values() for check in result.get("checks", [])]
    missed = sum(not check["passed"] for check in checks)
    lines = ["| regime | what is divided by what | ratio | target | |", "|---|---|---:|---:|---|"]
    lines += ["| " + " | ".join(line) + " |" for line in ratios(results)]
    used = [results[name]["machine"] for name in {row[0] for row in RATIOS} if name in results]
    machines = "; ".join(sorted({f"{one['cpu']}, {one['cores']} cores, {one.get('gpu', 'no GPU')}" for one in used}))
    topics = ["| topic | targets | missed | sections |", "|---|---:|---:|---|"]
    for topic, names in TOPICS.items():
        there = [name for name in names if name in results]
        if there:
            of_topic = [check for name in there for check in results[name].get("checks", [])]
            links = ", ".join(f"[{titles[name]}]({DETAILS}#{anchor(titles[name])})" for name in there)
            failed = sum(not check["passed"] for check in of_topic)
            topics.append(f"| {topic} | {len(of_topic)} | {failed} | {links} |")
    quick = "\n*Some are from quick runs, which only show that a benchmark works. Ignore their figures.*\n"
    return f"""{PREFACE}
## Twelve ratios

*{machines}*

Where the target is ≥, a larger ratio is better. The details give the cause of each missed target, if it was measured.
{quick if any(result["quick"] for result in results.values()) else ""}
{chr(10).join(lines)}

## Everything else

{len(checks)} targets, of which {missed} are missed:

{chr(10).join(topics)}
"""
