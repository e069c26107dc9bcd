"""Samples that are made again one by one, by the key of each."""

import random
import sys

import numpy as np
import pytest
import torch
from idiom import Rows
from torchvision.transforms import v2

from memfeed.random import Keys
from memfeed.schema.infer import infer
from memfeed.schema.samples import FinishedSamples
from memfeed.schema.tree import types_of
from memfeed.splitting.proof import prove
from memfeed.splitting.remake import Remake
from memfeed.splitting.stored_layout import named

N = 6


class Jitter:
    bad = -1

    def __call__(self, image):
        pixels = torch.from_numpy(np.array(image)).float()
        if pixels[0, 0, 2] == self.bad:
            raise ZeroDivisionError("no gain")
        return pixels * random.random() + float(np.random.rand()) + torch.rand(())


@pytest.fixture(scope="module")
def made():
    step = Jitter()
    proof = prove(Rows(v2.Compose([v2.RandomCrop(24), step])), range(4))
    layout, reads = named(proof.cut.patterns), [proof.cut.read(row) for row in range(N)]
    samples = [read.sample for read in reads]
    remake = Remake(proof.cut, layout, infer(samples).schema, types_of(samples), "RandomCrop, Jitter")
    stored = [layout.stored(0, read.leaves) for read in reads]
    batch = {"0": torch.stack([one["0"] for one in stored]), "1": torch.tensor([one["1"] for one in stored])}
    return remake, step, batch


def keys(*rows, seed=0, epoch=0, occurrence=0):
    return Keys(seed, epoch, torch.tensor(rows), occurrence)


def test_a_sample_depends_on_its_key_alone(made):
    remake, _, batch = made
    images, labels = remake.apply(batch, keys(*range(N)))
    assert images.shape == (N, 24, 24, 3)
    assert labels.tolist() == list(range(N))
    again, _ = remake.apply({name: leaf[[4, 1]] for name, leaf in batch.items()}, keys(4, 1))
    assert torch.equal(again, images[[4, 1]])


@pytest.mark.parametrize("other", [{"seed": 1}, {"epoch": 1}, {"occurrence": 1}])
def test_other_keys_give_other_samples(other, made):
    remake, _, batch = made
    one, two = (remake.apply(batch, keys(*range(N), **options))[0] for options in ({}, other))
    assert not any(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_the_generators_of_the_user_are_left_as_they_were(made):
    remake, step, batch = made
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    remake.apply(batch, keys(*range(N)))
    step.bad = 9
    try:
        with pytest.raises(ZeroDivisionError):
            remake.apply(batch, keys(*range(N)))
    finally:
        step.bad = -1
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
def test_an_error_names_the_row(made):
    remake, step, batch = made
    step.bad = int(batch["0"][2, 2, 0, 0])
    flat = {**batch, "0": batch["0"][:, :, :1, :1].expand_as(batch["0"]).contiguous()}
    try:
        with pytest.raises(ZeroDivisionError) as raised:
            remake.apply(flat, keys(10, 11, 12, 13, 14, 15))
    finally:
        step.bad = -1
    assert "in the random steps RandomCrop, Jitter, on row 12 of the store" in raised.value.__notes__


def test_samples_are_given_uncollated_where_they_are_wanted(made):
    remake, _, batch = made
    samples = remake.giving_samples().apply(batch, keys(*range(N)))
    assert isinstance(samples, FinishedSamples)
    images, _ = remake.apply(batch, keys(*range(N)))
    assert all(torch.equal(sample[0], image) for sample, image in zip(samples, images, strict=True))
    assert not remake.gives_samples
