"""Loaders of windows: every row once, in every order, on every rank, after a resume, wherever the columns are."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import memfeed
from memfeed import Blocks, Loader
from memfeed.errors import LoaderError
from memfeed.loading import epoch_reader, sources
from memfeed.loading.readahead import ReadAhead
from slow_device import SlowDevice
from support import equal

LENGTHS = [5, 1, 12, 3, 30, 2, 17]
N = sum(LENGTHS)
OFFSETS = {"image": [-1, 0], "action": range(4)}


def made(path, first=0):
    generator = torch.Generator().manual_seed(first)
    data = {
        "image": torch.randint(0, 256, (N, 3, 6, 7), dtype=torch.uint8, generator=generator),
        "action": torch.arange(first, first + N).float()[:, None].expand(N, 2),
        "row": torch.arange(first, first + N),
        "episode": torch.from_numpy(np.repeat(np.arange(len(LENGTHS)), LENGTHS)),
    }
    return memfeed.cache(data, path, progress=False)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return made(tmp_path_factory.mktemp("windows") / "a.mf")


@pytest.fixture(scope="module")
def views(store):
    chosen = np.isin(np.repeat(np.arange(len(LENGTHS)), LENGTHS), [1, 2, 4])
    return {
        "padded": store.windows(OFFSETS, within="episode"),
        "complete": store.windows(OFFSETS, within="episode", complete=True),
        "subset": store.windows(OFFSETS, within="episode").subset(range(3, 40, 2)),
        "of a subset": store.subset(chosen).windows(OFFSETS, within="episode"),
        "one sequence": store.windows(OFFSETS, within=None),
    }


NAMES = st.sampled_from(["padded", "complete", "subset", "of a subset", "one sequence"])
SHUFFLES = st.sampled_from([False, True, Blocks()])


def together(batches):
    return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}


@settings(max_examples=40)
@given(NAMES, SHUFFLES, st.integers(1, 30), st.integers(1, 3), st.integers(0, 2))
def test_the_ranks_read_each_window_once(views, name, shuffle, batch_size, world_size, epoch):
    view = views[name]
    options = {"shuffle": shuffle, "seed": 3, "last": "uneven", "return_rows": True}
    seen = []
    for rank in range(world_size):
        loader = Loader(view, batch_size, ranks=(rank, world_size), **options)
        loader.set_epoch(epoch)
        for batch in loader:
            rows = batch.pop("rows")
            assert equal(batch, view[rows]), "the batch is the one of its rows"
            seen += rows.tolist()
    assert sorted(seen) == list(range(len(view)))


@settings(max_examples=25)
@given(NAMES, SHUFFLES, st.integers(1, 20), st.integers(0, 30), st.booleans())
def test_a_restored_loader_gives_the_windows_that_were_left(views, name, shuffle, batch_size, taken, pickled):
    loader = Loader(views[name], batch_size, shuffle=shuffle, seed=5)
    whole = list(loader)
    loader.set_epoch(0)
    running = iter(loader)
    for _ in range(min(taken, len(whole))):
        next(running)
    state = loader.state_dict()
    other = pickle.loads(pickle.dumps(loader)) if pickled else Loader(views[name], batch_size, shuffle=shuffle, seed=5)
    other.load_state_dict(state)
    left = whole[min(taken, len(whole)) :]
    if left:
        assert equal(list(other), left)
    assert equal(list(running), left)


def test_a_state_is_not_that_of_other_windows(store, views):
    state = Loader(views["padded"], 4).state_dict()
    others = store.windows({**OFFSETS, "action": range(5)}, within="episode"), store
    for other in others:
        with pytest.raises(LoaderError, match="store"):
            Loader(other, 4).load_state_dict(state)


def test_pad_last_and_return_rows(views):
    loader = Loader(views["padded"], 32, last="pad", return_rows=True)
    *_, last = loader
    assert last["valid"].sum() == N % 32
    assert last["image"].shape == (32, 2, 3, 6, 7)
    assert equal(last["action"], views["padded"][last["rows"]]["action"])


@pytest.mark.parametrize("as_", ["numpy"])
def test_arrays(views, as_):
    batch = next(iter(Loader(views["padded"], 4, as_=as_)))
    assert batch["image_mask"].dtype == bool
    assert batch["image"].shape == (4, 2, 3, 6, 7)


def test_a_sampler_and_single_samples(views):
    rows = [5, 5, 0, 40]
    batch = next(iter(Loader(views["padded"], 4, sampler=rows)))
    assert equal(batch, views["padded"][rows])
    one = next(iter(Loader(views["padded"], None)))
    assert equal({key: value for key, value in one.items() if key != "row"}, {
        key: torch.as_tensor(value) for key, value in views["padded"][0].items() if key != "row"})  # fmt: skip


@pytest.mark.parametrize("kind", ["padded", "of a subset"])
def test_several_stores(kind, store, views, tmp_path):
    second = made(tmp_path / "b.mf", first=1000)
    parts = [views[kind], second.windows(OFFSETS, within="episode")]
    loader = Loader(parts, 8, shuffle=True, seed=1, return_rows=True)
    found = together(list(loader))
    order = found["rows"].argsort()
    both = {key: torch.cat([part[:][key] for part in parts]) for key in parts[0][:]}
    assert equal({key: found[key][order] for key in both}, both)
    with pytest.raises(LoaderError, match="found windows of action at other offsets"):
        Loader([views[kind], second.windows({**OFFSETS, "action": range(1, 5)}, within="episode")], 8)


class TestPlacement:
    @pytest.fixture(params=["cpu", "streams"])
    def device(self, request, monkeypatch):
        if request.param == "streams":
            slow = SlowDevice()
            monkeypatch.setattr(epoch_reader, "streams_of", lambda device: slow if device is not None else None)
        return "cpu"

    @pytest.mark.parametrize("placement", ["auto", "device", "pinned", {"image": "device", "row": "pinned"}])
    @pytest.mark.parametrize("name", ["padded", "complete", "subset", "of a subset"])
    def test_the_same_batches(self, views, name, device, placement):
        plain = list(Loader(views[name], 7, shuffle=True, seed=2))
        loader = Loader(views[name], 7, shuffle=True, seed=2, device=device, placement=placement)
        assert equal(list(loader), plain)
        stats = loader.stats()
        asked = placement["image"] if isinstance(placement, dict) else placement
        if asked != "auto":
            assert stats["columns"]["image"] == asked
        assert stats["placement"].get("image_mask", "made of row numbers") == "made of row numbers"

    def test_each_row_is_placed_once(self, views, device):
        loader = Loader(views["subset"], 7, device=device, placement="device")
        list(loader)
        placement = loader._epochs.reader.prepare().placement
        at = views["subset"].schema.field_index("image")
        # rows 3 to 39 are in the first five episodes
        assert placement.placements[at].nbytes == sum(LENGTHS[:5]) * 3 * 6 * 7
        if placement.tables:
            assert len(placement.tables[at]) == sum(LENGTHS[:5])


def test_the_rows_of_a_window_are_announced(views, store):
    view = views["complete"].select("image", "action")
    reader = ReadAhead(view._view.columns, order_covers=False)
    ids = np.array([9, 10, 11])
    image, action = reader._columns
    assert image.within(ids).tolist() == [8, 9, 10, 11]
    assert action.within(ids).tolist() == [9, 10, 11, 12, 13, 14]
    assert reader.announce(ids) == 4 * 3 * 6 * 7 + 6 * 2 * 4
    assert reader.nbytes == store.select("image", "action").nbytes
    reader.drop(ids, [(0, 8)])  # keeps what other windows read
    assert torch.equal(view[:3]["image"][:, 1], store.column("image")[view._view.base_rows(np.arange(3))])


def test_the_rows_of_windows_in_several_stores_are_announced(store):
    parts = [store.windows({"action": [0, 1]}, within=one).select("action") for one in ("episode", None)]
    view = sources.join(parts)
    first, second = ReadAhead(view._view.columns, order_covers=False)._columns
    ids = np.array([3, len(store) + 5])
    assert [part.within(ids).tolist() for part in (first, second)] == [[3, 4], [5, 6]]


def test_cold_rows_are_the_same(views, monkeypatch):
    plain = list(Loader(views["padded"], 7, shuffle=True, seed=2))
    monkeypatch.setattr(ReadAhead, "begin", lambda self, ids: (self._plan(), True)[1])
    monkeypatch.setattr(ReadAhead, "has_arrived", lambda self, ids: True)
    loader = Loader(views["padded"], 7, shuffle=True, seed=2)
    assert equal(list(loader), plain)
    assert loader.stats()["plan"]["read_ahead"] == "on"
