"""Padded batches, against torch's pad_sequence and tensordict's collate."""

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import memfeed
from memfeed import Collate, Loader
from memfeed.errors import FieldError, LoaderError
from slow_device import SlowDevice
from support import Made, equal

LENGTHS = [3, 0, 5, 7, 1, 0, 4, 6, 2, 9, 0]


def sample(i):
    n = LENGTHS[i]
    return {"tokens": torch.arange(n) + 100 * i, "label": i, "inner": {"xy": torch.full((n, 2), i + 0.5)}}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return memfeed.cache(Made(sample, len(LENGTHS)), tmp_path_factory.mktemp("pad") / "a.mf", progress=False)


def reference(rows, token=0, xy=-1.0):
    samples = [sample(i) for i in rows]
    lengths = torch.tensor([LENGTHS[i] for i in rows])
    mask = torch.arange(int(lengths.max()))[None] < lengths[:, None]
    return {
        "tokens": pad_sequence([one["tokens"] for one in samples], batch_first=True, padding_value=token),
        "tokens_mask": mask,
        "label": torch.tensor(rows),
        "inner": {
            "xy": pad_sequence([one["inner"]["xy"] for one in samples], batch_first=True, padding_value=xy),
            "xy_mask": mask,
        },
    }


PAD = {"tokens": -7, ("inner", "xy"): 0.25}


@pytest.mark.parametrize("threaded", [False, True])
@settings(max_examples=30)
@given(st.integers(1, 12), st.booleans(), st.sampled_from([None, "drop", "pad"]), st.integers(0, 2))
def test_batches_are_those_of_pad_sequence(store, threaded, batch_size, shuffle, last, epoch):
    loader = Loader(store, batch_size, shuffle=shuffle, seed=0, pad=PAD, return_rows=True, last=last)
    loader._epochs.policy.settled, loader._epochs.policy.threaded = True, threaded
    loader.set_epoch(epoch)
    kept = list(loader)  # memory that somebody holds is not used again
    assert len(kept) == len(loader)
    for batch in kept:
        rows = batch.pop("rows").tolist()
        valid = batch.pop("valid", None)
        assert (valid is None) == (last != "pad")
        assert list(batch) == ["tokens", "tokens_mask", "label", "inner"]
        assert list(batch["inner"]) == ["xy", "xy_mask"]
        assert equal(batch, reference(rows, -7, 0.25))


def test_a_number_fills_up_all_fields(store):
    expected = list(Loader(store, 4, pad={"tokens": 0, ("inner", "xy"): 0}))
    for batches in (Loader(store, 4, pad=0), DataLoader(store, 4, collate_fn=Collate(pad=0))):
        assert all(equal(a, b) for a, b in zip(batches, expected, strict=True))
        assert all(equal(a, b) for a, b in zip(_sent(batches), expected, strict=True))


def test_some_fields_stay_jagged(store):
    batch = next(iter(Loader(store, 4, pad={"tokens": 0})))
    assert batch["inner"]["xy"].is_nested
    assert "xy_mask" not in batch["inner"]
    assert equal(batch["tokens"], reference(range(4))["tokens"])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataloader_of_torch_pads_too(store, workers):
    loader = DataLoader(store, 4, collate_fn=Collate(pad=PAD), num_workers=workers)
    found = [batch for batch in loader]  # noqa: C416
    assert all(equal(a, b) for a, b in zip(found, Loader(store, 4, pad=PAD), strict=True))
    assert list(found[0]) == ["tokens", "tokens_mask", "label", "inner"]


def test_a_dataloader_of_the_parts_and_a_loader_made_anew_pad(store):
    loader = Loader(store, 4, shuffle=True, seed=0, pad=PAD)
    expected = list(Loader(store, 4, shuffle=True, seed=0, pad=PAD))
    parts = DataLoader(loader.dataset, batch_sampler=loader.batch_sampler, collate_fn=loader.collate_fn)
    assert all(equal(a, b) for a, b in zip(parts, expected, strict=True))
    anew = Loader(store, 4, sampler=[5, 2, 9], pad=loader.pad, collate_fn=loader.collate_fn)
    assert equal(next(iter(anew)), reference([5, 2, 9], -7, 0.25))
    assert all(
        equal(a, b) for a, b in zip(_sent(Loader(store, 4, shuffle=True, seed=0, pad=PAD)), expected, strict=True)
    )


def _sent(loader):
    return pickle.loads(pickle.dumps(loader))


