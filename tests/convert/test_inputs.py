"""Kinds of datasets: which are read, and how, and which are refused."""

import enum
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict
from torch.utils.data import Dataset, IterableDataset, StackDataset, Subset, TensorDataset, get_worker_info

import memfeed
from memfeed.convert import probe
from memfeed.convert.inputs import reading_together
from memfeed.errors import CopyError, CorruptStoreError, SampleError, SchemaError, StoreError
from support import Counting, Made, Pair, cache, equal


@pytest.mark.parametrize("n", [1, 15, 16, 17, 300])
def test_iterables_of_unknown_length(path, n):
    store = cache(Counting(n), path)
    assert [label for _, label in store] == list(range(n))
    assert len(cache((x for x in Counting(n)), path.with_name("b.mf"))) == n
    assert equal(cache(Counting(n), path)[n - 1], (torch.full((2,), n - 1), n - 1))


@pytest.mark.parametrize(
    "columns",
    [
        torch.arange(50),
        np.arange(100.0).reshape(50, 2),
        (torch.rand(50, 3), np.arange(50, dtype=np.uint16)),
        {"x": torch.rand(50, 2, 2), "y": {"z": torch.arange(50).to(torch.bfloat16)}},
        TensorDataset(torch.rand(50, 3), torch.arange(50)),
        TensorDict({"a": torch.rand(50, 3), "b": {"c": torch.arange(50)}}, [50]),
        Pair(images=torch.rand(50, 3), targets=torch.arange(50), batch_size=[50]),
        torch.arange(100).view(2, 50).t(),
    ],
    ids=["tensor", "array", "tuple", "dict", "TensorDataset", "TensorDict", "tensorclass", "strided"],
)
def test_columns_are_copied_whole(path, columns, monkeypatch):
    monkeypatch.setattr(probe, "SAMPLES", 4)
    store = cache(columns, path)
    rows = columns.tensors if isinstance(columns, TensorDataset) else columns
    for i in (0, 17, 49):
        if isinstance(rows, tuple):
            want = tuple(column[i] for column in rows)
        elif isinstance(rows, dict):
            want = {"x": rows["x"][i], "y": {"z": rows["y"]["z"][i]}}
        else:
            want = rows[i]
        assert equal(store[i], want)
    assert len(cache(columns, path)) == 50


def test_columns_of_text_go_row_by_row(path):
    td = TensorDict({"a": torch.arange(3), "s": NonTensorStack("x", "yy", "z")}, [3])
    store = cache(td, path)
    assert [store[i]["s"] for i in range(3)] == ["x", "yy", "z"]


def test_hugging_face_datasets(path):
    datasets = pytest.importorskip("datasets")
    rows = {"ids": [list(range(i)) for i in range(30)], "label": list(range(30)), "text": [f"t{i}" for i in range(30)]}
    dataset = datasets.Dataset.from_dict(rows)
    store = cache(dataset, path)
    assert [store[i] for i in range(30)] == [dataset[i] for i in range(30)]
    assert store.schema.fields[0].kind == "jagged"
    assert equal(cache(dataset, path)[3], dataset[3])


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Made([]), r"found an empty dataset \(0 samples\)"),
        (torch.zeros(0, 3), r"found an empty dataset"),
        (iter([]), r"the iterable is empty"),
        ("folder", r"found 'folder'; expected a dataset, a Parquet file"),
        ({"a": "bc"}, r"found a dict; expected a dataset"),
        (type("Endless", (Dataset,), {})(), r"found Endless, which has \[\] and no len; expected .* def __len__"),
        (3, r"found int, which has neither len and \[\] nor iter"),
        ((torch.zeros(3), torch.zeros(4)), r"found columns of different lengths \(0: 3, 1: 4\)"),
        (Made([lambda: 1]), r"found an object of builtins.function, which no column holds"),
    ],
)
def test_what_is_no_dataset(path, dataset, message):
    with pytest.raises(SchemaError, match=message):
        cache(dataset, path)
    assert list(path.parent.iterdir()) == []


def test_data_that_is_mapped_already_is_not_copied_by_accident(path, tmp_path):
    store = cache(torch.arange(10), path)
    td = TensorDict({"a": torch.arange(10)}, [10]).memmap(str(tmp_path / "td"))
    pair = Pair(images=torch.rand(10), targets=torch.arange(10), batch_size=[10]).memmap(str(tmp_path / "tc"))
    for data, where in (
        (store, path),
        (td, tmp_path / "td"),
        (TensorDict.load_memmap(str(tmp_path / "td")), tmp_path / "td"),
        (pair, tmp_path / "tc"),
    ):
        with pytest.raises(CopyError, match=rf"memory-mapped already, at .*memfeed\.open\('{where}"):
            cache(data, tmp_path / "copy.mf")
    for data in (store, td, pair):
        copy = cache(data, tmp_path / "copy.mf", allow="copy", overwrite=(tmp_path / "copy.mf").exists())
        assert len(copy) == 10
        copy.verify()


