"""The loader on a simulated device: each race is found when its guard is taken away, and what an epoch costs."""

import gc
import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import memfeed.transfer.page_locked as page_locked
from memfeed import Loader, to_device
from memfeed.errors import LoaderError
from memfeed.transfer.streams import Streams
from memfeed.transfer.transfer import StagingBuffer
from memfeed.transforms import ColorJitter, Compose, Normalize, RandomCrop, RandomHorizontalFlip, RandomRotation
from simulated_cuda import simulated
from support import wait_until

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there: tests/cuda runs on it"),
    pytest.mark.skipif(
        not hasattr(torch._C, "_ensureCUDADeviceGuardSet"), reason="this torch cannot have tensors on a simulated GPU"
    ),
]
SCHEDULES = [None, *range(3)]
BATCH = 8


@pytest.fixture(autouse=True)
def _one_batch_a_copy(monkeypatch):
    for most in ("COPY_BYTES", "PICK_BYTES"):
        monkeypatch.setattr(f"memfeed.loading.plan.{most}", 1)


def images(n=160, side=16):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (n, 3, side, side), dtype=torch.uint8, generator=generator), torch.arange(n)


DATA = images()
BATCH_BYTES = BATCH * 3 * 16 * 16 + 512


def sums(batch):
    return torch.stack([part.sum(dtype=torch.int64) for part in batch])


WANTED = torch.stack([sums(batch) for batch in Loader(DATA, BATCH, shuffle=True, seed=0)])


def finds_nothing(seed, placement):
    """Return True if an epoch on the device is right: every batch as on the CPU, no memory read after its end."""
    try:
        with simulated(seed) as machine:
            loader = Loader(DATA, BATCH, shuffle=True, seed=0, device="cuda", placement=placement, prefetch_factor=3)
            found = []
            for batch in loader:
                found.append(sums(batch))
                del batch
            is_right = torch.equal(torch.stack(found).cpu(), WANTED)
            del loader, found
            dropped = Loader(DATA, BATCH, device="cuda", placement=placement)
            next(iter(dropped))
            del dropped
            gc.collect()
            assert_given_back(machine)
            torch.cuda.synchronize()
    except AssertionError as error:
        assert "after it was unlocked" in str(error)
        return False
    return is_right


def assert_given_back(machine):
    wait_until(lambda: not machine.registered)  # else page-locked memory is left


@pytest.mark.parametrize("placement", ["mapped", "pinned", "device"])
def test_epochs_are_right_under_every_schedule(placement):
    assert all(finds_nothing(seed, placement) for seed in SCHEDULES)


def without_record_stream(streams, event, tensors):
    torch.cuda.current_stream(streams.device).wait_event(event)


def without_wait_event(streams, event, tensors):
    for tensor in tensors:
        tensor.record_stream(torch.cuda.current_stream(streams.device))


def event_on_the_callers_stream(streams):
    return torch.cuda.default_stream(streams.device).record_event()


def begin_without_waiting(buffer):
    buffer._copied = None
    buffer._large.clear()
    buffer._small.clear()


def give_back_without_waiting(retired):
    torch.cuda.cudart().cudaHostUnregister(retired.address)  # the pages stay: to read them would end the process


def unlock_at_once(retired, pid):
    torch.cuda.cudart().cudaHostUnregister(retired.address)  # in the thread that drops the loader


