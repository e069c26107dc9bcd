"""Tensors of which one dim varies are jagged along that dim, whichever it is."""

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch.utils.data import ConcatDataset, DataLoader

import memfeed
from memfeed import Loader
from memfeed.errors import FieldError, StoreError
from memfeed.store import format
from support import Made, cache, equal

N = 60


class Audio(Made):
    """Sounds [channels, T], and labels of each of the T frames."""

    def __init__(self, channels, length_of=lambda i: i % 7, n=N):
        super().__init__(None, n)
        self.channels, self.length_of = channels, length_of

    def __getitem__(self, index):
        length = self.length_of(index)
        sound = torch.arange(self.channels * length, dtype=torch.float32).view(self.channels, length) + 100 * index
        return {"sound": sound, "frames": torch.arange(length), "label": index}


def is_batch_of(batch, samples):
    """Return True if the rows of a nested tensor are `samples`, by its parts, its rows and its padding."""
    assert batch.is_nested
    assert batch.layout == torch.jagged
    rows = batch.unbind()
    longest = max((len(sample.transpose(0, -1)) for sample in samples), default=0)
    padded = batch.to_padded_tensor(-1.0)
    return (
        equal(list(rows), list(samples))
        and padded.shape[-1] == longest
        and all(equal(padded[i, ..., : rows[i].shape[-1]], samples[i]) for i in range(len(samples)))
        and equal(batch.values(), torch.cat(list(samples), dim=-1))
        and batch.values().is_contiguous()
    )


@pytest.mark.parametrize("channels", [1, 2, 3])
def test_sounds_are_jagged_along_their_frames(path, channels):
    dataset = Audio(channels)
    store = cache(dataset, path)
    assert store.schema.fields[0].describe() == f"jagged float32 [{channels}, *]"
    store = memfeed.open(path)
    store.verify()
    for i in range(N):
        assert equal(store[i], dataset[i])
        assert store[i]["sound"].is_contiguous()
    assert all(equal(row, dataset[i]["sound"]) for i, row in enumerate(store.column("sound")))
    rows = [5, 0, 7, 7, 33]
    batch = store[rows]
    assert is_batch_of(batch["sound"], [dataset[i]["sound"] for i in rows])
    assert batch["sound"].offsets() is batch["frames"].offsets()
    assert [list(row.shape) for row in (batch["sound"] * 2).unbind()] == [[channels, i % 7] for i in rows]
    assert equal(cache(dataset, path)[3], dataset[3])


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("batch_size", [1, 4, 16])
def test_a_loader_gives_jagged_batches(path, channels, batch_size):
    dataset = Audio(channels)
    store = cache(dataset, path)
    seen = []
    for batch in Loader(store, batch_size, shuffle=True, seed=1):
        rows = batch["label"].tolist()
        if batch_size == 1:  # as DataLoader gives it
            assert torch.equal(batch["sound"], dataset[rows[0]]["sound"][None])
        else:
            assert is_batch_of(batch["sound"], [dataset[i]["sound"] for i in rows])
        seen += rows
    assert sorted(seen) == list(range(N))
    for batch in Loader(store, batch_size, as_="numpy"):
        for i, row in zip(batch["label"], batch["sound"], strict=True):
            assert np.array_equal(row, dataset[i]["sound"].numpy())
    for batch in DataLoader(store, batch_size, collate_fn=list):
        assert all(equal(sample, dataset[sample["label"]]) and sample["sound"].is_contiguous() for sample in batch)


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("collate", [False, True])
def test_padded_batches(path, channels, collate):
    dataset = Audio(channels)
    store = cache(dataset, path)
    pad = {"sound": -1, "frames": 7}
    batches = DataLoader(store, 4, collate_fn=memfeed.Collate(pad=pad)) if collate else Loader(store, 4, pad=pad)
    for batch in batches:
        samples = [dataset[i]["sound"] for i in batch["label"].tolist()]
        longest = max(sample.shape[1] for sample in samples)
        assert batch["sound"].shape == (4, channels, longest)
        assert batch["sound"].is_contiguous()
        assert equal(batch["sound_mask"], batch["frames_mask"])
        for row, mask, sample in zip(batch["sound"], batch["sound_mask"], samples, strict=True):
            assert equal(row[:, mask], sample)
            assert bool((row[:, ~mask] == -1).all())
    assert store.lengths("sound").tolist() == [i % 7 for i in range(N)]
    with pytest.raises(FieldError, match="found field sound, .*expected tokens along the first dim"):
        store.packed("sound", 8)


def test_other_ways_to_read_them(path):
    dataset = Audio(2)
    store = cache(dataset, path)
    rows = [9, 10, 12, 50]
    expected = [dataset[i]["sound"] for i in rows]
    assert is_batch_of(store.subset(rows).to("cpu", progress=False)["sound"], expected)
    assert is_batch_of(store.select("sound").subset(rows)[:]["sound"], expected)
    joined = next(iter(Loader(ConcatDataset([store, store]), 2 * N)))["sound"]
    assert is_batch_of(joined, [dataset[i % N]["sound"] for i in range(2 * N)])
    assert store.tensordict()["sound", "dims"].tolist() == [[2, i % 7] for i in range(N)]
    assert memfeed.to_device(store[rows], "cpu")["sound"].shape[1] == 2
    assert equal(store[[]]["sound"].values(), torch.empty(2, 0))


