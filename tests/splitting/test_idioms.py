"""Datasets as people write them: one line gives the samples of the original dataset, or an error that says why not."""

import importlib.util
import runpy
from pathlib import Path

import pytest
import torch
from judge import judge, memfeed_loader
from plain_loaders import collate_any, plain_loader

for _name in ("albumentations", "datasets", "kornia", "skimage", "torch_geometric"):
    if importlib.util.find_spec(_name) is None:
        pytest.skip(f"needs {_name}", allow_module_level=True)
PAGE = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "draw_idioms.py"))
IDIOMS = PAGE["IDIOMS"]
SHORT = 256  # samples of each source


def verdict_of(idiom, path, draws, feed=memfeed_loader):
    return judge(idiom.make, path, draws=draws, levels=idiom.levels, invariant=idiom.invariant, feed=feed)


def check(idiom, path, draws):
    verdict = verdict_of(idiom, path, draws)
    assert verdict.is_right, f"{idiom.name}: found {verdict}; expected {idiom.expected}"
    if verdict.kind == "sample" and torch.__version__ < "2.7":  # the oldest torch has no kernel for some dtypes
        return
    assert verdict.kind == idiom.expected, f"{idiom.name}: found {verdict}; expected {idiom.expected} ({idiom.note})"


@pytest.mark.parametrize("idiom", [idiom for idiom in IDIOMS if not idiom.is_slow][::3], ids=str)
def test_an_idiom_is_right_or_refused(idiom, path):
    check(idiom, path, SHORT)


@pytest.mark.long
@pytest.mark.parametrize("idiom", [one for one in IDIOMS if one.expected != "refused"], ids=str)
def test_the_judge_finds_a_plain_loader_right(idiom, path):
    verdict = verdict_of(idiom, path, 1024, plain_loader(collate=collate_any))
    assert verdict.is_right, verdict


def test_names_are_unique():
    assert len({idiom.name for idiom in IDIOMS}) == len(IDIOMS)


def test_the_page_has_a_row_for_each_idiom():
    _, _, after = PAGE["PAGE"].read_text().partition(PAGE["BEGIN"])
    rows = after.partition(PAGE["END"])[0].strip().splitlines()[2:]
    cell = PAGE["escaped"]
    found = {tuple(row.split(" | ")[:2]): row.split(" | ")[2] for row in (r.strip("| ") for r in rows)}
    assert len(rows) == len(IDIOMS)
    for idiom in IDIOMS:
        shown = found.get((cell(idiom.name), cell(idiom.library)), "no row")
        assert shown.startswith(PAGE["WORDS"][idiom.expected]), f"{idiom.name}: {shown}; run python docs/draw_idioms.py"
