import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from memfeed.system.compiled import Loops

HERE = Path(__file__).parent
NAME = "loops_of_test"


@pytest.fixture
def importable(monkeypatch):
    monkeypatch.syspath_prepend(HERE)
    yield
    sys.modules.pop(NAME, None)


def run(code: str, **environment: str) -> str:
    """Run code in a process of its own, where `loops` are those of the test module."""
    code = f"import sys; sys.path.insert(0, {str(HERE)!r})\nfrom memfeed.system.compiled import Loops\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=os.environ | environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_loops_are_compiled_after_enough_work(importable):
    pytest.importorskip("numba")
    loops = Loops(NAME, after=10)
    assert loops.get(4) is None
    assert loops._thread is None
    loops.get(6)  # enough
    loops.join()
    assert loops.get().total(np.arange(5)) == 10


def test_without_numba_there_is_none(importable, monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    loops = Loops(NAME)
    assert loops.get() is None
    assert loops.wait() is None


def test_loops_that_cannot_be_compiled_warn_once():
    pytest.importorskip("numba")
    loops = Loops("no_such_module_of_loops")
    with pytest.warns(RuntimeWarning, match="numba could not compile no_such_module_of_loops.*works without"):
        assert loops.wait() is None
    assert loops.get() is None


def test_a_fork_waits_for_them():
    """The child has the loops: half an import would leave it locks that nobody releases."""
    pytest.importorskip("numba")
    code = (
        f"import os; loops = Loops({NAME!r}); loops.get(); child = os.fork()\n"
        "if not child: os._exit(0 if loops.get().total is not None else 1)\n"
        "print(os.waitpid(child, 0)[1], 'compiled' if loops.get() else None)"
    )
    assert run(code, SLOW_LOOPS="0.5") == "0 compiled"


def test_where_nothing_can_be_written_they_are_compiled_for_the_process():
    pytest.importorskip("numba")
    code = (
        "import numba.core.caching as c; c.CacheImpl._locator_classes = []\n"
        f"import numpy as np; print(Loops({NAME!r}).wait().total(np.arange(4)))"
    )
    assert run(code) == "6"


def test_numba_without_compilation_is_none():
    pytest.importorskip("numba")
    assert run(f"print(Loops({NAME!r}).wait())", NUMBA_DISABLE_JIT="1") == "None"
