"""A Loader of any map-style dataset, where a DataLoader stood."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, get_worker_info

import memfeed
from memfeed import Loader
from memfeed.errors import LoaderError, RandomDataError, SampleError, StaleStoreError
from memfeed.system.messages import say_once
from memfeed.system.threads import end_all
from support import Made, wait_until

N = 50


def sample(i):
    return torch.full((4,), i), i


@pytest.fixture(autouse=True)
def quiet(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    end_all()  # a store in the traceback of an error lives on, and its workers with it


def rows(loader):
    return [labels.tolist() for _, labels in loader]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_stands_where_a_dataloader_stood(tmp_path, workers):
    dataset, path = Made(sample, N), tmp_path / "s.mf"
    expected = list(DataLoader(dataset, 8))
    for _ in range(2):
        for DataLoaderLike in (Loader,):
            loader = DataLoaderLike(dataset, 8, num_workers=workers, cache=path)
        for batch, other in zip(loader, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(batch, other, strict=True))
        assert sorted(sum(rows(Loader(dataset, 8, shuffle=True, num_workers=workers, cache=path)), [])) == [*range(N)]
        loader.store.finish()
    assert len(memfeed.open(path)) == N


@pytest.mark.parametrize("broken", [0, 4])
def test_a_sample_that_cannot_be_read_is_named(tmp_path, broken):
    def read(i):
        if i == broken:
            raise OSError("no such file")
        return sample(i)

    with pytest.raises(SampleError, match=f"sample {broken}: the dataset raised OSError: no such file; fix") as caught:
        Loader(Made(read, 7), 8, cache=tmp_path / "s.mf")
    assert isinstance(caught.value.__cause__, OSError)


def test_workers_run_what_dataloaders_run(tmp_path):
    def init(worker):
        get_worker_info().dataset.ready = True

    class Needs(Made):
        def __getitem__(self, i):
            assert get_worker_info() is None or self.ready
            return super().__getitem__(i)

    loader = Loader(Needs(sample, N), 8, num_workers=2, worker_init_fn=init, persistent_workers=True)
    assert sum(rows(loader), []) == list(range(N))


class Telling:
    """A sampler that says how many rows it has given."""

    def __init__(self):
        self.given = 0

    def __len__(self):
        return N

    def __iter__(self):
        for self.given in range(1, N + 1):
            yield self.given - 1


@pytest.mark.parametrize("cls", [DataLoader, Loader])
def test_a_sampler_is_drawn_batch_by_batch(cls):
    """What a sampler counts, and the generators that it draws from, are in a loop as with DataLoader."""
    sampler = Telling()
    given = [sampler.given for _ in cls(Made(sample, N), 8, sampler=sampler)]
    assert given == [8, 16, 24, 32, 40, 48, N]


@pytest.mark.parametrize(("count", "message"), [(2**70, "expected at most 4,096"), (1.5, "expected an int")])
def test_a_number_of_workers_that_cannot_be(count, message):
    with pytest.raises(LoaderError, match=rf"found num_workers=.*{message}"):
        Loader(Made(sample, N), 8, num_workers=count)


def test_another_way_to_start_processes_is_told(tmp_path, capsys, monkeypatch):
    say_once.cache_clear()
    used = torch.multiprocessing.get_start_method()
    other = "spawn" if used == "fork" else "fork"
    for number, context in enumerate((used, other, torch.multiprocessing.get_context(other))):
        loader = Loader(
            Made(sample, N), 8, num_workers=1, cache=tmp_path / f"{number}.mf", multiprocessing_context=context
        )
        assert sum(rows(loader), []) == list(range(N))
        loader.store.finish()
        told = [line for line in capsys.readouterr().err.splitlines() if "multiprocessing_context" in line]
        assert len(told) == (number == 1), "once"
        assert all(f"start with {used!r}" in line and f"set_start_method({other!r})" in line for line in told)


def test_without_a_path_the_store_is_temporary(tmp_path):
    loader = Loader(Made(sample, N), 8, shuffle=True, seed=1)
    assert sorted(sum(rows(loader), [])) == list(range(N))
    assert loader.store.path.parent.parent == tmp_path
    loader.store.finish()
    del loader
    wait_until(lambda: not list(tmp_path.iterdir()))


def test_subsets_and_concatenations_of_datasets(tmp_path):
    one, other = Made(sample, N), Made(lambda i: sample(i + N), N)
    assert sum(rows(Loader(Subset(one, range(5, 20)), 4)), []) == list(range(5, 20))
    assert sum(rows(Loader(ConcatDataset([one, other]), 16)), []) == list(range(2 * N))


def test_a_random_dataset_is_refused(tmp_path):
    with pytest.raises(RandomDataError, match="found random samples"):
        Loader(Made(lambda i: (torch.rand(3), i), N), 8, cache=tmp_path / "s.mf", decoders=())
    assert not list(tmp_path.iterdir())


def test_cache_beside_columns_in_memory_has_no_effect(tmp_path, capsys):
    say_once.cache_clear()
    loader = Loader(TensorDataset(torch.arange(3)), 2, cache=tmp_path / "s.mf")
    assert [rows.tolist() for (rows,) in loader] == [[0, 1], [2]]
    assert not list(tmp_path.iterdir())
    assert "cache= has no effect beside TensorDataset" in capsys.readouterr().err
    again = Loader(loader.dataset, 2, cache=loader.cache)
    assert [rows.tolist() for (rows,) in again] == [[0, 1], [2]]


def test_cache_beside_another_store_is_an_error(tmp_path):
    store = memfeed.cache([sample(i) for i in range(3)], tmp_path / "other.mf", progress=False)
    with pytest.raises(LoaderError, match=r"and a store at .*other\.mf, which is read as it is; .* leave cache= out"):
        Loader(store, 2, cache=tmp_path / "s.mf")


def test_a_dataset_without_samples_has_no_batches(tmp_path, capsys):
    say_once.cache_clear()
    for empty in (Made([]), [], Subset(Made(sample, N), [])):
        for shuffle in (False, True):
            loader = Loader(empty, 2, shuffle=shuffle, cache=tmp_path / "s.mf")
            assert (len(loader), list(loader)) == (0, [])
    assert not list(tmp_path.iterdir())
    assert "found an empty dataset (0 samples) of Made: its loader has no batches" in capsys.readouterr().err


def test_a_trainer_makes_the_loader_anew(tmp_path):
    loader = Loader(Made(sample, N), 8, cache=tmp_path / "s.mf")
    other = type(loader)(loader.dataset, loader.batch_size, collate_fn=loader.collate_fn, cache=loader.cache)
    assert rows(other) == rows(loader)


def test_a_seed_and_a_position_are_those_of_a_store(tmp_path):
    loader = Loader(Made(sample, N), 8, shuffle=True, seed=5, num_workers=1, cache=tmp_path / "s.mf")
    running = iter(loader)
    next(running)
    state = loader.state_dict()
    rest = [labels.tolist() for _, labels in running]
    loader.store.finish()
    other = Loader(Made(sample, N), 8, shuffle=True, seed=5, num_workers=1, cache=Path(tmp_path / "s.mf"))
    assert other.store._view.supply is None
    other.load_state_dict(state)
    assert rows(other) == rest


def test_a_pipeline_is_cut_before_its_random_steps(tmp_path):
    vision = pytest.importorskip("torchvision.transforms.v2")

    class Images(Made):
        def __init__(self, transform):
            super().__init__(None, N)
            self.transform = transform

        def __getitem__(self, i):
            return self.transform(torch.full((3, 8, 8), i, dtype=torch.uint8)), i

    flip = vision.Compose([vision.RandomHorizontalFlip(), vision.ToDtype(torch.float32, scale=True)])
    for _ in range(2):
        loader = Loader(Images(flip), 8, num_workers=1, cache=tmp_path / "s.mf")
        for images, labels in loader:
            assert images.dtype == torch.float32
            assert torch.equal(images[:, 0, 0, 0].mul(255).round().long(), labels)
        loader.store.finish()
        assert loader.store.column(0).dtype == torch.uint8


def test_ranks_without_a_path_are_told_that_each_fills_a_store(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    say_once.cache_clear()
    loader = memfeed.Loader([torch.ones(3)] * 20, 5)
    assert len(list(loader)) == 2
    assert "each rank fills a temporary store of its own" in capsys.readouterr().err


ENDS = """
import memfeed, torch