def test_a_target_that_is_its_own_source_is_always_refused(path, tmp_path):
    store = cache(torch.arange(10), path)
    td = TensorDict({"a": torch.arange(10)}, [10]).memmap(str(tmp_path / "td"))
    for data, target in (
        (store, path),
        (td, tmp_path / "td"),
        (td, tmp_path / "td" / "inside"),
        (store.subset([1]), path),
    ):
        with pytest.raises(CopyError, match="found the source of the data itself"):
            cache(data, target, allow="copy", overwrite=True)
    with pytest.raises(StoreError, match="found a path inside the store"):
        cache(store, path / "inside", allow="copy", overwrite=True)


def test_an_iterator_is_not_shared_by_workers(path):
    with pytest.raises(ValueError, match=r"found workers=2 for an iterator, which every worker would iterate"):
        cache((i for i in range(100)), path, workers=2)


class Itself(IterableDataset):
    """Begins anew at each ``iter()``, which returns the dataset."""

    def __iter__(self):
        info = get_worker_info()
        self.left = list(range(20)[info.id :: info.num_workers] if info else range(20))
        return self

    def __next__(self):
        if not self.left:
            raise StopIteration
        return self.left.pop(0)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterable_dataset_that_is_its_own_iterator_is_read_by_workers(path, workers):
    rows = cache(Itself(), path, workers=workers)[:].tolist()
    assert rows == (sorted(rows, key=lambda row: row % 2) if workers else list(range(20)))
    assert sorted(rows) == list(range(20))


def test_an_iterable_that_can_be_iterated_once(path):
    class Once(IterableDataset):
        def __init__(self):
            self.g = iter(range(50))

        def __iter__(self):
            return self.g

    assert [int(x) for x in cache(Once(), path)] == list(range(50))


def test_namedtuples_of_columns_and_tuples_that_are_half_columns(path):
    pair = namedtuple("pair", "x y")
    store = cache(pair(torch.arange(9), torch.rand(9, 2)), path)
    assert len(store) == 9
    assert (type(store[3]).__name__, int(store[3].x)) == ("pair", 3)
    with pytest.raises(SchemaError, match="found columns of which 1 is a list; expected tensors or arrays"):
        cache((torch.arange(3), ["a", "b", "c"]), path.with_name("b.mf"))


def test_a_read_only_map_is_not_copied_into_memory(path, tmp_path):
    np.save(tmp_path / "a.npy", np.arange(200_000))
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r")
    loader = memfeed.Loader(mapped, 100)
    assert loader.store.column(()).data_ptr() == mapped.ctypes.data
    assert torch.equal(cache(mapped, path, allow="copy").column(()), torch.arange(200_000))


def test_numpy_text_of_hugging_face(path):
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"t": ["a", "bé"], "x": [1, 2]}).with_format("numpy")
    store = cache(dataset, path)
    assert [row["t"] for row in store] == ["a", "bé"]


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 300


def test_a_dict_of_lists_is_columns(path):
    store = memfeed.cache({"text": ["a", "", "ccc"], "tokens": [[1], [], [2, 3]], "x": torch.arange(3)}, path)
    assert list(store) == [
        {"text": "a", "tokens": [1], "x": 0},
        {"text": "", "tokens": [], "x": 1},
        {"text": "ccc", "tokens": [2, 3], "x": 2},
    ]
    with pytest.raises(SchemaError, match=r"different lengths \(a: 2, b: 1\)"):
        memfeed.cache({"a": [1, 2], "b": [1]}, path, overwrite=True)


def test_an_array_of_objects_is_samples(path):
    assert list(memfeed.cache(np.array([{"a": 1}, {"a": 2}], dtype=object), path)) == [{"a": 1}, {"a": 2}]


def test_numbers_of_a_derived_class(path):
    samples = [{"level": level} for level in (Level.LOW, Level.HIGH)]
    store = memfeed.cache(samples, path, progress=False)
    assert [type(sample["level"]) for sample in store] == [int, int]
    (batch,) = memfeed.Loader(store, 2)
    assert batch["level"].equal(torch.tensor([1, 300]))


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Level, r"found the class Level itself; expected .*: memfeed.cache\(Level\(...\), path\)"),
        (torch.tensor(3), "found one value of dtype torch.int64, without a dim for rows"),
        (np.array(3.0), "found one value of dtype float64, without a dim for rows"),
    ],
)
def test_no_dataset(path, dataset, message):
    with pytest.raises(SchemaError, match=message):
        memfeed.cache(dataset, path)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("broken", [{0}, {33}, {7, 33, 99}])
def test_none_in_place_of_a_broken_sample(path, broken, workers):
    dataset = Made(lambda i: None if i in broken else (torch.full((3,), i), i), 100)
    with pytest.raises(SampleError, match=rf"sample ({'|'.join(map(str, broken))}): found None; .* on_error=\"skip\""):
        cache(dataset, path, workers=0)
    store = cache(dataset, path, workers=workers, on_error="skip")
    assert store.skipped == tuple(sorted(broken))
    assert len(store) == 100 - len(broken)
    assert all(int(store[row][0][0]) == store[row][1] for row in range(len(store)))
    assert len(cache(dataset, path, on_error="skip")) == len(store)


