"""Stores that are filled while they are read."""

import gc
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset, get_worker_info

import memfeed
from memfeed import Loader, Tokens
from memfeed.convert.probe import probe_indices
from memfeed.convert.staleness import MOST_CHECKED
from memfeed.errors import (
    BuildError,
    LoaderError,
    RandomDataError,
    RowError,
    SampleError,
    SchemaError,
    SpaceError,
    StaleStoreError,
    StoreError,
)
from memfeed.system.threads import end_all
from short_form import short_form
from support import Made, cache, equal, processes_of, rich_sample, wait_until

N = 60


@pytest.fixture(autouse=True)
def no_filler_is_left():
    """A store in the traceback of an error lives on, and its workers with it."""
    yield
    end_all()
    assert not multiprocessing.active_children()


class Logged(Made):
    """Writes the number of each sample that is read to a file. Calls ``before`` first, if there is one."""

    def __init__(self, samples, n, log, before=None):
        super().__init__(samples, n)
        self.log, self.before = str(log), before

    def __getitem__(self, index):
        if self.before is not None:
            self.before(index)
        with open(self.log, "a") as file:
            file.write(f"{index}\n")
        return super().__getitem__(index)


def read_of(log):
    return sorted(map(int, Path(log).read_text().split()))


def row(i):
    return {"x": torch.full((5,), i), "r": torch.arange(i % 4), "t": f"{i}"}


def fill(dataset, path, workers=2, **options):
    return cache(dataset, path, lazily=True, workers=workers, **options)


def numbers(batches):
    return [batch["x"][:, 0].tolist() for batch in batches]


def data_files(path):
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in Path(path).rglob("*.memmap")
        if file.name not in ("start.memmap",)
    }


@pytest.mark.parametrize("workers", [0, 2])
def test_a_filled_store_is_the_one_that_cache_writes(tmp_path, workers):
    log = tmp_path / "log"
    expected = cache(Made(rich_sample, N), tmp_path / "c.mf", workers=0)
    dataset = Logged(rich_sample, N, log)
    store = fill(dataset, tmp_path / "s.mf", workers)
    probed = 16
    assert store.progress().total == N
    for epoch in range(2):
        order = []
        for rows, batch in zip_rows(Loader(store, 8, shuffle=True, seed=3, return_rows=True)):
            order += rows
            for at, one in enumerate(rows):
                assert equal(batch["image"][at], expected[one]["image"])
                assert equal(batch["picture"][at], expected[one]["picture"])
                assert batch["text"][at] == expected[one]["text"]
                assert batch["meta"][at] == expected[one]["meta"]
        assert sorted(order) == list(range(N)), epoch
    store.finish()
    assert store.progress() == (N, N, 0)
    assert all(equal(store[i], expected[i]) for i in range(N))
    assert data_files(tmp_path / "s.mf") == data_files(tmp_path / "c.mf")
    store.verify()
    assert not (tmp_path / "s.mf.build").exists()
    # the probe reads some samples twice, the check before the commit some once more, and each epoch begins with a few
    counts = np.bincount(read_of(log))
    assert np.count_nonzero(counts == 1) >= N - 2 * probed - 2 * MOST_CHECKED
    assert memfeed.open(tmp_path / "s.mf")._view.manifest == store._view.manifest


def zip_rows(loader):
    for batch in loader:
        yield batch["rows"].tolist(), batch


def test_the_order_of_the_loader_comes_first(tmp_path):
    log = tmp_path / "log"
    store = fill(Logged(row, 400, log, lambda i: time.sleep(0.002)), tmp_path / "s.mf", 1, allow="random")
    first = next(iter(Loader(store, 8, shuffle=True, seed=1)))
    assert len(first["t"]) == 8
    assert store.progress().present < 300, "the first batch did not wait for the store"
    assert {int(t) for t in first["t"]} <= set(read_of(log))


