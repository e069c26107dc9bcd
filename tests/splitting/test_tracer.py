"""Which callables of a dataset draw, and whether sequences run their steps in order."""

import copy
import pickle
import random

import pytest
import torch
from idiom import Rows, Tensors
from idioms_wrappers import AugmentedBy, Augmenter, Wrapper
from torch.utils.data import ConcatDataset
from torchvision.transforms import v2

from memfeed.convert.splits import rows_to_prove
from memfeed.schema.compare import equal
from memfeed.splitting.cut import Cut
from memfeed.splitting.generators import Generators
from memfeed.splitting.places import find_places
from memfeed.splitting.proof import prove
from memfeed.splitting.tracer import Marked

FLIP, CROP = v2.RandomHorizontalFlip(), v2.CenterCrop(24)


def watched(dataset):
    places = find_places(dataset)
    generators = Generators(dataset, *(place.value for place in places))
    number = next(i for i, place in enumerate(places) if place.path == (("attribute", "transform"),))
    return Cut(dataset, places, generators, range(8)).tracer, number


def step(index):
    return ("attribute", "transforms"), ("item", index)


def drawing(tracer):
    return {path for (_, path), drew in tracer.drew.items() if drew}


def test_only_the_steps_that_draw_are_found():
    tracer, number = watched(Tensors(v2.Compose([CROP, FLIP, v2.Identity()])))
    assert drawing(tracer) == {step(1)}
    assert tracer.drew[number, step(0)] == set()
    assert not tracer.alone


@pytest.mark.parametrize("outer", [v2.RandomApply([CROP, FLIP]), v2.RandomOrder([CROP, FLIP])])
def test_a_sequence_that_draws_or_shuffles_is_not_in_order(outer):
    tracer, number = watched(Tensors(v2.Compose([outer])))
    assert step(0) in drawing(tracer)
    assert not tracer.in_order[number, step(0)]
    assert tracer.in_order[number, ()]


class Halving:
    def __init__(self, *transforms):
        self.transforms = list(transforms)

    def __call__(self, image):
        for one in self.transforms:
            image = one(image // 2)
        return image


@pytest.mark.parametrize(("sequence", "passes"), [(v2.Compose([CROP, FLIP]), True), (Halving(CROP, FLIP), False)])
def test_a_sequence_that_works_between_its_steps_passes_nothing_on(sequence, passes):
    tracer, number = watched(Tensors(sequence))
    assert tracer.in_order[number, ()]
    assert tracer.passes_on[number, ()] is passes


class Tossing:
    """As steps of albumentations, draws one number to compare it with `p`, and others if it uses them."""

    def __init__(self, p, numbers):
        self.p, self.numbers, self.py_random = p, numbers, random.Random(0)

    def __call__(self, image):
        return [image + int(self.py_random.random() * 9) * (self.numbers > 1) for _ in range(self.numbers)][-1]


@pytest.mark.parametrize(("p", "numbers", "is_coin"), [(1.0, 1, True), (1.0, 2, False), (0.5, 1, False)])
def test_one_number_that_a_step_with_p_1_draws_has_no_effect(p, numbers, is_coin):
    tracer, number = watched(Tensors(v2.Compose([Tossing(p, numbers), CROP])))
    assert drawing(tracer) == (set() if is_coin else {step(0)})
    assert len(tracer.coins[number, step(0)]) == is_coin


class Opened(Tensors):
    def __getitem__(self, index):
        image = self.load(index)
        for one in self.transform.transforms:
            image = one(image)
        return image


def test_steps_that_the_dataset_calls_itself_are_alone():
    tracer, number = watched(Opened(v2.Compose([CROP, FLIP])))
    assert tracer.alone == {(number, step(0)), (number, step(1))}
    assert drawing(tracer) == {step(1)}


def test_a_marked_callable_looks_like_the_callable():
    tracer, _ = watched(Tensors(v2.Compose([CROP, FLIP])))
    marked = Marked(tracer, (0, ()), CROP, CROP)
    assert isinstance(marked, v2.CenterCrop)
    assert marked.size == CROP.size
    assert marked(torch.zeros(3, 32, 32)).shape == (3, 24, 24)
    assert bool(Marked(tracer, (0, ()), [], [])) is False


class Vocabulary(dict):
    def __call__(self, word):
        return self[word]


def test_a_marked_callable_that_is_a_container_has_items():
    tracer, _ = watched(Tensors(v2.Compose([CROP, FLIP])))
    words = Vocabulary(a=1, b=2)
    marked = Marked(tracer, (0, ()), words, words)
    for one in (marked, copy.copy(marked)):
        assert (len(one), one["b"], list(one), "a" in one, one("a")) == (2, 2, ["a", "b"], True, 1)
    marked["c"] = 3
    assert words == {"a": 1, "b": 2, "c": 3}
    assert not hasattr(type(Marked(tracer, (0, ()), CROP, CROP)), "__len__")


class ByMethod(Rows):
    def __getitem__(self, index):
        return self.flip(self.images[index]), index

    def flip(self, image):
        return image[::-1].copy() if random.random() < 0.5 else image


@pytest.mark.parametrize(
    "dataset",
    [ByMethod(), ConcatDataset([ByMethod()]), Wrapper(ByMethod()), AugmentedBy(Augmenter(0.5, 0.7))],
    ids=["a method", "of a part", "of an inner dataset", "of another object"],
)
def test_another_process_reads_what_this_one_does(dataset):
    """A method is pickled by its name, under which the copy of its object holds a mark."""
    cut = prove(dataset, rows_to_prove(len(dataset))).cut
    copied = pickle.loads(pickle.dumps(cut))
    for index in range(8):
        cut.generators.seed(index, 0)
        mine = cut.read(index)
        copied.generators.seed(index, 0)
        other = copied.read(index)
        assert equal(mine.sample, other.sample)
        assert equal(mine.leaves, other.leaves)
        assert not mine.pattern.differs_from(other.pattern)


def test_a_mark_of_a_function_is_pickled_by_value():
    """As Ray pickles a dataset: cloudpickle reads the code of what says that it is a function."""
    cloudpickle = pytest.importorskip("cloudpickle")
    dataset = Rows(lambda image: image.transpose(0) if random.random() < 0.5 else image)
    cut = prove(dataset, rows_to_prove(len(dataset))).cut
    copied = pickle.loads(cloudpickle.dumps(cut))
    cut.generators.seed(3, 0)
    mine = cut.read(3)
    copied.generators.seed(3, 0)
    assert equal(mine.sample, copied.read(3).sample)
