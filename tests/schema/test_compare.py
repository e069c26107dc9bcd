"""Values are compared class by class and bit by bit, and the text says which part differs, and how."""

import copy
import math
import re
from collections import UserDict, deque, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tensordict import TensorDict

from memfeed.errors import SchemaError
from memfeed.schema import codec
from memfeed.schema.compare import (
    common_schema,
    describe_difference,
    describe_value,
    difference,
    equal,
    leaves_like,
    rows_equal,
    schema_difference,
    tensors_equal,
)
from memfeed.schema.fields import DTYPES
from memfeed.schema.infer import infer


@dataclass
class Pair:
    """A sample of the fields of `BASE`."""

    a: Any
    b: Any


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("name", DTYPES)
def test_tensors_of_every_dtype(name):
    one, other = (torch.tensor(values).to(DTYPES[name]) for values in ([0, 1, 1], [0, 1, 0]))
    assert tensors_equal(one, one.clone())
    assert tensors_equal(one[::2], one[::2].clone())
    assert not tensors_equal(one, other)
    assert not tensors_equal(one, one[None])
    assert not tensors_equal(one, torch.zeros(3, dtype=torch.int64 if name == "int32" else torch.int32))
    assert equal(one, one.clone())
    assert not equal(one, other)


def test_nan_equals_nan_and_zero_does_not_equal_minus_zero():
    zero, nan = torch.tensor([0.0]), torch.tensor([NAN])
    assert tensors_equal(nan, nan.clone())
    assert not tensors_equal(zero, -zero)
    assert equal([NAN, complex(NAN, 1)], [NAN, complex(NAN, 1)])
    assert not equal([0.0], [-0.0])


@pytest.mark.parametrize(
    ("one", "other", "is_equal"),
    [
        ([1.0, 100.0], [1.05, 100.0], True),
        ([1.0, 100.0], [1.2, 100.0], False),
        ([1.0, NAN], [1.0005, NAN], True),
        ([1.0, NAN], [1.0, 1.0], False),
        ([1.0, INF], [1.0005, INF], True),
        ([1.0, INF], [2.0, INF], False),
        ([1.0, -INF], [1.0, INF], False),
        ([INF, NAN], [INF, 0.0], False),
        ([1j, 100.0], [1.05j, 100.0], True),
        ([1j, 100.0], [1.0, 100.0], False),
        ([1, 100], [1, 101], False),
    ],
)
def test_rounding_is_a_fraction_of_the_largest_finite_value(one, other, is_equal):
    a, b = torch.tensor(one), torch.tensor(other)
    b = b.to(a.dtype)
    assert tensors_equal(a, b, 1e-3) == is_equal
    field = infer([a]).schema.fields[0]
    assert rows_equal(field, codec.pack(field, [a]), codec.pack(field, [b]), 1e-3) == is_equal


def test_rows_of_other_dims_are_not_equal():
    samples = [torch.zeros(2, 3), torch.zeros(3, 2), torch.zeros(0, 5), torch.zeros(0, 4), None]
    field = infer(samples).schema.fields[0]
    rows = [codec.pack(field, [sample]) for sample in samples]
    assert [[rows_equal(field, one, other) for other in rows] for one in rows] == np.eye(5, dtype=bool).tolist()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from([0.5, 1.0, NAN]) | st.sampled_from(["", "1"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=5,
)


@given(JSON, JSON)
def test_json_values_are_equal_if_they_print_alike_in_one_order(one, other):
    def in_order(value):
        if isinstance(value, dict):
            return {key: in_order(value[key]) for key in sorted(value)}
        return [in_order(item) for item in value] if isinstance(value, list) else value

    assert equal(one, copy.deepcopy(one))
    assert equal(one, other) == (repr(in_order(one)) == repr(in_order(other)))


class Word(str):
    """All words look alike."""

    __slots__ = ()

    def __repr__(self):
        return "<word>"


def image(level, mode="L"):
    return Image.new(mode, (3, 2), level)


Point, Pixel = namedtuple("Point", "x y"), namedtuple("Pixel", "x y")
OTHER_POINT = namedtuple("Point", "x y")
QUIET, PAYLOAD = (torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001))
ODD = torch.tensor([255, 0, 1], dtype=torch.uint8).view(torch.bool)


def jagged(*rows):
    return torch.nested.nested_tensor(list(rows), layout=torch.jagged)


def palette(colour):
    found = image(0, "P")
    found.putpalette([colour, 0, 0])
    return found


