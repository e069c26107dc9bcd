"""What an import costs beyond `import torch`: memfeed, its command line, and every library of others.py alike.

Each statement runs in fresh processes that have imported torch, in turns; before the first round, each runs once, so
that all files are in the page cache and all bytecode is written. Times are CPU times of the process, memory is what
is resident.

    python benchmarks/imports.py
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch

import memfeed
from measure import Check, parser, show, table, write

FIRST_BATCH = "memfeed: open, Loader, first batch"
STATEMENTS = {
    "memfeed": "import memfeed",
    FIRST_BATCH: "import memfeed\nnext(iter(memfeed.Loader(memfeed.open(STORE), 64, shuffle=True)))",
    "memfeed: all public names": "from memfeed import *",
    "memfeed inspect": "from memfeed.cli import main\nmain(['inspect', STORE])",
}
PEERS = {
    "tensordict": "tensordict",
    "torchvision": "torchvision",
    "FFCV": "ffcv",
    "TensorStore": "tensorstore",
    "Lance": "lance",
    "DALI": "nvidia.dali",
    "SPDL": "spdl.pipeline",
    "Grain": "grain",
    "LitData": "litdata",
    "MosaicML Streaming": "streaming",
    "Hugging Face datasets": "datasets",
    "WebDataset": "webdataset",
    "tf.data": "tensorflow",
}
PROGRAM = """
import torch, torch.utils.data, builtins, contextlib, io, json, time
def resident():
    return int(builtins.open("/proc/self/statm").read().split()[1]) * 4096
STORE = {store!r}
cpu, wall, memory = time.process_time(), time.perf_counter(), resident()
with contextlib.redirect_stdout(io.StringIO()):
{statement}
print(json.dumps([time.process_time() - cpu, time.perf_counter() - wall, resident() - memory]))
"""


def has(module: str) -> bool:
    """Return True if a module can be found, without importing what it lies in."""
    return find_spec(module.split(".")[0]) is not None


def cost(statement: str, store: Path) -> list[float]:
    """Return CPU seconds, seconds and bytes that a statement takes in a fresh process."""
    lines = "\n".join(f"    {line}" for line in statement.splitlines())
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(store=str(store), statement=lines)],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    options = parser("imports", __doc__).parse_args()
    rounds = 1 if options.quick else 3
    peers = {} if options.quick else {name: f"import {module}" for name, module in PEERS.items() if has(module)}
    failed: dict[str, str] = {}
    costs: dict[str, list[list[float]]] = {}
    with tempfile.TemporaryDirectory() as directory:
        store = Path(directory) / "a.mf"
        memfeed.cache((torch.zeros(256, 3, 64, 64, dtype=torch.uint8), torch.arange(256)), store, progress=False)
        for number in range(rounds + (not options.quick)):
            for name, statement in (STATEMENTS | peers).items():
                if name in failed:
                    continue
                try:
                    found = cost(statement, store)
                except subprocess.CalledProcessError as error:
                    if name in STATEMENTS:
                        raise
                    failed[name] = error.stderr.splitlines()[-1]
                    continue
                if number or options.quick:
                    costs.setdefault(name, []).append(found)
    median = {name: [statistics.median(one) for one in zip(*found, strict=True)] for name, found in costs.items()}
    rows = [
        [name, f"{cpu:.3f} s", f"{wall:.3f} s", f"{size / 2**20:.1f} MiB"] for name, (cpu, wall, size) in median.items()
    ]
    table("beyond import torch", ["", "CPU time", "time", "memory"], rows)
    checks = [
        Check("import memfeed, CPU time", median["memfeed"][0], 0.1, False, "s"),
        Check("import memfeed, memory", median["memfeed"][2] / 1e6, 60, False, "MB"),
        Check("first batch of an opened store, imports included, CPU time", median[FIRST_BATCH][0], 0.2, False, "s"),
        Check("all public names, CPU time", median["memfeed: all public names"][0], 0.2, False, "s"),
        Check("memfeed inspect, CPU time", median["memfeed inspect"][0], 0.2, False, "s"),
    ]
    show("imports", checks)
    write(options, {"rounds": rounds}, {"medians": median, "failed": failed}, checks)


if __name__ == "__main__":
    main()
