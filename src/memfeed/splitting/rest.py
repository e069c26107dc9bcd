"""The rest of a dataset that was cut, as a transform of batches: transforms of memfeed where they do the same.

Where each step of each call has a counterpart, batches are made at once. Steps without one are called for each sample;
and where the pipeline does not just pass images from step to step, or a call changes in place what an earlier one made,
whole samples are made again, as the proof did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memfeed.errors import MemfeedError, TransformError, listed
from memfeed.schema.compare import equal
from memfeed.schema.fields import Schema
from memfeed.schema.infer import infer
from memfeed.schema.names import Path
from memfeed.schema.recipe import PER_SAMPLE, RecipeStep
from memfeed.schema.tree import types_of
from memfeed.splitting.counterparts import counterpart
from memfeed.splitting.cut import Cut, name_of
from memfeed.splitting.generators import Generators
from memfeed.splitting.leaves import Kind, copied, from_stored, kind_of, take_apart
from memfeed.splitting.makers import finished_makers_of
from memfeed.splitting.pattern import Pattern, Read
from memfeed.splitting.proof import Proof
from memfeed.splitting.recording import Entry, Node
from memfeed.splitting.remake import Arrange, Assemble, Remake, Tail
from memfeed.splitting.step_values import Value, as_field
from memfeed.splitting.stored_layout import InPlace, Layout, Named, decoding_steps, encoded, in_place, named
from memfeed.splitting.tracer import Callee
from memfeed.transforms import Compose, PerSample, Transform
from memfeed.transforms.from_recipe import make_transform, on_of

_PROBES = 3  # samples that counterparts are compared on
_ORDERS = 16  # seeds under which the steps of two samples take turns


@dataclass(frozen=True, eq=False)
class Rest:
    """The rest of a pipeline.

    Args:
        layout: where its images are stored.
        transform: of batches.
        recipe: the transform as a store describes it.
        batched: the names of the transforms of memfeed.
        own: the names of the steps that are called for each sample.
    """

    layout: Layout
    transform: Compose
    recipe: tuple[RecipeStep, ...]
    batched: tuple[str, ...]
    own: tuple[str, ...]

    @property
    def is_remade(self) -> bool:
        """True if whole samples are made again, by the dataset's own steps."""
        return isinstance(self.transform.transforms[-1], Remake)


class _NotBatched(Exception):  # noqa: N818
    """Samples must be made again one by one; the message says why."""


def rest_of(proof: Proof, *, is_encoded: bool = False) -> Rest:
    """Return the rest of a proven cut. The transforms are compared on the samples of the proof.

    With `is_encoded` the bytes of files are stored in place of images, and decoded first.
    """
    cut, reads = proof.cut, list(proof.reads.values())
    patterns = [encoded(pattern) if is_encoded else pattern for pattern in cut.patterns]
    layouts: list[Layout] = [named(patterns)]
    if (placed := in_place(patterns, reads[0])) is not None:
        layouts.insert(0, placed)
    with cut.generators.preserved():
        for layout in layouts if len(patterns) == 1 and not cut.writes else ():
            try:
                makers = finished_makers_of([read.sample for read in reads])
                return _batched(cut, layout, reads[:_PROBES], decoding_steps(layout), makers)
            except (_NotBatched, MemfeedError):
                continue
        return _remade(cut, named(patterns), reads)


def _remade(cut: Cut, layout: Named, reads: Sequence[Read]) -> Rest:
    samples = [read.sample for read in reads]
    schema = infer(samples).schema
    callees = dict.fromkeys(entry.function for pattern in cut.patterns for _, entry in pattern.calls)
    names = tuple(name for callee in callees for name in cut.step_names(callee))
    transform = Compose([Remake(cut, layout, schema, types_of(samples), listed(names, 100))])
    return Rest(layout, transform, (_own_step(layout, names),), (), names)


def _batched(
    cut: Cut, layout: Layout, reads: Sequence[Read], first: Sequence[RecipeStep], makers: dict[Path, Any]
) -> Rest:
    """Return the rest as a Compose. Raise _NotBatched if it needs whole samples."""
    pattern = cut.patterns[0]
    made = [cut.replay(pattern, read.leaves, read.states) for read in reads]
    program = _Program(cut, layout, pattern, made)
    operations: list[int] = []
    for number, entry in enumerate(pattern.tape):
        if not isinstance(entry.function, Callee):
            operations.append(number)
            continue
        program.add_operations(operations)
        operations = []
        program.add_call(
            number, entry, [program.arguments(number, read.leaves, one) for read, one in zip(reads, made, strict=True)]
        )
    program.add_operations(operations)
    if isinstance(layout, Named):
        program.assemble([read.sample for read in reads])
    if not program.batched and isinstance(layout, Named):
        raise _NotBatched("no step has a counterpart")
    recipe = program.recipe if isinstance(layout, InPlace) else [_own_step(layout, [*program.batched, *program.shown])]
    transform = Compose([*map(make_transform, first), *program.transforms])
    transform.leaf_makers = makers
    return Rest(layout, transform, (*first, *recipe), tuple(program.batched), tuple(program.own))


