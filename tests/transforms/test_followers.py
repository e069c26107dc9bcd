"""Masks, boxes and keypoints that follow the pixels of their images."""

import pytest
import torch
from image_batches import keys, pictures
from tensordict import TensorDict

from memfeed.errors import FieldError, TransformError
from memfeed.transforms import (
    CenterCrop,
    Compose,
    Normalize,
    RandomAffine,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomRotation,
    RandomVerticalFlip,
    Resize,
)


def scene(n=6, h=24, w=20, jagged=False):
    images = pictures(n, 3, h, w)
    boxes = torch.tensor([[2.0, 3.0, 9.0, 11.0], [10.0, 12.0, 18.0, 20.0]]).expand(n, 2, 4).clone()
    if jagged:
        boxes = torch.nested.nested_tensor([boxes[i, : i % 3] for i in range(n)], layout=torch.jagged)
    return {
        "image": images,
        "mask": (images[:, 0] > 128).long() * 300,
        "boxes": boxes,
        "label": torch.arange(n),
        "points": torch.tensor([[4, 5], [15, 16]]).expand(n, 2, 2).clone(),
    }


MOVES = [
    RandomCrop((20, 16)),
    RandomCrop((30, 30), padding=8),
    CenterCrop((35, 13)),
    RandomHorizontalFlip(1.0),
    RandomVerticalFlip(1.0),
    Resize((12, 10)),
    RandomResizedCrop((24, 20), scale=(0.5, 1.0)),
    RandomRotation(25, "bilinear"),
    RandomAffine(10, (0.1, 0.1), (0.9, 1.1), interpolation="bilinear"),
]


@pytest.mark.parametrize("path", ["apply", "reference"])
@pytest.mark.parametrize("move", MOVES, ids=lambda move: type(move).__name__)
def test_masks_follow_by_nearest_neighbour(path, move):
    batch = scene()
    out = getattr(Compose([move], on=["image", "mask", "label"]), path)(batch, keys())
    assert torch.equal(out["label"], batch["label"])
    assert out["mask"].dtype == torch.int64
    assert set(out["mask"].unique().tolist()) <= {0, 300}, "values are never mixed"
    assert out["mask"].shape[1:] == out["image"].shape[2:]
    agree = ((out["image"][:, 0] > 128) == (out["mask"] > 0)).double().mean()
    assert agree > 0.93, "the mask still lies on what it marks"


def test_boxes_and_points_follow_a_center_crop_that_pads():
    out = CenterCrop((27, 13), on=["image", "mask", "boxes", "points"]).apply(scene(1), keys(1))
    assert out["boxes"].tolist() == [[[0, 4, 5, 12], [6, 13, 13, 21]]]  # down by 1, to the left by 4
    assert out["points"].tolist() == [[[0, 6], [11, 17]]]
    assert out["mask"].any(2).any(0)[:1].sum() == out["mask"][0, -2:].sum() == 0
    assert torch.equal(out["mask"][0, 1:-2], scene(1)["mask"][0, :, 4:17])


@pytest.mark.parametrize("path", ["apply", "reference"])
def test_masks_are_filled_with_0(path):
    moves = [RandomRotation(45, fill=7), RandomCrop(30, padding=9, fill=7), RandomAffine(0, (0.5, 0.5), fill=7)]
    batch = {"image": torch.full((6, 1, 24, 20), 5.0), "mask": torch.full((6, 24, 20), 5)}
    out = getattr(Compose(moves, on=["image", "mask"]), path)(batch, keys())
    assert out["image"].unique().tolist() == [5, 7]
    assert out["mask"].unique().tolist() == [0, 5]


@pytest.mark.parametrize("shape", ["hw", "1hw", "chw"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float32, torch.int64])
def test_masks_of_any_shape_and_dtype(shape, dtype):
    batch = scene()
    mask = batch["mask"].to(dtype)
    batch["mask"] = {"hw": mask, "1hw": mask[:, None], "chw": mask[:, None].expand(-1, 5, -1, -1)}[shape]
    steps = [RandomResizedCrop(16), RandomHorizontalFlip(), RandomRotation(20), Normalize([0.5] * 3, [0.5] * 3)]
    out = Compose(steps, on=["image", "mask"]).apply(batch, keys())
    assert out["image"].dtype == torch.float32
    assert out["mask"].dtype == dtype
    assert out["mask"].shape == (*batch["mask"].shape[:-2], 16, 16)
    assert set(out["mask"].unique().tolist()) <= set(mask.unique().tolist()) | {0}


