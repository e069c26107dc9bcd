"""Large images that a transform reads straight from the map, without a gather of whole rows."""

import pytest
import torch

import memfeed
from memfeed import Loader
from memfeed import transforms as T
from memfeed.random import Keys
from memfeed.schema.jagged import RowViews
from memfeed.store.gather import Gather
from support import equal

N, SIDE = 21, 80
RESIZE = [T.RandomResizedCrop(24), T.RandomHorizontalFlip(alternate=True), T.Normalize([0.5] * 3, [0.2] * 3)]


class Plus(T.Transform):
    """A transform of a user's own, which needs all values."""

    def make_params(self, shape, dtype, uniform):
        return uniform(1)[:, 0]

    def transform(self, image, params):
        return image + torch.from_numpy(params * 9).to(image.dtype)[:, None, None, None]


TRANSFORMS = {
    "resized crop": T.Compose(RESIZE, on="image"),
    "a mask follows": T.Compose([T.RandomCrop(40), T.RandomVerticalFlip()], on=["image", "mask"]),
    "in turn": T.Compose([T.RandomCrop(40, on="image"), T.Resize((9, 9), on="depth"), T.CenterCrop(9, on="image")]),
    "values only": T.Normalize([0.5] * 3, [0.2] * 3, on="image"),
    "nothing to do": T.ToDtype(torch.uint8, on="image"),
    "a user's own": Plus(on="image"),
    "a user's own at the end": T.Compose([T.RandomCrop(40), Plus()], on="image"),
    "each sample": T.PerSample(lambda sample: sample[:, :5], on="image"),
    "mixed": T.Compose(
        [T.Compose([T.RandomCrop(40), T.ToDtype(torch.float32)], on="image"), T.MixUp(1.0, 3, on=["image", "label"])]
    ),
    "channels last": T.Compose(RESIZE, on="image", memory_format=torch.channels_last),
}  # fmt: skip


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (N, 3, SIDE, SIDE), dtype=torch.uint8, generator=generator)
    data = {
        "image": images,
        "mask": images[:, 0] // 60,
        "depth": images[:, :1].float() / 255,
        "label": torch.arange(N) % 3,
        "row": torch.arange(N),
    }
    return memfeed.cache(data, tmp_path_factory.mktemp("views") / "a.mf", progress=False)


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("options", [{}, {"device": "cpu"}, {"ranks": (1, 2)}], ids=str)
def test_batches_are_those_of_gathered_rows(store, name, options):
    transform = TRANSFORMS[name]
    loader = Loader(store, 8, shuffle=True, seed=4, transform=transform, **options)
    for epoch in range(2):
        plain = Loader(store, 8, shuffle=True, seed=4, **options)
        plain.set_epoch(epoch)
        for found, batch in zip(loader, plain, strict=True):
            if name == "mixed":  # its draws depend on the step and the rank
                assert equal(found["depth"], batch["depth"])
                continue
            expected = transform.apply(batch, Keys(4, epoch, batch["row"]))
            assert type(found["image"]) is torch.Tensor
            assert equal(found, expected)


def viewed(monkeypatch, store, transform, **options):
    """The fields that a transform got as views of the map."""
    seen = []
    original = Gather._gather

    def gather(self, *args):
        leaves = original(self, *args)
        seen.append({f.name for f, leaf in zip(store.schema, leaves, strict=False) if isinstance(leaf, RowViews)})
        return leaves

    monkeypatch.setattr(Gather, "_gather", gather)
    list(Loader(store, 8, transform=transform, **options))
    assert seen
    return set().union(*seen)


def test_which_columns_are_views(store, monkeypatch):
    resize = TRANSFORMS["resized crop"]
    assert viewed(monkeypatch, store, resize) == {"image", "depth"}
    assert viewed(monkeypatch, store, None) == set()
    assert viewed(monkeypatch, store, lambda batch: batch) == set()
    assert viewed(monkeypatch, store, TRANSFORMS["mixed"]) == set(), "it sees whole batches"
    assert viewed(monkeypatch, store.select(["label", "row", "mask"]), T.RandomCrop(9, on="mask")) == set()


def test_nothing_is_written_to_the_store(store):
    before = store.column("image").clone()
    for transform in TRANSFORMS.values():
        for batch in Loader(store, 8, transform=transform):
            batch["image"].zero_()
            batch["depth"].zero_()
    assert torch.equal(store.column("image"), before)


def test_bytes_are_counted_once(store):
    counts = []
    for transform in (None, TRANSFORMS["resized crop"]):
        loader = Loader(store, 7, transform=transform)
        list(loader)
        counts.append(loader.stats()["bytes"])
    assert counts[0] == counts[1]


def test_columns_in_memory():
    images = torch.randint(0, 256, (N, 3, SIDE, SIDE), dtype=torch.uint8)
    transform = T.Compose(RESIZE)
    found = torch.cat([batch[0] for batch in Loader((images, torch.arange(N)), 8, seed=0, transform=transform)])
    assert torch.equal(found, transform.apply(images, Keys(0, 0, torch.arange(N))))
