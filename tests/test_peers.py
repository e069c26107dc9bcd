"""Every peer that is installed gives whole, shuffled epochs. Each runs in a process of its own.

In one process they would disturb each other (threads, forks of threads, torch's settings), and what they warn of is
theirs: the processes have no warnings that are errors.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from peers import PEERS, Rows, available, check, missing

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def some_rows() -> Rows:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (200, 3, 8, 8), dtype=torch.uint8, generator=generator)
    return Rows(images, torch.arange(200))


def two_epochs(name: str, directory: Path) -> None:
    rows = some_rows()
    epochs = PEERS[name](rows, 16, directory)
    first, second = check(name, rows, epochs), check(name, rows, epochs)
    assert first != second, f"{name}: both epochs in one order"
    assert first != sorted(first), f"{name}: not shuffled"


@pytest.mark.long
@pytest.mark.parametrize("name", PEERS)
def test_two_epochs(name, tmp_path):
    if name in missing():
        pytest.skip(f"{name} is not installed: it comes with the extra 'peers' (make peers)")
    command = [sys.executable, __file__, name, str(tmp_path / "rows")]
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS), "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_each_peer_is_there_or_missing():
    assert set(available()) | set(missing()) == set(PEERS)
    assert not set(available()) & set(missing())
    assert all(available().values())


def test_check_gives_the_order():
    rows = some_rows()
    ids = torch.randperm(200)
    batches = [(rows.images[part], part) for part in ids.split(16)]
    assert check("it", rows, batches) == ids.tolist()


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (range(199), "it: rows missing: [199]"),
        ([*range(200), 7], "it: rows more than once: [7]"),
        ([*range(199), 200], "it, batch 0: labels [200] are of no row"),
    ],
)
def test_check_finds_rows_that_are_missing_or_too_many(ids, message):
    rows = some_rows()
    labels = torch.tensor(list(ids))
    with pytest.raises(AssertionError) as caught:
        check("it", rows, [(rows.images[labels.clamp(max=199)], labels)])
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (lambda x, y: (x, y.flip(0)), "it, batch 0: images that do not belong to their labels"),
        (lambda x, y: (x.float(), y), "it, batch 0: images are torch.float32, expected uint8"),
        (lambda x, y: (x, y.int()), "it, batch 0: labels are torch.int32, expected int64"),
        (lambda x, y: (x, y[:, None]), "it, batch 0: labels are [200, 1], expected [k]"),
        (lambda x, y: (x.numpy(), y), "it, batch 0: images are a <class 'numpy.ndarray'>, expected a tensor"),
    ],
)
def test_check_finds_batches_that_differ(batch, message):
    rows = some_rows()
    with pytest.raises(AssertionError) as caught:
        check("it", rows, [batch(*rows)])
    assert str(caught.value).startswith(message)


if __name__ == "__main__":
    two_epochs(sys.argv[1], Path(sys.argv[2]))
