"""Cut a dataset: samples without their random part for a store, and the rest as a transform of batches."""

from __future__ import annotations

import math
import operator
import time
import timeit
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from memfeed.errors import SchemaError, SplitError, listed
from memfeed.schema.containers import device_of
from memfeed.schema.names import display
from memfeed.schema.recipe import RecipeStep
from memfeed.splitting.cut import Cut, DrawsOutsideError
from memfeed.splitting.generators import drawing_line
from memfeed.splitting.leaves import to_tensor
from memfeed.splitting.pattern import Read, from_parts, to_parts
from memfeed.splitting.places import replaced
from memfeed.splitting.proof import SEEDS, WATCHED, Proof, prove, prove_row
from memfeed.splitting.rest import Rest, rest_of
from memfeed.splitting.stored_layout import Layout, Named, OpenedFiles, ShortSide, images_of, require_only_images_differ
from memfeed.splitting.unread import share_opened
from memfeed.system.buffers import shared_number
from memfeed.system.files import free_bytes
from memfeed.system.machine import memory_limit
from memfeed.system.messages import format_bytes
from memfeed.transforms import Compose

WATCH_SHARE = 0.02  # of the time
COST_SECONDS, COST_REPEATS = 0.1, 3  # of comparing the random part with the whole sample
COST_RATIO = 1.2  # less is within the noise of these few repeats
_WATCH_SEED = 7_919

Keep = int | str | None


@dataclass(frozen=True, eq=False)
class Split:
    """A dataset that was cut.

    Args:
        dataset: its samples without their random part.
        transform: the random part, for a loader.
        recipe: `transform` as a store keeps it.
        keep: how images are stored.
        line: what was cut where, for people.
        device: of the tensors of whole samples, if it is not the CPU.
    """

    dataset: CutDataset
    transform: Compose
    recipe: tuple[RecipeStep, ...]
    keep: Keep
    line: str
    device: torch.device | None

    @property
    def steps_after(self) -> list[Any]:
        """The steps of the dataset's pipelines that come after the cut: no stored value depends on them."""
        cut = self.dataset.cut
        return [step for callee in cut.rest for step in cut.random_steps(callee)]


