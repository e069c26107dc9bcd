import pickle
from collections import OrderedDict, defaultdict

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from memfeed.errors import SchemaError
from memfeed.schema.assemble import assembler, generated_namedtuple, make_tensordict
from memfeed.schema.infer import infer
from memfeed.schema.tree import Flattener, types_of
from support import Labelled, Pair, Point, rich_sample


@pytest.mark.parametrize("kind", [OrderedDict, lambda d: defaultdict(int, d)])
def test_other_mappings_come_back_as_dicts(kind):
    sample = kind({"b": 1, "a": 2})
    found = infer([sample])
    made = assembler(found.schema.structure, batched=False)(Flattener(found.structure)(sample))
    assert type(made) is dict
    assert list(made.items()) == [("b", 1), ("a", 2)]


def test_records_without_their_types_come_back_as_their_likes():
    samples = [rich_sample(i) for i in range(4)]
    found = infer(samples)
    taken = Flattener(found.structure)(samples[1])
    made = assembler(found.schema.structure, batched=False)(taken)
    assert made["point"] == samples[1]["point"]
    assert type(made["point"]).__name__ == "Point"
    assert made["record"]["label"] == 1
    assert type(made["pair"]).__name__ == "TensorDict"
    restored = assembler(found.schema.structure, types_of(samples), batched=False)(taken)
    assert (type(restored["point"]), type(restored["record"]), type(restored["pair"])) == (Point, Labelled, Pair)


def test_a_batch_of_tuples_is_a_list_and_namedtuples_stay():
    found = infer([{"t": (1, 2.0), "p": Point(1, 2)}])
    assert assembler(found.schema.structure, (Point,), batched=True)([1, 2, 3, 4]) == {"t": [1, 2], "p": Point(3, 4)}


def test_a_generated_namedtuple_is_picklable():
    made = generated_namedtuple("Odd", ("a", "b"))(1, [2])
    again = pickle.loads(pickle.dumps(made))
    assert again == made
    assert type(again) is type(made)


def test_types_must_have_the_stored_fields():
    found = infer([Point(1, 2)])
    other = type("Point", (tuple,), {"_fields": ("x", "z")})
    with pytest.raises(
        SchemaError, match=r"found a namedtuple Point with the fields \('x', 'y'\), but the class given"
    ):
        assembler(found.schema.structure, (other,), batched=False)


def test_lists_and_dicts_in_a_tensordict_are_values_not_structure():
    rows = [{"n": i, "pair": [i, "b"], "deep": {"y": None}} for i in (1, 2)]
    samples = [
        TensorDict({"d": NonTensorData(row), "l": NonTensorData([row["n"]] * row["n"]), "z": torch.zeros(1)}, [])
        for row in rows
    ]
    found = infer(samples)
    assert [field.kind for field in found.schema] == ["json", "json", "fixed"]
    taken = Flattener(found.structure)(samples[1])
    made = assembler(found.schema.structure, batched=False)(taken)
    assert (made["d"], made["l"]) == (rows[1], [2, 2])
    batch = assembler(found.schema.structure, batched=True)([rows, [[1], [2, 2]], torch.zeros(2, 1)])
    assert batch.batch_size == (2,)
    assert [batch[i]["d"] for i in range(2)] == rows
    assert [batch[i]["l"] for i in range(2)] == [[1], [2, 2]]


def test_a_value_for_each_row_of_a_sample():
    samples = [TensorDict({"a": torch.rand(3), "s": NonTensorStack("x", f"y{i}", "z")}, [3]) for i in range(2)]
    found = infer(samples)
    flatten = Flattener(found.structure)
    batch = assembler(found.schema.structure, batched=True)(
        [torch.stack([s["a"] for s in samples]), [flatten(s)[1] for s in samples]]
    )
    assert batch.batch_size == (2, 3)
    assert batch[1]["s"] == ["x", "y1", "z"]


@pytest.mark.parametrize("n", [0, 1, 3])
def test_lists_in_a_tensordict_are_per_row_also_without_rows(n):
    made = make_tensordict(["x", "words"], [torch.zeros(n, 2), ["a"] * n], 1)
    assert made.batch_size == (n,)
    assert made["words"] == ["a"] * n
