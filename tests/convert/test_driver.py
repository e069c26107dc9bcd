"""Rows are divided among workers, and columns are promoted between rounds."""

import resource

import pytest
import torch

from support import Counting, Made, cache, equal
from torture.victims import ended, start


def test_workers_of_an_iterable_share_it(path):
    store = cache(Counting(333), path, workers=2)
    assert sorted(label for _, label in store) == list(range(333))
    assert store.skipped == ()


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterable_whose_shapes_drift(path, workers):
    make = lambda i: torch.full((2 if i < 100 else 3,), i)  # noqa: E731
    store = cache(Counting(150, make), path, workers=workers)
    assert sorted((len(row), int(row[0])) for row in store) == [(2 if i < 100 else 3, i) for i in range(150)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("shapes", "kind"),
    [
        (lambda i: (3, 4) if i != 71 else (5, 4), "jagged float32 [*, 4]"),
        (lambda i: (3, 4) if i != 71 else (3, 5), "jagged float32 [3, *]"),
        (lambda i: (i % 5, 4) if i != 71 else (2, 9), "list float32 [*, *]"),
        (lambda i: (3, 4) if i not in (71, 150) else (4, 4) if i == 71 else (3, 1), "list float32 [*, *]"),
    ],
)
def test_the_first_row_that_differs_promotes_its_column(path, workers, shapes, kind):
    dataset = Made(lambda i: (torch.full(shapes(i), float(i)), i), 200)
    store = cache(dataset, path, workers=workers)
    assert store.schema.fields[0].describe() == kind
    for i in range(200):
        assert equal(store[i], dataset[i])
    store.verify()
    assert equal(cache(dataset, path)[71], dataset[71])


def in_child(path, action):
    child = start(path.with_name("stderr"), action, path)
    assert ended(child)
    assert child.exitcode == 0, path.with_name("stderr").read_text()


def many_columns(path):
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 4096))
    store = cache({f"c{i}": torch.arange(3) + i for i in range(400)}, path)
    assert int(store[2]["c399"]) == 401


def test_more_columns_than_file_descriptors(path):
    in_child(path, many_columns)