class CutDataset(Dataset[Any]):
    """The part of a dataset's samples that a store keeps. Each sample is read once, whole, with its random part.

    Args:
        proof: of the cut.
        layout: of what is stored.
        keep: see `memfeed.cache`.
        is_remade: whole samples are made again, so that a step may change what an earlier one made.

    Raises:
        SplitError: by `[]`, for a sample that is not as those that were proven.
    """

    def __init__(self, proof: Proof, layout: Layout, keep: Keep, *, is_remade: bool) -> None:
        self.cut, self.layout, self._is_remade = proof.cut, layout, is_remade
        self.classes_of = proof.cut.dataset
        self._shrink = ShortSide(keep) if isinstance(keep, int) else None
        self._files: list[OpenedFiles] = []
        if keep == "encoded":
            self._files = _with_files(self.cut)
        self._pending = proof.pending
        self._proven = shared_number(len(proof.rows))
        self._seconds = {"proving": 0.0, "start": 0.0}
        self._last: tuple[int, bool] = (0, False)

    def __len__(self) -> int:
        return len(self.cut.dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("cut", "layout", "classes_of"):
            raise AttributeError(name)
        return getattr(self.classes_of, name)

    @property
    def proven_rows(self) -> int:
        """How many samples were proven whole so far, by all processes."""
        return int(self._proven)

    def __getitem__(self, index: int) -> Any:
        """Return the stored part of a sample. Raise SplitError for a sample of a pattern that was not proven."""
        started = time.monotonic()
        self._seconds["start"] = self._seconds["start"] or started
        index = range(len(self))[index]
        try:
            read = self.cut.read(index)
        except SplitError as error:
            where = ""
            if isinstance(error, DrawsOutsideError):
                generators, watched = self.cut.generators, self.cut.quiet
                where = drawing_line(self.cut.read, [index], generators, self.cut.draws_so_far, watched)
            raise SplitError(
                f"sample {index}: {error}{where}. None of the samples that the cut of the pipeline was proven on did "
                "so; expected all samples alike: change the dataset, or read it by a DataLoader"
            ) from None
        number = self.cut.known(read)
        if number is None:
            raise SplitError(
                f"sample {index}: found that it is of another kind than the samples that the cut of the pipeline was "
                f"proven on: {self.cut.unlike(read)}. Expected all samples alike: change the dataset, or store its "
                "fixed part by a dataset of yours and pass the random steps as Loader(store, transform=...)"
            )
        if read.writes and not self._is_remade:
            raise SplitError(
                f"sample {index}: found that a random step changes, in place, what an earlier call returned, as none "
                "did in the samples that the cut of the pipeline was proven on; expected a step that returns a new "
                "image (inplace=False), or a copy as its argument"
            )
        stored = self._stored(number, read, index)
        # a sample is proven after another one was read, so that what steps remember is of that one
        before, is_due = self._last
        self._last = index, index % WATCHED == WATCHED // 2
        if index in self._pending:  # at once: another sample may never be read here
            self._watch(index)
        elif is_due:
            self._watch(before)
        return stored

    def _stored(self, number: int, read: Read, index: int) -> Any:
        leaves, pattern = read.leaves, self.cut.patterns[number]
        if self._shrink is not None:
            leaves = self._shrink.leaves(pattern, leaves)
        for files in self._files:
            leaves = files.leaves(pattern, leaves, is_checked=index % WATCHED == WATCHED // 2)
        return self.layout.stored(number, leaves)

    def _watch(self, index: int) -> None:
        """Prove one more sample. Those beside the ones chosen at first only if proofs have taken little time so far."""
        now, is_pending = time.monotonic(), index in self._pending
        if not is_pending and self._seconds["proving"] > WATCH_SHARE * (now - self._seconds["start"]):
            return
        share_opened(self.cut.marked, self.cut.dataset)  # in a process that was not forked
        states = self.cut.generators.save()
        try:
            read = prove_row(self.cut, index, SEEDS if is_pending else 1, first_seed=_WATCH_SEED)
            self.require_same_without_pixels(read, index)
        finally:
            self.cut.generators.restore(states)
            self._seconds["proving"] += time.monotonic() - now
        self._proven += 1

    def require_same_without_pixels(self, read: Read, index: int) -> None:
        """Raise SplitError if images are stored smaller, and a sample made of them differs in more than its images."""
        if self._shrink is not None:
            require_only_images_differ(self.cut, read, self._shrink, index)


def _with_files(cut: Cut) -> list[OpenedFiles]:
    """Put what remembers files in place of the loaders of a cut dataset."""
    loaders = [place for place in cut.places if place.path[-1] == ("attribute", "loader")]
    if not loaders or len(cut.patterns) > 1 or not images_of(cut.patterns[0]):
        raise SplitError(
            f"found forms='encoded' for {type(cut.dataset).__name__}; expected a pipeline that gets PIL images in RGB, "
            "and a dataset.loader(path) that opens their files, as torchvision's ImageFolder has: forms=256 stores "
            "smaller images"
        )
    files = {place.path: OpenedFiles(place.value) for place in loaders}
    cut.marked = replaced(cut.marked, files)
    return list(files.values())


def split(
    dataset: Any, rows: Sequence[int], name: str | None, keep: Keep, folder: str, *, cuts_fixed: bool
) -> Split | None:
    """Cut a dataset before the random steps of its pipelines. Return None if its samples are fixed.

    Args:
        dataset: a map-style dataset.
        rows: indices of the samples that the cut is proven on.
        name: the attribute that holds the pipeline; None to find it.
        keep: how images are stored that a random step resizes, see `memfeed.cache`; None chooses.
        folder: where the store will be, for its free space.
        cuts_fixed: cut a pipeline without random steps too, before those that make pixels larger.

    Raises:
        SplitError: no cut can be proven.
    """
    proof = prove(dataset, rows, name, cuts_fixed=cuts_fixed, whole=keep == "encoded")
    if proof is None:
        return None
    chosen, why = _choice(proof, keep, folder)
    if chosen == "encoded" != keep:
        proof = prove(dataset, rows, name, whole=True) or proof
    try:
        rest = rest_of(proof, is_encoded=chosen == "encoded")
        device = device_of([read.sample for read in proof.reads.values()])
    except SchemaError as error:
        raise SplitError(str(error)) from None
    cut_dataset = CutDataset(proof, rest.layout, chosen, is_remade=rest.is_remade)
    with proof.cut.generators.preserved():
        for index, read in proof.reads.items():
            cut_dataset.require_same_without_pixels(read, index)
    line = f"{_line(proof, rest)}{_cost(proof) if rest.own else ''}{why}; {proof}"
    return Split(cut_dataset, rest.transform.as_of_store(), rest.recipe, chosen, line, device)


def _choice(proof: Proof, keep: Keep, folder: str) -> tuple[Keep, str]:
    """Return how images are stored, and a phrase that says why where nobody chose."""
    cut = proof.cut
    images = images_of(cut.patterns[0])
    sizes = {to_tensor(one.leaves[images[0]]).shape for one in proof.reads.values()} if images else set()
    if keep is not None or len(sizes) < 2 or len(cut.patterns) > 1:
        return keep, ""
    mean = sum(to_tensor(one.leaves[i]).numel() for one in proof.reads.values() for i in images) / len(proof.reads)
    total = int(mean * len(cut.dataset))
    fits = total < (free_bytes(Path(folder)) or 0) / 2 and total < memory_limit() / 2
    has_loader = any(place.path[-1] == ("attribute", "loader") for place in cut.places)
    chosen = "full" if fits or not has_loader else "encoded"
    other = "forms='full' stores all pixels" if chosen == "encoded" else "forms='encoded' stores the files' bytes"
    others = f"{other}, forms=256 smaller images" if has_loader else "forms=256 smaller images"
    return chosen, f"; forms={chosen!r}: {format_bytes(total)} of decoded images ({others})"


def _cost(proof: Proof) -> str:
    """Return a phrase if a random part that is made sample by sample takes longer than to read the sample, else ""."""
    cut, seconds = proof.cut, [0.0, 0.0]
    with cut.generators.preserved():
        for index, read in proof.reads.items():
            pattern = cut.patterns[cut.known(read) or 0]
            again = partial(cut.rebuild, pattern, from_parts(pattern, to_parts(pattern, read.leaves)))
            makes, best = (again, partial(operator.getitem, cut.dataset, index)), [math.inf, math.inf]
            for _, at in product(range(COST_REPEATS), range(2)):  # in turns
                cut.generators.seed(index)
                # the random part waits for nothing; of the time of day, on busy cores, it would have that of others
                timer = time.perf_counter if at else time.thread_time
                best[at] = min(best[at], timeit.timeit(makes[at], timer=timer, number=1))
            seconds = [one + other for one, other in zip(seconds, best, strict=True)]
            if sum(seconds) > COST_SECONDS:
                break
    if seconds[0] < COST_RATIO * seconds[1]:
        return ""
    return (
        f"; made sample by sample, the random part takes {seconds[0] / seconds[1]:.1f} times as long as a whole sample "
        "of the dataset with its files in memory, so a DataLoader may be faster: memfeed bench measures both"
    )


def _line(proof: Proof, rest: Rest) -> str:
    """Return a line that says which steps were cut, and where."""
    cut = proof.cut
    callees = list(dict.fromkeys(entry.function for pattern in cut.patterns for _, entry in pattern.calls))
    parts = []
    for callee in callees:
        fixed = listed(cut.fixed_names(callee), 80)
        names = cut.step_names(callee)
        parts.append(f"{cut.shown(callee.name)} before {names[0]}" + (f" (stored after {fixed})" if fixed else ""))
    counts = Counter(rest.batched)  # the views of one image have the same steps
    batched = [name if count == 1 else f"{name} ({count} times)" for name, count in counts.items()]
    each = [f"batched: {', '.join(batched)}"] if batched else []
    each += [f"sample by sample in one process, as they are: {listed(rest.own, 120)}"] if rest.own else []
    paths = dict.fromkeys(path for step in rest.recipe for path in step.on)
    fields = "" if isinstance(rest.layout, Named) else f", on {', '.join(map(display, paths))}"
    return f"split {listed(parts, 200)}; each epoch{fields}: {'; '.join(each)}"
