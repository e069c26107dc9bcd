"""A dataset that opens a file when its first sample is read is sent to processes that are not forked."""

import copy
import multiprocessing
import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset
from torchvision.transforms import v2

import memfeed
from memfeed.splitting.unread import Unread, share_opened


class Opened:
    """What is open, and so cannot be pickled."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        raise TypeError("found an open database, which cannot be pickled")

    def image(self, index):
        return torch.arange(index, index + 48, dtype=torch.uint8).reshape(3, 4, 4)


class Lazy(Dataset):
    """Opens its database when the first sample is read; as BasicSR's does, it takes a setting out of a dict then."""

    def __init__(self, transform=None, count=120):
        self.transform, self.count = transform, count
        self.database, self.is_open, self.settings = None, False, {"folder": "somewhere"}

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if not self.is_open:
            self.database, self.is_open = Opened(self.settings.pop("folder")), True
        image = self.database.image(index)
        return image if self.transform is None else self.transform(image)


class Drawing(Lazy):
    """Draws in ``__getitem__``, so no store can hold it."""

    def __getitem__(self, index):
        return super().__getitem__(index) + torch.rand(3, 4, 4)


@pytest.fixture(params=["spawn", "forkserver"])
def _started(request):
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method(request.param, force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@pytest.mark.parametrize("wrap", [lambda one: one, lambda one: ConcatDataset([one])], ids=["alone", "inside"])
def test_what_reading_has_opened_is_taken_out_again(wrap):
    inner = Lazy()
    dataset = wrap(inner)
    unread, before = Unread(dataset), {**vars(inner), "settings": dict(inner.settings)}
    dataset[3]
    with pytest.raises(TypeError, match="open database"):
        pickle.dumps(dataset)
    unread.close(dataset)
    assert vars(inner) == before
    assert torch.equal(pickle.loads(pickle.dumps(dataset))[3], dataset[3])


class Reader:
    """Opens when it reads first, for each process in a dict."""

    def __init__(self):
        self.database, self.of_process = None, {}

    def __getitem__(self, index):
        self.database = self.database or Opened("")
        return self.of_process.setdefault(0, Opened("")).image(index)


class Holder:
    """Holds what opens, under names of its own."""

    def __init__(self, *inner):
        self.base, self.parts = inner[0], [*inner]

    def __getitem__(self, index):
        return [one[index] for one in self.parts]


def test_what_other_objects_have_opened_is_taken_out_too():
    reader = Reader()
    dataset = Holder(reader)
    unread, again = Unread(dataset), Unread(copied := Holder(Reader()))
    dataset[3], copied[3]
    unread.close(dataset)
    assert vars(reader) == {"database": None, "of_process": {}}
    share_opened(copied, dataset)
    assert vars(reader) == vars(copied.base)
    again.close(dataset)
    assert pickle.loads(pickle.dumps(dataset))[3]


def test_a_copy_may_have_two_of_an_object_that_stands_twice():
    inner, other = Reader(), Reader()
    unread = Unread(Holder(inner, inner, other))
    copied = Holder(copy.copy(inner), copy.copy(inner), other)
    copied[3]
    unread.close(copied)
    pickle.dumps(copied)
    assert [(one.database, one.of_process) for one in copied.parts] == [(None, {})] * 3


def test_what_was_read_beside_the_opened_is_shared_too():
    dataset, copied = Lazy(), Lazy()
    dataset.keys, copied.keys = None, None
    copied[3]
    copied.keys = [3]
    share_opened(copied, dataset)
    assert (dataset.is_open, dataset.keys) == (True, [3])


def test_a_copy_that_is_watched_keeps_its_steps():
    dataset = Lazy()
    unread, copied = Unread(dataset), copy.copy(dataset)
    step = copied.step = lambda image: image
    copied[3]
    share_opened(copied, dataset)
    assert (dataset.database, dataset.is_open, hasattr(dataset, "step")) == (copied.database, True, False)
    unread.close(copied)
    assert (copied.database, copied.is_open, copied.step) == (None, False, step)


def test_what_can_be_pickled_stays():
    dataset = Lazy()
    unread = Unread(dataset)
    dataset.rows = dataset.database = [1, 2]
    dataset.is_open = True
    unread.close(dataset)
    assert (dataset.rows, dataset.database, dataset.is_open) == ([1, 2], [1, 2], True)


@pytest.mark.usefixtures("_started")
@pytest.mark.parametrize("transform", [None, v2.RandomHorizontalFlip()], ids=["fixed", "cut"])
def test_it_fills_a_store_in_processes_that_are_not_forked(tmp_path, transform):
    dataset = Lazy(transform)
    for epoch in range(3):
        if epoch < 2:  # the dataset was read again when the first loader's epoch began
            loader = memfeed.Loader(dataset, 40, num_workers=1, cache=tmp_path / f"{epoch}.mf")
        images = torch.cat(list(loader))
        expected = torch.stack([Opened("").image(index) for index in range(120)])
        assert torch.equal(images.sort(-1).values, expected)


@pytest.mark.usefixtures("_started")
def test_it_is_read_as_it_is_in_processes_that_are_not_forked(tmp_path):
    loader = memfeed.Loader(Drawing(), 40, num_workers=1, cache=tmp_path / "a.mf")
    assert isinstance(loader.dataset, Drawing)
    assert len(torch.cat(list(loader))) == 120


class Jitter:
    """Makes a generator when it is called first, so that each worker has one of its own seed."""

    def __init__(self):
        self.generator = None

    def __call__(self, x):
        if self.generator is None:
            self.generator = np.random.default_rng(torch.initial_seed() % 2**32)
        return x + float(self.generator.random())


class Streamed(IterableDataset):
    """Makes an object that draws when its first pass begins."""

    def __init__(self):
        self.jitter = None

    def __iter__(self):
        if self.jitter is None:
            self.jitter = Jitter()
            self.jitter(0.0)
        yield from (self.jitter(torch.zeros(1)) for _ in range(32))


class Jittered(Dataset):
    """Draws beside its transform, so no store can hold it, from generators that the first sample makes."""

    def __init__(self):
        self.transform, self.generators = Jitter(), {}

    def __len__(self):
        return 32

    def __getitem__(self, index):
        if "own" not in self.generators:
            self.generators["own"] = np.random.default_rng(torch.initial_seed() % 2**32)
        return self.transform(torch.zeros(3)) + float(self.generators["own"].random())


@pytest.mark.parametrize("options", [{}, {"cache": "path"}], ids=["no path", "decoded files"])
@pytest.mark.parametrize("worker_count", [0, 2])
def test_generators_that_the_first_sample_makes_are_made_by_each_worker(tmp_path, options, worker_count):
    options = {name: tmp_path / value for name, value in options.items()}
    found = []
    for kind, more in ((memfeed.Loader, options), (torch.utils.data.DataLoader, {})):
        torch.manual_seed(5)
        loader = kind(Jittered(), 4, num_workers=worker_count, **more)
        found.append(torch.stack([torch.cat(list(loader)) for _ in range(2)]))
    assert len(found[0].unique()) == 2 * 32
    assert torch.equal(*found)


def test_workers_that_read_an_iterable_make_what_draws_too(tmp_path):
    found = []
    for kind, more in ((memfeed.Loader, {"cache": tmp_path / "a.mf"}), (torch.utils.data.DataLoader, {})):
        torch.manual_seed(5)
        loader = kind(Streamed(), 4, num_workers=2, **more)
        found.append(torch.stack([torch.cat(list(loader)) for _ in range(2)]))
    assert len(found[0].unique()) == 2 * 2 * 32
    assert torch.equal(*found)
