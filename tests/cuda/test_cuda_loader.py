"""Loaders on a GPU: the contract of placements, the races of docs/notes/streams.md, graphs, the end of memory."""

import contextlib
import gc
from functools import partial

import pytest
import torch
from tensordict import TensorDict
from torch.utils.data import Dataset, TensorDataset, default_collate, default_convert

import test_placement
from memfeed import Loader
from memfeed.errors import LoaderError, StaleStoreError
from memfeed.loading.sources import as_stores
from memfeed.store.store import with_parts
from memfeed.testing import TransferContract
from memfeed.transfer.streams import Streams
from memfeed.transfer.transfer import StreamTransfer
from memfeed.transforms import Compose, Normalize, RandomCrop, RandomHorizontalFlip
from test_placement import sources  # noqa: F401  # a fixture

SLEEP = 20_000_000  # cycles of the GPU: some 10 ms
PLACEMENTS = ["device", "pinned", "mapped"]


class TestPlacements(test_placement.TestContract):
    @pytest.fixture
    def device(self):
        return torch.device("cuda")


class TestTransfer(TransferContract):
    @pytest.fixture(params=[1, 3])
    def transfer(self, request):
        return StreamTransfer(Streams(torch.device("cuda")), {}, staging_buffers=request.param)


@pytest.fixture(autouse=True)
def _few_batches_at_a_time(monkeypatch):
    """Make an epoch consist of many transfers."""
    for most in ("COPY_BYTES", "PICK_BYTES"):
        monkeypatch.setattr(f"memfeed.loading.plan.{most}", 200_000)


def images(n=256, side=64):
    return torch.randint(0, 256, (n, 3, side, side), dtype=torch.uint8), torch.arange(n)


def sums(batch):
    return torch.stack([part.sum(dtype=torch.int64) for part in batch])


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("staging_buffers", [1, 3])
def test_a_slow_model_and_few_staging_buffers_see_every_batch_whole(placement, staging_buffers, monkeypatch):
    monkeypatch.setattr("memfeed.loading.plan.StreamTransfer", partial(StreamTransfer, staging_buffers=staging_buffers))
    data = images()
    want = torch.stack([sums(batch) for batch in Loader(data, 8, shuffle=True, seed=0)])
    loader = Loader(data, 8, shuffle=True, seed=0, device="cuda", placement=placement, prefetch_factor=4)
    found = []
    for batch in loader:
        torch.cuda._sleep(SLEEP)  # the batch is read long after next() has returned it, and after it was dropped
        found.append(sums(batch))
        del batch
    assert torch.equal(torch.stack(found).cpu(), want)


