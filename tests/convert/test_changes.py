"""A dataset that changes while a loader serves its store is noticed when the next epoch begins."""

import copy
import itertools
import json
import pickle
import random
import sys
import threading
import time
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset

import memfeed
from memfeed import Loader
from memfeed.convert import changes, digests, staleness
from memfeed.convert.changes import Watched
from memfeed.convert.probe import probe_indices
from memfeed.errors import StaleStoreError
from memfeed.system import random_state
from memfeed.system.threads import end_all
from support import cache

N = 1000
OTHER = next(i for i in range(200, N) if i not in probe_indices(N))


class Labelled(Dataset):
    def __init__(self, n=N):
        self.data, self.targets = torch.arange(2 * n).view(n, 2), [i % 10 for i in range(n)]
        self.transform, self.epoch, self.threshold = None, 0, 0.5

    def __len__(self):
        return len(self.data)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        return self.data[index].clone(), self.targets[index]


class Flip:
    """A random step, and one that keeps what it drew."""

    def __init__(self, p):
        self.p, self.drawn, self._drawn = p, 0, 0

    def __call__(self, image):
        self.drawn = self._drawn = random.random()
        return image.flip(-1) if self.drawn < self.p else image


class Scale:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, image):
        return image * self.factor


class Transformed(Dataset):
    def __init__(self, steps, n=60):
        self.images, self.transform = torch.arange(n * 48).view(n, 3, 4, 4), steps

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index]
        for step in self.transform:
            image = step(image)
        return image, index


@pytest.fixture(autouse=True)
def quiet(capsys):
    yield
    end_all()


def stored_again(dataset, path):
    with pytest.raises(StaleStoreError) as caught:
        cache(dataset, path, workers=0)
    return str(caught.value)


# --- between two runs


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_ten_corrected_labels_of_a_thousand_are_noticed(path, kind):
    dataset = Labelled()
    dataset.targets = kind(dataset.targets)
    cache(dataset, path)
    assert len(cache(dataset, path)) == N
    others = [i for i in range(200, N) if i not in probe_indices(N)][:10]
    for index in others:
        dataset.targets[index] = 99
    text = stored_again(dataset, path)
    assert f"dataset.targets: 10 of 1,000 targets, the first of sample {others[0]}: found 99" in text
    assert "overwrite=True" in text
    assert len(memfeed.open(path)) == N


class Example:
    def __init__(self, label):
        self.label, self.image, self.reads, self.run = label, None, 0, time.monotonic_ns()

    def read(self):
        self.reads += 1
        self.image = torch.full((3,), self.label)
        return self.image


class Examples(Dataset):
    """Objects that keep what was read, and the time."""

    def __init__(self, labels):
        self.examples = list(map(Example, labels))

    def __len__(self):
        return N

    def __getitem__(self, index):
        return self.examples[index].read().clone()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("lazily", [False, True])
def test_labels_in_objects_are_compared_and_what_they_keep_is_not(path, workers, lazily):
    def opened(labels, reads=0):
        dataset = Examples(labels)
        assert len([dataset[i] for i in range(reads)]) == reads
        with warnings.catch_warnings():  # each object has its time
            warnings.filterwarnings("ignore", r".*dataset\.examples\[\*\]\.run differs from")
            return cache(dataset, path, workers=workers, lazily=lazily)

    labels = list(range(N))
    for reads in (0, 0, 40):
        store = opened(labels, reads)
        for _ in range(2 * lazily):
            assert len(list(Loader(store, 100))) == 10
        store.finish()
    labels[OTHER] = -1
    with pytest.raises(StaleStoreError, match=r"found other values in dataset\.examples\[\*\]\.label\."):
        opened(labels)


def test_an_attribute_that_is_another_in_every_object_is_told_and_rows_are_compared(path):
    cache(Examples(list(range(N))), path, workers=0)
    with pytest.warns(match=r"dataset\.examples\[\*\]\.run differs .* but the samples compared are the same"):
        cache(Examples(list(range(N))), path, workers=0)
    assert "field value, sample" in stored_again(Examples(list(range(7, N + 7))), path)


class Loaded(Dataset):
    """One that loads its labels, and what differs in each process, when the first sample is read."""

    def __init__(self, load, pipeline=None):
        self.load, self.pipeline, self.labels, self.log = load, pipeline, None, []

    def __len__(self):
        return N

    def __getitem__(self, index):
        if self.labels is None:
            self.labels = self.load()
            self.pid, self.started, self.cache = time.monotonic_ns(), [time.monotonic_ns()] * 10, {}
        self.log += [time.monotonic_ns()] * 50
        image = self.cache.setdefault(index, torch.full((2,), self.labels[index])).clone()
        return image if self.pipeline is None else self.pipeline(image)


