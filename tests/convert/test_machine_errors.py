"""Errors of ours where the machine or the sample would raise an exception of Python's or torch's own."""

import errno
import multiprocessing.synchronize
import os
import resource
import threading

import pytest
import torch

import memfeed
from memfeed.errors import BuildError, LoaderError, SchemaError
from memfeed.system.buffers import shared_number


class Ones(list):
    def __init__(self, count=200):
        super().__init__(torch.full((3,), i) for i in range(count))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "s.mf"


@pytest.fixture
def no_threads(monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)


def cyclic(container):
    container.append(container) if isinstance(container, list) else container.update(again=container)
    return container


def nested(depth):
    value = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("sample", [cyclic([1]), cyclic({"a": 1}), nested(3000)], ids=["list", "dict", "deep"])
def test_a_sample_that_contains_itself(path, sample):
    with pytest.raises(SchemaError, match="that contains itself, or is nested hundreds of levels deep; expected"):
        memfeed.cache([sample] * 3, path, progress=False)


@pytest.mark.skipif(not hasattr(torch, "int4"), reason="this torch has no int4")
def test_a_dtype_that_torch_cannot_copy(path):
    with pytest.raises(SchemaError, match=r"found a tensor of torch.int4, .*view\(torch.uint8\)"):
        memfeed.cache([torch.empty(4, dtype=torch.int4)] * 3, path, progress=False)


def test_nan_in_a_list_is_not_random(path):
    class Fresh(Ones):
        def __getitem__(self, i):
            return [float(i), *(float("nan") for _ in range(100))]

    store = memfeed.cache(Fresh(), path, progress=False)
    memfeed.cache(Fresh(), path, progress=False)
    assert store[7][0] == 7.0


def test_file_descriptors_run_out(path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    in_use = set(map(int, os.listdir("/dev/fd")))
    free = [number for number in range(10_000) if number not in in_use]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (free[24], hard))
        with pytest.raises(BuildError, match=r"could not be started \(Too many open files\).*workers=0"):
            memfeed.cache(Ones(), path, workers=60, progress=False)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(memfeed.cache(Ones(), path, progress=False)) == 200


def test_threads_run_out(path, no_threads):
    with pytest.raises(BuildError, match="found that the system gives no more threads"):
        memfeed.cache(Ones(), path, progress=False)


def test_a_loader_needs_no_threads(monkeypatch, path):
    store = memfeed.cache(Ones(), path, progress=False)

    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr("memfeed.loading.epoch.PrefetchPolicy.threaded", True, raising=False)
    loader = memfeed.Loader(store, 10, shuffle=True, prefetch_factor=2)
    assert sorted(torch.cat(list(loader))[:, 0].tolist()) == list(range(200))


@pytest.mark.parametrize("workers", [0, 2])
def test_no_room_in_dev_shm_is_needed(path, workers, monkeypatch):
    def full(*arguments, **settings):
        raise OSError(errno.ENOSPC, "No space left on device")

    def full_for_torch(tensor):
        raise RuntimeError("unable to allocate shared memory(shm): No space left on device (28)")

    monkeypatch.setattr(multiprocessing.synchronize.SemLock, "__init__", full)
    monkeypatch.setattr(torch.Tensor, "share_memory_", full_for_torch)
    store = memfeed.cache(Ones(), path, workers=workers, progress=False)
    loader = memfeed.Loader(store, 10, shuffle=True)
    assert sorted(torch.cat(list(loader))[:, 0].tolist()) == list(range(200))


def test_forked_processes_share_a_number_where_dev_shm_is_full(monkeypatch):
    def full(tensor):
        raise RuntimeError("unable to allocate shared memory(shm): No space left on device (28)")

    monkeypatch.setattr(torch.Tensor, "share_memory_", full)
    number = shared_number(7)
    assert int(number) == 7
    if pid := os.fork():
        os.waitpid(pid, 0)
    else:
        number.fill_(8)
        os._exit(0)
    assert int(number) == 8


@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_a_device_that_is_not_there(path, device):
    if getattr(torch, device).is_available():
        pytest.skip(f"this machine has {device}")
    store = memfeed.cache(Ones(), path, progress=False)
    with pytest.raises(LoaderError, match=f"found device {device}, which this machine or this build"):
        memfeed.Loader(store, 10, device=device)


def test_a_batch_size_beyond_numpy(path):
    store = memfeed.cache(Ones(), path, progress=False)
    with pytest.raises(LoaderError, match=r"found batch_size=9223372036854775808; expected at most"):
        memfeed.Loader(store, 2**63)
