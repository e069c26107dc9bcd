"""Where columns live: what is chosen, and that batches are the same wherever that is."""

import gc
import json
import pickle
import threading
import time
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import memfeed
from memfeed import Blocks, Loader
from memfeed.errors import FieldError, LoaderError
from memfeed.loading import epoch_reader
from memfeed.loading.placement import RESERVE, SHARE, ColumnPlacement, FreeMemory, choose, fallback
from memfeed.transforms import RandomCrop
from slow_device import SlowDevice
from support import Made, equal, rich_sample, wait_until

GIB = 1 << 30


def where(sizes, room, asked=None):
    names = [f"f{n}" for n in range(len(sizes))]
    return [placed.where for placed in choose(names, sizes, asked or ["auto"] * len(sizes), room)]


class TestChoice:
    def test_all_go_to_a_device_that_holds_them_beside_the_model(self):
        assert where([10 * GIB, 1000], FreeMemory(70 * GIB, 80 * GIB, 100 * GIB)) == ["device", "device"]

    def test_the_largest_that_fits_goes_first_then_memory_then_the_map(self):
        room = FreeMemory(60 * GIB, 80 * GIB, 64 * GIB)  # 20 for columns; half of the memory is 32
        assert where([15 * GIB, 30 * GIB, 4 * GIB, 40 * GIB], room) == ["device", "pinned", "device", "mapped"]

    def test_the_processes_of_several_devices_share_the_memory(self):
        assert where([30 * GIB, 4 * GIB], FreeMemory(0, 80 * GIB, 64 * GIB, devices=8)) == ["mapped", "pinned"]

    def test_a_device_in_use_takes_nothing(self):
        assert where([1000], FreeMemory(39 * GIB, 80 * GIB, 64 * GIB)) == ["pinned"]

    def test_without_a_device_all_stay_mapped(self):
        assert where([10, 20], FreeMemory(None, 0, GIB)) == ["mapped", "mapped"]

    def test_rows_of_different_sizes_stay_mapped(self):
        placed = choose(["text"], [None], ["auto"], FreeMemory(70 * GIB, 80 * GIB, 100 * GIB))
        assert placed[0][:2] == ("mapped", "rows differ in size")

    def test_what_is_asked_for_goes_first_and_takes_room(self):
        room = FreeMemory(60 * GIB, 80 * GIB, 64 * GIB)
        assert where([15 * GIB, 50 * GIB], room, ["auto", "device"]) == ["pinned", "device"]
        assert where([15 * GIB, 1], room, ["mapped", "auto"]) == ["mapped", "device"]

    def test_what_does_not_fit_says_what_is_needed_free_and_chosen_instead(self):
        room = FreeMemory(10 * GIB, 80 * GIB, 64 * GIB)
        with pytest.raises(LoaderError) as caught:
            where([15 * GIB], room, ["device"])
        assert str(caught.value) == (
            "found placement 'device' for field f0, which needs 16.1 GB, with 10.7 GB free; expected it to fit: "
            'placement="auto" would choose "pinned"'
        )
        with pytest.raises(LoaderError, match="'pinned' for field f0, which needs 75.2 GB, with 68.7 GB free"):
            where([70 * GIB], room, ["pinned"])

    @given(
        sizes=st.lists(st.none() | st.integers(1, 200 * GIB), max_size=8),
        free=st.none() | st.integers(0, 80 * GIB),
        host=st.integers(0, 256 * GIB),
    )
    def test_auto_never_takes_more_than_it_says(self, sizes, free, host):
        room = FreeMemory(free, 80 * GIB, host)
        placed = choose([""] * len(sizes), sizes, ["auto"] * len(sizes), room)
        taken = {one: sum(s or 0 for s, p in zip(sizes, placed, strict=True) if p.where == one) for one in
                 ("device", "pinned", "mapped")}  # fmt: skip
        assert taken["device"] <= max((free or 0) - RESERVE * 80 * GIB, 0)
        assert taken["pinned"] <= SHARE * host * 2
        assert all(p.where == "mapped" for s, p in zip(sizes, placed, strict=True) if s is None)