@pytest.mark.parametrize("rank", [0, 2])
def test_the_piece_of_the_next_epoch_does_not_overwrite_what_the_model_reads(rank):
    data = images(250, 16)
    options = {"shuffle": True, "seed": 0, "last": "uneven", "ranks": (rank, 3), "placement": "sharded"}
    want, loader = Loader(data, 8, **options), Loader(data, 8, **options, device="cuda")
    for _ in range(3):
        found = []
        for batch in loader:
            torch.cuda._sleep(SLEEP // 10)
            found.append(sums(batch))
            del batch
        assert torch.equal(torch.stack(found).cpu(), torch.stack([sums(batch) for batch in want]))
        assert loader.stats()["columns"] == {"0": "device", "1": "device"}
        assert len(loader._epochs.reader.plan.placement.tables[0]) == -(-(250 - rank) // 3)


def test_batches_on_another_stream_than_the_default():
    data, stream = images(), torch.cuda.Stream()
    want = torch.stack([sums(batch) for batch in Loader(data, 8)])
    with torch.cuda.stream(stream):
        found = []
        for batch in Loader(data, 8, device="cuda", placement="mapped"):
            torch.cuda._sleep(SLEEP // 10)
            found.append(sums(batch))
    stream.synchronize()
    assert torch.equal(torch.stack(found).cpu(), want)


def test_streams_in_turns():
    data, stream = images(), torch.cuda.Stream()
    want = torch.stack([sums(batch) for batch in Loader(data, 4)])
    found, batches = [], iter(Loader(data, 4, device="cuda", placement="mapped"))
    for step in range(len(want)):
        with torch.cuda.stream(stream if step % 2 else torch.cuda.default_stream()):
            batch = next(batches)
            torch.cuda._sleep(SLEEP // 10)
            found.append(sums(batch))
            del batch
    torch.cuda.synchronize()
    assert torch.equal(torch.stack(found).cpu(), want)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_batches_that_are_kept_stay_as_they_are(placement):
    data = images()
    held = list(Loader(data, 8, shuffle=True, seed=0, device="cuda", placement=placement))
    want = list(Loader(data, 8, shuffle=True, seed=0))
    for batch, other in zip(held, want, strict=True):
        assert all(torch.equal(a.cpu(), b) for a, b in zip(batch, other, strict=True))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_transforms_on_the_device_give_what_they_give_on_the_cpu(placement):
    data = images()
    augment = Compose([RandomCrop(56, padding=4), RandomHorizontalFlip(), Normalize([0.5] * 3, [0.2] * 3)])
    want = list(Loader(data, 16, shuffle=True, seed=0, transform=augment))
    found = list(Loader(data, 16, shuffle=True, seed=0, transform=augment, device="cuda", placement=placement))
    for (x, y), (a, b) in zip(found, want, strict=True):
        torch.testing.assert_close(x.cpu(), a, rtol=0, atol=1e-5)
        assert torch.equal(y.cpu(), b)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("batch_size", [8, None])
def test_a_collate_fn_gets_finished_samples_on_the_cpu_and_what_it_makes_is_moved(placement, batch_size):
    transform = Compose([RandomCrop(8), Normalize([0.5] * 3, [0.2] * 3)])
    store = with_parts(as_stores(images(20, 16))[0], transform=transform)
    devices = set()

    def collate(samples):
        devices.update(image.device.type for image, *_ in ([samples] if batch_size is None else samples))
        return default_convert(samples) if batch_size is None else default_collate(samples)

    for function in (collate, None):
        options = {"batch_size": batch_size, "shuffle": True, "seed": 3, "collate_fn": function}
        found = list(Loader(store, device="cuda", placement=placement, **options))
        assert {part.device.type for batch in found for part in batch} == {"cuda"}
        expected = [image for image, _ in Loader(store, **options)]
        assert all(torch.allclose(image.cpu(), e, atol=1e-5) for (image, _), e in zip(found, expected, strict=True))
    assert devices == {"cpu"}


def test_a_graph_is_fed_from_a_loader():
    data = images(64)
    static = torch.zeros(8, 3, 64, 64, dtype=torch.uint8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        static.sum(dtype=torch.int64)
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        total = static.sum(dtype=torch.int64)
    found = []
    for x, _ in Loader(data, 8, device="cuda"):
        static.copy_(x)
        graph.replay()
        found.append(total.clone())
    assert torch.stack(found).tolist() == [int(x.sum(dtype=torch.int64)) for x, _ in Loader(data, 8)]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_an_epoch_synchronises_nowhere(placement):
    loader = Loader(images(), 8, shuffle=True, seed=0, device="cuda", placement=placement)
    next(iter(loader))  # places the columns
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in loader:
            del batch
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_graph_is_captured_while_a_loader_is_paused():
    data = images(64)
    loader = Loader(data, 1, device="cuda", placement="mapped", prefetch_factor=20)
    batches, static, graph = iter(loader), torch.zeros(4, device="cuda"), torch.cuda.CUDAGraph()
    count = len([next(batches)])
    with loader.paused(), torch.cuda.graph(graph):
        static.add_(1)
    graph.replay()
    assert static.tolist() == [1] * 4
    assert count + sum(1 for _ in batches) == 64


def test_a_loader_that_is_dropped_gives_its_memory_back():
    data = images(512)
    before = torch.cuda.memory_allocated()
    for placement in PLACEMENTS:
        loader = Loader(data, 8, device="cuda", placement=placement)
        next(iter(loader))
        del loader
        gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < 1 << 20


def take_all(held):
    """Take the memory that is free on the device, in ever smaller parts."""
    for nbytes in (1 << 20, 1 << 16, 512):
        with contextlib.suppress(torch.cuda.OutOfMemoryError):
            while True:
                held.append(torch.empty(nbytes, dtype=torch.uint8, device="cuda"))


class TestMemory:
    @pytest.fixture(autouse=True)
    def _little_memory(self):
        torch.cuda.empty_cache()
        yield
        torch.cuda.set_per_process_memory_fraction(1.0)

    def test_the_columns_make_room_when_memory_runs_out_in_the_middle(self):
        data = images(1024)
        loader = Loader(data, 8, shuffle=True, seed=0, device="cuda", placement="device")
        want = [sums(batch) for batch in Loader(data, 8, shuffle=True, seed=0)]
        batches = iter(loader)
        found = [sums(next(batches)).cpu()]

        held = []

        def rest():
            with loader.paused():
                take_all(held)  # the loader's next turn must fail: nothing is free, and nothing below takes memory
            for batch in batches:
                held.append(batch)  # as a model that keeps memory
                found.append(sums([part.cpu() for part in batch]))

        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (8 << 20)) / total)
        with pytest.warns(UserWarning, match="memory ran out in epoch 0: the columns fell back to"):
            rest()
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
        assert loader.stats()["columns"]["0"] == "pinned"

    def test_a_forced_placement_that_does_not_fit(self):
        free, _ = torch.cuda.mem_get_info()
        row = torch.zeros(1, 1 << 20, dtype=torch.uint8)
        loader = Loader(row.expand(free // (1 << 20) + 64, -1), 8, device="cuda", placement="device")
        with pytest.raises(LoaderError, match="found placement 'device' for field .* would choose"):
            next(iter(loader))


class OnDevice(Dataset):
    """Samples whose images are on the device, and whose numbers are not."""

    def __init__(self):
        self.images, self.labels = images(40, 8)[0].cuda(), list(range(40))

    def __len__(self):
        return 40

    def __getitem__(self, i):
        return self.images[i], self.labels[i]


class TestDataOnTheDevice:
    def check(self, loader, images):
        for part, labels in loader:
            assert part.is_cuda
            assert labels.is_cuda
            assert torch.equal(part.cpu(), images.cpu()[labels.cpu()])

    def test_batches_of_such_samples_are_made_there(self, tmp_path, monkeypatch):
        dataset, said = OnDevice(), []
        monkeypatch.setattr("memfeed.loading.open_source.say_once", said.append)
        for _ in range(2):  # the store is filled, then finished
            loader = Loader(dataset, 8, shuffle=True, cache=tmp_path / "a.mf")
            self.check(loader, dataset.images)
            self.check(loader, dataset.images)
        assert any("OnDevice has tensors on cuda:0, so all tensors of a batch are put there" in line for line in said)
        assert not next(iter(Loader(dataset, 8, cache=tmp_path / "a.mf", device="cpu")))[0].is_cuda

    def test_a_changed_value_in_its_memory_is_noticed(self, tmp_path):
        dataset = OnDevice()
        loader = Loader(dataset, 8, cache=tmp_path / "a.mf")
        self.check(loader, dataset.images)
        dataset.images[30, 0, 0, 0] += 1
        with pytest.raises(StaleStoreError, match=r"dataset\.images has another content"):
            next(iter(loader))
        with pytest.raises(StaleStoreError, match="images"):
            next(iter(Loader(dataset, 8, cache=tmp_path / "a.mf")))

    @pytest.mark.parametrize("kind", [tuple, TensorDataset, TensorDict])
    def test_columns_there_are_read_there(self, kind):
        parts = images(40, 8)[0].cuda(), torch.arange(40).cuda()
        if kind is TensorDict:
            source = TensorDict({"0": parts[0], "1": parts[1]}, [40], device="cuda")
            loader = Loader(source, 8, shuffle=True)
            found = [(batch["0"], batch["1"]) for batch in loader]
        else:
            source = parts if kind is tuple else kind(*parts)
            loader = Loader(source, 8, shuffle=True)
            found = list(loader)
        self.check(found, parts[0])
        parts[0][3] += 1  # the loader has a copy
        with pytest.raises(StaleStoreError, match="0 was replaced or changed"):
            next(iter(loader))
