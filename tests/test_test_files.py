"""Each module with rules of its own has a test file of its own, in the folder of its room and with its name."""

import sys
from pathlib import Path

import pytest

from short_form import EACH, LONG

ROOT = Path(__file__).parents[1]
SOURCE, TESTS = ROOT / "src" / "memfeed", ROOT / "tests"

MOST_LINES = 400
WITHOUT_RULES = {
    "__main__.py": "starts the command line",
    "cli/cache_command.py": "arguments of one command: tests/cli/test_cli.py runs it",
    "cli/commands.py": "arguments of the other commands: tests/cli/test_cli.py runs them",
    "store/row_supply.py": "a protocol",
}
"""Modules of definitions alone, and what uses them."""

OTHER_NAMES = {
    "codecs/pixel_loops.py": "codecs/test_jpeg.py",
    "cli/demo/result.py": "cli/test_demo.py",
    "cli/demo/side_by_side.py": "cli/test_demo.py",
    "convert/dataset_supply.py": "convert/test_filling.py",
    "convert/lazily.py": "convert/test_joining.py",
    "convert/processes.py": "convert/test_conversion_processes.py",
    "convert/ray_engine.py": "convert/test_ray_cluster.py",
    "loading/open_source.py": "loading/test_loader_of_a_dataset.py",
    "memoizing/kept.py": "memoizing/test_memoize.py",
    "remote/connections.py": "remote/test_redirects.py",
    "transfer/streams.py": "transfer/test_streams_on_simulated_cuda.py",
    "transforms/backends/color_loops.py": "transforms/test_compiled_passes.py",
    "transforms/backends/passes.py": "transforms/test_planning.py",
    "transforms/backends/lanes.py": "transforms/test_compiled_passes.py",
    "transforms/backends/loops.py": "transforms/test_compiled_passes.py",
    "transforms/backends/sampling.py": "transforms/test_kernel.py",
    "transforms/backends/sampling_kernels.py": "transforms/test_kernel.py",
    "verdict/program.py": "verdict/test_bench.py",
    "verdict/verdict.py": "verdict/test_report.py",
}
"""Modules that the tests of a larger part cover, and where. A new module belongs here only with a reason."""

MODULES = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py") if path.name != "__init__.py")


def own_files(module):
    """Return the test files that a module may have: by its name, and by room and name where that name is taken."""
    path = Path(module)
    room = path.parts[0] if len(path.parts) > 1 else ""
    return [TESTS / room / f"test_{path.stem}.py", TESTS / room / f"test_{room}_{path.stem}.py"]


@pytest.mark.parametrize("module", MODULES)
def test_a_module_has_a_test_file(module):
    has_own = any(file.is_file() for file in own_files(module))
    listed = [table for table in (WITHOUT_RULES, OTHER_NAMES) if module in table]
    assert has_own or listed, f"write {own_files(module)[0].relative_to(ROOT)}"
    assert not (has_own and listed), f"{module} has a test file of its own: take it out of the table"
    assert len(listed) < 2


def test_the_tables_name_what_is_there():
    assert {*WITHOUT_RULES, *OTHER_NAMES} <= {*MODULES}
    assert all((TESTS / file).is_file() for file in OTHER_NAMES.values())


def test_the_tests_with_a_short_form_are_there():
    for file, names in [*EACH.items(), *LONG.items()]:
        text = (TESTS / file).read_text()
        text += "".join(path.read_text() for path in (SOURCE / "testing").glob("*.py"))
        assert all(f"def {name}(" in text or file.endswith("simulated_cuda.py") for name in names), file


def test_no_two_test_files_share_a_name():
    names = [path.name for path in TESTS.rglob("test_*.py")]
    assert sorted(names) == sorted({*names})


def test_no_file_hides_a_module_of_python():
    """A script's folder, and the folders of ``pythonpath``, come before the standard library."""
    newer = {"annotationlib", "compression", "profiling"}  # since Python 3.14 and 3.15
    files = [path for folder in ("benchmarks", "examples", "tests", "tools") for path in (ROOT / folder).rglob("*.py")]
    assert [path for path in files if path.stem in sys.stdlib_module_names | newer] == []


def test_no_file_is_longer_than_a_reader_keeps_in_mind():
    folders = ("src", "benchmarks", "tools", "docs", "examples")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    assert {name: length for name, length in lengths.items() if length > MOST_LINES} == {}