def test_the_store_commits_itself_though_rows_were_never_visited(tmp_path):
    store = fill(Made(row, N), tmp_path / "s.mf")
    assert len(numbers(Loader(Subset(store, range(10)), 4, drop_last=True))) == 2
    wait_until((tmp_path / "s.mf").exists)
    assert len(memfeed.open(tmp_path / "s.mf")) == N


def test_an_existing_store_is_opened(tmp_path):
    cache(Made(row, N), tmp_path / "s.mf")
    store = fill(Made(row, N), tmp_path / "s.mf")
    assert store._view.supply is None
    store.finish()
    with pytest.raises(StaleStoreError):
        fill(Made(lambda i: row(i + 1), N), tmp_path / "s.mf")


def small(i):
    return {"x": torch.full((5,), i), "r": torch.arange(i % 4)}


def train(path, log, workers, rank, world, batches, out, seconds):
    """Train one epoch, from the state in ``out`` if there is one, and kill this process after some batches."""
    os.setsid()  # its workers are the processes of this session
    dataset = Logged(small, 120, log, lambda i: time.sleep(seconds))
    store = fill(dataset, path, workers, allow="random")
    loader = Loader(store, 5, shuffle=True, seed=4, ranks=(rank, world))
    if Path(out).exists():
        loader.load_state_dict(json.loads(Path(out).read_text()))
    for at, batch in enumerate(loader):
        rows = batch["x"][:, 0].tolist()
        assert [len(r) for r in batch["r"].unbind()] == [i % 4 for i in rows]
        with open(f"{out}.rows", "a") as file:
            file.write(" ".join(map(str, rows)) + "\n")
        if at + 1 == batches:
            Path(out).write_text(json.dumps(loader.state_dict()))
            os.kill(os.getpid(), signal.SIGKILL)
    store.finish()


def start(*arguments):
    process = multiprocessing.get_context("fork").Process(target=train, args=arguments)
    process.start()
    return process


def end(process, code=0):
    process.join(60)
    assert process.exitcode == code


@pytest.mark.parametrize("workers", [0, 2])
def test_after_a_kill_no_present_row_is_read_again_and_the_batches_left_are_those_due(tmp_path, workers):
    path, log, out = tmp_path / "s.mf", tmp_path / "log", tmp_path / "out"
    killed = start(path, log, workers, 0, 1, 7, out, 0.01)
    end(killed, -signal.SIGKILL)
    wait_until(lambda: not processes_of(killed.pid))  # its workers end
    presence = np.fromfile(tmp_path / "s.mf.build" / ".build" / "presence", np.uint8)
    present = set(np.flatnonzero(presence).tolist())
    assert 35 <= len(present) < 120
    Path(log).write_text("")
    resumed = start(path, log, workers, 0, 1, 0, out, 0)
    end(resumed)
    again = read_of(log)
    probed = 16  # under allow_random each probed sample is read once
    assert len([i for i in again if i in present]) <= probed
    counts = np.bincount([i for i in again if i not in present], minlength=120)
    assert counts.max() <= 2
    batches = [list(map(int, line.split())) for line in Path(f"{out}.rows").read_text().splitlines()]
    order = [rows.tolist() for rows in Loader(torch.arange(120), 5, shuffle=True, seed=4)]
    assert batches == order
    assert len(memfeed.open(path)) == 120


@pytest.mark.long
@pytest.mark.parametrize("seconds", [0.005, 0.1], ids=["together", "one_joins_after_the_commit"])
def test_two_ranks_read_every_row_once_and_one_commits(tmp_path, seconds):
    path, log = tmp_path / "s.mf", tmp_path / "log"
    ranks = [start(path, log, 2, rank, 2, 0, tmp_path / f"out{rank}", [0.005, seconds][rank]) for rank in range(2)]
    for rank in ranks:
        end(rank)
    counts = np.bincount(read_of(log), minlength=120)
    probed = np.isin(np.arange(120), probe_indices(120))
    assert set(counts[~probed].tolist()) == {1}, "beyond the probes of the ranks no row is read twice"
    # a rank that probes while the other one commits compares the samples with the store that it finds then
    assert counts[probed].max() <= 1 + 1 + 2
    batches = [
        list(map(int, line.split()))
        for rank in range(2)
        for line in (tmp_path / f"out{rank}.rows").read_text().splitlines()
    ]
    assert sorted(sum(batches, [])) == list(range(120))
    expected = cache(Made(small, 120), tmp_path / "c.mf")
    assert data_files(path) == data_files(tmp_path / "c.mf")
    assert all(equal(memfeed.open(path)[i], expected[i]) for i in range(120))


