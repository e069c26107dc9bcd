"""Prove a cut by replay, on whole samples: read plainly, read with marks, and made again from what would be stored.

All three must be the same in every leaf and every bit, under the same states of all generators, for several seeds.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from memfeed.errors import SplitError
from memfeed.schema.compare import describe_difference, difference, equal
from memfeed.schema.names import display
from memfeed.schema.values import is_pil
from memfeed.splitting.cut import Cut, DrawsOutsideError, KeptDrawError, StatefulError
from memfeed.splitting.generators import Generators, State, drawing_line, kept_draw
from memfeed.splitting.leaves import ORIENTATION, copied_tree, require_comparable
from memfeed.splitting.pattern import Pattern, Read, from_parts, to_parts
from memfeed.splitting.places import CallablePlace, find_places
from memfeed.splitting.recording import Entry
from memfeed.system.signals import is_of_handler

WATCHED = 64  # one row in so many is proven whole when it is stored
SEEDS = 4
SCANNED_SEEDS = 32
SECONDS = 0.15
SCAN_SECONDS = 0.15
LOOK_SECONDS = 1.0
_FEWEST_ROWS = 4  # of a dataset that is slow to read
_FIRST_SPARE_SEED = 1_000


@dataclass
class Proof:
    """The whole samples, under several seeds each, on which a cut was proven.

    Args:
        cut: of the dataset.
        rows: that were proven.
        pending: that will be proven when they are stored.
        reads: one reading of each.
    """

    cut: Cut
    rows: list[int] = field(default_factory=list)
    pending: set[int] = field(default_factory=set)
    reads: dict[int, Read] = field(default_factory=dict)

    def __str__(self) -> str:
        more = f", {len(self.pending)} more" if self.pending else ""
        proven = f"proven on {len(self.rows)} whole samples under {SEEDS} seeds each"
        return f"{proven}{more} and one row in {WATCHED} as they are stored"


def look(dataset: Any, rows: Sequence[int], generators: Generators, *, at_once: bool) -> tuple[bool, set[int]]:
    """Read samples under several seeds. The generators are left as the last reading did.

    Return whether samples differ, and the generators that reads moved and that the dataset did not seed itself.

    `at_once` returns after the first sample that is random, or that drew. Raises SplitError for a dataset that keeps
    what it drew when a sample was read first.
    """
    started, is_random, is_kept, loose, done = time.monotonic(), False, False, set[int](), list[int]()
    for index in rows:
        if len(done) >= _FEWEST_ROWS and time.monotonic() - started > LOOK_SECONDS:
            break
        if at_once and (is_random or loose):
            break
        for seed in range(SEEDS):
            begin = generators.seeded(index, seed)
            sample = copied_tree(dataset[index])
            end = generators.save()
            if seed == 0:
                first, first_end, is_kept = sample, end, generators.drawn_from(begin, end)
                continue
            is_random = is_random or not equal(first, sample)
            # a dataset that seeds a generator itself leaves it in one state, whatever the seed was before
            loose |= generators.moved(begin, end) & generators.moved(first_end, end)
            is_kept = is_kept and not generators.moved(begin, end)
        if is_kept and done:  # the first sample may draw for all of them
            raise KeptDrawError(kept_draw(index))
        done.append(index)
    return is_random, loose


def prove(
    dataset: Any,
    rows: Sequence[int],
    name: str | None = None,
    *,
    cuts_fixed: bool = False,
    whole: bool = False,
) -> Proof | None:
    """Return a dataset that is cut before the random steps of its pipelines, proven on whole samples.

    None if samples are the same under all seeds, and nothing draws but what the dataset seeds itself. For the arguments
    see `memfeed.splitting.split.split`; with ``whole`` it is cut before all steps. Raises SplitError if no cut holds;
    the message says why.
    """
    places = find_places(dataset, name, names=name is not None, helpers=name is not None)

    def proven_at(more: list[CallablePlace]) -> Proof | None:
        return _prove_at(dataset, more, rows, cuts_fixed=cuts_fixed, whole=whole)

    named = find_places(dataset, name, names=True) if name is None else places
    if len(named) > len(places):
        try:
            return proven_at(named)
        except (StatefulError, KeptDrawError):  # to read the samples again may not show it
            raise
        except Exception as error:  # a class with other names may fail in any way
            if is_of_handler(error):
                raise
    try:
        return proven_at(places)
    except DrawsOutsideError:  # other objects are looked into last: a copy of one may fail in any way
        if len(more := find_places(dataset, name, names=True, helpers=True)) == len(named):
            raise
        try:
            proof = proven_at(more)
        except SplitError as error:
            raise error from None
        except Exception as error:
            if is_of_handler(error):
                raise
            proof = None
        if proof is None:
            raise
        return proof


def _prove_at(
    dataset: Any, places: list[CallablePlace], rows: Sequence[int], *, cuts_fixed: bool, whole: bool
) -> Proof | None:
    generators = Generators(dataset, *(place.value for place in places))
    with generators.preserved() as states:
        if not any(look(dataset, rows, generators, at_once=True)) and not cuts_fixed:
            return None
        if generators.is_twice(states, range(len(states))):
            _require_apart(dataset, rows, generators, states)
        cut = Cut(dataset, places, generators, rows)
        if not cut.drawing():
            is_random, loose = look(dataset, rows, generators, at_once=False)
            if is_random or not loose <= cut.tossed:
                raise _not_drawn(dataset, generators, rows)
            if not cuts_fixed:
                return None
        refusal: Exception | None = None
        for units, calls_again in cut.choices(rows[0], whole=whole):
            cut.take(units, calls_again)
            try:
                return _proven(cut, rows)
            except DrawsOutsideError as error:
                refusal = refusal or DrawsOutsideError(
                    f"{error}{drawing_line(cut.read, rows, generators, cut.draws_so_far, cut.quiet)}"
                )
            except Exception as error:  # half a pipeline may fail in any way: what prepares the sample is done twice
                if is_of_handler(error):
                    raise
                refusal = refusal or error
        raise refusal or SplitError(
            f"found no random step in {type(dataset).__name__}, and none that makes pixels larger; expected one: "
            "leave split out"
        )


def _require_apart(dataset: Any, rows: Sequence[int], generators: Generators, states: Sequence[State]) -> None:
    """Raise SplitError if generators that are in one state stay so while samples are read: they draw the same numbers.

    Those of which one draws more often than the other are soon apart, such as the two of each random step of MONAI.
    """
    _, loose = look(dataset, rows, generators, at_once=False)
    generators.restore(states)
    started = time.monotonic()
    for done, index in enumerate(rows):
        if not generators.is_twice(generators.save(), loose):
            return
        if done >= _FEWEST_ROWS and time.monotonic() - started > LOOK_SECONDS:
            break
        dataset[index]
    if generators.is_twice(generators.save(), loose):
        raise SplitError(
            "found steps with generators of their own which are in the same state, so they draw the same numbers: "
            "HorizontalFlip and VerticalFlip flip always together, for example, also in a DataLoader. Here each draws "
            "its own; expected other seeds: leave seed= of an albumentations Compose out, and give each generator of "
            "yours another one. If the same is meant, as for an image and its mask, let one step draw for both"
        )


def _proven(cut: Cut, rows: Sequence[int]) -> Proof:
    """Prove a cut on some rows, and on one at least of each kind. The others are proven when they are stored."""
    proof, started = Proof(cut), time.monotonic()
    for index in rows:
        cut.generators.seed(index, 0)
        read = cut.read(index)
        is_known = cut.known(read) is not None
        if is_known and len(proof.rows) >= _FEWEST_ROWS and time.monotonic() - started > SECONDS:
            proof.reads[index] = Read(copied_tree(read.sample), read.pattern, read.leaves, read.states)
            proof.pending.add(index)
            continue
        scanned = SCANNED_SEEDS if time.monotonic() - started < SCAN_SECONDS else 0
        proof.reads[index] = prove_row(cut, index, SEEDS, scanned=scanned, learns=True)
        proof.rows.append(index)
    if not any(read.keeps_work for read in proof.reads.values()):
        callee = cut.patterns[0].calls[0][1].function
        more = "" if cut.tracer.in_order.get(callee.name, True) else _NOT_IN_ORDER
        raise SplitError(
            f"found that {cut.step_names(callee)[0]}, the first random step, gets no image, tensor or array; expected "
            f"fixed steps before it that read one: a store would keep nothing that takes time{more}"
        )
    return proof


def prove_row(cut: Cut, index: int, seeds: int, *, scanned: int = 0, learns: bool = False, first_seed: int = 0) -> Read:
    """Prove the cut on one sample, under so many ``seeds``. Return its first reading.

    The random part alone is tried with ``scanned`` seeds, to prove it under those with different outcomes. ``learns``
    adds the pattern of the sample to the known ones. Raises SplitError if the three samples are not the same, or if
    something else draws.
    """
    generators, dataset = cut.generators, cut.dataset
    generators.seed(index, first_seed)
    first = cut.read(index)
    first = Read(copied_tree(first.sample), first.pattern, first.leaves, first.states)
    number = cut.known(first)
    if number is None:
        if not learns:
            raise SplitError(
                f"found that sample {index} is of another kind than those that were proven: {cut.unlike(first)}"
            )
        number = cut.learn(first.pattern)
        _require_no_exif(cut, first, index)
    pattern = cut.patterns[number]  # of this sample, or with a value where it has None
    leaves = from_parts(pattern, to_parts(pattern, first.leaves))
    chosen = list(range(seeds))
    if pattern.calls:
        chosen = _seeds_to_prove(cut, index, lambda: cut.rebuild(pattern, leaves), seeds, scanned)
    calls: list[list[Entry]] = []
    for seed in (first_seed, *chosen[1:]):
        generators.seed(index, seed)
        read = first if seed == first_seed else cut.read(index)
        sample = first.sample if seed == first_seed else copied_tree(read.sample)
        if cut.known(read) != number:
            raise SplitError(
                f"found that sample {index} is made in another way under seed {seed} than under seed {first_seed}: "
                f"{read.pattern.differs_from(pattern)}; expected the same calls and operations under all seeds: move "
                "what depends on random numbers into the pipeline"
            )
        calls.append([entry for _, entry in read.pattern.calls])
        pairs = enumerate(zip(read.leaves, first.leaves, strict=True))
        at = next((i for i, (one, other) in pairs if not equal(one, other)), None)
        if at is not None:
            raise SplitError(
                f"found that {_named(pattern, at)} of sample {index}, which would be stored, depends on the "
                f"seed: under seed {seed} {describe_difference(read.leaves[at], first.leaves[at])} as under seed "
                f"{first_seed}. The dataset draws for it, or takes numbers out of a result of its pipeline one by one; "
                "let the pipeline return it, or compute it with operations of torch and NumPy on the whole result, as "
                "np.array(points)"
            )
        if len(dataset) > 1 and seed == chosen[-1]:
            # what steps remember of a sample is now of another one; its neighbour may have the same class or size
            dataset[(index + random.Random(index).randrange(1, len(dataset))) % len(dataset)]
        again = cut.rebuild(pattern, leaves, read.states)
        if not equal(sample, again):
            is_same = equal(again, cut.rebuild(pattern, leaves, read.states))
            _require_same(
                again,
                sample,
                f"the random steps make another sample of what would be stored of sample {index} (seed {seed})",
                _ON_MORE if is_same else _ON_UNSEEN,
            )
        generators.seed(index, seed)
        plain = copied_tree(dataset[index])
        if not equal(sample, plain):
            generators.seed(index, seed)
            is_same = equal(plain, dataset[index])
            generators.seed(index, seed)
            is_same &= equal(sample, cut.read(index).sample)  # else a step has changed for good meanwhile
            how, hint = ("while its steps are watched", _ON_WATCH) if is_same else ("when it is read again", _ON_UNSEEN)
            found = f"the dataset gives another sample {index} under the same seed ({seed}) {how}"
            _require_same(sample, plain, found, hint)
    _require_no_seeding(cut, calls)
    return first


def _require_no_seeding(cut: Cut, calls: Sequence[Sequence[Entry]]) -> None:
    """Raise SplitError if a call seeds a generator with one number: its end state is then always the same.

    Later steps and samples would draw the same numbers again and again in a DataLoader, and here they would not.
    ``calls`` are those of one sample, under several seeds.
    """
    for readings in zip(*calls, strict=True):
        for i in range(len(cut.generators.all)):
            moved = [(entry.before[i], entry.after[i]) for entry in readings if entry.before[i] != entry.after[i]]
            starts, ends = zip(*moved, strict=True) if moved else ((), ())
            if any(one != starts[0] for one in starts) and all(one == ends[0] for one in ends):
                raise SplitError(
                    f"found that {cut.shown(readings[0].function.name)} seeds a random generator, so that later steps "
                    "and samples always draw the same numbers; expected steps that draw only: leave the call of "
                    "manual_seed or seed out, or give the step a generator of its own"
                )


_NOT_IN_ORDER = (
    ". It does not call each of its steps once, in their order, so it is not cut between them: put those before the "
    "first random one into a sequence of their own, as Compose([Compose(fixed), Compose(random)])"
)
_ON_MORE = (
    "what they make depends on more than the values that they get and the random numbers: on the sample that they got "
    "before, or on an attribute that other code sets. Give them all they need as arguments"
)
_ON_UNSEEN = (
    "something changes from call to call that no seed sets: a counter, a cache, the time, os.urandom. Let samples "
    "depend on the index and on random numbers alone"
)
_ON_WATCH = (
    "its code tells a watched step, or a value that one returned, from the usual one: by id(x), `x is y` or "
    "type(x) == C. Ask isinstance(x, C), or do it in a step of the pipeline"
)


def _require_no_exif(cut: Cut, read: Read, index: int) -> None:
    """Raise SplitError if the random part turns images as their Exif data say: a store keeps pixels alone."""
    if not any(map(is_pil, read.leaves)):
        return
    from PIL import Image

    exif = Image.Exif()
    exif[ORIENTATION] = 6
    turned = []
    for leaf in read.leaves:
        turned.append(leaf.copy() if is_pil(leaf) else leaf)
        if is_pil(leaf):
            turned[-1].info["exif"] = exif.tobytes()
    bare = [from_parts(read.pattern, to_parts(read.pattern, read.leaves)) for _ in range(2)]
    first, again, other = (cut.rebuild(read.pattern, leaves, read.states) for leaves in (*bare, turned))
    found = "the random steps make another sample of the same image under the same seed"
    _require_same(first, again, f"{found} (sample {index})", _ON_UNSEEN)
    found = "the random steps read the Exif data of an image, which are not stored"
    _require_same(first, other, f"{found} (sample {index})", "put ImageOps.exif_transpose before them")


def _seeds_to_prove(cut: Cut, index: int, rebuild: Callable[[], Any], seeds: int, scanned: int) -> list[int]:
    """Return seeds under which the random part makes different samples, as far as some tries show them."""
    chosen, seen = [0], list[Any]()
    for seed in range(scanned):
        if len(chosen) == seeds:
            break
        cut.generators.seed(index, seed)
        made = rebuild()
        if not any(equal(made, one) for one in seen):
            seen.append(made)
            chosen += [seed] if seed else []
    spare = (seed for seed in range(_FIRST_SPARE_SEED, _FIRST_SPARE_SEED + seeds))
    return chosen + [next(spare) for _ in range(seeds - len(chosen))]


def _require_same(sample: Any, expected: Any, found: str, hint: str) -> None:
    differs = difference(sample, expected)
    if differs is not None:
        require_comparable(differs)
        raise SplitError(f"found that {found}: {differs}; {hint}")


def _named(pattern: Pattern, at: int) -> str:
    if at < pattern.given:
        return "what its pipeline gets"
    others = [i for i, link in enumerate(pattern.links) if link is None]
    return f"field {display(pattern.form.paths()[others[at - pattern.given]])}"


def _not_drawn(dataset: Any, generators: Generators, rows: Sequence[int]) -> SplitError:
    """Return the error for samples that differ though no attribute of the dataset draws."""
    if not (where := drawing_line(dataset.__getitem__, rows, generators)):
        return StatefulError(
            f"found that {type(dataset).__name__} gives other samples when they are read again, and no generator has "
            "moved; expected samples that depend on the index and on random numbers alone, and not on state that "
            "outlives a read (a counter, the time, a generator of the system)"
        )
    return DrawsOutsideError(
        f"found that samples depend on random numbers which no attribute or method of {type(dataset).__name__} draws"
        f"{where}; expected a pipeline in an attribute of the dataset, as self.transform = Compose([...])"
    )
