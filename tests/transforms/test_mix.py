"""MixUp and CutMix: images, labels, what they draw, and their errors."""

import pytest
import torch
from tensordict import TensorDict

import memfeed
from memfeed.errors import TransformError
from memfeed.random import Keys
from memfeed.transforms import Compose, CutMix, MixUp, Normalize, RandomHorizontalFlip, ToDtype

N, CLASSES = 8, 5


def batch(dtype=torch.float32):
    images = torch.arange(N, dtype=torch.float32)[:, None, None, None].expand(N, 3, 16, 12).to(dtype).clone()
    return {"image": images, "label": torch.arange(N) % CLASSES}


def keys(n=N, seed=0, epoch=0):
    return Keys(seed, epoch, torch.arange(n))


def test_mixup_blends_images_and_labels_by_one_share():
    given = batch()
    out = MixUp(num_classes=CLASSES).apply(given, keys())
    assert out["label"].shape == (N, CLASSES)
    assert torch.allclose(out["label"].sum(1), torch.ones(N))
    share = out["label"][1, 1]
    assert 0 < share < 1
    assert out["label"][1, 0].item() == pytest.approx(1 - share.item()), "the rest is the one's before it"
    expected = given["image"] * share + given["image"].roll(1, 0) * (1 - share)
    assert torch.allclose(out["image"], expected, atol=1e-5)
    assert torch.equal(given["image"], batch()["image"]), "what was passed in stays"


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_cutmix_pastes_a_box_and_counts_its_pixels(dtype):
    shares = []
    for epoch in range(40):
        given = batch(dtype)
        out = CutMix(num_classes=CLASSES).apply(given, keys(epoch=epoch))
        pasted = (out["image"] != given["image"]).any(1)
        assert out["image"].dtype == dtype
        rows, columns = pasted[1].any(1).nonzero()[:, 0], pasted[1].any(0).nonzero()[:, 0]
        assert int(pasted[1].sum()) == len(rows) * len(columns), "a box"
        assert all(torch.equal(one, pasted[1]) for one in pasted), "one for the batch"
        share = 1 - pasted[1].double().mean()
        assert out["label"][1, 1].item() == pytest.approx(share.item(), abs=1e-6)
        assert torch.equal(out["image"][1][:, pasted[1]].unique(), given["image"][0].unique()) or not pasted.any()
        shares.append(share.item())
    assert min(shares) < 0.6
    assert max(shares) > 0.9


def test_what_is_drawn_depends_on_rows_seed_and_epoch_alone():
    mix = MixUp(num_classes=CLASSES)
    first = mix.apply(batch(), keys())["label"]
    assert torch.equal(first, mix.apply(batch(), keys())["label"])
    others = [keys(seed=1), keys(epoch=1), Keys(0, 0, torch.arange(N) + 1)]
    assert all(not torch.equal(first, mix.apply(batch(), k)["label"]) for k in others)
    twice = Compose([mix, mix]).apply(batch(), keys())["label"]
    assert (twice[0] > 0).sum() == 3, "a second one mixes shares"


def test_in_a_recipe_and_a_loader():
    steps = [
        ToDtype(torch.float32),
        RandomHorizontalFlip(),
        Normalize([0.5] * 3, [0.5] * 3),
        CutMix(num_classes=CLASSES),
    ]
    images, labels = batch(torch.uint8).values()
    loader = memfeed.Loader((images, labels), 4, shuffle=True, seed=0, transform=Compose(steps))
    epochs = [list(loader), list(loader)]
    for image, label in epochs[0]:
        assert image.dtype == torch.float32
        assert label.shape == (4, CLASSES)
        assert torch.allclose(label.sum(1), torch.ones(4))
    loader.set_epoch(0)
    for (image, label), again in zip(epochs[0], loader, strict=True):
        assert torch.equal(image, again[0])
        assert torch.equal(label, again[1])


def test_fields_are_found_or_named():
    td = TensorDict({"image": batch()["image"], "label": batch()["label"], "weight": torch.ones(N, 3)}, [N])
    with pytest.raises(TransformError, match=r"found 2 fields that look like labels .*on=\[\"image\", \"label\"\]"):
        MixUp(num_classes=CLASSES).apply(td, keys())
    out = MixUp(num_classes=CLASSES, on=["image", "label"]).apply(td, keys())
    assert out["label"].shape == (N, CLASSES)
    assert torch.equal(out["weight"], td["weight"])
    one = Compose([MixUp(num_classes=CLASSES)], on="image").apply(batch(), keys())
    assert one["label"].shape == (N, CLASSES)


def test_called_by_itself_it_draws_from_torchs_generator():
    images, labels = batch().values()
    torch.manual_seed(0)
    first = MixUp(num_classes=CLASSES)(images, labels)
    second = MixUp(num_classes=CLASSES)(images, labels)
    torch.manual_seed(0)
    assert torch.equal(MixUp(num_classes=CLASSES)(images, labels)[1], first[1])
    assert not torch.equal(first[1], second[1])
    with pytest.raises(TransformError, match="found 0 fields that look like labels"):
        Compose([MixUp(num_classes=CLASSES)])(images)


def test_an_empty_batch():
    image, label = MixUp(num_classes=CLASSES)(torch.zeros(0, 3, 4, 4), torch.zeros(0, dtype=torch.int64))
    assert image.shape == (0, 3, 4, 4)
    assert label.shape == (0, CLASSES)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: MixUp(0), "alpha=0; expected a positive"),
        (lambda: CutMix(num_classes=0), "num_classes=0"),
        (lambda: MixUp().apply(batch(), keys()), "expected num_classes="),
        (lambda: MixUp(num_classes=3).apply(batch(), keys()), "has class 3 in row 3; expected classes from 0 to 2"),
        (
            lambda: MixUp(num_classes=CLASSES).apply(batch(torch.uint8), keys()),
            "images are torch.uint8; expected floats",
        ),
        (
            lambda: MixUp(num_classes=CLASSES, on=["image", "label", "other"]).apply(
                {**batch(), "other": 0 * batch()["label"]}, keys()
            ),
            "expected images and",
        ),
        (
            lambda: MixUp(num_classes=2, on=["image", "other"]).apply({**batch(), "other": batch()["image"]}, keys()),
            "expected class numbers",
        ),
    ],
)
def test_wrong_input(make, words):
    with pytest.raises(TransformError, match=words):
        make()
