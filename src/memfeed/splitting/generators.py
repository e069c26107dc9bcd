"""The random generators that a dataset may draw from: the global ones, and those that it and its pipelines hold.

For messages, the line of code that draws a random number is found too.
"""

from __future__ import annotations

import contextlib
import ctypes
import pickle
import random
import site
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain, combinations
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch

from memfeed.errors import MemfeedError
from memfeed.store.store import Store
from memfeed.system.code_content import held_by, names_used

State = Any
_DEEPEST = 13
_MOST_ITEMS = 256  # of one list or dict
_MOST_OBJECTS = 50_000
_MOST_DRAWN = 64  # times 624 words that one sample may draw
_MT19937_BYTES = 625 * 4  # of its state in memory: 624 words, and the place of the next one


GLOBAL = frozenset(range(3))
"""The indices of the global generators of torch, NumPy and Python."""


class _Kind(NamedTuple):
    saving: Callable[[Any], Callable[[], State]]
    restore: Callable[[Any, State], None]
    seed: Callable[[Any, int], object]


def _restore_torch(generator: torch.Generator, state: bytes) -> None:
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


class _SavingNumpy:
    """Save the states of a generator again and again. One that has not moved since is not asked: that is slow."""

    def __init__(self, generator: np.random.RandomState) -> None:
        self._generator, self._memory, self._state = generator, b"", b""

    def __call__(self) -> bytes:
        memory = _memory_of(self._generator) if _TELLS else b""
        if not memory or memory != self._memory:
            self._memory, self._state = memory, pickle.dumps(self._generator.get_state(legacy=False))
        return self._state


def _memory_of(generator: np.random.RandomState) -> bytes:
    """Return the bytes in memory that a generator of NumPy changes when it moves; b"" if that is not known.

    Its bits lie where NumPy says. The normal number that it keeps for the next draw is in the object itself.
    """
    bits = generator._bit_generator
    if type(bits) is not np.random.MT19937:
        return b""
    head, size = object.__basicsize__, type(generator).__basicsize__
    kept = ctypes.string_at(id(generator) + head, size - head)
    return kept + ctypes.string_at(bits.ctypes.state_address, _MT19937_BYTES)


def _tells_of_a_kept_number() -> bool:
    one, seen = np.random.RandomState(1), set[bytes]()
    for _ in range(3):
        seen.add(_memory_of(one))
        one.randn()  # the second one takes the number that the first has kept
    return len(seen) == 3


_TELLS = sys.implementation.name == "cpython" and _tells_of_a_kept_number()


def _seed_numpy(generator: np.random.RandomState, seed: int) -> None:
    kind = type(generator._bit_generator)
    if kind is np.random.MT19937:
        generator.seed(seed)
    else:
        generator.set_state(np.random.RandomState(kind(seed)).get_state(legacy=False))


def _seed_bits(generator: np.random.Generator, seed: int) -> None:
    generator.bit_generator.state = type(generator.bit_generator)(seed).state


def _restore_bits(generator: np.random.Generator, state: bytes) -> None:
    generator.bit_generator.state = pickle.loads(state)


_KINDS: dict[type, _Kind] = {
    torch.Generator: _Kind(
        lambda one: lambda: one.get_state().numpy().tobytes(), _restore_torch, torch.Generator.manual_seed
    ),
    random.Random: _Kind(lambda one: one.getstate, random.Random.setstate, random.Random.seed),
    np.random.RandomState: _Kind(_SavingNumpy, lambda one, state: one.set_state(pickle.loads(state)), _seed_numpy),
    np.random.Generator: _Kind(lambda one: lambda: pickle.dumps(one.bit_generator.state), _restore_bits, _seed_bits),
}


def _seed_of(state: bytes) -> int:
    """Return the number by which a generator of torch in this state was seeded."""
    generator = torch.Generator()
    _restore_torch(generator, state)
    return generator.initial_seed()


def _words_of(state: State) -> tuple[int, ...]:
    """Return the 624 words of a generator of Python or NumPy; none where it is of another kind than at the start."""
    if not isinstance(state, bytes):
        return tuple(state[1][:-1])
    held = pickle.loads(state)["state"]
    return tuple(held["key"].tolist()) if "key" in held else (0,) * 624


