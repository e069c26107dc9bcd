"""A store of images of several sizes: every way to read it gives the batches of torchvision's recipe."""

from collections import namedtuple

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader

import memfeed
from memfeed.errors import TransformError
from memfeed.random import Keys
from memfeed.store.ragged_gather import gather_list
from memfeed.transforms import (
    CenterCrop,
    Compose,
    Normalize,
    PerSample,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    ToDtype,
)
from slow_device import SlowDevice
from support import Labelled, Made

N = 26
TRAIN = Compose(
    [RandomResizedCrop(16), RandomHorizontalFlip(), Normalize([0.5] * 3, [0.2] * 3)], on=["image", "mask", "boxes"]
)
Named = namedtuple("Named", "label image")


def sample(row):
    generator = torch.Generator().manual_seed(row)
    size = [(24, 24 + row % 9), (24 + row % 7, 24)][row % 2]
    return {
        "image": torch.randint(0, 256, (3, *size), dtype=torch.uint8, generator=generator),
        "mask": torch.randint(0, 9, size, generator=generator),
        "boxes": torch.rand(row % 3, 4, generator=generator) * 20,
        "label": row,
    }


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return memfeed.cache(Made(sample, N), tmp_path_factory.mktemp("sizes") / "s.mf", progress=False)


def by_row(batches):
    """{row: (image, mask, boxes)} of the batches of an epoch."""
    found = {}
    for batch in batches:
        for at, row in enumerate(batch["label"].tolist()):
            found[row] = batch["image"][at], batch["mask"][at], batch["boxes"][at]
    return found


def expected(transform=TRAIN, epoch=0):
    """What each row gets as a batch of its own, of one size."""
    batches = []
    for row in range(N):
        one = {name: torch.as_tensor(value)[None] for name, value in sample(row).items()}
        batches.append(transform.apply(one, Keys(0, epoch, torch.tensor([row]))))
    return by_row(batches)


def check(found, wanted):
    assert found.keys() == wanted.keys()
    for row, fields in found.items():
        for field, other in zip(fields, wanted[row], strict=True):
            torch.testing.assert_close(field, other, rtol=0, atol=2e-6)


def test_any_batch_size_rank_and_resume(store):
    wanted = expected()
    for options in ({"batch_size": 4}, {"batch_size": 7, "prefetch_factor": 0}, {"batch_size": 1}, {"batch_size": N}):
        loader = memfeed.Loader(store, shuffle=True, seed=0, transform=TRAIN, **options)
        batches = list(loader)
        assert batches[0]["image"].shape == (options["batch_size"], 3, 16, 16)
        check(by_row(batches), wanted)
    assert by_row(loader).keys() == wanted.keys()
    ranks = [
        memfeed.Loader(store, 3, shuffle=True, seed=0, transform=TRAIN, last="uneven", ranks=(rank, 2))
        for rank in range(2)
    ]
    check(by_row([batch for rank in ranks for batch in rank]), wanted)
    first = memfeed.Loader(store, 4, shuffle=True, seed=0, transform=TRAIN)
    head = [batch for _, batch in zip(range(3), first, strict=False)]
    rest = memfeed.Loader(store, 4, shuffle=True, seed=0, transform=TRAIN)
    rest.load_state_dict(first.state_dict())
    check(by_row([*head, *rest]), wanted)


def test_in_torchs_dataloader(store):
    collate = memfeed.Collate(TRAIN, seed=0)
    check(by_row(DataLoader(store, 3, collate_fn=collate)), expected())
    check(by_row(DataLoader(store, 3, collate_fn=collate, num_workers=2, multiprocessing_context="fork")), expected())
    parts = memfeed.Loader(store, 3, transform=TRAIN, seed=0)
    check(by_row(DataLoader(store, 3, sampler=parts.sampler, collate_fn=parts.collate_fn)), expected())
    same = memfeed.cache(
        Made(lambda i: sample(1)["image"], 3), store.path.parent / "same.mf", fields={"value": "list"}, progress=False
    )
    (batch,) = DataLoader(same, 3, collate_fn=memfeed.Collate(CenterCrop(8)))
    assert batch.shape == (3, 3, 8, 8), "three images of three channels"


def test_evaluation(store):
    recipe = Compose([Resize(20), CenterCrop(16), Normalize([0.5] * 3, [0.2] * 3)], on=["image", "mask", "boxes"])
    check(by_row(memfeed.Loader(store, 5, transform=recipe, seed=0)), expected(recipe))
    resized = Resize(20, on=["image", "mask", "boxes"])
    for batch in memfeed.Loader(store, 5, transform=resized):
        assert type(batch["image"]) is type(batch["mask"]) is (list if len(batch["label"]) > 1 else torch.Tensor)
        assert {min(image.shape[1:]) for image in batch["image"]} == {20}


