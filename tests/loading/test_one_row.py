"""Batches of one row have the shapes that DataLoader gives them, whatever the kind of the field."""

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

import memfeed
import memfeed.transforms as T
from memfeed import Loader
from support import Made

N = 6


def image(i):
    return torch.arange(3 * (4 + i) * (5 + 2 * i)).remainder(251).to(torch.uint8).view(3, 4 + i, 5 + 2 * i)


def sample(i):
    return {
        "image": image(i),
        "mask": (torch.full((4 + i, 5 + 2 * i), i), 1.5),
        "wide": torch.rand(3, 8, i + 1, generator=torch.Generator().manual_seed(i)),
        "tokens": torch.arange(i),
        "name": f"n{i}",
        "raw": b"x" * i,
        "label": i,
    }


@pytest.fixture
def store(tmp_path):
    return memfeed.cache(Made(sample, N), tmp_path / "s.mf", progress=False)


def assert_same(found, wanted):
    assert type(found) is type(wanted)
    if isinstance(wanted, torch.Tensor):
        assert not found.is_nested
        assert torch.equal(found, wanted)
    elif isinstance(wanted, dict | list):
        pairs = zip(found.items(), wanted.items(), strict=True) if isinstance(wanted, dict) else [(found, wanted)]
        for one, other in pairs:
            assert len(one) == len(other)
            for a, b in zip(one, other, strict=True):
                assert_same(a, b)
    else:
        assert found == wanted


HOWS = [
    "loader", "view", "rank", "sampler", "prefetch", "collate_fn of the loader", "lists of one",
    "lists of one, collate_fn of the loader", "a batch sampler", "collate",
]  # fmt: skip


@pytest.mark.parametrize("how", HOWS)
def test_every_kind_of_field_is_as_dataloader_gives_it(store, how):
    makers = {
        "loader": lambda: Loader(store, 1),
        "view": lambda: Loader(store.subset(range(N))),
        "rank": lambda: Loader(store, 1, ranks=(0, 1)),
        "sampler": lambda: Loader(store, 1, sampler=range(N)),
        "prefetch": lambda: Loader(store, 1, prefetch_factor=0),
        "collate_fn of the loader": lambda: DataLoader(store, 1, collate_fn=Loader(store, 1).collate_fn),
        "lists of one": lambda: Loader(store, batch_sampler=[[i] for i in range(N)]),
        "lists of one, collate_fn of the loader": lambda: DataLoader(
            store, 1, collate_fn=Loader(store, batch_sampler=[[0]]).collate_fn
        ),
        "a batch sampler": lambda: Loader(store, batch_sampler=BatchSampler(SequentialSampler(store), 1, False)),
        "collate": lambda: DataLoader(store, 1, collate_fn=memfeed.Collate()),
    }
    for _ in range(2):
        for found, wanted in zip(makers[how](), DataLoader(Made(sample, N), 1), strict=True):
            assert_same(found, wanted)


def last_rows(how, store, **options):
    loader = Loader(store.subset(range(5)), 2, **options)
    if how == "a loader":
        return list(loader)
    collate = loader.collate_fn if how == "its collate_fn" else memfeed.Collate(options.get("transform"))
    return list(DataLoader(store.subset(range(5)), 2, collate_fn=collate))


@pytest.mark.parametrize("how", ["a loader", "its collate_fn", "collate"])
@pytest.mark.parametrize("transform", [None, {"label": lambda x: x}, T.RandomHorizontalFlip(p=0.0, on="image")])
def test_a_last_batch_of_one_row_is_plain_and_a_larger_one_is_not(store, how, transform):
    first, _, last = last_rows(how, store, transform=transform)
    assert_same(last, next(iter(DataLoader(Made(sample, N), sampler=[4]))))
    assert isinstance(first["image"], list)
    assert first["tokens"].is_nested
    assert [tuple(one.shape) for one in first["image"]] == [image(i).shape for i in range(2)]


