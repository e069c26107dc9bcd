"""A sequence of transforms: its parts, the streams from which they draw, and what it refuses."""

import pytest
import torch

from memfeed.errors import TransformError
from memfeed.random import Keys
from memfeed.transforms import CenterCrop, Compose, RandomHorizontalFlip, RandomVerticalFlip, ToDtype

KEYS = Keys(0, 0, torch.arange(64))
IMAGES = torch.rand(64, 3, 6, 6)


def streams(transform):
    return [(step.stream, step.on) if hasattr(step, "stream") else tuple(step)[1:][::-1] for step in transform._steps()]


def test_streams_count_the_transforms_of_a_class():
    flips = Compose(
        [RandomHorizontalFlip(), Compose([RandomVerticalFlip(), RandomHorizontalFlip()]), ToDtype(torch.float32)]
    )
    assert [name for name, _ in streams(flips)] == [
        "RandomHorizontalFlip.0", "RandomVerticalFlip.0", "RandomHorizontalFlip.1", "ToDtype.0",
    ]  # fmt: skip


def test_another_class_changes_no_draws():
    alone = Compose([RandomHorizontalFlip()]).apply(IMAGES, KEYS)
    beside = Compose([ToDtype(torch.float32), RandomHorizontalFlip()]).apply(IMAGES, KEYS)
    assert torch.equal(alone, beside)
    assert torch.equal(alone, RandomHorizontalFlip().apply(IMAGES, KEYS))
    twice = Compose([RandomHorizontalFlip(), RandomHorizontalFlip()]).apply(IMAGES, KEYS)
    flipped = (alone != IMAGES).flatten(1).any(1)
    again = (twice != IMAGES).flatten(1).any(1)
    assert (flipped != again).any()  # the second draws by itself


def test_the_field_of_a_part_comes_first():
    own, outer = RandomHorizontalFlip(on="a"), RandomVerticalFlip()
    assert [on for _, on in streams(Compose([own, outer], on="b"))] == ["a", "b"]
    assert [on for _, on in streams(Compose([Compose([own, outer], on="c")], on="b"))] == ["a", "c"]


def test_callables_are_parts():
    composed = Compose([lambda batch: batch + 1, {"x": lambda x: x}, CenterCrop(2)], on="y")
    assert len(composed.transforms) == 3
    assert [on for _, on in streams(composed)] == [None, "x", "y"]
    assert not composed.runs_anywhere
    assert Compose([CenterCrop(2)]).runs_anywhere
    assert torch.equal(Compose([lambda batch: batch * 2]).apply(IMAGES, KEYS), IMAGES * 2)


@pytest.mark.parametrize("part", [3, None, "flip", {"x": 3}, [lambda batch: batch]])
def test_what_is_no_part(part):
    with pytest.raises(TransformError, match="Compose got a"):
        Compose([part])


@pytest.mark.parametrize("form", [torch.preserve_format, torch.channels_last_3d, None, "channels_last"])
def test_what_is_no_memory_format(form):
    with pytest.raises(TransformError, match="memory_format="):
        Compose([], memory_format=form)


def test_the_layout_of_the_outermost_counts():
    inner = Compose([CenterCrop(4)], memory_format=torch.channels_last)
    assert Compose([inner]).apply(IMAGES, KEYS).is_contiguous()
    assert (
        Compose([CenterCrop(4)], memory_format=torch.channels_last)
        .apply(IMAGES, KEYS)
        .is_contiguous(memory_format=torch.channels_last)
    )


def test_nothing_is_nothing():
    assert torch.equal(Compose([]).apply(IMAGES, KEYS), IMAGES)
    assert Compose([]).giving_samples()._steps() == []
