"""Data frames and Arrow tables: what a store holds of each type of column, and which are refused."""

import datetime
import decimal

import numpy as np
import pytest
import torch

import memfeed
from memfeed.errors import SchemaError
from memfeed.tables.table_column import TableColumn
from support import cache, equal

pa = pytest.importorskip("pyarrow")
pd = pytest.importorskip("pandas")
pl = pytest.importorskip("polars")
N = 100
DAY = 86_400_000_000_000
START = datetime.datetime(2020, 1, 1)
TIMES = [START + datetime.timedelta(days=i) for i in range(N)]
FIRST = 18_262 * DAY  # 2020-01-01 in nanoseconds since 1970


def numbers(i):
    return {"a": torch.tensor(i), "f": torch.tensor(i / 7, dtype=torch.float64), "b": torch.tensor(i % 2 == 0)}


COLUMNS = {"a": np.arange(N), "f": np.arange(N) / 7, "b": np.arange(N) % 2 == 0}
PLAIN = {
    "pandas": lambda: pd.DataFrame(COLUMNS),
    "pandas nullable": lambda: pd.DataFrame(COLUMNS).astype({"a": "Int64", "f": "Float64", "b": "boolean"}),
    "pandas arrow": lambda: pd.DataFrame(COLUMNS).convert_dtypes(dtype_backend="pyarrow"),
    "polars": lambda: pl.DataFrame(COLUMNS),
    "polars lazy": lambda: pl.DataFrame(COLUMNS).lazy(),
    "arrow": lambda: pa.table(COLUMNS),
    "arrow in chunks": lambda: pa.concat_tables([pa.table(COLUMNS)[:33], pa.table(COLUMNS)[33:]]),
    "arrow batch": lambda: pa.RecordBatch.from_pydict(COLUMNS),
    "arrow reader": lambda: pa.table(COLUMNS).to_reader(max_chunksize=30),
    "structured": lambda: pd.DataFrame(COLUMNS).to_records(index=False),
}


@pytest.mark.parametrize("kind", PLAIN)
def test_columns_of_numbers(path, kind):
    store = cache(PLAIN[kind](), path)
    assert [field.describe() for field in store.schema] == ["int64 []", "float64 []", "bool []"]
    assert all(equal(sample, numbers(i)) for i, sample in enumerate(store))
    assert len(store) == N
    assert equal(cache(PLAIN[kind](), path)[7], numbers(7))  # compared with the table
    batch = next(iter(memfeed.Loader(PLAIN[kind](), 50)))  # in place, without a store
    assert equal(batch, store[:50])


@pytest.mark.parametrize(
    "make", [lambda: pd.DataFrame({"x": np.arange(50_000)}), lambda: pa.table({"x": np.arange(50_000)})]
)
def test_a_loader_reads_columns_in_place(make):
    table = make()
    column = table["x"].to_numpy() if isinstance(table, pd.DataFrame) else table["x"].chunk(0).to_numpy()
    assert memfeed.Loader(table, 10).store.column("x").data_ptr() == column.ctypes.data


