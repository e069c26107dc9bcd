"""What `torch.utils.data.get_worker_info` says in a worker, and whether samples ask for it.

The seed of a worker of a DataLoader is another one in each epoch, and so may be the worker that reads a sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data._utils import worker as torch_worker

_asked = 0


class _CountingInfo(torch_worker.WorkerInfo):
    """Counts how often the number of the worker or its seed is asked for."""

    def __getattribute__(self, name: str) -> Any:
        global _asked
        if name in ("id", "seed"):
            _asked += 1
        return super().__getattribute__(name)


def set_worker_info(worker: int, worker_count: int, seed: int, dataset: Any) -> None:
    """Let this process be a worker for `get_worker_info`."""
    info = _CountingInfo(id=worker, num_workers=worker_count, seed=seed, dataset=dataset)
    torch_worker._worker_info = info  # torch has no public way to set it


def times_asked() -> int:
    """Return how often this process has asked for the number or the seed of its worker."""
    return _asked


@contextmanager
def as_another_worker() -> Iterator[None]:
    """Let this worker have another number and another seed, as in another epoch."""
    info: Any = torch_worker._worker_info
    if info is None:
        yield
        return
    set_worker_info((info.id + 1) % info.num_workers, info.num_workers, info.seed + info.num_workers, info.dataset)
    try:
        yield
    finally:
        torch_worker._worker_info = info
