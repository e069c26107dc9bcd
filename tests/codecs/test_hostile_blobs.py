"""Blobs that somebody changed: an error or a row, never a crash, a byte outside of the row, or more memory."""

import resource
import tracemalloc

import lz4.block
import numpy as np
import pytest
import zstandard

from memfeed.codecs.jpeg import Jpeg
from memfeed.codecs.lossless import Lz4, Zstd
from memfeed.errors import CorruptStoreError

RNG = np.random.default_rng(1)
GRAY = np.cumsum(RNG.integers(-3, 4, (24, 24)), axis=0).astype(np.uint8)
ROWS = [
    np.stack([GRAY, GRAY + 3, GRAY.T]),
    *(np.arange(300).reshape(10, 30), np.linspace(0, 1, 200, dtype=np.float32), np.ones(70, bool)),
    *(np.float64(2.5), np.zeros((0, 4), np.int16), RNG.standard_normal(20) + 1j),
]
IMAGES = [np.stack([GRAY, GRAY + 3, GRAY.T]), GRAY[None], np.full((3, 17, 9), 200, np.uint8)]
CODECS = {
    "zstd": (Zstd(), ROWS),
    "lz4": (Lz4(), ROWS),
    "jpeg": (Jpeg(), IMAGES),
    "jpeg, half colors": (Jpeg(80), IMAGES),
}
GUARD = 64  # bytes before and behind a row
MOST_EXTRA = 1 << 20  # bytes beside a few times those of the row


def changed(blob, others, rng):
    """Return a blob with a few random changes."""
    blob = blob.copy()
    for _ in range(rng.integers(1, 4)):
        place = int(rng.integers(0, max(len(blob), 1)))
        kind = rng.integers(0, 8)
        if not len(blob) or kind == 0:
            blob = rng.integers(0, 256, rng.integers(0, 60), dtype=np.uint8)
        elif kind == 1:
            blob = blob[:place]
        elif kind == 2:
            blob = np.concatenate([blob, rng.integers(0, 256, rng.integers(1, 40), dtype=np.uint8)])
        elif kind == 3:
            blob[place] ^= np.uint8(1 << rng.integers(0, 8))
        elif kind == 4:
            blob[place : place + 4] = rng.choice(np.array([0, 1, 127, 128, 255], np.uint8))
        elif kind == 5:
            blob[int(rng.integers(0, min(len(blob), 40)))] = rng.integers(0, 256)
        elif kind == 6:
            blob = np.concatenate([blob[:place], others[rng.integers(0, len(others))][place:]])
        else:
            blob = np.concatenate([blob[:place], blob[place + 1 + int(rng.integers(0, 8)) :]])
    return blob


def guarded(row):
    """Return an array like a row, and the bytes around it."""
    memory = np.full(row.nbytes + 2 * GUARD, 0xA5, np.uint8)
    return memory[GUARD : GUARD + row.nbytes].view(row.dtype).reshape(row.shape), memory


def fuzz(name, count):
    """Decode changed blobs. Return how many were refused."""
    codec, rows = CODECS[name]
    rows = [np.asarray(row) for row in rows]
    blobs = [np.frombuffer(codec.encode(row), np.uint8) for row in rows]
    rng = np.random.default_rng(len(name))
    outs = [guarded(row) for row in rows]
    refused = 0
    codec.decode(blobs[0], outs[0][0])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tracemalloc.start()
    try:
        for number in range(count):
            index = number % len(rows)
            out, memory = outs[index]
            blob = changed(blobs[index], blobs, rng)
            tracemalloc.reset_peak()
            began = tracemalloc.get_traced_memory()[0]
            try:
                codec.decode(blob, out)
            except CorruptStoreError:
                refused += 1
            else:
                assert codec.shape(blob) == out.shape
            assert tracemalloc.get_traced_memory()[1] - began < 8 * out.nbytes + MOST_EXTRA
            assert (memory[:GUARD] == 0xA5).all()
            assert (memory[len(memory) - GUARD :] == 0xA5).all()
    finally:
        tracemalloc.stop()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 100_000  # kB
    return refused


@pytest.mark.parametrize("name", CODECS)
def test_changed_blobs_are_refused_or_a_row(name):
    assert fuzz(name, 2_000) > 1_000


@pytest.mark.long
@pytest.mark.parametrize("name", CODECS)
def test_many_changed_blobs_are_refused_or_a_row(name):
    assert fuzz(name, 20_000) > 10_000


def header(row):
    return Zstd().encode(row)[: 4 + 4 * row.ndim]


def refuse(codec, blob, out, match):
    """Decode a blob that must be refused before memory is taken."""
    tracemalloc.start()
    try:
        with pytest.raises(CorruptStoreError, match=match):
            codec.decode(np.frombuffer(blob, np.uint8), out)
        assert tracemalloc.get_traced_memory()[1] < MOST_EXTRA
    finally:
        tracemalloc.stop()


BOMB = bytes(200_000_000)


def test_a_bomb_of_zstd_is_refused():
    row, out = np.zeros(100, np.uint8), np.empty(100, np.uint8)
    compressor = zstandard.ZstdCompressor(level=1)
    refuse(Zstd(), header(row) + compressor.compress(BOMB), out, "a frame of 200000000 bytes")
    untold = zstandard.ZstdCompressor(level=1, write_content_size=False).compress(BOMB)
    refuse(Zstd(), header(row) + untold, out, "a frame of -1 bytes")
    lying = bytearray(compressor.compress(bytes(100)))
    assert lying[5] == 100
    lying[5] = 99
    refuse(Zstd(), header(row) + bytes(lying), out, "a frame of 99 bytes")
    frame = bytearray(compressor.compress(BOMB))
    assert frame[4] == 0x80  # a byte about the window, and a content size of 4 bytes, which says 100 from here on
    frame[6:10] = (100).to_bytes(4, "little")
    refuse(Zstd(), header(row) + bytes(frame), out, "cannot decompress")
    frame[5] = 0x88  # a window of 128 MiB
    refuse(Zstd(), header(row) + bytes(frame), out, "cannot decompress")


def test_a_bomb_of_lz4_is_refused():
    out = np.empty(100, np.uint8)
    refuse(Lz4(), header(out) + lz4.block.compress(BOMB, store_size=False), out, "cannot decompress")
    refuse(Lz4(), header(out) + lz4.block.compress(bytes(99), store_size=False), out, "a block of 99 bytes")


@pytest.mark.parametrize("codec", [Zstd(), Lz4()], ids=str)
def test_dims_that_lie_are_refused(codec):
    blob = bytearray(codec.encode(np.zeros((2, 3), np.int64)))
    blob[4:12] = b"\xff" * 8  # 2**32 - 1 in both dims
    refuse(codec, blob, np.empty((2, 3), np.int64), r"found int64 \[4294967295, 4294967295\]; expected")
    assert codec.shape(np.frombuffer(blob, np.uint8)) == (2**32 - 1, 2**32 - 1)


def test_a_jpeg_of_another_size_is_refused_by_its_header():
    blob = bytearray(Jpeg().encode(np.zeros((3, 16, 16), np.uint8)))
    frame = blob.index(b"\xff\xc0")
    blob[frame + 5 : frame + 9] = b"\xff\xdc\xff\xdc"  # 65500 x 65500
    refuse(Jpeg(), blob, np.empty((3, 16, 16), np.uint8), r"found uint8 \[3, 65500, 65500\]; expected")
