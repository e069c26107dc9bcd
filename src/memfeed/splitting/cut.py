"""A dataset that is cut before the random steps of its pipelines: samples to what is stored of them, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from memfeed.errors import SplitError
from memfeed.splitting.counterparts import counterpart
from memfeed.splitting.generators import Generators
from memfeed.splitting.leaves import copied, kind_of, leaves_of, take_apart, to_tensor
from memfeed.splitting.pattern import Pattern, Read, equal_leaves
from memfeed.splitting.places import CallablePlace, part_of, replaced, steps_in
from memfeed.splitting.recording import Entry, Node, Recording
from memfeed.splitting.step_values import Value
from memfeed.splitting.traced import plain
from memfeed.splitting.tracer import Callee, Marked, Name, Path, Tracer, Unit, skip


class DrawsOutsideError(SplitError):
    """Something beside the random steps of the pipelines draws, or seeds a generator."""


class StatefulError(SplitError):
    """Samples differ when they are read again, though nothing draws."""


class KeptDrawError(SplitError):
    """The dataset keeps what it drew when a sample was read first."""


class Cut:
    """A copy of a dataset whose callables are watched, with the random part of each pipeline that draws.

    Args:
        dataset: the user's, which does not change.
        places: its callables.
        generators: all that it may draw from.
        probes: indices of samples that are read to find out which callables draw.

    Attributes:
        quiet: the generators that only the random parts may move.
        patterns: of the samples that were proven.
        writes: True once a call of a sample has changed, in place, what an earlier one had made.
    """

    def __init__(
        self, dataset: Any, places: Sequence[CallablePlace], generators: Generators, probes: Sequence[int]
    ) -> None:
        self.dataset, self.places, self.generators = dataset, list(places), generators
        self.tracer = Tracer(self.generators)
        marks: dict[Path, Any] = {}
        firsts: dict[int, int] = {}  # a pipeline that is at several places is one
        made: dict[int, Marked] = {}
        for number, place in enumerate(self.places):
            firsts.setdefault(id(place.value), number)
        for number in sorted(range(len(places)), key=lambda one: -len(places[one].path)):  # the innermost first
            place = self.places[number]
            inner = {
                path[len(place.path) :]: mark for path, mark in marks.items() if path[: len(place.path)] == place.path
            }
            first = firsts[id(place.value)]
            if first not in made:  # one mark at all places: code may ask if two of them have the same pipeline
                target = self._marked_steps((first, ()), place.value) if not inner else replaced(place.value, inner)
                made[first] = Marked(self.tracer, (first, ()), target, place.value)
            marks = {path: mark for path, mark in marks.items() if path[: len(place.path)] != place.path}
            marks[place.path] = made[first]
        self.marked = replaced(dataset, marks) if marks else dataset
        self._watch(probes)
        self.tossed = {i for steps in self.tracer.coins.values() for i in steps}
        self.quiet = [i for i in range(len(self.generators.all)) if i not in self.tossed]
        self.rest: dict[Callee, Any] = {}
        self.patterns: list[Pattern] = []
        self.writes = False

    def _marked_steps(self, name: Name, pipeline: Any) -> Any:
        """Return a copy of a sequence of steps in which each is marked; other callables as they are."""
        steps = steps_in(pipeline)
        if not steps:
            return pipeline
        self.tracer.steps[name] = [(name[0], (*name[1], *path)) for path, _ in steps]
        marks = {}
        for (path, step), own in zip(steps, self.tracer.steps[name], strict=True):
            marks[path] = Marked(self.tracer, own, self._marked_steps(own, step), step)
        return replaced(pipeline, marks)

    def _watch(self, probes: Sequence[int]) -> None:
        self.tracer.is_watching = True
        try:
            for index in probes:
                self.generators.seed(index, 1)
                self.marked[index]
        finally:
            self.tracer.is_watching = False

    def called(self) -> list[CallablePlace]:
        """Return the places of the callables that were called when samples were read to find out which of them draw."""
        called = {id(self.places[number].value) for number in self.tracer.inside}
        return [place for place in self.places if id(place.value) in called]

    def drawing(self) -> set[Name]:
        """Return the pipelines that draw, themselves or in their steps, and the steps that the dataset calls itself."""
        drawing = [name for name, drew in self.tracer.drew.items() if drew]
        return {name if name in self.tracer.alone else (name[0], ()) for name in drawing}

    def choices(self, probe: int, *, whole: bool = False) -> Iterator[tuple[dict[Name, Unit], bool]]:
        """Yield the ways to cut, the best first: the units, and whether other callables are called again, see `Tracer`.

        `whole` yields only those before all steps.

        Steps that make pixels larger (ToTensor, Normalize) come after the cut, where they have counterparts. `probe` is
        the index of a sample that shows what steps get.
        """
        finest = {name: self._unit(name) for name in self.drawing() or self._sequences()}
        smaller = {name: self._before_casts(name, unit, probe) for name, unit in finest.items()}
        outermost = {name: (max({name[0], *self._outside(name[0])}, key=self._size), ()) for name in finest}
        before_all = [{name: Unit(unit.steps, 0) for name, unit in finest.items()}]
        before_all += [dict.fromkeys(names, Unit((), 0)) for names in (finest, outermost.values())]
        seen: list[dict[Name, Unit]] = []
        for units in before_all if whole else (smaller, finest, *before_all) if self.drawing() else (smaller,):
            has_rest = all(unit.at < len(unit.steps) or not unit.steps for unit in units.values())
            if units and units not in seen and has_rest:
                seen.append(units)
        yield from ((units, calls_again) for calls_again in (False, True) for units in seen)

    def _sequences(self) -> list[Name]:
        """Return the sequences of steps that nothing but the dataset itself calls."""
        return [
            name
            for name, in_order in self.tracer.in_order.items()
            if not name[1] and in_order and not self._outside(name[0])
        ]

    def _before_casts(self, name: Name, unit: Unit, probe: int) -> Unit:
        """Return a pipeline cut before its first step that makes pixels larger, if counterparts follow."""
        self.take({name: Unit(unit.steps, 0)})
        try:
            calls = [entry for _, entry in self.read(probe).pattern.calls if entry.function.name == name]
        except SplitError:
            return unit
        steps = self.steps_after(Callee(name, 0))
        if not calls or any(calls[0].links) or steps is None or len(steps) != len(unit.steps):
            return unit
        inputs = [Value(*calls[0].form.build(calls[0].values))]
        try:
            for step in steps[: unit.at]:
                inputs.append(inputs[-1].after(step))
        except SplitError:
            return unit
        sizes = [max((to_tensor(image).element_size() for image in value.images()), default=0) for value in inputs]
        for at in range(unit.at):
            paths = tuple((str(i),) for i in range(len(inputs[at].images())))
            grows = 0 < sizes[at] < sizes[at + 1]
            if grows and all(counterpart(steps[i], [inputs[i]], paths) is not None for i in range(at, unit.at)):
                return Unit(unit.steps, at)
        return unit

    def _outside(self, number: int) -> set[int]:
        """Return the places that call this one, without methods of the dataset, which get a row's number."""
        inside = self.tracer.inside.get(number, set())
        return {one for one in inside if self.places[one].path[-1][0] != "method"}

    def _size(self, number: int) -> int:
        return sum(number in inside for inside in self.tracer.inside.values())

    def take(self, units: dict[Name, Unit], calls_again: bool = False) -> None:
        """Cut these pipelines."""
        self.tracer.take(units, calls_again)
        self.patterns, self.writes = [], False
        self.rest = {Callee(name, unit.at): self._rest(name, unit) for name, unit in units.items()}

    def _unit(self, name: Name) -> Unit:
        """Return the steps of a pipeline, and the first that draws; no steps where it does not run them in order."""
        names = [one for one, drew in self.tracer.drew.items() if one[0] == name[0] and drew]
        steps = self._opened(name)
        drawing = (i for i, path in enumerate(steps) if any(one[1][: len(path)] == path for one in names))
        return Unit(tuple(steps), next(drawing, 0 if names else len(steps)))

    def _opened(self, name: Name) -> list[Path]:
        """Return the ways to the steps of a sequence that calls them in order; sequences among them are opened too."""
        if not self.tracer.in_order.get(name):
            return []
        return [path for step in self.tracer.steps[name] for path in (self._opened(step) or [step[1]])]

    def _rest(self, name: Name, unit: Unit) -> Any:
        """Return the pipeline with identities in place of its fixed steps: the code of its containers is kept."""
        pipeline = self.callable(name)
        return replaced(pipeline, dict.fromkeys(unit.steps[: unit.at], skip)) if unit.at else pipeline

    # --- from a sample to what is stored

    def read(self, index: int) -> Read:
        """Read a sample with marks. Raise SplitError if something else than the random parts draws or seeds."""
        run = self.tracer.recording = Recording()
        self.tracer.note_attributes()
        start = self.generators.save()
        try:
            with run:
                sample = self.marked[index]
            end = self.generators.save()
            if run.refused:
                raise SplitError(f"found that {run.refused}")
            leaves, form = take_apart(sample)
            links = tuple(run.node_of(leaf) for leaf in leaves)
        finally:
            self.tracer.recording = None
        calls = [entry for entry in run.tape if isinstance(entry.function, Callee)]
        for entry in calls:
            if entry.cuts != 1:
                raise SplitError(
                    f"found that {self.shown(entry.function.name)} did not run its steps once each; expected one call "
                    "of each step in order"
                )
        self._require_used(run.tape, links)
        edges = [start, *(state for entry in calls for state in (entry.before, entry.after)), end]
        for before, after in zip(edges[::2], edges[1::2], strict=True):
            if any(before[i] != after[i] for i in self.quiet):
                raise DrawsOutsideError(
                    "found that something beside the random steps of its pipelines draws random numbers, or seeds a "
                    "generator"
                )
        given = [
            value for entry in calls for value, link in zip(entry.values, entry.links, strict=True) if link is None
        ]
        others = [copied(plain(leaf)) for leaf, link in zip(leaves, links, strict=True) if link is None]
        kept = [*given, *others]
        kinds = tuple(map(kind_of, kept))
        pattern = Pattern(tuple(run.tape), form, links, kinds, equal_leaves(kept, kinds))
        plain_sample = form.build([plain(leaf) for leaf in leaves])
        read = Read(plain_sample, pattern, kept, [entry.before for entry in calls])
        self.writes = self.writes or read.writes
        return read

    def _require_used(self, tape: Sequence[Entry], links: Sequence[Node | None]) -> None:
        """Raise SplitError if nothing is made of what a random step returned: the dataset's code decides by it."""
        used = {node[0] for node in (*links, *(one for entry in tape for one in entry.links)) if node is not None}
        for number, entry in enumerate(tape):
            if isinstance(entry.function, Callee) and entry.before != entry.after and number not in used:
                raise SplitError(
                    f"found that {self.shown(entry.function.name)} draws, and that nothing of its result is in the "
                    "sample: the dataset decides by it, or it changes its argument; expected the decision inside a "
                    "step that returns the image, the text or the number"
                )

    def draws_so_far(self) -> list[tuple[Any, Any]] | None:
        """Return the states before and after each call of the sample that is being read; None inside a call."""
        run = self.tracer.recording
        if run is None or run.is_inside:
            return [] if run is None else None
        return [(entry.before, entry.after) for entry in run.tape if entry.before and entry.after]

    def learn(self, pattern: Pattern) -> int:
        """Add a pattern, in place of a known one that differs only where its sample had None. Return its number."""
        alike = (number for number, known in enumerate(self.patterns) if not known.differs_from(pattern))
        number = next(alike, len(self.patterns))
        self.patterns[number : number + 1] = [pattern]
        return number

    def known(self, read: Read) -> int | None:
        """Return the number of the proven pattern that a sample has; None for another one."""
        alike = (number for number, known in enumerate(self.patterns) if not read.pattern.differs_from(known))
        return next(alike, None)

    def unlike(self, read: Read) -> str:
        """Return a phrase that says in what a sample differs from the proven pattern that is nearest."""
        found = [read.pattern.differs_from(pattern) for pattern in self.patterns]
        return min(found, key=lambda one: one.startswith("it calls"), default="")

    # --- and back

    def rebuild(self, pattern: Pattern, leaves: Sequence[Any], states: Sequence[Any] = ()) -> Any:
        """Return a sample from its leaves as `Read` has them, which do not change. The random parts draw.

        ``states`` are those of the generators at the beginning of each call; () to go on with theirs.
        """
        made = self.replay(pattern, leaves, states)
        others = iter(leaves[pattern.given :])
        try:
            return pattern.form.build([copied(next(others)) if link is None else made[link] for link in pattern.links])
        except KeyError:
            raise SplitError("found that its pipeline returns other containers for the same image") from None

    def replay(self, pattern: Pattern, leaves: Sequence[Any], states: Sequence[Any]) -> dict[Node, Any]:
        """Make the calls and operations of a sample again, and return the result; see `rebuild`."""
        left, made, number_of_call = iter(leaves), dict[Node, Any](), 0
        for number, entry in enumerate(pattern.tape):
            is_call = isinstance(entry.function, Callee)
            values = [
                made[link] if link is not None else copied(next(left) if is_call else value)
                for link, value in zip(entry.links, entry.values, strict=True)
            ]
            args, kwargs = entry.form.build(values)
            if is_call and states:
                self.generators.restore(states[number_of_call])
            number_of_call += is_call
            found = leaves_of((self.function(entry.function) if is_call else entry.function)(*args, **kwargs))
            # a call gives fresh values, as `Recording.mark` does: an operation may write to one of them
            made.update(((number, index), copied(leaf) if is_call else leaf) for index, leaf in enumerate(found))
        return made

    def function(self, callee: Callee) -> Any:
        """Return the function of a call of a tape."""
        return self.callable(callee.name) if callee.at == 0 else self.rest[callee]

    def callable(self, name: Name) -> Any:
        """Return a pipeline, or a step of it."""
        return _at(self.places[name[0]].value, name[1])

    def shown(self, name: Name) -> str:
        """Return the expression that reaches a pipeline or step."""
        place = self.places[name[0]]
        return str(CallablePlace((*place.path, *name[1]), place.value))

    def steps_after(self, callee: Callee) -> list[Any] | None:
        """Return the steps of the random part of a call; None where it does more than to call them in order."""
        pipeline = self.callable(callee.name)
        paths = self._opened(callee.name)
        if not paths:
            return None if steps_in(pipeline) else [pipeline]
        if not self._passes_on(callee.name):
            return None
        return [_at(pipeline, path) for path in paths[callee.at :]]

    def _passes_on(self, name: Name) -> bool:
        """Return True if a sequence, and each sequence in it, only passes values from step to step."""
        steps = self.tracer.steps.get(name, [])
        return not steps or not self._opened(name) or (self.tracer.passes_on[name] and all(map(self._passes_on, steps)))

    def random_steps(self, callee: Callee) -> list[Any]:
        """Return the steps of the random part of a call; the callable where it has none that it calls in order."""
        pipeline = self.callable(callee.name)
        return [_at(pipeline, path) for path in self._opened(callee.name)[callee.at :]] or [pipeline]

    def step_names(self, callee: Callee) -> tuple[str, ...]:
        """Return the names of the steps of the random part of a call, for messages."""
        return tuple(map(name_of, self.random_steps(callee)))

    def fixed_names(self, callee: Callee) -> tuple[str, ...]:
        """Return the names of the steps before the random part of a call, for messages."""
        pipeline = self.callable(callee.name)
        return tuple(name_of(_at(pipeline, path)) for path in self._opened(callee.name)[: callee.at])


def _at(value: Any, path: Path) -> Any:
    for key in path:
        value = part_of(value, key)
    return value


def name_of(step: Any) -> str:
    """Return the name of a step, for messages."""
    return str(getattr(step, "__name__", type(step).__name__))
