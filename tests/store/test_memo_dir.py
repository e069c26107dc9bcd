"""A directory of kept results as a store, also where its bytes are damaged."""

import numpy as np
import pytest
import torch

import memfeed
from memfeed.errors import CorruptStoreError
from memfeed.memoizing import kept
from memfeed.store import memo_dir
from memfeed.store.format import WORK_DIRECTORY
from memfeed.store.memo_format import BLOB, KEY, make_blob
from memfeed.store.ragged import ragged_files
from support import equal


@pytest.fixture(autouse=True)
def fresh_process():
    kept._memos.clear()
    yield
    kept._memos.clear()


def filled(path, results):
    """Keep these results, and return the directory opened as a store."""
    function = memfeed.memoize(lambda i: results[i], path)
    for i in range(len(results)):
        function(i)
    return memfeed.open(path)


@pytest.mark.parametrize(
    "results",
    [
        [torch.arange(3), torch.arange(3) + 1],
        [torch.arange(i) for i in range(3)],
        [np.arange(6.0).reshape(2, 3).T.copy(order="F"), np.ones((3, 2), order="F")],
        [b"", b"ab"],
        ["a", "é"],
        [{"a": 1, "b": (torch.ones(2), None)}, {"a": 2, "b": (torch.zeros(2), None)}],
        [1.5, 2.5],
        [torch.tensor(3), torch.tensor(4)],
        [torch.zeros(0, 2), torch.zeros(0, 2)],
    ],
    ids=lambda value: f"{value!r:.30}",
)
def test_results_are_rows(tmp_path, results):
    store = filled(tmp_path / "memo", results)
    rows = [store[i]["result"] for i in range(len(store))]
    for row, result in zip(rows, results, strict=True):
        expected = torch.from_numpy(result.copy()) if isinstance(result, np.ndarray) else result
        assert equal(row, expected)
    assert [key["arguments"]["i"] for key in (store[i]["key"] for i in range(len(store)))] == list(range(len(results)))


def test_results_of_several_kinds_are_fields_of_their_own(tmp_path):
    store = filled(tmp_path / "memo", [torch.ones(2), "text", torch.ones(2, 1), torch.zeros(2)])
    assert store.schema.names() == "key, result_0, result_1, result_2"
    assert store[1]["result_1"] == "text"
    assert store[1]["result_0"] is None
    assert store[3]["result_0"].tolist() == [0, 0]


def write(root, blobs, keys=None):
    """Write rows by hand: of each blob its place, and its bytes."""
    for field, parts in ((KEY, keys or [b"{}"] * len(blobs)), (BLOB, blobs)):
        paths = ragged_files(root, field)
        paths.heap.parent.mkdir(parents=True, exist_ok=True)
        sizes = [len(part) for part in parts]
        np.array(np.cumsum([0, *sizes])[:-1], np.int64).tofile(paths.start)
        np.array(sizes, np.int64).tofile(paths.dims)
        paths.heap.write_bytes(b"".join(map(bytes, parts)))
    return np.arange(len(blobs))


def blob_of(tree, *leaves):
    return np.concatenate(make_blob(bytes(16), 1.0, tree, list(leaves))).tobytes()


LEAF = ("int64", (2,), np.arange(2).view(np.uint8))


@pytest.mark.parametrize(
    "tree",
    [None, 3, [], ["value"], ["tensor", 1], ["tensor", "x"], ["tensor", -1], ["odd", 0], ["list", 3], ["dict", [1]],
     ["dict", [["a"]]], ["tensor", 0, 3], ["tensor", 0, [5]], ["tensor", 0, [0, 0]], ["image", 1],
     ["tuple", [[["tensor", 0]]]]],
    ids=repr,
)  # fmt: skip
def test_a_damaged_structure(tmp_path, tree):
    numbers = write(tmp_path, [blob_of(tree, LEAF)])
    with pytest.raises(CorruptStoreError, match="found a result with a layout that cannot be read"):
        memo_dir.read(tmp_path, numbers)


def test_a_right_structure_by_hand(tmp_path):
    contents = memo_dir.read(tmp_path, write(tmp_path, [blob_of(["tensor", 0], LEAF)]))
    assert contents.columns[1].read_row(0).tolist() == [0, 1]
    assert contents.schema.fields[1].shape == (2,)


def test_rows_outside_their_files(tmp_path):
    numbers = write(tmp_path, [blob_of(["tensor", 0], LEAF)] * 2)
    with pytest.raises(CorruptStoreError, match="found fewer rows than there are; expected 3"):
        memo_dir.read(tmp_path, np.arange(3))
    paths = ragged_files(tmp_path, BLOB)
    huge = 1 << 62
    for file, value in ((paths.start, -1), (paths.start, huge), (paths.dims, -1), (paths.dims, huge), (paths.dims, 5)):
        kept_bytes = file.read_bytes()
        changed = np.frombuffer(kept_bytes, np.int64).copy()
        changed[1] = value
        changed.tofile(file)
        with pytest.raises(CorruptStoreError, match="found row 1 at byte"):
            memo_dir.read(tmp_path, numbers)
        file.write_bytes(kept_bytes)


def test_no_rows(tmp_path):
    contents = memo_dir.read(tmp_path, write(tmp_path, []))
    assert len(contents.rows.numbers) == 0
    assert [field.name for field in contents.schema] == ["key"]


def test_only_written_rows_are_present(tmp_path):
    (tmp_path / WORK_DIRECTORY).mkdir()
    (tmp_path / WORK_DIRECTORY / "presence").write_bytes(bytes([0, 1, 2, 3, 4, 1]))
    assert memo_dir.present_rows(tmp_path).tolist() == [1, 2, 5]


def test_verify_names_the_damaged_row(tmp_path):
    numbers = write(tmp_path, [blob_of(["tensor", 0], LEAF)] * 3)
    contents, done = memo_dir.read(tmp_path, numbers), []
    memo_dir.verify(tmp_path, contents.rows, lambda *args: done.append(args))
    assert done[-1][0] == done[-1][1] == ragged_files(tmp_path, BLOB).heap.stat().st_size
    heap = ragged_files(tmp_path, BLOB).heap
    data = bytearray(heap.read_bytes())
    data[len(data) // 3 + 1] ^= 1
    heap.write_bytes(data)
    with pytest.raises(CorruptStoreError, match="found row 1 with other bytes than were written"):
        memo_dir.verify(tmp_path, contents.rows, None)