@pytest.mark.parametrize("lazily", [False, True])
def test_labels_that_the_first_sample_loads_are_compared(path, lazily):
    labels = list(range(N))
    for reads in (0, 0, 50):
        dataset = Loaded(labels.copy)
        assert len([dataset[i] for i in range(reads)]) == reads
        store = cache(dataset, path, workers=0, lazily=lazily)
        for _ in range(2 * lazily):
            assert len(list(Loader(store, 100))) == 10
        store.finish()
    labels[OTHER] = -1
    with pytest.raises(StaleStoreError, match=r"found other values in dataset\.labels"):
        cache(Loaded(labels.copy), path, workers=0)


def test_labels_that_the_first_sample_of_a_cut_dataset_loads_are_compared(path):
    def epoch(labels):
        dataset = Loaded(labels.copy, torch.nn.Sequential(torch.nn.Identity(), torch.nn.Dropout(0.5)))
        loader = Loader(dataset, 100, cache=path)
        assert loader.store.transform is not None
        for _ in range(2):
            assert len(list(loader)) == 10
        loader.store.finish()

    labels = [float(i) for i in range(N)]
    epoch(labels)
    epoch(labels)
    labels[OTHER] = -1.0
    with pytest.raises(StaleStoreError, match=r"found other values in dataset\.labels"):
        epoch(labels)


def test_columns_are_compared_whole(path):
    columns = {"x": torch.arange(N), "y": np.arange(N)}
    cache(columns, path)
    columns["y"][OTHER] = -1
    assert "dataset['y']" in stored_again(columns, path)


def test_the_build_of_a_dataset_that_changed_is_not_gone_on_with(path):
    loader = Loader(Labelled(), 10, cache=path)
    next(iter(loader))
    del loader
    end_all()
    dataset = Labelled()
    dataset.targets[OTHER] = 99
    assert "dataset.targets" in stored_again(dataset, path)


def test_an_attribute_that_is_new_or_gone_is_no_alarm(path):
    cache(Labelled(), path)
    dataset = Labelled()
    del dataset.threshold
    dataset.more = [1, 2, 3] * 100
    assert len(cache(dataset, path)) == N


def test_another_setting_is_told_and_rows_are_compared(path):
    class Limited(Labelled):
        def __getitem__(self, index):
            image, label = super().__getitem__(index)
            return image, label if index != OTHER or self.threshold < 0.7 else -1

    cache(Limited(), path)
    dataset = Limited()
    dataset.threshold = 0.6
    with pytest.warns(match=r"dataset\.threshold differs .* but the samples compared are the same") as told:
        cache(dataset, path)
    assert told[0].filename.endswith("support.py"), "the line that called memfeed.cache"
    dataset.threshold = 0.8
    assert f"field 1, sample {OTHER}: found -1" in stored_again(dataset, path)


def test_a_store_without_digests_is_compared_as_before(path):
    cache(Labelled(), path)
    file = path / "memfeed.json"
    manifest = json.loads(file.read_text())
    assert "targets" in manifest["fingerprint"].pop("digests")
    file.chmod(0o644)
    file.write_text(json.dumps(manifest))
    dataset = Labelled()
    dataset.targets[OTHER] = 99
    assert len(cache(dataset, path)) == N


def test_touched_files_and_digests_make_no_other_source(path, tmp_path):
    first = cache(Labelled(), path)
    dataset = Labelled()
    dataset.more = [1] * 200
    assert cache(dataset, tmp_path / "b.mf")._view.source_digest() == first._view.source_digest()


