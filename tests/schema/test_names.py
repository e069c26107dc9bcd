"""Fields that a user names: by key, position, path, given name or container, and what is refused."""

import pytest

from memfeed.errors import FieldError
from memfeed.schema.names import display, find_field, find_fields

PATHS = [("image",), ("target", "boxes"), ("target", "labels"), ("a.b",), ("a", "b"), ("a", 0), (3,)]
NAMES = ["image", "target.boxes", "given", "a.b", "a.b", "a.0", "3"]


def found(which):
    return find_fields(which, PATHS, NAMES)


@pytest.mark.parametrize(
    ("which", "indices"),
    [
        ("image", [0]), (("image",), [0]), ("target", [1, 2]), (("target",), [1, 2]), ("target.boxes", [1]),
        (("target", "boxes"), [1]), ("given", [2]), ("target.labels", [2]), (("a.b",), [3]), (("a", "b"), [4]),
        ("a.b", [3]), ("a.0", [5]), (3, [6]), ("3", [6]), ("a", [4, 5]), (["image", 3], [0, 6]),
        (["target", "given"], [1, 2]),
        ([("target", "labels"), "target"], [2, 1]), (["image", "image"], [0]), ((), list(range(7))),
    ],
)  # fmt: skip
def test_names(which, indices):
    assert found(which) == indices


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ([], "found an empty list of fields"),
        ("imag", "found no field 'imag'; expected one of: .*: write 'image'"),
        (("target", "none"), "found no field"),
        (("image", 3), r"A tuple is one path; for several fields write \['image', 3\]"),
        (5, "found no field 5"),
        (None, "found None as the name of a field"),
        (True, "found True as the name of a field"),
        ([False, True], "found False as the name of a field"),
        (1.5, "found 1.5 as the name of a field"),
        ([["image"]], r"found \['image'\] as the name of a field"),
        ({"image"}, "as the name of a field"),
    ],
)
def test_what_names_no_field(which, message):
    with pytest.raises(FieldError, match=message):
        found(which)


def test_one_field():
    assert find_field("image", PATHS, NAMES) == 0
    with pytest.raises(FieldError, match="found 'target', which holds several fields; .*: target.boxes, given"):
        find_field("target", PATHS, NAMES)
    with pytest.raises(FieldError, match="found a list of fields"):
        find_field(["image"], PATHS, NAMES)


def test_a_name_of_several_places_is_refused():
    paths = [("x", "y"), ("x.y", "z")]
    assert find_fields("x.y", paths, ["x.y", "x.y.z"]) == [1]
    with pytest.raises(FieldError, match="found several fields named 'n'"):
        find_fields("n", [("n",), ("m",)], ["k", "n"])


def test_a_sample_of_one_value():
    assert find_fields("value", [()], ["value"]) == [0]
    assert display(()) == "value"
    assert display(("a", 0)) == "a.0"
    with pytest.raises(FieldError):
        find_fields("value", [("a",)], ["a"])