MUTANTS = {
    "no record_stream": (Streams, "wait_before_use", without_record_stream, "mapped"),
    "no wait_event": (Streams, "wait_before_use", without_wait_event, "mapped"),
    "event on the wrong stream": (Streams, "record_event", event_on_the_callers_stream, "mapped"),
    "staging buffer not waited for": (StagingBuffer, "begin", begin_without_waiting, "mapped"),
    "unlocked without waiting, loader dropped in mid-epoch": (
        page_locked, "_give_back", give_back_without_waiting, "pinned"
    ),
    "unlocked at once by who drops the loader in mid-epoch": (page_locked, "_retire", unlock_at_once, "pinned"),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_each_mutant_is_killed(mutant, monkeypatch):
    owner, name, replacement, placement = MUTANTS[mutant]
    monkeypatch.setattr(owner, name, replacement)
    assert not all(finds_nothing(seed, placement) for seed in SCHEDULES)


class TestCosts:
    @pytest.mark.parametrize("placement", ["mapped", "pinned", "device"])
    def test_an_epoch_has_no_synchronisation_few_launches_and_bounded_memory(self, placement):
        prefetch = 2
        with simulated() as machine:
            gpu = machine.devices[0]
            loader = Loader(
                DATA, BATCH, shuffle=True, seed=0, device="cuda", placement=placement, prefetch_factor=prefetch
            )
            list(loader)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            machine.syncs.clear()
            machine.waits.clear()
            gpu.launches.clear()
            before = gpu.peak_reserved = gpu.reserved
            count = 0
            for batch in loader:
                count += 1
                torch.cuda._sleep(1)  # stays in the queue, as the work of a slow model
                del batch
            assert not machine.syncs
            assert {thread for thread, _ in machine.waits} <= {"memfeed"}, "only the loader's thread waits"
            assert sum(gpu.launches.values()) <= 3 * count, dict(gpu.launches)
            assert gpu.peak_reserved - before <= (prefetch + 6) * BATCH_BYTES
            del loader

    def test_a_caller_that_never_waits_takes_no_more_memory_with_each_step(self):
        with simulated() as machine:
            gpu = machine.devices[0]
            loader = Loader(DATA, BATCH, device="cuda", placement="mapped", prefetch_factor=1)
            reserved = []
            for _ in range(5):
                for batch in loader:
                    del batch
                reserved.append(gpu.reserved)
            assert len(set(reserved[1:])) == 1
            del loader

    def test_the_first_batch_locks_one_piece_a_region(self):
        with simulated() as machine:
            columns = {f"x{at}": torch.rand(64, 4) for at in range(50)} | {"image": torch.rand(64, 1000)}
            batches = iter(Loader(columns, 16, device="cuda", placement="mapped", prefetch_factor=0))
            next(batches)
            assert len(machine.registered) == 2
            assert machine.devices[0].launches["copy to the device"] == 2
            del batches

    def test_parameters_of_transforms_cross_without_synchronisation(self, monkeypatch):
        monkeypatch.setattr(
            "memfeed.transforms.backends.passes.gpu_kernel", lambda device: None
        )  # the path without Triton
        augment = Compose([
            RandomCrop(12, padding=2), RandomHorizontalFlip(), ColorJitter(0.2, 0.2, 0.2, 0.1), RandomRotation(20),
            Normalize([0.5] * 3, [0.2] * 3),
        ])  # fmt: skip
        with simulated() as machine:
            loader = Loader(images(40), BATCH, seed=0, transform=augment, device="cuda", placement="mapped")
            list(loader)
            assert not machine.syncs
            del loader


class TestDevices:
    def test_another_device_than_the_current_one_makes_no_context_there(self):
        for placement in ("mapped", "pinned", "device"):
            with simulated() as machine:
                loader = Loader(DATA, BATCH, device="cuda:1", placement=placement)
                for x, y in loader:
                    assert x.device == y.device == torch.device("cuda:1")
                del loader, x, y
                gc.collect()
                assert_given_back(machine)
                assert machine.contexts == {1}

    def test_calls_by_hand_make_no_context_on_another_device(self, monkeypatch):
        monkeypatch.setattr("memfeed.transforms.backends.passes.gpu_kernel", lambda device: None)
        augment = Compose(
            [RandomCrop(12, padding=2), ColorJitter(0.2), RandomRotation(20), Normalize([0.5] * 3, [1] * 3)]
        )
        with simulated() as machine:
            x, y, nothing = to_device((*DATA, torch.empty(0)), "cuda:1")
            assert augment(x[:8]).device == y.device == nothing.device == torch.device("cuda:1")
            assert machine.contexts == {1}

    @pytest.mark.parametrize("seed", SCHEDULES[:3])
    def test_one_process_with_a_loader_for_each_device(self, seed):
        with simulated(seed):
            loaders = [Loader(DATA, BATCH, shuffle=True, seed=0, device=f"cuda:{index}") for index in range(2)]
            found = [[], []]
            for batches in zip(*loaders, strict=True):
                for index, batch in enumerate(batches):
                    with torch.cuda.device(index):
                        found[index].append(sums(batch))
            assert all(torch.equal(torch.stack(one).cpu(), WANTED) for one in found)
            del loaders, batches, batch, found


class TestCaptures:
    def capture(self, is_broken=None):
        static = torch.zeros(4, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            static.add_(1)
            if is_broken is None:
                time.sleep(0.05)  # the loader's thread could break the capture meanwhile
            else:
                wait_until(is_broken)
        graph.replay()
        return static.tolist()

    def test_a_running_loader_breaks_a_capture_and_the_error_says_how_to_capture(self, monkeypatch):
        monkeypatch.setattr("memfeed.loading.plan.COPY_BYTES", 1)  # a copy for each batch: it runs for seconds
        with simulated() as machine, pytest.raises((LoaderError, RuntimeError)) as caught:
            data = images(4000)
            loader = Loader(data, 1, device="cuda", placement="mapped", prefetch_factor=10_000)
            batches = iter(loader)
            next(batches)
            with pytest.raises(RuntimeError, match="previous error during capture"):
                self.capture(lambda: machine.capture.broken_by)
            for _ in batches:
                pass
        assert "with loader.paused():" in str(caught.value)
        del batches, loader, caught

    def test_memory_that_is_locked_during_a_capture_is_the_error_of_the_capture(self, capfd):
        with simulated(), ThreadPoolExecutor(1) as thread:
            streams, found = Streams(torch.device("cuda")), []
            with pytest.raises(RuntimeError, match="previous error during capture"):
                self.capture(lambda: found or found.append(thread.submit(streams.allocate_staging, 4096).exception()))
            assert "capturing" in str(found[0])
            assert streams.allocate_staging(4096).is_pinned()
        assert "cannot page-lock" not in capfd.readouterr().err

    def test_a_paused_loader_breaks_none_and_goes_on_after_it(self):
        with simulated():
            data = images(300)
            loader = Loader(data, 1, device="cuda", placement="mapped", prefetch_factor=100)
            batches = iter(loader)
            count = len([next(batches)])
            with loader.paused():
                assert self.capture() == [1.0] * 4
            count += sum(1 for _ in batches)
            assert count == 300
            del batches, loader

    def test_page_locked_memory_may_be_dropped_within_a_capture(self):
        with simulated() as machine:
            loader = Loader(DATA, BATCH, device="cuda", placement="pinned")
            list(loader)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                torch.zeros(4, device="cuda")
                del loader
                gc.collect()
                assert_given_back(machine)


class TestPageLocking:
    def test_a_system_that_cannot_lock_uses_the_memory_of_torch_and_says_so_once(self, capsys):
        from memfeed.system.messages import say_once

        for pins in (True, False):
            say_once.cache_clear()
            with simulated(lock_error=801, pins=pins) as machine:
                loader = Loader(DATA, BATCH, shuffle=True, seed=0, device="cuda", placement="pinned")
                assert torch.equal(torch.stack([sums(batch) for batch in loader]).cpu(), WANTED)
                assert set(loader.stats()["columns"].values()) == {"memory"}
                assert bool(machine.pinned) == pins
                del loader
            said = capsys.readouterr().err
            assert said.count("cudaHostRegister") == 1
            assert ("torch's page-locked memory" in said) == pins

    def test_memory_that_cannot_be_mapped_is_memory_that_ran_out(self, monkeypatch):
        def no_memory(nbytes):
            if nbytes > 50_000:
                raise MemoryError("found no memory: Cannot allocate memory")
            return map_pages(nbytes)

        map_pages = page_locked.map_pages
        monkeypatch.setattr(page_locked, "map_pages", no_memory)
        with simulated():
            loader = Loader(DATA, BATCH, shuffle=True, seed=0, device="cuda", placement="pinned")
            assert torch.equal(torch.stack([sums(batch) for batch in loader]).cpu(), WANTED)
            assert loader.stats()["columns"] == {"0": "memory", "1": "pinned"}
            del loader

    def test_enomem_is_the_end_of_memory(self):
        assert page_locked.is_out_of_memory(OSError(12, "Cannot allocate memory"))
        assert not page_locked.is_out_of_memory(OSError(2, "No such file"))

    def test_more_than_the_address_space_is_a_memory_error(self):
        with pytest.raises(MemoryError, match="Cannot allocate memory"):
            page_locked.map_pages(1 << 60)

    def test_a_forked_child_does_not_unmap_what_lies_there_now(self):
        import ctypes
        import mmap

        with simulated():
            streams = Streams(torch.device("cuda"))
            locked = streams.allocate_page_locked(1 << 20)
            address = locked.data_ptr()
            pid = os.fork()
            if pid == 0:
                libc = ctypes.CDLL(None)
                libc.mmap.restype = ctypes.c_void_p
                arguments = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
                libc.mmap.argtypes = arguments
                fixed = 0x10
                flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed
                libc.mmap(address, 1 << 20, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
                ctypes.memset(address, 7, 1 << 20)  # other memory of the child, where the locked pages were
                del locked, streams
                gc.collect()
                os._exit(0 if ctypes.string_at(address + 4096, 1) == b"\x07" else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            del locked, streams


def test_to_drop_page_locked_memory_waits_for_nothing():
    with simulated() as machine:
        locked = Streams(torch.device("cuda")).allocate_page_locked(100)
        del locked
        assert_given_back(machine)
        assert not machine.syncs
        assert {thread for thread, _ in machine.waits} == {"memfeed page-locked memory"}


def test_memory_is_unlocked_also_when_to_wait_for_the_device_fails(monkeypatch):
    def fails(event):
        raise RuntimeError("CUDA error: device-side assert triggered")

    with simulated() as machine:
        streams = Streams(torch.device("cuda"))
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda.Event, "synchronize", fails)
            locked = streams.allocate_page_locked(100)
            del locked
            assert_given_back(machine)
        locked = streams.allocate_page_locked(100)  # the thread goes on
        del locked
        assert_given_back(machine)


def test_the_thread_that_gives_memory_back_leaves_captures_alone(monkeypatch):
    class Driver:
        def cuThreadExchangeStreamCaptureMode(self, mode):  # noqa: N802
            modes.append(mode._obj.value)

    class Queue:
        def get(self):
            raise EOFError

    modes = []
    with monkeypatch.context() as patch:
        patch.setattr(page_locked.ctypes, "CDLL", lambda name: Driver())
        patch.setattr(page_locked, "_retired", Queue())
        with pytest.raises(EOFError):
            page_locked._GivingBack().run()
    assert modes == [2]  # CU_STREAM_CAPTURE_MODE_RELAXED
