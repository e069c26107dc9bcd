"""Watch the callables of a dataset while it reads a sample: first which of them draw, then what they get and return."""

from __future__ import annotations

import random
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from operator import is_
from typing import Any, NamedTuple

import numpy as np

from memfeed.schema.compare import equal
from memfeed.splitting.generators import Generators, is_generator
from memfeed.splitting.leaves import copied, copied_tree, take_apart
from memfeed.splitting.module_names import own_method
from memfeed.splitting.places import Key
from memfeed.splitting.recording import Entry, Node, Recording
from memfeed.splitting.traced import plain
from memfeed.system.code_content import names_used

Path = tuple[Key, ...]
Name = tuple[int, Path]
"""A callable: the number of its place, and the way from there to a step of it; () for the pipeline itself."""


class Callee(NamedTuple):
    """The callable of a call on a tape: a pipeline or a step, from its step number `at` on."""

    name: Name
    at: int


_OF_CONTAINERS = ("len", "getitem", "setitem", "delitem", "iter", "next", "reversed", "contains", "enter", "exit")


@cache
def _with_methods(names: tuple[str, ...]) -> type[Marked]:
    """Return the class of marks that have these special methods, which Python looks up in the class."""

    def forwarded(name: str) -> Callable[..., Any]:
        return lambda mark, *args: getattr(mark._target, name)(*args)

    return type("Marked", (Marked,), {name: forwarded(name) for name in names})


def _remade(names: tuple[str, ...]) -> Marked:
    return object.__new__(_with_methods(names))


class _OfClass(NamedTuple):
    """A method as its class has it, in the pickle of a mark."""

    owner: Any
    name: str


