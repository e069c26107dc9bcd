"""placement="sharded" with ranks that are given; test_sharded_ranks.py has processes."""

import gc
import weakref

import numpy as np
import pytest
import torch
from torch.utils.data import SequentialSampler

import memfeed
import slow_device
from memfeed import Blocks, Loader
from memfeed.errors import FieldError, LoaderError
from memfeed.loading import epoch_reader
from memfeed.store.columns import RowSubsetColumn
from support import Made

N = 403  # neither 2, 3 nor 4 ranks divide it
pytestmark = pytest.mark.filterwarnings("ignore:found .* are repeated at the end:UserWarning")
LAST = [{}, {"drop_last": True}, {"last": "pad"}, {"last": "uneven"}]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    samples = [{"image": torch.full((3, 2), i, dtype=torch.int32), "text": "x" * (i % 5)} for i in range(N)]
    return memfeed.cache(Made(samples), tmp_path_factory.mktemp("sharded") / "a.mf", progress=False)


def loaders(source, world_size, batch_size=8, **options):
    options = {"placement": "sharded", "shuffle": True, "seed": 3, "return_rows": True, **options}
    return [Loader(source, batch_size, ranks=(rank, world_size), **options) for rank in range(world_size)]


def rows_of(batches):
    """The rows of each batch that count, after their contents were compared."""
    found = []
    for batch in batches:
        assert batch["image"][:, 0, 0].tolist() == batch["rows"].tolist()
        assert [len(text) for text in batch["text"]] == [row % 5 for row in batch["rows"].tolist()]
        valid = batch.get("valid")
        found.append((batch["rows"] if valid is None else batch["rows"][valid]).tolist())
    return found


def flat(batches):
    return [row for batch in batches for row in batch]


@pytest.mark.parametrize("last", LAST, ids=str)
@pytest.mark.parametrize("shuffle", [True, Blocks(), False])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_row_comes_once_over_all_ranks_and_each_keeps_its_piece(store, world_size, shuffle, last):
    ranks = loaders(store, world_size, shuffle=shuffle, **last)
    for _ in range(2):
        read = [rows_of(loader) for loader in ranks]
        stride = 8 * world_size
        if "drop_last" in last:
            assert len({*flat(map(flat, read))}) == len(flat(map(flat, read))) == N - N % stride
        else:
            repeated = 0 if last else -N % world_size
            assert {*flat(map(flat, read))} == {*range(N)}
            assert len(flat(map(flat, read))) == N + repeated
        if "uneven" not in last:
            assert {len(batches) for batches in read} == {len(ranks[0])}
        for loader in ranks:
            kept = loader._epochs.reader.plan.placement.columns[0]
            assert isinstance(kept, RowSubsetColumn)
            assert kept.parts[0].row_count <= N // world_size + 1 + 8
            assert loader.stats()["columns"] == {"image": "device", "text": "mapped"}
            assert loader.stats()["placement"]["image"] == "this rank's piece"


def test_the_pieces_move_on_between_epochs(store):
    one = loaders(store, 2)[0]
    first, second = ({*flat(rows_of(one))} for _ in range(2))
    assert 0.3 * N / 2 < len(first & second) < 0.7 * N / 2
    unshuffled = loaders(store, 2, shuffle=False)[0]
    kept = [unshuffled._epochs.reader.plan for _ in range(2) if list(unshuffled)]
    assert kept[0] is kept[1], "rows that stay are not loaded again"


def test_one_rank_is_as_placement_device(store):
    (one,) = loaders(store, 1)
    device = Loader(store, 8, shuffle=True, seed=3, placement="device", return_rows=True)
    for _ in range(2):
        assert rows_of(one) == rows_of(device)
    assert one.stats()["columns"] == device.stats()["columns"]


def test_the_rows_of_another_epoch_are_freed_before_the_next_are_loaded(store, monkeypatch):
    loader, alive = loaders(store, 2)[0], []
    list(loader)
    place = memfeed.loading.placement.place
    before = weakref.ref(loader._epochs.reader.plan.placement.columns[0].parts[0].data)

    def placing(*arguments):
        gc.collect()
        alive.append(before() is not None)
        return place(*arguments)

    monkeypatch.setattr("memfeed.loading.plan.place", placing)
    list(loader)
    assert alive == [False]


