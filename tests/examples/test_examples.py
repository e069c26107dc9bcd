"""Each program in examples/ runs to its end, where it checks the rows that it has seen."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
PROGRAMS = sorted(path.stem for path in EXAMPLES.glob("*.py"))
MOST_LINES = 60
# A thread of gloo that lets the last tensors go while the interpreter ends aborts the process, now and then, also in
# programs without memfeed (github.com/pytorch/pytorch/pull/179291). A program that ends so is run once more.
ABORTED_AT_EXIT = "terminate called without an active exception"
# gloo in torch 2.6 hangs in destroy_process_group, with torch's own DataLoader in the same program too
pytestmark = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 8), reason="the examples run with torch 2.8 and newer"
)


def imports(path: Path) -> set[str]:
    """Return the top-level packages that a program imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


def run(*command: object, cwd: Path) -> str:
    """Run Python in a directory of its own; the test fails with what the program printed."""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "default"}
    # pytest's settings of warnings are not for other libraries
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, *map(str, command)],
            cwd=cwd, env=environment, capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        if done.returncode == 0 or ABORTED_AT_EXIT not in done.stderr:
            break
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def require(path: Path) -> None:
    missing = [name for name in sorted(imports(path)) if find_spec(name) is None]
    if missing:
        pytest.skip(f"{path.name} needs {', '.join(missing)}: they come with the extra 'trainers'")


def test_there_are_examples():
    assert len(PROGRAMS) > 12
    assert all(len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= MOST_LINES for name in PROGRAMS)


SHORT = {"ipython_session", "robot_windows"}  # the others import a trainer, or torch in several processes


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name not in SHORT else name for name in PROGRAMS]
)
def test_an_example_ends_well(name, tmp_path):
    path = EXAMPLES / f"{name}.py"
    require(path)
    run(path, cwd=tmp_path)


def changed_lines(before: str, after: str) -> int:
    """Return how many lines of one script are not in the other, imports left out."""
    left = [line for line in (EXAMPLES / before).read_text().splitlines() if not line.startswith(("import", "from"))]
    return sum(
        line not in left
        for line in (EXAMPLES / after).read_text().splitlines()
        if not line.startswith(("import", "from"))
    )


def test_an_imagenet_script_changes_by_two_lines_or_ten():
    assert changed_lines("imagenet/fixed_before.py", "imagenet/fixed_after.py") <= 2
    assert changed_lines("imagenet/before.py", "imagenet/after.py") <= 10


@pytest.mark.long
@pytest.mark.parametrize("script", ["fixed_after", "after"])
def test_an_imagenet_script_trains_on_two_ranks(script, tmp_path):
    image = pytest.importorskip("PIL.Image", reason="the images need Pillow, which comes with the extra 'vision'")
    pytest.importorskip("torchvision", reason="the script needs torchvision, which comes with the extra 'vision'")
    numbers = np.random.default_rng(0)
    for part, count in (("train", 16), ("val", 8)):
        for label in ("ants", "bees"):
            (tmp_path / part / label).mkdir(parents=True)
            for i in range(count):
                pixels = numbers.integers(0, 256, (40 + i, 50, 3), dtype=np.uint8)
                image.fromarray(pixels).save(tmp_path / part / label / f"{i}.jpg")
    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    options = ("--epochs", 2, "--size", 32, "--classes", 2, "--batch-size", 4, "--workers", 0)
    printed = run(*ranks, EXAMPLES / "imagenet" / f"{script}.py", tmp_path, *options, cwd=tmp_path)
    assert "epoch 1: accuracy" in printed
    assert " of 16 images" in printed, "len(val_loader.dataset)"
