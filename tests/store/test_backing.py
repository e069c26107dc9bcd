import os
import time
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import memfeed
from memfeed.errors import StoreError
from memfeed.store.backing import open_backing


def test_opening_takes_milliseconds_whatever_the_size(path):
    with memfeed.Writer(path, like={"x": torch.zeros(4, dtype=torch.uint8)}, length=2_000_000, missing="zero") as w:
        w[0] = {"x": torch.ones(4, dtype=torch.uint8)}
    took = []
    for _ in range(5):
        started = time.perf_counter()
        assert len(memfeed.open(path)) == 2_000_000
        took.append(time.perf_counter() - started)
    assert min(took) < 0.02


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda path: None, "nothing there"),
        (lambda path: path.write_text("x"), "a file that is no store"),
        (os.mkfifo, "a file that is no store"),
        (Path.mkdir, "a directory that is no store.* It is empty: to make a store, remove it, or choose a path in it"),
    ],
)
def test_what_is_no_store(path, make, found):
    make(path)
    with pytest.raises(StoreError, match=f"found {found}"):
        memfeed.open(path)


def test_an_unfinished_build_is_named(path):
    path.with_name("a.mf.build").mkdir()
    with pytest.raises(StoreError, match=r"a\.mf\.build is an unfinished build: call cache\(\) again to resume it"):
        open_backing(path)


def test_an_unfinished_pull_is_named(path):
    work = path.with_name("a.mf.build") / ".build"
    work.mkdir(parents=True)
    (work / "remote.json").touch()
    with pytest.raises(StoreError, match=r"a\.mf\.build is an unfinished pull: the same memfeed.pull\(\) resumes it"):
        open_backing(path)


def test_a_store_that_was_removed_is_told(path):
    memfeed.cache((torch.arange(3), torch.arange(3)), path, progress=False)
    store = memfeed.open(path)
    assert store[0][0] == 0
    path.rename(path.with_name("b.mf"))
    with pytest.raises(StoreError, match=r"found nothing there any more; .* removed, or moved; .* make it again"):
        store.verify(progress=False)
    with pytest.raises(StoreError, match=r"found nothing there; expected a store: make one"):
        memfeed.append(store, (torch.arange(3), torch.arange(3)), progress=False)
    assert [file.name for file in path.parent.iterdir()] == ["b.mf"]


def test_a_column_is_opened_once(path):
    memfeed.cache((torch.arange(3), torch.arange(3)), path, progress=False)
    backing = open_backing(path)
    assert backing.column(1) is backing.column(1)
    assert backing.column(1) is not backing.column(0)
    assert (backing.row_count, backing.manifest.rows) == (3, 3)


def test_a_directory_of_tensordict_has_no_manifest(path):
    TensorDict({"x": torch.arange(4)}, [4]).memmap(str(path))
    backing = open_backing(path)
    assert backing.manifest is None
    assert backing.row_count == 4
    assert backing.column(0).data.tolist() == [0, 1, 2, 3]


def test_a_column_is_not_opened_after_the_store_was_replaced(path):
    memfeed.cache((torch.arange(3), torch.arange(3)), path, progress=False)
    backing = open_backing(path)
    used = backing.column(0).data
    memfeed.cache((torch.arange(4), torch.arange(4)), path, overwrite=True, progress=False)
    assert used.tolist() == [0, 1, 2]
    with pytest.raises(StoreError, match="found another store there than the one that was opened"):
        _ = backing.column(1).data