def _own_step(layout: Named, names: Sequence[str]) -> RecipeStep:
    """Return the step for what a store cannot keep: how finished samples are made of fields that look different."""
    fields = dict.fromkeys(name for names in layout.names for name in names)
    return RecipeStep(name=PER_SAMPLE, on=tuple((name,) for name in fields), shown=listed(names, 100))


class _Program:
    """The transforms of one pattern, in the making.

    `keys` has the field of each value: of stored leaves by their numbers, of made ones by their nodes.
    """

    def __init__(self, cut: Cut, layout: Layout, pattern: Pattern, made: Sequence[dict[Node, Any]]) -> None:
        self.cut, self.layout, self.pattern, self.made = cut, layout, pattern, made
        self.transforms: list[Transform] = []
        self.recipe: list[RecipeStep] = []
        self.batched: list[str] = []
        self.own: list[str] = []
        self.shown: list[str] = []
        self._first_of_call = dict[int, int]()
        first = 0
        for number, entry in pattern.calls:
            self._first_of_call[number] = first
            first += entry.links.count(None)
        self._others = first
        self._own_inputs: list[tuple[Segment, Sequence[Value]]] = []
        places: dict[int | Node, Path] = {leaf: layout.path(0, leaf) for leaf in range(len(pattern.kinds))}
        if isinstance(layout, Named):  # a stored leaf is a field of a dict; in place it has a path of its own
            self.transforms.append(Arrange({f"stored {leaf}": path for leaf, path in places.items()}))
            places = {leaf: (f"stored {leaf}",) for leaf in places}
        self.paths = places

    def arguments(self, number: int, leaves: Sequence[Any], made: dict[Node, Any]) -> Value:
        """Return the arguments of a call, of the leaves of a sample and of what was made before it."""
        entry = self.pattern.tape[number]
        left = iter(leaves[self._first_of_call[number] :])
        args, kwargs = entry.form.build([next(left) if link is None else made[link] for link in entry.links])
        return Value(args, kwargs)

    def add_call(self, number: int, entry: Entry, given: list[Value]) -> None:
        steps = self.cut.steps_after(entry.function)
        if steps is None:
            raise _NotBatched("the pipeline does more than to call its steps in order")
        left = iter(range(self._first_of_call[number], self._others))
        sources: list[Path] = [self.paths[next(left) if link is None else link] for link in entry.links]
        if any(link is not None for link in entry.links):
            sources = self._renamed(number, sources)
        leaves = given[0].leaves()
        if len(sources) != len(leaves) or len({*sources}) != len(sources):
            raise _NotBatched("an image is used twice in one call")
        paths = tuple(path for path, leaf in zip(sources, leaves, strict=True) if kind_of(leaf).is_image)
        inputs = [given]
        for step in steps:
            inputs.append([value.after(step) for value in inputs[-1]])
            if any(len(one.leaves()) != len(leaves) or not one.images() for one in inputs[-1]):
                raise _NotBatched(f"{name_of(step)} returns other values than images")
        if not all(value.images() for value in given):
            raise _NotBatched("it gets no images")
        self._add_steps(steps, inputs, paths)
        for index, (path, leaf) in enumerate(zip(sources, leaves, strict=True)):
            node = (number, index)
            self.paths[node] = path
            pairs = zip(self.made, given, strict=True)
            if not kind_of(leaf).is_image and not all(equal(one[node], value.leaves()[index]) for one, value in pairs):
                raise _NotBatched("it changes values that are no images")

    def _renamed(self, number: int, sources: list[Path]) -> list[Path]:
        """Give the arguments of a later call fields of their own: what they came from may be used again."""
        fields = {str(path[0]): path for path in self.paths.values()}
        named = {f"call {number}.{i}": source for i, source in enumerate(sources)}
        fields |= named
        self.transforms.append(Arrange(fields))
        return [(name,) for name in named]

    def _add_steps(self, steps: Sequence[Any], inputs: Sequence[Sequence[Value]], paths: tuple[Path, ...]) -> None:
        start: int | None = None
        for index in range(len(steps) + 1):
            made = counterpart(steps[index], inputs[index], paths) if index < len(steps) else []
            if made is None:
                start = index if start is None else start
                continue
            if start is not None:
                self._add_own(steps[start:index], inputs[start], inputs[index], paths)
                start = None
            for step in made:
                self.transforms.append(make_transform(step))
                self.recipe.append(step)
                self.batched.append(step.name)

    def _add_own(
        self, steps: Sequence[Any], before: Sequence[Value], after: Sequence[Value], paths: tuple[Path, ...]
    ) -> None:
        if before[0].others():
            raise _NotBatched(
                "steps of the user's may look at values that are no images, which differ from sample to sample"
            )
        kinds = [kind_of(image) for image in before[0].images()]
        if any([kind_of(image) for image in value.images()] != kinds for value in before):
            raise _NotBatched("images are of several kinds")
        sizes = {tuple(as_field(image).shape) for value in after for image in value.images()[:1]}
        segment = Segment(steps, before[0], kinds)
        self._own_inputs.append((segment, before))
        if len(self._own_inputs) > 1 and self._share_state():
            raise _NotBatched("steps of the user's leave something for later ones of the same sample")
        names = [name_of(step) for step in steps]
        self.own += names
        self.shown += names
        self.transforms.append(PerSample(segment, one_size=len(sizes) == 1, on=on_of(paths)))
        self.recipe.append(RecipeStep(name=PER_SAMPLE, on=paths, shown=listed(names, 100)))

    def _share_state(self) -> bool:
        """Return True if a step leaves something for a later one: a batch has another sample between the two."""

        def of_first(order: Sequence[tuple[int, int]], seed: int) -> list[Any]:
            """Run pairs of segment and sample; return what the first sample became."""
            made = []
            for segment, sample in order:
                steps, values = self._own_inputs[segment]
                generators.seed(seed, segment, sample)
                value = values[sample].copy().through(steps.steps)
                made += [copied(leaf) for leaf in value.leaves()] if sample == 0 else []
            return made

        if len(self._own_inputs[0][1]) < 2:
            return True  # of one sample nothing is known
        generators, segments = self.cut.generators, range(len(self._own_inputs))
        alone = [(segment, 0) for segment in segments]
        mixed = [(segment, sample) for segment in segments for sample in (0, 1)]
        return any(not equal(of_first(alone, seed), of_first(mixed, seed)) for seed in range(_ORDERS))

    def add_operations(self, numbers: Sequence[int]) -> None:
        """Add operations of torch and NumPy that the dataset makes with results of its pipeline."""
        if not numbers:
            return
        entries = {number: self.pattern.tape[number] for number in numbers}
        links = {link for entry in self.pattern.tape[numbers[0] :] for link in entry.links} | {*self.pattern.links}
        given = {link for entry in entries.values() for link in entry.links if link is not None} & self.paths.keys()
        results = {node: f"operation {node[0]}.{node[1]}" for node in links if node is not None and node[0] in entries}
        results |= {node: str(self.paths[node][0]) for node in given & links}  # an operation may have written to it
        fields = {node: (str(self.paths[node][0]), kind_of(self.made[0][node])) for node in given}
        self.transforms.append(Tail(entries, fields, results, self.made))
        self.paths.update({node: (name,) for node, name in results.items()})
        self.shown += [name_of(entry.function) for entry in entries.values()]

    def assemble(self, samples: Sequence[Any]) -> None:
        """Add the step that builds the finished batch."""
        inferred = infer(samples)
        left = iter(range(self._others, len(self.pattern.kinds)))
        sources = [next(left) if link is None else link for link in self.pattern.links]
        keys = [str(self.paths[source][0]) for source in sources]
        last = {str(self.paths[source][0]) for source in sources if self._has_channels_last(source)}
        order = _order(inferred.schema, self.pattern)
        self.transforms.append(Assemble([keys[i] for i in order], last, inferred.schema, types_of(samples)))

    def _has_channels_last(self, source: int | Node) -> bool:
        """Return True for an array whose channels were moved to the front: one that is stored or that a call made."""
        if isinstance(source, int):
            return self.pattern.kinds[source].name == "array hwc"
        is_made = isinstance(self.pattern.tape[source[0]].function, Callee)
        return is_made and kind_of(self.made[0][source]).name == "array hwc"


