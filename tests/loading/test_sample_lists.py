"""Batches taken apart into the samples that a collate_fn gets."""

from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

from memfeed.errors import TransformError
from memfeed.loading.batch_forms import (
    as_list,
    canvases_for,
    collate_finished,
    collate_stored,
    finished_maker,
    finished_schema,
    giving_samples,
)
from memfeed.schema.infer import infer
from memfeed.schema.samples import FinishedSamples
from memfeed.store.gather import ReadSamples
from memfeed.transforms import RandomHorizontalFlip
from support import Made, cache


@pytest.fixture
def store(tmp_path):
    return cache(Made(lambda i: {"x": torch.full((2,), i), "y": i}, 6), tmp_path / "s.mf", workers=0)


def leaves_of(store, rows):
    return [store.column(name)[rows] for name in ("x", "y")]


@pytest.mark.parametrize("single", [False, True])
def test_stored_samples(store, single):
    collate = collate_stored(lambda given: given, store, single=single)
    found = collate(leaves_of(store, [4] if single else [4, 2]), {})
    found = [found] if single else found
    assert [(one["x"].tolist(), one["y"]) for one in found] == [([4, 4], 4), ([2, 2], 2)][: len(found)]
    assert type(found) is list


@pytest.mark.parametrize("single", [False, True])
def test_finished_batches(store, single):
    collate = collate_finished(lambda given: given, lambda batch: batch, store, single=single)
    batch = {"x": torch.tensor([[1, 2], [3, 4]]), "y": torch.tensor([5, 6])}
    found = collate(batch, {})
    found = [found] if single else found
    assert [(one["x"].tolist(), one["y"]) for one in found] == [([1, 2], 5), ([3, 4], 6)][: len(found)]
    samples = FinishedSamples(["a", "b"])
    assert collate(samples, {}) == ("a" if single else ["a", "b"])


def test_the_schema_of_a_transform():
    stored, other = infer([{"a": 1}]).schema, infer([(1, 2)]).schema
    assert finished_schema(object(), stored) is stored
    assert finished_schema(SimpleNamespace(schema=None), stored) is stored
    assert finished_schema(SimpleNamespace(schema=other), stored) is other
    with pytest.raises(TransformError, match=r"found a dict as SimpleNamespace.schema; expected a"):
        finished_schema(SimpleNamespace(schema={"a": 1}), stored)


def test_transforms_that_make_samples():
    assert giving_samples(SimpleNamespace(giving_samples=lambda: "samples")) == "samples"
    assert giving_samples(3) == 3


def test_samples_of_tensordicts_have_the_methods_of_their_batch(tmp_path):
    store = cache(Made(lambda i: TensorDict({"x": torch.full((2,), i)}, []), 3), tmp_path / "td.mf", workers=0)
    found = collate_stored(lambda given: given, store, single=False)([store.column("x")[[0, 2]]], {})
    assert isinstance(found, ReadSamples)
    assert found.to(torch.float64)["x"].dtype is torch.float64
    assert found[1]["x"].tolist() == [2, 2]
    assert as_list(iter([1]), {"x": 1}, store) == [1]


def test_canvases_of_fields_with_the_same_path(tmp_path):
    tv = pytest.importorskip("torchvision.tv_tensors")

    def sample(i):
        boxes = tv.BoundingBoxes(torch.zeros(1, 4), format="XYXY", canvas_size=(4, 5 + i))
        return {"image": tv.Image(torch.zeros(3, 4, 5 + i, dtype=torch.uint8)), "boxes": boxes}

    store = cache(Made(sample, 3), tmp_path / "tv.mf", workers=0)
    maker = finished_maker(RandomHorizontalFlip(on=["image"]), store)
    (field,) = maker.canvas_fields
    assert canvases_for(maker, store, {field: "sizes"}) == {field: "sizes"}
    assert canvases_for(maker, store, {}) == {}