def test_the_rank_that_is_left_commits(tmp_path):
    path, log = tmp_path / "s.mf", tmp_path / "log"
    killed = start(path, log, 1, 0, 2, 4, tmp_path / "out0", 0.01)
    wait_until((tmp_path / "s.mf.build" / ".build" / "fillers").exists)
    left = start(path, log, 1, 1, 2, 0, tmp_path / "out1", 0.01)
    end(killed, -signal.SIGKILL)
    end(left)
    assert len(memfeed.open(path)) == 120


def bad_at(*bad):
    def before(i):
        if i in bad:
            raise ValueError(f"no sample {i}")

    return before


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_is_raised_when_its_row_is_due(tmp_path, workers):
    dataset = Logged(row, N, tmp_path / "log", bad_at(17))
    store = fill(dataset, tmp_path / "s.mf", workers)
    for _ in range(2):
        assert sum(map(len, numbers(Loader(store.subset(range(17)), 5)))) == 17
    got = []
    with pytest.raises(SampleError, match="sample 17: the dataset raised ValueError: no sample 17") as raised:
        for batch in Loader(store, 5):
            got += batch["x"][:, 0].tolist()
    assert got == list(range(15))
    assert isinstance(raised.value.__cause__, ValueError)
    with pytest.raises(SampleError, match="sample 17"):
        store.finish()
    assert not (tmp_path / "s.mf").exists()


def test_rows_that_are_there_are_known_without_reading_the_dataset(tmp_path):
    def sample(i):
        if i == 2:
            raise ValueError("row 2")
        return {"x": i}

    dataset = Logged(sample, N, tmp_path / "log")
    store = fill(dataset, tmp_path / "s.mf", workers=0, on_error="skip")
    _ = next(iter(Loader(store, 4)))
    read = read_of(tmp_path / "log")
    late = max(set(range(N)) - set(read))
    with store._view.present_now(np.array([0, 2, late])) as there:
        assert there.tolist() == [True, False, False]
    assert read_of(tmp_path / "log") == read


@pytest.mark.parametrize("workers", [0, 2])
def test_a_skipped_row_is_masked_and_ranks_stay_in_step(tmp_path, workers):
    dataset = Logged(row, N, tmp_path / "log", bad_at(17, 18, 19))
    store = fill(dataset, tmp_path / "s.mf", workers, on_error="skip")
    for epoch in range(2):
        counted = []
        for rank in range(2):
            batches = list(Loader(store, 5, shuffle=True, seed=epoch, ranks=(rank, 2)))
            assert [len(batch["x"]) for batch in batches] == [5] * 6
            counted += [x for batch in batches for x in batch["x"][batch["valid"]][:, 0].tolist()]
        assert sorted(counted) == sorted(set(range(N)) - {17, 18, 19})
        with pytest.raises(RowError, match="row 17"):
            store[17]
        store.finish()
    assert store.progress() == (N - 3, N, 3)
    assert store.skipped == (17, 18, 19)
    other = fill(dataset, tmp_path / "s.mf", on_error="skip")
    assert other.skipped == (17, 18, 19)
    (batch, *_) = Loader(other, 5)
    assert batch["valid"].tolist() == [True] * 5, "the batches of a script stay of one form"