# --- between two epochs


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("filled", [False, True])
def test_one_label_of_a_thousand_that_changed_in_place(path, workers, filled):
    if filled:
        cache(Labelled(), path)
    dataset = Labelled()
    loader = Loader(dataset, 100, cache=path, num_workers=workers)
    assert len(list(loader)) == 10
    dataset.targets[OTHER] += 1
    with pytest.raises(StaleStoreError, match=r"since its loader was made: dataset\.targets has another content"):
        next(iter(loader))
    dataset.targets[OTHER] -= 1
    assert len(list(loader)) == 10


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda d: d.set_epoch(1), r"dataset\.epoch has another content"),
        (lambda d: setattr(d, "targets", [0] * N), r"dataset\.targets"),
        (lambda d: setattr(d, "transform", lambda x: x + 1), r"dataset\.transform is .*lambda.*, and was None"),
        (lambda d: d.data.add_(1), r"dataset\.data"),
    ],
)
def test_what_a_program_changes(path, change, found):
    dataset = Labelled()
    store = cache(dataset, path, lazily=True, workers=0)
    for loader in (Loader(store, 100), Loader(store.subset(range(50)), 10)):
        list(loader)
        changed = copy.deepcopy(dataset.__dict__)
        change(dataset)
        with pytest.raises(StaleStoreError, match=f"{found}.*cache='NEW_PATH'.*transform="):
            next(iter(loader))
        dataset.__dict__.update(changed)


def test_a_counter_of_the_collate_fn_belongs_outside_of_the_dataset(path):
    class Counting(Labelled):
        def __init__(self):
            super().__init__()
            self.batches = 0

        def collate_fn(self, samples):
            self.batches += 1
            return torch.stack([data for data, _ in samples])

    class Batches:
        batches = 0
        __call__ = Counting.collate_fn

    dataset = Counting()
    loader = Loader(dataset, 100, cache=path, collate_fn=dataset.collate_fn)
    list(loader)
    with pytest.raises(StaleStoreError, match=r"dataset\.batches has another.*collate_fn=Batches\(\).*with __call__"):
        next(iter(loader))
    batches = Batches()
    loader = Loader(Labelled(), 100, cache=path, collate_fn=batches)
    assert [len(list(loader)) for _ in range(3)] == [10, 10, 10]
    assert batches.batches == 30


class Folder(Dataset):
    def __init__(self, folder):
        self.folder = folder

    def __len__(self):
        return len(list(self.folder.iterdir()))

    def __getitem__(self, i):
        return int((self.folder / f"{i}.txt").read_text())


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_that_grows_or_shrinks_without_an_attribute(path, workers):
    folder = path.with_name("files")
    folder.mkdir()
    for i in range(40):
        (folder / f"{i}.txt").write_text(str(i))
    loader = Loader(Folder(folder), 8, num_workers=workers, cache=path)
    assert torch.cat(list(loader)).tolist() == list(range(40))
    (folder / "40.txt").write_text("40")
    with pytest.raises(StaleStoreError, match="found 41 samples, expected 40; expected the same in every epoch"):
        next(iter(loader))


def test_data_in_a_dataset_inside_is_seen_and_so_are_rows(path, monkeypatch):
    monkeypatch.setattr(staleness, "CHECK_SECONDS", 60.0)
    monkeypatch.setattr(staleness, "MOST_CHECKED", N)
    inner = Labelled()
    hidden = [0]

    class Hiding(Labelled):
        def __getitem__(self, index):
            return torch.tensor([index + hidden[0]])

    loader = Loader(Subset(inner, range(N)), 100, cache=path)
    list(loader)
    inner.targets[OTHER] += 1
    with pytest.raises(StaleStoreError, match=r"dataset\.dataset\.targets"):
        next(iter(loader))
    loader = Loader(Hiding(), 100, cache=path.with_name("b.mf"))
    list(loader)
    hidden[0] = 1
    with pytest.raises(StaleStoreError, match=r"made: field value, sample \d+: found \d+ at \[0\], expected"):
        next(iter(loader))


def test_the_fixed_and_the_random_part_of_a_cut_pipeline(path):
    dataset = Transformed([Scale(2), Flip(0.5)])
    loader = Loader(dataset, 10, cache=path)
    for _ in range(3):
        assert len(list(loader)) == 6
    dataset.transform[1].p = 0.9
    with pytest.raises(StaleStoreError, match=r"dataset\.transform\[1\]\.p is 0\.9, and was 0\.5.* make a new Loader"):
        next(iter(loader))
    assert len(list(Loader(dataset, 10, cache=path))) == 6, "made anew it has the new probability"
    dataset.transform[0].factor = 3
    with pytest.raises(StaleStoreError, match=r"dataset\.transform\[0\]\.factor is 3, and was 2"):
        next(iter(loader))
    with pytest.raises(StaleStoreError, match="field 0, sample"):
        Loader(dataset, 10, cache=path)


class HeldBy(Dataset):
    """Leaves its steps to another object, which is no dataset."""

    def __init__(self, helper):
        self.helper = helper

    def __len__(self):
        return 60

    def __getitem__(self, index):
        return self.helper.item(index)


