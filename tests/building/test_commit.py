import errno
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_build import SCHEMA, is_right, packed

import memfeed
from memfeed.building.build import Build
from memfeed.building.claim import claim
from memfeed.building.partial import SKIPPED
from memfeed.errors import SpaceError
from memfeed.system import files
from support import Made


@settings(max_examples=40)
@given(st.permutations(range(0, 40, 4)), st.sets(st.integers(0, 9), max_size=4))
def test_rows_in_any_order_from_many_writers_with_holes(tmp_path_factory, firsts, skipped):
    path = tmp_path_factory.mktemp("b") / "a.mf"
    with claim(path) as root:
        build = Build.begin(root, SCHEMA, 40, None)
        writers = [build.writer() for _ in range(3)]
        for turn, first in enumerate(firsts):
            rows = writers[turn % 3]
            rows.mark(first, 4, SKIPPED) if first // 4 in skipped else rows.write(first, 4, packed(first, 4))
        build.commit(path)
    store = memfeed.open(path)
    assert is_right(store, [i for i in range(40) if i // 4 not in skipped])
    assert store.skipped == tuple(i for i in range(40) if i // 4 in skipped)
    store.verify()


def test_a_disk_that_is_full_of_late_is_told_as_any(path, monkeypatch):
    """torch says in words what went wrong while tensordict wrote its metadata."""

    def full(self, *arguments, **options):
        raise RuntimeError(f"unable to write to file <meta>: {os.strerror(errno.ENOSPC)} (28)")

    with monkeypatch.context() as m, pytest.raises(SpaceError, match=r"writing tensordict's metadata .*rows are kept"):
        m.setattr("tensordict.TensorDict.memmap_like", full)
        memfeed.cache(Made(lambda i: torch.arange(i % 3), 20), path, workers=0, progress=False)
    assert len(memfeed.cache(Made(lambda i: torch.arange(i % 3), 20), path, workers=0, progress=False)) == 20


@pytest.mark.parametrize("file", range(2))
def test_a_commit_cut_short_while_it_took_rows_out_is_only_finished(path, file, monkeypatch):
    """Rows have other places by then: a row that can be read now must not be written to its old one."""
    mended = False

    def make(i):
        if i in (3, 17) and not mended:
            raise ValueError("not yet")
        return torch.full((3,), i), torch.arange(i % 4)

    real, calls = files.rename, []

    def rename(source, target):
        if source.suffix == ".copy":
            calls.append(target)
            if len(calls) == file + 2:
                raise KeyboardInterrupt
        real(source, target)

    options = {"on_error": "skip", "progress": False, "workers": 0}
    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(files, "rename", rename)
        memfeed.cache(Made(make, 40), path, **options)
    mended = True
    store = memfeed.cache(Made(make, 40), path, **options)
    assert store.skipped == (3, 17)
    assert [int(x[0]) for x, _ in store] == [i for i in range(40) if i not in (3, 17)]
    assert [len(r) for _, r in store] == [i % 4 for i in range(40) if i not in (3, 17)]
    store.verify()
