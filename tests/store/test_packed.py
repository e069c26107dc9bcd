"""Documents in blocks, against a list of tokens that is cut with Python."""

import itertools
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import memfeed
from memfeed.errors import FieldError
from memfeed.store import packed
from memfeed.store.packed import Packing
from support import Made, copies_by

LENGTHS = [0, 1, 1, 2, 3, 3, 4, 5, 0, 7, 8, 12, 2, 1, 9, 17]


@pytest.fixture(scope="module", params=["numpy", "numba"], autouse=True)
def way(request):
    with copies_by(request.param):
        yield


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return store_of(LENGTHS, tmp_path_factory.mktemp("packed") / "a.mf")


def store_of(lengths, path, dtype=torch.int64, **more):
    """Document i has the tokens 100 i, 100 i + 1, ..."""
    return memfeed.cache(
        Made([{"input_ids": torch.arange(n, dtype=dtype) + 100 * i, "doc": i} for i, n in enumerate(lengths)]),
        path, progress=False, fields={"input_ids": "jagged"}, **more,
    )  # fmt: skip


def blocks_of(docs, size, eos=None, pad=None):
    """Return what each block is: tokens, document ids, position ids, mask; one token at a time."""
    stream = [(d, token) for d, doc in enumerate(docs) for token in [*doc, *([] if eos is None else [eos])]]
    found = []
    for start in range(0, len(stream), size):
        part = stream[start : start + size]
        if len(part) < size and pad is None:
            break
        ids, positions, seen = [], [], []
        for d, _ in part:
            if d not in seen:
                seen.append(d)
            ids.append(len(seen) - 1)
            positions.append(positions[-1] + 1 if len(ids) > 1 and ids[-2] == ids[-1] else 0)
        left = size - len(part)
        tokens = [token for _, token in part] + [pad] * left
        found.append((tokens, ids + [-1] * left, positions + list(range(left)), [True] * len(part) + [False] * left))
    return found


def lists(batch, pad=None):
    names = ["input_ids", "document_ids", "position_ids", *([] if pad is None else ["input_ids_mask"])]
    assert list(batch) == names
    columns = [batch[name].tolist() for name in names]
    return list(zip(*columns, strict=True)) if columns[0] else []


@settings(max_examples=100)
@given(
    st.lists(st.integers(0, 15), min_size=1, max_size=14),
    st.integers(1, 9),
    st.sampled_from([None, 7777]),
    st.sampled_from([None, -1]),
    st.data(),
)
def test_a_packed_view_has_the_blocks_of_the_slow_way(corpus, chosen, size, eos, pad, data):
    store = corpus.subset(chosen)
    docs = [list(range(100 * i, 100 * i + LENGTHS[i])) for i in chosen]
    expected = [row[: 3 + (pad is not None)] for row in blocks_of(docs, size, eos, pad)]
    if not expected:
        with pytest.raises(FieldError, match="expected at least one block"):
            store.packed("input_ids", size, eos=eos, pad=pad)
        return
    view = store.packed("input_ids", size, eos=eos, pad=pad)
    assert len(view) == len(expected)
    batch = view[:]
    assert (batch["document_ids"].dtype, batch["position_ids"].dtype) == (torch.int32, torch.int64)
    assert lists(batch, pad) == expected
    rows = data.draw(st.lists(st.integers(0, len(view) - 1), max_size=5))
    assert lists(view[rows], pad) == [expected[row] for row in rows]
    assert [tuple(view[row][name].tolist() for name in view[row]) for row in rows] == [expected[row] for row in rows]
    order = np.array(data.draw(st.permutations(range(len(docs)))))
    columns = packed.in_order(view._view.columns, order)
    outs = [torch.empty(len(view), size, dtype=column.field.torch_dtype) for column in columns]
    leaves = [column.gather_into(np.arange(len(view)), out) for column, out in zip(columns, outs, strict=True)]
    again = view._view.assemble_batch(leaves)
    reordered = blocks_of([docs[i] for i in order], size, eos, pad)
    assert lists(again, pad) == [row[: 3 + (pad is not None)] for row in reordered]


def test_several_fields_of_equal_lengths_and_inner_dims(path):
    lengths = [3, 5, 0, 6]
    samples = [
        {"tokens": torch.arange(n).to(torch.uint16), "labels": torch.arange(n) - 100, "vectors": torch.rand(n, 2)}
        for n in lengths
    ]
    store = memfeed.cache(Made(samples), path, progress=False)
    view = store.packed(["tokens", "labels", "vectors"], 4, pad={"tokens": 9, "labels": -100, "vectors": 0.5}, eos=3)
    batch = view[:]
    mask = batch["tokens_mask"]
    assert (batch["labels"][~mask] == -100).all()
    assert (batch["tokens"].to(torch.int64)[~mask].tolist(), batch["tokens"].dtype) == (
        [9] * int((~mask).sum()),
        torch.uint16,
    )
    for name in ("tokens", "labels", "vectors"):
        end = torch.full((1, *samples[0][name].shape[1:]), 3, dtype=samples[0][name].dtype)
        stream = torch.cat([part for sample in samples for part in (sample[name], end)])
        assert torch.equal(batch[name].double()[mask], stream.double()), name  # torch 2.6 indexes no uint16