@pytest.mark.parametrize("shuffle", [True, Blocks(), False])
@pytest.mark.parametrize("last", [{}, {"last": "uneven"}], ids=str)
def test_a_state_resumes_exactly(store, shuffle, last):
    options = {"shuffle": shuffle, **last}
    for rank in range(3):
        loader, other = loaders(store, 3, **options)[rank], loaders(store, 3, **options)[rank]
        loader.set_epoch(4)
        batches = iter(loader)
        seen = [next(batches) for _ in range(11)]
        assert len(rows_of(seen)) == 11
        state = loader.state_dict()
        assert (state["epoch"], state["row"], state["pieces"]) == (4, 11 * 24, "3x8")
        other.load_state_dict(state)
        assert rows_of(other) == rows_of(batches)
        assert rows_of(other) == rows_of(loader), "the epoch after it"


@pytest.mark.parametrize("shuffle", [True, Blocks(), False])
@pytest.mark.parametrize("ranks", [(2, 3), (4, 1), (1, 4), (3, 2)])
def test_other_ranks_go_on_in_the_middle_of_an_epoch(store, ranks, shuffle):
    before, after = (loaders(store, count, shuffle=shuffle, last="uneven") for count in ranks)
    seen, states = [], []
    for loader in before:
        loader.set_epoch(1)
        batches = iter(loader)
        seen += flat(rows_of(next(batches) for _ in range(5)))
        states.append(loader.state_dict())
    assert states.count(states[0]) == len(states)
    for loader in after:
        loader.load_state_dict(states[0])
        rest = iter(loader)
        seen += flat(rows_of(next(rest) for _ in range(5)))
        states.append(loader.state_dict())
    assert states[-1]["pieces"] == f"{ranks[0]}x8", "the epoch stays as it was cut"
    for loader in loaders(store, 2, batch_size=5, shuffle=shuffle, last="uneven"):
        loader.load_state_dict(states[-1])
        seen += flat(rows_of(loader))
        assert len(flat(rows_of(loader))) in (N // 2, N // 2 + 1), "the next epoch is cut anew"
    assert sorted(seen) == [*range(N)]


def test_skip_and_rewind(store):
    loader = loaders(store, 3)[1]
    whole = rows_of(loader)
    loader.set_epoch(0)
    batches = iter(loader)
    assert rows_of([next(batches)]) == whole[:1]
    loader.skip(4)
    assert rows_of([next(batches)]) == whole[5:6]
    loader.rewind(6)
    assert rows_of(batches) == whole
    loader.set_epoch(0)
    loader.skip(12)
    assert rows_of(loader) == whole[12:]


def test_a_rewind_behind_the_place_where_other_ranks_went_on(store):
    (first, _), (three, *_) = loaders(store, 2), loaders(store, 3)
    batches = iter(first)
    for _ in range(8):
        next(batches)
    three.load_state_dict(first.state_dict())
    rest = iter(three)
    one = rows_of([next(rest)])
    three.rewind(4)
    again = rows_of(rest)
    assert again[3] == one[0]
    assert len(again) == -(-(N - 8 * 16 + 72) // 24)


def test_views_windows_and_joined_stores(store):
    view = store.subset([*range(0, N, 2), 0, 2])
    read = [flat(batch["rows"].tolist() for batch in one) for one in loaders(view, 3, last="uneven")]
    assert sorted(flat(read)) == [*range(len(view))]
    joined = loaders([store, store], 2, last="uneven")
    images = [batch["image"][:, 0, 0].tolist() for one in joined for batch in one]
    assert sorted(flat(images)) == sorted([*range(N)] * 2)
    columns = {"frame": torch.arange(300), "episode": torch.arange(300) // 30}
    memory = loaders(columns, 3, last="uneven")
    assert sorted(flat(batch["frame"].tolist() for one in memory for batch in one)) == [*range(300)]


def test_fewer_rows_than_ranks():
    ranks = loaders({"x": torch.arange(3)}, 5, last="uneven")
    read = [[batch["x"].tolist() for batch in one] for one in ranks]
    assert sorted(flat(map(flat, read))) == [0, 1, 2]
    again = [[batch["x"].tolist() for batch in one] for one in loaders({"x": torch.arange(3)}, 5)]
    assert {len(batches) for batches in again} == {1}


def test_some_fields_only(store):
    loader = loaders(store, 2, placement={"image": "sharded"})[0]
    assert rows_of(loader)
    assert loader.stats()["columns"] == {"image": "device", "text": "mapped"}


def test_the_sampler_gives_the_order_of_all_ranks(store):
    (one,) = loaders(store, 1)
    assert list(one.sampler) == flat(rows_of(loaders(store, 1)[0]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"placement": {"image": "sharded", "text": "sharded"}}, "expected a field whose rows have one shape"),
        ({"sampler": SequentialSampler(range(N)), "shuffle": False}, "leave the sampler out"),
        ({"dataset": lambda store: [(store, 0.5), (store, 0.5)]}, "weights"),
        ({"bucket_by": "text"}, "bucket_by"),
    ],
)
def test_what_cannot_be_sharded(store, tmp_path, options, message):
    source = options.get("dataset", lambda store: store)(store)
    if "bucket_by" in options:
        samples = [{"image": torch.zeros(2), "text": torch.arange(i % 3)} for i in range(9)]
        source = memfeed.cache(Made(samples), tmp_path / "b.mf", progress=False)
    given = {"placement": "sharded", "shuffle": True, "batch_size": 8, **options, "dataset": source}
    with pytest.raises((LoaderError, FieldError), match=message):
        Loader(**given)


def test_sharded_beside_other_places(store):
    both = {"a": torch.arange(4), "b": torch.arange(4)}
    with pytest.raises(LoaderError, match='expected "sharded" beside "mapped" only'):
        Loader(both, placement={"a": "sharded", "b": "device"})
    Loader(both, placement={"a": "sharded", "b": "mapped"})


def test_a_replaced_sampler_is_refused_where_the_epoch_begins(store):
    loader = loaders(store, 1)[0]
    loader.__dict__["_own_parts"] = (None, *loader._own_parts[1:])
    with pytest.raises(LoaderError, match="use_distributed_sampler=False"):
        next(iter(loader))


def test_too_little_memory(store, monkeypatch):
    monkeypatch.setattr("memfeed.system.machine.memory_limit", lambda: N * 24 // 2 - 300)
    with pytest.raises(LoaderError, match="found placement 'sharded' for field image, which needs"):
        next(iter(loaders(store, 2)[0]))
    assert rows_of(loaders(store, 3)[0]), "a third fits"


def test_a_state_of_another_kind_of_placement_or_of_no_pieces(store):
    loader = loaders(store, 2)[0]
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    with pytest.raises(LoaderError, match="expected a state of the same store"):
        Loader(store, 8, shuffle=True, seed=3, ranks=(0, 2)).load_state_dict(state)
    for pieces in ("", "2x", "0x8", 7, None):
        other = loaders(store, 2)[0]
        if pieces == "":
            continue
        with pytest.raises(LoaderError, match="found a state with pieces"):
            other.load_state_dict({**state, "pieces": pieces})


@pytest.mark.parametrize("threaded", [False, True])
def test_on_a_device_each_epoch_has_its_table_and_falls_back_for_good(store, monkeypatch, threaded):
    made = slow_device.SlowDevice()
    monkeypatch.setattr(epoch_reader, "streams_of", lambda device: made if device is not None else None)
    want = [rows_of(one) for one in loaders(store, 3)]
    loader = loaders(store, 3, device="cpu")[1]
    loader._epochs.policy.settled, loader._epochs.policy.threaded = True, threaded
    assert rows_of(loader) == want[1]
    assert len(loader._epochs.reader.plan.placement.tables[0]) <= N // 3 + 1 + 8
    made.fails_at = made.selects + 7
    with pytest.warns(UserWarning, match="memory ran out in epoch 1"):
        second = rows_of(loader)
    assert second == rows_of(resumed_at(loaders(store, 3)[1], 1))
    assert rows_of(loader) == rows_of(resumed_at(loaders(store, 3)[1], 2))
    assert loader.stats()["columns"]["image"] == "pinned"


def resumed_at(loader, epoch):
    loader.set_epoch(epoch)
    return loader


def test_ranks_hold_no_more_than_their_own_positions_of_a_global_batch():
    """The positions of all ranks at one step would be 2^26 numbers."""
    seen = []

    class Order:
        n = 1 << 40

        def __call__(self, start, stop):
            seen.append(stop - start)
            return np.arange(start, stop)

    from memfeed.loading.gather_tasks import tasks_of_order
    from memfeed.order.pieces import RankShards

    task = next(tasks_of_order(Order(), RankShards(1 << 40, 16384, 5, 4096), 0, None, 2, repeats=False))
    assert task.ids[:2].tolist() == [5 * 16384, 5 * 16384 + 1]
    assert max(seen) == 16384
