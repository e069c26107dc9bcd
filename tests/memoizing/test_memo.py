"""A directory of results: rows that are taken, written, found and dropped, and what is no such directory."""

import os

import numpy as np
import pytest

from memfeed.errors import CorruptStoreError, StoreError
from memfeed.memoizing.memo import Memo
from memfeed.store.memo_format import BLOB, MARKER, is_memo, make_blob
from memfeed.store.ragged import ragged_files


def digest(i):
    return i.to_bytes(8, "big") + bytes(8)


def blob_of(i, size=100):
    return np.concatenate(make_blob(digest(i), 1.0, ["tensor", 0], [("uint8", (size,), np.full(size, i, np.uint8))]))


def keep(memo, i, size=100):
    with memo.taken(digest(i)) as row:
        memo.write(row, b"{}", blob_of(i, size))
    return row


def read(memo, i, **options):
    row = memo.find(digest(i))
    found = None if row is None else memo.read(row, digest(i), **options)
    return None if found is None else found.data[found.blob.layout.leaves[0].offset :][:3].tolist()


@pytest.mark.parametrize("mapped", [False, True])
def test_results_are_found_by_every_process(tmp_path, mapped):
    one, other = Memo(tmp_path / "r.mf"), Memo(tmp_path / "r.mf")
    assert read(one, 1) is None
    assert keep(one, 1) == 0
    assert keep(other, 2) == 1
    assert [read(memo, i, mapped=mapped) for memo in (one, other) for i in (1, 2)] == [[1] * 3, [2] * 3] * 2
    assert read(Memo(tmp_path / "r.mf"), 2, mapped=mapped) == [2] * 3


def test_one_process_has_a_row(tmp_path):
    one, other = Memo(tmp_path / "r.mf"), Memo(tmp_path / "r.mf")
    with one.taken(digest(1)) as row:
        assert row == 0
        pid = os.fork()
        if not pid:
            with other.taken(digest(1)) as also:
                os._exit(0 if also is None else 1)
        assert os.waitpid(pid, 0)[1] == 0
    with other.taken(digest(1)) as row:
        assert row == 0


def test_memory_is_the_readers_own(tmp_path):
    memo = Memo(tmp_path / "r.mf")
    row = keep(memo, 1)
    for mapped in (False, True):
        memo.read(row, digest(1), mapped=mapped).data[:] = 9
        assert read(memo, 1, mapped=mapped) == [1] * 3


def test_a_row_of_another_key_is_not_read(tmp_path):
    memo = Memo(tmp_path / "r.mf")
    row = keep(memo, 1)
    assert memo.read(row, digest(2)) is None
    assert memo.read(row + 1, digest(1)) is None


def test_the_rows_that_were_used_last_stay(tmp_path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("memfeed.memoizing.memo.time.time", lambda: now[0])
    memo = Memo(tmp_path / "r.mf", 5000)
    for i in range(8):
        now[0] += 1
        keep(memo, i, 500)
        now[0] += 1
        read(memo, 0)
    now[0] += 1
    keep(memo, 9, 2000)
    kept = [i for i in (*range(8), 9) if read(memo, i) is not None]
    assert {0, 7, 9} <= {*kept}
    assert 1 not in kept
    sizes = np.fromfile(ragged_files(tmp_path / "r.mf", BLOB).dims, np.int64)
    assert sum(int(sizes[memo.find(digest(i))]) for i in kept) <= 5000


def test_a_result_larger_than_the_room_is_not_kept(tmp_path):
    memo = Memo(tmp_path / "r.mf", 1000)
    keep(memo, 1, 2000)
    assert read(memo, 1) is None
    keep(memo, 2, 100)
    assert read(memo, 2) == [2] * 3


def test_proofs_are_counted(tmp_path):
    memo = Memo(tmp_path / "r.mf")
    assert memo.proven("f") == 0
    memo.add_proof("f")
    memo.add_proof("f")
    assert (memo.proven("f"), memo.proven("g")) == (2, 0)


@pytest.mark.parametrize("file", ["start", "dims"])
@pytest.mark.parametrize("value", [-1, 1 << 60, 7])
def test_a_damaged_row(tmp_path, file, value):
    memo = Memo(tmp_path / "r.mf")
    row = keep(memo, 1)
    path = getattr(ragged_files(tmp_path / "r.mf", BLOB), file)
    with open(path, "r+b") as opened:
        opened.write(value.to_bytes(8, "little", signed=True))
    with pytest.raises(CorruptStoreError, match=f"found row {row} of"):
        memo.read(row, digest(1))


@pytest.mark.parametrize("content", [b"", b"{", b'{"format": "other"}', b'{"version": 99}', b"[]"])
def test_another_format(tmp_path, content):
    Memo(tmp_path / "r.mf")
    (tmp_path / "r.mf" / MARKER).write_bytes(content)
    with pytest.raises(StoreError, match=r"found something else than memoized results|found results of format"):
        Memo(tmp_path / "r.mf")


@pytest.mark.parametrize("make", ["file", "directory with a file", "link"])
def test_another_thing_at_the_path(tmp_path, make):
    path = tmp_path / "r.mf"
    if make == "file":
        path.write_text("x")
    elif make == "link":
        (tmp_path / "elsewhere").mkdir()
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.mkdir()
        (path / "a").write_text("x")
    before = sorted(one.name for one in tmp_path.rglob("*"))
    with pytest.raises(StoreError):
        Memo(path)
    assert sorted(one.name for one in tmp_path.rglob("*")) == before


def test_a_directory_that_may_not_be_read_is_none(tmp_path, monkeypatch):
    def stat(path, *arguments, **options):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "stat", stat)
    assert not is_memo(tmp_path)
