"""Exchange messages between the ranks of torch.distributed, through the store of the job's process group.

This needs no device and no collective. A rank that does not answer is reported as missing, and the waiting time is
limited.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed

GRACE_SECONDS = 30.0  # in which the verdict of rank 0 about missing ranks reaches the others
LONGEST_PAUSE = 0.1  # seconds between two looks; many ranks ask one server


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
