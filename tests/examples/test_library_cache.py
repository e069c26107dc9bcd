"""The library of docs/library_cache.md runs as it stands, and so do its own tests."""

import os
import re
import subprocess
import sys

import pytest

from test_readme import ROOT

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A directory with the files that the page shows, and what runs a command there."""
    folder = tmp_path_factory.mktemp("library")
    text = (ROOT / "docs" / "library_cache.md").read_text()
    for name, body in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", text, re.DOTALL):
        (folder / name).write_text(body)

    def run(*arguments: str) -> str:
        environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}
        done = subprocess.run(
            [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return folder, run


def test_the_page_has_no_other_code(library):
    text = (ROOT / "docs" / "library_cache.md").read_text()
    assert text.count("```python\n") == len(list(library[0].glob("*.py"))) == 5


def test_its_programs_run(library):
    folder, run = library
    run("-W", "error", "train.py")
    assert (folder / "cache" / "tinytrain" / "squares-v1-train.mf" / "memfeed.json").exists()
    run("-W", "error", "train.py")  # now it is opened
    run("-W", "error", "dataset_only.py")
    assert (folder / "squares.mf" / "memfeed.json").exists()


def test_its_tests_pass(library):
    out = library[1]("-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "test_tinytrain.py")
    assert "11 passed" in out


def test_its_function_is_kept(library):
    folder, run = library
    (folder / "a.txt").write_text("\n".join(map(str, range(32))))
    code = "from recordings import Recordings as R; d = R(['a.txt'], cache='read.mf')"
    draws = "draws = {tuple(d[0].tolist()) for _ in range(40)}; assert len(draws) > 1, draws"
    out = run("-c", f"{code}; {draws}; assert d.read.report()[2:4] == (39, 1), d.read.report(); print('kept')")
    assert "kept" in out
