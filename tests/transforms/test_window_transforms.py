"""Transforms of windows [n, steps, c, h, w]: all steps of a sample get the parameters of the sample."""

import pytest
import torch
from torch.utils.data import DataLoader

import memfeed
from memfeed import Collate, Loader
from memfeed import transforms as T
from memfeed.errors import TransformError
from support import equal

N = 20


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    data = {
        "image": torch.randint(0, 256, (N, 3, 12, 12), dtype=torch.uint8),
        "target": {"mask": torch.randint(0, 5, (N, 12, 12)), "boxes": torch.rand(N, 2, 4) * 12},
        "action": torch.rand(N, 2),
        "label": torch.arange(N) % 3,
        "episode": torch.arange(N) // 10,
    }
    return memfeed.cache(data, tmp_path_factory.mktemp("windows") / "a.mf", progress=False)


OFFSETS = {"image": [-1, 0, 1], "target": [-1, 0, 1], "action": range(4)}
AUGMENT = [T.RandomCrop(8), T.RandomHorizontalFlip(), T.ColorJitter(0.4), T.Normalize([0.5] * 3, [0.2] * 3)]
EVERY = ["image", ("target", "mask"), ("target", "boxes"), "action", "label"]


def steps_alone(store, batch, transform, step):
    """Return the fields at one step, transformed as if there were no others."""
    alone = {
        **batch,
        "image": batch["image"][:, step].clone(),
        "target": {key: value[:, step].clone() for key, value in batch["target"].items() if key != "target_mask"},
    }
    return transform.apply(alone, memfeed.random.Keys(3, 0, batch["rows"]))


@pytest.mark.parametrize("device", [None, "cpu"])
def test_each_step_is_what_it_would_be_alone(store, device):
    view = store.windows(OFFSETS, within="episode")
    options = {"shuffle": True, "seed": 3, "return_rows": True}
    transform = T.Compose(AUGMENT, on=EVERY)
    for found, plain in zip(
        Loader(view, 6, transform=transform, device=device, **options), Loader(view, 6, **options), strict=True
    ):
        assert found["image"].shape[1:] == (3, 3, 8, 8)
        assert equal(found["action"], plain["action"])
        assert equal(found["image_mask"], plain["image_mask"])
        for step in range(3):
            alone = steps_alone(store, plain, transform, step)
            assert torch.allclose(found["image"][:, step], alone["image"])
            assert torch.equal(found["target"]["mask"][:, step], alone["target"]["mask"])
            assert torch.allclose(found["target"]["boxes"][:, step], alone["target"]["boxes"])


def test_the_reference_gives_the_same(store):
    view = store.windows({"image": [0, 1]}, within="episode")
    transform = T.Compose(AUGMENT, on="image")
    batch, keys = view[3:9], memfeed.random.Keys(0, 1, torch.arange(3, 9))
    fast = transform.apply(batch, keys, windows=view._view.window_paths)
    assert torch.allclose(
        fast["image"], transform.reference(batch, keys, windows=view._view.window_paths)["image"], atol=1e-5
    )
    none = transform.apply(view[:0], memfeed.random.Keys(0, 1, torch.arange(0)), windows=view._view.window_paths)
    assert none["image"].shape == (0, 2, 3, 8, 8)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataloader_gives_the_same(store, workers):
    view = store.select("image", "episode").windows({"image": [-1, 0]}, within="episode")
    transform = T.Compose(AUGMENT)  # without on=: the mask of the window is no mask of pixels
    collate = Collate(transform, seed=5)
    found = list(DataLoader(view, 4, collate_fn=collate, num_workers=workers))
    assert equal(found, list(Loader(view, 4, transform=transform, seed=5)))
    assert equal(found[0]["image_mask"], view[:4]["image_mask"])


def test_channels_last_pointwise_and_mixing(store):
    view = store.windows({"image": [-1, 0]}, within="episode")
    last = T.Compose([T.Normalize([0.5] * 3, [0.2] * 3)], on="image", memory_format=torch.channels_last)
    batch = next(iter(Loader(view, 4, transform=last)))
    assert batch["image"].flatten(0, 1).is_contiguous(memory_format=torch.channels_last)
    squared = next(iter(Loader(view, 4, transform=T.Pointwise(lambda x: x.float() ** 2, on="image"))))
    assert torch.equal(squared["image"], view[:4]["image"].float() ** 2)
    mixed = next(iter(Loader(view, 4, transform=T.CutMix(num_classes=3, on=["image", "label"]))))
    assert mixed["image"].shape == (4, 2, 3, 12, 12)
    mean = next(iter(Loader(view, 4, transform=T.PerSample(lambda x: x.float().mean(0), on="image"))))
    assert torch.allclose(mean["image"], view[:4]["image"].float().mean(1))


def test_a_field_at_other_steps_cannot_follow(store):
    crop = T.RandomCrop(8, on=["image", ("target", "mask")])
    for offsets in ({"image": [-1, 0]}, {"image": [-1, 0], ("target", "mask"): [0]}, {("target", "mask"): [0]}):
        view = store.windows(offsets, within="episode")
        with pytest.raises(TransformError, match="at other steps; expected windows of both at the same offsets"):
            next(iter(Loader(view, 4, transform=crop)))
    with pytest.raises(TransformError, match="beside .*whose pixels move; expected on="):
        next(iter(Loader(store.windows({"image": [0, 1]}, within="episode"), 4, transform=T.RandomCrop(8))))


def test_five_dims_that_are_no_windows_are_volumes():
    volumes = {"image": torch.rand(4, 3, 5, 12, 12)}
    assert next(iter(Loader(volumes, 2, transform=T.RandomCrop(5, on="image"))))["image"].shape == (2, 3, 5, 5, 5)
    with pytest.raises(TransformError, match=r"expected \(depth, height, width\) for volumes"):
        next(iter(Loader(volumes, 2, transform=T.RandomCrop((8, 8), on="image"))))