def columns(n=97):
    g = torch.Generator().manual_seed(0)
    return {
        "image": torch.randint(0, 256, (n, 3, 6, 5), dtype=torch.uint8, generator=g),
        "half": torch.rand(n, 3, generator=g).to(torch.bfloat16),
        "label": torch.arange(n),
        "flag": torch.arange(n) % 3 == 0,
        "empty": torch.zeros(n, 0),
    }


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    at = tmp_path_factory.mktemp("placement")
    whole = memfeed.cache(columns(), at / "whole.mf", progress=False)
    rich = memfeed.cache(Made(rich_sample, 40), at / "rich.mf", progress=False)
    return {
        "store": whole,
        "rich": rich,
        "view": whole.subset([5, 3, 90, 3, 17, 41, 42, 43, 96, 0]),
        "run": whole.subset(range(20, 60)),
        "memory": columns(),
        "joined": [whole, whole.subset(range(10, 50))],
    }


SOURCES = ["store", "rich", "view", "run", "memory", "joined"]
OPTIONS: list[dict] = [{}, {"shuffle": True, "seed": 0, "last": "pad"}, {"shuffle": Blocks(), "seed": 0}]
PLACEMENTS = ["auto", "device", "pinned", "mapped", "mixed"]


class TestContract:
    """The same batches, whatever the placement and whatever the device."""

    @pytest.fixture(params=["cpu", "streams", "streams that see no memory of the CPU"])
    def device(self, request, monkeypatch):
        if request.param != "cpu":
            made = SlowDevice(sees_host="no memory" not in request.param)
            monkeypatch.setattr(
                "memfeed.loading.epoch_reader.streams_of", lambda device: made if device is not None else None
            )
        return torch.device("cpu")

    @pytest.fixture(params=PLACEMENTS)
    def placement(self, request):
        return request.param

    @pytest.mark.parametrize("source", SOURCES)
    @pytest.mark.parametrize("options", OPTIONS, ids=str)
    def test_the_same_batches(self, sources, source, options, device, placement):
        if placement == "mixed":
            placement = {"image": "device", "label": "pinned"}
        want = list(Loader(sources[source], 7, **options))
        for prefetch in (0, 2):
            loader = Loader(sources[source], 7, device=device, placement=placement, prefetch_factor=prefetch, **options)
            if prefetch:
                loader._epochs.policy.settled = loader._epochs.policy.threaded = True
            assert [equal(a, b) for a, b in zip(list(loader), want, strict=True)] == [True] * len(want)

    def test_resume_and_moves(self, sources, device, placement):
        if placement == "mixed":
            placement = {"half": "device"}
        options = {"batch_size": 5, "shuffle": True, "seed": 0}
        want = list(Loader(sources["store"], **options))
        options["device"] = device
        loader = Loader(sources["store"], placement=placement, **options)
        batches = iter(loader)
        for _ in range(4):
            next(batches)
        loader.skip(2)
        assert equal(next(batches), want[6])
        again = Loader(sources["store"], placement=placement, **options)
        again.load_state_dict(json.loads(json.dumps(loader.state_dict())))
        assert all(equal(a, b) for a, b in zip(again, want[7:], strict=True))
        assert equal(next(iter(pickle.loads(pickle.dumps(loader)))), want[7])

    def test_a_sampler_is_called_in_the_callers_thread(self, sources, device, placement):
        rows, threads = [3, 3, 90, 1, 0, 7, 7] * 30, set()

        class Sampler:
            def __iter__(self):
                for row in rows:
                    threads.add(threading.current_thread())
                    yield row

        placement = "device" if placement == "mixed" else placement
        loader = Loader(sources["store"], 4, sampler=Sampler(), placement=placement, device=device)
        found = []
        for batch in loader:
            time.sleep(0.002)  # a thread would be worth it
            found += batch["label"].tolist()
        assert (found, threads) == (rows, {threading.current_thread()})

    def test_stats_and_repr_say_where_and_why(self, sources, device, placement):
        if placement == "mixed":
            placement = {"image": "device"}
        loader = Loader(sources["rich"], 7, device=device, placement=placement)
        assert f"placement={placement!r})" in repr(loader)
        list(loader)
        said = loader.stats()
        json.dumps(said)
        wanted = "device" if isinstance(placement, dict) else placement
        if wanted != "auto":
            assert said["columns"]["image"] == wanted
            assert said["placement"]["image"] == "asked for"
        assert (said["columns"]["text"], said["placement"]["text"]) == ("mapped", "rows differ in size")
        assert "placement=" in repr(loader)
        assert "auto" not in repr(loader)
        assert said["bytes"] > 40 * 60