def test_none_in_place_of_a_broken_sample_while_a_store_is_filled(path):
    dataset = Made(lambda i: None if i == 33 else (torch.full((3,), i), i), 100)
    loader = memfeed.Loader(dataset, 10, cache=path)
    with pytest.raises(SampleError, match="sample 33: found None"):
        list(loader)
    store = cache(dataset, path.with_name("b.mf"), lazily=True, workers=0, on_error="skip")
    valid = torch.cat([valid for _, valid in memfeed.Loader(store, 10)])
    assert int(valid.sum()) == 99


def test_none_beside_text_is_a_value(path):
    store = cache(Made(lambda i: None if i in (0, 33) else "text", 100), path)
    assert [store[row] for row in (0, 32, 33)] == [None, "text", None]


def test_an_iterable_that_yields_none(path):
    with pytest.raises(SampleError, match="sample 3: found None"):
        cache((None if i == 3 else (i, i) for i in range(9)), path)


@pytest.mark.parametrize("first", [1, 33, 99])
def test_an_array_after_a_list_of_numbers(path, first):
    dataset = Made(lambda i: {"x": [1, 2, 3] if i < first else np.arange(3)}, 100)
    with pytest.raises(
        SchemaError, match=r"sample \d+, field x: found ndarray \(int64 \[3\]\); expected list, as in sample 0"
    ):
        cache(dataset, path, workers=0)


@pytest.mark.parametrize("lazily", [False, True])
def test_damage_is_not_copied(path, lazily):
    store = cache((torch.rand(100, 8), torch.arange(100)), path)
    with (path / "0.memmap").open("r+b") as file:
        file.seek(320)
        file.write(b"\x11" * 64)
    target = path.with_name("copy.mf")
    for source in (store, memfeed.open(path).subset(range(50)), memfeed.open(path).select(["0"])):
        with pytest.raises(CorruptStoreError, match="0.memmap: found other bytes than were written"):
            cache(source, target, allow="copy", lazily=lazily)
        assert not target.exists()
    with pytest.raises(CorruptStoreError, match="0.memmap: found other bytes than were written"):
        memfeed.append(cache((torch.rand(3, 8), torch.arange(3)), path.with_name("other.mf")), store, progress=False)


@pytest.mark.parametrize("wrong", [5, [1], {}, Level, torch.nn.Linear(1, 1), b"a.mf"])
def test_a_path_that_is_none_is_named(wrong):
    with pytest.raises(TypeError, match=r"found .*; expected a path, as 'ants\.mf'"):
        memfeed.cache([1, 2], wrong)


def test_an_empty_path_is_refused():
    with pytest.raises(StoreError, match="found an empty text; expected a path, as 'ants.mf': was it read from"):
        memfeed.cache([1, 2], "")


def test_a_path_may_begin_with_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert memfeed.cache([1, 2], "~/a.mf").path == tmp_path / "a.mf"
    assert len(memfeed.open("~/a.mf")) == 2
    assert next(iter(memfeed.Loader([1, 2], 2, cache=Path("~/b.mf")))).tolist() == [1, 2]
    assert not (tmp_path / "~").exists()


def test_a_path_before_the_dataset_is_named(path):
    with pytest.raises(TypeError, match=r"found a path, and then an object of list; .* memfeed\.cache\(dataset, '"):
        memfeed.cache(path, [1, 2])


def test_a_dataloader_of_batches_is_no_dataset(path):
    loader = torch.utils.data.DataLoader(range(6), 2)
    with pytest.raises(SchemaError, match=r"found a DataLoader, which yields batches of 2; expected .*loader\.dataset"):
        memfeed.cache(loader, path)
    assert len(memfeed.cache((batch for batch in loader), path)) == 3
    assert len(memfeed.cache(torch.utils.data.DataLoader(range(6), None), path.with_name("b.mf"))) == 6


class _Together(list):
    def __getitems__(self, rows):
        return [self[row] for row in rows]


def test_wrappers_of_torch_read_samples_together_only_if_a_part_does():
    one_by_one, together = [1, 2], _Together([1, 2])
    stacks = [StackDataset(one_by_one, one_by_one), StackDataset(a=Subset(one_by_one, [0, 1]), b=one_by_one)]
    for dataset in [one_by_one, *stacks, Subset(stacks[0], [1])]:
        assert reading_together(dataset) is None
    stacks = [StackDataset(one_by_one, Subset(together, [0, 1])), StackDataset(a=one_by_one, b=together)]
    for dataset in [together, *stacks, Subset(stacks[0], [1])]:
        assert reading_together(dataset) is together


def test_images_of_several_palettes_are_converted(path):
    """Nothing makes images of the rows of a store that is not filled by a loader: the indices are all."""
    image = pytest.importorskip("PIL.Image")

    class Icons(Dataset):
        def __len__(self):
            return 300

        def __getitem__(self, index):
            made = image.new("P", (4, 4), index % 7)
            made.putpalette([9, 9, 9] * 5 if index == 211 else [1, 2, 3] * 5)
            return made

    store = cache(Icons(), path)
    assert all(store[i].unique().tolist() == [i % 7] for i in (0, 211, 299))
