"""Generators of a dataset: where they are found, and that each is saved, restored and seeded on its own."""

import functools
import os
import pickle
import random
import subprocess
import sys
import types

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import memfeed
from memfeed.splitting.generators import Generators, generators_in, is_library

GLOBAL = np.random.default_rng(1)


class Holder:
    shared = random.Random(2)

    def __init__(self, **parts):
        self.__dict__.update(parts)

    def draw(self):
        return 0


def read_global_inside():
    return [(lambda: GLOBAL.random())() for _ in range(2)]


def has(root, generator):
    return any(one is generator for one in generators_in(root))


KINDS = [torch.Generator, random.Random, np.random.RandomState, np.random.default_rng]


@pytest.mark.parametrize("make", KINDS)
def test_it_finds_each_kind_in_attributes_and_containers(make):
    generator = make()
    for part in (generator, [generator], {"a": (0, {"b": generator})}, Holder(inner=generator)):
        assert has(Holder(part=part), generator)
    assert not has(Holder(), generator)


def test_it_finds_what_functions_close_over_default_to_and_name():
    generator = random.Random()

    def closes():
        return generator.random()

    defaults = lambda own=generator: own.random()  # noqa: E731
    assert has(Holder(step=closes), generator)
    assert has(Holder(step=defaults), generator)
    assert has(Holder(step=read_global_inside), GLOBAL)


def test_it_finds_generators_of_partials_bound_methods_and_classes():
    generator = random.Random()
    assert has(functools.partial(print, generator), generator)
    assert has(functools.partial(print, end=generator), generator)
    assert has(Holder(inner=generator).draw, generator)
    assert has(Holder(), Holder.shared)


def test_cycles_unfilled_cells_and_the_generator_of_the_system_are_passed():
    generator, ring = random.Random(), []

    def early():
        return late

    ring += [ring, early, random.SystemRandom(), generator]
    assert generators_in(ring) == [generator]
    late = None


class Odd:
    """Has a ``__dict__`` that is none, as objects of llvmlite have, and attributes that raise."""

    @property
    def __dict__(self):
        return object()

    @property
    def args(self):
        raise RuntimeError("not loaded")


def test_objects_whose_attributes_cannot_be_read_and_stores_are_passed():
    generator = random.Random()
    store = memfeed.cache({"x": torch.arange(3)}, progress=False)
    assert generators_in([Odd(), store, generator]) == [generator]
    store._generator = generator
    assert generators_in([store]) == []


@pytest.mark.parametrize("bits", [np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64])
def test_restored_states_give_the_same_numbers_again(bits):
    mine = [torch.Generator(), random.Random(), np.random.RandomState(), np.random.Generator(bits())]
    generators = Generators(mine)

    def numbers():
        return [
            *(torch.rand((), generator=mine[0]).item(), mine[1].random(), mine[2].normal(), mine[3].random()),
            *(torch.rand(()).item(), random.gauss(0, 1), np.random.normal()),
        ]

    states = generators.save()
    first = numbers()
    assert generators.moved(states, generators.save()) == set(range(7))
    generators.restore(states)
    assert generators.moved(states, generators.save()) == set()
    assert numbers() == first


DRAWS = {
    "nothing": lambda one, _: None,
    "normal": lambda one, _: one.randn(),  # makes two numbers, and keeps one for the next draw
    "number": lambda one, _: one.rand(),
    "numbers": lambda one, _: one.randint(9, size=700),
    "seed": lambda one, _: one.seed(3),
    "restore": lambda one, kept: one.set_state(kept),
}


@given(st.lists(st.sampled_from(sorted(DRAWS)), max_size=12))
def test_states_of_numpy_that_were_not_asked_for_again_are_those_of_numpy(names):
    one = np.random.RandomState(1)
    generators, kept = Generators(one), one.get_state()
    for name in names:
        DRAWS[name](one, kept)
        for _ in range(2):
            assert generators.save()[3] == pickle.dumps(one.get_state(legacy=False))


def test_a_random_state_with_other_bits_is_saved_restored_and_seeded():
    one = np.random.RandomState(np.random.PCG64(1))
    generators = Generators(one)
    before = generators.save()
    first = one.randn(), one.randn()
    assert generators.moved(before, generators.save()) == {3}
    generators.restore(before)
    assert (one.randn(), one.randn()) == first
    outer = generators.save()
    try:
        generators.seed(1)
        seeded = one.randn(), one.randn()
        one.randn()
        generators.seed(1)
        assert (one.randn(), one.randn()) == seeded != first
    finally:
        generators.restore(outer)


def test_seeds_differ_by_generator_and_by_number():
    mine = [random.Random() for _ in range(3)]
    generators = Generators(mine)
    outer = generators.save()

    def numbers(*seed):
        generators.seed(*seed)
        return [one.random() for one in (*mine, random)]

    try:
        assert numbers(1, 2) == numbers(1, 2)
        assert len({*numbers(1, 2), *numbers(1, 3), *numbers(2, 1)}) == 12
    finally:
        generators.restore(outer)


def test_a_pickled_one_holds_the_copies_and_the_global_generators():
    holder = Holder(generator=np.random.default_rng(5))
    generators = Generators(holder)
    copied = pickle.loads(pickle.dumps(generators))
    assert copied.all[:3] == [torch.default_generator, np.random.mtrand._rand, random._inst]
    assert copied.all[3] is copied._roots[0].generator
    assert copied.all[3] is not holder.generator
    assert copied.save() == generators.save()


def test_a_package_outside_of_the_environment_is_installed_too(tmp_path):
    """Such as one of ``pip install --user``. The code of a user is not."""
    places = {"installed": tmp_path / "lib/site-packages", "own": tmp_path / "user"}
    for name, place in places.items():
        place.mkdir(parents=True)
        (place / f"{name}_steps.py").write_text("def crop(x): return x")
    code = (
        "import installed_steps, own_steps; from memfeed.splitting.generators import is_installed\n"
        "print(is_installed(installed_steps.crop), is_installed(own_steps.crop))"
    )
    paths = os.pathsep.join([*map(str, places.values()), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == "True False\n", done.stderr


class Unready:
    """A stand-in for an object that this process cannot make."""

    @property
    def __class__(self):
        raise RuntimeError("no database")


UNREADY = Unready()


def test_a_variable_that_cannot_be_asked_for_its_class_hides_no_generator():
    assert has(Holder(draw=lambda: (UNREADY, GLOBAL)), GLOBAL)
    assert has(Holder(unready=UNREADY, generator=GLOBAL), GLOBAL)


def test_a_stand_in_for_a_missing_library_is_one_of_a_library():
    class Missing(types.ModuleType):
        def __getattr__(self, name):
            raise ImportError("not installed")

    assert is_library(Missing("missing"))
