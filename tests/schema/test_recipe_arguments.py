"""Each argument that a recipe may have: right values, and what is wrong with others."""

import inspect

import pytest

import memfeed.transforms
from memfeed.schema.recipe import REQUIRED, TRANSFORMS, arguments_problem, numbers

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("name", TRANSFORMS)
def test_the_table_names_arguments_of_the_class(name):
    parameters = inspect.signature(getattr(memfeed.transforms, name)).parameters
    assert TRANSFORMS[name].arguments.keys() <= parameters.keys() - {"on"}
    missing = {key for key, one in parameters.items() if one.default is one.empty}
    assert missing == TRANSFORMS[name].arguments.keys() & REQUIRED


RIGHT = [
    ("CenterCrop", {"size": 8}), ("CenterCrop", {"size": [8]}), ("CenterCrop", {"size": [8, 9]}),
    ("CenterCrop", {"size": (8, 9, 10)}), ("CenterCrop", {"size": 1 << 13}),
    ("RandomCrop", {"size": 1, "padding": None}),
    ("RandomCrop", {"size": 1, "padding": [1, 2, 3, 4], "fill": [0, 1]}), ("Normalize", {"mean": [0.5], "std": [1]}),
    ("RandomAffine", {"degrees": 3, "shear": [1, 2, 3, 4]}), ("RandomAffine", {"degrees": [-3, 3], "shear": None}),
    ("RandomAffine", {"degrees": 0, "translate": [0, 1.0], "scale": [1, 1]}), ("ColorJitter", {"hue": 0.5}),
    ("ColorJitter", {"hue": [-0.5, 0.5], "brightness": [0, 2]}), ("ColorJitter", {}), ("Decode", {}),
    ("RandomErasing", {"p": 0, "value": "random"}), ("RandomErasing", {"value": [1, 2]}),
    ("ToDtype", {"dtype": "uint8"}),
    ("ToDtype", {"dtype": "float16", "scale": True}), ("Resize", {"size": 8, "max_size": 9}),
    ("Resize", {"size": [8, 9]}),
    ("Resize", {"size": [8], "max_size": 9}), ("RandomRotation", {"degrees": 10, "center": [0, 0.5]}),
    ("RandomRotation", {"degrees": 10, "center": None, "interpolation": "nearest"}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments"), RIGHT)
def test_right(name, arguments):
    assert arguments_problem(name, arguments) == ""


WRONG = [
    ("CenterCrop", {}, "no size; expected an int from 1"), ("CenterCrop", {"size": 0}, "size=0; expected"),
    ("CenterCrop", {"size": True}, "size=True"), ("CenterCrop", {"size": 1.0}, "size=1.0"),
    ("CenterCrop", {"size": []}, "size="),
    ("CenterCrop", {"size": [1, 2, 3, 4]}, "size="), ("CenterCrop", {"size": (1 << 13) + 1}, "size="),
    ("CenterCrop", {"size": [1 << 15, 1 << 12]}, "size="), ("CenterCrop", {"size": 10**5000}, "a very long int"),
    ("CenterCrop", {"size": None}, "size=None"), ("CenterCrop", {"size": "8"}, "size='8'"),
    ("Decode", {"a": 1}, "expected none"),
    ("CenterCrop", {"size": 8, "on": "x"}, "the argument 'on'; expected size"), ("RandomErasing", {"p": NAN}, "p=nan"),
    ("RandomErasing", {"p": -0.1}, "p=-0.1"), ("RandomErasing", {"p": True}, "p=True"),
    ("RandomErasing", {"value": "x"}, "value='x'"),
    ("RandomErasing", {"scale": [1, 0]}, "the smaller one first"), ("RandomErasing", {"value": INF}, "value=inf"),
    ("RandomErasing", {"value": []}, "value=[]"), ("RandomCrop", {"size": 1, "padding": [1, 2, 3]}, "padding="),
    ("RandomCrop", {"size": 1, "padding": -1}, "padding=-1"),
    ("RandomCrop", {"size": 1, "pad_if_needed": 1}, "true or false"),
    ("Normalize", {"mean": [0.5], "std": [0]}, "std=[0]"),
    ("Normalize", {"mean": [0.5, 0.5], "std": [1]}, "2 means and 1 stds"),
    ("Normalize", {"mean": 0.5, "std": [1]}, "mean=0.5"), ("Normalize", {"mean": [0.5]}, "no std"),
    ("RandomAffine", {"degrees": -1}, "degrees=-1"), ("RandomAffine", {"degrees": 1e7}, "degrees="),
    ("RandomAffine", {"degrees": 1, "shear": [1, 0]}, "shear="),
    ("RandomAffine", {"degrees": 1, "shear": [1, 2, 3]}, "shear="),
    ("RandomAffine", {"degrees": 1, "shear": [[1]]}, "shear="),
    ("RandomAffine", {"degrees": 1, "translate": [0.5]}, "translate="),
    ("ColorJitter", {"hue": 0.6}, "hue=0.6"), ("ColorJitter", {"hue": [-0.6, 0]}, "hue="),
    ("ToDtype", {"dtype": "int4"}, "dtype="),
    ("ToDtype", {"dtype": ["uint8"]}, "dtype="), ("ToDtype", {"dtype": "float8_e5m2"}, "dtype="),
    ("ToDtype", {"dtype": "uint8", "scale": True}, "expected floats to scale to"),
    ("ToDtype", {"dtype": "complex64"}, "dtype="),
    ("Resize", {"size": [8, 9], "max_size": 10}, "max_size=10"), ("Resize", {"size": 8, "max_size": 8}, "max_size=8"),
    ("Resize", {"size": 8, "interpolation": "lanczos"}, "interpolation="),
    ("RandomRotation", {"degrees": 1, "center": [0]}, "center="),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments", "problem"), WRONG)
def test_wrong(name, arguments, problem):
    assert problem in arguments_problem(name, arguments)


def test_the_longest_text_is_cut():
    assert len(arguments_problem("CenterCrop", {"size": "x" * 1000})) < 200
    assert len(arguments_problem("CenterCrop", {"x" * 1000: 1})) < 200


@pytest.mark.parametrize(("value", "expected"), [(3, [3]), ([1, 2], [1, 2]), ((), []), ("ab", ["ab"])])
def test_numbers(value, expected):
    assert numbers(value) == expected
