"""Recipes of strangers: refused before a transform is made, or what they make runs on batches of the store."""

import inspect
import io
import json

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

import memfeed
from memfeed import transforms
from memfeed.errors import FieldError, StoreError, TransformError
from memfeed.random import Keys
from memfeed.schema.fields import DTYPES
from memfeed.schema.infer import infer
from memfeed.schema.recipe import MOST_STEPS, REQUIRED, TRANSFORMS, RecipeStep, recipe_problem
from memfeed.transforms.from_recipe import make_pipeline, make_transform


def png(height, width):
    file = io.BytesIO()
    Image.new("RGB", (width, height), (1, 2, 3)).save(file, "png")
    return file.getvalue()


def sample(i):
    """Fields of every kind that a transform may be asked to change; of two kinds of images the sizes vary."""
    return {
        "image": torch.full((3, 8, 9), i, dtype=torch.uint8),
        "gray": torch.rand(8, 9),
        "half": torch.rand(1, 8, 9).half(),
        "wide": torch.rand(5, 8, 9),
        "volume": torch.rand(1, 4, 8, 9),
        "vector": torch.rand(4),
        "signed": torch.ones(3, 8, 9, dtype=torch.int16),
        "flags": torch.ones(3, 8, 9, dtype=torch.bool),
        "mask": torch.zeros(8, 9, dtype=torch.int64),
        "boxes": torch.rand(2, 4),
        "label": 3,
        "text": "some",
        "complex": torch.ones(3, 8, 9, dtype=torch.complex64),
        "varied": torch.rand(3, 5 + i, 9 - i),
        "jagged": torch.ones(3, 8, 4 * (i - 1) ** 2, dtype=torch.uint8),  # one has no pixel
        "file": png(8, 9 + i),
    }


