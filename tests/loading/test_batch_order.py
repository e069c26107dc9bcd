"""Batches by token budget and of like lengths: every row once, on any number of ranks, also after a resume."""

import json
import pickle
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import memfeed
from memfeed import Blocks, Loader, Tokens
from memfeed.errors import FieldError, LoaderError
from memfeed.order import buckets
from support import Made, equal

GENERATOR = torch.Generator().manual_seed(0)
LENGTHS = torch.randint(0, 40, (230,), generator=GENERATOR).tolist()
N, MOST = len(LENGTHS), max(LENGTHS)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    samples = [{"tokens": torch.arange(n) + 100 * i, "row": i} for i, n in enumerate(LENGTHS)]
    return memfeed.cache(Made(samples), tmp_path_factory.mktemp("lengths") / "a.mf", progress=False)


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch):
    monkeypatch.setattr("memfeed.loading.index_samplers.WINDOW_BATCHES", 4)  # several windows in a small store


BUDGETS = st.integers(MOST, 300)
PAD = {"pad": {"tokens": -1}}


def rows(batches):
    return [batch["row"].tolist() for batch in batches]


@settings(max_examples=30)
@given(BUDGETS, st.sampled_from([False, True, Blocks(8)]), st.integers(0, 3), st.booleans(), st.booleans())
def test_no_batch_has_more_tokens_than_the_budget(store, budget, shuffle, epoch, threaded, drop_last):
    loader = Loader(store, bucket_by=Tokens(budget), shuffle=shuffle, seed=1, drop_last=drop_last, **PAD)
    loader._epochs.policy.settled, loader._epochs.policy.threaded = True, threaded
    loader.set_epoch(epoch)
    expected = len(loader)
    seen = []
    for batch in loader:
        assert batch["tokens"].numel() <= budget
        assert batch["tokens"].shape[1] == max(LENGTHS[row] for row in batch["row"])
        for row, tokens, mask in zip(batch["row"].tolist(), batch["tokens"], batch["tokens_mask"], strict=True):
            assert tokens[mask].tolist() == list(range(100 * row, 100 * row + LENGTHS[row]))
        seen.append(batch["row"].tolist())
    assert len(seen) == expected
    assert sorted(sum(seen, [])) == list(range(N))
    loader.set_epoch(epoch)
    assert rows(loader) == seen
    loader.set_epoch(epoch + 1)
    assert (rows(loader) == seen) == (shuffle is False)


def test_padding_is_little_and_every_epoch_has_as_many_batches(store):
    loader = Loader(store, bucket_by=Tokens(200), shuffle=True, seed=0, **PAD)
    padded = sum(batch["tokens"].numel() for batch in loader)
    plain = sum(batch["tokens"].numel() for batch in Loader(store, 10, shuffle=True, seed=0, **PAD))
    assert padded - sum(LENGTHS) < 0.6 * (plain - sum(LENGTHS))
    for seed in range(4):  # trainers and schedules count the batches once
        other = Loader(store, bucket_by=Tokens(200), shuffle=True, seed=seed)
        assert len(loader) == len(other) == len(list(other)) == len(list(other))


