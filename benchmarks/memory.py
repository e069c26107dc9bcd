"""Run one epoch in this new process and print its memory as JSON. ``scale.py`` starts it.

    python benchmarks/memory.py STORE BATCH_SIZE SHUFFLE

Counts anonymous and shared memory. The buffers hold two batches: the one that the training step uses and the one being
filled.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import optree
import torch

import memfeed

EVERY = 16


def private_bytes() -> int:
    """Return the anonymous and shared memory of this process, without the pages of mapped files."""
    fields = {}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
        name, size = line.split(":")
        fields[name] = int(size.split()[0]) * 1024
    return fields["Anonymous"] + fields["Pss_Shmem"]


def main() -> None:
    path, batch_size, shuffle = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "1"
    imports = most = private_bytes()
    store = memfeed.open(path)
    batch_bytes = rows = 0
    for number, batch in enumerate(memfeed.Loader(store, batch_size, shuffle=shuffle)):
        leaves = [leaf for leaf in optree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
        batch_bytes = max(batch_bytes, sum(leaf.nbytes for leaf in leaves))
        rows += len(leaves[0])
        if number % EVERY == 0:
            most = max(most, private_bytes())
    assert rows == len(store)
    most = max(most, private_bytes())
    result = {
        "store": store.nbytes,
        "imports": imports,
        "most": most,
        "buffers": 2 * batch_bytes,
        "beyond_buffers": most - imports - 2 * batch_bytes,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