def test_memory_is_the_callers_wherever_the_columns_are(sources):
    for placement in ("device", "pinned"):
        loader = Loader(sources["store"], 16, placement=placement)
        first = [batch["image"].fill_(0) for batch in loader]
        assert not torch.cat(first).any()
        assert torch.equal(torch.cat([batch["image"] for batch in loader]), columns()["image"])


def test_a_view_takes_memory_for_its_own_rows_only(sources, monkeypatch):
    made = SlowDevice()
    monkeypatch.setattr(epoch_reader, "streams_of", lambda device: made if device is not None else None)
    loader = Loader(sources["view"], 3, placement="device", device="cpu")
    list(loader)
    assert len(loader._epochs.reader.prepare().placement.tables[0]) == 9, "row 3 is there twice"


class TestOutOfMemory:
    @pytest.fixture
    def device(self, monkeypatch):
        made = SlowDevice()
        monkeypatch.setattr(
            "memfeed.loading.epoch_reader.streams_of", lambda device: made if device is not None else None
        )
        for most in ("COPY_BYTES", "PICK_BYTES"):
            monkeypatch.setattr(f"memfeed.loading.plan.{most}", 2000)  # two batches at a time
        return made

    @pytest.mark.parametrize("threaded", [False, True])
    def test_in_the_middle_the_columns_fall_back_once_with_a_warning(self, device, sources, threaded):
        want = list(Loader(sources["store"], 8, shuffle=True, seed=0))
        loader = Loader(sources["store"], 8, shuffle=True, seed=0, placement="device", device="cpu")
        loader._epochs.policy.settled, loader._epochs.policy.threaded = True, threaded
        device.fails_at = device.selects + 17
        with pytest.warns(
            UserWarning, match="memory ran out in epoch 0: the columns fell back to places that need less, now pinned: "
        ):
            found = list(loader)
        assert [equal(a, b) for a, b in zip(found, want, strict=True)] == [True] * len(want)
        assert loader.stats()["columns"]["image"] == "pinned"
        assert loader.stats()["placement"]["image"] == "out of memory as 'device'"
        device.fails_at = device.selects + 3
        with pytest.raises(torch.OutOfMemoryError):
            list(loader)

    def test_two_steps_where_page_locked_memory_does_not_fit(self, monkeypatch):
        placed = [
            ColumnPlacement("device", "asked for", 100),
            ColumnPlacement("device", "asked for", 300),
            ColumnPlacement("mapped", "", 5),
        ]
        monkeypatch.setattr("memfeed.system.machine.memory_limit", lambda: 400)
        assert [one.where for one in fallback(placed)] == ["pinned", "mapped", "mapped"]
        assert [one.where for one in fallback(fallback(placed))] == ["mapped", "mapped", "mapped"]
        assert fallback(fallback(fallback(placed))) is None

    def test_the_columns_are_gone_before_others_are_placed(self, device, sources, monkeypatch):
        loader = Loader(sources["store"], 8, shuffle=True, seed=0, placement="device", device="cpu")
        loader._epochs.policy.settled = loader._epochs.policy.threaded = True
        batches, alive = iter(loader), []
        loader._epochs.reader.prepare()
        place = memfeed.loading.placement.place

        def placing(*arguments):
            device.record_event().synchronize()  # what is queued there holds what it reads
            gc.collect()
            alive.append(table() is not None)
            return place(*arguments)

        table = weakref.ref(loader._epochs.reader.plan.placement.tables[0])
        monkeypatch.setattr("memfeed.loading.plan.place", placing)
        device.fails_at = device.selects + 10  # in the third crossing, while the first two are not used up
        with pytest.warns(UserWarning, match="memory ran out"):
            next(batches)
            wait_until(lambda: alive)
            assert len(list(batches)) == 12
        assert alive == [False]

    def test_while_columns_are_placed(self, device, sources, monkeypatch):
        def none_left(nbytes):
            raise RuntimeError("CUDA error: out of memory")

        monkeypatch.setattr(device, "allocate_page_locked", none_left)
        loader = Loader(sources["store"].select("image"), 8, placement="pinned", device="cpu")
        assert loader.stats()["placement"] == {"image": "no epoch has begun"}
        loader._epochs.reader.prepare()
        assert loader.stats()["columns"] == {"image": "mapped"}
        assert loader.stats()["placement"] == {"image": "out of memory as 'pinned'"}

    def test_other_errors_stay_what_they_are(self, device, sources, monkeypatch):
        def broken(table, index):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        monkeypatch.setattr(device, "select", broken)
        loader = Loader(sources["store"], 8, placement="device", device="cpu")
        with pytest.raises(RuntimeError, match="illegal memory access"):
            list(loader)


