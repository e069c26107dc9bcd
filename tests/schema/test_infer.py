import pytest
import torch

from memfeed.errors import FieldError, SchemaError
from memfeed.schema.infer import infer, promote
from support import Pair, rich_sample


def kinds(samples, **options):
    return {f.name: f.describe() for f in infer(samples, **options).schema}


def test_one_of_everything():
    found = kinds([rich_sample(i) for i in range(6)])
    assert found == {
        "image": "uint8 [3, 4, 5]",
        "label": "int64 []",
        "weight": "float64 []",
        "flag": "bool []",
        "point.x": "float32 [2]",
        "point.y.0": "int64 []",
        "point.y.1": "int64 [2]",
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


def test_fields_names_a_tuple_and_fixes_kinds():
    assert list(kinds([(1, "a")], fields=("label", "name"))) == ["label", "name"]
    assert kinds([{"x": torch.zeros(3)}], fields={"x": "jagged"}) == {"x": "jagged float32 [*]"}
    assert kinds([{"x": torch.zeros(3, 2)}], fields={"x": "list"}) == {"x": "list float32 [*, *]"}
    assert kinds([{"x": [1, 2], "y": 1}], fields={"x": "json"}) == {"x": "json", "y": "int64 []"}
    assert kinds([{"x": [1, 2]}], fields={"x": "jagged"}) == {"x": "jagged int64 [*]"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"fields": ("a",)},
            r"found 1 names in fields= \(a\); expected 2 different ones, one for each leaf of a sample",
        ),
        ({"fields": {"z": "fixed"}}, r"fields=: found no field 'z'; expected one of: 0, 1"),
        ({"dtypes": {"z": torch.uint8}}, r"forms=: found no field 'z'; expected one of: 0, 1"),
        ({"dtypes": {1: torch.uint8}}, r"found 1 in forms=, which is str; expected a field of numbers"),
        ({"fields": {0: "round"}}, r"found kind 'round' for 0 in fields=; expected one of fixed, jagged"),
    ],
)
def test_options_that_fit_nothing(options, message):
    with pytest.raises((SchemaError, FieldError), match=message):
        infer([(1, "a")], **options)


def test_fixed_kind_refuses_what_varies():
    with pytest.raises(SchemaError, match=r"field x: found shapes \[\(1,\), \(2,\)\], which is jagged; expected fixed"):
        infer([{"x": torch.zeros(1)}, {"x": torch.zeros(2)}], fields={"x": "fixed"})


def test_a_record_class_takes_the_place_of_the_outer_container():
    found = infer([(torch.zeros(3), torch.tensor(1))], types=[Pair])
    assert [f.path for f in found.schema] == [("images",), ("targets",)]
    assert found.schema.structure.kind == "tensorclass"
    assert found.structure.kind == "tuple"
    inside = infer([{"x": Pair(images=torch.zeros(3), targets=torch.tensor(1), batch_size=[])}], types=[Pair])
    assert inside.schema.structure.kind == "dict", "a class that the samples hold replaces nothing"
    with pytest.raises(SchemaError, match=r"found a sample that is a tuple of 3 \(0, 1, 2\); expected one part"):
        infer([(1, 2, 3)], types=[Pair])


def test_promotion_goes_from_fixed_to_jagged_to_list():
    fixed = infer([torch.zeros(3, 4)]).schema.fields[0]
    jagged = promote(fixed, [(5, 4)])
    assert jagged.describe() == "jagged float32 [*, 4]"
    assert promote(jagged, [(5, 6)]).describe() == "list float32 [*, *]"
    assert promote(fixed, [(3, 5)]).describe() == "jagged float32 [3, *]"
    assert promote(fixed, [(3, 5), (2, 4)]).describe() == "list float32 [*, *]"
