"""Files of several stores put one after the other: where each goes, what may be there, and what is never changed."""

import os
from types import SimpleNamespace

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from memfeed.building import join
from memfeed.building.join import FilePart, _blocks, _bytes_to_write, _cost, _extend, _may_clone, _offsets, _put, _write
from memfeed.errors import CorruptStoreError
from memfeed.store.checksums import ChunkHasher
from memfeed.store.manifest import CHUNK_BYTES
from memfeed.system import file_copies, files

BLOCK = files.BLOCK_BYTES


@pytest.fixture
def bar():
    return SimpleNamespace(advance=lambda count: None)


def part(path, data, at=0, shift=0):
    path.write_bytes(data)
    hashes = [xxhash.xxh3_64_intdigest(data[i : i + CHUNK_BYTES]) for i in range(0, len(data), CHUNK_BYTES)]
    return FilePart(path, len(data), hashes, at, shift)


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=6), st.sampled_from([1, BLOCK]))
def test_files_do_not_overlap(sizes, unit):
    offsets = _offsets(sizes, unit)
    assert all(offset % unit == 0 for offset in offsets)
    ends = [0]
    for offset, size in zip(offsets, sizes, strict=True):
        if size:
            assert ends[-1] <= offset < ends[-1] + unit
            ends.append(offset + size)
        else:
            assert offset == 0


def test_bytes_that_are_written(tmp_path):
    first, second = part(tmp_path / "a", bytes(10)), part(tmp_path / "b", bytes(20), BLOCK)
    third = part(tmp_path / "c", bytes(5), BLOCK + 20)
    assert _bytes_to_write([first, second, third], "") == 35
    assert _bytes_to_write([first, second, third], "linked") == 25
    assert _bytes_to_write([first, second, third], "cloned") == 5
    assert _may_clone(second)
    assert not _may_clone(third)
    assert not _may_clone(second._replace(shift=8))


def test_the_line_before_says_what_is_shared(tmp_path):
    pieces = {"x": [part(tmp_path / "a", bytes(1000)), part(tmp_path / "b", bytes(500), 1000)]}
    assert _cost(pieces, {"x": ""}, 1500).startswith("1.5 KB of 1.5 KB are written; 1.0 KB of that are copied")
    assert "hard links" in _cost(pieces, {"x": "linked"}, 500)
    assert "reflinks" in _cost(pieces, {"x": "cloned"}, 0)


@pytest.mark.parametrize(
    "sizes", [(0, 0), (5, 0), (0, 5), (BLOCK, 3), (BLOCK + 1, 7), (CHUNK_BYTES - 1, 10), (10, CHUNK_BYTES + 3)]
)
@pytest.mark.parametrize("way", ["copied", "linked", "left over"])
def test_a_file_has_the_bytes_of_all_parts(tmp_path, bar, sizes, way, monkeypatch):
    monkeypatch.setattr(file_copies, "clone", lambda *_: False)
    data = [os.urandom(size) for size in sizes]
    offsets = _offsets(sizes, BLOCK)
    pieces = [part(tmp_path / str(i), one, at) for i, (one, at) in enumerate(zip(data, offsets, strict=True))]
    path = tmp_path / "new"
    begun = ""
    if way != "copied" and sizes[0]:
        os.link(tmp_path / "0", path)
        begun = "linked"
        if way == "left over" and sizes[1] > 2:  # an append of the same rows was killed
            with open(path, "r+b") as file:
                file.seek(offsets[1])
                file.write(data[1][: sizes[1] // 2])
    hashes = _write(path, pieces, begun, bar)
    end = max(one.end for one in pieces)
    expected = bytearray(end)
    for one, at in zip(data, offsets, strict=True):
        expected[at : at + len(one)] = one
    assert path.read_bytes() == expected
    assert hashes == [
        xxhash.xxh3_64_intdigest(bytes(expected[i : i + CHUNK_BYTES])) for i in range(0, end, CHUNK_BYTES)
    ]
    assert (tmp_path / "0").read_bytes()[: sizes[0]] == data[0]


def test_bytes_of_another_append_stay_and_the_file_is_copied(tmp_path, bar, capsys):
    first, second = part(tmp_path / "0", b"a" * 10), part(tmp_path / "1", b"b" * 4, 10)
    path = tmp_path / "new"
    os.link(first.path, path)
    with open(path, "ab") as file:
        file.write(b"xx")
    _write(path, [first, second], "linked", bar)
    assert path.read_bytes() == b"a" * 10 + b"b" * 4
    assert first.path.read_bytes() == b"a" * 10 + b"xx"
    assert "an append of other rows was interrupted" in capsys.readouterr().err


def test_a_longer_file_is_taken(tmp_path, bar):
    first, second = part(tmp_path / "0", b"a" * 10), part(tmp_path / "1", b"b" * 4, 10)
    with open(first.path, "ab") as file:
        file.write(b"bbbbb")
    with pytest.raises(join._TakenError):
        _extend(first.path, [first, second], bar)
    assert first.path.read_bytes() == b"a" * 10 + b"b" * 5


def test_numbers_are_shifted(tmp_path, bar):
    numbers = np.arange(3, dtype="<i8")
    pieces = [part(tmp_path / "0", numbers.tobytes()), part(tmp_path / "1", numbers.tobytes(), 24, shift=100)]
    _write(tmp_path / "new", pieces, "", bar)
    assert np.fromfile(tmp_path / "new", "<i8").tolist() == [0, 1, 2, 100, 101, 102]


def test_damaged_bytes_are_not_copied(tmp_path, bar):
    first = part(tmp_path / "0", b"a" * 10)
    first.path.write_bytes(b"a" * 9 + b"b")
    with pytest.raises(CorruptStoreError, match=r"found other bytes than were written, in 10 bytes from 0"):
        list(_blocks(first))
    with pytest.raises(CorruptStoreError):
        _write(tmp_path / "new", [first, part(tmp_path / "1", b"c", 10)], "", bar)
    os.link(first.path, tmp_path / "linked")
    with pytest.raises(CorruptStoreError):
        _extend(tmp_path / "linked", [first, part(tmp_path / "1", b"c", 10)], bar)


def test_what_is_there_is_compared_and_written_again(tmp_path, monkeypatch):
    writes = []
    real = files.write_at
    monkeypatch.setattr(files, "write_at", lambda fd, data, at: writes.append((bytes(data), at)) or real(fd, data, at))
    path = tmp_path / "a"
    path.write_bytes(b"abc")
    with files.opened(path) as fd:
        assert _put(fd, b"bcd", 1, ChunkHasher()) == 4
        assert _put(fd, b"d", 3, ChunkHasher(), is_cloned=True) == 4
        with pytest.raises(join._TakenError):
            _put(fd, b"x", 0, ChunkHasher())
    assert writes == [(b"bcd", 1), (b"", 4)]
    assert path.read_bytes() == b"abcd"