def test_a_crop_reads_its_own_pixels(store, monkeypatch):
    gathered = []
    monkeypatch.setattr(
        "memfeed.store.gather.gather_list",
        lambda column, *rest: gathered.append(column.field.name) or gather_list(column, *rest),
    )
    check(by_row(memfeed.Loader(store, 5, transform=TRAIN, seed=0)), expected())
    assert "image" not in gathered
    assert "mask" not in gathered
    loader = memfeed.Loader(store, 5, transform=CenterCrop(8, on="image"))
    masks = [mask for batch in loader for mask in batch["mask"]]
    assert gathered.count("mask") == len(loader), "a field that stays is gathered as ever"
    assert all(torch.equal(mask, sample(row)["mask"]) for row, mask in enumerate(masks))
    rows = [sample(row) for row in range(N)]
    nbytes = sum(torch.as_tensor(value).nbytes for row in rows for value in row.values())
    assert loader.stats()["bytes"] == nbytes, "each row once"


@pytest.mark.parametrize(
    "transform",
    [
        RandomHorizontalFlip(on="image"),
        RandomHorizontalFlip(0.0, on="image"),
        ToDtype(torch.uint8, on="image"),
        Compose([ToDtype(torch.uint8), ToDtype(torch.uint8)], on=["image", "mask"]),
        Normalize([0.5] * 3, [0.5] * 3, on="image"),
        PerSample(lambda image: image, one_size=False, on="image"),
        {"label": lambda label: label},
        Compose([{"label": lambda label: label}, RandomHorizontalFlip(on="image")]),
        None,
    ],
    ids=lambda transform: type(transform).__name__,
)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_who_writes_to_a_batch_never_changes_the_store(store, transform, prefetch):
    kept = []
    for batch in memfeed.Loader(store, 5, transform=transform, prefetch_factor=prefetch):
        assert type(batch["image"]) is type(batch["mask"]) is (list if len(batch["label"]) > 1 else torch.Tensor)
        for tensor in [*batch["image"], *batch["mask"]]:
            tensor.fill_(7)
        kept.append(batch)
    assert all((tensor == 7).all() for batch in kept for tensor in [*batch["image"], *batch["mask"]])
    for row in range(N):
        assert torch.equal(store[row]["image"], sample(row)["image"])
        assert torch.equal(store[row]["mask"], sample(row)["mask"])


def test_samples_of_other_structures(tmp_path):
    wanted = [
        RandomResizedCrop(8).apply([sample(row)["image"]], Keys(0, 0, torch.tensor([row])))[0] for row in range(N)
    ]
    kinds = {
        "image": (lambda i: sample(i)["image"], lambda b: b, {}),
        "tuple": (lambda i: (i, sample(i)["image"]), lambda b: b[1], {"fields": ["label", "image"]}),
        "named": (lambda i: Named(i, sample(i)["image"]), lambda b: b.image, {}),
        "nested": (lambda i: {"a": [{"image": sample(i)["image"]}, i]}, lambda b: b["a"][0]["image"], {}),
        "dataclass": (lambda i: Labelled(sample(i)["image"], i), lambda b: b.image, {}),
        "tensordict": (
            lambda i: TensorDict({"image": sample(i)["image"], "y": torch.tensor(i)}),
            lambda b: b["image"],
            {},
        ),
    }
    for name, (make, image_of, options) in kinds.items():
        stored = memfeed.cache(Made(make, N), tmp_path / f"{name}.mf", progress=False, **options)
        on = "image" if name == "tuple" else None
        batches = [image_of(b) for b in memfeed.Loader(stored, 4, seed=0, transform=RandomResizedCrop(8, on=on))]
        assert torch.equal(torch.cat(batches), torch.stack(wanted)), name
        listed = [image_of(b) for b in memfeed.Loader(stored, 4, seed=0, transform=Resize(12, on=on))]
        assert {min(image.shape[1:]) for images in listed for image in images} == {12}, name


