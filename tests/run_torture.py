"""memfeed under torture: `python tests/run_torture.py --minutes 10 [--only kill_build] [--seed 7]`; 1 on any loss."""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import traceback
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from measure import listed, machine
from torture import LOSSES, SCENARIOS, losses


def main() -> int:
    """Runs the scenarios, each for its share of the time; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="for all scenarios together")
    parser.add_argument("--only", action="append", choices=list(SCENARIOS), help="may be repeated")
    parser.add_argument("--seed", type=int, default=None, help="of what is killed when; printed if not given")
    parser.add_argument("--json", type=Path, help="a file of results; those of other scenarios in it stay")
    asked = parser.parse_args()
    seed = asked.seed if asked.seed is not None else random.SystemRandom().randrange(1 << 31)
    names = asked.only or list(SCENARIOS)
    print(f"seed {seed}: {' '.join(names)}, {asked.minutes:g} minutes together", flush=True)
    table, failed = Table("scenario", "seconds", "counts", "losses"), False
    for name in names:
        started = time.monotonic()
        try:
            counts = SCENARIOS[name](60 * asked.minutes / len(names), random.Random(f"{seed} {name}"))
        except Exception:  # it says what was lost; the others are still to be seen
            traceback.print_exc()
            counts = {"failed": 1}
        seconds, bad = time.monotonic() - started, losses(counts)
        failed = failed or bool(bad)
        good = {key: count for key, count in counts.items() if key not in LOSSES}
        if asked.json:
            keep(asked.json, name, {"seed": seed, "seconds": seconds, "counts": good, "losses": bad})
        table.add_row(name, f"{seconds:.0f}", listed(good), listed(bad) or "none")
    Console(width=110).print(table)
    return 1 if failed else 0


def keep(path: Path, name: str, result: dict[str, object]) -> None:
    """Puts one scenario's result into a file of results, with the machine it is from."""
    kept = json.loads(path.read_text()) if path.exists() else {"benchmark": "torture", "quick": False, "scenarios": {}}
    kept["machine"] = machine()
    kept["scenarios"][name] = result
    path.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
