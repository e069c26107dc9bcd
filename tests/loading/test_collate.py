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


def crops(loader):
    """Return the crop of each row of an epoch."""
    return {
        label: image for batch in loader for image, label in zip(batch["image"], batch["label"].tolist(), strict=True)
    }


def share_that_differs(one, other):
    assert one.keys() == other.keys() == set(range(N))
    return sum(not torch.equal(one[label], other[label]) for label in one) / N


@pytest.fixture(scope="module")
def images():
    noise = torch.rand(N, 3, 16, 16)
    return memfeed.cache({"image": noise, "label": torch.arange(N)}, progress=False)


PARTS = {
    "Collate": lambda images: DataLoader(images, 5, shuffle=True, collate_fn=Collate(RandomCrop(8))),
    "Collate with workers": lambda images: DataLoader(
        images, 5, shuffle=True, collate_fn=Collate(RandomCrop(8)), num_workers=2
    ),
    "persistent workers": lambda images: DataLoader(
        images, 5, collate_fn=Collate(RandomCrop(8)), num_workers=2, persistent_workers=True
    ),
    "the collate_fn of a loader": lambda images: DataLoader(
        images, 5, shuffle=True, collate_fn=Loader(images, 5, transform=RandomCrop(8), seed=1).collate_fn
    ),
    "the same with workers": lambda images: DataLoader(
        images, 5, shuffle=True, collate_fn=Loader(images, 5, transform=RandomCrop(8)).collate_fn, num_workers=2
    ),
    "the sampler of the loader too": lambda images: (lambda one: DataLoader(
        images, 5, sampler=one.sampler, collate_fn=one.collate_fn, num_workers=2
    ))(Loader(images, 5, shuffle=True, transform=RandomCrop(8))),
}  # fmt: skip


@pytest.mark.parametrize("parts", PARTS)
def test_each_epoch_has_other_crops(images, parts, capfd):
    loader = PARTS[parts](images)
    torch.manual_seed(3)
    epochs = [crops(loader) for _ in range(3)]
    assert all(share_that_differs(one, other) > 0.8 for one, other in zip(epochs, epochs[1:], strict=False))
    assert capfd.readouterr().err == ""
    torch.manual_seed(3)
    again = [crops(one) for one in [PARTS[parts](images)] for _ in range(3)]
    assert [share_that_differs(one, other) for one, other in zip(epochs, again, strict=True)] == [0, 0, 0]


@pytest.mark.parametrize("transform", [None, Normalize([0.5] * 3, [0.2] * 3)])
def test_without_a_random_transform_the_generator_of_the_training_stays(images, transform):
    """So that noise, or dropout, is what it is with DataLoader."""
    collates = [Collate(transform), Loader(images, 5, transform=transform).collate_fn]
    samples = images.__getitems__([3, 4])
    for collate_fn in collates:
        before = torch.get_rng_state()
        collate_fn(samples)
        assert torch.equal(torch.get_rng_state(), before) is (transform is None)


def test_the_rows_of_a_batch_have_crops_of_their_own():
    rows = torch.arange(16.0).reshape(1, 1, 4, 4).expand(N, 1, 4, 4).clone()
    same = memfeed.cache({"image": rows}, progress=False)
    (batch,) = DataLoader(same, N, collate_fn=Collate(RandomCrop(2)))
    assert len({tuple(image.flatten().tolist()) for image in batch["image"]}) > 4


def test_a_last_batch_that_is_filled_with_first_rows_is_no_epoch_that_comes_again(images, capfd):
    """As in the loaders that Accelerate makes, of each rank."""
    collate = Collate(RandomCrop(8), seed=3)
    batches = [[0, 1, 2], [6, 7, 8], [9, 0, 1]]
    for epoch in range(2):
        collate.set_epoch(epoch)
        crops(DataLoader(images, batch_sampler=batches, collate_fn=collate))
    assert "second time" not in capfd.readouterr().err


def test_a_seed_without_epochs_is_said(images, capfd):
    collate = Collate(RandomCrop(8), seed=3)
    loader = DataLoader(images, 5, collate_fn=collate)
    first, second = crops(loader), crops(loader)
    assert share_that_differs(first, second) == 0
    assert "row 0 comes a second time in epoch 0" in capfd.readouterr().err
    collate.set_epoch(1)
    assert share_that_differs(first, crops(loader)) > 0.8
    fixed = DataLoader(images, 5, collate_fn=Collate(Normalize([0.5] * 3, [0.2] * 3), seed=4))
    assert share_that_differs(crops(fixed), crops(fixed)) == 0
    assert capfd.readouterr().err == ""


def test_an_epoch_without_a_seed_is_that_of_seed_0(images):
    collate = Collate(RandomCrop(8))
    collate.set_epoch(2)
    ours = Loader(images, 5, transform=RandomCrop(8), seed=0)
    ours.set_epoch(2)
    assert share_that_differs(crops(DataLoader(images, 5, collate_fn=collate)), crops(ours)) == 0


def test_samples_of_something_else(store):
    with pytest.raises(LoaderError, match="found a list of samples; expected those of a memfeed store"):
        Collate()([store[0], store[1]])


def test_cuda_in_a_worker_points_to_to_device(store, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    loader = DataLoader(store, 4, collate_fn=Collate(device="cuda"), num_workers=1)
    with pytest.raises(LoaderError, match="found a CUDA device inside a DataLoader worker.*memfeed.to_device"):
        next(iter(loader))