class Helper:
    def __init__(self):
        self.p, self.steps = 0.5, [Scale(2), Flip(0.5)]

    def keep(self, value):
        return value if torch.rand(()) < self.p else -value

    def item(self, index):
        value = self.keep(torch.full((4, 8), index + 1.0))
        for step in self.steps:
            value = step(value)
        return value


OF_THE_MODULE, METRIC = [Scale(2), Flip(0.5)], Scale(1)


class Named(Dataset):
    def __len__(self):
        return 60

    def __getitem__(self, index):
        value = torch.full((4, 8), index + 1.0) + torch.arange(8)
        for step in OF_THE_MODULE:
            value = step(value)
        return value


def test_the_random_part_in_an_object_that_is_no_dataset(path):
    for change, what in (
        (lambda helper: setattr(helper, "p", 0.9), r"dataset\.helper\.p is 0\.9, and was 0\.5"),
        (lambda helper: setattr(helper.steps[1], "p", 0.9), r"dataset\.helper\.steps\[1\]\.p is 0\.9"),
        (lambda helper: helper.steps.append(Scale(1)), r"len\(dataset\.helper\.steps\) is 3"),
    ):
        helper = Helper()
        loader = Loader(HeldBy(helper), 10, cache=path, require="samples")
        for _ in range(3):
            assert len(list(loader)) == 6
        change(helper)
        with pytest.raises(StaleStoreError, match=what):
            next(iter(loader))


def test_the_pipeline_of_a_module(path, monkeypatch):
    loader = Loader(Named(), 10, cache=path, require="samples")
    for _ in range(3):
        assert len(list(loader)) == 6
    monkeypatch.setattr(OF_THE_MODULE[1], "p", 0.9)
    with pytest.raises(StaleStoreError, match=r"made: OF_THE_MODULE\[1\]\.p is 0\.9"):
        next(iter(loader))
    monkeypatch.setattr(sys.modules[__name__], "OF_THE_MODULE", [Scale(2), Flip(0.5), Scale(3)])
    with pytest.raises(StaleStoreError, match=r"len\(OF_THE_MODULE\) is 3, and was 2"):
        next(iter(loader))


def test_what_reading_does_not_call_may_change(path):
    class Measured(Named):
        def measured(self, values):
            return METRIC(values)

    loader = Loader(Measured(), 10, cache=path)
    for count in range(4):
        assert len(list(loader)) == 6
        METRIC.factor = count


def test_a_pipeline_is_watched_after_another_one_was_refused(path):
    dataset = Transformed([Scale(2), Flip(0.5)])
    loader, steps = Loader(dataset, 10, cache=path), dataset.transform
    dataset.transform = [Scale(2)]
    with pytest.raises(StaleStoreError, match=r"dataset\.transform|by_default\(values=\)"):
        next(iter(loader))
    dataset.transform = steps
    assert len(list(loader)) == 6
    steps[1].p = 0.9
    with pytest.raises(StaleStoreError, match=r"dataset\.transform\[1\]\.p is 0\.9, and was 0\.5"):
        next(iter(loader))


@pytest.mark.parametrize("filled", [False, True])
def test_what_reading_changes_is_no_alarm(path, filled):
    class Keeping(Dataset):
        def __init__(self, n=300):
            self.cache, self.slots, self.calls, self.handle, self.n = {}, [None] * n, 0, None, n
            self.rng, self.random = np.random.default_rng(0), random.Random(0)

        def __len__(self):
            return self.n

        def __getitem__(self, index):
            self.calls += 1
            self.handle = self.handle or open
            if index not in self.cache:
                self.cache[index] = self.slots[index] = torch.full((3,), index)
            return self.cache[index]

    if filled:
        cache(Keeping(), path)
    probed, dataset = Keeping(), Keeping()
    Loader(probed, 50, cache=path)  # so that a second probe changes nothing, but other reads do
    for given in (probed, dataset, dataset, Keeping()):
        loader = Loader(given, 50, shuffle=True, seed=0, cache=path)
        for _ in range(3):
            assert len(list(loader)) == 6
        loader.store.finish()
        assert len(cache(Keeping(), path)) == 300


class Keeping:
    """A step as those of albumentations: it keeps what it drew, and nothing after a call without a draw."""

    def __init__(self):
        self.params = {}

    def __call__(self, image):
        self.params = {"shape": (1, 1)}
        return image


