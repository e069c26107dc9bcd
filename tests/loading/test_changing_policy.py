"""Who makes the batches changes at random moments: the rows of every epoch stay those of a loader without a thread."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import memfeed
from memfeed.loading.epoch import PrefetchPolicy

N = 1500


class Changing(PrefetchPolicy):
    """Give the thread, and take it back, by chance."""

    def __init__(self, seed, share):
        super().__init__(allowed=True)
        self._chance, self._share = random.Random(seed), share

    def begin(self):
        self.settled, self.threaded = False, self._chance.random() < 0.5

    def note(self, wait, busy):
        if self._chance.random() >= self._share:
            return False
        self.threaded = not self.threaded
        return True


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    rows = torch.arange(N)
    tokens = [torch.arange(i % 7) + i for i in range(N)]
    samples = [{"row": row, "tokens": one} for row, one in zip(rows, tokens, strict=True)]
    return memfeed.cache(samples, tmp_path_factory.mktemp("changing") / "a.mf", progress=False)


def numbers(batch):
    return batch["row"].tolist(), batch["tokens"].values().tolist()


LOADERS = st.sampled_from(
    [
        {"batch_size": 7},
        {"batch_size": 64, "drop_last": True},
        {"batch_size": 5, "ranks": (1, 2)},
        {"bucket_by": memfeed.Tokens(60)},
    ]
)
PASSES = st.lists(st.sampled_from(["whole", "broken off", "resumed", "loaded in the midst"]), min_size=2, max_size=5)


@settings(max_examples=20)
@given(LOADERS, PASSES, st.sampled_from([0.05, 0.3, 1.0]), st.integers(0, 1000), st.sampled_from([1, 4]))
def test_every_pass_has_its_rows(store, options, passes, share, seed, prefetch):
    chance = random.Random(seed)

    def made(**more):
        loader = memfeed.Loader(store, shuffle=True, seed=seed, **{"prefetch_factor": prefetch, **options, **more})
        if "prefetch_factor" not in more:
            loader._epochs.policy = Changing(chance.random(), share)
        return loader

    loader, plain = made(), made(prefetch_factor=0)
    for kind in passes:
        epoch = loader.state_dict()["epoch"]
        plain.set_epoch(epoch)
        expected = [numbers(batch) for batch in plain]
        cut = chance.randrange(len(expected))
        if kind == "whole":
            found = [numbers(batch) for batch in loader]
            assert found == expected
            continue
        iterator, found = iter(loader), []
        for _ in range(cut):
            found.append(numbers(next(iterator)))
        state = loader.state_dict()
        if kind == "broken off":
            assert found == expected[:cut]
            loader.set_epoch(epoch + 1)
        elif kind == "resumed":
            loader = made()
            loader.load_state_dict(state)
            assert found + [numbers(batch) for batch in loader] == expected
        else:
            found += [numbers(batch) for batch, _ in zip(iterator, range(3), strict=False)]
            loader.load_state_dict(state)
            assert found == expected[: len(found)]
            assert found[:cut] + [numbers(batch) for batch in loader] == expected
