"""Fields in batches of every structure: found, replaced, and missing."""

from collections import namedtuple

import optree
import pytest
import torch
from image_batches import keys, photos
from tensordict import TensorDict, tensorclass

from memfeed.errors import FieldError, TransformError
from memfeed.transforms import CenterCrop, Compose, Normalize, RandomCrop, RandomHorizontalFlip

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


Pair = namedtuple("Pair", "image label")


@tensorclass
class Inner:
    image: torch.Tensor


@tensorclass
class Photos:
    image: torch.Tensor
    label: torch.Tensor


def augment(size=8, **options):
    return Compose([RandomCrop(size), RandomHorizontalFlip(), Normalize(MEAN, STD)], **options)


def batches():
    """(name, batch, how to take the image out, on)"""
    image, label = photos(), torch.arange(6)
    mask = photos(c=1)
    return [
        ("tensor", image, lambda b: b, None),
        ("list", [image, label], lambda b: b[0], None),
        ("list by position", [mask, image], lambda b: b[1], 1),
        ("tuple", (label, image), lambda b: b[1], None),
        ("dict", {"x": image, 1: label, "none": None, "names": ["a"] * 6}, lambda b: b["x"], None),
        ("dict by key", {"x": image, "mask": mask}, lambda b: b["x"], "x"),
        ("nested", {"a": [label, {"x": image}], "mask": mask}, lambda b: b["a"][1]["x"], ("a", 1, "x")),
        ("namedtuple", Pair(image, label), lambda b: b.image, "image"),
        ("namedtuple by position", Pair(image, label), lambda b: b[0], 0),
        ("tensordict", TensorDict({"x": image, "y": label}, [6]), lambda b: b["x"], None),
        ("tensordict nested", TensorDict({"a": {"x": image}, "m": mask}, [6]), lambda b: b["a", "x"], ("a", "x")),
        ("locked tensordict", TensorDict({"a": {"x": image}}, [6]).lock_(), lambda b: b["a", "x"], None),
        ("tensordict in a list", [label, TensorDict({"x": image}, [6])], lambda b: b[1]["x"], (1, "x")),
        ("tensorclass", Photos(image=image, label=label, batch_size=[6]), lambda b: b.image, None),
        (
            "tensorclass in a tensordict",
            TensorDict({"a": Inner(image=image, batch_size=[6]), "m": mask}, [6]),
            lambda b: b["a"].image,
            ("a", "image"),
        ),
    ]


@pytest.mark.parametrize(("batch", "get", "on"), [b[1:] for b in batches()], ids=[b[0] for b in batches()])
def test_batches_keep_their_structure(batch, get, on):
    before = get(batch).clone()
    result = augment(on=on).apply(batch, keys())
    assert type(result) is type(batch)
    assert torch.equal(get(result), augment().apply(photos(), keys()))
    assert torch.equal(get(batch), before)
    assert torch.equal(get(augment(on=on).reference(batch, keys())), augment().reference(photos(), keys()))


def test_other_fields_are_passed_on():
    batch = {"x": photos(), "y": torch.arange(6), "none": None, "names": ["a"]}
    result = augment().apply(batch, keys())
    assert list(result) == list(batch)
    assert result["y"] is batch["y"]
    assert result["none"] is None
    assert result["names"] == ["a"]
    batch = TensorDict({"x": photos(), "a": {"y": torch.arange(6)}}, [6])
    result = augment().apply(batch, keys())
    assert result.batch_size == (6,)
    assert result["a", "y"].data_ptr() == batch["a", "y"].data_ptr()


def test_containers_whose_structure_cannot_be_compared():
    """A program may register a class with optree, with tensors in what says how to build it again."""

    class Pair:
        def __init__(self, image, weights):
            self.image, self.weights = image, weights

    optree.register_pytree_node(
        Pair,
        lambda pair: ([pair.image], pair.weights, ["image"]),
        lambda weights, parts: Pair(parts[0], weights),
        namespace="memfeed",
    )
    try:
        for _ in range(2):
            batch = Pair(photos(4), torch.rand(3))
            found = CenterCrop(3).apply(batch, keys(4))
            assert torch.equal(found.image, CenterCrop(3).apply(batch.image, keys(4)))
            assert found.weights is batch.weights
    finally:
        optree.unregister_pytree_node(Pair, namespace="memfeed")


def test_parts_on_fields_of_their_own():
    batch = {"x": photos(), "mask": photos(c=1)}
    transform = Compose([RandomHorizontalFlip(1.0, on="mask"), Normalize(MEAN, STD), CenterCrop(4, on="mask")], on="x")
    result = transform.apply(batch, keys())
    assert torch.equal(result["mask"], CenterCrop(4).apply(photos(c=1).flip(-1), keys()))
    assert torch.equal(result["x"], Normalize(MEAN, STD).apply(photos(), keys()))
    with pytest.raises(TransformError, match=r"works on the fields \['mask', 'x'\]; expected one field"):
        transform(photos())


@pytest.mark.parametrize("on", ["images", 0, ("a", 2), ["y", "z"], ("a.0",)])
def test_no_such_field(on):
    batch = {"a": [photos(), {"deep": photos()}], "y": torch.arange(6)}
    with pytest.raises(FieldError) as caught:
        RandomCrop(2, on=on).apply(batch, keys())
    assert str(caught.value) == (
        f"found no field {'z' if isinstance(on, list) else on!r}; expected one of: ('a', 0) (uint8 [6, 3, 12, 10]), "
        "('a', 1, 'deep') (uint8 [6, 3, 12, 10]), 'y' (int64 [6])"
    )


def test_a_tuple_is_one_path_a_list_is_several_fields_and_a_container_is_its_fields():
    batch = {"target": {"image": photos(), "mask": photos(c=1)}, "label": torch.arange(6)}
    flip = RandomHorizontalFlip(1.0)
    want = flip.apply(photos(), keys()), photos(c=1).flip(-1)
    for on in (["target.image", ("target", "mask")], "target", ("target",), ["target", "label"]):
        got = type(flip)(1.0, on=on).apply(batch, keys())
        assert torch.equal(got["target"]["image"], want[0])
        assert torch.equal(got["target"]["mask"], want[1])
        assert torch.equal(got["label"], batch["label"])
    only = RandomHorizontalFlip(1.0, on="target.image").apply(batch, keys())
    assert torch.equal(only["target"]["mask"], batch["target"]["mask"])
    with pytest.raises(FieldError) as caught:
        RandomCrop(2, on=("image", "mask")).apply(batch["target"], keys())
    assert str(caught.value).endswith("A tuple is one path; for several fields write ['image', 'mask']")


def test_params_and_calls_take_lists_too():
    transform = RandomCrop(4, on=["image", "mask"])
    transform.apply({"image": photos(), "mask": photos(c=1)}, keys())
    assert transform.params([0])["RandomCrop.0"].top.shape == (1,)
    assert transform(photos()).shape == (6, 3, 4, 4)