def test_drift_is_refused_with_the_row(tmp_path):
    dataset = Made(lambda i: {"x": torch.zeros(2 if i == 30 else 3)}, N)
    probe = [i for i in range(N) if i != 30]
    path = tmp_path / "s.mf"

    def read():
        store = fill(dataset, path)
        assert sum(len(batch["x"]) for batch in Loader(store.subset(probe), 8)) == N - 1
        with pytest.raises(
            SchemaError, match=r"sample 30, field x: found dims \[2\].*memfeed.cache\(dataset, '.*s.mf'\)"
        ):
            list(Loader(store, 8))
        os._exit(7)

    process = multiprocessing.get_context("fork").Process(target=read)
    process.start()
    end(process, 7)
    written = cache(dataset, path)  # as the message says
    assert len(written) == N
    assert written[30]["x"].shape == (2,)


def test_another_dataset_and_other_settings_are_refused(tmp_path):
    slow = Logged(row, N, tmp_path / "log", lambda i: time.sleep(0.01))
    store = fill(slow, tmp_path / "s.mf", 1)
    with pytest.raises(StaleStoreError, match="no longer matches"):
        fill(Made(lambda i: row(i + 1), N), tmp_path / "s.mf")
    with pytest.raises(BuildError, match="on_error='raise'"):
        fill(slow, tmp_path / "s.mf", on_error="skip")
    with pytest.raises(BuildError, match="thread is building it already"):
        cache(slow, tmp_path / "s.mf")
    assert len(store) == N


def test_what_is_no_map_style_dataset_is_refused(tmp_path):
    with pytest.raises(SchemaError, match="an iterable, and lazily=True"):
        fill(iter(range(3)), tmp_path / "s.mf", 0)
    with pytest.raises(SchemaError, match="columns"):
        fill(torch.arange(3), tmp_path / "s.mf")
    with pytest.raises(ValueError, match="lazily=True with overwrite=True"):
        fill(Made(row, 3), tmp_path / "s.mf", overwrite=True)
    with pytest.raises(RandomDataError):
        fill(Made(lambda i: torch.rand(2), 30), tmp_path / "s.mf")
    assert not list(tmp_path.iterdir())


def test_what_needs_all_rows_says_so(tmp_path):
    gate = tmp_path / "gate"

    def wait(i):
        while i == 8 and not gate.exists():
            time.sleep(0.01)

    gate.touch()
    dataset = Logged(row, N, tmp_path / "log", wait)
    probed = memfeed.cache(Made(row, N), tmp_path / "c.mf", progress=False)._view.manifest.fingerprint.probes
    assert 8 not in {probe.index for probe in probed}
    gate.unlink()
    store = fill(dataset, tmp_path / "s.mf", 1)
    for use in (
        lambda: store.column("x"),
        lambda: store.tensordict(),
        lambda: store.to("cpu"),
        lambda: store.lengths("r"),
        lambda: store.packed("r", 4),
        lambda: store.verify(),
    ):
        with pytest.raises(StoreError, match=r"is being filled .* of 60 rows .*store.finish"):
            use()
    for options in ({"bucket_by": "r"}, {"bucket_by": Tokens(64)}):
        with pytest.raises(LoaderError, match="which is being filled"):
            Loader(store, **options)
    with pytest.raises(LoaderError, match="a list of stores"):
        Loader([store, store])
    gate.touch()
    store.finish()
    assert store.column("x").shape == (N, 5)
    assert int(store.lengths("r").sum()) == sum(i % 4 for i in range(N))
    assert len(pickle.loads(pickle.dumps(store))) == N
    assert len(numbers(Loader([store, store], 30))) == 4


def test_a_validation_pass_comes_between(tmp_path):
    store = fill(Logged(row, 200, tmp_path / "log", lambda i: time.sleep(0.001)), tmp_path / "s.mf")
    train, val = store.split([0.8, 0.2], seed=1)
    loader, seen = Loader(train, 10, shuffle=True, seed=0), []
    for at, batch in enumerate(loader):
        seen += batch["x"][:, 0].tolist()
        if at % 5 == 2:
            assert sorted(sum(numbers(Loader(val, 10)), [])) == sorted(val[i]["x"][0].item() for i in range(40))
    assert len(set(seen)) == 160


