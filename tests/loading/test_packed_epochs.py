"""A loader over a packed store: other blocks in every epoch, the same for any number of ranks and after a resume."""

import json
import pickle
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Subset

import memfeed
from memfeed import Blocks, Loader, Tokens
from memfeed.errors import LoaderError
from memfeed.loading import readahead
from slow_device import SlowDevice
from support import Made

LENGTHS = [3, 0, 17, 5, 9, 1, 30, 2, 8, 8, 4, 21, 6, 0, 11]
TOKENS = [100 * i + t for i, n in enumerate(LENGTHS) for t in range(n)]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    samples = [{"input_ids": torch.arange(n) + 100 * i, "doc": i} for i, n in enumerate(LENGTHS)]
    return memfeed.cache(Made(samples), tmp_path_factory.mktemp("docs") / "a.mf", progress=False)


def blocks(batches):
    return [list(zip(*(batch[name].tolist() for name in batch), strict=True)) for batch in batches]


def tokens(batches):
    return Counter(token for batch in batches for token in batch["input_ids"].flatten().tolist())


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("size", [4, 16])
def test_every_epoch_has_every_token_once_in_other_blocks(store, size, prefetch):
    loader = Loader(store.packed("input_ids", size, pad=-1), 3, shuffle=True, seed=0, prefetch_factor=prefetch)
    epochs = [list(loader) for _ in range(3)]
    for epoch in epochs:
        assert len(epoch) == len(loader)
        found = tokens(epoch)
        assert found.pop(-1, 0) == -len(TOKENS) % size
        assert found == Counter(TOKENS)
        assert sum(int(batch["input_ids_mask"].sum()) for batch in epoch) == len(TOKENS)
        # tokens of a document stand in a row, and each document is whole but for the cuts
        for batch in epoch:
            ids, docs, positions = (batch[name] for name in ("input_ids", "document_ids", "position_ids"))
            same = (docs[:, 1:] == docs[:, :-1]) & (docs[:, 1:] >= 0)
            assert torch.equal(ids[:, 1:][same], ids[:, :-1][same] + 1)
            assert torch.equal(positions[:, 1:][same], positions[:, :-1][same] + 1)
            assert (positions[:, 1:][~same & (docs[:, 1:] >= 0)] == 0).all()
    assert blocks(epochs[0]) != blocks(epochs[1]) != blocks(epochs[2])
    cuts = [{tuple(row) for batch in epoch for row in batch["input_ids"].tolist()} for epoch in epochs]
    assert cuts[0] != cuts[1], "the documents have another order"
    loader.set_epoch(1)
    assert blocks(loader) == blocks(epochs[1]), "a pure function of seed and epoch"


def test_without_a_fill_only_the_rest_is_missing(store):
    loader = Loader(store.packed("input_ids", 16), 4, shuffle=True, seed=3)
    for _ in range(2):
        found = tokens(loader)
        assert max(found.values()) == 1
        assert found.total() == len(TOKENS) // 16 * 16


def test_without_shuffle_and_in_blocks_the_documents_keep_their_order(store):
    view = store.packed("input_ids", 8)
    whole = [view[row] for row in range(len(view))]
    rows = {tuple(row["input_ids"].tolist()) for row in whole}
    assert [row for batch in blocks(Loader(view, 3)) for row in batch] == blocks([view[:]])[0]
    found = Loader(view, 3, shuffle=Blocks(2), seed=0)
    assert {tuple(row) for batch in found for row in batch["input_ids"].tolist()} == rows


def test_a_part_of_the_blocks_never_gives_tokens_of_the_others(store):
    view = store.packed("input_ids", 8)
    train, val = view.split([0.7, 0.3], seed=0)
    for _ in range(2):
        seen = tokens(Loader(train, 2, shuffle=True, seed=1)) + tokens(Loader(val, 2, shuffle=True, seed=1))
        assert max(seen.values()) == 1
    subset = Loader(Subset(view, [0, 2]), 1, shuffle=True, seed=1)
    assert tokens(subset) == tokens([view[[0, 2]]])