SAMPLES = [sample(i) for i in range(3)]
SCHEMA = infer(SAMPLES).schema
FIELDS = SCHEMA.fields
VALUES = {  # of each kind of argument, right ones and wrong ones
    "size": [
        4,
        [4],
        [4, 5],
        [2, 3, 4],
        9,
        2**15,
        2**15 + 1,
        2**20,
        0,
        -1,
        True,
        "4",
        [2**15, 2**15],
        [],
        10**400,
        None,
    ],
    "dtype": [*DTYPES, "object", "str", 7, None],
    "scale": [True, False, [0.1, 0.5], [0.5, 0.1], [0, 1], [1, 2], [1e300, 1e300], 3, None, [1e-300, 1]],
    "value": [0, 3.5, [1, 2, 3], [0.0], [1] * 9, "random", "other", 1e300, -1, 300, [], None, True],
    "fill": [0, 7, [1, 2, 3], [1.5], [1] * 9, -1, 70000, 1e300, "red", None],
    "mean": [[0.5] * 3, [0.5], [0.1] * 5, [], [1e300] * 3, ["a"], 0.5, None],
    "std": [[0.5] * 3, [0.5], [0.1] * 5, [0.0] * 3, [1e-300] * 3, None],
    "degrees": [10, [-5, 5], [5, -5], -3, 1e300, [1], "a", None],
    "interpolation": ["bilinear", "bicubic", "nearest", "nearest-exact", "lanczos", 2, None],
    "p": [0, 1, 0.5, -0.1, 2, True, None, "a"],
    "padding": [1, [1, 2], [1, 2, 3, 4], [1, 2, 3], -1, 2**15, 2**40, None, "a"],
    "ratio": [[0.5, 2], [2, 0.5], [0, 1], [1e-300, 1e300], 1, None],
    "shear": [3, [3], [-1, 1], [-1, 1, -2, 2], [1, -1], [1, 2, 3], [89, 91], -1, None, "a"],
    "translate": [[0.1, 0.2], [2, 0], [0.1], None, 1],
    "center": [[1, 2], [1], None, [1e300, 0], "a"],
    "max_size": [None, 12, 3, 2**15, 2**40, "a", True],
    **{key: [0.3, [0.5, 1.5], [1.5, 0.5], -1, 1e300, None] for key in ("brightness", "contrast", "saturation")},
    "hue": [0.1, [-0.1, 0.1], 0.6, [-1, 1], None],
    **{key: [True, False, 1, None, "yes"] for key in ("antialias", "pad_if_needed", "alternate")},
    "on": [["image"]],
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


def problem_of(*steps):
    return recipe_problem([RecipeStep(**{"on": (("image",),), **step}) for step in steps], FIELDS)


@st.composite
def steps(draw):
    name = draw(st.sampled_from(sorted(TRANSFORMS)))
    table, arguments = TRANSFORMS[name].arguments, {}
    for key in table:
        if draw(st.integers(0, 9)) < (9 if key in REQUIRED else 3):
            chance = draw(st.integers(0, 19))
            likely = st.sampled_from(VALUES[key][:3] if chance < 15 else VALUES[key])
            arguments[key] = draw(JSON if chance == 19 else likely)
    if draw(st.integers(0, 19)) == 0:
        arguments[draw(st.sampled_from(sorted(VALUES)))] = draw(JSON)
    first = "file" if name == "Decode" else draw(st.sampled_from(["image"] * 6 + sorted(SAMPLES[0])))
    others = draw(
        st.lists(st.sampled_from(["mask", "boxes", "label"] * 3 + [*sorted(SAMPLES[0]), "missing"]), max_size=2)
    )
    return RecipeStep(name=name, arguments=arguments, on=tuple((field,) for field in (first, *others)))


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return memfeed.cache(SAMPLES, tmp_path_factory.mktemp("recipe") / "a.mf", workers=0, progress=False)


@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.lists(steps(), min_size=1, max_size=3))
def test_a_recipe_is_refused_or_makes_a_transform_that_runs(store, recipe):
    if recipe_problem(recipe, FIELDS):
        return
    made = make_pipeline(msgspec.json.decode(msgspec.json.encode(recipe), type=list[RecipeStep]))
    for rows in ([0], [0, 1, 2]):
        try:
            made.apply(store[rows], Keys(0, 0, torch.tensor(rows)))
        except (TransformError, FieldError) as error:
            assert "expected" in str(error), error


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ({"name": "ToDtype", "arguments": {"dtype": "object"}}, "dtype='object'; expected one of bool, uint8"),
        ({"name": "ToDtype", "arguments": {"dtype": "float8_e5m2"}}, "dtype='float8_e5m2'; expected one of"),
        ({"name": "ToDtype"}, "no dtype; expected one of"),
        ({"name": "ToDtype", "arguments": {"dtype": "int32", "scale": True}}, "and scale; expected floats"),
        (
            {"name": "RandomErasing", "arguments": {"value": [0] * 9}},
            "9 numbers as value; expected one, or one for each",
        ),
        ({"name": "RandomErasing", "arguments": {"value": 300}}, "value=300; expected a value that uint8 has"),
        ({"name": "RandomErasing", "arguments": {"value": "random"}}, 'value="random"; expected floats'),
        ({"name": "Resize", "arguments": {"size": 2**20}}, "size=1048576; expected an int from 1 to 32768"),
        ({"name": "Resize", "arguments": {"size": [2**15, 2**15]}}, "for at most 67,108,864 pixels"),
        ({"name": "RandomResizedCrop", "arguments": {"size": 2**14}}, "for at most 67,108,864 pixels"),
        ({"name": "Resize", "arguments": {"size": 8000}}, "size=8000, 72,000,000 pixels; expected at most"),
        ({"name": "Resize", "arguments": {"size": 10**5000}}, "size=a very long int; expected an int"),
        ({"name": "Resize", "arguments": {"size": True}}, "size=True; expected an int"),
        ({"name": "Resize", "arguments": {"size": 9, "max_size": 4}}, "max_size=4; expected it with one int"),
        ({"name": "Resize", "arguments": {"size": 9, "extra": 1}}, "the argument 'extra'; expected size or"),
        ({"name": "Resize", "arguments": {"size": 9, "on": "image"}}, "the argument 'on'; expected size or"),
        (
            {"name": "Normalize", "arguments": {"mean": [0] * 4, "std": [1] * 4}},
            "4 means; expected one for each channel",
        ),
        ({"name": "Normalize", "arguments": {"mean": [0] * 3, "std": [1] * 2}}, "3 means and 2 stds; expected as many"),
        ({"name": "Normalize", "arguments": {"mean": [0] * 3, "std": [0] * 3}}, "expected numbers from 1e-06 to 1e+06"),
        ({"name": "ColorJitter", "on": (("wide",),)}, "5 channels; expected 1 or 3"),
        ({"name": "RandomVerticalFlip", "on": ()}, "no fields; expected on with the path"),
        ({"name": "RandomVerticalFlip", "on": (("images",),)}, "the field 'images'; expected one that the store has"),
        ({"name": "RandomVerticalFlip", "on": (("image",), ("image",))}, "the same field twice"),
        ({"name": "RandomVerticalFlip", "on": (("text",),)}, "the field 'text' (str); expected images"),
        ({"name": "RandomVerticalFlip", "on": (("image",), ("text",))}, "the field 'text' (str); expected numbers"),
        ({"name": "RandomVerticalFlip", "on": (("label",),)}, "the field 'label' (fixed); expected images"),
        ({"name": "RandomVerticalFlip", "on": (("vector",),)}, "expected images [channels, height, width]"),
        ({"name": "RandomVerticalFlip", "on": (("flags",),)}, "expected integers or floats of 16 bits"),
        ({"name": "Decode"}, "the field 'image' (fixed); expected one of bytes"),
        ({"name": "PerSample", "arguments": {"a": 1}}, "arguments, which it does not take"),
        ({"name": "Flip"}, "a transform 'Flip', which memfeed does not have"),
    ],
)
def test_what_is_refused_and_why(step, said):
    assert said in problem_of(step)


