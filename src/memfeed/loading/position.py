"""Positions in an epoch: where a batch ends, where ``skip`` and ``rewind`` lead, where a saved state resumes.

A state is a dict of plain ints and strings, which JSON and `torch.distributed.checkpoint` keep. A clock has the epoch,
the seed and the position that the next pass over a loader starts with.
"""

from __future__ import annotations

import json
import operator
import sys
from typing import Any, NamedTuple

import torch

from memfeed.errors import LoaderError, brief
from memfeed.loading.ranks import LoaderName, draw_seed, seed_of_ranks
from memfeed.order.pieces import RankShards
from memfeed.system.buffers import shared_number
from memfeed.system.messages import say_once

VERSION = 1
FINISHED = "_iterator_finished"
"""torchdata's name for a state whose epoch is over. Accelerate sets it in a state that it saves."""


class SamplerPosition(NamedTuple):
    """A position in the epoch of a user's sampler.

    Args:
        row: rows drawn before it (of a batch sampler: batches).
        generators: the states of the random generators before the epoch, as JSON.
        drawn_hash: the hash of the rows that were drawn; empty where they are not known yet.
    """

    row: int
    generators: str
    drawn_hash: str


Position = int | SamplerPosition
"""A position in an epoch. In our own orders: how many rows all ranks together have read before it."""


def rows_before(position: Position | None) -> int:
    """Return how many rows (of a batch sampler: batches) come before ``position``; None is the beginning."""
    return position.row if isinstance(position, SamplerPosition) else position or 0


