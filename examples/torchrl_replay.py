"""Learn offline from what a TorchRL replay buffer dumped: a storage for 1,000 steps of which 700 are filled."""

import tempfile
from pathlib import Path

import torch
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, ReplayBuffer

import memfeed

SPACE, STEPS, BATCH_SIZE = 1000, 700, 64

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        buffer = ReplayBuffer(
            storage=LazyMemmapStorage(SPACE, scratch_dir=Path(folder) / "scratch"), batch_size=BATCH_SIZE
        )
        for begin in range(0, STEPS, 100):  # what a collector does
            steps = torch.arange(begin, begin + 100)
            observed, rewards = torch.randn(100, 4), torch.randn(100, 1)
            buffer.extend(TensorDict({"observation": observed, "reward": rewards, "step": steps}, batch_size=[100]))
        buffer.dumps(Path(folder) / "dump")

        store = memfeed.open(Path(folder) / "dump" / "storage")
        assert len(store) == STEPS, f"found {len(store)} rows; expected only the {STEPS} that are filled"
        loader = memfeed.Loader(store, batch_size=BATCH_SIZE, shuffle=True)
        value = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(value.parameters(), lr=0.01)
        for _ in range(2):
            seen = []
            for batch in loader:  # a TensorDict of batch_size [64]
                optimizer.zero_grad()
                (value(batch["observation"]) - batch["reward"]).square().mean().backward()
                optimizer.step()
                seen += batch["step"].tolist()
            assert sorted(seen) == list(range(STEPS)), "an epoch lost or doubled steps"