@pytest.mark.parametrize(
    ("one", "other", "is_equal", "as_stored"),
    [
        (np.ones(2), torch.ones(2, dtype=torch.float64), False, True),
        (np.ones(2), np.ones(2, np.float32), False, False),
        (np.ones(2), np.ones((1, 2)), False, False),
        (np.float64(1), np.float64(1), True, True),
        (np.float64(1), 1.0, False, False),
        (np.array(["a", None], object), np.array(["a", None], object), True, True),
        (np.array(["a", None], object), np.array(["a", 0], object), False, False),
        (image(3), image(3), True, True),
        (image(3), image(4), False, False),
        (image(3), image(3, "I"), False, False),
        (image(3), torch.full((1, 2, 3), 3, dtype=torch.uint8), False, True),
        (palette(1), palette(2), False, True),
        (torch.ones(2), None, False, False),
        (torch.ones(2), [1.0, 1.0], False, False),
        (torch.ones(2), torch.nn.Parameter(torch.ones(2)), False, True),
        (torch.ones(2, 3), torch.ones(3, 2), False, False),
        (torch.ones(2).to_sparse(), torch.ones(2).to_sparse(), True, True),
        (torch.ones(2).to_sparse(), torch.ones(3).to_sparse(), False, False),
        (torch.ones(2).to_sparse(), torch.tensor([1.0, 0]).to_sparse(), False, False),
        (torch.eye(2).to_sparse_csr(), torch.eye(2).to_sparse_csc(), False, False),
        (torch.eye(2).to_sparse_csr(), torch.eye(2), False, False),
        (torch.ones(2, device="meta"), torch.ones(2, device="meta"), False, False),
        (jagged(torch.ones(2)), jagged(torch.ones(2)), True, True),
        (jagged(torch.ones(2)), jagged(torch.ones(3)), False, False),
        (QUIET, QUIET.clone(), True, True),
        (QUIET, PAYLOAD, False, False),
        (QUIET.numpy(), PAYLOAD.numpy(), False, False),
        (ODD, torch.tensor([True, False, True]), True, True),
        (ODD, torch.tensor([True, False, False]), False, False),
        (1, True, False, False),
        (1, 1.0, False, False),
        (0.0, -0.0, False, False),
        (NAN, -NAN, True, True),
        ([1, 2], [1, 2.0], False, False),
        ([1, 2], (1, 2), False, False),
        ([1, 2], [1, 2, 3], False, False),
        ([(1, 2)], [[1, 2]], False, False),
        ([0.0], [-0.0], False, False),
        ([], [], True, True),
        ([], [1], False, False),
        ({"a": 1}, {"a": True}, False, False),
        ({"a": 1}, {"a": 1, "b": 2}, False, False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True, True),
        ({"a": 1}, UserDict(a=1), False, False),
        (UserDict(a=1), UserDict(a=1), True, True),
        (deque([1, "a"]), deque([1, "a"]), True, True),
        (deque([1, "a"]), deque([1, "b"]), False, False),
        (Point(1, 2), Point(1, 2), True, True),
        (Point(1, 2), OTHER_POINT(1, 2), False, True),
        (Point(1, 2), Pixel(1, 2), False, False),
        (Pair(1, [2]), Pair(1, [2]), True, True),
        (Pair(1, [2]), Pair(1, [3]), False, False),
        (TensorDict({"a": torch.ones(2)}, [2]), TensorDict({"a": torch.ones(2)}, [2]), True, True),
        (TensorDict({"a": torch.ones(2)}, [2]), TensorDict({"a": torch.ones(2)}, []), False, False),
        (TensorDict({"a": torch.ones(2)}, [2]), {"a": torch.ones(2)}, False, False),
        (TensorDict({"a": "x"}), TensorDict({"a": "x"}), True, True),
        (TensorDict({"a": "x"}), TensorDict({"a": "y"}), False, False),
        (torch.stack([TensorDict({"a": one}) for one in "xy"]), TensorDict({"a": "x"}, [2]), False, False),
        (b"a", bytearray(b"a"), False, False),
        (b"1", "1", False, False),
        (Word("a"), Word("a"), True, True),
        (Word("a"), Word("b"), False, False),
    ],
)
def test_values_are_equal_in_class_and_content(one, other, is_equal, as_stored):
    assert equal(one, other) == equal(other, one) == is_equal
    assert equal(one, other, as_stored=True) == equal(other, one, as_stored=True) == as_stored
    assert equal(one, one)