def test_a_step_that_keeps_nothing_after_some_reads_is_no_alarm():
    dataset = Labelled()
    dataset.transform = Keeping()
    watched = Watched(dataset, None)
    watched.follow()  # no read until now has drawn
    dataset.transform(1.0)
    assert watched.changed() == ("len(dataset.transform.params) is 1, and was 0", True)
    each_draws = map(dataset.transform, itertools.repeat(1.0, 8))
    assert watched.changed(each_draws) is None
    dataset.transform.params = {}
    assert watched.changed(each_draws) is None


def test_generators_stay_and_nothing_is_read_in_a_thread(path):
    class Asking(Labelled):
        def __getitem__(self, index):
            assert threading.current_thread() is threading.main_thread()
            return super().__getitem__(index)

    loader = Loader(Asking(), 100, cache=path)
    list(loader)
    before = random_state.save()
    list(loader)
    assert random_state.save() == before


def test_slow_samples_are_not_read_again_and_attributes_are_hashed_once(path, monkeypatch):
    hashed = []

    def digest_attributes(*args):
        hashed.append(args)
        return digests.digest_attributes(*args)

    class Slow(Labelled):
        reads = 0

        def __getitem__(self, index):
            Slow.reads += 1
            return super().__getitem__(index)

    loader = Loader(Slow(), 100, cache=path)
    list(loader)
    loader.store.finish()
    watched = loader.store._backing.check_dataset.args[0].watched
    watched.seconds = 1000.0
    before = Slow.reads
    monkeypatch.setattr(changes, "digest_attributes", digest_attributes)
    list(loader)
    assert Slow.reads == before
    assert len(hashed) == 1  # where nothing was read, no read has changed an attribute
    watched.seconds = 1e-5
    list(loader)
    assert Slow.reads == before + staleness.MOST_CHECKED
    assert len(hashed) == 3


def test_of_large_values_fewer_are_hashed_when_an_epoch_begins(path, monkeypatch, capsys):
    """4,096 lists of records took a second in every epoch."""
    monkeypatch.setattr(changes, "EPOCH_SECONDS", 1e-9)
    monkeypatch.setattr(changes, "TOLD_SECONDS", 0.0)
    dataset = Labelled()
    dataset.boxes = {i: [{"box": [0.5] * 4, "label": i}] * (1 + i % 20) for i in range(1000)}
    loader = Loader(dataset, 100, cache=path)
    assert "hashing the dataset's attributes, most to dataset.boxes" in capsys.readouterr().err
    visited, feed = [], digests._feed_list
    monkeypatch.setattr(digests, "_feed_list", lambda *args: [visited.append(args), feed(*args)])
    list(loader)
    hashed = len(visited)
    assert hashed < 2 * 14 * changes.FEWEST * 2  # the lists of one value, twice
    dataset.boxes[0] = []
    with pytest.raises(StaleStoreError, match=r"dataset\.boxes has another content"):
        list(loader)


def test_where_there_is_no_dataset_nothing_is_compared(path):
    dataset = Labelled()
    loader = Loader(dataset, 100, cache=path)
    list(loader)
    loader.store.finish()
    copied = pickle.loads(pickle.dumps(loader.store))
    dataset.targets[OTHER] = 99
    assert len(list(Loader(copied, 100))) == 10
    assert len(list(Loader(memfeed.open(path), 100))) == 10
    assert len(list(DataLoader(loader.store, 100))) == 10


def test_of_large_attributes_some_values_are_hashed(path, monkeypatch):
    monkeypatch.setattr(changes, "EPOCH_SECONDS", 0.0)
    dataset = Labelled(30_000)
    watched = Watched(dataset, path)
    watched.follow()
    assert watched.changed() is None
    begun = time.monotonic()
    dataset.targets = [0] * 30_000
    assert watched.changed() == ("dataset.targets has another content", False)
    assert time.monotonic() - begun < 5
    dataset.targets = Labelled(30_000).targets
    dataset.targets.append(3)
    assert watched.changed() == ("dataset.targets has another content", False)


def test_a_sparse_matrix_that_is_a_dict_is_compared(path):
    matrix = pytest.importorskip("scipy.sparse").dok_matrix((N, 20))
    for i in range(N):
        matrix[i, i % 20] = 1.0

    dataset = Labelled()
    dataset.known = matrix  # pairs of users and items that a sampler of negatives leaves out
    list(Loader(dataset, 100, cache=path))
    list(Loader(dataset, 100, cache=path))
    matrix[OTHER, OTHER % 20] = 2.0
    with pytest.raises(StaleStoreError, match=r"dataset\.known\.data"):
        list(Loader(dataset, 100, cache=path))