@settings(max_examples=40)
@given(st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 2, 4]), st.integers(0, 6), st.integers(0, 2))
def test_ranks_and_a_resume_read_the_same_blocks(store, world, other_world, size, steps, epoch):
    view = store.packed("input_ids", 7)
    options = {"shuffle": True, "seed": 5, "drop_last": True}
    whole = Loader(view, 6, **options)
    whole.set_epoch(epoch)
    expected = [row for batch in blocks(whole) for row in batch]

    def ranks(count):
        return [Loader(view, 6 // count, **options, ranks=(r, count)) for r in range(count)]

    def read(loaders, most=None):
        found = []
        iterators = [iter(loader) for loader in loaders]
        for at, parts in enumerate(zip(*iterators)):  # noqa: B905  # ranks stay in step
            found += [row for batch in parts for row in blocks([batch])[0]]
            if most is not None and at + 1 == most:
                break
        return found

    first = ranks(world)
    for loader in first:
        loader.set_epoch(epoch)
    steps = min(steps, len(first[0]))
    seen = read(first, steps) if steps else []
    state = json.loads(json.dumps(first[0].state_dict()))
    second = ranks(other_world)
    for loader in second:
        loader.load_state_dict(state)
    assert seen + read(second) == expected


def test_states_of_other_packings_are_refused(store):
    loader = Loader(store.packed("input_ids", 8), 2, shuffle=True, seed=0)
    next(iter(loader))
    for other in (store.packed("input_ids", 4), store.packed("input_ids", 8, pad=0), store):
        with pytest.raises(LoaderError, match="found a state with store"):
            Loader(other, 2, shuffle=True, seed=0).load_state_dict(loader.state_dict())


def test_a_loader_pickles_with_its_packed_store(store):
    loader = Loader(store.packed("input_ids", 8), 2, shuffle=True, seed=0)
    running = iter(loader)
    next(running)
    other = pickle.loads(pickle.dumps(loader))
    assert blocks(other) == blocks(running)


def test_two_iterators_of_different_epochs_at_once(store):
    loader = Loader(store.packed("input_ids", 8), 2, shuffle=True, seed=0, prefetch_factor=0)
    expected = [blocks(loader), blocks(loader)]
    loader.set_epoch(0)
    one = iter(loader)
    found = [[next(one)], []]
    two = iter(loader)
    for iterator, into in ((two, 1), (one, 0), (two, 1)):
        found[into].append(next(iterator))
    assert [blocks(found[0]), blocks(found[1])] == [expected[0][:2], expected[1][:2]]


def test_several_packed_stores_are_mixed_by_weight(store, tmp_path):
    samples = [{"input_ids": torch.arange(n) + 5000} for n in (30, 50, 8)]
    other = memfeed.cache(Made(samples), tmp_path / "b.mf", progress=False)
    parts = [store.select("input_ids").packed(None, 8), other.packed(None, 8)]
    loader = Loader([(part, 0.5) for part in parts], 4, shuffle=True, seed=0)
    found = blocks(loader)
    rows = [tuple(row) for part in parts for row in part[:]["input_ids"].tolist()]
    assert {tuple(row[0]) for batch in found for row in batch} <= set(rows)
    assert blocks(Loader(parts, 40)) == [blocks([part[:] for part in parts])[0] + blocks([parts[1][:]])[0]]


def test_a_sampler_and_a_dataloader_of_the_parts_read_the_stored_order(store):
    view = store.packed("input_ids", 8)
    assert blocks(Loader(view, 2, sampler=[3, 1])) == blocks([view[[3, 1]]])
    loader = Loader(view, 2, shuffle=True, seed=0)
    parts = DataLoader(loader.dataset, batch_sampler=loader.batch_sampler, collate_fn=loader.collate_fn)
    assert tokens(parts) == tokens([view[:]]), "the same cuts in every epoch, each token once"


def test_labels_and_transforms_over_packed_blocks(store):
    def shift(batch):
        return {**batch, "labels": batch["input_ids"].roll(-1, 1)}

    view = store.packed("input_ids", 8).select("input_ids")
    batch = next(iter(Loader(view, 2, transform=shift, return_rows=True, as_="numpy", device="cpu")))
    assert sorted(batch) == ["input_ids", "labels", "rows"]
    assert batch["rows"].tolist() == [0, 1]


@pytest.mark.parametrize("options", [{}, {"placement": "device"}, {"last": "pad", "prefetch_factor": 0}], ids=str)
def test_on_a_device_with_streams(store, monkeypatch, options):
    view = store.packed("input_ids", 8)
    budget = {"bucket_by": Tokens(64), "shuffle": True, "seed": 0}
    wanted = Loader(view, 3, shuffle=True, seed=0, last=options.get("last"))
    expected = [blocks(wanted), blocks(wanted)]
    by_length = [batch["doc"].tolist() for batch in Loader(store, **budget)]
    device = SlowDevice()
    monkeypatch.setattr("memfeed.loading.epoch_reader.streams_of", lambda _: device)
    loader = Loader(view, 3, shuffle=True, seed=0, device="cpu", **options)
    assert [blocks(loader), blocks(loader)] == expected
    assert set(loader.stats()["placement"].values()) == {"packed for each batch"}
    assert [batch["doc"].tolist() for batch in Loader(store, **budget, device="cpu")] == by_length


@pytest.mark.skipif(not readahead.SUPPORTED, reason="this system tells nothing about its page cache")
def test_whether_files_are_cached_is_asked_once_for_short_epochs(store, monkeypatch):
    """The store is laid out anew in each epoch, but its files are the same."""
    asked = []
    monkeypatch.setattr(readahead, "ASK_SECONDS", 1e6)
    monkeypatch.setattr(readahead.ReadAhead, "_is_cached", lambda *_: asked.append(True) or True)
    loader = Loader(store.packed("input_ids", 4), 3, shuffle=True, seed=0)
    for _ in loader:
        pass
    count = len(asked)
    assert count
    for _ in loader:
        pass
    assert len(asked) == count
