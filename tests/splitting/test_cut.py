"""Samples to what is stored of them, and back; what other samples are like."""

import random

import pytest
import torch
from idiom import Rows, Tensors
from torchvision.transforms import v2

from memfeed.errors import SplitError
from memfeed.schema.compare import equal
from memfeed.splitting.cut import Cut
from memfeed.splitting.generators import Generators
from memfeed.splitting.places import find_places

STEPS = v2.Compose([v2.CenterCrop(28), v2.RandomCrop(20), v2.RandomHorizontalFlip()])


def cut_of(dataset, rows=range(4)):
    places = find_places(dataset)
    cut = Cut(dataset, places, Generators(dataset, *(place.value for place in places)), rows)
    cut.take(*next(cut.choices(0)))
    return cut


@pytest.mark.parametrize("cls", [Rows, Tensors])
def test_a_sample_is_made_again_of_its_leaves_under_the_same_states(cls):
    cut, made = cut_of(cls(STEPS)), []
    for seed in range(4):
        cut.generators.seed(seed)
        read = cut.read(3)
        cut.generators.seed(seed + 100)
        assert equal(read.sample, cut.rebuild(read.pattern, read.leaves, read.states))
        made.append(read.sample)
    assert any(not equal(made[0], one) for one in made)
    assert {type(leaf) for leaf in read.leaves} == {type(cut.dataset.load(0)), int}
    callee = read.pattern.calls[0][1].function
    assert cut.fixed_names(callee) == ("CenterCrop",)
    assert cut.step_names(callee) == ("RandomCrop", "RandomHorizontalFlip")


class Varied(Tensors):
    def __getitem__(self, index):
        image, kind = self.transform(self.load(index)), self.kind if index > 7 else ""
        image = self.transform(image) if kind == "again" else image // 3 if kind == "divides" else image
        return image, random.random() if kind == "draws" else str(index) if kind == "text" else index


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("text", "found value str where others have value int"),
        ("again", "calls other steps"),
        ("divides", "another way"),
    ],
)
def test_a_sample_of_another_kind_is_not_known(kind, message):
    cut = cut_of(Varied(STEPS, kind=kind))
    cut.learn(cut.read(0).pattern)
    assert cut.known(cut.read(1)) == 0
    other = cut.read(9)
    assert cut.known(other) is None
    assert message in cut.unlike(other)
    assert cut.learn(other.pattern) == 1


def test_a_draw_outside_of_the_random_steps_is_refused():
    cut = cut_of(Varied(STEPS, kind="draws"))
    cut.read(0)
    with pytest.raises(SplitError, match="beside the random steps"):
        cut.read(9)


class Noted(Tensors):
    def __getitem__(self, index):
        return {"image": self.transform(self.load(index)), "note": None if index % 2 else 0.5}


@pytest.mark.parametrize("first", [0, 1])
def test_none_and_a_value_are_one_pattern(first):
    cut = cut_of(Noted(STEPS))
    for index in (first, first + 1):
        read = cut.read(index)
        assert cut.known(read) == 0 or cut.learn(read.pattern) == 0
    assert len(cut.patterns) == 1
    assert [cut.known(cut.read(i)) for i in range(4)] == [0] * 4


class Both(Tensors):
    def __getitem__(self, index):
        image = STEPS.transforms[0](self.load(index))
        return image, self.transform(image), index


def test_equal_images_are_stored_once():
    read = cut_of(Both(v2.RandomHorizontalFlip())).read(2)
    assert read.pattern.same_as == (0, 0, 2)
    assert torch.equal(read.leaves[0], read.leaves[1])
    assert [link is None for link in read.pattern.links] == [True, False, True]


class Compared(Tensors):
    def __getitem__(self, index):
        image = self.load(index)
        return (self.transform(image) if self.transform is self.pipelines["train"] else image), index


def test_a_pipeline_at_two_places_is_one_object_for_the_code_of_the_dataset():
    cut = cut_of(Compared(STEPS, pipelines={"train": STEPS, "val": v2.CenterCrop(28)}))
    assert cut.read(3).sample[0].shape == (3, 20, 20)
    assert {str(cut.places[name[0]]) for name in cut.drawing()} == {"dataset.transform"}