@pytest.mark.parametrize("move", MOVES, ids=lambda move: type(move).__name__)
def test_boxes_and_points_follow(move):
    """Each point is drawn into an image of its own, whose brightest pixel must be where the point comes to lie."""
    n, h, w = 6, 24, 20
    batch = scene()
    spot = torch.zeros(n, 1, h, w)
    spot[:, :, 10:13, 8:11] = torch.tensor([[1.0, 2.0, 1.0], [2.0, 4.0, 2.0], [1.0, 2.0, 1.0]])
    batch = {"image": spot, "points": torch.tensor([[[9.0, 11.0]]]).expand(n, 1, 2).clone(), "boxes": batch["boxes"]}
    out = Compose([move], on=["image", "points", "boxes"]).apply(batch, keys())
    height, width = out["image"].shape[2:]
    for image, point, boxes in zip(out["image"], out["points"], out["boxes"], strict=True):
        x, y = point[0].tolist()
        assert (boxes >= 0).all()
        assert (boxes[:, [0, 2]] <= width).all()
        assert (boxes[:, [1, 3]] <= height).all()
        if 1 <= x <= width - 2 and 1 <= y <= height - 2:
            row, column = divmod(int(image[0].argmax()), width)
            assert abs(column - x) <= 1.01
            assert abs(row - y) <= 1.01


def _xyxy():
    from torchvision.tv_tensors import BoundingBoxFormat

    return BoundingBoxFormat.XYXY


def test_boxes_are_torchvisions(functional):
    boxes = torch.tensor([[2.0, 3.0, 9.0, 11.0], [10.0, 12.0, 18.0, 20.0]])
    batch = {"image": pictures(1), "boxes": boxes[None]}
    flipped = Compose([RandomHorizontalFlip(1.0)], on=["image", "boxes"]).apply(batch, keys(1))["boxes"][0]
    form = functional.horizontal_flip_bounding_boxes(boxes, _xyxy(), (24, 20))
    assert torch.equal(flipped, form)
    resized = Compose([Resize((48, 10))], on=["image", "boxes"]).apply(batch, keys(1))["boxes"][0]
    assert torch.equal(resized, functional.resize_bounding_boxes(boxes, (24, 20), [48, 10])[0])


def test_keypoints_are_those_of_pixels():
    points = torch.tensor([[[0, 0], [19, 23], [4, 7]]])
    batch = {"image": pictures(1), "points": points}
    flips = Compose([RandomHorizontalFlip(1.0), RandomVerticalFlip(1.0)], on=["image", "points"])
    expected = torch.tensor([[[19, 23], [0, 0], [15, 16]]])
    assert torch.equal(flips.apply(batch, keys(1))["points"], expected), "as torchvision's keypoints"
    larger = Compose([Resize((48, 40))], on=["image", "points"]).apply({**batch, "points": points.double()}, keys(1))
    assert larger["points"][0, 0].tolist() == [0.5, 0.5], "the middle of the four pixels that it became"


def test_ragged_boxes_follow():
    batch = scene(jagged=True)
    dense = scene()
    steps = [RandomResizedCrop(16), RandomHorizontalFlip()]
    got = Compose(steps, on=["image", "boxes"]).apply(batch, keys())["boxes"]
    expected = Compose(steps, on=["image", "boxes"]).apply(dense, keys())["boxes"]
    assert got.is_nested
    for row, (one, other) in enumerate(zip(got.unbind(), expected, strict=True)):
        assert torch.equal(one, other[: row % 3])


def test_integer_boxes_stay_integers():
    batch = {"image": pictures(2), "boxes": torch.tensor([[[2, 3, 9, 11]]]).expand(2, 1, 4)}
    out = Compose([RandomCrop((20, 16)), Resize(40)], on=["image", "boxes"]).apply(batch, keys(2))
    assert out["boxes"].dtype == torch.int64


def test_fields_of_tensordicts_follow_and_nested_paths_still_name_one_field():
    batch = TensorDict(
        {"a": TensorDict({"image": pictures(), "mask": pictures()[:, 0]}, [6]), "y": torch.arange(6)}, [6]
    )
    steps = [RandomCrop(12), RandomVerticalFlip()]
    out = Compose(steps, on=[("a", "image"), ("a", "mask")]).apply(batch, keys())
    assert torch.equal(out["a", "image"][:, 0], out["a", "mask"])
    one = Compose(steps, on=("a", "image")).apply(batch, keys())
    assert torch.equal(one["a", "image"], out["a", "image"])
    assert torch.equal(one["a", "mask"], batch["a", "mask"])
    listed = Compose(steps, on=[0, 1]).apply([pictures(), pictures()[:, 0]], keys())
    assert torch.equal(listed[0][:, 0], listed[1])


def test_fields_that_cannot_follow():
    batch = {"image": pictures(), "odd": torch.zeros(6, 5, 7), "far": torch.zeros(6, 3, 9, 9)}
    for name in ("odd", "far"):
        with pytest.raises(TransformError, match=rf"'{name}' .*expected a mask of their height and width"):
            Compose([RandomCrop(8)], on=["image", name]).apply(batch, keys())
    with pytest.raises(FieldError, match="no field 'nothing'"):
        Compose([RandomCrop(8)], on=["image", "nothing"]).apply(batch, keys())
