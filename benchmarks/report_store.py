"""Sections of ``report.py`` on stores: to write them, to verify them, the codecs of their rows, and torture."""

from __future__ import annotations

from measure import listed
from report_tables import Result, milliseconds, table, targets


def convert(result: Result) -> str:
    about, median, synced = result["input"], result["median_seconds"], result["median_sync_seconds"]
    busy, sync = result["median_cpu_seconds"], {name: f"{t:.2f} s" for name, t in synced.items()}
    what = "photographs" if about["real"] else "made-up photographs"
    rows = [
        [
            name,
            f"{t:.2f} s",
            f"{busy[name]:.2f} s",
            f"{about['images'] / t:,.0f}",
            sync.get(name, ""),
        ]
        for name, t in median.items()
    ]
    return f"""## Conversion

{about["images"]:,} {what} decoded and resized to uint8 [3, {about["side"]}, {about["side"]}]. `memfeed.cache`
writes a store, with checksums and commit. The DataLoader reads the same dataset for one epoch and writes nothing.

{table(["", "time without fsync", "CPU time", "images/s", "fsync"], rows)}
{targets(result)}"""


def columnar(result: Result) -> str:
    about, median, synced = result["input"], result["median_seconds"], result["median_sync_seconds"]
    rows = [[name, milliseconds(t), milliseconds(synced[name])] for name, t in median.items()]
    return f"""## Columns in memory to a store

A TensorDict of {about["tensors"]} tensors, {about["dtype"]} {about["shape"]}, {about["bytes"] / 1e6:,.0f} MB in all.
memfeed's time includes the checksums of every byte and the commit. fsync is timed apart for all programs: it
did nothing while they ran, and was called afterwards for every file they wrote.

{table(["", "time without fsync", "fsync"], rows)}
{targets(result)}"""


def verify(result: Result) -> str:
    rows = [[name, f"{rate:.2f}"] for name, rate in result["gigabytes_per_second"].items()]
    return f"""## Verifying a store

`verify` compares every byte ({result["input"]["bytes"] / 1e6:,.0f} MB) with its checksum;
`read` reads the same files in order into one buffer. Cold: the files were removed from the page cache before each run.

{table(["", "GB/s"], rows)}
{targets(result)}"""


def coded_rows(result: Result) -> str:
    about, parts = result["input"]["rows"], []
    for name, forms in result["codecs"].items():
        rows = [
            [
                form,
                f"{found['ratio']:.2f}",
                f"{found['decode_rows_per_second']:,.0f}",
                f"{found['decode_bytes_per_second'] / 1e9:.2f} GB/s",
                f"{found['two_threads']:.2f}",
                f"{found['encode_rows_per_second']:,.0f}",
                "{mean:.2f}, {largest}, {psnr:.1f} dB".format(**found["error"]) if "error" in found else "none",
            ]
            for form, found in forms.items()
        ]
        columns = ["", "raw bytes / coded bytes", "rows decoded/s", "of raw bytes", "two threads", "rows encoded/s"]
        what = f"**{name}**: {about[name]['count']} rows, {about[name]['dtype']} {about[name]['shape']}"
        parts.append(f"{what}\n\n{table([*columns, 'error: mean, largest, PSNR'], rows)}")
    rows = [
        [f"{name}, {form}", code, f"{one['ratio']:.2f}", f"{one['decode_bytes_per_second'] / 1e9:.2f} GB/s",
         f"{one['taken']:.0%}"]
        for name, forms in result["filters"].items()
        for form, found in forms.items()
        for code, one in found.items()
    ]  # fmt: skip
    by_filter = table(["", "filter", "raw bytes / coded bytes", "decoded", "rows that have it"], rows)
    rows = [
        [f"{form}, {name}", f"{one['rows_per_second']:,.0f}", f"{one['two_threads']:.2f}",
         "same" if one["same_pixels"] else "**others**"]
        for form, libraries in result["libraries"].items()
        for name, one in libraries.items()
    ]  # fmt: skip
    by_library = table(["", "images/s", "two threads", "pixels"], rows)
    return f"""## Coded rows

Rates of one core by CPU time, and the rate of two threads as a multiple of one's, by the clock. Errors are in grey
levels, over all images. The time of a row has everything: the checks of its blob, and the write into the batch.

{chr(10).join(parts)}
**Filters**: all rows with one filter, after integers are narrowed. Rates are those of narrowed bytes.

{by_filter}
**Libraries that decode JPEG**, each to its own order of dims: the photographs as each form writes them.

{by_library}
{targets(result)}"""


def torture(result: Result) -> str:
    rows = [
        [
            name,
            f"{found['seconds'] / 60:.0f}",
            str(found["seed"]),
            listed(found["counts"]),
            listed(found["losses"]) or "none",
        ]
        for name, found in result["scenarios"].items()
    ]
    return f"""## Torture

The long runs of `make torture`: how often each scenario disturbed stores and builds, and how many rows or stores were
lost ([reliability.md](reliability.md)).

{table(["scenario", "minutes", "seed", "counts", "losses"], rows)}"""
