"""Functions of one sample: what they get and give, their seeds, albumentations, errors."""

import random
import sys
import threading

import numpy as np
import pytest
import torch
from scipy import stats

import memfeed
from memfeed.errors import TransformError
from memfeed.random import Keys
from memfeed.transforms import Compose, Normalize, PerSample, RandomCrop

N = 5


def keys(n=N, seed=0, epoch=0):
    return Keys(seed, epoch, torch.arange(n))


def batch():
    images = torch.randint(0, 256, (N, 3, 12, 10), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return {"image": images, "mask": (images[:, 0] > 128).to(torch.uint8), "label": torch.arange(N)}


def noisy(image):
    """Draws from each of the global generators."""
    return image.float() * random.random() + float(np.random.rand()) + torch.rand(())


def test_each_sample_draws_by_its_key():
    transform = Compose([RandomCrop(8), PerSample(noisy)], on="image")
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    whole = transform.apply(batch(), keys())["image"]
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])
    assert whole.shape == (N, 3, 8, 8)
    for row in range(N):
        one = {name: leaf[row : row + 1] for name, leaf in batch().items()}
        assert torch.equal(transform.apply(one, Keys(0, 0, torch.tensor([row])))["image"][0], whole[row])
    assert not torch.equal(whole, transform.apply(batch(), keys(epoch=1))["image"])
    one_image = batch()["image"][:1].expand(N, 3, 12, 10)
    assert len(PerSample(noisy).apply(one_image, keys()).flatten(1).unique(dim=0)) == N


def test_the_global_generators_draw_other_numbers():
    def sides(image):
        return torch.tensor([torch.randint(4, ()), np.random.randint(4), random.randrange(4)])[None]

    drawn = PerSample(sides).apply(torch.zeros(640, 1, 2, 2), keys(640))[:, 0]
    assert torch.equal(drawn, PerSample(sides).apply(torch.zeros(640, 1, 2, 2), keys(640))[:, 0])
    counts = torch.bincount((drawn * torch.tensor([16, 4, 1])).sum(1), minlength=64)
    assert stats.chisquare(counts).pvalue > 1e-4


def test_several_fields():
    def both(image, mask):
        return image.flip(-1), mask.flip(-1)

    given = batch()
    out = PerSample(both, on=["image", "mask"]).apply(given, keys())
    assert torch.equal(out["image"], given["image"].flip(-1))
    assert torch.equal(out["mask"], given["mask"].flip(-1))
    assert torch.equal(out["label"], given["label"])
    assert torch.equal(given["image"], batch()["image"])


def test_called_with_a_tensor_it_draws_from_torchs_generator():
    images = batch()["image"]
    model = torch.nn.Sequential(Compose([PerSample(noisy), RandomCrop(4)]), torch.nn.Flatten())
    torch.manual_seed(0)
    first, second = model(images), model(images)
    torch.manual_seed(0)
    assert torch.equal(model(images), first)
    assert not torch.equal(first, second)


def test_a_function_may_write_to_what_it_gets():
    given = batch()["image"]
    assert (PerSample(lambda image: image.zero_()).apply(given, keys()) == 0).all()
    assert torch.equal(given, batch()["image"])


def test_a_function_may_return_the_same_memory_again():
    kept = torch.empty(3, 12, 10, dtype=torch.uint8)
    for one_size in (True, False):
        found = PerSample(kept.copy_, one_size=one_size, on="image").apply(batch(), keys())["image"]
        assert torch.equal(torch.stack(list(found)), batch()["image"])


def test_in_a_loader():
    loader = memfeed.Loader(batch(), 2, shuffle=True, seed=0, transform=PerSample(noisy, on="image"))
    first = [b["image"] for b in loader]
    loader.set_epoch(0)
    assert all(torch.equal(a, b["image"]) for a, b in zip(first, loader, strict=True))


def test_it_runs_in_the_callers_thread(monkeypatch):
    monkeypatch.setattr("memfeed.loading.epochs.PrefetchPolicy", lambda **_: _Threaded())
    seen = set()

    def where(image):
        seen.add(threading.current_thread())
        return image

    images = torch.zeros(40, 3, 64, 64, dtype=torch.uint8)
    loader = memfeed.Loader(images, 2, transform=Compose([RandomCrop(60), PerSample(where)]))
    assert sum(len(batch) for batch in loader) == 40
    assert seen == {threading.current_thread()}


class _Threaded:
    """A pace that always takes a thread."""

    threaded, settled = True, True

    def begin(self, goes_on=False):
        pass


def test_wrong_functions():
    with pytest.raises(TransformError, match="PerSample got a int"):
        PerSample(3)
    with pytest.raises(TransformError, match=r"function returned str for the fields 'image'"):
        PerSample(lambda image: ("text",)).apply({"image": batch()["image"]}, keys())
    with pytest.raises(TransformError, match=r"function returned int for the fields 'image'"):
        PerSample(lambda image: 3).apply({"image": batch()["image"]}, keys())
    with pytest.raises(TransformError, match=r"found results of shapes \[\(3, 0, 10\), \(3, 1, 10\)"):
        sizes = iter(range(N))
        PerSample(lambda image: image[:, : next(sizes)]).apply(batch()["image"], keys())
    with pytest.raises(ZeroDivisionError) as caught:
        PerSample(lambda image: 1 / 0).apply(batch()["image"], Keys(0, 0, torch.arange(N) + 7))
    if sys.version_info >= (3, 11):
        assert caught.value.__notes__ == ["in PerSample, on row 7 of the store"]


