"""The judge calls wrong what is wrong, and right what is right: loaders that differ from the dataset in one thing."""

import random

import pytest
import torch
from idiom import ROWS, Rows, Tensors, mask_of
from judge import judge, memfeed_loader, seed
from judge_statistics import draw_of, outcomes_differ
from plain_loaders import plain_loader
from torch.utils.data import default_collate
from torchvision import transforms as v1

from short_form import short_form


def pipeline(*more):
    return v1.Compose([v1.RandomCrop(28), v1.RandomHorizontalFlip(), v1.ToTensor(), *more])


class Pairs(Rows):
    """(image, mask): both are flipped, or none."""

    def __getitem__(self, index):
        image, mask = torch.from_numpy(self.images[index]), torch.from_numpy(mask_of(self.images[index]))
        return (image.flip(1), mask.flip(1)) if random.random() < 0.5 else (image, mask)


class Noisy(Rows):
    """(image, image) with the same noise in both."""

    def __getitem__(self, index):
        image = torch.from_numpy(self.images[index]).float() + torch.randn(())
        return image, image.clone()


class Flips(Tensors):
    """Two flips of one image, each by a draw of its own."""

    def __getitem__(self, index):
        image = self.load(index)
        image = image.flip(-1) if random.random() < 0.5 else image
        return (image.flip(-2) if random.random() < 0.5 else image), self.labels[index]


class TiedFlips(Tensors):
    """Both flips by one draw."""

    def __getitem__(self, index):
        image = self.load(index)
        return (image.flip(-1, -2) if random.random() < 0.5 else image), self.labels[index]


class Blanked(Tensors):
    """A rare branch: one draw of ten is black."""

    def __getitem__(self, index):
        image = self.load(index)
        return (image * 0 if random.random() < 0.1 else image), self.labels[index]


class Inverted(Tensors):
    """A rare branch in jittered images: one draw of ten is inverted."""

    def __getitem__(self, index):
        image = (self.load(index) * random.uniform(0.5, 1.0)).to(torch.uint8)
        return (255 - image if random.random() < 0.1 else image), self.labels[index]


def identity(image):
    return image


def original(cls):
    return lambda: cls(pipeline())


def frozen(samples):
    """Return a change that gives the first draw of each row in every epoch."""
    return lambda sample, row, epoch: samples.setdefault(row, sample)


def one_flipped(sample, row, epoch):
    image, mask = sample
    return image, mask.flip(1) if random.random() < 0.5 else mask


def others_noise(sample, row, epoch):
    image, other = sample
    return image, other - other.mean() + image.mean() + torch.randn(())


WRONG = {
    "augments only one of the pair": (Pairs, plain_loader(one_flipped)),
    "draws noise for each of the pair": (Noisy, plain_loader(others_noise)),
    "freezes the draw": (Rows, plain_loader(frozen({}))),
    "freezes a flip": (Pairs, plain_loader(frozen({}))),
    "drops a rare branch": (Blanked, lambda dataset, path, epochs: plain_loader()(Tensors(identity), path, epochs)),
    "ties two steps": (Flips, lambda dataset, path, epochs: plain_loader()(TiedFlips(), path, epochs)),
    "another label in one row": (Rows, plain_loader(lambda s, row, epoch: (s[0], s[1] + (row == 7)))),
    "the label of another row": (Rows, plain_loader(lambda s, row, epoch: (s[0], (row + epoch // 3) % 10))),
    "another dtype": (Rows, plain_loader(lambda s, row, epoch: (s[0].double(), s[1]))),
    "one level too bright": (Pairs, plain_loader(lambda s, row, epoch: (s[0].clamp(max=254) + 1, s[1]))),
    "a tuple in place of a list": (Rows, plain_loader(collate=lambda samples: tuple(default_collate(samples)))),
    "another image in one row": (Rows, plain_loader(lambda s, row, epoch: (1 - s[0] if row == 3 else s[0], s[1]))),
    "a row twice in an epoch": (Rows, plain_loader(order=lambda epoch: [0, *range(ROWS - 1)])),
}


@pytest.mark.parametrize("name", short_form(WRONG, 6))
def test_wrong_loaders_are_called_wrong(name, path):
    cls, feed = WRONG[name]
    verdict = judge(original(cls), path, feed=feed)
    assert verdict.wrong, verdict


def test_a_rare_branch_that_is_dropped_from_jittered_images_is_seen(path):
    class Never(Inverted):
        def __getitem__(self, index):
            return (self.load(index) * random.uniform(0.5, 1.0)).to(torch.uint8), self.labels[index]

    verdict = judge(original(Inverted), path, feed=lambda d, p, epochs: plain_loader()(Never(), p, epochs))
    assert verdict.wrong, verdict


def test_draws_that_a_batch_shares_are_seen(path):
    def shared(samples):
        noise = torch.randn(())
        return default_collate([(a - a.mean() + b.mean() * 0 + noise, b * 0 + noise) for a, b in samples])

    class Plain(Rows):
        def __getitem__(self, index):
            image, noise = torch.from_numpy(self.images[index]).float(), torch.randn(())
            return image - image.mean() + noise, image * 0 + noise

    verdict = judge(Plain, path, feed=plain_loader(collate=shared))
    assert any("share" in reason for reason in verdict.wrong), verdict


def test_an_invariant_is_checked(path):
    def pair(sample):
        return (mask_of(sample[0].numpy()) == sample[1].numpy()).all()

    wrong = judge(original(Pairs), path, feed=plain_loader(one_flipped), invariant=pair)
    assert wrong.wrong == ("the invariant does not hold",)
    with pytest.raises(AssertionError, match="original"):
        judge(original(Pairs), path, feed=plain_loader(), invariant=lambda sample: False)


def test_what_memfeed_gives_of_a_usual_pipeline_is_right(path):
    verdict = judge(original(Rows), path, feed=memfeed_loader)
    assert (verdict.kind, verdict.wrong) == ("batched", ())


def test_an_exception_of_another_kind_is_a_crash(path):
    def feed(dataset, path, epochs):
        raise KeyError("image")

    verdict = judge(original(Rows), path, feed=feed)
    assert (verdict.kind, verdict.is_right, verdict.message) == ("crash", False, "KeyError: 'image'")


@pytest.mark.parametrize(("chance", "is_seen"), [(0.5, False), (0.75, True), (0.0, True)])
def test_how_often_each_sample_occurs_is_compared_without_features(chance, is_seen):
    draw = random.Random(1)

    def rows(p):
        samples = [draw_of(torch.tensor([0.0, 1.0])), draw_of(torch.tensor([1.0, 0.0]))]
        return [[samples[draw.random() < p] for _ in range(16)] for _ in range(ROWS)]

    assert bool(outcomes_differ(rows(1 - chance), rows(chance), {})) == is_seen


@pytest.mark.parametrize("index", range(3))
def test_the_same_seed_gives_the_same_verdict(index, path):
    seed(index)
    assert judge(original(Rows), path, feed=plain_loader()).is_right
