"""Write the tables of docs/inputs.md from real objects: each is cached, and its store and one batch are described.

python docs/draw_inputs.py
"""

from __future__ import annotations

import ast
import contextlib
import datetime
import decimal
import io
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import datasets
import h5py
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import scipy.sparse
import torch
from tensordict import TensorDict
from torch.utils.data import TensorDataset

import memfeed
from memfeed.errors import MemfeedError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it warns of what torch has deprecated
    from torch_geometric.data import Data, HeteroData

PAGE = Path(__file__).with_name("inputs.md")

INPUTS = {
    "a list of samples": "[(torch.rand(3), 0), (torch.rand(3), 1)]",
    "a range": "range(10)",
    "a map-style dataset": "Squares()",
    "an iterable": "({'x': torch.rand(3)} for _ in range(9))",
    "a tensor or array": "torch.rand(9, 3)",
    "a dict of lists": "{'text': ['a', 'bc'], 'label': [0, 1]}",
    "an array of objects": "np.array([{'a': 1}, {'a': 2}], dtype=object)",
    "a tuple or dict of columns": "{'x': torch.rand(9, 3), 'y': (np.arange(9), pd.Series(range(9)))}",
    "`TensorDataset`": "TensorDataset(torch.rand(9, 3), torch.arange(9))",
    "`TensorDict`, tensorclass": "TensorDict({'x': torch.rand(9, 3)}, [9])",
    "structured array": "np.zeros(9, dtype=[('x', 'f4', (3,)), ('y', 'i8')])",
    "pandas `DataFrame`": "pd.DataFrame({'x': np.arange(9), 'name': 'a'})",
    "pandas `Series`": "pd.Series(['a', 'b'])",
    "polars `DataFrame`, `LazyFrame`": "pl.LazyFrame({'x': range(9), 'ids': [[1], []] + [[2, 3]] * 7})",
    "polars `Series`": "pl.Series([0.5, 1.5])",
    "Arrow `Table`, `RecordBatch`, reader": "pa.table({'x': range(9), 'name': ['a'] * 9})",
    "Arrow `Array`, `ChunkedArray`": "pa.array([[1], [2, 3]])",
    "a Parquet file, a folder or list of them": "'data.parquet'",
    "`pyarrow.dataset`": "pa.dataset.dataset('data.parquet')",
    "h5py `File`, `Group`": "h5py.File('data.h5')",
    "h5py `Dataset`": "h5py.File('data.h5')['image']",
    "Hugging Face `Dataset`": "datasets.Dataset.from_dict({'ids': [[1], [2, 3]], 'label': [0, 1]})",
    "Hugging Face `IterableDataset`": "datasets.Dataset.from_dict({'label': [0, 1]}).to_iterable_dataset()",
    "Hugging Face `DatasetDict`": "datasets.DatasetDict(train=datasets.Dataset.from_dict({'label': [0, 1]}))",
    "PyTorch Geometric `Data`": "[Data(x=torch.rand(n, 3), y=n) for n in (2, 3)]",
    "PyTorch Geometric `HeteroData`": "[HeteroData({'film': {'x': torch.rand(n, 3)}, 'y': n}) for n in (2, 3)]",
}

COLUMNS = {
    "ints, floats, bools": "pa.array([1, 2])",
    "float, some missing": "pa.array([0.5, None])",
    "text": "pa.array(['a', 'b'])",
    "text, some missing": "pa.array(['a', None])",
    "bytes": "pa.array([b'a', b'b'])",
    "categorical, dictionary": "pd.Series(['a', 'b'], dtype='category')",
    "timestamp, date": "pd.Series(pd.to_datetime(['2020-01-01', '2020-01-02']))",
    "duration, time of day": "pa.array([datetime.timedelta(days=1)] * 2)",
    "nullable int without missing values": "pd.Series([1, 2], dtype='Int64')",
    "lists of one length (fixed-size)": "pl.Series([[1, 2], [3, 4]], dtype=pl.Array(pl.Int8, 2))",
    "lists of numbers": "pa.array([[1], [2, 3]])",
    "lists of numbers, some missing": "pa.array([[1], None])",
    "lists of lists of numbers": "pa.array([[[1, 2]], [[3, 4], [5, 6]]])",
    "lists of text or structs": "pa.array([[{'id': 1}], []])",
    "struct": "pa.table({'s': [{'x': 1, 'y': 'a'}, {'x': 2, 'y': 'b'}]})",
}

REFUSED = {
    "missing ints, bools, times": "pd.DataFrame({'x': pd.array([1, None], dtype='Int64')})",
    "the same in polars": "pl.DataFrame({'x': [1, None]})",
    "the same in Arrow": "pa.table({'x': [True, None]})",
    "the same in Parquet": "'missing.parquet'",
    "decimals": "pa.table({'x': [decimal.Decimal('1.5')]})",
    "maps": "pa.table({'x': pa.array([[('k', 1)]], pa.map_(pa.string(), pa.int64()))})",
    "lists of different lengths in one row": "pa.table({'x': [[[1], [1, 2]]]})",
    "times beyond int64 nanoseconds": "pd.DataFrame({'x': pd.Series(['1500-01-01'], dtype='datetime64[s]')})",
    "column names that are no text": "pd.DataFrame({('a', 'b'): [1]})",
    "text in a structured array": "np.zeros(2, dtype=[('x', 'f4'), ('s', 'U3')])",
    "a dataset with a filter": "pa.dataset.dataset('data.parquet').filter(pa.compute.field('x') > 5)",
    "a sparse matrix": "scipy.sparse.csr_matrix((3, 3))",
    "a sparse matrix among columns": "(torch.rand(3), scipy.sparse.csr_matrix((3, 3)))",
    "a sparse tensor": "torch.eye(3).to_sparse()",
    "a module": "torch.nn.Linear(2, 2)",
    "a TensorDict of parameters": "TensorDict.from_module(torch.nn.Linear(2, 2))",
    "a state_dict": "torch.nn.Linear(2, 2).state_dict()",
    "data that is mapped from a file": "np.load('array.npy', mmap_mode='r')",
    "a directory of TensorDict, opened": "TensorDict.load_memmap('td')",
    "a URL": "'s3://bucket/data.parquet'",
    "a folder of images": "'folder'",
}
"""What is refused with a line to write, and an example of each."""