def _order(schema: Schema, pattern: Pattern) -> list[int]:
    """Return for each field of the finished samples the number of the leaf."""
    numbers = {path: number for number, path in enumerate(pattern.form.paths())}
    if {field.path for field in schema} != numbers.keys():
        raise _NotBatched("its samples have containers that are one field, or boxes")
    return [numbers[field.path] for field in schema]


class Segment:
    """Neighbouring steps of a pipeline as a function of one sample's images, for `PerSample`, which seeds it.

    Args:
        steps: of the pipeline.
        like: what the first step got in some sample, for the form of its arguments.
        kinds: of the images.
    """

    def __init__(self, steps: Sequence[Any], like: Value, kinds: Sequence[Kind]) -> None:
        self.steps, self._kinds = list(steps), list(kinds)
        self._form = take_apart((like.args, like.kwargs))[1]  # all leaves are images
        self._generators = Generators(*steps)  # looked for once: that takes 3 ms

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the images of one sample after the steps, channels first."""
        args, kwargs = self._form.build(
            [from_stored([one], kind) for one, kind in zip(tensors, self._kinds, strict=True)]
        )
        fields = Value(args, kwargs).through(self.steps).fields()
        if len(fields) != len(tensors):
            raise TransformError(f"found {len(fields)} images after {self}; expected {len(tensors)}, as before it")
        return tuple(fields)

    def seed_generators(self, seed: int) -> None:
        """Seed all generators that the steps may draw from."""
        self._generators.seed(seed)

    def __repr__(self) -> str:
        return ", ".join(map(name_of, self.steps))
