"""The seed of a loader that was given none: drawn from a generator, on several ranks by rank 0 for all of them."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import torch
import torch.distributed

from memfeed.errors import LoaderError
from memfeed.system.messages import say_once

WAIT_SECONDS = 600.0  # that a rank waits for rank 0 to begin its first pass over the same loader

_made: Counter[tuple[str, int | None]] = Counter()  # loaders, by what they read and the rank given


class LoaderName(NamedTuple):
    """Names a loader, alike on every rank that makes the same loaders in the same order.

    Args:
        reads: what the loader reads.
        number: how many loaders that read the same were made before it in this process.
    """

    reads: str
    number: int


def next_name(reads: str, rank: int | None) -> LoaderName:
    """Return the name of a loader that is being made, with the ``rank`` that it was given."""
    _made[reads, rank] += 1
    return LoaderName(reads, _made[reads, rank] - 1)


def draw_seed(generator: torch.Generator | None) -> int:
    """Return a seed drawn from ``generator``, or from torch's default one, as DataLoader draws its base seed."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator).item())


def joined_world_size() -> int:
    """Return the number of ranks of torch.distributed; 1 where it is not initialised, and in a worker of DataLoader."""
    ready = torch.distributed.is_available() and torch.distributed.is_initialized()
    # a forked worker shares the connections of its rank, and must not use them
    return torch.distributed.get_world_size() if ready and torch.utils.data.get_worker_info() is None else 1


def seed_of_ranks(name: LoaderName, draws: int, generator: torch.Generator | None) -> int:
    """Return the seed that a loader has on each of several ranks; ``draws`` counts those it had before.

    With torch.distributed that is what rank 0 has drawn. It writes it into the store of the job's process group, where
    the others read it: no collective, so rank 0 may be the only one that reads a loader. Without torch.distributed, and
    without a generator, it is the loader's number. Raises LoaderError where rank 0 does not begin the loader.
    """
    if joined_world_size() > 1:
        from memfeed.loading.exchange import default_store  # a plain training run does without it

        return agreed_seed(default_store(), torch.distributed.get_rank(), name, draws, draw_seed(generator))
    if generator is not None:
        return draw_seed(generator)
    if name.number:
        say_once(
            "memfeed: torch.distributed is not initialised, so a loader without seed= takes the number of like loaders "
            "made before it as its seed; this is right if every rank makes the same loaders; else pass seed="
        )
    return name.number


def agreed_seed(store: Any, rank: int, name: LoaderName, draws: int, drawn: int) -> int:
    """Return the seed that rank 0 has ``drawn``, through ``store``, a `torch.distributed.Store` of all ranks."""
    from memfeed.loading.exchange import missing_keys

    key = f"memfeed/seed/{name.reads}/{name.number}/{draws}"
    if rank == 0:
        store.set(key, str(drawn))
        return drawn
    if missing_keys(store, [key], WAIT_SECONDS):
        raise LoaderError(
            f"found no seed from rank 0 for a loader of {name.reads} (on rank {rank} {name.number} like it were made "
            f"before) within {WAIT_SECONDS:g} s; expected every rank to make the same loaders in the same order, and "
            "rank 0 to read this one: else pass seed="
        )
    return int(store.get(key))
