"""Sections of ``report.py`` that compare with other libraries: loading, augmentation, stored forms, kept results."""

from __future__ import annotations

from report_tables import Result, microseconds, table, targets


def others(result: Result) -> str:
    versions, exact = result["machine"]["versions"], result["exact_shuffle"]
    parts = []
    for name, part in result["works"].items():
        what = f"{part['rows']:,} uint8 {part['shape']} and an int64 label, batches of {part['batch_size']}"
        rows = [
            [
                f"**{who}**" if who == "memfeed.Loader" else who,
                versions[who],
                f"{rate:,.0f}",
                "" if who == "memfeed.Loader" else f"{part['ratios'][who]:,.2f}",
                "all rows" if exact[who] else "**within a buffer or block**",
            ]
            for who, rate in sorted(part["rows_per_second"].items(), key=lambda item: -item[1])
        ]
        columns = ["", "version", "rows/s", "memfeed is x times as fast", "shuffles"]
        parts.append(f"**{name}**: {what}\n\n{table(columns, rows)}")
    left_out = "".join(
        f"\n{title}: {', '.join(names)}.\n"
        for title, names in (("Not installed", result["missing"]), ("Failed", list(result["failed"])))
        if names
    )
    return f"""## Other loading libraries

Shuffled epochs, page cache warm, each library in its own process. Before it is timed, each must give every row
once, with its label. Then they run in turns.

![Rows per second](others.png)

{chr(10).join(parts)}{left_out}
Every library has the rows in its own format, uncompressed, on the local disk. tf.data, which reads files only
in order, and the plain DataLoader have them in memory. Each is set up as its documentation says. Where the
documentation leaves a choice, the fastest of the settings that were tried on two cores is used; see
`benchmarks/peers`. SPDL, Grain and tf.data have no format for rows: they pass row numbers, and NumPy or
TensorFlow gathers the rows of a batch. Most libraries are made for more than this, for example decoding, remote
storage or many nodes; none of that is measured here. LitData and WebDataset do not shuffle over all rows, which
is less work and does not replace a permutation. memfeed reads mapped files; these figures are for rows in the
page cache. The index_select loop reads the same mapped columns. The caller cannot keep its batches, nor those
of FFCV: both fill a few buffers again and again.

{targets(result) if result["checks"] else ""}"""


def augment(result: Result) -> str:
    about, versions, times = result["input"], result["machine"]["versions"], result["times_ours"]
    rates = sorted(result["images_per_second"].items(), key=lambda item: -item[1])
    rows = [
        [
            f"**{who}**" if who == "memfeed.Loader" else who,
            versions[who],
            f"{rate:,.0f}",
            "" if who == "memfeed.Loader" else f"{times[who]:.2f}",
        ]
        for who, rate in rates
    ]
    what = "Photographs" if about["photographs"] else "Made images"
    left_out = "".join(
        f"\n{title}: {', '.join(names)}.\n"
        for title, names in (("Not installed", result["missing"]), ("Failed", list(result["failed"])))
        if names
    )
    return f"""## Augmentation beside other libraries

{what}, uint8 [3, 256, 256] without compression: {about["rows"]:,} of them, shuffled, a random resized crop to 224, a
random flip, normalised to float32, batches of {about["batch_size"]}. Each library has its own process and draws its own
crops. memfeed, torchvision and DALI interpolate with antialiasing, memfeed and torchvision with equal values. FFCV
uses OpenCV's INTER_AREA, the loop by hand INTER_LINEAR, which skips pixels of large crops.

{table(["", "version", "images/s", "memfeed is x times as fast"], rows)}{left_out}
{targets(result)}"""


