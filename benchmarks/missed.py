"""The reasons why targets are missed, for the tables of docs/benchmarks.md: causes that were measured.

What is an inference, or is not known, says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

REASONS = {
    "device-cuda": {
        "images 256, mapped": (
            "beside a GPU a thread makes the batches, which has no OpenMP team: our threads copy the rows, and wait "
            "for Python's lock at each part. One of them copied 7 GB/s, two 10.5, four 13, eight 7.4, and torch's "
            "team in the main thread 20 (by hand); how many the loader took here was not noted. 6.2 GB/s are 31,600 "
            "images/s, of which the ResNet-50 trains 4,640"
        ),
        "images 32, mapped": (
            "as above; the rates by threads were not measured for rows of 3 KB. 4.7 GB/s are 1.5 million images/s"
        ),
        "images 256, pinned": (
            "the GPU reads the rows over the bus, no thread copies them, and the bare gather over the bus reaches "
            "0.94 of the copy. An epoch of 62 batches takes 9 ms more than that gather, and one from the device's "
            "memory 6 ms in all. So most of it should be the same as for the device's memory; it was not measured by "
            "parts"
        ),
        "images 32, pinned": (
            "as above: the bare gather over the bus reaches 0.90, an epoch of 97 batches takes 6 ms more than it"
        ),
        "images 256, device": (
            "the bytes do not take the time: an epoch takes 6.0 ms with 62 batches of 12.6 MB, and 5.6 ms with 97 of "
            "1.6 MB. What is left is Python, calls of the driver and the start of an epoch, not measured by parts: "
            "0.1 ms a batch, beside a training step of 8 ms (ResNet-18, 64 images) or 55 ms (ResNet-50, 256 images)"
        ),
        "images 32, device": "as above",
        "the caller's CPU time a step, with transforms": (
            "the transforms are not in this time: they run in the loader's thread. Without them all batches of a "
            "gather share one event and come from the thread at once; with them each batch comes alone, with an event "
            "of its own. By hand, of 262 us for a batch of 512: 127 to let the caller's stream wait for the batch, 45 "
            "to note that it was taken, 51 to take it from the thread. The thread needs 1.2 ms of Python for such a "
            "batch, and both want Python's lock. Some of these calls were made cheaper since, and not measured again"
        ),
        "augmentation": (
            "not known. It was 0.14 before other tiles were chosen. One inference is that instructions limit the "
            "kernel and not the memory: its machine code has 26 a value with channels last. But the tiles before had "
            "17, and were slower ([transforms](notes/transforms.md#tiles-of-the-kernels)). No profiler ran. It makes "
            "2.6 million images/s"
        ),
        "RandomResizedCrop": (
            "not known. Each value needs weights of its own and several pixels, so more instructions than a crop; "
            "they were not counted, and no profiler ran. It makes 627,000 images/s, of which the ResNet-50 trains "
            "4,640"
        ),
        "resident": (
            "a batch of 512 rows takes 40 us, the plain index on the device 12 us, which is 0.25 of the copy's rate. "
            "The other 28 us are the loader's Python and its calls of the driver: by hand, 22 to 26 us are the "
            "caller's CPU time, most of it for the current stream and an event of each batch. A training step takes "
            "8 ms (ResNet-18) or 55 ms (ResNet-50)"
        ),
    },
    "forms": {
        "filling jpeg:95": (
            "1.10 s pass before the first batch, while the cut is proven; that does not grow with the data. For each "
            "photograph, beside the work of the dataset itself (1): to watch its calls 0.33, to shrink the whole image "
            "0.25, to encode it 0.26, to decode it 0.17, to transform the batch 0.17, to prove one row in 64 0.12, on "
            "the two cores that DataLoader has for the first alone (CPU time, docs/notes/filling.md)"
        ),
    },
    "kernels": {
        f"sm_{sm}, channels last: instructions a value, of those before": (
            "the tile of 512 columns and 2,048 values was taken because it is the fastest on an H200: 1.14 ms, the "
            "one with fewer instructions took 1.65 (by hand, docs/notes/transforms.md)"
        )
        for sm in (80, 90, 100)
    },
    "memoize": {
        "photographs of 12 megapixels: hits/s, of np.load": (
            "a hit reads 36 MB by one system call into new memory. Alone, that takes 4.3 ms, the bare copy 4.6; with "
            "the two in turns, runs gave 0.83 to 0.91. A copy from a map in place of the read gave 0.61"
        ),
    },
    "fleet": {
        "GET requests, steps": (
            "a global batch is drawn from 8 windows of 128 blocks, so each of the 512 nodes reads rows of nearly all "
            'blocks, and fetches nearly all bytes of the store. `placement="sharded"` gives each rank blocks of its own'
        ),
        "GET requests, pieces, rows of 12,288 bytes": (
            "4,096 ranks that each train 1,000 such rows a second read 50 GB/s: 12,000 chunks a second, of which the "
            "limit allows 5,500 requests. A block of one chunk's rows lies in two chunks, so both are fetched for it, "
            "also by another rank; with blocks of four chunks 1.24 times the bytes are fetched, 2.5 chunks at a time"
        ),
    },
    "ray": {
        "samples that wait": (
            "400 samples of 10 ms are 4 s for one task. Of each conversion 0.8 to 1.2 s get no shorter with more tasks "
            "(the times at 1, 2, 3 and 4 tasks less 4.0, 2.0, 1.3 and 1.0 s): samples are probed, tasks begin, the "
            "store is committed"
        ),
        "samples that compute": (
            "as above; and the two cores also run the head, four Ray nodes and their stores of objects. Two worker "
            "processes without Ray are 1.49 times as fast as one Ray task"
        ),
    },
    "loader": {
        "tiny: numpy loop takes": (
            "of an epoch, drawing the exact permutation takes 2.1 ms and making 1,000 batches 1.9 ms; the numpy loop "
            "takes 3.7 ms for everything. In runs in which a second core was free to draw the next permutation during "
            "the epoch, the target was reached (1.33 to 1.59)"
        ),
        "tiny, TensorDict: numpy loop takes": (
            "the same as for tiny, and 1,000 TensorDicts take 3.1 ms more than 1,000 tensors (8.0 ms and 4.9 ms in one "
            "run). Runs gave 0.36 to 0.71"
        ),
        "small images: bare loop": (
            "of an epoch of 16.9 ms the copies take 13.9 (in the bare loop 12.6 of 13.1): three are copied "
            "at once, into memory that is three times as large. The other 3 ms are 33 such gathers of 40 us in Python, "
            "the exact permutation, 0.6 ms, and the start of the epoch. More batches at once are slower (0.63)"
        ),
        "small images: DataLoader(TensorDict memmap)": (
            "the bare loop itself was only 11 times as fast in one run. Runs gave 6.2 to 8.6"
        ),
        "small images: DataLoader takes": (
            "the bare loop itself was only 22 times as fast in one run. Runs gave 11 to 19"
        ),
        "large images: bare loop": (
            "the bare loop fills one buffer of 12.5 MB again and again, which stays in the processor's cache. A loader "
            "needs two, because it makes a batch while the caller holds the one before. Of the bare loop with two "
            "buffers memfeed reaches 0.95, and 0.98 to 1.00 if the caller drops each batch"
        ),
        "documents: Loader of rows": (
            "torch's threads copy rows of one length at three times the speed of ours (23 ms and 79). Ours copy "
            "documents, because torch has no such operation; and each of 390 nested tensors takes 27 us to make, 10 ms"
        ),
        "documents: ": (
            "torch's constructor of nested tensors takes 27 us per batch, and its objects cause garbage collections"
        ),
    },
    "sequences": {
        "short documents: packed, numba": (
            "documents of 200 bytes in shuffled order are read from as many places in memory: of an epoch, 8 ms copy "
            "them and 9 ms cut them into blocks and find their rows, one place in memory after another; drawing the "
            "order of 145,000 documents and their sizes takes 5 ms"
        ),
        "short documents: packed takes": (
            "as above; and without a compiled loop, copying pieces of 128 blocks takes 0.9 ms (with one 0.24) by each "
            "of four ways through torch and NumPy, and their ids twice the time"
        ),
        "documents: packed takes": (
            "through torch and NumPy the pieces of 128 blocks take twice the time of a compiled loop, which reaches "
            "the target, and so do their ids"
        ),
        "long documents: packed takes": "as for documents",
    },
    "windows": {
        "stored windows take": (
            "twice as many pieces are copied: 0.94 for that alone, by torch as by a compiled loop. The rest is the "
            "search for the episode of each row, and masks"
        ),
    },
    "scale": {
        "two reading processes": (
            "the two cores of this machine behave like two threads of one core: two processes that only copy gain "
            "1.45, not 2. The gain changes from run to run: the two runs after a missed one reached their "
            "targets, with 1.32 (target 1.27) and 1.71 (target 1.43)"
        ),
    },
    "convert": {
        "cache / DataLoader epoch, 0 workers": (
            "without workers DataLoader sends no samples between processes, so the conversion saves no time there, and "
            "nothing decodes while the process writes. `workers=None` never chooses 0 for more than a second of work"
        ),
    },
    "columnar": {
        "faster than torch.save": (
            "memfeed also computes a checksum of every byte and makes 130 files instead of one. This virtual machine "
            "writes at 1 GB/s to memory that it has not used before and at 6 GB/s to other memory: the same writes "
            "take 57 to 760 ms of memfeed's time, and torch.save 110 to 500 ms. So runs gave 0.65 to 1.3; one after "
            "another, without the other programs between, 121 ms and 150 ms"
        ),
    },
    "augment": {
        "FFCV": (
            "two runs gave 3.95 and 3.75 times FFCV, with 11,700 and 15,000 images/s. The compiled resize takes most "
            "of memfeed's time, because it gives torch's values; FFCV's INTER_AREA gives others"
        ),
    },
    "others": {
        "large images: faster than FFCV": (
            "the rate is the memory's: the bare loop with one buffer that stays in the cache takes 0.65 of memfeed's "
            "time here. Runs gave 1.97 to 2.3 times FFCV"
        ),
    },
    "busy": {
        "quiet: an epoch": (
            "a second thread gains 1.2 to 1.45 times here, which is about the least for which it is kept: some epochs "
            "had one thread"
        ),
        "two processes": (
            "one loader may read with two threads, and is 1.2 times as fast as one process of bare copies. Two of "
            "them, and two of bare copies, take the same time: 1.03 and 1.05 s"
        ),
        "ResNet-18": (
            "the noise of this run is larger: the median step took 98 ms fed by memfeed and 107 ms on one batch, and "
            "the median of the ratios in pairs is 1.03"
        ),
    },
    "imports": {
        "memfeed inspect": (
            "rich, typer and pydantic, which typer imports where it is installed, take 0.22 of the 0.36 s that imports "
            "beyond torch and NumPy take (`python -X importtime -m memfeed inspect`, on a busier machine)"
        ),
    },
    "first_epoch": {
        "photographs: first epoch": (
            "0.4 s pass before the first batch: samples are read and compared, and the workers start. The code of the "
            "record before, which had 1.02, gave 1.06 and 1.07 on this day"
        ),
        "photographs: total": "as the first epoch: cache, then train has the same start, but reads no batch meanwhile",
        "made images: first epoch": (
            "as for photographs. The code of the record before, which had 1.03, gave 1.15 and 1.13 on this day"
        ),
        "photographs: second epoch": (
            "this epoch takes 20 to 120 ms. While it runs, the store is committed in the background: checksums, the "
            "metadata of tensordict, and the sync of all files"
        ),
        "made images: second epoch": "as for photographs",
        "made images: total": (
            "0.2 s of 2.1: filling takes more CPU time in all than converting first (1.13 times as much as "
            "DataLoader's first epoch), and both worker processes and the training share two cores"
        ),
    },
    "transforms": {
        "resized crop, flip, normalise: torchvision v2": (
            "the cause is not known. Runs gave 1.1 to 2.3; four runs within a minute gave 1.66, 2.28, 2.32 and 1.84"
        ),
        "resized crop of bytes": (
            "the target was set on a machine where a bare loop of torch's kernel makes 12,900 images/s. Here it makes "
            "6,150, and the compiled loop 1.5 and 2.3 times that, on one thread and on two"
        ),
        "Loader: crop, flip, normalise": (
            "as above. An image is 602 KB of floats, which go to memory that no cache holds: to write them alone takes "
            "52 us in one thread. Stores that pass the cache by were not tried"
        ),
        "Loader: resized crop, flip, normalise": (
            "as above; on the machine of this run a bare loop of torch's kernel alone does not reach the target either "
            "(the first table)"
        ),
        "to draw 256 of": (
            "drawing parameters takes 10 to 40 NumPy calls of 1 to 5 us each. A compiled loop would give other last "
            "bits than NumPy's exp and sin, and the draws of a key must not change. A batch of 256 is transformed in "
            "20,000 us"
        ),
    },
}
"""Benchmark -> the beginning of a target's name -> why it is missed."""


def reasons(benchmark: str, checks: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield (targets, reason) for the missed targets: each reason once, "" for targets without a known one."""
    missed = [check["what"] for check in checks if not check["passed"]]
    for beginning, reason in REASONS.get(benchmark, {}).items():
        matches = [name for name in missed if name.startswith(beginning)]
        missed = [name for name in missed if name not in matches]
        if matches:
            yield (matches[0] if len(matches) == 1 else f"{beginning} ... ({len(matches)} targets)"), reason
    for name in missed:
        yield name, ""
