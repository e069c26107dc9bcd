"""Names of modules: what methods find there, and copies of an object that find other values."""

import abc
import copy
import dataclasses
import multiprocessing
import pickle
import sys
import types
from pathlib import Path

import pytest

from memfeed.errors import SplitError
from memfeed.splitting.module_names import named_by, names_assigned, with_names

double, half, quarter, shift = (lambda value: 2 * value), (lambda value: value // 2), (lambda value: value // 4), 1
count = 0
known_by_name = {}


class Numbers:
    def __init__(self):
        self.scale = 3

    def __getitem__(self, index):
        return double(index) * self.scale + shift

    @property
    def doubled(self):
        return double(self.scale)

    @staticmethod
    def halved(value):
        return half(value)

    @classmethod
    def of_class(cls, value):
        return cls, half(value)

    def inside(self, values, plus=1, *, minus=0):
        return [(lambda one: double(one) + plus - minus)(value) for value in values]

    def counted(self):
        global count
        count += 1
        return half(count)

    def counted_inside(self):
        def inner():
            global count
            count += 1

        inner()
        return quarter(count)


class Derived(Numbers, abc.ABC):
    def __getitem__(self, index):
        return super().__getitem__(index) + double(100)


class WithState(Numbers):
    def __getstate__(self):
        return {"kept": self.scale}

    def __setstate__(self, state):
        self.scale = state["kept"]


class Unpicklable(Numbers):
    def __reduce__(self):
        return Unpicklable, ()


class InSlots:
    __slots__ = ("scale",)

    def __getitem__(self, index):
        return double(index)


class Once(type):
    """Refuses a second class of one name, as registries do."""

    def __new__(cls, name, bases, namespace):
        if any(one.__name__ == name for one in bases):
            raise KeyError(name)
        return super().__new__(cls, name, bases, namespace)


class Registered(metaclass=Once):
    def __getitem__(self, index):
        return double(index)


class Known(Numbers):
    """Keeps its subclasses by their names."""

    def __init_subclass__(cls):
        known_by_name[cls.__name__] = cls


class InRegistry(Known):
    pass


@dataclasses.dataclass(frozen=True)
class Frozen:
    scale: int = 3

    def __getitem__(self, index):
        return double(index) * self.scale


def times_ten(value):
    return 10 * value


def changed(cls=Numbers, **values):
    made = cls()
    with_names(made, {(__name__, name): value for name, value in values.items()})
    return made


def test_what_methods_read_in_their_module_is_found():
    assert named_by(Numbers) == {(__name__, "double"): double, (__name__, "shift"): 1, (__name__, "half"): half}
    assert {(__name__, "count"), (__name__, "quarter")}.isdisjoint(named_by(Numbers)), (
        "methods that assign are left out"
    )
    assert named_by(dict) == {}


def test_methods_of_a_copy_find_other_values():
    numbers = changed(double=times_ten, half=times_ten)
    assert numbers[4] == 121, "10 * 4 * 3 + 1"
    assert numbers.doubled == 30
    assert numbers.halved(6) == Numbers().halved(600) // 5 == 60
    assert numbers.of_class(6) == (type(numbers), 60)
    assert numbers.inside([1, 2], minus=1) == [10, 20]
    assert Numbers()[4] == 25
    assert Numbers.halved(6) == 3


def test_names_that_were_not_given_are_those_of_the_module(monkeypatch):
    numbers = changed(double=times_ten)
    monkeypatch.setattr(sys.modules[__name__], "shift", 2)
    assert numbers[4] == 122
    monkeypatch.delattr(sys.modules[__name__], "shift")
    with pytest.raises(NameError, match="shift"):
        numbers[4]


def test_the_copy_is_of_the_same_class_for_its_code():
    numbers = changed(Derived, double=times_ten)
    assert isinstance(numbers, Derived)
    assert (type(numbers).__name__, type(numbers).__module__, type(numbers).__qualname__) == (
        "Derived",
        __name__,
        "Derived",
    )
    assert numbers[4] == Numbers()[4] + 1000, "super() leads to the class as it was written"


@pytest.mark.parametrize("cls", [Numbers, WithState])
def test_a_copy_is_pickled_and_copied_with_its_values(cls):
    numbers = changed(cls, double=times_ten)
    numbers.scale = 5
    for one in (pickle.loads(pickle.dumps(numbers)), copy.copy(numbers), copy.deepcopy(numbers)):
        assert one[4] == 201
        assert isinstance(one, cls)
        one.scale = 0
    assert numbers[4] == 201
    assert cls()[4] == 25


def test_another_process_gets_it():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(changed(double=times_ten).inside, ([4],)) == [41]


@pytest.mark.parametrize("cls", [Unpicklable, InSlots, Registered, InRegistry])
def test_classes_that_cannot_be_changed_are_an_error(cls):
    with pytest.raises(SplitError, match=f"double in a variable of a module, and no class like {cls.__name__}"):
        changed(cls, double=times_ten)
    assert known_by_name == {"InRegistry": InRegistry}


def test_an_object_whose_attributes_are_frozen_is_changed_too():
    assert changed(Frozen, double=times_ten)[4] == 120


package = types.ModuleType("package")
package.__path__ = [str(Path(__file__).parent)]  # a namespace package has no file
package.config = types.ModuleType("package.config")
package.config.__file__, package.config.scaled, package.config.read = __file__, double, 0
sys.modules.update({"package": package, "package.config": package.config})


class ByModule:
    def __getitem__(self, index):
        package.config.read += 1
        return package.config.scaled(index) + package.config.read, package.config.__name__


class OfALibrary:
    def __getitem__(self, index):
        return sys.modules[index]


def test_what_methods_read_in_a_module_of_the_user_is_found():
    found = named_by(ByModule)
    assert found[__name__, "package.config.scaled"] is double
    assert found[__name__, "package"] is package
    assert (__name__, "sys.modules") not in named_by(OfALibrary)


@pytest.mark.parametrize("remade", [lambda one: one, lambda one: pickle.loads(pickle.dumps(one)), copy.deepcopy])
def test_methods_of_a_copy_find_other_values_in_a_module(monkeypatch, remade):
    monkeypatch.setattr(package.config, "read", 0)
    one = ByModule()
    with_names(one, {(__name__, "package.config.scaled"): times_ten})
    one = remade(one)
    assert one[4] == (41, "package.config")
    assert ByModule()[4] == (10, "package.config"), "the module has its own, and what a copy assigns"
    assert one[4] == (43, "package.config")


PROGRAM = """
class Doubled:
    def __getitem__(self, index):
        return double(index)
"""


def test_a_process_that_imports_the_program_again_finds_the_same_names():
    def program(name):
        names = {"__name__": name, "__builtins__": __builtins__, "double": double}
        exec(PROGRAM, names)
        return names["Doubled"]

    assert named_by(program("__main__")) == named_by(program("__mp_main__")) == {("__main__", "double"): double}
    again = program("__mp_main__")()
    with_names(again, {("__main__", "double"): times_ten})
    assert again[4] == 40


def test_what_code_assigns_is_found_also_in_functions_inside():
    code = compile("def f(o):\n    global k\n    k = o.a\n    o.b += 1\n    def g(): o.c = o.d\n", "<one>", "exec")
    assert names_assigned(code) == {"k", "b", "c"}