@pytest.mark.parametrize("drop_last", [False, True])
def test_batches_of_like_length(store, drop_last):
    loader = Loader(store, 16, bucket_by="tokens", shuffle=True, seed=0, drop_last=drop_last, **PAD)
    found = list(loader)
    assert len(loader) == len(found) == (N // 16 if drop_last else -(-N // 16))
    assert {len(batch["row"]) for batch in found} == ({16} if drop_last else {16, N % 16})
    waste = sum(int((~batch["tokens_mask"]).sum()) for batch in found)
    plain = Loader(store, 16, shuffle=True, seed=0, drop_last=drop_last, **PAD)
    assert waste < 0.6 * sum(int((~batch["tokens_mask"]).sum()) for batch in plain)
    assert drop_last or sorted(sum(rows(found), [])) == list(range(N))


def by_rank(store, world, **options):
    return [Loader(store, **options, ranks=(r, world)) for r in range(world)]


OPTIONS = [
    {"bucket_by": Tokens(97)},
    {"bucket_by": Tokens(60), "last": "uneven"},
    {"batch_size": 7, "bucket_by": "tokens"},
]


@settings(max_examples=40)
@given(st.sampled_from(OPTIONS), st.integers(1, 5), st.booleans(), st.booleans())
def test_ranks_get_as_many_batches_and_every_row_once(store, options, world, drop_last, pad_last):
    last = {"drop_last": True} if drop_last else {"last": "pad"} if pad_last else {}
    last = {} if "last" in options else last
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        options = {**options, **last, "shuffle": True, "seed": 4}
        found = [list(loader) for loader in by_rank(store, world, **options)]
    alone = rows(Loader(store, **options))
    lengths = [len(loader) for loader in by_rank(store, world, **options)]
    assert lengths == [len(one) for one in found]
    assert max(lengths) - min(lengths) <= (options.get("last") == "uneven")
    steps = [[one[step] for one in found if step < len(one)] for step in range(max(lengths))]
    together = [batch for step in steps for batch in step]
    if options.get("last") == "pad":
        assert all(bool(batch["valid"].all()) == bool(batch["valid"].any()) for batch in together)
        together = [batch for batch in together if bool(batch["valid"].any())]
    elif not drop_last and "last" not in options:
        extra = len(together) - len(alone)
        assert 0 <= extra < world
        assert rows(together)[len(alone) :] == (alone * world)[:extra], "the first ones again"
        together = together[: len(alone)]
    if options.get("drop_last"):
        assert rows(together) == alone[: len(alone) // world * world]
    else:
        assert rows(together) == alone


@settings(max_examples=60)
@given(
    st.sampled_from(OPTIONS), st.sampled_from([True, False]), st.integers(1, 3), st.integers(1, 3), st.integers(0, 40)
)
def test_a_resume_at_each_step_on_any_number_of_ranks(store, options, shuffle, world, other_world, steps):
    options = {**options, "shuffle": shuffle, "seed": 2, "last": "uneven"}
    alone = Loader(store, **options)
    alone.set_epoch(3)
    expected = rows(alone)
    first = by_rank(store, world, **options)
    for loader in first:
        loader.set_epoch(3)
    running = [iter(loader) for loader in first]
    steps = min(steps, len(expected) // world)
    seen = [next(one)["row"].tolist() for _ in range(steps) for one in running]
    states = [json.loads(json.dumps(loader.state_dict())) for loader in first]
    assert all(state == states[0] for state in states)
    second = by_rank(store, other_world, **options)
    for loader in second:
        loader.load_state_dict(states[0])
    left = [rows(loader) for loader in second]
    most = max(map(len, left))
    assert seen + [one[at] for at in range(most) for one in left if at < len(one)] == expected


def test_states_after_the_end_of_another_budget_and_moves(store):
    options = {"bucket_by": Tokens(80), "shuffle": True, "seed": 0}
    loader = Loader(store, **options)
    first, second = rows(loader), rows(loader)
    state = loader.state_dict()
    assert (state["epoch"], state["row"]) == (2, 0)
    loader.set_epoch(0)
    running = iter(loader)
    for _ in first:
        next(running)
    ended = Loader(store, **options)
    ended.load_state_dict(loader.state_dict())
    assert rows(ended) == []
    assert rows(ended) == second
    for other in ({"bucket_by": Tokens(81)}, {"bucket_by": "tokens", "batch_size": 4}, {"batch_size": 4}):
        with pytest.raises(LoaderError, match="found a state with order"):
            Loader(store, shuffle=True, seed=0, **other).load_state_dict(state)
    moved, seen = Loader(store, **options), []
    for batch in moved:
        seen.append(batch["row"].tolist())
        if len(seen) == 2:
            moved.skip(3)
        if len(seen) == 4:
            moved.rewind(5)
    assert seen == first[:2] + first[5:7] + first[2:]
    with pytest.raises(LoaderError, match="batches left in epoch"):
        moved.skip(len(moved) + 1)


def test_len_does_not_settle_the_seed(store):
    torch.manual_seed(5)
    late = Loader(store, bucket_by=Tokens(70), shuffle=True)
    len(late)
    torch.manual_seed(3)
    found = rows(late)
    torch.manual_seed(3)
    assert rows(Loader(store, bucket_by=Tokens(70), shuffle=True)) == found
    drawn = Loader(store, bucket_by=Tokens(70), shuffle=True, generator=torch.Generator().manual_seed(1))
    assert len(drawn) == len(list(drawn))
    other = Loader(store, bucket_by=Tokens(70), shuffle=True)
    other.load_state_dict(drawn.state_dict())
    assert rows(other) == rows(drawn)


def test_jagged_batches_views_and_pickles(store):
    part = store.subset(list(range(0, N, 3)))
    loader = Loader(part, bucket_by=Tokens(90), shuffle=True, seed=0, return_rows=True)
    found = list(pickle.loads(pickle.dumps(loader)))
    assert all(batch["tokens"].is_nested for batch in found)
    assert sorted(sum(rows(found), [])) == list(range(0, N, 3))
    assert all((batch["rows"] * 3 == batch["row"]).all() for batch in found)
    assert rows(loader) == rows(found)
    numpy = next(iter(Loader(part, bucket_by=Tokens(90), as_="numpy", device="cpu", pad={"tokens": 0})))
    assert numpy["tokens"].size <= 90


def test_several_stores_by_weight(store):
    loader = Loader([(store, 0.25), (store, 0.75)], 20, bucket_by="tokens", shuffle=True, seed=0, **PAD)
    found = list(loader)
    assert sum(len(batch["row"]) for batch in found) == 2 * N
    assert len(found) == len(loader) == 2 * N // 20
    with pytest.raises(LoaderError, match="expected the name of a field as bucket_by, and batch_size="):
        Loader([(store, 0.25), (store, 0.75)], bucket_by=Tokens(120))


def test_a_dataloader_of_the_parts_reads_the_same_batches(store):
    loader = Loader(store, bucket_by=Tokens(90), shuffle=True, seed=0, **PAD)
    parts = DataLoader(loader.dataset, batch_sampler=loader.batch_sampler, collate_fn=loader.collate_fn)
    expected = Loader(store, bucket_by=Tokens(90), shuffle=True, seed=0, **PAD)
    assert len(parts) == len(expected)
    for _ in range(2):
        assert all(equal(a, b) for a, b in zip(parts, expected, strict=True))
    anew = Loader(store, bucket_by=Tokens(90), batch_sampler=loader.batch_sampler, collate_fn=loader.collate_fn, **PAD)
    assert rows(anew) == rows(expected)


def test_a_batch_sampler_that_a_framework_wraps(store):
    class Wrapper:  # as that of Lightning, when it predicts
        def __init__(self, batch_sampler):
            self._batch_sampler, self.seen = batch_sampler, []

        def __iter__(self):
            for batch in self._batch_sampler:
                self.seen += batch
                yield batch

    loader = Loader(store, bucket_by=Tokens(90), **PAD)
    wrapper = Wrapper(loader.batch_sampler)
    anew = Loader(store, bucket_by=Tokens(90), batch_sampler=wrapper, collate_fn=loader.collate_fn, **PAD)
    assert rows(anew) == rows(Loader(store, bucket_by=Tokens(90)))
    assert sorted(wrapper.seen) == list(range(N))


def test_rows_longer_than_the_budget_are_named_at_the_start(store):
    loader = Loader(store, bucket_by=Tokens(30), shuffle=True)
    message = rf"found \d+ of 230 rows with more tokens in field tokens than Tokens\(30\) \(the longest has {MOST}\)"
    with pytest.raises(LoaderError, match=message) as error:
        next(iter(loader))
    assert len(str(error.value)) < 400
    with pytest.raises(LoaderError, match=r'store\.subset\(store\.lengths\("tokens"\) <= 30\)'):
        len(loader)
    short = store.subset(store.lengths("tokens") <= 30)
    assert sum(len(batch["row"]) for batch in Loader(short, bucket_by=Tokens(30))) == len(short)


def test_arguments_that_do_not_fit(store):
    for options, message in (
        ({"batch_size": 4, "bucket_by": Tokens(90)}, "expected one of them"),
        ({"bucket_by": Tokens(0)}, "an int of at least 1"),
        ({"bucket_by": Tokens(90), "sampler": [1, 2]}, "use_distributed_sampler=False"),
        ({"bucket_by": Tokens(90), "batch_sampler": [[1, 2]]}, "use_distributed_sampler=False"),
        ({"batch_size": None, "bucket_by": "tokens"}, "expected batches"),
        ({"bucket_by": Tokens}, r"or memfeed.Tokens\(8192\)"),
        ({"bucket_by": 8192}, r"found bucket_by=8192; expected the name of a field, or memfeed.Tokens\(8192\)"),
    ):
        with pytest.raises(LoaderError, match=message):
            Loader(store, **options)
    with pytest.raises(FieldError, match=r"bucket_by=.row., which is int64 \[\]"):
        Loader(store, 4, bucket_by="row")
    with pytest.raises(FieldError, match="found 0 fields of varying length"):
        Loader(store.select("row"), bucket_by=Tokens(90))
    with pytest.raises(ValueError, match="should not be set"):
        Loader(store, bucket_by=Tokens(90)).bucket_by = 4


def test_a_store_without_rows_gives_no_batch(store):
    loader = Loader(store.subset([]), bucket_by=Tokens(90), shuffle=True)
    assert (len(loader), list(loader)) == (0, [])


def test_ranks_are_told_about_batches_that_come_again(store):
    count = len(Loader(store, bucket_by=Tokens(90), shuffle=True, seed=0))
    loader = Loader(store, bucket_by=Tokens(90), shuffle=True, seed=0, ranks=(0, 2 * count + 1))
    with pytest.warns(UserWarning, match=r"found \d+ batches for \d+ ranks"):
        list(loader)


def test_windows_are_many_batches():
    assert buckets.WINDOW_BATCHES >= 64
