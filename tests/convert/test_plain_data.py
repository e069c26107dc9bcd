"""Which attributes of a dataset are plain data, of which kind, and by which path."""

import argparse
import array
import collections
import datetime
import enum
import io
import logging
import multiprocessing
import random
import weakref

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset

from memfeed.convert.plain_data import (
    DEEPEST,
    DEEPEST_OBJECT,
    LONG_TEXT,
    MOST_PARTS,
    SETTINGS,
    WIDEST,
    Column,
    attributes_of,
    is_array,
    is_owner,
    is_record,
    is_table,
    leaves_of,
    names_of,
    ordered,
)

N = 120


class Side(enum.Enum):
    LEFT = 1


class Of(Dataset):
    """A dataset of ``N`` samples with the given attributes."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def __len__(self):
        return N

    def __getitem__(self, index):
        return index


class Point:
    def __init__(self, x, y=0):
        self.x, self.y = x, y


class Slotted:
    __slots__ = ("__hidden", "unset", "x")

    def __init__(self, x):
        self.x = x


class Three:
    def __len__(self):
        return 3


def found(**attributes):
    return {leaf.path: leaf.kind for leaf in leaves_of(Of(**attributes))}


@pytest.mark.parametrize(
    "value",
    [
        list(range(N)),
        tuple(range(N)),
        {i: i for i in range(N)},
        collections.Counter(range(N)),
        frozenset(range(N)),
        bytes(N),
        bytearray(N),
        array.array("l", range(N)),
        collections.deque(range(N)),
        np.zeros(3),
        np.array(3),
        torch.zeros(0),
        list(range(SETTINGS)),
        "a word " * LONG_TEXT,
    ],
    ids=lambda value: type(value).__name__,
)
def test_data(value):
    assert found(v=value) == {"v": "data"}


@pytest.mark.parametrize(
    "value",
    [1, True, 2.5, 1j, "word", np.float32(1), [1, 2], {"a": 1}, list(range(SETTINGS - 1)), torch.Size([2, 3])]
    + [slice(1), range(N), datetime.timedelta(1), Side.LEFT],
    ids=lambda value: type(value).__name__,
)
def test_settings(value):
    assert found(v=value) == {"v": "setting"}


@pytest.mark.parametrize(
    "value",
    [None, int, Three, len, lambda: 1, [], {}, "", random.Random(1), torch.nn.Linear(2, 2)],
    ids=lambda value: type(value).__name__,
)
def test_neither(value):
    assert found(v=value) == ({"v": "setting"} if value == "" else {})


class Genome:
    """Reads parts of texts, which it holds."""

    def __init__(self, chromosomes):
        self.sequences, self.shift, self.codes = chromosomes, 3, dict.fromkeys(range(SETTINGS))

    def __call__(self, name, index):
        return self.sequences[name][index + self.shift]


@pytest.mark.parametrize("count", [2, 25])
def test_long_texts_in_an_object_are_data(count):
    texts = {f"chr{i}": "ACGT" * LONG_TEXT for i in range(count)}
    each = {f"v.sequences[{name!r}]": "data" for name in texts} if count == 2 else {"v.sequences": "data"}
    assert found(v=Genome(texts)) == each, "of a callable nothing else: its numbers may be drawn when it is made"
    assert found(v=Genome({"chr1": "ACGT"})) == {}


def test_a_copy_is_made_of_what_can_change_its_length():
    numbers, waiting = array.array("d", [1.0] * N), collections.deque([1] * N)
    leaves = {leaf.path: leaf.value for leaf in leaves_of(Of(a=numbers, b=waiting))}
    numbers.append(2.0)  # an array that exports its memory cannot grow
    waiting.append(2)
    assert len(leaves["a"]) == len(leaves["b"]) == N


def test_paths_are_places(tmp_path):
    attributes = {"root": str(tmp_path), "file": str(tmp_path / "none"), "path": tmp_path, "word": "train"}
    assert found(**attributes) == {"root": "place", "file": "place", "path": "place", "word": "setting"}
    (leaf,) = [one for one in leaves_of(Of(root=str(tmp_path), names=["a"] * N)) if one.path == "names"]
    assert leaf.folders == (str(tmp_path),)


def test_open_files_are_places(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"123")
    with open(path, "rb") as file:
        assert found(f=file) == {"f.filename": "place"}
    assert found(f=file) == {}  # it is closed
    with open(path, "ab") as file:
        assert found(f=file) == {}  # its contents are the program's own
    assert found(f=io.BytesIO(b"1")) == {"f": "setting"}


def test_what_cannot_be_asked_for_its_class_hides_no_other_attribute(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros(3))
    with np.load(tmp_path / "a.npz") as archive:
        expected = {"a.zip.fp.filename": "place", "a.zip.filename": "place", "t": "data"}
        assert expected.items() <= found(a=archive, f=archive.f, t=np.zeros(N)).items()
    point = Point(1)
    assert found(p=weakref.proxy(point), t=np.zeros(N)) == {"t": "data"}
    del point
    gone = Point(1)
    proxy = weakref.proxy(gone)
    del gone
    assert found(p=proxy, t=np.zeros(N)) == {"t": "data"}


@pytest.mark.parametrize(("value", "kind", "rows"), [
    (multiprocessing.Value("i", 7), "setting", 1),
    (multiprocessing.Value("d", 7.0, lock=False), "setting", 1),
    (multiprocessing.Array("d", N), "data", N),
    (multiprocessing.RawArray("i", 3), "setting", 3),
    (memoryview(bytearray(N)), "data", N),
    (memoryview(np.zeros((N, 3))), "data", N),
])  # fmt: skip
def test_shared_memory_is_an_array_with_a_row_for_each_entry(value, kind, rows):
    (leaf,) = leaves_of(Of(shared=value))
    assert (leaf.path, leaf.kind, len(leaf.value)) == ("shared", kind, rows)
    before = leaf.value.tobytes()
    memoryview(value.get_obj() if hasattr(value, "get_obj") else value).cast("B")[0] = 9
    assert leaf.value.tobytes() != before


def test_memory_that_cannot_be_read_is_left_out():
    released = memoryview(bytearray(N))
    released.release()
    assert leaves_of(Of(released=released, gaps=memoryview(bytearray(2 * N))[::2])) == []


def test_one_object_is_found_once():
    samples = list(range(N))
    assert found(samples=samples, imgs=samples) == {"samples": "data"}
    cycle = [np.zeros(2)]
    cycle.append(cycle)
    assert found(v=cycle) == {"v[0]": "data"}


def test_datasets_inside_are_followed():
    inner = Of(targets=list(range(N)))
    assert found(dataset=inner) == {"dataset.targets": "data"}
    leaves = {leaf.path: leaf.kind for leaf in leaves_of(Subset(inner, range(N)))}
    assert leaves == {"dataset.targets": "data", "indices": "setting"}
    many = [Of(targets=list(range(N))) for _ in range(MOST_PARTS + 1)]
    assert {leaf.path for leaf in leaves_of(Of(parts=many))} == {"parts[*].targets"}
    assert {leaf.path for leaf in leaves_of(Of(parts=many[:2]))} == {"parts[0].targets", "parts[1].targets"}


def test_a_dict_of_arrays_is_taken_apart_and_a_class_in_it_does_no_harm():
    assert found(v={"a": np.zeros(N), ("b",): np.zeros(N)}) == {"v['a']": "data", "v[?]": "data"}
    assert found(v=[Three, np.zeros(N)]) == {"v[1]": "data"}


def test_a_sparse_matrix_hides_no_other_entry_of_its_dict():
    sparse = pytest.importorskip("scipy.sparse").csr_matrix(np.eye(N))
    names = {f"d['x'].{name}": "data" for name in ("data", "indices", "indptr")}
    assert names.items() <= found(d={"x": sparse}).items()
    assert (names | {"d['y']": "data"}).items() <= found(d={"x": sparse, "y": np.zeros(N)}).items()


def test_a_tuple_with_another_len_is_read_by_its_entries():
    class Record(tuple):  # pyfaidx's, whose len is the number of bases
        def __len__(self):
            return 6000

    assert found(d={"a": Record((1, 2)), "b": Record((3, 4))}) == {"d['a']": "setting", "d['b']": "setting"}


def test_nesting_ends():
    deep = np.zeros(2)
    for _ in range(DEEPEST + 1):
        deep = [deep]
    assert found(v=deep) == {"v": "setting"}
    assert found(v=Point(Point(list(range(N))))) == {"v.x.x": "data"}
    chain = argparse.Namespace(x=list(range(N)))  # of a library
    for _ in range(DEEPEST_OBJECT):
        chain = argparse.Namespace(x=chain)
    assert found(v=chain.x) == {f"v{'.x' * DEEPEST_OBJECT}": "data"}
    assert found(v=chain) == {}


def test_a_container_that_cannot_be_read_is_left_out():
    class Broken(list):
        def __iter__(self):
            raise OSError("gone")

    assert found(v=Broken([np.zeros(2)]), w=[1]) == {"w": "setting"}


def test_lists_of_a_class_with_an_entry_for_each_sample_count():
    class Shared(Of):
        pass

    Shared.names, Shared.cache, Shared.few = [str(i) for i in range(N)], {i: i for i in range(N)}, [1, 2]
    assert {leaf.path for leaf in leaves_of(Shared())} == {"names"}
    assert {leaf.path for leaf in leaves_of(Shared(names=1))} == {"names"}  # its own, not that of the class


def test_records_are_columns():
    leaves = {leaf.path: leaf for leaf in leaves_of(Of(boxes=[Point(i, str(i)) for i in range(N)]))}
    assert {path: leaf.kind for path, leaf in leaves.items()} == {
        "boxes": "data",
        "boxes[*].x": "records",
        "boxes[*].y": "records",
    }
    assert list(leaves["boxes[*].x"].value) == list(range(N))
    shared = Point(1)
    assert set(found(v=[shared] * N)) == {"v"}  # one object of all of them is a tool
    pairs = [(Point(i), {"p": Point(Point(i))}) for i in range(N)]
    assert set(found(v=pairs)) == {"v", "v[*][0].x", "v[*][0].y", "v[*][1]"}


def test_records_in_a_dict_come_in_the_order_of_its_keys():
    one, other = {i: Point(i) for i in range(N)}, {i: Point(i) for i in reversed(range(N))}
    values = [[list(leaf.value) for leaf in leaves_of(Of(v=of)) if leaf.path == "v[*].x"] for of in (one, other)]
    assert values[0] == values[1] == [list(range(N))]


def test_a_record_without_an_attribute_has_none_there():
    records = [Point(i) for i in range(N)]
    del records[3].x
    (column,) = [leaf.value for leaf in leaves_of(Of(v=records)) if leaf.path == "v[*].x"]
    assert column[3] is None
    assert column[4] == 4


def test_attributes_of_slots():
    assert attributes_of(Slotted(3)) == [("x", 3)]
    assert attributes_of(object()) == []


def test_names_leave_out_hashes_and_are_limited():
    record = Point(1)
    record._hash, record.hash = 1, 2
    assert names_of([record, Slotted(1)]) == ["x", "y", "hash"]
    wide = Point(1)
    wide.__dict__.update({f"a{i}": i for i in range(2 * WIDEST)})
    assert len(names_of([wide])) == WIDEST


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Point(1), True), (Slotted(1), True), (object(), False), (None, False), (3, False), ("a", False),
        (torch.nn.Linear(1, 1), False), (random.Random(), False), (np.zeros(2), False), (len, False), (Of(a=1), False),
    ],
)  # fmt: skip
def test_records(value, expected):
    assert is_record(value) is expected


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({3: 0, 1: 0}, [1, 3]),
        ({"b": 0, "a": 0}, ["a", "b"]),
        ({"b": 0, 2: 0, "a": 0, 1: 0}, [1, 2, "a", "b"]),
        ({(2,): 0, (1,): 0}, [(2,), (1,)]),
        ({}, []),
        ({True: 0, 0.5: 0, None: 0}, [None, True, 0.5]),
    ],
)
def test_keys_in_an_order_without_hashes(keys, expected):
    assert ordered(keys) == expected


def test_owners():
    class Reader:
        def __getitem__(self, index):
            return index

    assert is_owner(Reader())  # at the top
    assert is_owner(Reader(), "a.dataset")
    assert not is_owner(Reader(), "a.reader")
    assert not is_owner(3, "dataset")
    assert is_owner(Of(), "anything")


def test_tables_and_arrays():
    pd, pa = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    frame = pd.DataFrame({"a": [1, 2], 5: ["x", "y"]})
    assert is_table(frame)
    assert not is_table({"a": 1})
    assert is_array(frame["a"])
    assert is_array(pa.array([1]))
    assert not is_array([1])
    assert set(found(v=frame)) == {"v['a']", "v[5]", "v['(index)']"}
    assert set(found(v=pa.table({"a": [1]}))) == {"v['a']"}


def test_a_column_reads_when_it_is_asked():
    reads = []
    column = Column([1, 2, 3], lambda value: reads.append(value) or value * 2)
    assert len(column) == 3
    assert not reads
    assert (column[1], list(column)) == (4, [2, 4, 6])


def test_the_loggers_of_the_process_are_no_data():
    for number in range(SETTINGS):
        logging.getLogger(f"{__name__}.{number}")
    logger = logging.getLogger(__name__)
    assert found(logger=logger, adapter=logging.LoggerAdapter(logger, {})) == {}


def test_what_a_step_holds_is_a_setting_where_the_pipeline_is_cut():
    class Step:
        def __init__(self):
            self.table = list(range(N))

        def __call__(self, index):
            return self.table[index]

    dataset = Of(transform=Step(), labels=list(range(N)))
    for is_cut in (False, True):
        kinds = {leaf.path: leaf.kind for leaf in leaves_of(dataset, is_cut=is_cut)}
        assert kinds == {"labels": "data", "transform.table": "setting" if is_cut else "data"}
