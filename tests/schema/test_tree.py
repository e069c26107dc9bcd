import dataclasses
import functools
import sys
import types
from typing import Generic, TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict

from memfeed.errors import SchemaError
from memfeed.schema.assemble import assembler
from memfeed.schema.infer import infer
from memfeed.schema.tree import Flattener, open_container, types_of
from support import Labelled, Point, equal

leaves = st.one_of(st.integers(-5, 5), st.floats(allow_nan=False), st.text(max_size=3), st.none(), st.booleans())
T = TypeVar("T")
keys = st.one_of(st.integers(-3, 3), st.text(max_size=3))


def containers(children):
    return st.one_of(
        st.lists(children, max_size=3).map(tuple),
        st.lists(children, max_size=3),
        st.dictionaries(keys, children, max_size=3),
        st.tuples(children, children).map(lambda pair: Point(*pair)),
        st.tuples(children, st.integers(0, 9)).map(lambda pair: Labelled(*pair)),
    )


@settings(max_examples=300)
@given(st.recursive(leaves, containers, max_leaves=12))
def test_a_sample_taken_apart_and_put_together_is_the_sample(sample):
    try:
        found = infer([sample])
    except SchemaError as error:
        assert "without any value" in str(error)  # nothing but None and empty containers
        return
    taken = Flattener(found.structure)(sample)
    assert len(taken) == len(found.schema)
    again = assembler(found.schema.structure, types_of([sample]), batched=False)(taken)
    assert equal(again, sample)


def test_dict_keys_may_come_in_any_order():
    found = infer([{"a": 1, "b": 2}])
    assert Flattener(found.structure)({"b": 20, "a": 10}) == [10, 20]


@pytest.mark.parametrize(
    ("first", "other", "message"),
    [
        ((1, 2), (1, 2, 3), "found a tuple of 3; expected one of 2, as in the samples probed"),
        ({"a": 1}, {"b": 1}, r"found the keys \['b'\]; expected \['a'\]"),
        ({"a": None, "b": 1}, {"a": 3, "b": 1}, "found int at a; expected None"),
    ],
)
def test_another_structure_is_an_error(first, other, message):
    found = infer([first])
    with pytest.raises(SchemaError, match=message):
        Flattener(found.structure)(other)


def test_tensors_in_a_value_of_a_tensordict_are_refused():
    with pytest.raises(SchemaError, match="sample 0, field d: found dict, which is no JSON value"):
        infer([TensorDict({"d": NonTensorData({"x": torch.ones(2)})}, [])])


def test_a_library_that_another_thread_is_importing(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensordict", types.ModuleType("tensordict"))
    monkeypatch.setitem(sys.modules, "torch_geometric.data", types.ModuleType("torch_geometric.data"))
    assert open_container({"a": 1})[1] == [1]


@dataclasses.dataclass
class Counted(Generic[T]):
    x: int

    @functools.cached_property
    def double(self):
        return 2 * self.x


def test_a_dataclass_with_more_than_its_fields_is_refused():
    value = Counted[int](3)
    assert value.double == 6  # it is computed again
    assert list(open_container(value)[1]) == [3]
    value.count = 2
    with pytest.raises(SchemaError, match=r"the attribute count beside its fields.*count: \.\.\. = dataclasses"):
        open_container(value)
