"""Runs benchmarks in their short form in one process, which imports torch once: `quick_benchmarks.py DIRECTORY NAMES`.

What one prints, and why it failed, goes to DIRECTORY/NAME.log.
"""

import contextlib
import runpy
import sys
import traceback
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def main(directory: Path, names: list[str]) -> None:
    sys.path.insert(0, str(BENCHMARKS))
    for name in names:
        json = directory / ("device-cpu.json" if name == "device" else f"{name}.json")
        sys.argv = [name, "--quick", "--json", str(json), *(["--device", "cpu"] if name == "device" else [])]
        with open(directory / f"{name}.log", "w") as log, contextlib.redirect_stdout(log):
            try:
                runpy.run_path(str(BENCHMARKS / f"{name}.py"), run_name="__main__")
            except BaseException:
                traceback.print_exc(file=log)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
