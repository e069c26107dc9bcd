"""torch's DataLoader is found in a program that has replaced it, as test suites do that try another loader."""

import subprocess
import sys

import pytest
from torch.utils.data.dataloader import DataLoader

from memfeed.system import torch_loader

PROGRAM = """
import sys
import torch.utils.data

def load(*args, **options):
    import memfeed

    return memfeed.Loader(*args, **options)

class Own(torch.utils.data.DataLoader):
    pass

class Rows(torch.utils.data.Dataset):
    def __init__(self, read):
        self.read = read
    def __len__(self):
        return 6
    def __getitem__(self, index):
        return self.read(index)

class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(6))

theirs = torch.utils.data.DataLoader
torch.utils.data.DataLoader = torch.utils.data.dataloader.DataLoader = {name}
batches = load(Rows(torch.tensor), 2, cache=sys.argv[1])
assert [batch.tolist() for batch in batches] == [[0, 1], [2, 3], [4, 5]]
for dataset in (Rows(int), Rows(lambda i: torch.rand(2) + i), Rows(lambda i: [object()] * (i + 1)), Stream()):
    for worker_count in (0, 1):
        loader = load(dataset, 2, num_workers=worker_count, collate_fn=list)
        assert isinstance(loader, theirs) and not isinstance(loader, Own)
        print(len(list(loader)), end="")
"""


def run(program, *arguments):
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_is_torchs():
    assert torch_loader.DataLoader is DataLoader
    assert "torch.utils.data.dataloader" in run("import memfeed.system.torch_loader as t; print(t.DataLoader)")


@pytest.mark.parametrize("name", ["load", "Own"])
def test_a_program_that_has_replaced_it(name, tmp_path):
    assert run(PROGRAM.replace("{name}", name), str(tmp_path / "s.mf")) == "3" * 8
