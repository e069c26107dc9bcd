import pytest
import torch
from torch.utils.data import DataLoader, Subset, random_split

import memfeed
from memfeed import Collate, Loader
from memfeed.errors import LoaderError
from memfeed.transforms import Compose, Normalize, RandomCrop, RandomHorizontalFlip
from support import Made, equal, rich_sample

N = 24


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return memfeed.cache(Made(rich_sample, N), tmp_path_factory.mktemp("s") / "a.mf", progress=False)


def augment():
    return Compose([RandomCrop((3, 4)), RandomHorizontalFlip(), Normalize([0.5] * 3, [0.2] * 3)], on="image")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataloader_gives_the_batches_of_a_loader(store, workers):
    part = store.select("image", "label", "boxes", "text", "td", "point")
    theirs = DataLoader(part, 5, collate_fn=Collate(augment(), seed=3), num_workers=workers)
    for mine, other in zip(Loader(part, 5, transform=augment(), seed=3), theirs, strict=True):
        assert equal(mine, other)


@pytest.mark.parametrize("wrap", [lambda s: Subset(s, [5, 2, 9]), lambda s: random_split(s, [3, N - 3])[0]])
def test_subsets_of_torch(store, wrap):
    data = wrap(store)
    for batch in DataLoader(data, 3, collate_fn=Collate()):
        assert equal(batch, store[list(data.indices)])


def test_set_epoch_reaches_workers_that_persist(store):
    collate = Collate(augment(), seed=3)
    loader = DataLoader(store.select("image"), N, collate_fn=collate, num_workers=1, persistent_workers=True)
    ours = Loader(store.select("image"), N, transform=augment(), seed=3)
    for epoch in range(3):
        collate.set_epoch(epoch)
        ours.set_epoch(epoch)
        assert equal(next(iter(loader)), next(iter(ours)))


def test_samples_of_something_else(store):
    with pytest.raises(LoaderError, match="found a list of samples; expected those of a memfeed store"):
        Collate()([store[0], store[1]])


def test_cuda_in_a_worker_points_to_to_device(store, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    loader = DataLoader(store, 4, collate_fn=Collate(device="cuda"), num_workers=1)
    with pytest.raises(LoaderError, match="found a CUDA device inside a DataLoader worker.*memfeed.to_device"):
        next(iter(loader))