def test_several_stores_views_and_functions_of_a_field(store):
    half = store.subset(list(range(0, N, 2)))
    assert by_row(memfeed.Loader(half, 4, transform=TRAIN, seed=0)).keys() == {*range(0, N, 2)}
    both = memfeed.Loader([store, store], 4, seed=0, transform=CenterCrop(8, on="image"))
    assert [len(batch["image"]) for batch in both] == [4] * 13
    crops = {"image": lambda image: image[:, :9, :8] // 2}
    images = torch.cat([batch["image"] for batch in memfeed.Loader(store, 4, transform=crops)])
    assert torch.equal(images, torch.stack([sample(row)["image"][:, :9, :8] // 2 for row in range(N)]))
    keyed = {"image": RandomResizedCrop(8)}
    assert next(iter(memfeed.Loader(store, 4, transform=keyed)))["image"].shape == (4, 3, 8, 8)
    with pytest.raises(TransformError, match="'image' .*found results of shapes .*expected one shape"):
        list(memfeed.Loader(store, 4, transform={"image": lambda image: image}))


def test_on_a_device_with_streams(store, monkeypatch):
    device = SlowDevice()
    monkeypatch.setattr("memfeed.loading.epoch_reader.streams_of", lambda _: device)
    loader = memfeed.Loader(store, 4, seed=0, device="cpu", transform=Compose([WaitFor(device), TRAIN], on="image"))
    check(by_row(loader), expected())
    assert device.copies >= len(loader)


class WaitFor(ToDtype):
    """Run what the device has to do, as reading from it would, and change nothing."""

    def __init__(self, device):
        super().__init__(torch.uint8)
        self.device = device

    def make_params(self, shape, dtype, uniform):
        self.device.record_event().synchronize()
        return super().make_params(shape, dtype, uniform)


def test_the_last_batch_of_one_image_and_shapes_that_agree(tmp_path):
    rows = [np.full((3, 9, 8 + row % 2), row, np.uint8) for row in range(7)]
    stored = memfeed.cache(Made(lambda i: {"image": rows[i]}, 7), tmp_path / "s.mf", progress=False)
    shapes = [tuple(b["image"].shape) for b in memfeed.Loader(stored, 3, transform=CenterCrop(8))]
    assert shapes == [(3, 3, 8, 8), (3, 3, 8, 8), (1, 3, 8, 8)]
    kinds = [type(b["image"]) for b in memfeed.Loader(stored, 3, transform=RandomHorizontalFlip())]
    assert kinds == [list, list, torch.Tensor]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_images_of_which_one_side_varies(tmp_path, prefetch):
    """A column may be jagged along that side; the transforms see a list all the same. Other fields stay jagged."""

    def row(i):
        image = sample(i)["image"][:, :24, :24].repeat(1, 1, 2)[:, :, : 24 + i % 5]
        return {"image": image, "label": i, "pair": torch.zeros(2), "clip": torch.full((i % 3, 4, 5), i)}

    stored = memfeed.cache(Made(row, N), tmp_path / "s.mf", progress=False)
    for transform in (RandomResizedCrop(8, on="image"), Resize(12, on="image"), RandomHorizontalFlip(on="image")):
        for batch in memfeed.Loader(stored, 4, shuffle=True, seed=0, transform=transform, prefetch_factor=prefetch):
            for image, i in zip(batch["image"], batch["label"].tolist(), strict=True):
                alone = transform.apply({"image": row(i)["image"][None]}, Keys(0, 0, torch.tensor([i])))["image"][0]
                assert torch.equal(image, alone)
            assert isinstance(batch["image"], torch.Tensor) == transform.makes_one_size
            assert batch["clip"].is_nested
    for other in (None, {"label": lambda label: label}, ToDtype(torch.int32, on="pair")):
        for batch in memfeed.Loader(stored, 4, transform=other, prefetch_factor=prefetch):
            assert [type(value) for value in batch.values()] == [type(value) for value in stored[:2].values()]
            images, rows = batch["image"], batch["label"].tolist()
            images = images.unbind() if isinstance(images, torch.Tensor) else images
            assert all(torch.equal(image, row(i)["image"]) for image, i in zip(images, rows, strict=True))
            assert all((clip == i).all() for clip, i in zip(batch["clip"].unbind(), rows, strict=True))


def test_beside_padded_fields(tmp_path):
    def row(i):
        return {"image": sample(i)["image"], "tokens": torch.full((i % 4, 2, 2), i), "label": i}

    stored = memfeed.cache(Made(row, N), tmp_path / "s.mf", progress=False)
    loader = memfeed.Loader(stored, 4, transform=CenterCrop(8, on="image"), pad={"tokens": -1})
    for batch in loader:
        k, longest = len(batch["label"]), max(i % 4 for i in batch["label"].tolist())
        assert batch["image"].shape == (k, 3, 8, 8)
        assert batch["tokens"].shape == (k, longest, 2, 2)
        assert [
            int((tokens[:, 0, 0] == i).sum()) for tokens, i in zip(batch["tokens"], batch["label"], strict=True)
        ] == [i % 4 for i in batch["label"].tolist()]
