"""Attributes of steps that other code changes."""

import random

import pytest
import torch

from memfeed.splitting.tracer import StepAttributes


class Step:
    def __init__(self):
        self.p, self.name, self.size, self.weights = 0.5, "step", (3, 4), torch.zeros(2)

    def __call__(self, image):
        return image


class Owner:
    def __init__(self):
        self.label, self.reads, self.rng = 0, 0, random.Random(1)

    def inner(self, image):
        return image if self.label else -image

    def method(self, image):
        return self.inner(image)


CHANGES = {
    "p": lambda step: setattr(step, "p", 0.25),
    "name": lambda step: setattr(step, "name", "other"),
    "weights": lambda step: setattr(step, "weights", torch.zeros(2)),
    "new": lambda step: setattr(step, "new", None),
    "size": lambda step: delattr(step, "size"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_named_until_it_is_noted(name):
    step, other = Step(), Step()
    attributes = StepAttributes([other, step])
    assert attributes.changed() == ""
    CHANGES[name](step)
    assert attributes.changed() == name
    attributes.note()
    assert attributes.changed() == ""


def test_equal_numbers_and_generators_are_no_change():
    step = Step()
    step.rng = random.Random(1)
    attributes = StepAttributes([step])
    step.p, step.name, step.rng = float("0.5"), "".join(["st", "ep"]), random.Random(2)
    assert attributes.changed() == ""


@pytest.mark.parametrize("method", ["method", "inner"])
def test_of_a_method_the_attributes_that_its_code_names_count(method):
    owner = Owner()
    attributes = StepAttributes([getattr(owner, method)])
    owner.reads, owner.rng = 1, random.Random(2)
    assert attributes.changed() == ""
    owner.label = 1
    assert attributes.changed() == "label"


def test_the_attributes_of_a_step_that_has_a_method_too_all_count():
    owner = Owner()
    for steps in ([owner, owner.method], [owner.method, owner]):
        attributes = StepAttributes(steps)
        owner.reads += 1
        assert attributes.changed() == "reads"


def test_steps_without_attributes():
    assert StepAttributes([print, len, lambda image: image, "text".upper]).changed() == ""
