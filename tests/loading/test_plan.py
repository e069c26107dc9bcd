"""How a loader reads, decided from its store and settings: batches in one gather, views, placements."""

import pytest
import torch

import memfeed
from memfeed.loading.plan import (
    VIEWED_BYTES,
    _columns_as_views,
    _may_hold_images,
    _rows_read,
    choose_placements,
    with_columns,
)
from memfeed.schema.fields import Field
from memfeed.store.columns import InMemoryColumn
from memfeed.transforms import CenterCrop
from support import Made, cache


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    def sample(i):
        return {"image": torch.full((3, 80, 80), i, dtype=torch.uint8), "y": i, "r": torch.arange(i % 3)}

    return cache(Made(sample, 12), tmp_path_factory.mktemp("plan") / "s.mf", workers=0)


def plan_of(store, *arguments, **options):
    return memfeed.Loader(store, *arguments, **options)._epochs.reader.prepare()


def test_small_batches_are_planned_together(images):
    numbers = images.select(["y"])
    small, large = plan_of(numbers, 2), plan_of(images.select(["image"]), 8)
    assert small.maker.at_once > 1
    assert small.batches_a_task == small.maker.at_once
    assert large.maker.at_once < small.maker.at_once


def test_without_a_device_there_is_no_lag_and_no_label_to_check(images):
    plan = plan_of(images, 4)
    assert (plan.maker.lag, plan.maker.labels) == (None, None)
    assert [one.where for one in plan.placement.placements] == ["mapped"] * 3


def test_rows_that_are_read(images):
    assert _rows_read(images).tolist() == list(range(12))
    assert _rows_read(images.subset([5, 1, 5])).tolist() == [1, 5]


def test_a_placement_that_does_not_fit_the_machine_is_refused(images):
    loader = memfeed.Loader(images, 4)
    assert [one.where for one in choose_placements(images, loader._settings, None)] == ["mapped"] * 3


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ({"kind": "fixed", "dtype": "uint8", "shape": (3, 80, 80)}, True),
        ({"kind": "fixed", "dtype": "uint8", "shape": (3, 8, 8)}, False),
        ({"kind": "fixed", "dtype": "uint8", "shape": (5, 80, 80)}, False),
        ({"kind": "fixed", "dtype": "uint8", "shape": (80, 80)}, False),
        ({"kind": "fixed", "dtype": "uint8", "shape": (3, 80, 80), "form": "list"}, False),
        ({"kind": "list", "dtype": "uint8", "shape": (None, None, None)}, True),
        ({"kind": "list", "dtype": "uint8", "shape": (None, None, None), "optional": True}, False),
        ({"kind": "jagged", "dtype": "uint8", "shape": (3, None, 8)}, True),
        ({"kind": "jagged", "dtype": "uint8", "shape": (None,)}, False),
        ({"kind": "str", "dtype": "uint8"}, False),
    ],
    ids=str,
)
def test_columns_of_images(field, expected):
    column = InMemoryColumn(Field(path=("x",), name="x", stem="x", **field), torch.zeros(1))
    column.gives_views = False
    assert not _may_hold_images(column)
    column.gives_views = True
    assert _may_hold_images(column) is expected


def test_images_are_views_for_a_transform_of_ours_on_the_cpu(images):
    crop = CenterCrop(8, on="image")
    cases = [
        ({"transform": crop}, [0]),
        ({"transform": lambda batch: batch}, []),
        ({}, []),
        ({"transform": crop, "collate_fn": list}, []),
    ]
    for options, expected in cases:
        settings = memfeed.Loader(images, 4, **options)._settings
        found = _columns_as_views(images._view.columns, settings, images.schema.structure)
        assert list(found) == expected
    assert VIEWED_BYTES <= 3 * 80 * 80


def test_other_columns_keep_the_rest_of_a_plan(images):
    plan = plan_of(images, 4)
    columns = [InMemoryColumn(one.field, torch.zeros(12, 3, 80, 80, dtype=torch.uint8)) if at == 0 else one
               for at, one in enumerate(images._view.columns)]  # fmt: skip
    other = with_columns(plan, images, columns)
    assert other.placement.columns is columns
    assert other.maker.at_once == plan.maker.at_once
    assert other.threads is plan.threads