def test_an_object_that_cannot_be_compared_is_not_equal():
    class Pair:
        def __init__(self):
            self.x = torch.ones(2)

        def __eq__(self, other):
            return self.x == other.x

        __hash__ = None

    assert not equal(Pair(), Pair())


def test_the_attributes_of_a_tensor_count():
    tv = pytest.importorskip("torchvision.tv_tensors")
    numbers = torch.rand(3, 4)
    one, again, other = (
        tv.BoundingBoxes(numbers, format=form, canvas_size=(9, 8)) for form in ("XYXY", "XYXY", "XYWH")
    )
    assert equal(one, again)
    assert not equal(one, other)
    assert not equal(one, numbers)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, None),
        ({"image": image(4)}, ("image",)),
        ({"boxes": (torch.tensor([1.0, NAN]), [1, 3])}, ("boxes", 1)),
        ({"boxes": (torch.tensor([NAN, 1.0]), [1, 2])}, ("boxes", 0)),
        ({"boxes": [torch.tensor([1.0, NAN]), [1, 2]]}, ("boxes",)),
        ({"more": 1}, ()),
        ({"label": 1.0}, ("label",)),
        ({"pair": Pair(1, {"x": Point(0, 2)})}, ("pair", "b", "x", "x")),
        ({"pair": Pair(1, None)}, ("pair", "b")),
    ],
)
def test_the_first_part_that_differs_is_named(change, expected):
    sample = {
        "image": image(3),
        "boxes": (torch.tensor([1.0, NAN]), [1, 2]),
        "label": 1,
        "pair": Pair(1, {"x": Point(1, 2)}),
    }
    found = difference(sample, {**copy.deepcopy(sample), **change})
    assert (None if found is None else found.path) == expected


def test_a_difference_says_where_and_what():
    assert str(difference({"a": [{"b": 1}]}, {"a": [{"b": 2}]})) == "field a.0.b: found 1, expected 2"
    assert str(difference((1, "a"), [1, "a"])) == "the sample: found (1, 'a'), expected [1, 'a']"
    sparse = torch.ones(2).to_sparse()
    assert str(difference({"a": sparse}, {"a": 1.0})).startswith("field a: found tensor(indices=")


@pytest.mark.parametrize(
    ("found", "expected", "text"),
    [
        (torch.tensor([1, 7, 8]), torch.tensor([1, 2, 3]), "found 7 at [1], expected 2 (2 elements differ)"),
        (torch.tensor(7), torch.tensor(2), "found 7 at [], expected 2 (1 elements differ)"),
        (
            torch.tensor([[NAN, 1.5]]),
            torch.tensor([[NAN, 0.5]], dtype=torch.float64),
            "found 1.5 at [0, 1], expected 0.5 (1 elements differ)",
        ),
        (torch.zeros(2), -torch.zeros(2), "found other bytes in a value that is equal (float32 [2])"),
        (np.zeros((2, 3)), torch.zeros(3, 2), "found float64 [2, 3], expected float32 [3, 2]"),
        ("a" * 100, None, f"found '{'a' * 56}..., expected None"),
        (None, [1, 2], "found None, expected [1, 2]"),
        (np.float32(0.5), np.float64(0.5), "found float32, expected float64 (of equal values)"),
        (torch.tensor(0), 0, "found 0 (Tensor), expected 0 (int)"),
    ],
)
def test_a_difference_is_told_in_short(found, expected, text):
    assert describe_difference(found, expected) == text


def test_a_difference_of_long_text_is_shown_where_it_begins():
    """Two texts of one beginning, cut to their beginning, would be the same in the message."""
    one, other = "a" * 100 + "b", "a" * 100
    assert describe_difference(one, other) == f"found '{'a' * 15}b' from character 85 on, expected '{'a' * 15}'"
    assert describe_difference(one.encode(), other.encode()).startswith("found b'aaaaaaaaaaaaaaab' from character 85")
    assert describe_difference("a photo of a cat", "a photo of a dog") == (
        "found 'a photo of a cat', expected 'a photo of a dog'"
    )


@pytest.mark.parametrize("name", [name for name in DTYPES if name.startswith("float8")])
def test_a_difference_of_one_byte_floats_is_told(name):
    one, other = torch.tensor([1.0, 2.0]).to(DTYPES[name]), torch.tensor([1.0, 0.5]).to(DTYPES[name])
    assert describe_difference(one, other) == "found 2.0 at [1], expected 0.5 (1 elements differ)"


def test_a_value_in_short():
    assert describe_value(image(3)) == "uint8 [1, 2, 3]"
    assert describe_value(np.float32(0.5)) == "0.5"
    assert describe_value("a" * 100) == f"'{'a' * 56}..."