def test_a_dataloader_with_forked_workers_reads_it(tmp_path):
    store = fill(Made(row, N), tmp_path / "s.mf")
    loader = DataLoader(store, 10, num_workers=2, collate_fn=memfeed.Collate(), multiprocessing_context="fork")
    assert numbers(loader) == [list(range(at, at + 10)) for at in range(0, N, 10)]


def test_workers_are_as_dataloaders(tmp_path):
    def init(worker):
        get_worker_info().dataset.ready = worker

    class Needs(Made):
        def __getitem__(self, i):
            if get_worker_info() is not None:
                assert self.ready == get_worker_info().id
            return super().__getitem__(i)

    fill(Needs(row, N), tmp_path / "s.mf", worker_init_fn=init).finish()
    cache(Needs(row, N), tmp_path / "c.mf", workers=2, worker_init_fn=init)
    with pytest.raises(AssertionError, match="ready|Error"):
        try:
            fill(Needs(row, N), tmp_path / "d.mf").finish()
        except Exception as error:
            raise AssertionError(str(error.__cause__) + "Error") from error


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_that_gives_several_samples_at_once_is_asked_for_lists(workers, tmp_path):
    class Several(Made):
        def __getitems__(self, indices):
            with open(tmp_path / "log", "a") as file:
                file.write("".join(f"{index}\n" for index in indices))
            return [row(index) for index in indices]

    store = fill(Several(row, N), tmp_path / "s.mf", workers)
    store.finish()
    assert all(equal(store[i], row(i)) for i in range(N))
    assert sorted({*read_of(tmp_path / "log"), *probe_indices(N)}) == list(range(N))
    compared = 8  # of the probe: whether they are the same if they are read together
    assert len(read_of(tmp_path / "log")) == N - len(probe_indices(N)) + compared


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_are_read_one_by_one_where_reading_several_fails(workers, tmp_path):
    """An error belongs to one row."""

    class Several(Logged):
        def __getitems__(self, indices):
            raise AssertionError("is for samples that are collated")

    store = fill(Several(row, N, tmp_path / "log", bad_at(17)), tmp_path / "s.mf", workers)
    assert sum(map(len, numbers(Loader(store.subset(range(17)), 5)))) == 17
    with pytest.raises(SampleError, match="sample 17: the dataset raised ValueError"):
        store.finish()


def test_the_death_of_a_worker_is_an_error_or_a_skipped_row(tmp_path):
    def die(i):
        if i == 17 and get_worker_info() is not None:
            os.kill(os.getpid(), 9)

    dataset = Logged(row, N, tmp_path / "log", die)
    with pytest.raises(BuildError, match="a worker process died while it read sample 17"):
        fill(dataset, tmp_path / "s.mf").finish()
    store = fill(dataset, tmp_path / "t.mf", on_error="skip")
    store.finish()
    assert store.progress() == (N - 1, N, 1)


def test_a_full_disk_is_an_error_and_the_rows_are_kept(tmp_path, monkeypatch):
    from memfeed.building.rows import RowWriter

    write = RowWriter.write_runs

    def full(self, runs, columns):
        if any(first <= 41 < first + count for first, count in runs):
            raise SpaceError(28, "found no room")
        return write(self, runs, columns)

    monkeypatch.setattr(RowWriter, "write_runs", full)
    store = fill(Logged(row, N, tmp_path / "log"), tmp_path / "s.mf", 1)
    with pytest.raises(SpaceError, match="found no room"):
        store.finish()
    del store
    monkeypatch.undo()
    gc.collect()
    end_all()
    store = fill(Logged(row, N, tmp_path / "log"), tmp_path / "s.mf", 1)
    assert store.progress().present >= 16
    store.finish()


