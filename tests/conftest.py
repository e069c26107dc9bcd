import gc
import multiprocessing
import os
import threading
from pathlib import Path

import hypothesis
import pytest

# Two processes of pytest run on two cores: threads of OpenMP that spin while they wait take the time of others.
# OpenMP reads this when torch is imported. The programs that tests start inherit it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

from memfeed.store.copied_ranges import LOOPS
from short_form import mark_long_cases

SHARED = Path(__file__).parents[2] / "shared"
PHOTOS = SHARED / "data" / "hymenoptera_data"
REAL_SYNCS = {  # file systems of several kinds, and what can leave memory because it is on the disk
    "building/test_commit.py",
    "loading/test_readahead.py",
    "system/test_files.py",
    "system/test_mapped_memory.py",
    "torture/test_small_disks.py",
    "verdict/test_sample_cost.py",
}
SHORT_WAITS = {
    "building.claim.WAIT_SECONDS": 0.005,  # between two looks whether another process has ended
    "convert.lazily.WAIT_SECONDS": 0.01,
    "convert.budget.SECONDS": 0.1,  # of reading each form, to choose one
    "convert.processes.CHECK_SECONDS": 0.1,  # between two looks whether workers live
}

# without a deadline: another process may have the processor for a while
hypothesis.settings.register_profile("memfeed", parent=hypothesis.settings(), deadline=None)
hypothesis.settings.load_profile("memfeed")


@pytest.hookimpl(tryfirst=True)  # before those that are not asked for are left out
def pytest_collection_modifyitems(items, config):
    mark_long_cases(items, Path(__file__).parent, short=config.option.markexpr == "not long")


def pytest_collection_finish():
    """Leave the modules and thousands of tests alone when garbage is collected: each time would take 0.2 s and more."""
    gc.collect()
    gc.freeze()


if multiprocessing.get_all_start_methods()[0] != "fork":  # Python 3.14, macOS
    multiprocessing.set_start_method("fork")  # most datasets of the tests are local to a test, and cannot be sent

LOOPS._left = 1 << 62  # else a test would compile them if enough bytes were copied before it in the same process
torch.set_num_threads(min(2, os.cpu_count() or 1))


def looked_at(fd):
    """Raise OSError for a descriptor that was closed, as a sync does."""
    os.fstat(fd)


@pytest.fixture(scope="module", autouse=True)
def _short_waits(request):
    """Let `make test` wait shorter for what comes in tests at once, and a sync look at the descriptor alone.

    Some 50,000 syncs would wait for the disk. `make test-long`, the programs that tests start, and the files of
    ``REAL_SYNCS`` do wait.
    """
    if request.config.option.markexpr != "not long":
        yield
        return
    file = request.path.relative_to(Path(__file__).parent).as_posix()
    with pytest.MonkeyPatch.context() as patch:
        for name, seconds in SHORT_WAITS.items():
            patch.setattr(f"memfeed.{name}", seconds)
        if file not in REAL_SYNCS:
            patch.setattr(os, "fsync", looked_at)
            patch.setattr(os, "fdatasync", looked_at, raising=False)
        yield


@pytest.fixture
def photos() -> Path:
    if not PHOTOS.is_dir():
        pytest.skip(f"the photographs are not there ({PHOTOS}): they are optional")
    return PHOTOS


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.mf"


@pytest.fixture(autouse=True)
def _no_thread_left():
    before = set(threading.enumerate())
    yield
    left = [t for t in threading.enumerate() if t not in before and t.is_alive() and not t.daemon]
    assert not left, f"threads left behind: {left}"
