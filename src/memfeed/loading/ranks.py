"""The ranks of a job: the number of this process, messages to the others, and the seed that all of them draw.

A loader that was given no seed draws one from a generator, on several ranks rank 0 does it for all of them. Messages go
through the store of the job's process group. This needs no device and no collective. A rank that does not answer is
reported as missing, and the waiting time is limited.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed

from memfeed.errors import LoaderError
from memfeed.system.messages import say_once

WAIT_SECONDS = 600.0  # that a rank waits for rank 0 to begin its first pass over the same loader
GRACE_SECONDS = 30.0  # in which the verdict of rank 0 about missing ranks reaches the others
LONGEST_PAUSE = 0.1  # seconds between two looks; many ranks ask one server

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


def seed_of_ranks(name: LoaderName, draws: int, generator: torch.Generator | None) -> int:
    """Return the seed that a loader has on each of several ranks; ``draws`` counts those it had before.

    With torch.distributed that is what rank 0 has drawn. It writes it into the store of the job's process group, where
    the others read it: no collective, so rank 0 may be the only one that reads a loader. Without torch.distributed, and
    without a generator, it is the loader's number. Raises LoaderError where rank 0 does not begin the loader.
    """
    if joined_world_size() > 1:
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


def is_joined() -> bool:
    """Return True if this process is a rank of torch.distributed."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def joined_world_size() -> int:
    """Return the number of ranks of torch.distributed; 1 where it is not initialised, and in a worker of DataLoader."""
    # a forked worker shares the connections of its rank, and must not use them
    return torch.distributed.get_world_size() if is_joined() and torch.utils.data.get_worker_info() is None else 1


def present_ranks() -> tuple[int, int]:
    """Return rank and world size of this process: those of torch.distributed, else of torchrun or accelerate."""
    if is_joined():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    rank, world_size = launched_ranks()
    if world_size > 1:
        say_once(
            f"memfeed: torch.distributed is not initialised; a loader reads as rank {rank} of {world_size}, as the "
            "launcher's RANK and WORLD_SIZE say. ranks=(0, 1) reads all rows"
        )
    return rank, world_size


def launched_ranks() -> tuple[int, int]:
    """Return rank and world size that torchrun or accelerate gave this process; (0, 1) if none of them started it."""
    rank, world_size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    launched = "LOCAL_RANK" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ
    if not launched or not rank.isdigit() or not world_size.isdigit() or not int(rank) < int(world_size):
        return 0, 1
    return int(rank), int(world_size)


def default_store() -> Any:
    """Return the `torch.distributed.Store` of the process group of all ranks."""
    return torch.distributed.distributed_c10d._get_default_store()


def missing_keys(store: Any, keys: Sequence[str], seconds: float) -> list[int]:
    """Wait until all ``keys`` are set; return the places of those that are not after ``seconds``."""
    deadline, pause, missing = time.monotonic() + seconds, 0.001, list(range(len(keys)))
    # store.wait would hold the lock of the store, which other threads of torch need
    while missing := [place for place in missing if not store.check([keys[place]])]:
        if time.monotonic() > deadline:
            break
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
    return missing


def verdict_of_ranks(
    prefix: str, answer: Any, judge: Callable[[Sequence[Any]], Any], seconds: float, verdict_seconds: float
) -> Any:
    """Return the verdict of rank 0 on the ``answer`` of each rank, the same on each; None where rank 0 is missing.

    Args:
        prefix: names the question in the store; each question has another one.
        answer: of this rank; JSON, and so is what ``judge`` returns.
        judge: called on rank 0 with the answers of all ranks, None for a rank that has not answered.
        seconds: how long rank 0 waits for the answers.
        verdict_seconds: how long the other ranks wait for rank 0.
    """
    store, rank, world_size = default_store(), torch.distributed.get_rank(), torch.distributed.get_world_size()
    keys = [f"{prefix}/{one}" for one in range(world_size)]
    store.set(keys[rank], json.dumps(answer))
    verdict_key = f"{prefix}/verdict"
    if rank:
        missing = missing_keys(store, [verdict_key], verdict_seconds)
        return None if missing else json.loads(store.get(verdict_key))
    missing = missing_keys(store, keys, seconds)
    verdict = judge([None if one in missing else json.loads(store.get(key)) for one, key in enumerate(keys)])
    store.set(verdict_key, json.dumps(verdict))
    return verdict
