"""torchvision's tv_tensors come back from a store as what they were."""

import pytest
import torch
from torch.utils.data import DataLoader
from torchvision import tv_tensors
from torchvision.transforms import v2

import memfeed
from forked_programs import run_program
from memfeed import Loader
from memfeed.errors import FieldError, SchemaError, TransformError
from memfeed.transforms import RandomHorizontalFlip
from support import Made, cache, equal

N = 40


def same(found, sample):
    """Return True if a tensor is of the class of `sample`, with its options and its values."""
    return type(found) is type(sample) and found.__dict__ == sample.__dict__ and equal(found, sample)


def detection(index, count=None):
    h, w = 20 + index % 3, 30 + index % 2
    boxes = torch.arange(4.0).repeat(index % 4 if count is None else count, 1) + index
    image = tv_tensors.Image(torch.full((3, h, w), index, dtype=torch.uint8))
    target = {
        "boxes": tv_tensors.BoundingBoxes(boxes, format="XYWH", canvas_size=(h, w)),
        "masks": tv_tensors.Mask(torch.full((len(boxes), h, w), index % 2, dtype=torch.bool)),
        "labels": torch.arange(len(boxes)),
    }
    return image, target


def same_detection(found, sample):
    keys = [key for key in sample[1] if key != "labels"]
    return (
        same(found[0], sample[0])
        and all(same(found[1][key], sample[1][key]) for key in keys)
        and type(found[1]["labels"]) is torch.Tensor
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_of_a_detection_dataset(path, workers):
    dataset = Made(detection, N)
    for store in (cache(dataset, path, workers=workers), memfeed.open(path), cache(dataset, path)):
        store.verify()
        assert all(same_detection(store[i], detection(i)) for i in range(N))
    store = memfeed.open(path)
    assert same_detection(next(iter(DataLoader(store.subset([3, 5]), 2, collate_fn=list)))[1], detection(5))
    assert [int(side) for side in store.column("1.boxes.canvas_size")[4]] == list(detection(4)[0].shape[-2:])
    with pytest.raises(FieldError, match=r"holds several fields.*boxes\.values"):
        store.column((1, "boxes"))
    assert len(store.select((1, "boxes")).schema) == 2
    cropped = v2.CenterCrop(8)(store[7])
    assert tuple(cropped[1]["boxes"].canvas_size) == (8, 8)


def test_a_batch_has_plain_tensors(path):
    store = cache(Made(detection, N), path)
    images, target = store[[2, 5, 8]]
    assert isinstance(images, list)
    assert target["boxes"].is_nested
    assert [row.tolist() for row in target["boxes"].unbind()] == [detection(i)[1]["boxes"].tolist() for i in (2, 5, 8)]
    for batch in Loader(store, 7):
        assert type(batch[1]["labels"]) is type(batch[1]["boxes"])
    one_size = cache(Made(lambda i: tv_tensors.Image(torch.full((1, 4, 4), i)), N), path, overwrite=True)
    assert type(one_size[0]) is tv_tensors.Image
    assert type(one_size[:3]) is torch.Tensor
    assert type(next(iter(Loader(one_size, 2)))) is torch.Tensor


@pytest.mark.parametrize(("box_format", "moved"), [("XYXY", True), ("XYWH", False)])
def test_transforms_move_boxes_of_corners_only(path, box_format, moved):
    def sample(i):
        boxes = tv_tensors.BoundingBoxes(torch.tensor([[1.0, 2.0, 5.0, 6.0]]), format=box_format, canvas_size=(8, 8))
        return {"image": tv_tensors.Image(torch.zeros(3, 8, 8, dtype=torch.uint8)), "boxes": boxes}

    store = cache(Made(sample, 8), path)
    flip = RandomHorizontalFlip(1.0, on=["image", "boxes"])
    if moved:
        batch = next(iter(Loader(store, 2, transform=flip)))
        assert batch["boxes"][0].tolist() == [[3.0, 2.0, 7.0, 6.0]]
    else:
        with pytest.raises(TransformError, match="field boxes has boxes of the format XYWH; expected XYXY"):
            next(iter(Loader(store, 2, transform=flip)))


def test_names_of_fields_count_boxes_once(path):
    store = cache(
        Made(lambda i: (detection(i)[0], detection(i)[1]["boxes"], i), N), path, fields=["image", "boxes", "n"]
    )
    assert [field.name for field in store.schema] == ["image", "boxes", "boxes.canvas_size", "n"]
    assert store.column("boxes")[2].tolist() == detection(2)[1]["boxes"].tolist()
    assert same(store[6][1], detection(6)[1]["boxes"])


def test_other_ways_in(path):
    with memfeed.Writer(path) as writer:
        for i in range(N):
            writer.append({"video": tv_tensors.Video(torch.zeros(i % 3, 1, 2, 2)), "b": detection(i)[1]["boxes"]})
        with pytest.raises(SchemaError, match="found a batch of BoundingBoxes.*append them one by one"):
            writer.extend({"video": torch.zeros(2, 1, 1, 2, 2), "b": torch.zeros(2, 3, 4)})
    store = memfeed.open(path)
    assert all(same(store[i]["b"], detection(i)[1]["boxes"]) for i in range(N))
    assert type(store[4]["video"]) is tv_tensors.Video
    stream = cache(map(detection, range(N)), path, overwrite=True)
    assert same_detection(stream[9], detection(9))


@pytest.mark.skipif(not hasattr(tv_tensors, "KeyPoints"), reason="torchvision without key points")
def test_key_points_and_rotated_boxes(path):
    def sample(i):
        turned = tv_tensors.BoundingBoxes(
            torch.rand(i % 3, 5), format="CXCYWHR", canvas_size=(i, 9), clamping_mode=None
        )
        return tv_tensors.KeyPoints(torch.full((2, 2), i), canvas_size=(i, i + 1)), turned

    made = [sample(i) for i in range(N)]
    store = cache(Made(made), path)
    assert all(same(one, other) for i in range(N) for one, other in zip(store[i], made[i], strict=True))


def test_what_is_mixed(path):
    mixed = Made(lambda i: tv_tensors.Image(torch.zeros(1, 2, 2)) if i % 2 else torch.zeros(1, 2, 2), N)
    assert type(cache(mixed, path)[1]) is torch.Tensor
    late = Made(lambda i: torch.zeros(1, 2, 2) if i == 31 else tv_tensors.Image(torch.zeros(1, 2, 2)), N)
    with pytest.raises(SchemaError, match="sample 31: found Tensor.*; expected an Image of torchvision"):
        cache(late, path, overwrite=True)
    maybe = Made(lambda i: (i, None if i % 3 else tv_tensors.Mask(torch.ones(2, 2))), N)
    store = cache(maybe, path, overwrite=True)
    assert type(store[3][1]) is tv_tensors.Mask
    assert store[4][1] is None

    def boxes(i, odd):
        return tv_tensors.BoundingBoxes(torch.zeros(1, 4), format="XYXY" if i in odd else "XYWH", canvas_size=(9, 9))

    with pytest.raises(SchemaError, match="found BoundingBoxes of .*XYWH.*XYXY.*expected one format"):
        cache(Made(lambda i: (boxes(i, range(0, N, 2)), i), N), path, overwrite=True)
    with pytest.raises(SchemaError, match="sample 31: found BoundingBoxes of .*XYXY.*expected BoundingBoxes of .*XYWH"):
        cache(Made(lambda i: (boxes(i, [31]), i), N), path, overwrite=True)


def test_the_format_says_what_it_needs(path):
    assert cache(Made(lambda i: tv_tensors.Image(torch.zeros(1, 2, 2)), N), path)._view.manifest.version == 1
    assert cache(Made(detection, N), path, overwrite=True)._view.manifest.version == 2


def test_without_torchvision_they_are_plain_tensors(path, tmp_path):
    cache(Made(detection, N), path)
    code = """
import sys
assert "torchvision" not in sys.modules
sys.modules["torchvision"] = None
import torch, memfeed
image, target = memfeed.open(sys.argv[1])[3]
assert type(image) is type(target["boxes"]) is type(target["masks"]) is torch.Tensor
assert target["boxes"].shape == (3, 4)
"""
    run_program(code, path, at=tmp_path)