def test_batches_of_several_sizes_by_a_batch_sampler(store):
    found = list(Loader(store, batch_sampler=[[3], [1, 2], [5]]))
    assert [type(batch["image"]) for batch in found] == [torch.Tensor, list, torch.Tensor]
    assert torch.equal(found[2]["image"], image(5)[None])


def test_batches_that_are_drawn_by_length_stay_nested(tmp_path):
    lengths = [9, 2, 3, 8, 1]
    store = memfeed.cache([torch.arange(n) for n in lengths], tmp_path / "l.mf", progress=False)
    batches = list(Loader(store, bucket_by=memfeed.Tokens(9)))
    assert any(len(batch) == 1 for batch in batches)
    assert all(batch.is_nested for batch in batches)


def crop(picture):
    assert picture.ndim == 3, "images of several sizes come one by one, also where a batch has one"
    return picture[:, :3, :3]


TRANSFORMS = {
    "of a field": ({"image": crop}, (1, 3, 3, 3)),
    "of ours": (T.RandomHorizontalFlip(p=1.0, on="image"), None),
    "of ours, to one size": (T.Resize((7, 7), on="image"), (1, 3, 7, 7)),
    "a Compose": (T.Compose([T.RandomHorizontalFlip(p=1.0, on="image"), T.PerSample(crop, on="image")]), (1, 3, 3, 3)),
    "of the batch": (lambda batch: {**batch, "image": batch["image"].float() / 255}, None),
}


@pytest.mark.parametrize("collates", [False, True])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_after_a_transform(store, name, collates):
    transform, shape = TRANSFORMS[name]
    loader = Loader(store, 1, transform=transform, seed=0)
    batches = list(DataLoader(store, 1, collate_fn=loader.collate_fn) if collates else loader)
    assert len(batches) == N
    for i, batch in enumerate(batches):
        found = batch["image"]
        assert found.shape == (shape or (1, *image(i).shape))
        if name == "of ours":
            assert torch.equal(found[0], image(i).flip(-1))
        if name == "of the batch":
            assert torch.equal(found[0], image(i) / 255)
        assert batch["tokens"].tolist() == [list(range(i))]
        assert batch["wide"].shape == (1, 3, 8, i + 1)


def test_beside_other_arguments(store):
    for i, batch in enumerate(Loader(store, 1, pad={"tokens": -1}, return_rows=True, last="pad")):
        assert batch["tokens"].tolist() == batch["tokens_mask"].long().cumsum(1).sub(1).tolist() == [list(range(i))]
        assert batch["rows"].tolist() == [i]
        assert batch["image"].shape == (1, *image(i).shape)
    shapes = [batch["image"].shape for batch in Loader(store, 1, as_="numpy")]
    assert shapes == [(1, *image(i).shape) for i in range(N)]


def test_a_row_without_a_value_stays_a_list(tmp_path):
    rows = [(torch.zeros(3, 2 + i, 2) if i % 2 else None, i) for i in range(4)]
    store = memfeed.cache(Made(rows), tmp_path / "o.mf", progress=False)
    found = [batch[0] for batch in Loader(store, 1)]
    assert found[0] == [None] == found[2]
    assert [found[1].shape, found[3].shape] == [(1, 3, 3, 2), (1, 3, 5, 2)]


def test_tensordicts(tmp_path):
    from tensordict import TensorDict

    rows = [TensorDict({"image": image(i), "tokens": torch.arange(i), "label": torch.tensor(i)}) for i in range(N)]
    store = memfeed.cache(Made(rows), tmp_path / "t.mf", progress=False)
    for i, batch in enumerate(Loader(store, 1)):
        assert batch.batch_size == (1,)
        assert torch.equal(batch["image"], image(i)[None])
        assert batch["tokens"].tolist() == [list(range(i))]


def test_the_memory_is_not_written_again_while_a_batch_is_held(store):
    held = [batch["image"] for batch in Loader(store, 1)]
    for i, found in enumerate(held):
        assert torch.equal(found[0], image(i))
