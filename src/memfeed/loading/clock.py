"""The epoch, the seed and the position that the next pass over a loader starts with."""

from __future__ import annotations

import sys

import torch
import torch.distributed

from memfeed.errors import LoaderError
from memfeed.loading.position import Position
from memfeed.system.buffers import shared_number


class EpochClock:
    """One answer to "which epoch is next", shared by a loader, its sampler and its ``collate_fn``.

    A pass takes its epoch, seed and position when its first batch is asked for, not when ``iter()`` is called: trainers
    call ``iter()`` first, and ``set_epoch`` or ``load_state_dict`` after it.

    Args:
        seed: the seed of order and keyed transforms; None draws one when the first pass starts.
        generator: where a missing seed is drawn from; None takes the seed of torch's default generator.
    """

    def __init__(self, seed: int | None, generator: torch.Generator | None = None) -> None:
        self.seed, self.generator = seed, generator
        self.epoch = 0  # of the newest pass, or what set_epoch was given after it started
        self.was_set = False  # whether set_epoch named the next epoch
        self._next = 0
        self._resume: tuple[int, Position | None] | None = None
        self._just_loaded, self._at_end, self._offset, self._is_lent = False, False, 0, False
        self._shared: torch.Tensor | None = None

    def set_epoch(self, epoch: int) -> None:
        """Start the next pass at the beginning of ``epoch``. A position loaded for the same epoch is kept.

        Raises LoaderError for a negative number.
        """
        if epoch < 0:
            raise LoaderError(f"found epoch {epoch}; expected 0 or more")
        if self._resume is None or self._resume[0] != epoch:
            self._resume = None
        self._next = self.epoch = epoch
        self._just_loaded, self.was_set = False, True
        self._share(epoch)

    def set_sampler_epoch(self, epoch: int) -> None:
        """Do the same for a framework that calls the sampler, and may count epochs in its own way after a resume."""
        resume = self._resume if self._just_loaded else None
        if resume is not None and epoch != resume[0] and not (self._at_end and epoch > resume[0]):
            self._offset = resume[0] - epoch
            print(
                f"memfeed: the sampler was set to epoch {epoch} after a state of epoch {resume[0]} was loaded; "
                f"{self._offset} is added to this and later epochs",
                file=sys.stderr,
            )
        self.set_epoch(epoch + self._offset)

    def load(self, epoch: int, position: Position | None, *, at_end: bool) -> None:
        """Continue ``epoch`` after ``position`` in the next pass; ``at_end`` says that nothing is left of the epoch."""
        self._resume, self._next, self.epoch = (epoch, position), epoch, epoch
        self._just_loaded, self._at_end, self._offset = True, at_end, 0

    @property
    def next(self) -> tuple[int, Position | None]:
        """The epoch and the position that the next pass starts with."""
        return (self._next, None) if self._resume is None else self._resume

    def move(self, position: Position | None) -> None:
        """Start the next pass after ``position`` of its epoch."""
        self._resume = (self.next[0], position)

    def start(self, world_size: int) -> tuple[int, Position | None]:
        """Start a pass: return its epoch and position, and draw the seed if there is none yet."""
        self.resolve_seed(world_size)
        (epoch, position), self._resume = self.next, None
        self.epoch, self._next = epoch, epoch + 1
        self._just_loaded = self.was_set = False
        self._share(epoch)
        return epoch, position

    def start_sampler(self, world_size: int) -> tuple[int, Position | None]:
        """Start a pass of the sampler. It has no epoch of its own if a loader reads through it."""
        if self._is_lent:
            self._is_lent = False
            return self.epoch, None
        return self.start(world_size)

    def lend(self) -> None:
        """Give the running epoch to the sampler: its next pass is the one that the loader has just started."""
        self._is_lent = True

    def resolve_seed(self, world_size: int) -> int:
        """Return the seed. A missing one is drawn from the generator, or is that of torch's default generator.

        With several ranks and no generator it is 0, the same on all ranks. The seed of the default generator is what
        `torch.manual_seed` set. No number is drawn from it, so that a program that is started again, restores torch's
        random state and skips the batches it has seen, finds the same order.
        """
        if self.seed is None:
            if self.generator is not None:
                self.seed = int(
                    torch.empty((), dtype=torch.int64, device="cpu").random_(generator=self.generator).item()
                )
            else:
                self.seed = 0 if world_size > 1 else torch.initial_seed()
        return self.seed

    def share(self) -> torch.Tensor:
        """Return the running epoch in memory that worker processes see, int64 []."""
        if self._shared is None:
            self._shared = shared_number(self.epoch)
        return self._shared

    def _share(self, epoch: int) -> None:
        if self._shared is not None:
            self._shared.fill_(epoch)


def joined_world_size() -> int:
    """Return the number of ranks of torch.distributed; 1 where it is not initialised."""
    ready = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if ready else 1
