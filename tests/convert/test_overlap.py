"""The budget line says so if neighbouring samples overlap."""

import msgspec
import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import memfeed
from memfeed.convert.budget import overlap_factor
from memfeed.convert.inputs import classify_input
from memfeed.convert.options import ConvertOptions
from memfeed.convert.probe import probe_input
from support import Made

TEXT = torch.from_numpy(np.random.default_rng(0).integers(0, 256, 3000))
GAPS = torch.where(TEXT % 7 == 0, torch.nan, TEXT / 7)
OPTIONS = ConvertOptions(progress=False)


class Windows(Dataset):
    """As in minGPT: all windows of a text, and the same moved by one."""

    def __init__(self, size=64, stride=1, shifted=True):
        self.text, self.size, self.stride, self.shifted = TEXT, size, stride, shifted

    def __len__(self):
        return (len(self.text) - self.size - 1) // self.stride

    def __getitem__(self, index):
        chunk = self.text[index * self.stride : index * self.stride + self.size + 1]
        return (chunk[:-1], chunk[1:]) if self.shifted else chunk[:-1]


def factor(dataset):
    given = classify_input(dataset)
    return overlap_factor(given, probe_input(given, OPTIONS))


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        (Windows(), 128),
        (Windows(shifted=False), 64),
        (Windows(stride=16), 8),
        (Windows(stride=32), 4),
        (Windows(stride=64), 1),
        (Made(lambda i: {"x": TEXT[i : i + 32].view(16, 2).float(), "label": torch.tensor(i)}, 500), 1),
        (Made(lambda i: {"x": TEXT[2 * i : 2 * i + 32].view(16, 2).float(), "label": torch.tensor(i)}, 500), 136 / 16),
        (Made(lambda i: GAPS[i : i + 64], 500), 64),
        (Made(lambda i: (GAPS[i : i + 64], GAPS[i + 1 : i + 65]), 500), 128),
        (Made(lambda i: torch.zeros(64), 500), 1),
        (Made(lambda i: torch.zeros(64, 0), 500), 1),
        (Made(lambda i: torch.full((64,), i), 500), 1),
        (Made(lambda i: (torch.rand(3, 16, 16, generator=torch.Generator().manual_seed(i)), i), 500), 1),
        (Made(lambda i: "text", 500), 1),
        (Made(lambda i: TEXT[i : i + 20 + i % 3], 500), 1),
        (Made([TEXT[:64]]), 1),
    ],
)
def test_the_factor_is_that_of_the_bytes(dataset, expected):
    assert factor(dataset) == pytest.approx(expected)


def test_a_neighbour_that_raises_says_nothing():
    def sample(i):
        if i == 1:
            raise OSError("broken")
        return TEXT[i : i + 64]

    given = classify_input(Made(sample, 50))
    skipping = msgspec.structs.replace(OPTIONS, on_error="skip")
    assert overlap_factor(given, probe_input(given, skipping)) == 1


@pytest.mark.parametrize("lazily", [False, True])
def test_the_budget_line_says_what_to_write(path, capsys, lazily):
    store = memfeed.cache(Windows(), path, workers=0, lazily=lazily)
    found = " ".join(capsys.readouterr().err.split())
    assert "each byte about 128 times: store the sequences whole" in found
    assert "Store.packed() or Store.windows() (docs/sequences.md)" in found
    store.finish()
