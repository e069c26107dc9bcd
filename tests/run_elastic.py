"""`make elastic`: torchrun --nnodes=1:3, to which a machine is added, and of which one is lost, within epochs.

Each "machine" is an agent of torchrun with one worker. The workers run examples/torchrun_elastic.py, which asserts that
every row counts once in each epoch of what was trained. Takes a minute or two: agents are slow to notice.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import memfeed

SCRIPT = Path(__file__).parents[1] / "examples" / "torchrun_elastic.py"
ROWS, STEP_SECONDS, LIMIT_SECONDS = 250, 1.5, 480.0


def agent(folder: Path) -> subprocess.Popen[bytes]:
    # the rendezvous is a file: no port that somebody else may take
    options = ["--nnodes=1:3", "--nproc-per-node=1", "--max-restarts=20", "--rdzv-id=elastic", "--rdzv-backend=c10d"]
    options += [f"--rdzv-endpoint={folder}/rendezvous", "--rdzv-conf=store_type=file,last_call_timeout=3"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(SCRIPT), str(folder), str(STEP_SECONDS)]
    # else torch's agents wait in vain for the address of an older first agent, which it does not write again
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return subprocess.Popen(command, start_new_session=True, env=environment)


def history(folder: Path) -> list[int]:
    path = folder / "checkpoint"
    return torch.load(path)["history"] if path.exists() else []


def wait_until(condition: Callable[[], bool], running: list[subprocess.Popen[bytes]], what: str) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert all(one.poll() in (None, 0) for one in running), f"an agent ended before {what}"
        assert time.monotonic() < deadline, f"{what}: not within {LIMIT_SECONDS:g} s"
        time.sleep(0.2)


def lose(machine: subprocess.Popen[bytes]) -> None:
    """Kill an agent and its worker, which has a session of its own."""
    children = Path(f"/proc/{machine.pid}/task/{machine.pid}/children").read_text().split()
    for pid in [machine.pid, *map(int, children)]:
        os.kill(pid, signal.SIGKILL)
    machine.wait()


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, agents = Path(name), []
        memfeed.cache((torch.randn(ROWS, 8), torch.arange(ROWS)), folder / "data.mf", progress=False)
        try:
            agents.append(agent(folder))
            wait_until(lambda: history(folder)[-1:] == [1], agents, "one worker trains")
            agents.append(agent(folder))
            wait_until(lambda: history(folder)[-1:] == [2], agents, "a second one joins")
            lose(agents.pop())
            wait_until(lambda: history(folder)[-2:] == [2, 1], agents, "the first one goes on alone")
            wait_until((folder / "done").exists, agents, "both epochs are trained")
            agents[0].wait(120)
        finally:
            for one in agents:
                if one.poll() is None:
                    lose(one)
        print(f"every row counts once in each epoch; numbers of workers: {(folder / 'done').read_text()}")


if __name__ == "__main__":
    main()