def test_a_state_of_a_store_that_was_filled_is_good_for_the_finished_one(tmp_path):
    store = fill(Made(row, N), tmp_path / "s.mf")
    train = store.subset(range(5, N))
    running = iter(loader := Loader(train, 5, shuffle=True, seed=9))
    got = numbers([next(running), next(running)])
    state = loader.state_dict()
    rest = numbers(running)
    store.finish()
    finished = memfeed.open(tmp_path / "s.mf").subset(range(5, N))
    assert finished.digest == train.digest != state["store"]
    loader.load_state_dict(state)
    assert numbers(loader) == rest
    other = Loader(finished, 5, shuffle=True, seed=9)
    other.load_state_dict(state)
    assert numbers(other) == rest
    assert len(got) + len(rest) == 11
    with pytest.raises(LoaderError, match="found a state with store"):
        Loader(memfeed.open(tmp_path / "s.mf").subset(range(4, N - 1)), 5, shuffle=True, seed=9).load_state_dict(state)


def test_a_temporary_store_is_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", None)
    store = fill(Made(row, N), None)
    assert sum(map(len, numbers(Loader(store, 7, shuffle=True)))) == N
    assert list(tmp_path.iterdir())
    store.finish()
    del store
    wait_until(lambda: not list(tmp_path.iterdir()))


@pytest.mark.parametrize("workers", short_form([2, 0]))
def test_a_program_that_ends_waits_for_the_commit(tmp_path, workers):
    program = (
        "import sys, torch, memfeed\n"
        "dataset = [torch.ones(3)] * 50\n"
        "list(memfeed.Loader(dataset, 5, num_workers=int(sys.argv[1]), cache=sys.argv[2]))"
    )
    subprocess.run([sys.executable, "-c", program, str(workers), str(tmp_path / "s.mf")], check=True, timeout=120)
    assert len(memfeed.open(tmp_path / "s.mf")) == 50
    assert [path.name for path in tmp_path.iterdir()] == ["s.mf"]


def test_a_store_that_is_dropped_when_it_is_full_commits_itself(tmp_path):
    store = fill(Made(row, N), tmp_path / "s.mf")
    assert sum(map(len, numbers(Loader(store, 7, shuffle=True)))) == N
    del store
    gc.collect()
    end_all()
    assert len(memfeed.open(tmp_path / "s.mf")) == N


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batches", [1, 8])
def test_a_store_is_built_at_once_after_its_loader_was_dropped(tmp_path, workers, batches):
    loader = Loader(fill(Made(small, N), tmp_path / "a.mf", workers), 8)
    read = [batch["x"][:, 0].tolist() for batch, _ in zip(loader, range(batches), strict=False)]
    assert sum(read, []) == list(range(min(8 * batches, N)))
    del loader
    gc.collect()
    store = cache(Made(small, N), tmp_path / "a.mf")
    assert store.column("x")[:, 0].tolist() == list(range(N))


def test_a_thread_does_not_wait_for_a_store_that_it_fills_since_another_loader_was_dropped(tmp_path):
    first = Loader(fill(Made(small, N), tmp_path / "a.mf", 0), 8)
    second = Loader(fill(Made(small, N), tmp_path / "a.mf", 0), 8)
    next(iter(second))
    lead = second.store._backing.supply
    del first
    gc.collect()
    wait_until(lambda: lead._lead is not None)
    with pytest.raises(BuildError, match="this very thread is building it already"):
        cache(Made(small, N), tmp_path / "a.mf")