# albumentations


@pytest.fixture
def albumentations():
    return pytest.importorskip(
        "albumentations", reason="albumentations is not installed: it comes with the extra 'dev'"
    )


@pytest.mark.parametrize("tensors", [False, True], ids=["arrays", "ToTensorV2"])
@pytest.mark.parametrize("shape", ["hw", "1hw", "chw"])
def test_albumentations_gets_and_gives_what_it_should(albumentations, tensors, shape):
    steps = [albumentations.RandomCrop(8, 6), albumentations.HorizontalFlip(p=0.5)]
    if tensors:
        from albumentations.pytorch import ToTensorV2

        steps.append(ToTensorV2())
    given = batch()
    planes = given["image"][:, :1]
    given["depth"] = {"hw": planes[:, 0], "1hw": planes, "chw": given["image"][:, :2]}[shape].clone()
    compose = albumentations.Compose(steps)
    out = PerSample(compose, on=["image", "mask", "depth"]).apply(given, keys())
    assert "depth" not in compose.additional_targets, "the user's own stays as it is"
    assert out["image"].shape == (N, 3, 8, 6)
    assert out["image"].dtype == torch.uint8
    assert torch.equal(out["mask"], (out["image"][:, 0] > 128).to(torch.uint8)), "image and mask moved alike"
    expected = {"hw": out["image"][:, 0], "1hw": out["image"][:, :1], "chw": out["image"][:, :2]}[shape]
    assert torch.equal(out["depth"], expected)


def test_albumentations_draws_by_key(albumentations):
    given = batch()["image"][:1].expand(40, 3, 12, 10)
    compose = albumentations.Compose([albumentations.HorizontalFlip(p=0.5), albumentations.RandomCrop(8, 8)])
    transform = Compose([PerSample(compose), Normalize([0.5] * 3, [0.5] * 3)])
    whole = transform.apply(given, keys(40))
    assert torch.equal(whole, transform.apply(given, keys(40)))
    assert len(whole.flatten(1).unique(dim=0)) > 10
    part = transform.apply(given[:3], Keys(0, 0, torch.tensor([30, 7, 2])))
    assert torch.equal(part, whole[[30, 7, 2]])
    alone = PerSample(albumentations.HorizontalFlip(p=1.0)).apply(batch()["image"], keys())
    assert torch.equal(alone, batch()["image"].flip(-1))


def flips(albumentations, *, nested):
    flip, turn, invert = (getattr(albumentations, name) for name in ("HorizontalFlip", "VerticalFlip", "InvertImg"))
    if not nested:
        return albumentations.Compose([flip(p=0.5), turn(p=0.5), invert(p=0.5)])
    nothing = albumentations.NoOp(p=1.0)
    return albumentations.Compose(
        [
            albumentations.Sequential([albumentations.Compose([flip(p=0.5)])], p=1.0),
            albumentations.Sequential([turn(p=0.5), albumentations.SomeOf([nothing], n=1)], p=1.0),
            albumentations.OneOf([invert(p=1.0), nothing], p=1.0),
        ]
    )


@pytest.mark.parametrize("has_method", [True, False], ids=["new", "older"])
@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
def test_the_steps_of_albumentations_draw_other_numbers(albumentations, nested, has_method, monkeypatch):
    if not has_method:
        monkeypatch.delattr(albumentations.BaseCompose, "set_random_state")
    image = torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8).expand(1600, 3, 2, 2)
    transform = PerSample(flips(albumentations, nested=nested))
    found = transform.apply(image, keys(1600))
    outcomes, counts = found[:, 0].flatten(1).unique(dim=0, return_counts=True)
    assert len(outcomes) == 8
    assert stats.chisquare(counts).pvalue > 1e-4
    assert torch.equal(transform.apply(image[:3], Keys(0, 0, torch.tensor([900, 7, 900]))), found[[900, 7, 900]])


# Transforms of other libraries, as they are


def images_and_labels():
    given = batch()
    return given["image"], given["label"]


def test_torchvision_transforms_of_batches():
    v2 = pytest.importorskip("torchvision.transforms.v2", exc_type=ImportError)
    transform = v2.Compose([v2.RandomHorizontalFlip(1.0), v2.ToDtype(torch.float32, scale=True)])
    images, _ = images_and_labels()
    for image, label in memfeed.Loader(images_and_labels(), 2, transform=transform):
        torch.testing.assert_close(image, images[label].flip(-1).float() / 255)


def test_kornia_transforms_of_batches():
    kornia = pytest.importorskip("kornia.augmentation", reason="kornia is not installed: it comes with the extra 'dev'")
    transform = kornia.AugmentationSequential(kornia.RandomHorizontalFlip(p=1.0), data_keys=["input"])
    images = images_and_labels()[0].float() / 255
    loader = memfeed.Loader((images, torch.arange(N)), 2, transform={0: transform})
    for image, label in loader:
        torch.testing.assert_close(image, images[label].flip(-1))