class Generators:
    """Save, restore and seed all generators that some objects can draw from.

    A generator that cannot be found (of a C library, of the system) makes samples differ under the same seed.

    Args:
        roots: the dataset and its pipelines. Generators are looked for in attributes, containers, classes, closures
            and the globals of functions.
    """

    def __init__(self, *roots: Any) -> None:
        self._roots = roots
        found = [torch.default_generator, np.random.mtrand._rand, random._inst, *generators_in(*roots)]
        self.all = list({id(one): one for one in found}.values())
        self._kinds = [next(how for kind, how in _KINDS.items() if isinstance(one, kind)) for one in self.all]
        self._saving = [kind.saving(one) for one, kind in zip(self.all, self._kinds, strict=True)]

    def __reduce__(self) -> Any:
        return Generators, self._roots  # another process has global generators of its own

    def save(self) -> list[State]:
        """Return the states of all generators; states can be compared."""
        return [save() for save in self._saving]

    def restore(self, states: Sequence[State]) -> None:
        """Set all generators to states of `save`."""
        for one, kind, state in zip(self.all, self._kinds, states, strict=True):
            kind.restore(one, state)

    @contextlib.contextmanager
    def preserved(self) -> Iterator[list[State]]:
        """Restore all generators when the block ends, to the states that it gets."""
        states = self.save()
        try:
            yield states
        finally:
            self.restore(states)

    def seed(self, *numbers: int) -> None:
        """Give each generator a seed of its own, a function of `numbers`.

        Generators with equal seeds would tie together what is drawn from different ones.
        """
        seeds = np.random.SeedSequence(numbers).generate_state(len(self.all)).tolist()
        for one, kind, seed in zip(self.all, self._kinds, seeds, strict=True):
            kind.seed(one, seed)

    def seeded(self, *numbers: int) -> list[State]:
        """Seed each generator, and return the states: to save them takes longer than to seed."""
        self.seed(*numbers)
        return self.save()

    def moved(self, before: Sequence[State], after: Sequence[State]) -> set[int]:
        """Return the indices of the generators whose states differ."""
        return {i for i, (one, other) in enumerate(zip(before, after, strict=True)) if one != other}

    def drawn_from(self, before: Sequence[State], after: Sequence[State]) -> bool:
        """Return True if a global generator got from one state to the other by drawing, and was not seeded meanwhile.

        NumPy's and Python's go on by 624 words at a time; torch's knows its seed.
        """
        moved = self.moved(before, after)
        if 0 in moved and _seed_of(before[0]) == _seed_of(after[0]):
            return True
        for i in moved & {1, 2}:
            generator, wanted = random.Random(), _words_of(after[i])
            generator.setstate((3, (*_words_of(before[i]), 624), None))
            for _ in range(_MOST_DRAWN):
                if generator.getstate()[1][:-1] == wanted:
                    return True
                generator.getrandbits(32 * 624)
        return False

    def is_twice(self, states: Sequence[State], indices: Collection[int]) -> bool:
        """Return True if two of these generators are of one kind and in one state: they draw the same numbers."""
        found = [(self._kinds[i], states[i]) for i in sorted(indices)]
        return any(one == other for one, other in combinations(found, 2))


def generators_in(*roots: Any) -> list[Any]:
    """Return the generators in attributes, containers, classes, closures, and globals that functions name."""
    found, seen, left = [], set[int](), [(root, 0) for root in reversed(roots)]
    slots: dict[int, tuple[type[Any], list[str]]] = {}
    while left and len(seen) < _MOST_OBJECTS:
        one, depth = left.pop()
        if is_generator(one):
            if not isinstance(one, random.SystemRandom):
                found.append(one)
            continue
        if id(one) in seen or depth > _DEEPEST or isinstance(one, _CLOSED):
            continue
        seen.add(id(one))
        known = slots if depth < _DEEPEST else {}  # the parts of a class at the end of the way are not looked into
        left += [(part, depth + 1) for part in _parts(one, known) if has_class(part) and not isinstance(part, _PLAIN)]
    return found


