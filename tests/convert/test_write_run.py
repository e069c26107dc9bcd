"""Samples that do not fit the schema are errors that name the sample and the field."""

import shutil

import pytest
import torch

from memfeed.errors import (
    SchemaError,
)
from short_form import short_form
from support import Made, cache, equal


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (torch.zeros(2, dtype=torch.int64), r"sample 71, field x: found dtype int64; expected float32"),
        (torch.zeros(2, 1), r"sample 71, field x: found 2 dims \[2, 1\]; expected 1 \(float32 \[2\]\)"),
        ([1.0], r"sample 71"),
        ("text", r"sample 71, field x: found str; expected float32 \[2\]"),
        (None, r"sample 71, field x: found None; expected float32 \[2\]"),
    ],
    ids=["dtype", "rank", "list", "text", "None"],
)
@pytest.mark.parametrize("workers", short_form([0, 2]))
def test_a_drift_of_dtype_or_rank_or_structure_names_the_sample(path, workers, change, message):
    with pytest.raises(SchemaError, match=message):
        cache(Made(lambda i: {"x": torch.zeros(2) if i != 71 else change}, 200), path, workers=workers)


def test_a_drift_in_a_worker_names_the_sample(path):
    dataset = Made(lambda i: {"x": torch.zeros(2) if i != 71 else "text"}, 200)
    with pytest.raises(SchemaError, match=r"sample 71, field x: found str; expected float32 \[2\]"):
        cache(dataset, path, workers=2)


def test_dims_that_fields_fixed_do_not_drift(path):
    dataset = Made(lambda i: {"x": torch.zeros(2 if i != 71 else 3)}, 200)
    with pytest.raises(SchemaError, match=r"sample 71, field x: found dims \[3\]; expected float32 \[2\], as like= or"):
        cache(dataset, path, fields={"x": "fixed"})


def test_lists_of_mixed_numbers_are_never_cut_to_integers(path):
    ragged = Made(lambda i: {"a": [1] * (i % 5 + 1) if i != 19 else [1, 2.5]}, 100)
    with pytest.raises(SchemaError, match=r"sample 19, field a: found a list of float and int; expected jagged int64"):
        cache(ragged, path)
    shutil.rmtree(path.with_name("a.mf.build"))
    boxes = Made(lambda i: {"bbox": [1, 2.5, i] if i % 2 else [1.5, 2, i]}, 40)
    store = cache(boxes, path)
    assert store.schema.fields[0].kind == "json"
    assert all(equal(store[i], boxes[i]) for i in range(40))