class Marked:
    """A callable in its place in a copy of the dataset. It tells a `Tracer` of each call.

    A vocabulary or a tokenizer is a callable and a container: its mark has a length and items as it has.
    """

    def __new__(cls, tracer: Tracer, name: Name, target: Any, original: Any) -> Marked:
        """Return a mark with those methods of a container that the callable has."""
        names = (f"__{one}__" for one in _OF_CONTAINERS)
        return _remade(tuple(one for one in names if hasattr(type(original), one)))

    def __init__(self, tracer: Tracer, name: Name, target: Any, original: Any) -> None:
        self.__dict__.update(_tracer=tracer, _name=name, _target=target, _original=original)
        tracer.marks[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the target."""
        return self._tracer.call(self, args, kwargs)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class of the callable: code that asks `isinstance` gets the same answer.

        A mark of a function says its own: what asks for functions, as cloudpickle does, reads their code.
        """
        cls = type(self.__dict__["_original"])
        return type(self) if cls is types.FunctionType else cls

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_tracer", "_name", "_target", "_original"):
            raise AttributeError(name)
        return getattr(self._target, name)

    def __setattr__(self, name: str, value: Any) -> None:
        for one in {id(one): one for one in (self._target, self._original)}.values():
            setattr(one, name, value)

    def __bool__(self) -> bool:
        return bool(self._original)

    def bound_to(self, owner: Any) -> Marked:
        """Return this callable as a method of a copy of its owner, whose other callables are marked too."""
        function = getattr(self._original, "__func__", None)
        if function is None or isinstance(self._original.__self__, type):
            return self
        function = own_method(owner, function)
        return Marked(self._tracer, self._name, function.__get__(owner), self._original)

    def __reduce__(self) -> Any:
        names = tuple(name for name in vars(type(self)) if name[2:-2] in _OF_CONTAINERS)
        state, target = dict(self.__dict__), self._target  # a method of a copy refers to what refers to it
        if isinstance(target, types.MethodType):
            name = target.__func__.__name__
            if getattr(type(target.__self__), name, None) is target.__func__:  # its copy has a mark under this name
                state["_target"] = _OfClass(target.__self__, name)
        return _remade, (names,), state

    def __setstate__(self, state: dict[str, Any]) -> None:
        target = state["_target"]
        if isinstance(target, _OfClass):
            target = getattr(type(target.owner), target.name).__get__(target.owner)
        self.__dict__.update(state, _target=target)


@dataclass
class _Frame:
    """A call that is being watched: the callables called inside it, with the states around each."""

    name: Name
    start: Any
    given: Any
    children: list[tuple[Name, Any, Any, Any, Any]] = field(default_factory=list)


class Tracer:
    """Watches the `Marked` callables of one copy of a dataset.

    Args:
        generators: all that the dataset may draw from.

    Attributes:
        marks: the callables.
        drew: for each callable the generators that it moved itself, outside of other watched callables.
        coins: for each callable the generators that it moved without an effect.
        inside: for each place the places whose callables called it.
        alone: steps that the dataset calls itself, and not their sequence.
        units: the pipelines and steps with a random part.
        calls_again: other callables that get what a random part made are called again too, as a whole. Else the
            operations inside them are noted.
        in_order: for each sequence of steps, whether it called each of them once, in order, passed values on as they
            are, and drew nothing itself.
    """

    def __init__(self, generators: Generators) -> None:
        self.generators = generators
        self.marks: dict[Name, Marked] = {}
        self.drew: dict[Name, set[int]] = {}
        self.coins: dict[Name, set[int]] = {}
        self.inside: dict[int, set[int]] = {}
        self.in_order: dict[Name, bool] = {}
        self.passes_on: dict[Name, bool] = {}
        self.steps: dict[Name, list[Name]] = {}
        self.alone: set[Name] = set()
        self.units: dict[Name, Unit] = {}
        self.calls_again = False
        self.recording: Recording | None = None
        self.is_watching = False
        self._frames: list[_Frame] = []
        self._running: tuple[Name, Entry] | None = None
        self._attributes: dict[int, StepAttributes] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "recording": None, "_frames": [], "_running": None, "_attributes": {}}

    def take(self, units: dict[Name, Unit], calls_again: bool) -> None:
        """Watch these units from now on."""
        self.units, self.calls_again, self._attributes = units, calls_again, {}

    def note_attributes(self) -> None:
        """Remember the attributes of the pipelines: before a sample is read, and after each call."""
        places = {name[0] for name in self.units}
        if self._attributes.keys() == places:
            for attributes in self._attributes.values():
                attributes.note()
            return
        for number in places:
            marks = [mark for name, mark in self.marks.items() if name[0] == number]
            steps = [*(mark._target for mark in marks), *(mark._original for mark in marks)]
            self._attributes[number] = StepAttributes(steps)

    def call(self, marked: Marked, args: Any, kwargs: Any) -> Any:
        """Call the target of a callable, and note the call as the present phase needs it."""
        if self.is_watching:
            return self._watched(marked, args, kwargs)
        run = self.recording
        if run is None:
            return marked._target(*args, **kwargs)
        name = marked._name
        if run.is_inside:
            if self._running is not None and self._running[0][0] == name[0]:
                unit = self.units[self._running[0]]
                if unit.at and unit.steps[unit.at] == name[1]:
                    self._note_cut(self._running[1], args, kwargs)
            return marked._target(*args, **kwargs)
        if name not in self.units and not self.calls_again:
            return marked._target(*args, **kwargs)  # as other code of the dataset
        leaves, form = take_apart((args, kwargs))
        links = [run.node_of(leaf) for leaf in leaves] if run.has_nodes() else [None] * len(leaves)
        if name not in self.units and not any(links):
            return marked._target(*args, **kwargs)
        return self._recorded(marked, form, leaves, links)

    # --- the tape

    def _recorded(self, marked: Marked, form: Any, leaves: list[Any], links: list[Any]) -> Any:
        """Call a pipeline, note what its random part got, and return results that can be told from other values."""
        run, name = self.recording, marked._name
        assert run is not None
        if name in self.units:
            attribute = self._attributes[name[0]].changed()
            if attribute:
                run.refuse(
                    f"the dataset changes the attribute {attribute!r}, which a random step reads, before it calls the "
                    "step; that cannot be done again for each epoch: give the step all that it needs as an argument"
                )
        args, kwargs = form.build([plain(leaf) for leaf in leaves])
        is_cut = name in self.units and not any(links) and self.units[name].at > 0
        entry = Entry(Callee(name, self.units[name].at if is_cut else 0), form, links, [])
        run.tape.append(entry)
        number = len(run.tape) - 1
        self._running = (name, entry) if is_cut else None
        linked = [plain(leaf) for leaf, link in zip(leaves, links, strict=True) if link is not None]
        with run.call():
            before = [copied(leaf) for leaf in linked]
            if not is_cut:
                self._note_cut(entry, args, kwargs)
            result = (marked._target if is_cut else marked._original)(*args, **kwargs)
            entry.writes = not equal(before, linked)
        entry.after = self.generators.save()
        self.note_attributes()
        made, made_form = take_apart(result)
        entry.made = made_form
        return made_form.build([run.mark(leaf, (number, index)) for index, leaf in enumerate(made)])

    def _note_cut(self, entry: Entry, args: Any, kwargs: Any) -> None:
        """Keep a copy of what the random part gets, and the states of the generators there."""
        entry.cuts += 1
        entry.before = self.generators.save()
        values, entry.form = take_apart(copied_tree((args, kwargs)))
        entry.links = entry.links if any(entry.links) else list[Node | None]([None] * len(values))
        entry.values = [v if link is None else None for v, link in zip(values, entry.links, strict=True)]

    # --- which callables draw

    def _watched(self, marked: Marked, args: Any, kwargs: Any) -> Any:
        name = marked._name
        outer = {one.name[0] for one in self._frames} - {name[0]}
        self.inside[name[0]] = self.inside.get(name[0], set()) | outer
        if name[1] and not any(one.name[0] == name[0] for one in self._frames):
            self.alone.add(name)
        frame = _Frame(name, self.generators.save(), (args, kwargs))
        self._frames.append(frame)
        try:
            result = marked._target(*args, **kwargs)
        finally:
            self._frames.pop()
        end = self.generators.save()
        self._judge(frame, marked._original, result, end)
        if self._frames:
            self._frames[-1].children.append((name, frame.start, end, (args, kwargs), result))
        return result

    def _judge(self, frame: _Frame, original: Any, result: Any, end: Any) -> None:
        edges = [frame.start, *(state for child in frame.children for state in child[1:3]), end]
        moved: set[int] = set()
        for before, after in zip(edges[::2], edges[1::2], strict=True):
            moved |= self.generators.moved(before, after)
        if moved:
            coin = self._coin(original, frame.start, edges[1])
            self.coins.setdefault(frame.name, set()).update(coin)
            moved -= coin
        self.drew[frame.name] = self.drew.get(frame.name, set()) | moved
        if frame.name in self.steps:
            names = [child[0] for child in frame.children]
            in_order = names == self.steps[frame.name] and not moved
            self.in_order[frame.name] = self.in_order.get(frame.name, True) and in_order
            self.passes_on[frame.name] = self.passes_on.get(frame.name, True) and in_order and _passes_on(frame, result)

    def _coin(self, step: Any, before: Any, after: Any) -> set[int]:
        """Return the generator of which a step of albumentations drew one number that decides nothing, because p is 1.

        It compares one random number with its probability, also where that is 1 and the step is always applied.
        """
        generator = getattr(step, "py_random", None)
        if generator is None or not getattr(step, "p", 0) >= 1:
            return set()
        number = next((i for i, one in enumerate(self.generators.all) if one is generator), None)
        if number is None:
            return set()
        toss = random.Random()
        toss.setstate(before[number])
        toss.random()
        return {number} if toss.getstate() == after[number] else set()


