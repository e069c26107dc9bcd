"""Imitate a robot: two frames and the state go in, the next 16 actions come out. Each frame is stored once."""

import tempfile
from pathlib import Path

import torch

import memfeed
from memfeed import transforms as T

EPISODES, STEPS, BATCH_SIZE = 20, 60, 64


def recorded():
    """Yield the steps of episodes of several lengths, as a robot or a file of it would."""
    for episode in range(EPISODES):
        position, length = torch.rand(2), STEPS - episode % 7
        for _ in range(length):
            action = 0.2 * (torch.rand(2) - position)
            frame = torch.zeros(3, 32, 32, dtype=torch.uint8)
            x, y = (position * 31).int().tolist()
            frame[episode % 3, y, x] = 255
            yield {"frame": frame, "state": position.clone(), "action": action, "episode": episode}
            position = position + action


class Policy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.see = torch.nn.Conv2d(6, 8, 5, stride=4)
        self.act = torch.nn.Linear(8 * 7 * 7 + 2, 16 * 2)

    def forward(self, frames, state):  # [k, 2, 3, 30, 30], [k, 2]
        seen = torch.relu(self.see(frames.flatten(1, 2))).flatten(1)
        return self.act(torch.cat([seen, state], 1)).view(-1, 16, 2)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        store = memfeed.cache(recorded(), Path(folder) / "robot.mf", progress=False)
        view = store.windows({"frame": [-1, 0], "action": range(16)}, within="episode")
        train = view.subset(view.column("episode") < EPISODES - 2)
        # one crop for both frames of a sample
        augment = T.Compose([T.RandomCrop(30), T.Normalize([0.5] * 3, [0.25] * 3)], on="frame")
        loader = memfeed.Loader(train, BATCH_SIZE, shuffle=True, seed=0, transform=augment)
        policy = Policy()
        optimizer, losses = torch.optim.Adam(policy.parameters(), 3e-3), []
        for _ in range(4):
            for batch in loader:  # frame [k, 2, 3, 30, 30], action [k, 16, 2], action_mask [k, 16]
                error = (policy(batch["frame"], batch["state"]) - batch["action"]).square().mean(2)
                loss = error[batch["action_mask"]].mean()  # steps beyond the end of an episode do not count
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        assert losses[-1] < losses[0], losses
        assert len(train) == sum(STEPS - episode % 7 for episode in range(EPISODES - 2))
        assert view.nbytes == store.nbytes, "windows take no space"
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, {store}")