def step_of(row: int, begin: int, stride: int) -> int:
    """Return how many steps of ``stride`` rows lead from ``begin`` to ``row``, a partial last step included."""
    return -((begin - row) // stride)


def moved(
    epoch: int, current: Position | None, begin: int, batches: int, *, shards: RankShards | None, stride: int
) -> Position:
    """Return the position ``batches`` batches after ``current``; the steps of the epoch are counted from row ``begin``.

    ``shards`` is None for a user's sampler; a step is then ``stride`` rows (of a batch sampler: one batch). Raises
    LoaderError for a position outside of the epoch.
    """
    row, stride = rows_before(current), stride if shards is None else shards.stride
    target = begin + (step_of(row, begin, stride) + batches) * stride
    if target < 0:
        raise LoaderError(
            f"found rewind({-batches}) at batch {row // stride} of epoch {epoch}; expected at most as many as "
            "there were: call set_epoch to return to an earlier epoch"
        )
    if shards is None:
        return SamplerPosition(target, current.generators if isinstance(current, SamplerPosition) else "", "")
    left = step_of(shards.end(begin), row, stride)
    if batches > left:
        raise LoaderError(f"found skip({batches}) with {left} batches left in epoch {epoch}; expected at most {left}")
    return min(target, shards.rows)


def to_state(epoch: int, position: Position | None, seed: int | None, identity: dict[str, Any]) -> dict[str, Any]:
    """Return a position in an epoch as a state. ``identity`` is what must be the same where the state is loaded.

    A seed that is not drawn yet is an empty string.
    """
    sampler = ""
    if isinstance(position, SamplerPosition):
        sampler = json.dumps({"start": position.generators, "hash": position.drawn_hash})
    return {
        "version": VERSION,
        "epoch": epoch,
        "row": rows_before(position),
        "sampler": sampler,
        "seed": "" if seed is None else seed,
        FINISHED: False,
        **identity,
    }


def from_state(state: Any, identity: dict[str, Any], last_row: int | None) -> tuple[int, Position | None]:
    """Return the epoch and the position of a state.

    Raises LoaderError for a state of something else, and says what differs. ``last_row`` is the end of an epoch where
    that is known.
    """
    wanted = {"version", "epoch", "row", "sampler", "seed", *identity}
    if not isinstance(state, dict) or not wanted <= set(state):
        found = sorted(map(str, state)) if isinstance(state, dict) else type(state).__name__
        raise LoaderError(f"found a state of {found}; expected the dict that state_dict() gave, with {sorted(wanted)}")
    if state["version"] != VERSION:
        raise LoaderError(f"found a state of version {state['version']!r}; expected {VERSION}")
    for name, value in identity.items():
        if state[name] != value:
            raise LoaderError(
                f"found a state with {name} {state[name]!r}; this loader has {name} {value!r}; expected a state of the "
                "same store, view, order and seed: make the loader as it was made then"
            )
    epoch, row = state["epoch"], state["row"]
    if not _is_count(epoch) or not _is_count(row) or (last_row is not None and row > last_row):
        raise LoaderError(f"found a state at epoch {epoch!r}, row {row!r}; expected whole numbers within the epoch")
    if state.get(FINISHED):
        return epoch + 1, None
    if not state["sampler"]:
        return epoch, row or None
    try:
        kept = json.loads(state["sampler"])
        return epoch, SamplerPosition(row, str(kept["start"]), str(kept["hash"])) if row else None
    except (ValueError, KeyError, TypeError) as error:
        raise LoaderError(f"found a state whose sampler cannot be read ({error}); expected state_dict()'s") from error


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


NO_EPOCH = -1
"""The running epoch that a ``collate_fn`` sees before somebody has set one, or has begun a pass over the sampler."""


class EpochClock:
    """The counter of epochs that a loader, its sampler and its ``collate_fn`` share.

    A pass takes its epoch, seed and position when its first batch is asked for, not when ``iter()`` is called: trainers
    call ``iter()`` first, and ``set_epoch`` or ``load_state_dict`` after it.

    Args:
        seed: the seed of order and keyed transforms; None draws one when the first pass starts.
        generator: where a missing seed is drawn from; None is torch's default generator.
        name: names a missing seed where several ranks share it.
    """

    def __init__(
        self, seed: int | None, generator: torch.Generator | None = None, name: LoaderName | None = None
    ) -> None:
        self.seed, self._given, self._generator, self._name = seed, seed, generator, name or LoaderName("", 0)
        self.has_drawn_order = True  # False where the order of the rows does not depend on the seed
        self._draws, self._is_outdated = 0, False  # outdated: the generator was replaced, so a new seed must be drawn
        self.epoch = 0  # of the newest pass, or what set_epoch was given after it started
        self.was_set = self.was_loaded = False  # whether set_epoch, or a state, named the next epoch
        self.next: tuple[int, Position | None] = (0, None)  # the epoch and the position that the next pass starts with
        self._at_end, self._offset, self._is_lent = False, 0, False
        self._shared: torch.Tensor | None = None

    def set_epoch(self, epoch: int) -> None:
        """Start the next pass at the beginning of ``epoch``. A position loaded for the same epoch is kept.

        Raises LoaderError for what is no int, for a negative number, and for one that needs more than 63 bits.
        """
        try:
            number = operator.index(epoch)  # of NumPy and torch too, and a state has ints
        except TypeError:
            number = -1
        if not 0 <= number < 1 << 63:
            raise LoaderError(f"found epoch {brief(epoch)}; expected 0 to 2**63 - 1, an int")
        if self.next[0] != number:
            self.next = (number, None)
        self.epoch = number
        self.was_loaded, self.was_set = False, True
        self._share(number)

    def begin_at(self, epoch: int) -> None:
        """Start the first pass at ``epoch``, unless somebody sets another one before it."""
        self.next, self.epoch = (epoch, None), epoch

    def set_sampler_epoch(self, epoch: int) -> None:
        """Do the same for a framework that calls the sampler, and may count epochs in its own way after a resume."""
        loaded, _ = self.next
        if self.was_loaded and epoch != loaded and not (self._at_end and epoch > loaded):
            self._offset = loaded - epoch
            print(
                f"memfeed: the sampler was set to epoch {epoch} after a state of epoch {loaded} was loaded; "
                f"{self._offset} is added to this and later epochs",
                file=sys.stderr,
            )
        self.set_epoch(epoch + self._offset)

    def load(self, epoch: int, position: Position | None, *, at_end: bool) -> None:
        """Continue ``epoch`` after ``position`` in the next pass; ``at_end``: nothing may be left of the epoch."""
        self.next, self.epoch = (epoch, position), epoch
        self.was_loaded, self._at_end, self._offset = True, at_end, 0

    def load_seed(self, seed: int | None) -> None:
        """Go on with the seed of a state; None if it was not drawn yet."""
        self.seed, self._is_outdated = seed, False

    @property
    def generator(self) -> torch.Generator | None:
        """The generator that the seed is drawn from; one that was seeded with the seed, if that was given."""
        if self._generator is None and self._given is not None:
            # not None, because Accelerate would put a generator of its own there
            self._generator = torch.Generator(device="cpu").manual_seed(self._given % 2**63)
        return self._generator

    @generator.setter
    def generator(self, generator: torch.Generator | None) -> None:
        if generator is self._generator:
            return
        if self._given is not None:
            raise LoaderError(
                f"found a generator for a loader with seed={self._given}, which decides its order; expected one of "
                "them: leave seed= out, and the seed is drawn from the generator"
            )
        self._generator, self._is_outdated = generator, True

    def move(self, position: Position | None) -> None:
        """Start the next pass after ``position`` of its epoch."""
        self.next = (self.next[0], position)

    def start(self, world_size: int) -> tuple[int, Position | None]:
        """Start a pass: return its epoch and position, and draw the seed if there is none yet."""
        epoch, position = self.next
        if self._is_outdated and position is None:
            self.seed, self._is_outdated = None, False
        if self.seed is None and self.was_set and epoch > 1 and self.has_drawn_order:
            say_once(
                f"memfeed: the first epoch of a loader without seed= is {epoch}: its order is not that of an earlier "
                "run; to go on with one, pass the same seed= in both, or call load_state_dict"
            )
        self.resolve_seed(world_size)
        self.next, self.epoch = (epoch + 1, None), epoch
        self.was_loaded = self.was_set = False
        return epoch, position

    def start_sampler(self, world_size: int) -> tuple[int, Position | None]:
        """Start a pass of the sampler. It has no epoch of its own if a loader reads through it."""
        if self._is_lent:
            self._is_lent = False
            return self.epoch, None
        epoch, position = self.start(world_size)
        self._share(epoch)
        return epoch, position

    def lend(self) -> None:
        """Give the running epoch to the sampler: its next pass is the one that the loader has just started."""
        self._is_lent = True

    def resolve_seed(self, world_size: int) -> int:
        """Return the seed. A missing one is drawn, by `seed_of_ranks` if there are several ranks, and kept."""
        if self.seed is None:
            own = self._generator
            self.seed = draw_seed(own) if world_size == 1 else seed_of_ranks(self._name, self._draws, own)
            self._draws += 1
        return self.seed

    def share(self) -> torch.Tensor:
        """Return the epoch that was set or that the sampler has begun, in memory that workers see too, int64 []."""
        if self._shared is None:
            self._shared = shared_number(self.epoch if self.was_set else NO_EPOCH)
        return self._shared

    def _share(self, epoch: int) -> None:
        if self._shared is not None:
            self._shared.fill_(epoch)
