"""How samples are made of what is stored: parts and leaves, and in what two patterns differ."""

import dataclasses
import re

import numpy as np
import pytest
import torch

from memfeed.splitting.leaves import kind_of, take_apart
from memfeed.splitting.pattern import Pattern, Read, describe, equal_leaves, from_parts, to_parts
from memfeed.splitting.recording import Entry
from memfeed.splitting.stored_layout import InPlace, Named, in_place, named

IMAGE, OTHER = torch.arange(6).view(1, 2, 3).float(), torch.ones(2)


def pattern_of(*leaves, links=None, same_as=None, tape=()):
    return Pattern(
        tape=tape,
        form=take_apart(list(leaves))[1],
        links=tuple(links or [None] * len(leaves)),
        kinds=tuple(map(kind_of, leaves)),
        same_as=tuple(same_as or range(len(leaves))),
    )


def entry(function=len, links=(None,), values=(None,), form=None, made=None, writes=False):
    return Entry(function, form, list(links), list(values), made, 0, [], [], writes)


@pytest.mark.parametrize(
    "leaves",
    [
        [1, 2.5, "x", b"y", None, True],
        [IMAGE, OTHER, np.arange(3), np.float32(1)],
        [IMAGE, IMAGE.clone(), OTHER],
        [],
    ],
    ids=len,
)
def test_leaves_come_back_from_their_parts(leaves):
    kinds = tuple(map(kind_of, leaves))
    pattern = pattern_of(*leaves, same_as=equal_leaves(leaves, kinds))
    parts = to_parts(pattern, leaves)
    again = from_parts(pattern, parts)
    assert [type(one) for one in again] == [type(one) for one in leaves]
    assert all(np.array_equal(np.asarray(one), np.asarray(other)) for one, other in zip(again, leaves, strict=True))


def test_what_is_equal_in_all_samples_is_stored_once():
    leaves = [IMAGE, 3, IMAGE.clone(), 3, OTHER, torch.ones(2, dtype=torch.int64)]
    same = equal_leaves(leaves, tuple(map(kind_of, leaves)))
    assert same == (0, 1, 0, 3, 4, 5)  # equal numbers are equal by chance; another dtype is another kind
    assert len(to_parts(pattern_of(*leaves, same_as=same), leaves)) == 5


def test_a_leaf_that_is_none_here_has_parts_that_are_none():
    pattern = pattern_of(IMAGE, 3)
    assert to_parts(pattern, [None, None]) == [None, None]
    assert from_parts(pattern, [None, None]) == [None, None]


SAME = pattern_of(IMAGE, 3)


@pytest.mark.parametrize(
    ("other", "phrase"),
    [
        (pattern_of(IMAGE, 3), ""),
        (pattern_of(IMAGE, 3, OTHER), "it has other containers, or another number of leaves"),
        (pattern_of(IMAGE, "x"), "found value int where others have value str"),
        (pattern_of(OTHER, 3), "found .* of 3 dims where others have .* of 1 dims"),
        (pattern_of(IMAGE, 3, links=[(0, 0), None]), r"field 0 does not come from its pipeline here"),
        (pattern_of(IMAGE, 3, tape=(entry(),)), "it changes the result of its pipeline in another way"),
    ],
)
def test_differences(other, phrase):

    found = SAME.differs_from(other)
    assert re.fullmatch(f"{phrase}.*" if phrase else "", found)


def test_differences_of_operations():
    one, two = (pattern_of(3, tape=(entry(abs, values=[value], form=1),)) for value in (1, 2))
    assert one.differs_from(two) == "it changes the result of its pipeline with other numbers"
    assert one.differs_from(one) == ""
    other = dataclasses.replace(one, tape=(entry(abs, values=[1], form=2),))
    assert one.differs_from(other) == "its pipeline gets or returns other containers"
    assert (
        pattern_of(IMAGE, IMAGE).differs_from(pattern_of(IMAGE, IMAGE, same_as=(0, 0))).startswith("two of its values")
    )


@pytest.mark.parametrize(
    ("leaf", "text"),
    [(3, "value int"), (IMAGE, "tensor float32 of 3 dims"), (np.zeros(2, np.int8), "array int8 of 1 dims")],
)
def test_descriptions(leaf, text):
    assert describe(kind_of(leaf)).lower().endswith(text.split(" ", 1)[1])


def test_a_read_knows_if_a_call_writes():
    assert not Read([3], SAME, [3], []).writes


def test_layouts():
    layout = in_place([SAME], Read([IMAGE, 3], SAME, [IMAGE, 3], []))
    assert isinstance(layout, InPlace)
    assert layout.stored(0, [IMAGE, 3])[1] == 3
    assert layout.path(0, 1) == (1,)
    assert in_place([SAME, SAME], Read([IMAGE, 3], SAME, [IMAGE, 3], [])) is None
    twice = pattern_of(IMAGE, IMAGE, same_as=(0, 0))
    assert in_place([twice], Read([IMAGE, IMAGE], twice, [IMAGE, IMAGE], [])) is None


def test_names_of_several_patterns():
    other = pattern_of("text", 3)
    layout = named([SAME, other])
    assert isinstance(layout, Named)
    (first, second) = layout.names
    assert len({*first}) == 2
    assert first[0] != second[0]  # a column has one kind of values
    sample = layout.stored(1, ["text", 3])
    assert sample["pattern"] == 1
    pattern, leaves = layout.loaded(sample)
    assert pattern is other
    assert leaves == ["text", 3]
    assert layout.path(1, 1) == (second[1],)
    alone = named([SAME])
    assert "pattern" not in alone.stored(0, [IMAGE, 3])
