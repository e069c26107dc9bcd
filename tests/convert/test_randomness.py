"""Random samples are refused, unless the user asks for one draw of them."""

import random
import time

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from memfeed.convert import randomness
from memfeed.convert.probe import probe_indices, spread
from memfeed.errors import RandomDataError
from memfeed.loading.loader import Loader
from support import Made, cache


class Flipped(Made):
    transform = "RandomFlip(p=0.1)"

    def __init__(self, draw):
        super().__init__(None, 50)
        self.draw = draw

    def __getitem__(self, index):
        return {"image": torch.arange(4) + index, "drawn": self.draw(index)}


@pytest.mark.parametrize(
    ("draw", "found"),
    [
        (lambda i: torch.rand(()), "gave different values in field drawn"),
        (lambda i: np.random.rand(), "gave different values in field drawn"),
        (lambda i: random.random(), "gave different values in field drawn"),
        (lambda i: int(torch.rand(()) < 0.1), "gave different values in field drawn|draws random numbers"),
        (lambda i: int(torch.rand(()) < 0), r"draws random numbers \(.*test_randomness.py:\d+\), though"),
        (lambda i: int(np.random.rand() < 0), r"draws random numbers \(.*test_randomness.py:\d+\), though"),
        (lambda i: [random.random()] and i, r"draws random numbers \(.*test_randomness.py:\d+\), though"),
        (lambda i: int(random.random() < 0.5) if i > 40 else 0, "gave different values in field drawn"),
        (lambda i: np.random.default_rng().random(), "gave different values in field drawn"),
    ],
)
def test_random_samples_are_caught(path, draw, found):
    with pytest.raises(RandomDataError, match=found) as caught:
        cache(Flipped(draw), path)
    assert "RandomFlip(p=0.1)" in str(caught.value)
    assert "Loader(..., transform=...)" in str(caught.value)
    assert not path.with_name("a.mf.build").exists()
    assert len(cache(Flipped(draw), path, allow="random")) == 50
    assert len(cache(Flipped(draw), path, allow="random")) == 50


def seeded(i):
    torch.manual_seed(i)
    return torch.rand(3)


@pytest.mark.parametrize(
    "draw",
    [
        seeded,
        lambda i: float("nan"),
        lambda i: np.random.default_rng(i).random(3),
    ],
)
@pytest.mark.parametrize("workers", [0, 2])
def test_samples_whose_values_agree_are_not_random(path, draw, workers):
    assert len(cache(Flipped(draw), path, workers=workers)) == 50


class Keeping(Made):
    """Draws when a sample is read first, and keeps what came of it, as a Taskset of learn2learn does."""

    def __init__(self, n, draw):
        super().__init__(None, n)
        self.draw, self.kept = draw, {}

    def __getitem__(self, i):
        if i not in self.kept:
            self.kept[i] = self.draw(i)
        return self.kept[i]


@pytest.mark.parametrize("draw", [lambda i: torch.rand(3), lambda i: np.random.rand(999), lambda i: random.random()])
@pytest.mark.parametrize("n", [2, 40])
def test_a_draw_that_is_kept_when_a_sample_is_read_first_is_caught(path, draw, n):
    with pytest.raises(RandomDataError, match=f"sample {n - 1} draws random numbers when it is read first"):
        cache(Keeping(n, draw), path)
    assert type(Loader(Keeping(n, draw), 2, cache=path)).__name__ == "DecodedLoader"


class Memory:
    """Keeps what was drawn, beside a method that a search for random steps finds."""

    def __init__(self, draw):
        self.draw, self.kept = draw, {}

    def of(self, i):
        if i not in self.kept:
            self.kept[i] = self.draw(i)
        return self.kept[i]


def test_a_draw_that_another_object_keeps_is_caught(path):
    class Kept(Made):
        def __getitem__(self, i):
            return self.memory.of(i)

    def made():
        dataset = Kept(None, 40)
        dataset.memory = Memory(lambda i: torch.rand(3))
        return dataset

    with pytest.raises(RandomDataError, match="draws random numbers when it is read first"):
        cache(made(), path)
    assert type(Loader(made(), 2, cache=path)).__name__ == "DecodedLoader"


def numpy_seeded(i):
    np.random.seed(i)
    return np.random.rand(3)


def random_seeded(i):
    random.seed(i)
    return random.random()


@pytest.mark.parametrize("draw", [seeded, numpy_seeded, random_seeded])
def test_a_draw_that_is_kept_is_fixed_if_the_dataset_seeds_it(path, draw):
    assert len(cache(Keeping(20, draw), path)) == 20
    assert len(Loader(Keeping(20, draw), 2, cache=path)) == 10


class RarelyRandom(Made):
    """One sample is random, and the probe does not read it."""

    def __getitem__(self, index):
        return {"x": torch.rand(2) if index == 777 else torch.full((2,), float(index))}


