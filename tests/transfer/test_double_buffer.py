"""Columns cross through two page-locked buffers, one filled while the device reads the other: a simulated device."""

import pytest
import torch

import memfeed
from memfeed import Loader
from memfeed.transfer import streams
from memfeed.transfer.streams import DoubleBuffer, Streams, copies_to
from simulated_cuda import simulated

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there: the simulation would replace it"),
    pytest.mark.skipif(
        not hasattr(torch._C, "_ensureCUDADeviceGuardSet"), reason="this torch cannot have tensors on a simulated GPU"
    ),
]
SCHEDULES = [None, *range(3)]
N = 60
DATA = {"x": torch.arange(N * 40).view(N, 40), "y": torch.arange(N, dtype=torch.float32) + 0.5}


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(streams, "LEAST_BYTES", 1)
    monkeypatch.setattr("memfeed.store.bulk.CHUNK_BYTES", 7 * 40 * 8)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("columns") / "a.mf"
    memfeed.cache(DATA, path, progress=False)
    return path


def resident(path):
    """Return the columns that a loader has placed on the device, and whether all of them are right."""
    loader = Loader(memfeed.open(path), 8, device="cuda", placement="device")
    found = {name: torch.cat([batch[name] for batch in list(loader)]).cpu() for name in DATA}
    del loader
    return found


def moved(path):
    return {name: value.cpu() for name, value in memfeed.open(path).to("cuda", progress=False).items()}


def filled(path):
    there = {name: torch.empty_like(value, device="cuda") for name, value in DATA.items()}
    store = memfeed.open(path)
    store.into(there)
    rows = torch.arange(N - 1, -1, -1).tolist()
    turned = {name: torch.empty_like(value, device="cuda") for name, value in DATA.items()}
    store.subset(rows).into(turned)
    return {name: torch.maximum(value.cpu(), turned[name].cpu().flip(0)) for name, value in there.items()}


WAYS = {"a loader's columns": resident, "Store.to": moved, "Store.into": filled}


def all_right(way, path):
    def is_right(seed):
        with simulated(seed) as machine:
            found = WAYS[way](path)
            assert not machine.errors
            return all(torch.equal(found[name], value) for name, value in DATA.items())

    return all(is_right(seed) for seed in SCHEDULES)


@pytest.mark.parametrize("way", WAYS)
def test_columns_arrive_whole_under_every_schedule(way, path):
    assert all_right(way, path)


class WithoutWaiting(DoubleBuffer):
    """A mutant: a buffer is filled while the device may still read it."""

    def copy(self, target, source):
        self._buffers = [(buffer, None) for buffer, _ in self._buffers]
        super().copy(target, source)


class WithoutFinish(DoubleBuffer):
    """A mutant: the buffers are given back while the device may still read them."""

    def finish(self):
        for buffer, _ in self._buffers:
            torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())  # as the thread does that gives memory back


@pytest.mark.parametrize("way", WAYS)
def test_a_buffer_that_is_not_waited_for_is_found(way, path, monkeypatch):
    monkeypatch.setattr(streams, "DoubleBuffer", WithoutWaiting)
    assert not all_right(way, path)


def test_buffers_that_are_dropped_too_early_are_found(path, monkeypatch):
    monkeypatch.setattr(streams, "DoubleBuffer", WithoutFinish)
    with pytest.raises(AssertionError, match="after it was unlocked"):
        all_right("Store.to", path)


def test_one_buffer_is_filled_while_the_other_is_in_flight():
    with simulated() as machine:
        streams = Streams(torch.device("cuda"))
        target = torch.empty(6, 100, device="cuda")
        source = torch.rand(6, 100)
        torch.cuda.synchronize()
        waiting = []
        with copies_to(target.device, streams) as copy:
            for row in range(6):
                copy(target[row], source[row])
                stream = machine.current_stream(0)
                waiting.append(stream.queued - stream.done)
            assert len(machine.registered) == 2
        assert waiting == [1, 2, 2, 2, 2, 2], "the copy before is still queued when the next is"
        assert not [kind for kind, _ in machine.syncs if "pageable" in kind]
        assert torch.equal(target.cpu(), source)
        del streams


def test_small_columns_lock_nothing(path, monkeypatch):
    monkeypatch.setattr(streams, "LEAST_BYTES", 1 << 20)
    with simulated() as machine:
        found = moved(path)
        assert all(torch.equal(found[name], value) for name, value in DATA.items())
        assert not machine.registered


@pytest.mark.parametrize("pins", [True, False])
@pytest.mark.parametrize("lock_error", [2, 801], ids=["out of memory", "not supported"])
def test_a_system_that_cannot_lock_still_copies(path, lock_error, pins):
    with simulated(lock_error=lock_error, pins=pins):
        found = moved(path)
    assert all(torch.equal(found[name], value) for name, value in DATA.items())


def test_a_store_to_another_device_than_the_current_one(path):
    with simulated() as machine:
        found = memfeed.open(path).to("cuda:1", progress=False)
        assert {value.device for value in found.values()} == {torch.device("cuda:1")}
        assert machine.contexts == {1}
        assert all(torch.equal(found[name].cpu(), value) for name, value in DATA.items())


def test_jagged_rows(tmp_path):
    rows = [{"t": torch.arange(i % 9) + i} for i in range(N)]
    path = tmp_path / "b.mf"
    memfeed.cache(rows, path, progress=False)
    for seed in SCHEDULES:
        with simulated(seed):
            found = memfeed.open(path).to("cuda", progress=False)["t"].values().cpu()
        assert torch.equal(found, torch.cat([row["t"] for row in rows]))


def test_without_streams_it_is_a_plain_copy():
    with copies_to(torch.device("cpu")) as copy:
        assert copy is torch.Tensor.copy_