def test_samples_in_a_tensordict(path):
    dataset = Made(lambda i: TensorDict({"sound": torch.full((1, i % 4 + 1), i)}), N)
    store = cache(dataset, path)
    assert [list(store[i]["sound"].shape) for i in range(5)] == [[1, i % 4 + 1] for i in range(5)]
    assert is_batch_of(store[[0, 2]]["sound"], [dataset[0]["sound"], dataset[2]["sound"]])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("channels", [1, 2])
def test_a_row_of_another_length_promotes_along_its_dim(path, workers, channels):
    dataset = Audio(channels, lambda i: 5 if i != 31 else 8)
    store = cache(dataset, path, workers=workers)
    assert store.schema.fields[0].describe() == f"jagged float32 [{channels}, *]"
    for i in range(N):
        assert equal(store[i], dataset[i])
    other = Made(lambda i: torch.zeros(2 if i == 43 else 1, 5 if i != 31 else 8), N)
    store = cache(other, path, overwrite=True, workers=workers)
    assert store.schema.fields[0].describe() == "list float32 [*, *]"
    assert isinstance(store[:2], list)
    assert [list(row.shape) for row in store] == [list(other[i].shape) for i in range(N)]


def test_a_writer_and_a_repair(path):
    dataset = Audio(2, lambda i: 3 + i % 4)
    samples = [dataset[i] for i in range(N)]
    with memfeed.Writer(path) as writer:
        for sample in samples:
            writer.append(sample)
    assert all(equal(row, sample) for row, sample in zip(memfeed.open(path), samples, strict=True))
    store = cache(dataset, path, overwrite=True)
    heap = store.path / "sound" / "heap.bin"
    heap.chmod(0o644)
    data = bytearray(heap.read_bytes())
    data[100] ^= 255
    heap.write_bytes(data)
    store = memfeed.repair(dataset, path)
    store.verify()
    assert all(equal(row, sample) for row, sample in zip(store, samples, strict=True))


def test_the_format_says_that_it_needs_a_newer_reader(path):
    assert cache(Audio(2), path)._view.manifest.version == 2
    manifest = msgspec.json.decode((path / "memfeed.json").read_bytes())
    with pytest.raises(StoreError, match="version 1 with features of version 2"):
        format.decode(msgspec.json.encode({**manifest, "version": 1}), Path("x"))
    plain = Made(lambda i: torch.zeros(i % 3, 2), N)
    assert cache(plain, path, overwrite=True)._view.manifest.version == 1


shapes = st.lists(st.integers(0, 3), min_size=1, max_size=4)


@settings(max_examples=40)
@given(
    shape=shapes,
    dim=st.integers(0, 3),
    lengths=st.lists(st.integers(0, 5), min_size=2, max_size=9),
    dtype=st.sampled_from([torch.bool, torch.uint8, torch.uint16, torch.bfloat16, torch.float8_e5m2, torch.complex128]),
    batch_size=st.integers(1, 4),
)
def test_any_dim_of_any_dtype(tmp_path_factory, shape, dim, lengths, dtype, batch_size):
    dim %= len(shape)
    samples = []
    for length in lengths:
        one = [length if axis == dim else size for axis, size in enumerate(shape)]
        samples.append(torch.randint(0, 2, one).to(dtype))
    path = tmp_path_factory.mktemp("any") / "a.mf"
    with memfeed.Writer(path) as writer:
        for sample in samples:
            writer.append(sample)
    store = memfeed.open(path)
    kind = "fixed" if len(set(lengths)) == 1 else "jagged"
    assert store.schema.fields[0].kind == kind
    assert all(equal(row, sample) for row, sample in zip(store, samples, strict=True))
    batches = [*Loader(store, batch_size), store[:]]
    found = [row for batch in batches for row in batch.unbind(0)]
    assert all(equal(row, sample) for row, sample in zip(found, 2 * samples, strict=True))
    assert kind == "fixed" or math.prod(batches[-1].values().shape) == sum(sample.numel() for sample in samples)


def test_images_of_one_height_are_transformed_like_others(path):
    """Landscape photographs resized to a short side of 8: only their widths vary."""

    def image(i):
        return {"image": (torch.arange(3 * 8 * (8 + i % 5)) % 200).to(torch.uint8).view(3, 8, -1) + i, "label": i}

    store = cache(Made(image, N), path)
    assert store.schema.fields[0].describe() == "jagged uint8 [3, 8, *]"
    crop = memfeed.transforms.CenterCrop(8)
    for batch in Loader(store, 4, transform=crop):
        for row, label in zip(batch["image"], batch["label"].tolist(), strict=True):
            assert equal(row, crop(image(label)["image"][None])[0])
    flipped = next(iter(Loader(store, 4, transform=memfeed.transforms.RandomHorizontalFlip(1.0))))["image"]
    assert all(equal(row, image(i)["image"].flip(2)) for i, row in enumerate(flipped))
