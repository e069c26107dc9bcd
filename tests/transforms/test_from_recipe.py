"""Transforms that are made of the description in a store."""

import pytest
import torch

from memfeed import transforms as T
from memfeed.errors import TransformError
from memfeed.random import Keys
from memfeed.schema.recipe import PER_SAMPLE, RecipeStep
from memfeed.transforms.from_recipe import make_pipeline, make_transform, on_of


def test_a_pipeline_does_what_its_steps_do():
    steps = [
        RecipeStep(name="RandomCrop", arguments={"size": [6, 5]}, on=(("image",),)),
        RecipeStep(name="ToDtype", arguments={"dtype": "float32", "scale": True}, on=(("image",),)),
    ]
    made = make_pipeline(steps)
    by_hand = T.Compose([T.RandomCrop((6, 5), on="image"), T.ToDtype(torch.float32, scale=True, on="image")])
    batch = {"image": torch.randint(0, 256, (4, 3, 8, 9), dtype=torch.uint8), "mask": torch.zeros(4)}
    keys = Keys(0, 0, torch.arange(4))
    assert torch.equal(made.apply(batch, keys)["image"], by_hand.apply(batch, keys)["image"])


def test_functions_of_a_user_cannot_be_made():
    assert make_pipeline([RecipeStep(name="RandomCrop", arguments={"size": 6}), RecipeStep(name=PER_SAMPLE)]) is None


@pytest.mark.parametrize(
    "step",
    [
        RecipeStep(name="Resize"),
        RecipeStep(name="Resize", arguments={"size": -3}),
        RecipeStep(name="RandomHorizontalFlip", arguments={"p": 0.5, "fn": "os.system"}),
    ],
)
def test_arguments_that_a_class_does_not_take_are_an_error(step):
    with pytest.raises(TransformError, match=step.name):
        make_transform(step)


@pytest.mark.parametrize(
    ("paths", "on"),
    [
        ((), None),
        ((("image",),), ("image",)),
        ((("image",), ("mask", 0)), [("image",), ("mask", 0)]),
    ],
)
def test_one_path_is_a_field_and_several_are_a_list(paths, on):
    assert on_of(paths) == on
