"""The bytes of a memoized result: read as they were written, and refused where they are damaged."""

import json
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfeed.errors import CorruptStoreError
from memfeed.store.memo_format import (
    ALIGN,
    FOOTER_BYTES,
    MARKER,
    is_memo,
    is_right,
    layout_bytes,
    make_blob,
    read_footer,
)

DIGEST = bytes(range(16))


def blob_of(*leaves, tree=None):
    return np.concatenate(make_blob(DIGEST, 1.5, tree, list(leaves)))


def leaf(count):
    return ("uint8", (count,), np.full(count, 7, np.uint8))


@given(
    counts=st.lists(st.sampled_from([0, 1, 63, 64, 65, 200]), max_size=4),
    tree=st.sampled_from([None, ["x", 1], "é" * 99]),
)
def test_a_blob_is_read_as_it_was_made(counts, tree):
    blob = blob_of(*map(leaf, counts), tree=tree)
    assert len(blob) % ALIGN == 0
    assert is_right(blob)
    found = read_footer(blob, len(blob), "here")
    assert (found.digest, found.seconds, found.layout.tree) == (DIGEST, 1.5, tree)
    assert [one.shape for one in found.layout.leaves] == [(count,) for count in counts]
    for one, count in zip(found.layout.leaves, counts, strict=True):
        assert one.offset % ALIGN == 0
        assert blob[one.offset : one.offset + one.nbytes].tolist() == [7] * count
    end = blob[-layout_bytes(blob) :]
    assert read_footer(end, len(blob), "here") == found


@given(at=st.integers(0, 255), bit=st.integers(0, 7))
def test_any_changed_bit_is_seen(at, bit):
    blob = blob_of(leaf(100), tree=[1])
    blob[at % len(blob)] ^= 1 << bit
    assert not is_right(blob)


@pytest.mark.parametrize("size", [0, 1, FOOTER_BYTES - 1])
def test_what_is_shorter_than_a_footer(size):
    assert not is_right(np.zeros(size, np.uint8))
    with pytest.raises(CorruptStoreError, match="here: found a result that cannot be read"):
        read_footer(np.zeros(size, np.uint8), size, "here")


def with_layout(layout, room=64):
    text = layout if isinstance(layout, bytes) else json.dumps(layout).encode()
    footer = struct.pack("<16sfIQ", DIGEST, 1.0, len(text), 0)
    return np.frombuffer(bytes(room) + text + footer, np.uint8)


@pytest.mark.parametrize(
    "layout",
    [
        b"", b"no json", b"\xff", b"[" * 100_000, {}, [], {"tree": 1}, {"leaves": []}, {"tree": 1, "leaves": 3},
        {"tree": 1, "leaves": [["uint8", [1]]]}, {"tree": 1, "leaves": [["odd", [1], 0]]},
        {"tree": 1, "leaves": [[[], [1], 0]]},
        {"tree": 1, "leaves": [["uint8", [1], 1]]}, {"tree": 1, "leaves": [["uint8", [1], -64]]},
        {"tree": 1, "leaves": [["uint8", [65], 0]]}, {"tree": 1, "leaves": [["uint8", [-1], 0]]},
        {"tree": 1, "leaves": [["uint8", [1 << 61, 1 << 61], 0]]}, {"tree": 1, "leaves": [["uint8", [1.5], 0]]},
        {"tree": 1, "leaves": [["uint8", 3, 0]]}, {"tree": 1, "leaves": [["uint8", [1], "0"]]},
        {"tree": 1, "leaves": [None]},
        {"tree": 1, "leaves": [["int64", [9], 0]]},
    ],
    ids=lambda value: f"{value!r:.60}",
)  # fmt: skip
def test_a_layout_that_does_not_fit(layout):
    blob = with_layout(layout)
    with pytest.raises(CorruptStoreError, match=r"here: found a result that cannot be read"):
        read_footer(blob, len(blob), "here")


def test_a_layout_longer_than_the_blob():
    blob = blob_of(leaf(1))
    blob[-12:-8] = np.frombuffer(struct.pack("<I", 1 << 30), np.uint8)
    with pytest.raises(CorruptStoreError, match="a layout of 1,073,741,824 bytes"):
        read_footer(blob, len(blob), "here")


def test_a_directory_of_results_has_a_marker(tmp_path):
    assert not is_memo(tmp_path)
    (tmp_path / MARKER).mkdir()
    assert not is_memo(tmp_path)
    (tmp_path / MARKER).rmdir()
    (tmp_path / MARKER).write_bytes(b"{}")
    assert is_memo(tmp_path)