class RarelyDrawing(Made):
    """One sample draws, which has no effect in most readings, and the probe does not read it."""

    def __getitem__(self, index):
        return {"x": torch.full((2,), index + float(index == 777 and random.random() < 1e-6))}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_draw_without_an_effect_so_far_is_caught_in_any_sample(path, workers):
    with pytest.raises(RandomDataError, match="draws random numbers"):
        cache(RarelyDrawing(None, 1000), path, workers=workers)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_random_sample_that_was_not_probed_is_caught(path, workers):
    assert 777 not in probe_indices(1000)
    with pytest.raises(RandomDataError, match="reading sample 777 twice gave different values in field x"):
        cache(RarelyRandom(None, 1000), path, workers=workers)
    assert not path.with_name("a.mf.build").exists()
    assert len(cache(RarelyRandom(None, 1000), path, workers=workers, allow="random")) == 1000


class RandomBuffer(Made):
    def __init__(self):
        super().__init__(None, 50)
        self.buffer, self.generator = torch.zeros(3), torch.Generator()

    def __getitem__(self, index):
        return self.buffer.uniform_(generator=self.generator)


def test_a_random_buffer_is_caught(path):
    with pytest.raises(RandomDataError, match="gave different values in field value"):
        cache(RandomBuffer(), path)


def test_looking_for_random_samples_takes_a_bounded_time(path, monkeypatch):
    monkeypatch.setattr(randomness, "RECHECK_SECONDS", 0.05)
    reads = []

    def draw(i):
        random.seed(i)
        random.random()
        reads.append(i)
        time.sleep(0.001)
        return i

    cache(Made(draw, 1000), path, workers=0)
    assert len(reads) < 1300


@pytest.mark.parametrize("n", [1, 2, 3, 15, 16, 17, 50, 1000, 5000, 10**6, 10**12])
def test_the_probe_reads_the_ends_and_each_part_between(n):
    found = probe_indices(n)
    assert found == sorted(set(found))
    assert (found[0], found[-1]) == (0, n - 1)
    assert len(found) == min(n, 32 if n >= 1 << 18 else 20 if n == 5000 else 16)
    assert max(np.diff(found), default=0) <= max(1, 2.5 * n / len(found))
    halves = spread(found)[:3]
    assert sorted(spread(found)) == found
    assert halves[:2] == [0, n - 1][: min(n, 2)]
    assert n < 3 or 0 < halves[2] < n - 1


def test_a_period_hides_no_random_rows():
    for period in range(2, 6):
        for n in (1024, 10_000, 10**6):
            assert {index % period for index in probe_indices(n)} == set(range(period)), (period, n)


def test_generators_are_left_as_they_were(path):
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    want = torch.rand(1), np.random.rand(), random.random()
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    cache(Flipped(lambda i: i), path, workers=2)
    cache(Flipped(lambda i: i), path)
    assert (torch.rand(1), np.random.rand(), random.random()) == want


class RandomStream(IterableDataset):
    def __iter__(self):
        return (torch.rand(2) for _ in range(10))


def test_a_random_stream_is_caught(path):
    with pytest.raises(RandomDataError, match="iterating twice gave different values"):
        cache(RandomStream(), path)
    assert len(cache(RandomStream(), path, allow="random")) == 10


class OwnIterator(IterableDataset):
    """As PyTorchVideo's datasets: __iter__ begins anew and returns the dataset itself."""

    def __init__(self, draw, seed=None):
        self.draw, self.seed = draw, seed

    def __iter__(self):
        self.left = 10
        if self.seed is not None:
            random.seed(self.seed)
        return self

    def __next__(self):
        if not self.left:
            raise StopIteration
        self.left -= 1
        return self.left + self.draw()


def test_a_random_stream_that_is_its_own_iterator_is_caught(path):
    with pytest.raises(RandomDataError, match="iterating draws random numbers among its first 10 samples"):
        cache(OwnIterator(random.random), path)
    assert len(cache(OwnIterator(random.random), path, allow="random")) == 10


@pytest.mark.parametrize(("draw", "seed"), [(float, None), (random.random, 3)])
def test_a_fixed_stream_that_is_its_own_iterator_is_stored(path, draw, seed):
    assert len(cache(OwnIterator(draw, seed), path)) == 10


class OnePass(IterableDataset):
    def __init__(self):
        self.samples = (i + random.random() for i in range(300))

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.samples)


def test_a_stream_that_can_be_iterated_once_has_one_draw(path):
    assert len(cache(OnePass(), path)) == 300


class RareStream(IterableDataset):
    def __init__(self, draw):
        self.draw = draw

    def __iter__(self):
        return (i + 1000 * (self.draw() < 0.001) for i in range(10))


