import numpy as np
import pytest
import torch

from memfeed.errors import FieldError, SchemaError
from memfeed.schema.infer import infer, promote
from support import Made, Pair, rich_sample


def kinds(samples, **wishes):
    return {f.name: f.describe() for f in infer(samples, **wishes).schema}


def test_one_of_everything():
    found = kinds([rich_sample(i) for i in range(6)])
    assert found == {
        "image": "uint8 [3, 4, 5]",
        "label": "int64 []",
        "weight": "float64 []",
        "flag": "bool []",
        "point.x": "float32 [2]",
        "point.y.0": "int64 []",
        "point.y.1.0": "int64 []",
        "point.y.1.1": "int64 []",
        "record.image": "int16 [2, 2]",
        "record.label": "int64 []",
        "td.a": "float32 [3]",
        "td.note": "str",
        "pair.images": "float32 [2]",
        "pair.targets": "int64 []",
        "boxes": "jagged float32 [*, 4]",
        "classes": "jagged int64 [*]",
        "picture": "list uint8 [*, *, *]",
        "ids": "jagged int64 [*]",
        "text": "str",
        "raw": "bytes",
        "meta": "json",
        "maybe": "list float32 [*] or None",
    }


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([[1, 2], [3, 4]], {"0": "int64 []", "1": "int64 []"}),
        ([[1], [1, 2]], {"value": "jagged int64 [*]"}),
        ([[0.5] * 17] * 2, {"value": "jagged float64 [*]"}),
        ([[], [1]], {"value": "jagged int64 [*]"}),
        ([[1, 2.0], [1]], {"value": "json"}),
        ([[True], [False, True]], {"value": "jagged bool [*]"}),
        ([{"a": [1, {"b": None}]}, {"a": 3}], {"a": "json"}),
        ([{"a": 1, "b": 2}, {"b": 3, "a": 4}], {"a": "int64 []", "b": "int64 []"}),
        ([np.float32(1), np.float32(2)], {"value": "float32 []"}),
        ([np.zeros((2, 0)), np.ones((2, 0))], {"value": "float64 [2, 0]"}),
    ],
)
def test_lists_and_json(samples, expected):
    assert kinds(samples) == expected


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([1, 2.0], r"sample 1, field value: found a Python number as float64 \[\]; expected a Python number as int64"),
        (
            [torch.zeros(2), torch.zeros(2).double()],
            r"sample 1, field value: found float64 \[2\]; expected float32 \[2\]",
        ),
        ([torch.zeros(2), torch.zeros(2, 2)], r"found float32 \[2, 2\]; expected float32 \[2\], as in sample 0"),
        ([{"a": object()}], r"sample 0, field a: found an object of builtins.object, which no column holds"),
        ([{"a": {1, 2}}], r"found an object of builtins.set"),
        ([{("x", 1): 1}], r"found the dict key \('x', 1\) of type tuple; expected str or int keys"),
        ([np.array(["a"])], r"found a numpy value of dtype <U1; expected a bool or a number"),
        ([2**70], r"found the int 1180591620717411303424; expected one that fits int64"),
        ([{"a": {"b": 1}}, {"a": {"b": torch.ones(1), "c": 1}}], r"found a structure that varies between samples"),
        ([torch.zeros(2).to_sparse()], r"found a torch.sparse_coo tensor; expected a dense one"),
        ([None, None], r"found samples without any value"),
        ([{"x": float("nan"), "y": [1]}, {"x": 1.0}], r"holds more than JSON values"),
    ],
)
def test_samples_that_fit_no_column(samples, message):
    with pytest.raises(SchemaError, match=message):
        infer(samples)


def test_fields_names_a_tuple_and_fixes_kinds():
    assert list(kinds([(1, "a")], fields=("label", "name"))) == ["label", "name"]
    assert kinds([{"x": torch.zeros(3)}], fields={"x": "jagged"}) == {"x": "jagged float32 [*]"}
    assert kinds([{"x": torch.zeros(3, 2)}], fields={"x": "list"}) == {"x": "list float32 [*, *]"}
    assert kinds([{"x": [1, 2], "y": 1}], fields={"x": "json"}) == {"x": "json", "y": "int64 []"}
    assert kinds([{"x": [1, 2]}], fields={"x": "jagged"}) == {"x": "jagged int64 [*]"}


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"fields": ("a",)}, r"fields= gives 1 names \(a\), but a sample has 2 leaves \(0, 1\)"),
        ({"fields": {"z": "fixed"}}, r"fields= names 'z', but the samples have: 0, 1"),
        ({"dtypes": {"z": torch.uint8}}, r"dtypes= names 'z', but the samples have: 0, 1"),
        ({"dtypes": {1: torch.uint8}}, r"dtypes= names 1, which is str; expected a field of numbers"),
        ({"fields": {0: "round"}}, r"fields= wants 0 to be 'round'; expected one of fixed, jagged"),
        ({"record": Made}, r"type= is Made; expected a tensorclass, dataclass or namedtuple"),
    ],
)
def test_wishes_that_fit_nothing(wishes, message):
    with pytest.raises((SchemaError, FieldError), match=message):
        infer([(1, "a")], **wishes)


def test_fixed_kind_refuses_what_varies():
    with pytest.raises(SchemaError, match=r"field x: found shapes \[\(1,\), \(2,\)\], which is jagged; expected fixed"):
        infer([{"x": torch.zeros(1)}, {"x": torch.zeros(2)}], fields={"x": "fixed"})


def test_a_record_class_takes_the_place_of_the_outer_container():
    found = infer([(torch.zeros(3), torch.tensor(1))], record=Pair)
    assert [f.path for f in found.schema] == [("images",), ("targets",)]
    assert found.schema.structure.kind == "tensorclass"
    assert found.structure.kind == "tuple"
    with pytest.raises(SchemaError, match=r"type=Pair has the fields images, targets, but a sample is a tuple of 3"):
        infer([(1, 2, 3)], record=Pair)


def test_promotion_goes_from_fixed_to_jagged_to_list():
    fixed = infer([torch.zeros(3, 4)]).schema.fields[0]
    jagged = promote(fixed, [(5, 4)])
    assert jagged.describe() == "jagged float32 [*, 4]"
    assert promote(jagged, [(5, 6)]).describe() == "list float32 [*, *]"
    assert promote(fixed, [(3, 5)]).describe() == "list float32 [*, *]"