class Squares(torch.utils.data.Dataset):
    """Samples with a number and a text."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"square": torch.tensor(index**2), "name": f"row {index}"}


NAMES = {
    "datasets": datasets,
    "datetime": datetime,
    "decimal": decimal,
    "h5py": h5py,
    "np": np,
    "pa": pa,
    "pd": pd,
    "pl": pl,
    "scipy": scipy,
    "torch": torch,
    "Data": Data,
    "HeteroData": HeteroData,
    "Squares": Squares,
    "TensorDataset": TensorDataset,
    "TensorDict": TensorDict,
}
"""What the examples may use."""


@contextlib.contextmanager
def examples() -> Any:
    """Change to a temporary directory that has the files of the examples."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            pq.write_table(pa.table({"x": range(9), "name": ["a"] * 9}), "data.parquet")
            pq.write_table(pa.table({"x": [1, None]}), "missing.parquet")
            with h5py.File("data.h5", "w") as file:
                file["image"], file["label"] = np.zeros((9, 3, 4)), np.arange(9)
            np.save("array.npy", np.arange(9))
            TensorDict({"x": torch.arange(9)}, [9]).memmap("td")
            yield
        finally:
            os.chdir(before)


def make(text: str) -> Any:
    """Return the object that an example makes."""
    return eval(text, dict(NAMES))


def describe(value: Any) -> str:
    """Return the structure of a store's fields or of a batch, in the notation of Python."""
    if isinstance(value, torch.Tensor):
        name, dims = (
            str(value.dtype).removeprefix("torch."),
            ["*" if type(d) is not int else str(d) for d in value.shape],
        )
        return f"{'jagged ' if value.is_nested else ''}{name} [{', '.join(dims)}]"
    if isinstance(value, TensorDict):
        return f"TensorDict({describe(dict(value.items()))})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {describe(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list | tuple):
        plain = all(part is None or isinstance(part, str | bytes | list | int) for part in value)
        return repr(value) if plain else "[" + ", ".join(map(describe, value)) + "]"
    if hasattr(value, "num_graphs"):
        parts = value.to_dict()
        return f"{type(value).__name__}({', '.join(f'{key}: {describe(parts[key])}' for key in sorted(parts))})"
    return repr(value)


def row(kind: str, text: str) -> str:
    """Return a line of a table: the kind, an example, the fields of its store, a batch of two rows."""
    stores = memfeed.cache(make(text), progress=False)
    if isinstance(stores, dict):
        return f"| {kind} | `{text}` | a store for each split: {', '.join(stores)} | those of each store |"
    fields = ", ".join(f"{field.name}: {field.describe()}" for field in stores.schema)
    return f"| {kind} | `{text}` | {fields} | `{describe(stores[:2])}` |"


def refusal(text: str) -> str:
    """Return the error for an example of what is refused. Raises AssertionError if it is taken."""
    with contextlib.suppress(FileNotFoundError):
        Path("none.mf").unlink()
    try:
        memfeed.cache(make(text), "none.mf", progress=False)
    except MemfeedError as error:
        return str(error)
    raise AssertionError(f"{text}: found that this is taken; expected an error")


def line_of(message: str) -> str:
    """Return the code at the end of an error: the longest text after a colon that is Python; "" if there is none."""
    at = message.find(": ")
    while at >= 0:
        with contextlib.suppress(SyntaxError):
            ast.parse(message[at + 2 :])
            return message[at + 2 :]
        at = message.find(": ", at + 1)
    return ""


def refused_row(kind: str, text: str) -> str:
    """Return a line of the table of what is refused; paths are those of the examples."""
    message = refusal(text).replace(f"{Path.cwd()}/", "").replace("|", "\\|")
    return f"| {kind} | {message.partition('; expected')[0]} | `{line_of(message)}` |"


def table(head: str, lines: list[str]) -> str:
    """Return a table in Markdown."""
    return "\n".join([head, "|---" * head.count(" | ") + "|---|", *lines])


def draw(page: str) -> str:
    """Return the page with its tables drawn anew."""
    with examples(), contextlib.redirect_stderr(io.StringIO()):
        torch.manual_seed(0)
        tables = {
            "inputs": table(
                "| input | for example | the store holds | a batch of two rows |",
                [row(kind, text) for kind, text in INPUTS.items()],
            ),
            "columns": table(
                "| column of a table | for example | the store holds | a batch of two rows |",
                [row(kind, text) for kind, text in COLUMNS.items()],
            ),
            "refused": table(
                "| input | what the error says | and the line to write |",
                [refused_row(kind, text) for kind, text in REFUSED.items()],
            ),
        }
    for name, drawn in tables.items():
        begin, end = f"<!-- {name}: drawn by docs/draw_inputs.py -->", f"<!-- end of {name} -->"
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}\n{drawn}\n{end}{rest.partition(end)[2]}"
    return page


if __name__ == "__main__":
    PAGE.write_text(draw(PAGE.read_text()))
    print(f"wrote {PAGE}")
