"""Names that `fields=` gave are names in every argument of the loader, with one meaning for a list and for a tuple."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset

import memfeed
from memfeed.errors import FieldError, LoaderError, TransformError
from memfeed.transforms import Compose, MixUp, PerSample, RandomHorizontalFlip, ToDtype

N = 12
IMAGES = torch.randint(0, 256, (N, 3, 6, 6), dtype=torch.uint8)
MASKS = torch.randint(0, 9, (N, 6, 6))
LABELS = torch.arange(N) % 4
NAMES = ["image", "mask", "label"]


@pytest.fixture
def store(tmp_path):
    return memfeed.cache((IMAGES, MASKS, LABELS), tmp_path / "s.mf", fields=NAMES, progress=False)


def loaders(store, transform, **options):
    """The same batches in three ways: the loader, a DataLoader with Collate, and one made of the loader's parts."""
    loader = memfeed.Loader(store, 4, transform=transform, seed=0, **options)
    collate = memfeed.Collate(transform)
    parts = memfeed.Loader(store, 4, transform=transform, seed=0)
    return [loader, DataLoader(store, 4, collate_fn=collate), DataLoader(store, 4, collate_fn=parts.collate_fn)]


def test_on_takes_the_names_of_a_tuple_sample(store):
    flip = RandomHorizontalFlip(1.0, on=["image", "mask"])
    for loader in loaders(store, flip):
        got = [torch.cat(parts) for parts in zip(*loader, strict=True)]
        assert torch.equal(got[0], IMAGES.flip(-1))
        assert torch.equal(got[1], MASKS.flip(-1))
        assert torch.equal(got[2], LABELS)


def test_names_work_in_worker_processes_and_through_a_subset(store):
    flip = RandomHorizontalFlip(1.0, on=["image", "mask"])
    loader = DataLoader(Subset(store, range(6)), 3, collate_fn=memfeed.Collate(flip), num_workers=1)
    assert torch.equal(torch.cat([mask for _, mask, _ in loader]), MASKS[:6].flip(-1))


def test_each_transform_may_have_a_name_of_its_own(store):
    both = Compose([RandomHorizontalFlip(1.0, on=["image", "mask"]), ToDtype(torch.float32)], on="image")
    image, mask, _ = next(iter(memfeed.Loader(store, N, transform=both)))
    assert torch.equal(mask, MASKS.flip(-1))
    assert image.dtype is torch.float32


def test_transforms_of_whole_batches_take_the_names(store):
    swap = PerSample(lambda image, mask: (image + 1, mask * 2), on=["image", "mask"])
    image, mask, _ = next(iter(memfeed.Loader(store, N, transform=swap)))
    assert torch.equal(image, IMAGES + 1)
    assert torch.equal(mask, MASKS * 2)
    mix = Compose([ToDtype(torch.float32, on="image"), MixUp(num_classes=4, on=["image", "label"])])
    assert next(iter(memfeed.Loader(store, N, transform=mix)))[2].shape == (N, 4)


def test_albumentations_gets_the_names():
    seen = {}

    class Fake:
        def add_targets(self, targets):
            seen.update(targets)

        def set_random_seed(self, seed):
            pass

        def __call__(self, **arrays):
            return arrays

        def __deepcopy__(self, memo):
            return self

    from memfeed.random import Keys

    given = {(0,): "photo", (1,): "depth"}
    PerSample(Fake(), on=["photo", "depth"]).apply(
        [IMAGES, MASKS.to(torch.uint8)], Keys(0, 0, torch.arange(N)), given_names=given
    )
    assert seen == {"depth": "mask"}


def test_a_name_that_says_mask_is_not_left_behind(tmp_path):
    fields = ["photo", "boxes"]
    store = memfeed.cache((IMAGES, torch.rand(N, 2, 4)), tmp_path / "b.mf", fields=fields, progress=False)
    with pytest.raises(TransformError, match=r"on=\['photo', 'boxes'\] moves all of them, on='photo' only"):
        next(iter(memfeed.Loader(store, 4, transform=RandomHorizontalFlip(1.0))))


def test_every_argument_takes_the_names(store):
    loader = memfeed.Loader(store, N, transform={"label": lambda x: x + 100}, placement={"image": "mapped"})
    assert torch.equal(next(iter(loader))[2], LABELS + 100)
    assert [field.name for field in store.select("image", "label").schema] == ["image", "label"]
    assert torch.equal(store.column("label"), LABELS)
    again = memfeed.open(store.path, select=["image", "label"])
    assert [field.name for field in again.schema] == ["image", "label"]
    assert list(again[0]) == [0, 2], "a tuple that loses a part is a dict"
    batch = next(iter(memfeed.Loader(again, N, transform=RandomHorizontalFlip(1.0, on="image"))))
    assert torch.equal(batch[0], IMAGES.flip(-1))


