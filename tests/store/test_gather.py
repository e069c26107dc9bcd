import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import memfeed
from memfeed.errors import RowError
from memfeed.schema.samples import rows_of_leaf
from memfeed.store.gather import Gather
from memfeed.store.ragged_gather import RaggedView
from memfeed.system.buffers import Fresh, Pool
from support import Made, equal, rich_sample

N = 30


@pytest.fixture(scope="module")
def columns(tmp_path_factory):
    return memfeed.cache(Made(rich_sample, N), tmp_path_factory.mktemp("s") / "a.mf", progress=False)._view.columns


@settings(max_examples=100)
@given(st.lists(st.integers(0, N - 1), max_size=20))
def test_a_gather_equals_the_rows_read_one_by_one(columns, ids):
    for allocator in (Pool(), Fresh()):
        leaves = Gather(columns, [allocator] * len(columns))(np.array(ids, np.int64))
        for column, leaf, rows in zip(columns, leaves, reference(columns, ids), strict=True):
            assert equal(unpacked(column, leaf), rows), column.field.name


def reference(columns, rows):
    """Each column's rows, read one by one: every batch must equal this before it is stacked."""
    return [[column.read_row(row) for row in rows] for column in columns]


def unpacked(column, leaf):
    """A leaf's rows as the samples had them."""
    form = column.field.form
    rows = list(leaf.unbind(0)) if isinstance(leaf, torch.Tensor) else leaf
    return rows if form == "tensor" else [
        None if v is None else v.item() if form == "scalar" else v.tolist() for v in rows
    ]  # fmt: skip


@settings(max_examples=60)
@given(st.lists(st.integers(0, N - 1), min_size=1, max_size=20), st.integers(1, 6), st.sampled_from([0, 8, 1 << 20]))
def test_several_batches_equal_the_rows_read_one_by_one(columns, ids, batch_size, narrow):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("memfeed.store.gather.NARROW_BYTES", narrow)  # none, some or all of the columns gathered together
        gather = Gather(columns, [Pool() for _ in columns])
        batches = list(gather.several(np.array(ids, np.int64), batch_size))
        whole = ids[: len(ids) // batch_size * batch_size]
        split = list(gather.split(np.array(whole, np.int64), batch_size)) if whole else []
    assert len(batches) == -(-len(ids) // batch_size)
    assert len(split) == len(whole) // batch_size
    for got in (batches, split):
        for number, leaves in enumerate(got):
            rows = ids[number * batch_size : (number + 1) * batch_size]
            for column, leaf, expected in zip(columns, leaves, reference(columns, rows), strict=True):
                assert equal(unpacked(column, leaf), expected), column.field.name


def test_jagged_leaves_of_equal_lengths_share_their_offsets(columns):
    leaves = Gather(columns, [Fresh()] * len(columns))(np.arange(N))
    by_name = {column.field.name: leaf for column, leaf in zip(columns, leaves, strict=True)}
    boxes, classes, ids = by_name["boxes"], by_name["classes"], by_name["ids"]
    assert boxes.offsets() is classes.offsets()
    assert ids.offsets() is not boxes.offsets()
    (boxes[..., 0] + classes).sum()  # raises where the offsets are not one tensor
    assert boxes.is_nested
    assert boxes.values().shape == (sum(i % 4 for i in range(N)), 4), "no padding"


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
    values = rows_of_leaf(part.schema.fields[0], leaf)
    assert equal(values, [rich_sample(i)[name] for i in range(12)])


def test_a_view_keeps_a_temporary_store():
    texts = memfeed.cache(Made([f"text {i}" for i in range(5)]), progress=False).column("value")
    assert list(texts) == [f"text {i}" for i in range(5)]
    ragged = memfeed.cache(Made([torch.arange(i) for i in range(5)]), progress=False).column("value")
    assert [len(row) for row in ragged] == [0, 1, 2, 3, 4]