RICH = {
    "text": [f"row {i}" if i != 77 else None for i in range(N)],
    "raw": [bytes(range(i % 5)) for i in range(N)],
    "tokens": [list(range(i % 5)) if i != 50 else None for i in range(N)],
    "grid": [[[i, 1]] * (i % 3) for i in range(N)],
    "vector": pa.array([[i, i + 0.5] for i in range(N)], pa.list_(pa.float32(), 2)),
    "place": [{"x": i, "name": {"first": f"n{i}"}} for i in range(N)],
    "tags": [["a"] * (i % 3) for i in range(N)],
    "boxes": [[{"label": "cat", "id": i}] * (i % 2) for i in range(N)],
    "kind": pa.array(["u", "v"] * (N // 2)).dictionary_encode(),
    "time": TIMES,
    "day": [time.date() for time in TIMES],
    "long": pa.array([datetime.timedelta(days=i) for i in range(N)]),
    "gap": [None if i == 3 else i / 2 for i in range(N)],
    "nothing": pa.nulls(N),
}


def rich(i):
    tokens = None if i == 50 else torch.arange(i % 5)
    grid = torch.tensor([[i, 1]] * (i % 3)).reshape(i % 3, 2 if i % 3 else 0).long()
    return {
        "text": None if i == 77 else f"row {i}",
        "raw": bytes(range(i % 5)),
        "tokens": tokens,
        "grid": grid,
        "vector": torch.tensor([i, i + 0.5]),
        "place": {"x": torch.tensor(i), "name": {"first": f"n{i}"}},
        "tags": ["a"] * (i % 3),
        "boxes": [{"label": "cat", "id": i}] * (i % 2),
        "kind": "uv"[i % 2],
        "time": torch.tensor(FIRST + i * DAY),
        "day": torch.tensor(FIRST + i * DAY),
        "long": torch.tensor(i * DAY),
        "gap": torch.tensor(float("nan") if i == 3 else i / 2, dtype=torch.float64),
        "nothing": None,
    }


@pytest.mark.parametrize("chunks", [1, 3])
def test_every_type_of_an_arrow_table(path, chunks):
    table = pa.table(RICH)
    table = pa.concat_tables([table[at : at + 40] for at in (0, 40, 80)]) if chunks == 3 else table
    store = cache(table, path, workers=2)
    assert all(equal(sample, rich(i)) for i, sample in enumerate(store))
    kinds = {field.name: field.kind for field in store.schema}
    assert kinds["vector"] == "fixed"
    assert kinds["tags"] == kinds["boxes"] == "json"
    assert [field.optional for field in store.schema if field.name in ("text", "tokens", "raw")] == [True, False, True]
    assert equal(cache(table, path)[77], rich(77))


def test_rows_of_a_list_column_without_none_are_jagged(path):
    store = cache(pa.table({"tokens": [list(range(i % 5)) for i in range(N)]}), path)
    assert store.schema.fields[0].describe() == "jagged int64 [*]"
    assert store[:3]["tokens"].is_nested


def test_columns_of_polars(path):
    frame = pl.DataFrame(
        {
            "text": RICH["text"],
            "kind": pl.Series(["u", "v"] * (N // 2), dtype=pl.Categorical),
            "grid": pl.Series([[i, 2] for i in range(N)], dtype=pl.Array(pl.Int8, 2)),
            "tokens": [list(range(i % 5)) for i in range(N)],
            "time": TIMES,
        }
    )
    store = cache(frame, path)
    for i in (0, 50, 77, 99):
        want = {**rich(i), "grid": torch.tensor([i, 2], dtype=torch.int8), "tokens": torch.arange(i % 5)}
        assert equal(store[i], {name: want[name] for name in frame.columns})


def test_columns_of_pandas(path):
    frame = pd.DataFrame(
        {
            "text": RICH["text"],
            "kind": pd.Categorical(["u", "v"] * (N // 2)),
            "level": pd.Categorical([3, 5] * (N // 2)),
            "time": pd.Series(TIMES).dt.tz_localize("UTC").array,
            "long": pd.to_timedelta(np.arange(N), unit="D"),
            "tokens": [np.arange(i % 5) for i in range(N)],
            7: np.arange(N, dtype=np.uint8),
        },
        index=np.arange(N)[::-1],
    )
    store = cache(frame, path)
    for i in (0, 50, 77, 99):
        want = {**rich(i), "level": torch.tensor([3, 5][i % 2]), "tokens": torch.arange(i % 5)}
        want[7] = torch.tensor(i, dtype=torch.uint8)
        assert equal(store[i], {name: want[name] for name in frame.columns})


@pytest.mark.parametrize(
    "series",
    [
        pd.Series(np.arange(9), name="x"),
        pl.Series(range(9)),
        pa.array(range(9)),
        pa.chunked_array([range(4), range(4, 9)]),
    ],
    ids=["pandas", "polars", "array", "chunked array"],
)
def test_one_column(path, series):
    assert [int(value) for value in cache(series, path)] == list(range(9))


def test_tables_beside_other_columns(path):
    data = {"table": pa.table({"a": range(9)}), "x": torch.rand(9, 2), "y": (pd.Series(["t"] * 9), np.arange(9))}
    store = cache(data, path)
    assert equal(store[4], {"table": {"a": torch.tensor(4)}, "x": data["x"][4], "y": ("t", torch.tensor(4))})
    assert equal(cache((pl.Series(["a", "b"]), torch.arange(2)), path.with_name("b.mf"))[1], ("b", torch.tensor(1)))


def test_a_list_of_rows_beside_tensors_stays_a_structure(path):
    frame = pd.DataFrame({"pair": [[i, i + 1] for i in range(30)], "a": range(30)})
    assert equal(cache(frame, path)[9], {"pair": [9, 10], "a": torch.tensor(9)})


def test_no_other_process_reads_a_table(path, monkeypatch):
    read, rows = TableColumn.read, set()

    def noted(self, start, stop):
        rows.update(range(start, stop))  # a worker would note it in a copy
        return read(self, start, stop)

    monkeypatch.setattr(TableColumn, "read", noted)
    cache(pd.DataFrame({"pair": [[i, i + 1] for i in range(300)]}), path, workers=2)
    assert rows == set(range(300))


def test_fields_and_dtypes_apply_to_tables(path):
    frame = pd.DataFrame({"grid": [[[1, 2], [i]] for i in range(40)], "f": np.arange(40.0), "s": "text"})
    store = cache(frame, path, fields={"grid": "json"}, forms={"f": torch.float32})
    assert equal(store[3], {"grid": [[1, 2], [3]], "f": torch.tensor(3.0), "s": "text"})


def test_a_table_that_changed_is_stale(path):
    cache(pa.table({"a": range(9), "s": ["t"] * 9}), path)
    with pytest.raises(memfeed.errors.StaleStoreError, match="field s, sample 0"):
        cache(pa.table({"a": range(9), "s": ["u"] * 9}), path)


def test_damaged_rows_of_a_table_are_computed_again(path):
    table = pa.table({"a": range(N), "s": [f"row {i}" for i in range(N)]})
    store = cache(table, path)
    heap = next(file for file in path.rglob("*") if file.is_file() and b"row 77" in file.read_bytes())
    heap.chmod(0o644)
    heap.write_bytes(heap.read_bytes().replace(b"row 77", b"ROW 77"))
    assert memfeed.repair(table, path)[77]["s"] == "row 77"
    assert store.path == path


PANDAS = "expected values that a store can hold: df = "
REFUSED = {
    "pandas: missing int": (
        lambda: pd.DataFrame({"x": pd.array([1, None], dtype="Int64")}),
        r'column x: found 1 missing values .*df = df\.dropna\(subset=\["x"\]\)'.replace('"', "'"),
    ),
    "pandas: missing time": (lambda: pd.DataFrame({"x": pd.to_datetime(["2020", None])}), r"column x: .*dropna"),
    "pandas: far time": (
        lambda: pd.DataFrame({"x": pd.Series(["1500-01-01"], dtype="datetime64[s]")}),
        r"column x: found a time .*astype",
    ),
    "pandas: interval": (lambda: pd.DataFrame({"x": pd.interval_range(0, 2)}), r"column x: found the dtype interval"),
    "pandas: tuple name": (lambda: pd.DataFrame({("a", "b"): [1]}), r"\('a', 'b'\).*str\(name\) for name"),
    "pandas: same names": (lambda: pd.DataFrame([[1, 2]], columns=["a", "a"]), r"several columns.*duplicated"),
    "polars: missing int": (lambda: pl.DataFrame({"x": [1, None]}), r"column x: .*df = df\.drop_nulls\('x'\)"),
    "polars: decimal": (
        lambda: pl.DataFrame({"x": [decimal.Decimal("1.5")]}),
        r"column x: found decimal numbers .*df\.cast\(\{'x': pl\.Float64\}\)",
    ),
    "polars: objects": (lambda: pl.DataFrame({"x": [object()]}, schema={"x": pl.Object}), r"df\.drop"),
    "polars series": (lambda: pl.Series([1, None]), r"series\.drop_nulls\(\)"),
    "arrow: missing bool": (lambda: pa.table({"x": [True, None]}), r"table = table\.filter"),
    "arrow: missing struct": (lambda: pa.table({"x": [{"a": 1}, None]}), r"column x.*missing structs"),
    "arrow: map": (
        lambda: pa.table({"x": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64()))}),
        r"column x: found the type map.*table = table\.drop_columns\(\['x'\]\)",
    ),
    "arrow: uneven lists": (lambda: pa.table({"x": [[[1], [1, 2]]]}), r"column x: found a row with lists of diff"),
    "arrow: lists of times": (lambda: pa.table({"x": [[{"t": START}]]}), r"column x: found lists of struct"),
    "arrow: array": (lambda: pa.array([1, None]), r"array = array\.drop_null\(\)"),
    "arrow: same names": (lambda: pa.Table.from_arrays([pa.array([1])] * 2, names=["a", "a"]), r"two columns"),
    "lengths": (
        lambda: (pd.Series([1, 2]), torch.zeros(3)),
        r"columns of different lengths \(0: 2, 1: 3\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_tables(path, name):
    make, message = REFUSED[name]
    with pytest.raises(SchemaError, match=message) as caught:
        cache(make(), path)
    assert len(str(caught.value)) < 400
    assert not path.exists()


def test_the_lines_of_the_errors_work(path):
    df = pd.DataFrame({"x": pd.array([1, None, 3], dtype="Int64"), "y": [1, 2, 3]})
    found = {"df": df}
    with pytest.raises(SchemaError) as caught:
        cache(df, path)
    exec(str(caught.value).partition("hold: ")[2], found)
    assert [int(row["x"]) for row in cache(found["df"], path)] == [1, 3]
    table = pa.table({"x": [1, None, 3], "d": [decimal.Decimal(1)] * 3})
    found = {"table": table, "pyarrow": pa}
    for _ in range(2):
        with pytest.raises(SchemaError) as caught:
            cache(found["table"], path.with_name("b.mf"))
        exec(str(caught.value).partition("hold: ")[2], found)
    assert [float(row["d"]) for row in cache(found["table"], path.with_name("b.mf"))] == [1, 1]


def test_a_loader_refuses_what_it_cannot_read_in_place():
    with pytest.raises(
        SchemaError, match=r"column s: found values that are no numbers.*memfeed\.cache\(data, path\)\)"
    ):
        memfeed.Loader(pd.DataFrame({"s": ["a"]}), 1)