class Rows:
    def __len__(self):
        return 3000

    def __getitem__(self, i):
        return torch.zeros(3), i

if __name__ == "__main__":
    batches = iter(memfeed.Loader(Rows(), 8, shuffle=True, num_workers={workers}))
    next(batches)
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_an_iterator_that_lives_when_the_program_ends_says_nothing(tmp_path, workers):
    script = tmp_path / "ends.py"
    script.write_text(ENDS.format(workers=workers))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "ignored" not in done.stderr
    assert done.stderr.count("filled while it is read") == 1


class Scaled(Dataset):
    def __init__(self):
        self.level, self.split = 1.0, "train"
        self.transform = Noisy()

    def __len__(self):
        return N

    def __getitem__(self, index):
        return self.transform(torch.full((3,), float(index))) * self.level


class Noisy:
    sigma = 0.5

    def __call__(self, x):
        return x + self.sigma * torch.randn(3)


def test_an_attribute_set_through_the_loader_reaches_the_dataset(tmp_path):
    dataset = Scaled()
    loader = Loader(dataset, 8, cache=tmp_path / "s.mf")
    list(loader)
    loader.dataset.level = 2.0
    assert dataset.level == loader.dataset.level == 2.0
    with pytest.raises(StaleStoreError, match=r"dataset\.level has another content"):
        list(loader)


