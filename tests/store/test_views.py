import pytest
import torch

import memfeed
from memfeed.errors import RowError
from memfeed.store.views import RaggedView, sample_leaves
from support import Made, equal, rich_sample


@pytest.fixture
def store(path):
    return memfeed.cache(Made(rich_sample, 12), path, progress=False)


def test_the_rows_of_a_ragged_column_are_views(store):
    boxes = store.column("boxes")
    assert isinstance(boxes, RaggedView)
    assert [len(row) for row in boxes[5:2:-1]] == [1, 0, 3]
    boxes[3][0, 0] = 7
    assert float(store.column("boxes")[3][0, 0]) == 7
    assert store.column("maybe")[3] is None
    assert store.column("text")[-1] == rich_sample(11)["text"]
    with pytest.raises(RowError, match="found row 12; expected at most 11"):
        boxes[12]


@pytest.mark.parametrize("name", ["image", "label", "boxes", "picture", "ids", "text", "meta", "maybe"])
def test_a_batch_comes_apart_into_its_samples(store, name):
    part = store.select(name)
    leaf = part[:][name]
    values = list(sample_leaves(part.columns[0], leaf))
    assert equal(values, [rich_sample(i)[name] for i in range(12)])


def test_a_view_keeps_a_temporary_store():
    texts = memfeed.cache(Made([f"text {i}" for i in range(5)]), progress=False).column("value")
    assert list(texts) == [f"text {i}" for i in range(5)]
    ragged = memfeed.cache(Made([torch.arange(i) for i in range(5)]), progress=False).column("value")
    assert [len(row) for row in ragged] == [0, 1, 2, 3, 4]
