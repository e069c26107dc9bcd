"""The hash of a function changes with whatever its result depends on, and with nothing else."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from memfeed.errors import SchemaError
from memfeed.memoizing.code import hash_and_reads, hash_function

HEAD = """
import collections, dataclasses, datetime, functools, logging, re, typing, numpy as np, torch
from pathlib import Path
log = logging.getLogger("x")
"""

PAIRS = {
    "its source": ("def f(x): return x", "def f(x): return x + 1"),
    "a global number": ("SIZE = 3\ndef f(x): return x * SIZE", "SIZE = 4\ndef f(x): return x * SIZE"),
    "a global that comes later": ("def f(x): return x * SIZE\nSIZE = 3", "def f(x): return x * SIZE\nSIZE = 4"),
    "a default": ("def f(x, y=1): return x", "def f(x, y=2): return x"),
    "a function that it calls": (
        "def g(x): return x\ndef f(x): return g(x)",
        "def g(x): return x + 1\ndef f(x): return g(x)",
    ),
    "a variable of an enclosing function": (
        "def make(n):\n    def f(x): return x + n\n    return f\nf = make(1)",
        "def make(n):\n    def f(x): return x + n\n    return f\nf = make(2)",
    ),
    "an array": ("W = np.ones(3)\ndef f(x): return W", "W = np.zeros(3)\ndef f(x): return W"),
    "an attribute of an object": (
        "class A:\n    def __init__(self, n): self.n = n\na = A(1)\ndef f(x): return a.n",
        "class A:\n    def __init__(self, n): self.n = n\na = A(2)\ndef f(x): return a.n",
    ),
    "a method of a class": (
        "class A:\n    def g(self): return 1\ndef f(x): return A().g()",
        "class A:\n    def g(self): return 2\ndef f(x): return A().g()",
    ),
    "a set": ("S = {1, 2}\ndef f(x): return x in S", "S = {1, 3}\ndef f(x): return x in S"),
    "an argument of partial": (
        "def g(x, y): return y\nf = functools.partial(g, y=1)",
        "def g(x, y): return y\nf = functools.partial(g, y=2)",
    ),
    "a global of a function inside": (
        "N = 1\ndef f(x): return [N for _ in (lambda: x)()]",
        "N = 2\ndef f(x): return [N for _ in (lambda: x)()]",
    ),
    "a named tuple": (
        "class P(typing.NamedTuple):\n    a: int = 1\ndef f(x): return P()",
        "class P(typing.NamedTuple):\n    a: int = 2\ndef f(x): return P()",
    ),
    "a slot": (
        "@dataclasses.dataclass(slots=True)\nclass D:\n    a: int\nd = D(1)\ndef f(x): return d.a",
        "@dataclasses.dataclass(slots=True)\nclass D:\n    a: int\nd = D(2)\ndef f(x): return d.a",
    ),
    "a cached property": (
        "class A:\n    @functools.cached_property\n    def n(self): return 1\ndef f(x): return A().n",
        "class A:\n    @functools.cached_property\n    def n(self): return 2\ndef f(x): return A().n",
    ),
    "a pattern": ("P = re.compile('a')\ndef f(x): return P", "P = re.compile('b')\ndef f(x): return P"),
    "a dtype of numpy": ("D = np.dtype('f4')\ndef f(x): return D", "D = np.dtype('f8')\ndef f(x): return D"),
    "a dtype of torch": ("D = torch.int8\ndef f(x): return D", "D = torch.int16\ndef f(x): return D"),
    "a range": ("R = range(3)\ndef f(x): return R", "R = range(4)\ndef f(x): return R"),
    "a date": (
        "D = datetime.date(2020, 1, 1)\ndef f(x): return D",
        "D = datetime.date(2020, 1, 2)\ndef f(x): return D",
    ),
    "a deque": ("Q = collections.deque([1])\ndef f(x): return Q", "Q = collections.deque([2])\ndef f(x): return Q"),
    "bool or int": ("N = 1\ndef f(x): return N", "N = True\ndef f(x): return N"),
}
counter = itertools.count()


@pytest.fixture
def load(tmp_path):
    """Return what makes a module of the same name from a text, in a directory of its own, and returns its f."""

    def load(text):
        directory = tmp_path / str(next(counter))
        directory.mkdir()
        (directory / "user_module.py").write_text(HEAD + text)
        spec = importlib.util.spec_from_file_location("user_module", directory / "user_module.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.f

    return load


@pytest.mark.parametrize("name", PAIRS)
def test_it_changes_with(load, name):
    one, other = PAIRS[name]
    assert hash_function(load(one)) == hash_function(load(one))
    assert hash_function(load(other)) != hash_function(load(one))


def test_functions_of_one_line_differ(load):
    f = load("f = [(lambda x: x * 2), (lambda x: x * 3), (lambda y: lambda x: x)(1), (lambda y: lambda x: -x)(1)]")
    assert len(set(map(hash_function, f))) == 4


def test_it_is_that_of_the_running_code_if_the_file_was_edited_meanwhile(load):
    """Workers that are forked later hash the function again."""
    f = load("def f(x): return x")
    before = hash_function(f)
    Path(f.__code__.co_filename).write_text(HEAD + "def f(x): return x + 1")
    assert hash_function(f) == before != hash_function(load("def f(x): return x + 1"))


def test_it_is_the_same_in_every_process(load):
    f = load("def f(x): return x in {'a', 'b', 'c', 'd'} or (lambda: x in {('e', 'f'), ('g', 'h')})()")
    program = (
        "import importlib.util, sys; from memfeed.memoizing.code import hash_function; "
        "spec = importlib.util.spec_from_file_location('user_module', sys.argv[1]); "
        "module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module); "
        "print(hash_function(module.f))"
    )
    for seed in "12":
        done = subprocess.run(
            [sys.executable, "-c", program, f.__code__.co_filename],
            env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert done.stdout.strip() == hash_function(f)


def test_variables_that_name_something_else(load):
    text = "N, M = 1, 1\ndef g(x): return x + N\n"
    f = load(text + "def f(x):\n    global M\n    M += 1\n    return g(x)")
    reads = hash_and_reads(f)[1]
    assert not reads.are_changed()
    f(1)
    assert not reads.are_changed(), "what it counts itself"
    f.__globals__["N"] = 2
    assert reads.are_changed()
    f = load("def make(n):\n    def f(x): return x + n\n    return f\nf = make(1)")
    reads = hash_and_reads(f)[1]
    assert not reads.are_changed()
    f.__closure__[0].cell_contents = 2
    assert reads.are_changed()


def test_a_logger_and_libraries_count_for_nothing(load):
    f = load("def f(x):\n    log.info('x')\n    return np.ones(2), torch.ones(1), Path('a')")
    one = hash_function(f)
    logging.getLogger("x").setLevel(logging.DEBUG)
    assert hash_function(f) == one


def test_a_library_is_one_wherever_it_is_installed(load, tmp_path):
    """Also in the directory of a user, of Debian, or of another environment."""
    hashes = []
    for folder in ("site-packages", "dist-packages", "mine"):
        for number in (1, 2):
            directory = tmp_path / f"{folder}-{number}" / folder
            directory.mkdir(parents=True)
            (directory / "helper.py").write_text(f"def help(x): return {number}")
            spec = importlib.util.spec_from_file_location("helper", directory / "helper.py")
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            f = load("def f(x): return help(x)")
            f.__globals__["help"] = module.help
            hashes.append(hash_function(f))
    assert len({*hashes[:4]}) == 1
    assert len({*hashes[3:]}) == 3


LOCK, GENERATOR, DRAWS = threading.Lock(), torch.Generator(), np.random.default_rng(0)
NEXT = iter([1, 2])


@pytest.mark.parametrize(
    "function",
    [lambda: LOCK, lambda: GENERATOR, lambda: DRAWS, lambda: NEXT],
    ids=["lock", "torch", "numpy", "iterator"],
)
def test_what_cannot_be_hashed_is_refused_and_a_version_helps(function):
    with pytest.raises(SchemaError, match=r"whose state cannot be hashed.*pass version=1"):
        hash_function(function)
    assert hash_function(function, 1) != hash_function(function, 2)


def test_recursion_ends():
    def f(x):
        return f(x - 1) if x else LOOP

    assert hash_function(f) == hash_function(f)


LOOP: list[object] = []
LOOP.append(LOOP)


def test_functions_of_libraries():
    assert hash_function(np.load) != hash_function(np.save)
    assert hash_function(len) != hash_function(sum)
    assert hash_function(functools.partial(np.load, mmap_mode="r")) != hash_function(np.load)