def test_views_pickles_and_rows(path):
    store = store_of([3, 9, 4, 2, 11], path)
    view = store.packed(None, 4)
    assert "input_ids: int64 [4]" in repr(view)
    assert view.nbytes == 7 * 4 * (8 + 4 + 8)
    part = view.select("input_ids", "document_ids").subset([5, 1])
    sent = pickle.loads(pickle.dumps(part))
    assert sent == part
    assert sent.digest == part.digest != view.digest
    assert torch.equal(sent[:]["input_ids"], view[[5, 1]]["input_ids"])
    assert view.digest != store.packed(None, 8).digest
    assert view.column("input_ids")[3].tolist() == view[3]["input_ids"].tolist()
    assert torch.equal(view.to("cpu", progress=False)["position_ids"], view[:]["position_ids"])
    assert torch.equal(view.tensordict()["input_ids"], view[:]["input_ids"])
    view.verify()
    split = store.subset([4, 0])
    assert split.packed(None, 7)[:]["input_ids"].flatten().tolist() == [*range(400, 411), 0, 1, 2]
    with pytest.raises(memfeed.errors.RowError):
        view[7]


@pytest.mark.parametrize("workers", [0, 2])
def test_torchs_dataloader_reads_a_packed_view(path, workers):
    view = store_of([3, 9, 4, 2, 11, 30], path).packed("input_ids", 4, pad=0)
    loader = DataLoader(view, 4, num_workers=workers)
    found = [{name: tensor.clone() for name, tensor in batch.items()} for batch in loader]
    assert lists({name: torch.cat([batch[name] for batch in found]) for name in found[0]}, 0) == lists(view[:], 0)


def test_lengths_come_without_reading_a_token(path):
    store = store_of([3, 0, 5], path)
    assert store.lengths("input_ids").tolist() == [3, 0, 5]
    assert store.subset([2, 0]).lengths("input_ids").tolist() == [5, 3]
    assert len(store.subset(store.lengths("input_ids") <= 3)) == 2
    with pytest.raises(FieldError, match="one dim varies"):
        store.lengths("doc")


def test_fields_that_cannot_be_packed(path):
    ragged = [torch.arange(n) for n in (3, 4, 5)]
    samples = [{"a": part, "b": part[:2] if i else part, "c": i} for i, part in enumerate(ragged)]
    store = memfeed.cache(Made(samples), path, progress=False)
    with pytest.raises(FieldError, match=r'found 2 fields of varying length \(a, b\).*packed="a"'):
        store.packed(None, 4)
    with pytest.raises(FieldError, match=r"int64 \[\].*expected a field of varying length"):
        store.packed("c", 4)
    with pytest.raises(FieldError, match="same lengths in every row"):
        store.packed(["a", "b"], 4)
    with pytest.raises(FieldError, match="at least 1"):
        store.packed("a", 0)
    with pytest.raises(FieldError, match="a number that int64 holds exactly"):
        store.packed("a", 4, eos=0.5)
    with pytest.raises(FieldError, match="fill up the last one with pad=0"):
        store.packed("a", 4000)
    with pytest.raises(FieldError, match="no field 'z'"):
        store.packed("z", 4)


def test_a_field_named_as_one_that_packing_adds(path):
    store = memfeed.cache([{"document_ids": torch.arange(n)} for n in (3, 4)], path, progress=False)
    with pytest.raises(FieldError, match="names that differ"):
        store.packed("document_ids", 2)


def test_tokens_of_every_dtype_come_back(tmp_path):
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.uint32, torch.bfloat16, torch.float64):
        docs = [torch.arange(n).to(dtype) for n in (5, 3, 8)]
        store = memfeed.cache(Made([{"x": doc} for doc in docs]), tmp_path / f"{dtype}.mf", progress=False)
        found = store.packed("x", 5, pad=1)[:]["x"]
        stream = torch.cat(docs).to(torch.float64).tolist() + [1.0] * 4
        assert (found.dtype, found.to(torch.float64).flatten().tolist()) == (dtype, stream)


def test_in_order_keeps_other_columns_and_shares_one_packing(path):
    view = store_of([3, 9, 4], path).packed("input_ids", 4)
    plain = memfeed.cache((torch.arange(4),), path.with_name("b.mf"), progress=False)._view.columns[0]
    found = packed.in_order([*view._view.columns, plain], np.array([2, 1, 0]))
    assert found[-1] is plain
    assert all(a.packing is b.packing for a, b in itertools.combinations(found[:-1], 2))


@settings(max_examples=100)
@given(
    st.lists(st.integers(0, 15), min_size=1, max_size=14),
    st.integers(1, 9),
    st.booleans(),
    st.booleans(),
    st.data(),
)
def test_pieces_cut_by_numba_are_those_of_numpy(lengths, size, has_end, fills, data):
    lengths = np.array(lengths)
    order = data.draw(st.sampled_from([None, np.random.default_rng(0).permutation(len(lengths))]))
    packing = Packing(np.arange(len(lengths)), lengths, size, has_end=has_end, fills=fills, order=order)
    blocks = np.array(data.draw(st.lists(st.integers(0, max(packing.block_count - 1, 0)), max_size=5)), np.int32)
    blocks = blocks[: packing.block_count]
    with copies_by("numpy"):
        plain = packing.cut(blocks)
    with copies_by("numba"):
        compiled = packing.cut(blocks)
    for name, one, other in zip(plain._fields, plain, compiled, strict=True):
        assert one.dtype == other.dtype, name
        assert np.array_equal(one, other), name


@pytest.mark.parametrize("size", [1.5, "8", None, True, 0])
def test_blocks_have_a_whole_number_of_tokens(size):
    store = memfeed.cache([{"t": torch.arange(i % 5 + 1)} for i in range(20)], progress=False)
    with pytest.raises(FieldError, match=r"found blocks of .* tokens; expected .*at least 1"):
        store.packed("t", size)


def test_blocks_are_of_at_least_one_field():
    store = memfeed.cache([{"t": torch.arange(i % 5 + 1)} for i in range(20)], progress=False)
    with pytest.raises(FieldError, match=r"found packed\(\[\], \.\.\.\); expected a field of varying length"):
        store.packed([], 4)
