import gc
import multiprocessing
import os
import threading
from pathlib import Path

import pytest

# Two processes of pytest run on two cores: threads of OpenMP that spin while they wait take the time of others.
# OpenMP reads this when torch is imported. The programs that tests start inherit it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

from memfeed.store.copied_ranges import LOOPS
from short_form import mark_long_cases

SHARED = Path(__file__).parents[2] / "shared"
PHOTOS = SHARED / "data" / "hymenoptera_data"


@pytest.hookimpl(tryfirst=True)  # before those that are not asked for are left out
def pytest_collection_modifyitems(items):
    mark_long_cases(items, Path(__file__).parent)


def pytest_collection_finish():
    """Leave the modules and thousands of tests alone when garbage is collected: each time would take 0.2 s and more."""
    gc.collect()
    gc.freeze()


if multiprocessing.get_all_start_methods()[0] != "fork":  # Python 3.14, macOS
    multiprocessing.set_start_method("fork")  # most datasets of the tests are local to a test, and cannot be sent

LOOPS._left = 1 << 62  # else a test would compile them if enough bytes were copied before it in the same process
torch.set_num_threads(min(2, os.cpu_count() or 1))


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