def test_tensordicts_as_tensordicts_collate_gives_them(tmp_path):
    samples = [TensorDict({"tokens": torch.arange(n) + 1, "label": torch.tensor(n)}) for n in (3, 1, 4)]
    store = memfeed.cache(Made(samples), tmp_path / "td.mf", progress=False)
    batch = next(iter(Loader(store, 3, pad={"tokens": 0})))
    assert batch.batch_size == (3,)
    collate = pytest.importorskip("tensordict", reason="tensordict").__dict__.get("collate")
    if collate is not None:  # tensordict 0.15
        expected = collate(samples, pad_keys={"tokens": 0}, mask_key="mask")
        assert torch.equal(batch["tokens"], expected["tokens"])
        assert torch.equal(batch["tokens_mask"], expected["mask", "tokens"])
    assert torch.equal(batch["tokens"], pad_sequence([one["tokens"] for one in samples], batch_first=True))
    again = next(iter(DataLoader(store, 3, collate_fn=Collate(pad={"tokens": 0}))))
    assert (again == batch).all()
    assert torch.equal(again["tokens_mask"], batch["tokens_mask"])


def test_arrays_devices_and_transforms(store):
    def count(batch):
        return {**batch, "count": batch["tokens_mask"].sum(1)}

    batch = next(iter(Loader(store, 4, pad={"tokens": 0}, as_="numpy", transform=count, device="cpu")))
    assert batch["count"].tolist() == LENGTHS[:4]
    assert batch["tokens"].tolist() == reference(range(4))["tokens"].tolist()
    doubled = next(iter(Loader(store, 4, pad={"tokens": 0}, transform={"tokens": lambda tokens: tokens * 2})))
    assert torch.equal(doubled["tokens"], reference(range(4))["tokens"] * 2)


def test_on_a_device_with_streams(store, monkeypatch):
    streams = SlowDevice()
    monkeypatch.setattr("memfeed.loading.epoch_reader.streams_of", lambda device: streams)
    found = [batch for batch in Loader(store, 4, pad=PAD, return_rows=True, device="cpu")]  # noqa: C416
    for batch in found:
        rows = batch.pop("rows").tolist()
        assert equal(batch, reference(rows, -7, 0.25))


def test_what_cannot_be_padded(store, tmp_path):
    for pad, message in (
        ({"label": 0}, r"which is int64 \[\]; expected one of the fields of varying length"),
        ({"tokens": 0.5}, "a number that int64 holds exactly"),
        ({"tokens": None}, "a number that int64 holds exactly"),
        ({"token": 0}, "found no field 'token'"),
    ):
        with pytest.raises(FieldError, match=message):
            Loader(store, 2, pad=pad)
    for options in ({"batch_size": None}, {"collate_fn": list}):
        for pad in (0, {"tokens": 0}):
            with pytest.raises(LoaderError, match="leave pad= out"):
                Loader(store, pad=pad, **options)
    with pytest.raises(LoaderError, match="leave pad= out"):
        Collate(pad=0, collate_fn=list)
    pairs = memfeed.cache(Made([(torch.arange(n), n) for n in (3, 1)]), tmp_path / "a.mf", progress=False)
    with pytest.raises(LoaderError, match=r'make the store of samples like \{"tokens"'):
        Loader(pairs, 2, pad={0: 0})
    bare = memfeed.cache(Made([torch.arange(n) for n in (3, 1)]), tmp_path / "b.mf", progress=False)
    with pytest.raises(LoaderError, match="the sample itself"):
        Loader(bare, 2, pad={"value": 0})
    taken = [{"a": torch.arange(n), "a_mask": 1} for n in (3, 1)]
    with pytest.raises(LoaderError, match='found a field "a_mask"'):
        Loader(memfeed.cache(Made(taken), tmp_path / "c.mf", progress=False), 2, pad={"a": 0})
    with pytest.raises(FieldError, match="expected one of the fields of varying length"):
        next(iter(DataLoader(store, 2, collate_fn=Collate(pad={"label": 0}))))


def test_an_epoch_of_empty_rows(tmp_path):
    samples = [{"a": torch.arange(n, dtype=torch.bfloat16)} for n in (2, 0, 0)]
    store = memfeed.cache(Made(samples), tmp_path / "a.mf", progress=False)
    batch = next(iter(Loader(store, 2, sampler=[1, 2], pad={"a": 1.5})))
    assert (batch["a"].shape, batch["a_mask"].shape) == ((2, 0), (2, 0))
    batch = next(iter(Loader(store, 3, pad={"a": 1.5})))
    assert batch["a"].tolist() == [[0, 1], [1.5, 1.5], [1.5, 1.5]]