@pytest.mark.parametrize("draw", [random.random, random.Random(0).random])
def test_a_stream_that_is_random_now_and_then_is_caught(path, draw):
    with pytest.raises(RandomDataError, match="iterating draws random numbers, though it gave the same values"):
        cache(RareStream(draw), path)
    assert len(cache(RareStream(draw), path, allow="random")) == 10


class SeededStream(IterableDataset):
    def __iter__(self):
        generator = random.Random(0)
        return (generator.random() for _ in range(10))


def test_a_stream_that_seeds_itself_is_fixed(path):
    assert len(cache(SeededStream(), path)) == 10


class Normalised(Made):
    """As some readers of point clouds: each sample is moved to its mean, in the memory of all."""

    def __init__(self, kind):
        super().__init__(None, 50)
        self.clouds = kind(np.random.default_rng(0).normal(3, 1, (50, 20, 3)))

    def __getitem__(self, index):
        cloud = self.clouds[index]
        cloud -= cloud.mean(0)
        cloud /= abs(cloud).max()
        return cloud, index


@pytest.mark.parametrize("kind", [np.array, torch.from_numpy, list])
@pytest.mark.parametrize("split", [False, "auto"])
def test_a_dataset_that_changes_its_own_data_is_told_apart_from_a_random_one(path, kind, split):
    with pytest.raises(RandomDataError, match="no generator moved, and dataset.clouds has other values") as caught:
        cache(Normalised(kind), path, split=split)
    assert "x = self.clouds[i].clone()" in str(caught.value)
    assert "crops, flips" not in str(caught.value)


def test_a_generator_of_its_own_is_said_to_be_possible(path):
    with pytest.raises(RandomDataError, match="no global generator moved: it has a generator of its own, or writes to"):
        cache(Flipped(lambda i: np.random.default_rng().random()), path)


class RarelyDrawn(Made):
    """One sample draws from a generator that the dataset, or a step of it, holds."""

    def __init__(self, make_late=False):
        super().__init__(None, 1000)
        self.generator = None if make_late else np.random.default_rng(0)

    def __getitem__(self, index):
        if self.generator is None:
            self.generator = np.random.default_rng(0)
        return {"x": index + (self.generator.random() if index == 777 else 0.0)}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make_late", [False, True])
def test_a_generator_of_the_dataset_is_watched_in_every_sample(path, workers, make_late):
    with pytest.raises(RandomDataError, match="reading sample 777 twice gave different values in field x"):
        cache(RarelyDrawn(make_late), path, workers=workers)


def test_a_generator_of_the_dataset_that_draws_without_effect_is_no_reason(path):
    """As that of albumentations, which draws before each step, also before those that always run."""

    class Always(torch.utils.data.Dataset):
        def __init__(self):
            self.rng = random.Random(0)

        def __len__(self):
            return 40

        def __getitem__(self, i):
            return torch.tensor(i if self.rng.random() < 1 else -1)

    assert [int(one) for one in cache(Always(), path)] == list(range(40))


class LateStream(IterableDataset):
    def __init__(self, draw, first=40, last=100, begin=int):
        self.draw, self.first, self.last, self.begin = draw, first, last, begin

    def __iter__(self):
        self.begin()
        return (i + 1000 * (i >= self.first and self.draw() < 0.001) for i in range(self.last))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("first", [7, 60, 99])
def test_a_stream_whose_later_samples_are_random_is_caught(path, first, workers):
    with pytest.raises(RandomDataError, match="iterating draws random numbers among its first"):
        cache(LateStream(random.random, first), path, workers=workers)
    assert len(cache(LateStream(random.random, first), path, workers=workers, allow="random", overwrite=True)) > 99


def test_a_stream_that_draws_late_from_its_own_generator_is_caught(path):
    with pytest.raises(RandomDataError, match="iterating draws random numbers among its first"):
        cache(LateStream(random.Random(0).random), path)


def test_a_stream_that_seeds_a_global_generator_and_draws_late_is_fixed(path):
    assert len(cache(LateStream(random.random, begin=lambda: random.seed(3)), path)) == 100


class RemadeStream(IterableDataset):
    def __iter__(self):
        self.generator = random.Random(0)
        return (i + 1000 * (i > 30 and self.generator.random() < 0.001) for i in range(50))


def test_a_stream_that_makes_its_generator_anew_is_fixed(path):
    assert len(cache(RemadeStream(), path)) == 50


def test_the_sample_that_draws_is_named_and_not_another_one(path):
    data = Made(lambda i: torch.tensor(float(i) + (i == 101 and random.random() < 0)), 200)
    assert 101 not in {*probe_indices(200), *spread(probe_indices(200))}
    with pytest.raises(RandomDataError, match=r"reading sample 101 draws random numbers \(.*test_randomness.py:\d+\)"):
        cache(data, path)
