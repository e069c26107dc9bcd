"""Write the tables of docs/trainers.md: where a Loader gives something else than DataLoader.

python docs/draw_differences.py

Each kind of samples of tests/loading/sample_kinds.py is loaded by both in each way of tests/loading/ways_of_use.py.
What differs must be a row of tests/loading/known_differences.py.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "loading"))

from cells import Cells, all_cells
from known_differences import SAMPLES, USE, Known
from sample_kinds import KINDS
from ways_of_use import WAYS

PAGE = Path(__file__).with_name("trainers.md")
BEGIN, END = "<!-- differences: drawn by docs/draw_differences.py -->", "<!-- end of differences -->"


def table(rows: Sequence[Known]) -> list[str]:
    """Return a table, as lines."""
    return ["| DataLoader | Loader | why, and what to write |", "|---|---|---|", *(row.row for row in rows)]


def tables() -> str:
    """Return what stands between the marks of the page."""
    return "\n".join(
        [
            BEGIN,
            f"{len(KINDS)} kinds of samples are loaded in {len(WAYS)} ways of use, by DataLoader and by",
            "`Loader(store)`, `Loader(dataset, cache=path)` and `Loader(dataset)`:",
            f"{len(all_cells()):,} combinations. In each of them both give the same containers, dtypes, shapes,",
            "values and order, or both raise, or a row of these tables says how they differ. SchemaError is raised by",
            "`memfeed.cache`. If the first samples show it, `Loader(dataset)` becomes a DataLoader, with DataLoader's",
            'batches, and a line says so; with `require="samples"` it raises SchemaError too.',
            "",
            "**Samples and their batches**",
            "",
            *table(SAMPLES),
            "",
            "**Ways of use**",
            "",
            *table(USE),
            END,
        ]
    )


def unknown(kind: str) -> list[str]:
    """Return the differences of one kind of samples that are in no row."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        cells = Cells(Path(folder))
        found = [cells.run(*one) for one in all_cells() if one[0] == kind]
        return [str(cell) for cell in found if cell.unknown]


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + tables() + rest.partition(END)[2])
    found = [line for kind in KINDS for line in unknown(kind)]
    print(*found, f"wrote {PAGE}: {len(found)} combinations differ in another way", sep="\n")
