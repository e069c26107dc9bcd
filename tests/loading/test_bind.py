"""What a user gives as `transform=` as one function of a batch and its keys."""

import pytest
import torch

from memfeed.errors import FieldError, LoaderError, TransformError
from memfeed.loading.bind import bind, followed_images, is_keyed, transform_of
from memfeed.random import Keys
from memfeed.schema.infer import infer
from memfeed.transforms import Compose, RandomHorizontalFlip, ToDtype

KEYS = Keys(0, 0, torch.arange(2))
FOUND = infer([({"image": torch.zeros(3, 4, 4), "mask": torch.zeros(1, 4, 4)}, 1)])


@pytest.mark.parametrize("transform", [None, {}])
def test_nothing(transform):
    assert bind(transform) is None


def test_a_callable_gets_the_batch_without_keys():
    assert bind(lambda batch: batch + 1)(1, KEYS) == 2


@pytest.mark.parametrize("transform", [3, "flip", [lambda batch: batch], object()])
def test_what_is_no_transform(transform):
    with pytest.raises(TransformError, match=r"found \w+ as transform=; expected a memfeed.transforms transform"):
        bind(transform)
    with pytest.raises(TransformError, match="transform= gives"):
        bind({"a": transform})


def test_functions_of_fields():
    batch = ({"image": torch.ones(2, 3, 4, 4), "mask": torch.ones(2, 1, 4, 4)}, torch.tensor([1, 2]))
    found, label = bind({(0, "image"): lambda x: x * 2, 1: lambda y: -y}, FOUND.schema)(batch, KEYS)
    assert found["image"].unique().tolist() == [2]
    assert label.tolist() == [-1, -2]
    assert batch[1].tolist() == [1, 2]  # what came in is as it was
    with pytest.raises(FieldError, match="none"):
        bind({"none": lambda x: x}, FOUND.schema)


def test_transforms_of_ours_get_the_keys():
    flip = RandomHorizontalFlip(on=(0, "image"))
    assert is_keyed(flip)
    assert not is_keyed(lambda batch: batch)
    batch = ({"image": torch.rand(2, 3, 4, 4), "mask": torch.zeros(2, 1, 4, 4)}, torch.zeros(2))
    found = bind(flip, FOUND.schema)(batch, KEYS)
    assert torch.equal(found[0]["image"], flip.apply(batch, KEYS)[0]["image"])


def test_the_transform_of_a_store_is_left_out_where_its_fields_are():
    class Fake:
        def __init__(self, schema, transform):
            self.schema, self.transform = schema, transform

    flip = RandomHorizontalFlip(on=[(0, "image"), (0, "mask")])
    whole = Fake(FOUND.schema, flip)
    assert transform_of(None, whole) is flip
    assert transform_of({}, whole) == {}
    assert transform_of(None, Fake(FOUND.schema, None)) is None
    assert transform_of(None, Fake(FOUND.schema.select([2]), flip)) is None
    with pytest.raises(LoaderError, match="found a view without the field"):
        transform_of(None, Fake(FOUND.schema.select([0, 2]), flip))
    unnamed = ToDtype(torch.float32)
    assert transform_of(None, Fake(FOUND.schema.select([2]), unnamed)) is unnamed


def test_fields_that_follow_images():
    flip = RandomHorizontalFlip(on=[(0, "image"), (0, "mask")])
    assert followed_images(flip, FOUND.schema) == {1: 0}
    assert followed_images(Compose([ToDtype(torch.float32, on=(0, "image")), flip]), FOUND.schema) == {1: 0}
    assert followed_images(RandomHorizontalFlip(on=(0, "image")), FOUND.schema) == {}


def test_boxes_that_are_not_corners():
    tv = pytest.importorskip("torchvision.tv_tensors")
    boxes = tv.BoundingBoxes(torch.zeros(1, 4), format="XYWH", canvas_size=(4, 4))
    schema = infer([{"image": torch.zeros(3, 4, 4), "boxes": boxes}]).schema
    moved = RandomHorizontalFlip(on=["image", schema.names().split(", ")[1]])
    with pytest.raises(TransformError, match="has boxes of the format XYWH; expected XYXY"):
        bind(moved, schema)
    assert bind(RandomHorizontalFlip(on="image"), schema) is not None