def test_fields_of_one_name_in_one_store_are_of_that_store(tmp_path, store):
    other = memfeed.cache((LABELS, IMAGES), tmp_path / "o.mf", fields=["label", "image"], progress=False)
    collate = memfeed.Collate(RandomHorizontalFlip(1.0, on="image"))
    for _ in range(2):
        assert torch.equal(
            next(iter(DataLoader(store.select("image", "label"), N, collate_fn=collate)))[0], IMAGES.flip(-1)
        )
        assert torch.equal(next(iter(DataLoader(other, N, collate_fn=collate)))[1], IMAGES.flip(-1))


ONE = {
    "column": lambda store, name: store.column(name),
    "transform": lambda store, name: memfeed.Loader(store, transform={name: lambda x: x}),
}
SEVERAL = {
    "select": lambda store, which: store.select(which),
    "open": lambda store, which: memfeed.open(store.path, select=which),
}
ANY = {
    "placement": lambda store, name: memfeed.Loader(store, placement={name: "mapped"}),
    "on": lambda store, name: next(iter(memfeed.Loader(store, 2, transform=ToDtype(torch.float32, on=name)))),
}


@pytest.mark.parametrize("use", [*ONE, *SEVERAL, *ANY])
@pytest.mark.parametrize("name", ["image", 0, (0,), "0"])
def test_each_spelling_of_one_field(store, use, name):
    {**ONE, **SEVERAL, **ANY}[use](store, name)


@pytest.mark.parametrize("use", [*ONE, *SEVERAL, *ANY])
@pytest.mark.parametrize("name", ["imgae", 3, ("image", "label"), (0, 1), 1.5])
def test_each_argument_says_the_same_of_a_name_that_is_none(store, use, name):
    with pytest.raises(FieldError) as caught:
        {**ONE, **SEVERAL, **ANY}[use](store, name)
    text = str(caught.value)
    assert "image" in text
    assert "label" in text
    assert len(text) < 400
    if name == "imgae":
        assert text.endswith(": write 'image'")
    if name == ("image", "label"):
        assert text.endswith("for several fields write ['image', 'label']")


@pytest.mark.parametrize("use", SEVERAL)
def test_a_list_is_several_fields(store, use):
    assert [field.name for field in SEVERAL[use](store, ["label", (0,)]).schema] == ["image", "label"]
    with pytest.raises(FieldError, match="found an empty list of fields; expected one or more of: image, mask, label"):
        SEVERAL[use](store, [])


def test_a_list_is_no_one_field(store):
    with pytest.raises(
        FieldError, match=r"found a list of fields, \['image'\]; expected one field of: image, mask, label"
    ):
        store.column(["image"])


def test_keys_with_dots_are_reached_by_a_tuple(tmp_path):
    data = {"a.b": torch.arange(N), "a": {"b": IMAGES, "c.d": MASKS}}
    store = memfeed.cache(
        data, tmp_path / "s.mf", forms={("a.b",): torch.int16, ("a", "c.d"): torch.int32}, progress=False
    )
    assert store.column(("a.b",)).dtype is torch.int16
    assert store.column(("a", "c.d")).dtype is store.column("a.c.d").dtype is torch.int32
    assert store.column(("a", "b")).shape == IMAGES.shape
    assert [field.path for field in store.select([("a", "c.d")]).schema] == [("a", "c.d")]
    assert [field.path for field in store.select("a").schema] == [("a", "b"), ("a", "c.d")]
    loader = memfeed.Loader(store, N, transform=RandomHorizontalFlip(1.0, on=[("a", "b"), ("a", "c.d")]))
    assert torch.equal(next(iter(loader))["a"]["c.d"], MASKS.flip(-1))


def test_a_container_of_any_depth_is_named_by_dots(tmp_path):
    data = {"x": {"y": {"p": LABELS, "q": MASKS}, "z": IMAGES}}
    store = memfeed.cache(data, tmp_path / "s.mf", progress=False)
    assert [field.name for field in store.select("x.y").schema] == ["x.y.p", "x.y.q"]
    assert memfeed.Loader(store, 4, placement={"x.y": "mapped"})
    with pytest.raises(FieldError, match="found 'x.y', which holds several fields; expected one of: x.y.p, x.y.q"):
        store.column("x.y")


def test_a_given_name_that_is_the_key_of_another_field_must_be_a_path(tmp_path):
    rows = [{"a": 1, "b": 2.0}] * 4
    store = memfeed.cache(rows, tmp_path / "s.mf", fields=["b", "c"], progress=False)
    with pytest.raises(FieldError, match=r"found several fields named 'b'; .*: write \('b',\) or \('a',\)"):
        store.column("b")
    assert store.column(("a",)).tolist() == [1] * 4
    assert store.column("a").tolist() == [1] * 4


def test_loader_errors_are_still_of_their_class(store):
    with pytest.raises(LoaderError, match="found placement="):
        memfeed.Loader(store, placement={"image": "moon"})


def test_numpy_input_has_the_names_too(tmp_path):
    store = memfeed.cache((np.arange(4), np.arange(4.0)), tmp_path / "s.mf", fields=["row", "x"], progress=False)
    assert store.column("x").tolist() == [0, 1, 2, 3]