def test_photographs_of_one_short_side_are_lists_though_the_first_are_all_landscapes(tmp_path):
    """A column that is read while it is filled cannot change: its batches are lists from the beginning."""
    upright = 17  # is not probed

    def photo(i):
        return {
            "x": torch.full((5,), i),
            "image": torch.full((3, 9, 6) if i == upright else (3, 6, 6 + i % 4), i).byte(),
        }

    expected = cache(Made(photo, N), tmp_path / "c.mf", workers=0)
    assert upright not in {probe.index for probe in expected._view.manifest.fingerprint.probes}
    store = fill(Made(photo, N), tmp_path / "s.mf")
    for batch in Loader(store, 8, shuffle=True, seed=0):
        for image, x in zip(batch["image"], batch["x"][:, 0].tolist(), strict=True):
            assert torch.equal(image, photo(x)["image"])
    store.finish()
    assert store.schema.fields == memfeed.open(tmp_path / "c.mf").schema.fields
    assert len(fill(Made(photo, N), tmp_path / "s.mf")) == N, "the same call opens it"
    spectra = fill(Made(lambda i: torch.zeros(1, 4, 5 + i % 3), N), tmp_path / "t.mf")
    assert spectra.schema.fields[0].kind == "jagged"


def test_masks_of_photographs_are_lists_as_these_are_and_so_are_photographs_of_floats_before_a_cut(tmp_path):
    """A portrait among landscapes has another mask too, and a pipeline may make floats before its first random step."""
    upright = 17  # is not probed

    class Scenes:
        transform = staticmethod(
            lambda image, mask: (image.flip(-1), mask.flip(-1)) if torch.rand(()) < 0.5 else (image, mask)
        )

        def __init__(self, dtype):
            self.dtype = dtype

        def __len__(self):
            return N

        def __getitem__(self, i):
            sides = (9, 6) if i == upright else (6, 6 + i % 4)
            image, mask = self.transform(torch.full((3, *sides), i, dtype=self.dtype), torch.full((2, *sides), i))
            return image[:, :6, :6].clone(), mask[:, :6, :6].clone()

    for dtype in (torch.uint8, torch.float32):
        path = tmp_path / f"{dtype}.mf"
        loader = Loader(Scenes(dtype), 8, cache=path)
        for _ in range(2):
            images, masks = (torch.cat(leaves) for leaves in zip(*loader, strict=True))
            assert images[:, 0, 0, 0].tolist() == masks[:, 0, 0, 0].tolist() == list(range(N))
        loader.dataset.finish()
        assert {field.kind for field in memfeed.open(path).schema.fields} == {"list"}


def test_a_state_from_before_rows_were_left_out_says_what_to_do(tmp_path):
    store = fill(Logged(row, N, tmp_path / "log", bad_at(18)), tmp_path / "s.mf", on_error="skip")
    loader = Loader(store, 5, shuffle=True, seed=1)
    loader.set_epoch(3)
    next(iter(loader))
    state = loader.state_dict()
    store.finish()
    other = Loader(memfeed.open(tmp_path / "s.mf"), 5, shuffle=True, seed=1)
    with pytest.raises(LoaderError, match=r"60 rows; the finished store has 59.*loader.set_epoch\(3\)"):
        other.load_state_dict(state)
    other.set_epoch(3)
    assert len(list(other)) == 12


def test_the_commit_begins_when_the_last_row_is_there(tmp_path, monkeypatch):
    """And not with the next look of the thread, which would be an hour later here."""
    monkeypatch.setattr("memfeed.convert.dataset_supply.TICK_SECONDS", 3600.0)
    for workers in (0, 2):
        store = fill(Made(row, N), tmp_path / f"{workers}.mf", workers)
        assert len(numbers(Loader(store, 10))) == 6
        store.finish()
        assert len(memfeed.open(tmp_path / f"{workers}.mf")) == N


def test_who_waits_for_the_end_commits_where_the_builder_has_ended(tmp_path):
    builder = fill(Made(row, N), tmp_path / "s.mf", 0)
    other = fill(Made(row, N), tmp_path / "s.mf", 0)
    waiting = threading.Thread(target=other.finish, daemon=True)
    waiting.start()
    wait_until(lambda: other.progress().present == N)
    time.sleep(0.1)
    del builder
    waiting.join(60)
    assert not waiting.is_alive()
    assert len(memfeed.open(tmp_path / "s.mf")) == N
