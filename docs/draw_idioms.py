"""Write the table of docs/splitting.md: datasets as people write them, and what one line of memfeed makes of each.

python docs/draw_idioms.py

Each idiom of tests/splitting/idioms.py is trained from, and its samples are compared with those of the dataset.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "splitting"))

from idioms import IDIOMS
from judge import Verdict, judge

PAGE = Path(__file__).with_name("splitting.md")
BEGIN, END = "<!-- idioms: drawn by docs/draw_idioms.py -->", "<!-- end of idioms -->"
HEAD = "| dataset | library | `Loader(dataset, 64, shuffle=True, cache=path)` |\n|---|---|---|"
WORDS = {
    "batched": "one line, batched",
    "sample": "one line, sample by sample",
    "whole": "stored whole: fixed",
    "refused": "refused, because ",
}
DRAWS = 256  # samples of each source that are compared


def row(idiom: Any, verdict: Verdict) -> str:
    """Return a line of the table."""
    words = WORDS.get(verdict.kind, "an error that says too little: ")
    if verdict.wrong:
        words = f"**wrong**: {reason(verdict.wrong[0])}"
    elif verdict.message:
        words += reason(verdict.message)
    return f"| {escaped(idiom.name)} | {escaped(idiom.library)} | {escaped(words)} |"


def reason(message: str) -> str:
    """Return what an error found, in a line: without addresses, and without what to do."""
    message = re.sub(r"^found random samples, and .* cannot be cut off: ", "", message)
    found = re.split(r"[;.] [Ee]xpected|\. A store keeps", message)[0]
    found = re.sub(r" \([^ ()]*\.py:\d+\)", "", found)
    found = re.sub(r" \(its transform: .*?\)(?=; and|$)", "", found)
    found = re.sub(r" at 0x[0-9a-f]+", "", found.removeprefix("found ").removeprefix("that "))
    return found if len(found) <= 200 else f"{found[:197]}..."


def escaped(text: str) -> str:
    """Return text as a cell of a table in Markdown."""
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;").replace("*args", "\\*args")


def draw(page: str) -> tuple[str, list[str]]:
    """Return the page with its table drawn anew, and what is not as it is expected to be."""
    rows, others = [], []
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, idiom in enumerate(IDIOMS):
            with contextlib.redirect_stderr(io.StringIO()):
                verdict = judge(
                    idiom.make,
                    Path(folder) / f"{number}.mf",
                    draws=DRAWS,
                    levels=idiom.levels,
                    invariant=idiom.invariant,
                )
            rows.append(row(idiom, verdict).replace(folder, ""))
            if verdict.kind != idiom.expected or not verdict.is_right:
                others.append(f"{idiom.name}: found {verdict}; expected {idiom.expected}")
    before, _, rest = page.partition(BEGIN)
    return "\n".join([before + BEGIN, HEAD, *rows, END + rest.partition(END)[2]]), others


if __name__ == "__main__":
    text, unexpected = draw(PAGE.read_text())
    PAGE.write_text(text)
    print(*unexpected, f"wrote {PAGE}: {len(IDIOMS)} idioms, {len(unexpected)} not as expected", sep="\n")
