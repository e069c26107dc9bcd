import pytest

from memfeed.errors import FieldError, SchemaError
from memfeed.schema.fields import display, dtype_name
from memfeed.schema.infer import infer


def test_dtype_without_a_column_is_refused():
    import torch

    with pytest.raises(SchemaError, match=r"found dtype complex32, which no column can hold; expected one of bool"):
        dtype_name(torch.complex32)


def test_fields_are_found_by_name_path_and_display():
    schema = infer([{"a": {"b": 1}, "c": (2.0, "x")}]).schema
    assert [f.path for f in schema] == [("a", "b"), ("c", 0), ("c", 1)]
    assert schema.field_index("a.b") == schema.field_index(("a", "b")) == 0
    assert schema.field_indices("c") == [1, 2]
    with pytest.raises(FieldError, match=r"found no field 'z'; expected one of: a\.b, c\.0, c\.1"):
        schema.field_index("z")


def test_a_display_that_two_paths_share_is_an_error():
    schema = infer([{"a": {"b": 1}, "a.b": 2}]).schema
    assert schema.field_index(("a.b",)) == 1
    assert schema.field_index("a.b") == 1, "the path itself wins"
    assert display(("a", "b")) == display(("a.b",))


def test_select_keeps_containers_and_turns_a_cut_tuple_into_a_dict():
    schema = infer([{"a": (1, 2), "b": {"c": 3, "d": 4}}]).schema
    cut = schema.select([0, 2, 3])
    assert [f.path for f in cut] == [("a", 0), ("b", "c"), ("b", "d")]
    assert list(cut.structure.leaves()) == [f.path for f in cut]
    assert cut.structure.children[0].kind == "dict"
