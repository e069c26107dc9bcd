"""Gather tasks made into groups of batches: rows, masks, keys and positions of each."""

import numpy as np
import pytest
import torch

import memfeed
from memfeed.loading.gather_tasks import GatherTask
from memfeed.transforms import RandomHorizontalFlip
from support import Made, cache


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    rows = Made(lambda i: {"x": torch.arange(12).view(1, 3, 4) + i, "y": i}, 20)
    return cache(rows, tmp_path_factory.mktemp("groups") / "s.mf", workers=0)


def maker_of(store, **options):
    return memfeed.Loader(store, 2, **options)._epochs.reader.prepare().maker


def task(ids, size, *, valid=None, visits=None, rows=None):
    ids = np.array(ids)
    positions = [size * (i + 1) for i in range(len(ids) // size)]
    return GatherTask(
        ids=ids,
        rows=ids if rows is None else np.array(rows),
        size=size,
        positions=positions,
        visits=visits,
        valid=valid,
    )


def groups(maker, *tasks):
    return [(list(group.batches), list(group.positions), group.row_count) for group in maker.groups(iter(tasks), 0, 5)]


def numbers(found):
    return [batch["y"].tolist() for batches, _, _ in found for batch in batches]


def test_each_batch_has_its_rows_and_the_position_after_it(store):
    found = groups(maker_of(store), task([3, 1, 4, 1, 5, 9], 2), task([7], 1))
    assert numbers(found) == [[3, 1], [4, 1], [5, 9], [7]]
    assert [position for _, positions, _ in found for position in positions] == [2, 4, 6, 1]
    assert all(count in (1, 2) for _, _, count in found)


def test_masks_and_rows(store):
    maker = maker_of(store, return_rows=True, last="pad")
    valid = torch.tensor([True, True, True, False])
    ((first, *_), _, _), ((second, *_), _, _) = groups(maker, task([3, 1, 4, 4], 2, valid=valid, rows=[13, 11, 14, 14]))
    assert (first["valid"].tolist(), second["valid"].tolist()) == ([True, True], [True, False])
    assert (first["rows"].tolist(), second["rows"].tolist()) == ([13, 11], [14, 14])


def test_a_row_that_comes_twice_is_drawn_by_its_visit(store):
    flip = RandomHorizontalFlip(on="x")
    maker = maker_of(store, transform=flip)
    ids, visits = [3] * 16, np.arange(16)
    (once,) = [batch for batches, _, _ in groups(maker, task(ids, 16)) for batch in batches]
    (each,) = [batch for batches, _, _ in groups(maker, task(ids, 16, visits=visits)) for batch in batches]
    assert len({tuple(one.flatten().tolist()) for one in once["x"]}) == 1
    assert len({tuple(one.flatten().tolist()) for one in each["x"]}) == 2
