"""Parquet files, Arrow datasets and HDF5 files."""

import numpy as np
import pytest
import torch

import memfeed
from memfeed.errors import SchemaError, StoreError
from memfeed.tables.table_column import TableColumn
from support import cache, equal

pa = pytest.importorskip("pyarrow")
ds = pytest.importorskip("pyarrow.dataset")
pq = pytest.importorskip("pyarrow.parquet")
h5py = pytest.importorskip("h5py")
N = 100
TABLE = {
    "a": range(N),
    "text": [None if i == 88 else f"row {i}" for i in range(N)],
    "v": [[1.0] * (i % 3) for i in range(N)],
}


def row(i):
    text = None if i == 88 else f"row {i}"
    return {"a": torch.tensor(i), "text": text, "v": torch.ones(i % 3, dtype=torch.float64)}


@pytest.fixture
def folder(tmp_path):
    table = pa.table(TABLE)
    (tmp_path / "data").mkdir()
    pq.write_table(table[:60], tmp_path / "data" / "0.parquet", row_group_size=25)
    pq.write_table(table[60:], tmp_path / "data" / "1.parquet", row_group_size=25)
    return tmp_path / "data"


@pytest.mark.parametrize(
    "kind", [str, lambda folder: folder, lambda folder: sorted(folder.glob("*")), lambda folder: ds.dataset(folder)]
)
def test_parquet_files(path, folder, kind):
    store = cache(kind(folder), path, workers=2)
    assert all(equal(sample, row(i)) for i, sample in enumerate(store))
    assert len(store) == N
    assert equal(cache(kind(folder), path)[88], row(88))
    assert len(cache(str(folder / "1.parquet"), path.with_name("one.mf"))) == 40


def test_parquet_of_numbers_is_read_one_row_group_at_a_time(path, tmp_path, monkeypatch):
    pq.write_table(
        pa.table({"a": np.arange(1000), "b": np.arange(1000) / 3}), tmp_path / "x.parquet", row_group_size=64
    )
    monkeypatch.setattr("memfeed.convert.driver.BLOCK_BYTES", 3000)
    store = cache(tmp_path / "x.parquet", path)
    assert torch.equal(store.column("a"), torch.arange(1000))
    assert torch.equal(store.column("b"), torch.arange(1000, dtype=torch.float64) / 3)


def test_a_partitioned_folder_has_the_columns_of_its_names(path, tmp_path):
    ds.write_dataset(
        pa.table({"a": range(6), "year": [2020, 2021] * 3}),
        tmp_path / "parts",
        format="parquet",
        partitioning=ds.partitioning(pa.schema([("year", pa.int64())]), flavor="hive"),
    )
    found = {int(one["a"]): int(one["year"]) for one in cache(tmp_path / "parts", path)}
    assert found == {i: 2020 + i % 2 for i in range(6)}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: ds.dataset(folder).filter(ds.field("a") > 5), r"with a filter; .*dataset\.to_table\(\)"),
        (lambda folder: folder / "none.parquet", r"found no Parquet file that can be read"),
        (lambda folder: folder.parent, r"a Parquet file or a folder of those"),
    ],
)
def test_refused_files(path, folder, make, message):
    data = make(folder)
    if data == folder.parent:
        for file in folder.glob("*"):
            file.unlink()
    with pytest.raises(SchemaError, match=message) as caught:
        cache(data, path)
    assert len(str(caught.value)) < 400


def test_missing_numbers_of_a_parquet_file_are_refused(path, tmp_path):
    pq.write_table(pa.table({"a": [1, None]}), tmp_path / "x.parquet")
    with pytest.raises(SchemaError, match=r"column a: found 1 missing .*pandas\.read_parquet\(path\)\.dropna\(subset"):
        cache(tmp_path / "x.parquet", path)


@pytest.fixture
def hdf5(tmp_path):
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["image"] = np.random.default_rng(0).random((N, 3, 4))
        file["group/label"] = np.arange(N)
        file["name"] = [f"row {i}" for i in range(N)]
    with h5py.File(tmp_path / "data.h5") as file:
        yield file


def test_hdf5_files(path, hdf5):
    store = cache(hdf5, path, workers=3)  # read in this process: two processes must not share a handle
    for i in (0, 50, 99):
        want = {
            "group": {"label": torch.tensor(i)},
            "image": torch.from_numpy(hdf5["image"][i]),
            "name": f"row {i}",
        }
        assert equal(store[i], want)
    assert equal(cache(hdf5, path)[3], store[3])
    numbers = cache((hdf5["image"], hdf5["group/label"]), path.with_name("b.mf"))
    assert torch.equal(numbers.column(0), torch.from_numpy(hdf5["image"][:]))
    assert equal(cache(hdf5["group"], path.with_name("c.mf"))[9], {"label": torch.tensor(9)})


def test_hdf5_is_read_in_chunks(path, hdf5, monkeypatch):
    read, most = TableColumn.read, []

    def counted(self, start, stop):
        most.append(stop - start)
        return read(self, start, stop)

    monkeypatch.setattr(TableColumn, "read", counted)
    monkeypatch.setattr("memfeed.convert.driver.BLOCK_BYTES", 1000)
    cache(hdf5["image"], path)
    assert max(most) < 20


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda file: file.create_dataset("x", data=3), r"column bad\.h5:/x: found a single value without rows"),
        (lambda file: file.create_dataset("x", data=np.zeros(3, "S4,i4")), r"column bad\.h5:/x: found the dtype"),
        (lambda file: file.create_group("x"), r"found /x in .* without a dataset"),
        (lambda file: [file.create_dataset(n, data=np.zeros(k)) for n, k in (("a", 3), ("b", 4))], r"\(a: 3, b: 4\)"),
    ],
)
def test_refused_hdf5(path, tmp_path, write, message):
    with h5py.File(tmp_path / "bad.h5", "w") as file:
        write(file)
        with pytest.raises(SchemaError, match=message) as caught:
            cache(file, path)
    assert len(str(caught.value)) < 400


def test_a_loader_refuses_files(hdf5, folder):
    for data in (hdf5, str(folder)):
        with pytest.raises(SchemaError, match=r"found a column of a file; .*memfeed\.cache\(data, path\)"):
            memfeed.Loader(data, 4)


@pytest.mark.parametrize(
    "url", ["s3://bucket/x", "gs://bucket/x.parquet", "https://host/x", "file:///nowhere/x", "hf://a/b"]
)
def test_urls_are_no_folders(path, url, tmp_path, monkeypatch):
    from pathlib import Path

    from memfeed.cli import main

    monkeypatch.chdir(tmp_path)
    for use in (lambda: memfeed.Writer(url), lambda: memfeed.Writer(Path(url)), lambda: cache(url, path)):
        with pytest.raises(StoreError, match=r"a URL; expected a path of this machine.*: path = ") as caught:
            use()
        assert len(str(caught.value)) < 400
    uses = [lambda: memfeed.open(url), lambda: memfeed.open(Path(url))]
    if url.startswith(("https:", "hf:")):  # at the others a store may be made: see tests/remote
        uses += [lambda: cache(torch.arange(3), url), lambda: cache(torch.arange(3), Path(url))]
    for use in uses:
        with pytest.raises(StoreError, match=r"without cache_dir=|unknown scheme|only reads"):
            use()
    assert main(["cache", "--images", url, "out.mf"]) == 2
    assert list(tmp_path.iterdir()) == []
