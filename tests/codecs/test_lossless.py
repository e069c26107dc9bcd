"""zstd and LZ4: every row comes back in every bit, and every other blob is refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from memfeed.codecs.lossless import DTYPE_CODES, Lz4, Zstd, narrow
from memfeed.errors import CorruptStoreError, SchemaError

CODECS = [Zstd(), Zstd(level=7), Lz4()]
DTYPES = [np.dtype(name) for name in DTYPE_CODES]


def blob_of(codec, row):
    return np.frombuffer(codec.encode(row), np.uint8)


def bits(row):
    return np.ascontiguousarray(row).reshape(-1).view(np.uint8).tobytes()


@st.composite
def rows(draw):
    """Return a row of any dtype and shape, of any bits: NaN payloads and bools that are neither 0 nor 1 too."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
    size = int(np.prod(shape, dtype=np.int64))
    if dtype.kind in "iu":
        limits = np.iinfo(draw(st.sampled_from([other for other in DTYPES if other.kind in "iu"])))
        least, largest = max(limits.min, np.iinfo(dtype).min), min(limits.max, np.iinfo(dtype).max)
        values = draw(st.lists(st.integers(least, largest), min_size=size, max_size=size))
        return np.array(values, dtype).reshape(shape)
    data = draw(st.binary(min_size=size * dtype.itemsize, max_size=size * dtype.itemsize))
    return np.frombuffer(data, dtype).reshape(shape)


@pytest.mark.parametrize("codec", CODECS, ids=str)
@given(row=rows())
@settings(max_examples=200)
def test_a_row_comes_back_in_every_bit(codec, row):
    blob = blob_of(codec, row)
    assert codec.shape(blob) == row.shape
    out = np.empty(row.shape, row.dtype)
    codec.decode(blob, out)
    assert bits(out) == bits(row)
    strided = np.empty((*row.shape, 2), row.dtype)[..., 0]
    codec.decode(blob, strided)
    assert bits(strided) == bits(row)


def test_integers_are_stored_in_the_smallest_dtype_that_has_them():
    for dtype in [np.dtype(name) for name in ("int64", "uint64", "int32", "uint16", "int8")]:
        limits = np.iinfo(dtype)
        for other in [np.dtype(name) for name in ("uint8", "int8", "uint16", "int16", "uint32", "int32")]:
            edges = np.iinfo(other)
            if edges.min < limits.min or edges.max > limits.max:
                continue
            for value in (edges.min, edges.max):
                row = np.array([0, value], dtype)
                assert narrow(row).itemsize <= other.itemsize
                assert (narrow(row) == row).all()
    assert narrow(np.array([0, 256])).dtype == np.uint16
    assert narrow(np.array([-1, 127])).dtype == np.int8
    assert narrow(np.array([-1, 128])).dtype == np.int16
    assert narrow(np.array([2**63], np.uint64)).dtype == np.uint64
    assert narrow(np.array([], np.int64)).dtype == np.int64


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_a_blob_of_another_row_is_refused(codec):
    blob = blob_of(codec, np.arange(12).reshape(3, 4))
    for out in (
        *(np.empty((4, 3), np.int64), np.empty(12, np.int64), np.empty((3, 5), np.int64)),
        *(np.empty((3, 4), np.uint64), np.empty((3, 4), np.int32), np.empty((3, 4))),
    ):
        with pytest.raises(CorruptStoreError, match=r"found int64 \[3, 4\]; expected"):
            codec.decode(blob, out)


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("row", [np.arange(1000), np.float32(1.5), np.zeros((0, 3)), np.ones(7, bool)], ids="abcd")
def test_missing_and_additional_bytes_are_refused(codec, row):
    row = np.asarray(row)
    blob, out = codec.encode(row), np.empty(row.shape, row.dtype)
    for size in range(len(blob)):
        with pytest.raises(CorruptStoreError, match="the store is damaged"):
            codec.decode(np.frombuffer(blob[:size], np.uint8), out)
    for end in (b"\0", b"\xff", b"\0" * 20, blob):
        with pytest.raises(CorruptStoreError, match="the store is damaged"):
            codec.decode(np.frombuffer(blob + end, np.uint8), out)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_a_header_of_a_newer_version_is_refused(codec):
    blob = blob_of(codec, np.arange(5)).copy()
    for place, value in ((0, 200), (1, 200), (1, 9), (2, 1), (3, 65)):
        changed = blob.copy()
        changed[place] = value
        with pytest.raises(CorruptStoreError):
            codec.shape(changed)


def test_other_dtypes_are_refused_with_those_it_has():
    for dtype in (np.dtype(object), np.dtype("U3"), np.dtype(">i4"), np.dtype("datetime64[s]"), np.dtype("V4")):
        assert "it has bool, uint8" in Zstd().accepts(dtype, (3,))
        with pytest.raises(SchemaError, match="it has bool, uint8"):
            Zstd().encode(np.zeros(3, dtype))
    assert Zstd().accepts(np.dtype("float16"), (None, 3)) == ""


def test_a_level_is_an_int_from_1_to_19():
    for level in (0, 20, -1, 3.0, "3", True):
        with pytest.raises(ValueError, match="expected an int from 1 to 19"):
            Zstd(level=level)
