"""Sections of ``report.py`` on transforms on the CPU: their times, and their weight beside other libraries."""

from __future__ import annotations

from report_tables import Result, milliseconds, table, targets


def transforms(result: Result) -> str:
    about = result["input"]
    rows = [
        [name, milliseconds(t), f"{result['images_per_second'][name]:,.0f}"]
        for name, t in result["median_seconds"].items()
    ]
    count = about["shape"][0]
    resized = [[name, milliseconds(t), f"{count / t:,.0f}"] for name, t in result["resized_median_seconds"].items()]
    way = "memfeed runs loops that numba compiled, but where a row says otherwise." if about.get("compiled") else ""
    return f"""## Transforms

Crop to {about["crop"]}, flip and normalise of {about["dtype"]} {about["shape"]} on the CPU, one batch. "Slice and cast"
does less: it neither flips nor normalises. {way}

{table(["", "time", "images/s"], rows)}
RandomResizedCrop (antialiased), flip and normalise. torchvision gets the boxes and does not draw them:

{table(["", "time", "images/s"], resized)}
{_alone_and_epochs(result)}
{targets(result)}"""


def _alone_and_epochs(result: Result) -> str:
    """Return the tables of resized crops alone and of epochs; nothing for results from before they were measured."""
    if "alone_median_seconds" not in result:
        return ""
    counts = {"alone_median_seconds": result["input"]["shape"][0], "epoch_median_seconds": result["epoch_images"]}
    alone, epochs = (
        [[name, milliseconds(t), f"{count / t:,.0f}"] for name, t in result[key].items()]
        for key, count in counts.items()
    )
    return f"""RandomResizedCrop of bytes alone, all with the same values. The bare loop calls torch's
kernel with crops whose channels lie together already:

{table(["", "time", "images/s"], alone)}
Warm shuffled epochs of {result["epoch_images"]:,} such images, batches of {result["input"]["shape"][0]}:

{table(["", "time", "images/s"], epochs)}"""


def weight(result: Result) -> str:
    rows = []
    for name, found in result["works"].items():
        (ours, time), *others = found["median_cpu_seconds"].items()
        rows.append([name, ours, milliseconds(time), ""])
        for other, taken in others:
            low, high = found["ranges_of_ratios"][other]
            times = f"{found['ratios_to_ours'][other]:.2f} ({low:.2f} to {high:.2f})"
            rows.append(["", other, milliseconds(taken), times])
    about = result["input"]
    return f"""## The weight of transforms

{about["dtype"]} {about["shape"]} on the CPU with given parameters, in CPU time of one thread: memfeed, and torchvision
v2 and kornia {about["kornia"]} called per sample. The last column compares a time with the first one of its part: the
median of all rounds, and their range. kornia's time includes the casts from uint8 and back.

{table(["", "", "time", "times the first"], rows)}"""
