"""Many rows at once: the values of one after another, in several threads."""

import threading
from time import thread_time

import numpy as np
import pytest

from memfeed.codecs.contract import Codec
from memfeed.codecs.jpeg import Jpeg
from memfeed.codecs.lossless import Lz4, Zstd
from memfeed.errors import CorruptStoreError
from memfeed.system import openmp


def images(count):
    y, x, c = np.mgrid[:20, :30, :3]
    return [
        np.ascontiguousarray((x * 3 + y * 5 + c * 40 + i).astype(np.uint8).transpose(2, 0, 1)) for i in range(count)
    ]


@pytest.mark.parametrize("codec", [Zstd(), Lz4(), Jpeg()], ids=lambda codec: codec.name)
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_rows_are_those_of_single_calls(codec, threads):
    rows = images(17)
    blobs = [np.frombuffer(codec.encode(row), np.uint8) for row in rows]
    batch = np.zeros((17, 3, 20, 30), np.uint8)
    codec.decode_rows(blobs, list(batch), threads)
    for blob, row in zip(blobs, batch, strict=True):
        alone = np.empty_like(row)
        codec.decode(blob, alone)
        np.testing.assert_array_equal(row, alone)
    codec.decode_rows([], [], threads)


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_says_which_blob(threads):
    rows = images(9)
    blobs = [np.frombuffer(Zstd().encode(row), np.uint8) for row in rows]
    blobs[6] = blobs[6][:-1]
    with pytest.raises(CorruptStoreError) as raised:
        Zstd().decode_rows(blobs, [np.empty_like(row) for row in rows], threads)
    assert raised.value.position == 6


class Meeting(Codec):
    """A codec whose rows are decoded only when two threads decode at once."""

    name, lossless = "meeting", True

    def __init__(self):
        self.barrier = threading.Barrier(2, timeout=60)

    def decode(self, blob, out):
        self.barrier.wait()


@pytest.mark.skipif(not openmp.can_limit(), reason="threads are not shared without OpenMP's limit")
def test_two_threads_decode_at_once():
    rows = images(2)
    Meeting().decode_rows(rows, rows, 2)


def share_of_another_thread(work):
    """Return the CPU time of a thread that counts while this thread does `work`, per CPU time of this thread."""
    running, ended, seconds = threading.Event(), threading.Event(), []

    def count():
        running.set()
        began = thread_time()
        while not ended.is_set():
            pass
        seconds.append(thread_time() - began)

    thread = threading.Thread(target=count)
    thread.start()
    running.wait()
    began = thread_time()
    try:
        work()
        own = thread_time() - began
    finally:
        ended.set()
        thread.join()
    return seconds[0] / own


def test_another_thread_runs_while_a_large_image_is_decoded():
    row = np.random.default_rng(0).integers(0, 100, (3, 3000, 3000), dtype=np.uint8)
    blob, out = np.frombuffer(Jpeg().encode(row), np.uint8), np.empty_like(row)
    shares = [share_of_another_thread(lambda: Jpeg().decode(blob, out)) for _ in range(3)]
    assert max(shares) > 0.5  # about 1; where Python's lock was held for 0.2 s, 0.06
