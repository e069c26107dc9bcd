"""The rows of keys: one for each digest, found by all processes, whatever their number."""

import numpy as np
import pytest

from memfeed.memoizing import keys as module
from memfeed.memoizing.keys import Digests


@pytest.fixture
def path(tmp_path):
    (tmp_path / "digests").write_bytes(b"")
    return tmp_path / "digests"


def digest(i):
    return int(i * 0x9E3779B97F4A7C15 % (1 << 64)).to_bytes(8, "little") + bytes(8)


@pytest.mark.parametrize("recent", [1, 4, 4096])
def test_each_digest_has_one_row(path, recent, monkeypatch):
    monkeypatch.setattr(module, "_MOST_RECENT", recent)
    one, other = Digests(path), Digests(path)
    assert one.find(digest(0)) is None
    rows = {}
    for i in range(40):
        writer, reader = (one, other) if i % 3 else (other, one)
        rows[i] = writer.append(digest(i))
        assert writer.append(digest(i)) == reader.append(digest(i)) == reader.find(digest(i)) == rows[i]
    assert sorted(rows.values()) == list(range(40))
    assert {i: Digests(path).find(digest(i)) for i in range(40)} == rows
    assert one.find(digest(41)) is None


def test_the_first_8_bytes_count(path):
    digests = Digests(path)
    row = digests.append(b"12345678" + b"a" * 8)
    assert digests.append(b"12345678" + b"b" * 8) == row
    assert digests.append(b"12345679" + b"a" * 8) == row + 1


@pytest.mark.parametrize("extreme", [bytes(16), b"\xff" * 16])
def test_extreme_digests(path, extreme, monkeypatch):
    monkeypatch.setattr(module, "_MOST_RECENT", 0)
    digests = Digests(path)
    row = digests.append(extreme)
    digests.append(digest(1))
    assert digests.find(extreme) == Digests(path).find(extreme) == row


def test_half_a_digest_at_the_end_is_written_over(path):
    Digests(path).append(digest(1))
    with open(path, "ab") as file:
        file.write(b"half")
    digests = Digests(path)
    assert digests.find(digest(1)) == 0
    assert digests.append(digest(2)) == 1
    assert np.fromfile(path, np.uint8).size == 16
