"""Sections of ``report.py`` on the way to a GPU, training there, and the compiled kernel."""

from __future__ import annotations

import re
import statistics

from report_tables import TIMES, Result, microseconds, milliseconds, table, targets


def device(result: Result) -> str:
    about, median = result["input"], result["median_seconds"]
    cuda, tables = about["device"] != "cpu", []
    for name, rates in result["gigabytes_per_second"].items():
        tables.append(f"**{name}**\n\n{table(['', 'GB/s'], [[who, f'{rate:,.2f}'] for who, rate in rates.items()])}")
    times = []
    for what, found in median.items():
        count = about["images"] if what == "augmentation" else counted(what)
        for who, t in found.items():
            shown = microseconds(t) if t < 1e-3 else milliseconds(t)
            times.append([f"{what}: {who}", shown, f"{count / t:,.0f}" if count else ""])
    found = table(["", "found"], [[what, f"{value:,.2f}"] for what, value in result.get("without_targets", {}).items()])
    left_out = [f"{name} ({why})" for part in ("skipped", "failed") for name, why in result.get(part, {}).items()]
    net = "ResNet-50 at 224" if cuda else "a small ResNet at 32"
    without = f" Left out: {', '.join(left_out)}." if left_out else ""
    where = (
        f"To {about['device']}."
        if cuda
        else "**There was no GPU**: the same programs on the CPU, where nothing is transferred and no target applies. "
        "The figures show how much time the loader takes beside a model."
    )
    return f"""## From each placement{", on a GPU" if cuda else ""}

{where} Shuffled batches from page-locked memory, from the mapped store and from the device's memory, compared with
copies and a gather of as many bytes, and with other libraries. {about["images"]} images of uint8 [3, 256, 256],
cropped, flipped and normalised to bfloat16, channels last. Epochs of {net}, with batches of the loader, and with one
batch used again and again.{without}

{chr(10).join(tables)}
{table(["", "time", "images/s"], times)}
{_shares(result)}{targets(result) if cuda else found}"""


def counted(what: str) -> int:
    """Return how many images the name of a measurement says that it has; 0 if it says nothing."""
    number = re.search(r"(\d+) (?:images|photographs)", what)
    return int(number[1]) if number else 0


def _shares(result: Result) -> str:
    """Return a paragraph on the pixels of nvJPEG and on the waits of a training, if they were measured on a GPU."""
    lines = []
    if levels := result.get("nvjpeg_levels_mean_and_largest"):
        lines.append(
            f"The pixels of nvJPEG differ from those of libjpeg-turbo by {levels[0]:.2f} grey levels on average, and "
            f"by {levels[1]:.0f} at most."
        )
    if result.get("gap_shares"):
        waits, gaps = (statistics.median(result[share]) for share in ("wait_shares", "gap_shares"))
        lines.append(
            f"While the ResNet-50 was trained, the caller waited for batches for {waits:.3%} of the time, and "
            f"{gaps:.3%} of the device's time passed between two steps."
        )
    return " ".join(lines) + "\n\n" if lines else ""


def device_photographs(result: Result) -> str:
    about, parts = result["input"], []
    for what, found in result["median_seconds"].items():
        rows = [[who, f"{t:.2f} s", f"{counted(what) / t:,.0f}"] for who, t in found.items()]
        parts.append(table([what, "time", "images/s"], rows))
    return f"""## Photographs in training, on a GPU

A ResNet-18 is trained on {about["device"]} in bfloat16, in batches of 64: photographs from JPEG files (each file
{about["sizes"]["copies"]} times), a random resized crop to 224, a random flip, normalised. A first epoch has the work
before its first batch, as the start of {about["sizes"]["workers"]} worker processes and the proof of the cut; the
commit of the store, after its last batch, is not in it. Later epochs are warm. "One batch reused" reads nothing: no
loader can be faster. **The rates of jpeg:90 that the CPU decodes are from before two improvements**
([threads](notes/threads.md#decoding-on-16-cores)): an epoch of 2,048 photographs without training took 439 ms on such a
machine then (by hand), and takes the time in [the section above](#from-each-placement-on-a-gpu) since.

{chr(10).join(parts)}"""


def kernels(result: Result) -> str:
    rows = [
        [name, f"{one['instructions_a_value_before']}", f"{one['instructions_a_value']}", ", ".join(one["stores"])]
        for name, one in result["code"].items()
    ]
    return f"""## The compiled kernel

uint8 images to bfloat16, cropped, flipped and normalised: the instructions of the compiled code, per value, of the
kernel before its threads stored 16 bytes at once, and now. Counted in the machine code, without a GPU: this is not a
time. The tiles of now are the fastest of those that were timed on an H200, and not those with the fewest instructions
([transforms](notes/transforms.md#tiles-of-the-kernels)).

{table(["", "before", "now", "stores"], rows)}
{targets(result)}"""


def to_device(result: Result) -> str:
    about, parts = result["input"], []
    for name, found in result["works"].items():
        rows = [
            [who, f"{t * 1e6:,.0f} us", "" if who == "memfeed.to_device" else f"{found['ratios'][who]:,.2f}"]
            for who, t in found["median_seconds"].items()
        ]
        what = f"{found['leaves']} tensors, {found['bytes'] / 1e6:,.1f} MB"
        parts.append(f"**{name}**: {what}\n\n{table(['', 'time', TIMES], rows)}")
    how = (
        "There was no GPU: the tree is in CPU memory and stays there. **These are times of the walk through the tree "
        "only**, without copies (torch.save and torch.load always copy)."
        if about["walk_only"]
        else f"From pageable memory to {about['device']}. A time ends when all data has arrived."
    )
    return f"""## To a device

Trees of dicts, lists and tuples. {how}
TensorDict.from_dict(...).to does not look into lists: of {result["tensors_in_a_list"]} tensors in a list in a dict it
does not move {result["tensordict_leaves_behind"]}. It does less work in its time.

{chr(10).join(parts)}
{targets(result)}"""
