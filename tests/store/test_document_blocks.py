"""Documents cut into blocks: the pieces of a block are the tokens that lie there, in any order of the documents."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfeed.store.packed import Packing
from support import copies_by


def tokens(lengths, order, *, has_end, fills, size):
    """Return (document, position in it) of each token, one after another; (-1, i) for what fills the last block."""
    found = [(d, i) for d in order for i in range(lengths[d] + has_end)]
    if fills:
        found += [(-1, i) for i in range(-len(found) % size)]
    return found[: len(found) // size * size]


@given(
    lengths=st.lists(st.integers(0, 9), max_size=8),
    size=st.integers(1, 7),
    has_end=st.booleans(),
    fills=st.booleans(),
    seed=st.none() | st.integers(0, 3),
    data=st.data(),
)
def check(way, lengths, size, has_end, fills, seed, data):
    n = len(lengths)
    order = list(range(n)) if seed is None else np.random.RandomState(seed).permutation(n).tolist()
    rows = np.arange(n) * 10
    packing = Packing(rows, np.array(lengths, np.int64), size, has_end=has_end, fills=fills)
    if seed is not None:
        packing = packing.in_order(np.array(order, np.int64))
    expected = tokens(lengths, order, has_end=has_end, fills=fills, size=size)
    assert (packing.document_count, packing.block_count) == (n, len(expected) // size)
    blocks = data.draw(
        st.lists(st.integers(0, max(packing.block_count - 1, 0)), max_size=4 * bool(packing.block_count))
    )
    with copies_by(way):
        pieces = packing.cut(np.array(blocks, np.int64))
    found, at = [], 0
    for document, skipped, length, stored, number, begin in zip(*pieces, strict=True):
        assert length > 0
        if begin == 0 or at % size == 0:
            expected_number = 0
        assert (number, begin) == (expected_number, at % size)
        expected_number += 1
        document = -1 if document == -1 else document // 10
        found += [(document, skipped + i) for i in range(length)]
        real = 0 if document == -1 else min(length, max(lengths[document] - skipped, 0))
        assert stored == real
        at += length
    assert found == [one for block in blocks for one in expected[block * size : (block + 1) * size]]


@pytest.mark.parametrize("way", ["numpy", "numba"])
def test_pieces_are_the_tokens_of_a_block(way):
    if way == "numba":
        pytest.importorskip("numba")
    check(way)


def test_the_columns_of_a_batch_share_one_cut():
    packing = Packing(np.arange(2), np.array([3, 4]), 2, has_end=False, fills=False)
    blocks = np.array([0, 1])
    assert packing.pieces(blocks) is packing.pieces(blocks)


@pytest.mark.parametrize("fills", [False, True])
def test_no_tokens(fills):
    for lengths in ([], [0, 0]):
        packing = Packing(np.arange(len(lengths)), np.array(lengths, np.int64), 3, has_end=False, fills=fills)
        assert packing.block_count == 0
        assert [len(part) for part in packing.cut(np.array([], np.int64))] == [0] * 6
