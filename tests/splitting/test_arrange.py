"""From the fields of a store to those of a pipeline, and to finished batches."""

from typing import NamedTuple

import pytest
import torch

from memfeed.errors import TransformError
from memfeed.random import Keys
from memfeed.schema.infer import infer
from memfeed.schema.jagged import RaggedList
from memfeed.schema.tree import types_of
from memfeed.splitting.remake import Arrange, Assemble
from memfeed.transforms import Compose

N = 4
KEYS = Keys(0, 0, torch.arange(N))


class Pair(NamedTuple):
    image: torch.Tensor
    label: int


def images():
    return torch.arange(N * 3 * 4 * 5).view(N, 3, 4, 5)


def assemble(sample, leaves, channels_last=()):
    samples = [sample, sample]
    return Assemble(leaves, channels_last, infer(samples).schema, types_of(samples))


def test_fields_get_other_names_and_one_may_have_several():
    batch = {"views": [images(), images() + 1], "label": torch.arange(N), "left": 0}
    made = Arrange({"a": ("views", 1), "b": ("views", 1), "c": ("label",)}).apply(batch, KEYS)
    assert list(made) == ["a", "b", "c"]
    assert made["a"] is made["b"] is batch["views"][1]
    assert made["c"] is batch["label"]


def test_fields_of_named_tuples():
    assert Arrange({"y": ("label",)}).apply(Pair(images(), torch.arange(N)), KEYS)["y"].tolist() == list(range(N))


@pytest.mark.parametrize("path", [("no",), ("views", 2), ("label", "x")])
def test_a_field_that_a_batch_lacks_is_an_error(path):
    batch = {"views": [images(), images()], "label": torch.arange(N)}
    with pytest.raises(TransformError, match=f"no field {'.'.join(map(str, path))}"):
        Arrange({"a": path}).apply(batch, KEYS)


def test_the_two_build_the_batch():
    sample = Pair({"one": images()[0], "two": images()[0]}, 3)
    transform = Compose(
        [Arrange({"i": ("image",), "l": ("label",)}), assemble(sample, ["i", "i", "l"])],
    )
    made = transform.apply({"image": images(), "label": torch.arange(N)}, KEYS)
    assert isinstance(made, Pair)
    assert torch.equal(made.image["one"], images())
    assert torch.equal(made.image["two"], images())
    assert made.label.tolist() == list(range(N))


@pytest.mark.parametrize("is_ragged", [False, True])
@pytest.mark.parametrize("last", [(), ("i",)])
def test_a_leaf_that_is_used_twice_has_memory_of_its_own(last, is_ragged):
    given = RaggedList(images()) if is_ragged else images()
    shape = (4, 5, 3) if last else (3, 4, 5)
    one, two = assemble([torch.zeros(shape), torch.zeros(shape)], ["i", "i"], last).apply({"i": given}, KEYS)
    for row in two:
        row.zero_()
    assert all(row.any() for row in one)
    assert all(row.any() for row in given)


@pytest.mark.parametrize("is_ragged", [False, True])
def test_channels_last(is_ragged):
    given = RaggedList(images()) if is_ragged else images()
    (made,) = assemble([torch.zeros(4, 5, 3)], ["i"], ["i"]).apply({"i": given}, KEYS)
    assert isinstance(made, list) is is_ragged
    for row, image in zip(made, images(), strict=True):
        assert row.is_contiguous()
        assert torch.equal(row, image.permute(1, 2, 0))