@dataclass(frozen=True)
class Unit:
    """A pipeline or step that draws: the ways to its steps, in order, and the first that draws."""

    steps: tuple[Path, ...]
    at: int


def _passes_on(frame: _Frame, result: Any) -> bool:
    """Return True if each step got what the one before returned, and the sequence added nothing at its ends."""
    args, kwargs = frame.given
    given = skip(*args, **kwargs)
    for _, _, _, (args, kwargs), made in frame.children:
        if not _is_same_object(skip(*args, **kwargs), given):
            return False
        given = made
    return _is_same_object(result, given)


def skip(*args: Any, **kwargs: Any) -> Any:
    """Return the arguments as the next step gets them: stands in place of a step whose result is stored."""
    return kwargs or (args[0] if len(args) == 1 else args)


def _is_same_object(one: Any, other: Any) -> bool:
    """Return True for the same object, a contiguous copy of it, or containers of the same objects."""
    if one is other:
        return True
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):  # albumentations copies what is not contiguous
        return one.flags.c_contiguous != other.flags.c_contiguous and bool(np.array_equal(one, other))
    left, right = (one, other) if type(one) is type(other) else (None, None)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_is_same_object(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(_is_same_object, left, right))
    return False


_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class StepAttributes:
    """The attributes of some steps, as they were when `note` was called. Both calls are made for each sample.

    For a method: the attributes of its object that its code names, or the code of the methods that it calls.
    """

    def __init__(self, steps: Iterable[Any]) -> None:
        self._owners: dict[int, tuple[dict[str, Any], set[str] | None]] = {}
        for step in steps:
            is_method = isinstance(step, types.MethodType)
            owner = step.__self__ if is_method else step
            inner = getattr(owner, "__dict__", None)
            if isinstance(inner, dict):
                names = _names_of(step.__func__, type(owner)) if is_method else None
                _, others = self._owners.get(id(inner), (inner, set()))
                self._owners[id(inner)] = inner, None if names is None or others is None else names | others
        self.note()

    def note(self) -> None:
        """Remember the attributes as they are now."""
        self._noted = [inner.copy() for inner, _ in self._owners.values()]

    def changed(self) -> str:
        """Return the name of an attribute that has another value now, or an empty string. Generators do not count."""
        for (inner, names), noted in zip(self._owners.values(), self._noted, strict=True):
            if len(inner) == len(noted) and all(map(is_, inner.values(), noted.values())):
                continue
            for key in {**noted, **inner}:
                one, other = noted.get(key, _MISSING), inner.get(key, _MISSING)
                if (names is None or key in names) and not is_generator(other) and not _is_same(one, other):
                    return key
        return ""


_MISSING = object()


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, _PLAIN) and bool(one == other))


def _names_of(function: Any, owner: type) -> set[str]:
    """Return the names in the code of a method, and of the methods of its class that it names."""
    seen, left = set[str](), list(_code_names(function))
    while left:
        name = left.pop()
        if name not in seen:
            seen.add(name)
            left += _code_names(getattr(owner, name, None))
    return seen


def _code_names(function: Any) -> Iterator[str]:
    return names_used(function.__code__) if isinstance(function, types.FunctionType) else iter(())
