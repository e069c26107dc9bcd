"""The line that draws a random number, as messages name it."""

import random
import sys
from collections import namedtuple

import numpy as np
import pytest
import torch

from memfeed.errors import SplitError
from memfeed.splitting.generators import Generators, drawing_line
from memfeed.splitting.proof import prove

DRAWS = {"torch": lambda: torch.rand(1), "numpy": np.random.rand, "random": random.random}


class Draws:
    """Rows of which only those of `rows` draw."""

    def __init__(self, draw, rows=(0, 1, 2)):
        self.draw, self.rows = draw, rows

    def __getitem__(self, index):
        value = index * 2
        if index in self.rows:
            value += float(self.draw())  # DRAWS
        return value


Point = namedtuple("Point", "x y")


class DrawsLast:
    def __getitem__(self, index):
        return random.random()  # LAST


def line_of(mark):
    """Return FILE:LINE of the line that ends with a comment of this mark."""
    with open(__file__) as file:
        number = next(n for n, line in enumerate(file, 1) if line.rstrip().endswith("# " + mark))
    return f" ({__file__}:{number})"


def find(dataset, rows=(0, 1, 2)):
    return drawing_line(dataset.__getitem__, rows, Generators(dataset))


@pytest.mark.parametrize("name", ["numpy", "random"])
def test_the_line_of_the_dataset_is_named(name):
    assert find(Draws(DRAWS[name])) == line_of("DRAWS")


def test_the_line_of_the_function_that_it_calls_is_named():
    def inner():
        number = torch.rand(1)  # INNER
        return number * 2

    assert find(Draws(inner)) == line_of("INNER")


def test_the_last_line_of_a_sample_is_named():
    assert find(DrawsLast()) == line_of("LAST")


def test_the_code_that_python_makes_for_a_namedtuple_is_not_named():
    class Named:
        def __getitem__(self, index):
            return Point(index, 2).x + random.random()  # NAMED

    assert find(Named()) == line_of("NAMED")


def test_a_generator_of_its_own_is_watched():
    generator = np.random.default_rng(1)
    assert find(Draws(generator.random)) == line_of("DRAWS")


def test_a_later_row_may_be_the_first_that_draws():
    assert find(Draws(random.random, rows=[2])) == line_of("DRAWS")
    assert find(Draws(random.random, rows=[2]), rows=[0, 1]) == ""


def test_nothing_is_named_where_nothing_draws():
    assert find(list(range(3))) == ""
    assert find(Draws(lambda: 1)) == ""


def test_states_and_the_trace_function_come_back():
    dataset, outer = Draws(random.random), sys.gettrace()
    generators = Generators(dataset)
    states = generators.save()
    drawing_line(dataset.__getitem__, [0], generators)
    assert generators.save() == states
    assert sys.gettrace() is outer


def test_they_come_back_after_an_exception_of_the_dataset():
    def fails():
        random.random()
        raise ValueError("no sample")

    dataset, outer = Draws(fails), sys.gettrace()
    generators = Generators(dataset)
    states = generators.save()
    with pytest.raises(ValueError, match="no sample"):
        drawing_line(dataset.__getitem__, [0], generators)
    assert generators.save() == states
    assert sys.gettrace() is outer


class Flip:
    def __call__(self, x):
        return x.flip(-1) if random.random() < 0.5 else x


class DrawsBeside(torch.utils.data.Dataset):
    """A dataset that draws a row's partner itself, before or after its random pipeline."""

    def __init__(self, before):
        self.before, self.transform = before, Flip()

    def __len__(self):
        return 32

    def load(self, index):
        return torch.arange(8.0) * (index + 1)

    def __getitem__(self, index):
        other = random.randrange(32) if self.before else 0  # BEFORE
        image = self.transform(self.load(index))
        other = other if self.before else random.randrange(32)  # AFTER
        return image, other


@pytest.mark.parametrize("before", [True, False])
def test_the_line_that_draws_beside_a_random_pipeline_is_named(before):
    with pytest.raises(SplitError) as error:
        prove(DrawsBeside(before), [1, 2, 3])
    assert str(error.value).endswith(line_of("BEFORE" if before else "AFTER"))