@pytest.mark.parametrize(("name", "value"), [("split", "val"), ("transform", None)])
def test_so_does_one_that_a_store_has_too(tmp_path, name, value):
    dataset = Scaled()
    loader = Loader(dataset, 8, cache=tmp_path / "s.mf")
    list(loader)
    setattr(loader.dataset, name, value)
    assert getattr(dataset, name) == value
    with pytest.raises(StaleStoreError, match=rf"dataset\.{name}"):
        list(loader)


def test_a_step_cannot_be_changed_through_the_loader_without_effect(tmp_path):
    loader = Loader(Scaled(), 8, cache=tmp_path / "s.mf")
    with pytest.raises(AttributeError, match=r"found 'sigma' set on Compose, .* dataset\.transform\.sigma = "):
        loader.dataset.transform.sigma = 0.25


@pytest.mark.parametrize("workers", [0, 2])
def test_a_collate_fn_gets_arrays_and_images_as_the_dataset_returned_them(tmp_path, workers):
    image = pytest.importorskip("PIL.Image")

    def made(i):
        pixels = torch.randint(0, 255, (9, 7 + i % 2, 3), dtype=torch.uint8).numpy()
        return {"image": image.fromarray(pixels), "grey": image.fromarray(pixels[..., 0]), "array": pixels, "i": i}

    samples = [made(i) for i in range(N)]
    dataset = Made(lambda i: dict(samples[i]), N)

    def collate(batch):
        assert {type(one["array"]).__name__ for one in batch} == {"ndarray"}
        assert {(one["image"].mode, one["grey"].mode) for one in batch} == {("RGB", "L")}
        return [[list(one[name].tobytes()) for name in ("image", "grey", "array")] for one in batch]

    expected = list(DataLoader(dataset, 8, collate_fn=collate))
    for _ in range(2):  # the second time the store is there
        loader = Loader(dataset, 8, collate_fn=collate, num_workers=workers, cache=tmp_path / "s.mf")
        for _ in range(2):
            assert str(list(loader)) == str(expected)
        loader.store.finish()


class Pixels(Dataset):
    def __len__(self):
        return N

    def __getitem__(self, index):
        return [torch.full((2, 2, 3), index, dtype=torch.uint8).numpy(), index]


def total(samples):
    return [int(pixels.astype(int).sum()) + index for pixels, index in samples]


@pytest.mark.parametrize("workers", [0, 2])
def test_so_does_a_loader_that_a_trainer_makes_of_the_parts(tmp_path, workers):
    loader = Loader(Pixels(), 8, collate_fn=total, cache=tmp_path / "s.mf")
    expected = list(DataLoader(Pixels(), 8, collate_fn=total))
    assert list(loader) == expected
    loader.store.finish()
    context = "spawn" if workers else None
    again = DataLoader(
        loader.dataset, 8, collate_fn=loader.collate_fn, num_workers=workers, multiprocessing_context=context
    )
    assert list(again) == expected
    one = Loader(Pixels(), None, collate_fn=lambda sample: total([sample]), cache=tmp_path / "s.mf")
    assert list(one) == list(DataLoader(Pixels(), None, collate_fn=lambda sample: total([sample])))


class SeededInWorkers(Dataset):
    """Seeds the generators of a worker at its first sample, as RAFT does."""

    def __init__(self):
        self.transform, self.is_seeded = Noisy(), False

    def __len__(self):
        return N

    def __getitem__(self, index):
        worker = get_worker_info()
        if worker is not None and not self.is_seeded:
            torch.manual_seed(worker.id)
            self.is_seeded = True
        return self.transform(torch.full((3,), float(index)))


def test_a_dataset_that_seeds_itself_in_workers_is_read_there_as_by_a_data_loader(tmp_path, capsys):
    inner = SeededInWorkers()
    loader = Loader(ConcatDataset([inner]), 8, num_workers=2, cache=tmp_path / "s.mf")
    assert "seeds a generator, in worker processes" in capsys.readouterr().err
    assert not inner.is_seeded
    expected = list(DataLoader(SeededInWorkers(), 8, num_workers=2))
    assert torch.equal(torch.cat(list(loader)), torch.cat(expected))
