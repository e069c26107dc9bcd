"""Lists of numbers that have one length in every sample are one column."""

import pytest
import torch
from torch.utils.data import DataLoader

import memfeed
from memfeed.errors import SchemaError
from support import Made, cache, equal

N = 200


def tokens(length_of):
    return Made(lambda i: {"input_ids": [i + j for j in range(length_of(i))], "label": i}, N)


@pytest.mark.parametrize("length", [2, 8, 16, 17, 300])
def test_lists_of_one_length_are_a_fixed_column(path, length):
    dataset = tokens(lambda i: length)
    store = cache(dataset, path)
    assert store.schema.fields[0].describe() == f"int64 [{length}]"
    assert store[7] == dataset[7]
    assert equal(store[[3, 9]]["input_ids"], torch.tensor([dataset[3]["input_ids"], dataset[9]["input_ids"]]))
    assert next(iter(DataLoader(store, 4, collate_fn=list)))[1] == dataset[1]
    assert cache(dataset, path)[N - 1] == dataset[N - 1]  # compared with the store that exists
    assert memfeed.open(path)[0] == dataset[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_list_of_another_length_promotes_its_column(path, workers):
    dataset = tokens(lambda i: 5 if i != 71 else 9)  # 71 is not probed
    store = cache(dataset, path, workers=workers)
    assert store.schema.fields[0].describe() == "jagged int64 [*]"
    assert [store[i] for i in range(N)] == [dataset[i] for i in range(N)]
    store.verify()


def test_fixed_lists_stay_fixed(path):
    store = cache(tokens(lambda i: 5), path, fields={"input_ids": "fixed"})
    assert store[:]["input_ids"].shape == (N, 5)
    other = path.with_name("other.mf")
    with pytest.raises(SchemaError, match=r"sample 71, field input_ids: found dims \[9\]; expected int64 \[5\]"):
        cache(tokens(lambda i: 5 if i != 71 else 9), other, fields={"input_ids": "fixed"})
    with pytest.raises(SchemaError, match="field input_ids: found shapes .* which is jagged; expected fixed"):
        cache(tokens(lambda i: 5 if i else 9), other, overwrite=True, fields={"input_ids": "fixed"})


def test_one_element_can_be_a_column_too(path):
    store = cache(tokens(lambda i: 1), path, fields={"input_ids": "fixed"})
    assert store[:]["input_ids"].shape == (N, 1)
    assert store[4] == {"input_ids": [4], "label": 4}


def test_a_writer_stores_lists_of_one_length_as_a_column(path):
    with memfeed.Writer(path) as writer:
        for i in range(40):
            writer.append({"ids": [i, i + 1, i + 2]})
        writer.extend({"ids": torch.arange(6).view(2, 3)})
        writer.append({"ids": [1]})
    store = memfeed.open(path)
    assert store.schema.fields[0].describe() == "jagged int64 [*]"
    assert [store[i]["ids"] for i in (0, 39, 41, 42)] == [[0, 1, 2], [39, 40, 41], [3, 4, 5], [1]]