LIBRARIES = tuple(
    # also those of the Python below a virtual environment that sees them, of `pip install --user`, and of .pth files
    {*(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")), *site.getsitepackages()}
    | {path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")}
)
_CLOSED = (type, types.ModuleType, torch.Tensor, np.ndarray, Store)
_PLAIN = (str, bytes, int, float, complex, type(None))


def _parts(one: Any, slots: dict[int, tuple[type[Any], list[str]]]) -> Iterator[Any]:
    """Yield the objects that an object refers to, as far as a generator may be there.

    ``slots`` has the classes that were looked at, by ``id``, with the names in their ``__slots__``: what a class
    refers to is yielded once.
    """
    if isinstance(one, dict):
        yield from list(one.values())[:_MOST_ITEMS]
    elif isinstance(one, list | tuple | set | frozenset | deque):
        yield from list(one)[:_MOST_ITEMS]
    elif isinstance(one, types.FunctionType):
        yield from (value for _, value in held_by(one))
        if not is_installed(one):
            yield from map(one.__globals__.get, names_used(one.__code__))
    else:
        for name in ("__self__", "__func__", "__wrapped__", "func", "args", "keywords"):  # methods, partials
            yield attribute_of(one, name)
        kind, names = type(one), list[str]()
        if id(kind) not in slots:
            for cls in kind.__mro__[:-1]:
                for name, value in list(vars(cls).items()):
                    # of a static method, a property
                    function = getattr(value, "__func__", getattr(value, "fget", value))
                    if isinstance(function, types.MemberDescriptorType):  # of __slots__
                        names.append(name)
                    elif isinstance(value, (*_KINDS, list, dict)):
                        yield value
                    elif isinstance(function, types.FunctionType) and not is_installed(function):
                        yield function
            slots[id(kind)] = kind, names
        for name in slots[id(kind)][1]:
            yield attribute_of(one, name)
    inner = attribute_of(one, "__dict__")
    yield from list(inner.values()) if isinstance(inner, dict) else ()


def attribute_of(one: Any, name: str) -> Any:
    """Return an attribute of any object; None without it. A property may raise anything."""
    try:
        return getattr(one, name, None)
    except Exception:
        return None


def is_generator(value: Any) -> bool:
    """Return True for a random generator whose state can be saved."""
    return isinstance(value, tuple(_KINDS))


def is_installed(function: types.FunctionType) -> bool:
    """Return True for a function of a library: its generators are attributes of its objects and classes.

    memfeed is one, also where it is imported from a clone.
    """
    return function.__code__.co_filename.startswith((*LIBRARIES, _OWN, "<frozen"))  # as collections.abc is


def is_library(module: types.ModuleType) -> bool:
    """Return True for a module of a library, and for one without a file or folder."""
    try:
        places = [one for one in (getattr(module, "__file__", None), *getattr(module, "__path__", ())) if one]
    except Exception:  # a stand-in for a library that is missing raises ImportError for each name
        return True
    return not places or places[0].startswith((*LIBRARIES, "<frozen"))


def has_class(value: Any) -> bool:
    """Return False for a value that raises when it is asked for its class."""
    try:
        return value.__class__ is not None
    except Exception:
        return False


def kept_draw(index: int) -> str:
    """Return what is found of a dataset that draws when a sample is read first, and then no more."""
    return (
        f"sample {index} draws random numbers when it is read first, and the dataset keeps what came of them, which "
        "every process draws anew"
    )


_OWN = str(Path(__file__).parents[1])
Calls = list[tuple[list[State], list[State]]]


def drawing_line(
    read: Callable[[int], Any],
    rows: Sequence[int],
    generators: Generators,
    calls: Callable[[], Calls | None] = list,
    watched: Sequence[int] | None = None,
) -> str:
    """Return " (FILE:LINE)" of the first line of the user's that draws when a sample is read; "" if none is found.

    It reads samples with a trace function, which is slow. ``calls`` returns the states before and after each call that
    may draw, of those that this reading has made so far; None inside such a call. ``watched`` are the numbers of the
    generators that count; None for all.
    """
    found: list[str] = []
    outer = sys.gettrace()
    last, line, known = list[State](), "", 0

    def look() -> None:
        nonlocal last, known
        made = calls()
        if made is None:
            return
        edges = [last, *chain.from_iterable(made[known:]), last := generators.save()]
        known = len(made)
        moved = set[int]().union(*map(generators.moved, edges[::2], edges[1::2]))
        if line and (moved if watched is None else moved & {*watched}):
            found.append(line)

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal line
        file = frame.f_code.co_filename
        is_made = file == "<string>" and frame.f_globals is not vars(sys.modules["__main__"])  # of a namedtuple
        if found or is_made or file.startswith((*LIBRARIES, _OWN, "<frozen")):
            return None
        look()
        if calls() is not None:
            line = f"{file}:{frame.f_lineno}"
        return trace

    with generators.preserved():
        for index in rows:
            last, line, known = generators.seeded(index, 0), "", 0
            sys.settrace(trace)
            try:
                with contextlib.suppress(MemfeedError):  # the one that the line is looked for
                    read(index)
            finally:
                sys.settrace(outer)
            look()
            if found:
                break
    return f" ({found[0]})" if found else ""
