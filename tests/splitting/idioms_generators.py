"""Idioms of where the draws come from: generators of one's own, counters, the clock, the operating system."""

import os
import random
import secrets
import threading
import time

import numpy as np
import torch
from idiom import Rows, Table, Tensors
from torchvision import transforms as v1
from torchvision.transforms import v2

TABLE = Table()
MODULE_GENERATOR = torch.Generator()
STATE = "depends on state that no seed sets"


def plain(image):
    """Return an image as a float tensor [3, h, w]."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255


class Augment:
    """A transform with a generator of NumPy in an attribute."""

    def __init__(self, rng):
        self.rng = rng

    def __call__(self, image):
        x = plain(image)
        return x.flip(-1) if self.rng.random() < 0.5 else x


@TABLE.add("self.rng = np.random.default_rng(0) in a transform", "NumPy", "sample")
def numpy_generator():
    return Rows(Augment(np.random.default_rng(0)))


@TABLE.add("self.rng = np.random.default_rng(0) in the dataset", "NumPy", "refused", "draws outside the pipeline")
def dataset_generator():
    class Own(Rows):
        def __getitem__(self, index):
            x = self.transform(self.load(index))
            return (x.flip(-1) if self.rng.random() < 0.5 else x), self.labels[index]

    return Own(v1.ToTensor(), rng=np.random.default_rng(0))


@TABLE.add("random.Random(0) in a transform", "Python", "sample")
def python_generator():
    return Rows(Augment(random.Random(0)))


@TABLE.add("np.random.RandomState(0) in a transform", "NumPy", "sample")
def random_state():
    state = np.random.RandomState(0)

    class Shift:
        def __init__(self):
            self.R = state

        def __call__(self, image):
            return plain(image).roll(int(self.R.randint(8)), -1)

    return Rows(Shift())


@TABLE.add("torch.Generator in an attribute of a transform", "torch", "sample")
def torch_generator():
    class Shift:
        def __init__(self):
            self.generator = torch.Generator().manual_seed(0)

        def __call__(self, image):
            return plain(image).roll(int(torch.randint(8, (), generator=self.generator)), -1)

    return Rows(Shift())


@TABLE.add("torch.Generator in a closure", "torch", "sample")
def closure():
    generator = torch.Generator()
    return Rows(v1.Compose([v1.ToTensor(), lambda x: x + torch.randn((), generator=generator) / 10]))


@TABLE.add("torch.Generator in a global of the module", "torch", "sample")
def module_global():
    def noisy(x):
        return x + torch.randn((), generator=MODULE_GENERATOR) / 10

    return Rows(v1.Compose([v1.ToTensor(), noisy]))


@TABLE.add("a generator made anew in each call, seeded by the global one", "NumPy", "sample")
def made_anew():
    def noisy(image):
        generator = np.random.default_rng(np.random.randint(2**31))
        return plain(image) + float(generator.normal()) / 10

    return Rows(noisy)


@TABLE.add("np.random.default_rng() in each call: seeded by the system", "NumPy", "refused", STATE)
def system_seeded():
    def noisy(image):
        return plain(image) + float(np.random.default_rng().normal()) / 10

    return Rows(noisy)


@TABLE.add("a counter: self.n += 1", "own code", "refused", STATE)
def counter():
    class Alternating:
        def __init__(self):
            self.n = 0

        def __call__(self, image):
            self.n += 1
            return plain(image).flip(-1) if self.n % 3 == 0 else plain(image)

    return Rows(Alternating())


@TABLE.add("a counter in the dataset: warm-up of the augmentation", "own code", "refused", STATE)
def warm_up():
    class WarmUp(Rows):
        def __getitem__(self, index):
            self.seen += 1
            x = self.transform(self.load(index))
            return x * min(1.0, self.seen / 500), self.labels[index]

    return WarmUp(v1.Compose([v1.RandomHorizontalFlip(), v1.ToTensor()]), seen=0)


@TABLE.add("a cached last image that is blended in", "own code", "refused", STATE)
def remembers():
    class Blend:
        def __init__(self):
            self.last = None

        def __call__(self, x):
            last, self.last = (x if self.last is None else self.last), x
            return (x.float() + last.float()) / 2 if random.random() < 0.5 else x.float()

    return Tensors(Blend())


@TABLE.add("time.time() as the seed", "Python", "refused", STATE)
def clock():
    def noisy(image):
        return plain(image) + random.Random(time.time()).random() / 10

    return Rows(noisy)


@TABLE.add("time.time_ns() % 2 as the coin", "Python", "refused", STATE)
def clock_coin():
    return Rows(lambda image: plain(image).flip(-1) if time.time_ns() // 100 % 2 else plain(image))


@TABLE.add("os.urandom", "Python", "refused", STATE)
def urandom():
    return Rows(lambda image: plain(image) * (os.urandom(1)[0] / 255))


@TABLE.add("secrets.randbelow", "Python", "refused", STATE)
def secret():
    return Rows(v1.Compose([v1.ToTensor(), lambda x: x.roll(secrets.randbelow(8), -1)]))


@TABLE.add("random.SystemRandom in a transform", "Python", "refused", STATE)
def system_random():
    return Rows(Augment(random.SystemRandom()))


@TABLE.add("os.urandom after a random step of torchvision", "torchvision v1", "refused", STATE)
def urandom_later():
    return Rows(v1.Compose([v1.RandomHorizontalFlip(), v1.ToTensor(), lambda x: x * (os.urandom(1)[0] / 255)]))


@TABLE.add("a rare counter: every 200th call is black", "own code", "refused", STATE)
def rare_counter():
    class Rare:
        def __init__(self):
            self.n = 0

        def __call__(self, x):
            self.n += 1
            return x * 0 if self.n % 20 == 0 else x

    return Rows(v1.Compose([v1.RandomHorizontalFlip(), v1.ToTensor(), Rare()]))


@TABLE.add("a global of Python that training sets: the epoch", "own code", "refused", STATE)
def epoch_strength():
    strength = {"calls": 0}

    def transform(image):
        strength["calls"] += 1
        return plain(image) * (1 + strength["calls"] // 64)

    return Rows(transform)


@TABLE.add("thread-local generators", "Python", "sample", "not one of the global generators")
def thread_local():
    local = threading.local()
    local.rng = random.Random(0)
    return Rows(lambda image: plain(image).flip(-1) if local.rng.random() < 0.5 else plain(image))


@TABLE.add("draws in __init__ only: a noise for each sample", "NumPy", "whole", "the same in every epoch")
def drawn_at_first():
    class Noisy(Rows):
        def __init__(self):
            super().__init__(v1.ToTensor())
            self.noise = np.random.default_rng(0).normal(size=64).tolist()

        def __getitem__(self, index):
            return self.transform(self.load(index)) + self.noise[index], self.labels[index]

    return Noisy()


@TABLE.add("a generator seeded by the index in each call", "NumPy", "whole", "the same in every epoch")
def by_index():
    class Fixed(Rows):
        def __getitem__(self, index):
            rng = np.random.default_rng(index)
            x = torch.from_numpy(self.images[index])
            return x.roll(int(rng.integers(8)), 0), self.labels[index]

    return Fixed()


@TABLE.add("np.random.seed(index) before the pipeline", "NumPy", "whole", "the same in every epoch")
def seeds_numpy():
    class Fixed(Rows):
        def __getitem__(self, index):
            np.random.seed(index)
            return self.transform(self.images[index]), self.labels[index]

    return Fixed(lambda x: np.roll(x, np.random.randint(8), 0))


@TABLE.add("torch.manual_seed(index), but NumPy draws too", "torch, NumPy", "refused", "the pipeline is seeded by half")
def seeds_half():
    class Half(Rows):
        def __getitem__(self, index):
            torch.manual_seed(index)
            return self.transform(self.load(index)), self.labels[index]

    noise = v1.Lambda(lambda x: x + float(np.random.normal()) / 10)
    return Half(v1.Compose([v1.RandomHorizontalFlip(), v1.ToTensor(), noise]))


@TABLE.add("three libraries draw in one pipeline", "torch, NumPy, Python", "sample")
def three():
    return Tensors(
        v2.Compose(
            [
                v2.RandomHorizontalFlip(),
                v2.Lambda(lambda x: x.roll(np.random.randint(4), -1)),
                v2.Lambda(lambda x: x.roll(random.randrange(4), -2)),
            ]
        )
    )