class TestBadInput:
    def test_a_word_that_is_no_place(self, sources):
        with pytest.raises(
            LoaderError, match='found placement=\'gpu\'; expected "auto", "device", "pinned", "mapped", "sharded" or'
        ):
            Loader(sources["store"], placement="gpu")

    def test_a_field_that_is_not_there(self, sources):
        with pytest.raises(FieldError, match="nope"):
            Loader(sources["store"], placement={"nope": "device"})

    def test_a_field_whose_rows_differ_in_size(self, sources):
        with pytest.raises(LoaderError, match="found placement 'device' for field boxes, which is .*leave this one"):
            Loader(sources["rich"], placement={"boxes": "device"})

    def test_more_than_there_is(self, sources, monkeypatch):
        monkeypatch.setattr(
            "memfeed.loading.epoch_reader.streams_of", lambda device: SlowDevice(free=1000, total=80 * GIB)
        )
        loader = Loader(sources["store"], 4, placement="device", device="cpu")
        with pytest.raises(
            LoaderError, match='field image, which needs 8.7 KB, with 1.0 KB free.*would choose "pinned"'
        ):
            next(iter(loader))

    def test_an_accelerator_without_streams(self, sources, monkeypatch):
        monkeypatch.setattr("torch.mps.is_available", lambda: True, raising=False)
        with pytest.raises(LoaderError, match="found placement='pinned' for mps"):
            Loader(sources["store"], device="mps", placement="pinned")


def test_transforms_follow(sources):
    crop = RandomCrop(4, on="image")
    want = list(Loader(sources["store"], 8, shuffle=True, seed=0, transform=crop))
    for placement in ("device", "pinned"):
        found = list(Loader(sources["store"], 8, shuffle=True, seed=0, transform=crop, placement=placement))
        assert all(equal(a, b) for a, b in zip(found, want, strict=True))
    assert np.all([batch["image"].shape[-1] == 4 for batch in want])


def test_every_stream_that_takes_a_batch_waits_for_it(sources, monkeypatch):
    made = SlowDevice()
    monkeypatch.setattr(epoch_reader, "streams_of", lambda device: made)
    batches = iter(Loader(sources["store"], 8, device="cpu", prefetch_factor=0))  # all of them cross together
    for made.stream in (1, 1, 2, 2, 1):
        next(batches)
    assert made.waiting_streams == [1, 2, 1]