def forms(result: Result) -> str:
    about, versions = result["input"], result["machine"]["versions"]
    rates, ratios = result["images_per_second"], result["ratios"]
    ours = "memfeed, jpeg:90"
    rows = [
        [
            f"**{who}**" if who.startswith("memfeed") else who,
            versions[who],
            f"{rate:,.0f}",
            f"{result['bytes'][who] / 1e6:,.1f} MB",
            f"{result['cpu_seconds_a_thousand'][who]:.2f} s",
            "" if who == ours else f"{ratios[who]:.2f}",
        ]
        for who, rate in sorted(rates.items(), key=lambda item: -item[1])
    ]
    columns = ["", "version", "images/s", "bytes", "CPU for 1,000 images", "jpeg:90 is x times as fast"]
    raced = table(columns, rows)
    left_out = "".join(
        f"\n{title}: {', '.join(names)}.\n"
        for title, names in (("Not installed", result["missing"]), ("Failed", list(result["failed"])))
        if names
    )
    proofs = result.get("proof_seconds", {})
    filled = table(
        ["first epoch", "", "of which the proof of the cut, for any number of photographs"],
        [
            [who, f"{t:.2f} s", f"{proofs[who]:.2f} s" if who in proofs else ""]
            for who, t in result["first_epoch_seconds"].items()
        ],
    )
    what = "Photographs of several sizes" if about["photographs"] else "Made images of one size"
    trained = result["training"]
    accuracies = table(
        ["trained on", "accuracy by seed"],
        [[form, ", ".join(f"{one:.3f}" for one in found)] for form, found in trained["accuracies"].items()],
    )
    return f"""## Forms of a store beside other libraries

{what}, {about["rows"]:,} of them, shuffled, a random resized crop to 224, a random flip, normalised to float32, batches
of {about["batch_size"]}, page cache warm, {about["workers"]} cores. Each library has its own process and draws its own
crops. The stored images have a short side of 256, except those of "encoded", DALI and DataLoader, which read the
original files. FFCV encodes the same pixels with the same quality; its subsampling of colors is 4:2:0 for both, as of
jpeg:90, where jpeg:95 has 4:4:4. FFCV resizes by OpenCV's INTER_AREA. DALI decodes the crop alone.

{raced}{left_out}
While a store is filled by the training ({about["workers"]} worker processes):

{filled}
{_forms_disk(result)}A small convolutional network on scikit-learn's digits, enlarged to 32 x 32, with noise:
{trained["rows"]:,} rows, {trained["epochs"]} epochs, tested on raw images. The means differ by
{trained["difference"]:.4f}; the seeds of raw are {trained["spread"]:.4f} apart.

{accuracies}
{targets(result)}"""


def _forms_disk(result: Result) -> str:
    found, crossings = result["disk_rows_per_second"], result["crossing_bytes_per_second"]
    if found is None:
        return "The disk was not limited: there are no control groups of blkio.\n\n"
    rates = list(next(iter(found.values())))
    rows = [
        [form, f"{result['bytes_a_row'][form] / 1e3:,.0f} kB", *(f"{of_form[rate]:,.0f}" for rate in rates)]
        for form, of_form in found.items()
    ]
    shown = table(["rows/s", "a row", *(f"{int(rate) / 1e6:,.0f} MB/s" for rate in rates)], rows)
    above = [f"{form} is faster than raw 256 below {rate / 1e6:,.0f} MB/s" for form, rate in crossings.items() if rate]
    return f"""From a disk that reads so many bytes a second (a control group limits it), page cache emptied before each
epoch:

{shown}
![Rows per second by the disk](forms.png)

By the rates from memory and the bytes of a row, {" and ".join(above) or "no coded form is faster at any rate"}.
Each figure from the disk is one epoch, the first that its loader has.

"""


def memoize(result: Result) -> str:
    parts, shown = [], ", ".join(f"{name} {version}" for name, version in result["input"]["versions"].items())
    for what, found in result["works"].items():
        ours, rows = "memfeed.memoize", []
        for name in [*found["median_seconds"], *found["median_seconds_read"]]:
            if name not in [row[0] for row in rows]:
                rows.append([name])
                for part in ("", "_read"):
                    seconds, times = found[f"median_seconds{part}"].get(name), found[f"ratios{part}"].get(name)
                    rows[-1].append("" if seconds is None else microseconds(seconds))
                    rows[-1].append("" if times is None or name == ours else f"{times:,.2f}")
        mean = found["bytes"] / found["files"]
        size = f"{mean / 1e6:,.2f} MB" if mean > 1e4 else f"{mean:,.0f} bytes"
        columns = ["", "to have it", "memoize is x times as fast", "and to read it", "memoize is x times as fast"]
        parts.append(f"**{what}**, {found['files']} files, {size} each as an array\n\n{table(columns, rows)}")
    left_out = f"Not installed: {', '.join(result['missing'])}. " if result["missing"] else ""
    return f"""## Kept results of a function

A function from a path to an array, in one process, in a plain loop over the same files in shuffled order, page cache
warm; the times are of one file. "To read it": all bytes of the array are summed too, because a map is read only then.
"decode" is what a DataLoader's worker does in every epoch. ".npy" is what Ultralytics does with `cache="disk"`:
`np.load` of a file beside the image, if there is one. joblib keeps arrays in pickles, without `mmap_mode`; MONAI
returns tensors. {left_out}{shown}. [memoize.md](memoize.md) compares what else they do.

{chr(10).join(parts)}
{targets(result)}"""
