"""What of a pipeline is made of whole batches, what is called for each sample, and what is made again whole."""

import random

import pytest
import torch
from idiom import Rows, Tensors
from torchvision.transforms import v2

from memfeed.random import Keys
from memfeed.splitting.proof import prove
from memfeed.splitting.rest import rest_of
from memfeed.splitting.stored_layout import InPlace, Named

FLIP, CROP = v2.RandomHorizontalFlip(), v2.RandomCrop(24)
ROWS = 16


def rest(dataset):
    return rest_of(prove(dataset, range(6)))


def parts(one):
    return [type(transform).__name__ for transform in one.transform.transforms]


def images(dataset):
    return torch.from_numpy(dataset.images[:ROWS]).permute(0, 3, 1, 2).contiguous()


def keys(seed=0):
    return Keys(seed, 0, torch.arange(ROWS))


class Noise:
    def __call__(self, image):
        return image.float() + random.random() * 0.25


def test_steps_with_counterparts_are_batched():
    dataset = Tensors(v2.Compose([v2.CenterCrop(30), FLIP]))
    found = rest(dataset)
    assert (found.batched, found.own) == (("RandomHorizontalFlip",), ())
    assert isinstance(found.layout, InPlace)
    assert [step.name for step in found.recipe] == ["RandomHorizontalFlip"]
    given = images(dataset)
    made, label = found.transform.apply((given.clone(), torch.arange(ROWS)), keys())
    flipped = torch.tensor([torch.equal(one, two.flip(-1)) for one, two in zip(made, given, strict=True)])
    kept = torch.tensor([torch.equal(one, two) for one, two in zip(made, given, strict=True)])
    assert (flipped ^ kept).all()
    assert 0 < flipped.sum() < ROWS
    assert label.tolist() == list(range(ROWS))


def test_an_own_step_is_called_for_each_sample_between_batched_ones():
    found = rest(Tensors(v2.Compose([CROP, Noise(), FLIP])))
    assert (found.batched, found.own) == (("RandomCrop", "RandomHorizontalFlip"), ("Noise",))
    assert parts(found) == ["RandomCrop", "PerSample", "RandomHorizontalFlip"]
    given = torch.zeros(ROWS, 3, 32, 32, dtype=torch.uint8)
    made, _ = found.transform.apply((given, torch.arange(ROWS)), keys())
    assert made.shape == (ROWS, 3, 24, 24)
    assert len(made[:, 0, 0, 0].unique()) == ROWS
    assert torch.equal(made, made[:, :1, :1, :1].expand_as(made))


class Pairs(Tensors):
    def __getitem__(self, index):
        return self.transform(self.load(index), self.labels[index])


class Brighter:
    """Looks at the label."""

    def __call__(self, image, label):
        return image + label * random.random(), label


def test_an_own_step_that_looks_at_the_label_makes_whole_samples_again():
    found = rest(Pairs(v2.Compose([FLIP, Brighter()])))
    assert (found.batched, parts(found)) == ((), ["Remake"])
    assert found.own == ("RandomHorizontalFlip", "Brighter")
    assert isinstance(found.layout, Named)
    assert rest(Pairs(v2.Compose([FLIP]))).batched == ("RandomHorizontalFlip",)


class Beside(Tensors):
    """A random step without images, and one with arguments of both kinds, beside the pipeline."""

    def gain(self):
        return random.random()

    def level(self, image, *, most):
        return image * random.randrange(most)

    def __getitem__(self, index):
        return self.level(self.transform(self.load(index)), most=3), self.gain()


def test_a_step_that_passes_nothing_on_makes_whole_samples_again():
    assert parts(rest(Beside(FLIP))) == ["Remake"]


@pytest.mark.parametrize("dataset", [Tensors(v2.RandomApply([FLIP])), Rows(v2.RandomOrder([CROP, FLIP]))])
def test_a_sequence_that_draws_itself_is_not_opened(dataset):
    found = rest(dataset)
    assert found.batched == ()
    assert found.own == (type(dataset.transform).__name__,)


def test_the_generators_are_left_as_they_were():
    proof = prove(Tensors(v2.Compose([CROP, Noise()])), range(6))
    states = proof.cut.generators.save()
    rest_of(proof)
    assert proof.cut.generators.save() == states