# --- samples and the fields of a store


def test_leaves_come_in_the_order_of_the_fields():
    assert leaves_like([{"b": "x", "a": 1}], infer([{"b": "x", "a": 1}]), infer([{"a": 2, "b": "y"}]).schema) == [
        [1, "x"]
    ]


def test_samples_that_are_simpler_than_the_stored_ones_have_their_leaves():
    stored = infer([{"a": 1, "j": [1, "s"]}, {"a": 2, "j": {"k": 1}}]).schema
    assert stored.fields[1].kind == "json"
    for value in ({"k": 3}, "text", [1, 2], None):
        new = [{"a": 5, "j": value}]
        assert leaves_like(new, infer(new), stored) == [[5, value]]


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"a": 1.0, "b": "x"}, r"field a: found float64 \[\], expected int64 \[\]"),
        ({"a": 1, "b": b"x"}, "field b: found bytes, expected str"),
        ({"a": 1}, "found fewer fields; expected b"),
        ({"a": 1, "b": "x", "c": 1}, "found the fields c; expected none beside the others"),
    ],
)
def test_samples_with_other_fields_are_refused(sample, message):
    stored = infer([{"a": 1, "b": "x"}]).schema
    with pytest.raises(SchemaError, match=f"^{message}$"):
        leaves_like([sample], infer([sample]), stored)


def schema_of(*samples, **options):
    return infer(samples, **options).schema


BASE = {"a": torch.zeros(3), "b": "x"}


@pytest.mark.parametrize(
    ("found", "fits", "message"),
    [
        (schema_of(BASE), True, ""),
        (schema_of({"a": torch.zeros(3)}), False, "found fewer fields; expected b"),
        (schema_of({**BASE, "c": 1, "d": 2}), False, "found the fields c, d; expected none beside the others"),
        (schema_of({"b": "x", "a": torch.zeros(3)}), False, "found the fields in another order"),
        (schema_of({**BASE, "a": torch.zeros(3).double()}), False, "field a: found float64 [3], expected float32 [3]"),
        (schema_of({**BASE, "a": torch.zeros(2)}), False, "field a: found float32 [2], expected float32 [3]"),
        (
            schema_of({**BASE, "a": [1.0, 2.0, 3.0]}, dtypes={"a": torch.float32}),
            False,
            "field a: found float32 [3] (list), expected float32 [3] (tensor)",
        ),
        (
            schema_of(BASE, {**BASE, "a": torch.zeros(2)}),
            False,
            "field a: found jagged float32 [*], expected float32 [3]",
        ),
        (schema_of({**BASE, "b": b"x"}), False, "field b: found bytes, expected str"),
        (schema_of(BASE, {**BASE, "b": None}), True, ""),
        (schema_of(BASE, fields=["a", "other"]), True, "field b: found the name 'other'; expected the same"),
        (
            schema_of(Pair(**BASE)),
            True,
            "found other containers around the same fields (dict, tuple, tensorclass, ...), expected the same",
        ),
    ],
)
def test_schemas(found, fits, message):
    stored = schema_of(BASE)
    assert schema_difference(found, stored) == ("" if fits else message)
    assert schema_difference(found, stored, exact=True) == message
    if message:
        with pytest.raises(SchemaError, match=re.escape(f"two: found another schema than that of one: {message}")):
            common_schema([("one", stored), ("again", stored), ("two", found)])


def test_rows_of_one_shape_fit_a_column_whose_rows_vary_but_are_no_rows_of_it():
    fixed, jagged = schema_of(torch.zeros(3)), schema_of(torch.zeros(3), torch.zeros(2))
    assert schema_difference(fixed, jagged) == ""
    expected = "field value: found float32 [3], expected jagged float32 [*]"
    assert schema_difference(fixed, jagged, exact=True) == expected


def test_rounded_floats_are_explained():
    found, stored = schema_of(torch.zeros(3)), schema_of(torch.zeros(3), dtypes={(): torch.float16})
    assert schema_difference(found, stored).endswith(
        "expected float16 [3], as cache(..., forms={float: torch.float16}) gives"
    )


def test_a_field_of_several_stores_is_optional_if_it_is_in_one():
    some, none = schema_of("a"), schema_of("a", None)
    assert common_schema([("one", some), ("two", none)]) == none
    assert common_schema([("one", none), ("two", some)]) == none
    assert common_schema([("one", some), ("two", some)]) == some
