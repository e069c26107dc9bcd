"""Filters change the bytes that are compressed, never the row."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memfeed.codecs import lossless
from memfeed.codecs.lossless import DTYPE_CODES, Lz4, Zstd
from memfeed.errors import CorruptStoreError

SMOOTH = np.cumsum(np.random.default_rng(0).normal(0, 2, (32, 32)), axis=1)


def blob_of(codec, row):
    return np.frombuffer(codec.encode(row), np.uint8)


SHAPES = st.one_of(
    st.lists(st.integers(0, 4), max_size=4), st.tuples(st.just(3), st.integers(1, 4), st.integers(1, 4)).map(list)
)


@given(dtype=st.one_of(st.just("uint8"), st.sampled_from(list(DTYPE_CODES))), shape=SHAPES, seed=st.integers(0, 99))
@settings(max_examples=200)
def test_what_is_applied_is_undone_in_every_bit(dtype, shape, seed):
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    row = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8).view(dtype).reshape(shape)
    for code in lossless.filters_of(row.dtype, row.shape):
        data = lossless.apply(code, row)
        assert data.nbytes == row.nbytes
        for out in (np.zeros_like(row), np.zeros((*row.shape, 2), dtype)[..., 0]):
            lossless.undo(code, data, out)
            assert out.tobytes() == row.tobytes()


def test_the_bytes_are_those_of_the_table():
    image = np.arange(12, dtype=np.uint8).reshape(3, 2, 2) * 7
    differences = lossless.apply(lossless.CHANNELS, image).reshape(3, 2, 2)
    assert (differences == np.stack([image[0] - image[1], image[1], image[2] - image[1]])).all()
    assert lossless.apply(lossless.BYTES, np.array([0x0102, 0x0304], np.uint16)).tolist() == [2, 4, 1, 3]
    assert lossless.apply(lossless.BYTES, np.array([1 + 2j], np.complex64)).tolist() == [
        0,
        0,
        0,
        0,
        0x80,
        0,
        0x3F,
        0x40,
    ]


@pytest.mark.parametrize("codec", [Zstd(), Lz4()], ids=str)
def test_the_filter_with_the_fewest_bytes_is_taken(codec):
    rng = np.random.default_rng(0)
    gray = rng.integers(0, 256, (32, 32), dtype=np.uint8)
    colors = gray + rng.integers(0, 3, (3, 32, 32), dtype=np.uint8)
    assert blob_of(codec, colors)[2] == lossless.CHANNELS
    out = np.empty_like(colors)
    codec.decode(blob_of(codec, colors), out)
    np.testing.assert_array_equal(out, colors)
    assert blob_of(codec, np.stack([gray, gray.T, gray[::-1]]))[2] == lossless.NONE
    assert blob_of(codec, np.ascontiguousarray(colors.transpose(1, 2, 0)))[2] == lossless.NONE
    assert blob_of(codec, SMOOTH.astype(np.float32))[2] == lossless.BYTES
    assert blob_of(codec, np.tile(SMOOTH[0].astype(np.float32), 32))[2] == lossless.NONE
    assert len(codec.encode(SMOOTH.astype(np.float32))) < 32 * 32 * 4


@pytest.mark.parametrize(
    ("row", "code"), [(np.zeros((2, 3, 3), np.uint8), 1), (np.zeros(9, np.uint8), 2), (np.zeros(9), 3)]
)
def test_a_filter_that_the_row_cannot_have_is_refused(row, code):
    blob = blob_of(Zstd(), row).copy()
    blob[2] = code
    with pytest.raises(CorruptStoreError, match=f"the filter {code} for a row"):
        Zstd().decode(blob, np.empty_like(row))
