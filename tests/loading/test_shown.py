"""A loader in one line."""

import torch

import memfeed
from memfeed.loading.shown import count_text, placement_text


class Endless:
    def __iter__(self):
        return iter(range(4))


def test_the_line_of_a_loader():
    loader = memfeed.Loader({"x": torch.arange(8)}, 2, shuffle=True, seed=3)
    assert repr(loader) == (
        "Loader(8 rows, batch_size=2, shuffle=True, seed=3, 4 batches an epoch, device=cpu, placement='auto')"
    )
    next(iter(loader))
    assert placement_text(loader) == "mapped: x"


def test_a_rank_and_a_sampler_without_a_length():
    loader = memfeed.Loader({"x": torch.arange(8)}, 2, seed=3, ranks=(1, 2))
    assert "rank 1 of 2, 2 batches an epoch" in repr(loader)
    assert count_text(memfeed.Loader({"x": torch.arange(8)}, 2, sampler=Endless())) == "?"