def test_what_is_right_is_not_refused():
    assert not problem_of({"name": "Resize", "arguments": {"size": 9, "max_size": 12}}, {"name": "Normalize",
        "arguments": {"mean": [0.5] * 3, "std": [0.5] * 3}}, {"name": "RandomErasing",
        "arguments": {"value": [0.5, -1, 2]}})  # fmt: skip
    assert not problem_of({"name": "PerSample", "shown": "f"}, {"name": "ColorJitter", "on": (("wide",),)})
    assert "257 transforms, above 256" in problem_of(*[{"name": "RandomVerticalFlip"}] * (MOST_STEPS + 1))


def test_fills_of_images_whose_channels_vary_are_not_refused():
    varied = next(field for field in FIELDS if field.path == ("varied",))
    fields = [msgspec.structs.replace(varied, shape=(None, None, None))]
    step = RecipeStep(name="RandomCrop", arguments={"size": 4, "fill": [1, 2, 3]}, on=(("varied",),))
    assert not recipe_problem([step], fields)


def test_a_fill_for_other_channels_than_an_image_has_is_refused_when_it_is_used(store):
    made = make_pipeline(
        [RecipeStep(name="RandomCrop", arguments={"size": 4, "padding": 9, "fill": [1] * 9}, on=(("varied",),))]
    )
    with pytest.raises(TransformError, match=r"found fill=.* for an image with 3 channels; expected one number"):
        for epoch in range(50):  # a window that lies within an image needs no fill
            made.apply(store[[0]], Keys(0, epoch, torch.tensor([0])))


def test_the_table_has_the_arguments_of_the_classes():
    for name, described in TRANSFORMS.items():
        taken = inspect.signature(getattr(transforms, name).__init__).parameters
        assert set(taken) - {"self", "on"} == set(described.arguments), name
    with pytest.raises(TransformError, match="found the transform Resize of a store with no size; expected an int"):
        make_transform(RecipeStep(name="Resize"))


def test_a_store_with_such_a_recipe_is_refused_when_it_is_opened(path):
    memfeed.cache(SAMPLES, path, workers=0, progress=False)
    manifest = json.loads((path / "memfeed.json").read_text())
    manifest["version"] = 2
    manifest["attributes"] = {"transform": [{"name": "Resize", "arguments": {"size": 2**20}, "on": [["image"]]}]}
    (path / "memfeed.json").chmod(0o644)
    (path / "memfeed.json").write_text(json.dumps(manifest))
    with pytest.raises(StoreError, match="found a transform Resize with size=1048576; expected an int from 1 to 32768"):
        memfeed.open(path)
    manifest["attributes"]["transform"][0]["arguments"]["size"] = 4
    (path / "memfeed.json").write_text(json.dumps(manifest))
    assert memfeed.open(path).transform is not None
