"""The wheel and the source distribution, built and installed into an environment that has nothing else."""

import json
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from test_readme import blocks

ROOT = Path(__file__).parents[1]
TYPED_PROGRAM = ROOT / "tests" / "fixtures" / "typed_program.py"
EXTRAS = {  # a program, and the extra that it needs; the command line ends with 2, an exception with 1
    "memfeed.open('s3://bucket/store.mf', cache_dir='cache')": "remote",
    "memfeed.cache([1, 2, 3], 'ray.mf', workers='ray')": "ray",
    "import sys, memfeed.cli; sys.exit(memfeed.cli.main(['demo']))": "vision",
}

pytestmark = pytest.mark.long


def run(*command: object, cwd: Path, expected: int = 0) -> str:
    """Run a command outside of the repository, without its source on the path. Return what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == expected, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    """The directory with both distributions, built from a copy of what git knows."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in files.splitlines():
        if name.startswith(("src/", "tests/test_")) or "/" not in name:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    run(sys.executable, "-m", "build", "--outdir", out, source, cwd=source)
    return out


@pytest.fixture(scope="module")
def bare(dist, tmp_path_factory) -> Path:
    """The python of an environment that has the wheel, what it requires, and the two type checkers."""
    root = tmp_path_factory.mktemp("bare")
    venv.create(root, with_pip=True)
    python = root / "bin" / "python"
    (wheel,) = dist.glob("*.whl")
    # any torch will do; this one comes without CUDA, 200 MB in place of 3 GB
    run(python, "-m", "pip", "install", "--quiet", wheel, "torch==2.13.0", "mypy", "pyright[nodejs]", cwd=root)
    return python


def test_the_distributions_have_the_package_and_nothing_else(dist):
    (wheel,), (source,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, source, cwd=dist)
    in_wheel = set(zipfile.ZipFile(wheel).namelist())
    package = {
        str(path.relative_to(ROOT / "src")) for path in (ROOT / "src" / "memfeed").rglob("*.py") if path.is_file()
    }
    assert package | {"memfeed/py.typed"} == {name for name in in_wheel if name.startswith("memfeed/")}
    with tarfile.open(source) as archive:
        folders = {"/".join(Path(name).parts[1:2]) for name in archive.getnames()}
    assert {"src", "README.md", "LICENSE", "pyproject.toml"} <= folders
    assert "tests" not in folders


def test_the_first_program_of_the_readme_runs_with_the_wheel_alone(bare, tmp_path):
    program = tmp_path / "first.py"
    program.write_text(blocks((ROOT / "README.md").read_text())[0])
    assert "row 3" in run(bare, "-W", "error", program, cwd=tmp_path)
    assert "1,000 rows" in run(bare, "-m", "memfeed", "inspect", "squares.mf", cwd=tmp_path)


@pytest.mark.parametrize("program", EXTRAS)
def test_a_feature_without_its_extra_says_how_to_install_it(bare, tmp_path, program):
    code = 2 if "memfeed.cli" in program else 1
    said = run(bare, "-c", f"import memfeed; {program}", cwd=tmp_path, expected=code)
    assert f"memfeed[{EXTRAS[program]}" in said
    assert "pip install" in said


@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_a_program_of_a_user_is_checked_with_the_types_of_the_package(bare, tmp_path, checker):
    program = tmp_path / TYPED_PROGRAM.name
    program.write_text(TYPED_PROGRAM.read_text())
    wrong = [at for at, line in enumerate(program.read_text().splitlines(), 1) if "# error" in line]
    if checker == "mypy":
        said = run(bare, "-m", "mypy", "--strict", "--output", "json", program, cwd=tmp_path, expected=1)
        found = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
        lines = [message["line"] for message in found if message["severity"] == "error"]
    else:
        said = run(bare, "-m", "pyright", "--outputjson", "--pythonpath", bare, program, cwd=tmp_path, expected=1)
        messages = json.loads(said[said.index("{") :])["generalDiagnostics"]
        lines = [message["range"]["start"]["line"] + 1 for message in messages]
    assert lines == wrong


def test_the_source_distribution_is_installed_too(bare, dist, tmp_path):
    (source,) = dist.glob("*.tar.gz")
    run(bare, "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", source, cwd=tmp_path)
    program = tmp_path / "first.py"
    program.write_text(blocks((ROOT / "README.md").read_text())[0])
    assert "row 3" in run(bare, "-W", "error", program, cwd=tmp_path)
