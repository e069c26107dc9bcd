"""TorchRL: a replay buffer over memory-mapped tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement

from peers.rows import Batch, Epochs, Rows


def make(rows: Rows, batch_size: int, directory: Path) -> Iterable[Batch]:
    """Epochs of ``TensorDictReplayBuffer`` with LazyMemmapStorage, sampled without replacement. The shuffle is exact.

    No prefetch: with one batch ahead it was slower (410,000 rows/s instead of 480,000 at 3 KB, 9,000 instead of 10,700
    at 196 KB), with more of them slower still.
    """
    n = len(rows.labels)
    buffer = TensorDictReplayBuffer(
        storage=LazyMemmapStorage(n, scratch_dir=str(directory)),
        sampler=SamplerWithoutReplacement(drop_last=False),
        batch_size=batch_size,
    )
    buffer.extend(TensorDict(rows._asdict(), [n]))

    def epoch() -> Iterator[Batch]:
        for batch in buffer:  # until the sampler has run out of rows
            yield batch["images"], batch["labels"]

    return Epochs(epoch)
