"""Callables within a Compose, and functions of one field."""

import pickle

import pytest
import torch
from image_batches import keys, photos

from memfeed import Loader
from memfeed.errors import FieldError, TransformError
from memfeed.transforms import CenterCrop, Compose, Normalize, RandomCrop, RandomHorizontalFlip, ToDtype

LABELS = torch.arange(6)


def double(batch):
    return {**batch, "image": batch["image"] * 2}


def test_a_callable_gets_the_batch():
    steps = [RandomCrop(8), ToDtype(torch.float32), double, Normalize([0.5] * 3, [0.5] * 3)]
    for on in (None, "image"):
        out = Compose(steps, on=on).apply({"image": photos(), "label": LABELS}, keys())
        before = Compose(steps[:2]).apply(photos(), keys())
        torch.testing.assert_close(out["image"], (before * 2 - 0.5) / 0.5)
        assert torch.equal(out["label"], LABELS)


def test_a_dict_of_callables_gets_fields():
    seen = []
    halve = {"image": lambda x: x / 2, ("more", "x"): lambda x: seen.append(x.shape) or x + 1}
    batch = {"image": photos(), "more": {"x": torch.zeros(6, 2)}}
    out = Compose([halve, RandomCrop(8)], on="image").apply(batch, keys())
    assert torch.equal(out["image"], RandomCrop(8).apply(photos() / 2, keys()))
    assert seen == [(6, 2)]
    assert (out["more"]["x"] == 1).all()
    assert Compose([{0: lambda x: x[:, :1]}]).apply([photos(), LABELS], keys())[0].shape == (6, 1, 12, 10)
    with pytest.raises(FieldError, match="found no field 'nothing'"):
        Compose([{"nothing": double}]).apply(batch, keys())


def test_they_change_no_draws_and_can_be_called_with_a_tensor():
    without = Compose([RandomCrop(8), RandomHorizontalFlip()])
    with_it = Compose([lambda x: x, RandomCrop(8), lambda x: x, RandomHorizontalFlip()])
    assert torch.equal(with_it.apply(photos(), keys()), without.apply(photos(), keys()))
    assert torch.equal(with_it.reference(photos(), keys()), without.reference(photos(), keys()))
    assert Compose([lambda x: x.float(), CenterCrop(4)])(photos()).dtype == torch.float32


def test_modules_are_parts_of_a_compose():
    transform = Compose([torch.nn.Dropout(0.0), CenterCrop(4)])
    assert any(isinstance(module, torch.nn.Dropout) for module in transform.modules())
    assert transform.apply(photos(dtype=torch.float32), keys()).shape == (6, 3, 4, 4)
    assert pickle.loads(pickle.dumps(Compose([double]))).transforms[0].fn is double
    assert "double" in repr(Compose([double]))


def test_lists_of_images():
    rows = [photos()[0], photos()[1][:, :9], photos()[2][:, :, :9]]
    seen = []

    def note(batch):
        seen.append([type(batch["image"]), *(row.shape for row in batch["image"])])
        return {**batch, "image": [row.flip(-1) for row in batch["image"]]}

    out = Compose([RandomHorizontalFlip(1.0), note, CenterCrop(8)]).apply({"image": rows}, keys(3))["image"]
    assert seen == [[list, (3, 12, 10), (3, 9, 10), (3, 12, 9)]]
    assert torch.equal(out, CenterCrop(8).apply(rows, keys(3)))
    cut = Compose([{"image": lambda x: x[:, :8, :8]}, Normalize([0.5] * 3, [0.5] * 3)]).apply({"image": rows}, keys(3))
    assert cut["image"].shape == (3, 3, 8, 8), "one by one, then a batch"
    crops = Compose([{"image": CenterCrop(8)}]).apply({"image": rows}, keys(3))["image"]
    assert torch.equal(crops, out)
    with pytest.raises(TransformError, match=r"field 'image' .*found results of shapes .*one shape for all samples"):
        Compose([{"image": lambda x: x.flip(-1)}]).apply({"image": rows}, keys(3))


def test_in_a_loader():
    store = {"image": photos(n=20), "label": torch.arange(20)}
    flipped = Compose([RandomCrop(8), double, {"label": lambda x: x + 1}])
    plain = {int(b["label"][0]): b["image"][0] for b in Loader(store, 1, seed=0, transform=RandomCrop(8))}
    for batch in Loader(store, 6, shuffle=True, seed=0, transform=flipped):
        for image, label in zip(batch["image"], batch["label"].tolist(), strict=True):
            assert torch.equal(image, plain[label - 1] * 2)
    grey = Loader({"x": photos(c=1)[:, 0]}, 3, transform={"x": RandomHorizontalFlip(1.0)})
    assert torch.equal(torch.cat([b["x"] for b in grey]), photos(c=1)[:, 0].flip(-1)), "a batch of three is no image"


def test_wrong_callables():
    for wrong in (3, {"image": 3}, None):
        with pytest.raises(
            TransformError, match="Compose got a (int|NoneType); expected a memfeed.transforms transform"
        ):
            Compose([wrong])
    with pytest.raises(TransformError, match="returned None for a batch"):
        Compose([lambda batch: None]).apply(photos(), keys())
