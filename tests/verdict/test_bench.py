"""``memfeed.bench`` on programs whose reading and computing are sleeps, so that a busy machine changes little."""

import time
from pathlib import Path

import pytest
import torch
from made_loops import loop
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import memfeed
from memfeed.errors import LoaderError
from memfeed.verdict import bench
from memfeed.verdict.program import Program, describe
from memfeed.verdict.verdict import Verdict, load_verdict


class Slow(torch.utils.data.Dataset):
    """Samples that take a known time."""

    def __init__(self, seconds, length=600):
        self.seconds, self.length, self.reads = seconds, length, 0

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        time.sleep(self.seconds)
        self.reads += 1
        return torch.full((3, 8, 8), i % 251, dtype=torch.uint8), i % 2


def compute(seconds):
    return lambda batch: time.sleep(seconds)


def test_reading_that_takes_all_the_time(tmp_path):
    verdict = memfeed.bench(Slow(0.004), compute(0.001), batch_size=8, seconds=2)
    assert verdict.kind in ("helps", "cannot tell")
    assert verdict.ceiling.middle > 1.2
    assert verdict.gain_today.middle > 2
    assert verdict.today.middle("waiting") > 10 * verdict.memfeed.middle("waiting")
    assert verdict.best is not None
    assert verdict.sample.seconds > 0.004
    assert verdict.forms[0].name == "'raw'"
    assert verdict.forms[0].cores > 0
    assert verdict.store_bytes == verdict.forms[0].total_bytes == 600 * (3 * 8 * 8 + 8)
    assert len(str(verdict).splitlines()) <= 13
    verdict.save(tmp_path / "v.json")
    assert load_verdict(tmp_path / "v.json") == verdict


def test_a_note_says_that_the_least_rows_take_longer():
    verdict = memfeed.bench(Slow(0.02, 24), batch_size=4, seconds=1)
    assert "it took longer than the 1 s of seconds=: a turn reads 24 rows at least, and those take 0." in str(verdict)


def test_a_step_that_takes_all_the_time():
    verdict = memfeed.bench(Slow(0.0001), compute(0.05), batch_size=8, seconds=2)
    assert verdict.kind in ("does not help", "cannot tell")
    if verdict.kind == "does not help":
        assert "the step computes" in verdict.because or "workers" in verdict.because or "worker" in verdict.because


def test_data_that_is_read_once():
    verdict = memfeed.bench(Slow(0.004), compute(0.001), batch_size=8, seconds=5, epochs=1)
    assert verdict.kind in ("does not help", "cannot tell")


def test_without_a_step_it_cannot_tell():
    verdict = memfeed.bench(Slow(0.002), batch_size=8, seconds=3)
    assert verdict.kind == "cannot tell"
    assert verdict.repeated is None
    assert verdict.forms[0].cores is None


def test_columns_in_memory_are_read_in_place(capfd):
    columns = TensorDataset(torch.rand(4000, 8), torch.arange(4000))
    verdict = memfeed.bench(DataLoader(columns, 32, shuffle=True), lambda batch: batch[0].sum(), seconds=1)
    assert verdict.store_bytes == 0
    assert verdict.fill_seconds == 0
    assert verdict.forms == ()
    assert verdict.memfeed is not None
    assert capfd.readouterr() == ("", "")


class Files(torch.utils.data.Dataset):
    """Samples that are files."""

    def __init__(self, folder):
        self.names = [folder / f"{i}.bin" for i in range(64)]
        for name in self.names:
            name.write_bytes(bytes(5000))

    def __len__(self):
        return 64

    def __getitem__(self, i):
        return torch.frombuffer(bytearray(self.names[i].read_bytes()), dtype=torch.uint8)


@pytest.mark.parametrize(("memory", "cold"), [(10**12, []), (1000, ["the files", "the store"])])
def test_what_does_not_fit_in_memory_is_measured_cold(tmp_path, monkeypatch, memory, cold):
    evicted = []
    monkeypatch.setattr(bench, "memory_limit", lambda: memory)
    monkeypatch.setattr(bench, "evict", evicted.extend)
    verdict = memfeed.bench(Files(tmp_path), compute(0.0001), batch_size=8, seconds=1)
    assert [note[: note.index(" ", 4)] for note in verdict.notes] == cold
    assert bool(evicted) == bool(cold)
    if cold:
        assert {Path(name).name for name in evicted} >= {"0.bin", "63.bin"}
        assert any(f"/{bench.STORE}/" in name for name in evicted)


class InOneProcess(Slow):
    def __getitem__(self, i):
        if torch.utils.data.get_worker_info() is not None:
            raise OSError("no connection here")
        return super().__getitem__(i)


def test_workers_that_fail_are_not_measured():
    verdict = memfeed.bench(InOneProcess(0.0005, 200), batch_size=8, seconds=1)
    assert verdict.best is None
    assert any("not measured with 1 worker: " in note and "no connection here" in note for note in verdict.notes)


@pytest.mark.parametrize(("persistent", "starts"), [(True, 1), (False, 3)])
def test_workers_start_as_often_as_in_the_program(persistent, starts):
    data = Starts(0.0002, 40)
    loader = DataLoader(data, 8, num_workers=1, persistent_workers=persistent, worker_init_fn=data.started)
    measurement = bench._Bench(describe(loader, None, None, None, None), None, 1.0, Path())
    measurement.rows = list(range(40))
    for _ in range(3):
        measurement._torch_turn(1, 0.0)
    assert data.count.value == starts


def test_a_number_of_workers_that_won_by_chance_is_left_out():
    today = loop("today", [1.0, 1.2, 1.1])
    assert bench._faster(loop("2 workers", [1.3, 1.4, 0.5]), today, 100) is None
    assert bench._faster(loop("2 workers", [0.5, 1.4, 0.5]), today, 100).name == "2 workers"
    assert bench._faster(None, today, 100) is None


class Starts(Slow):
    """Samples that count the worker processes."""

    def __init__(self, seconds, length):
        super().__init__(seconds, length)
        self.count = torch.multiprocessing.Value("i", 0)

    def started(self, worker):
        with self.count.get_lock():
            self.count.value += 1


class Noisy(Slow):
    def __getitem__(self, i):
        time.sleep(self.seconds)
        return torch.rand(3)


def test_random_samples_say_what_is_kept_in_their_place():
    verdict = memfeed.bench(Noisy(0.001, 200), compute(0.001), batch_size=8, seconds=3)
    assert verdict.kind != "helps"
    assert any("decoded files are kept" in note for note in verdict.notes)


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(range(9))


@pytest.mark.parametrize("source", [Numbers(), DataLoader(Numbers(), 3), iter([1])])
def test_samples_without_numbers_cannot_be_read_in_turns(source):
    verdict = memfeed.bench(source, print)
    assert verdict.kind == "cannot tell"
    assert "have no numbers" in verdict.headline()
    assert len(str(verdict).splitlines()) <= 13


@pytest.mark.parametrize(
    ("source", "options", "said"),
    [
        ([1, 2], {"step": 3}, "found step=3; expected a function of a batch"),
        ([], {}, "found an empty dataset"),
        (3, {}, r"found 3 \(int\); expected a dataset, or its DataLoader"),
        (time, {}, "found <module 'time'.*expected a dataset"),
        ([1, 2], {"device": "meta"}, "expected cpu or cuda"),
        ([1, 2], {"device": "cuda:99"}, "found device cuda:99; this machine has"),
        ([1, 2], {"device": "cudda"}, "found device 'cudda'; expected one that torch knows"),
        (DataLoader([1, 2]), {"batch_size": 4}, "found a DataLoader with batch_size="),
        (memfeed.Loader(torch.arange(4)), {}, "found a Loader, which memfeed reads already"),
    ],
)
def test_what_cannot_be_measured_is_an_error(source, options, said):
    with pytest.raises(LoaderError, match=said):
        memfeed.bench(source, **options)


def test_an_error_of_the_step_and_of_the_dataset_reach_the_caller():
    def fail(batch):
        raise RuntimeError("no such layer")

    with pytest.raises(RuntimeError, match="no such layer"):
        memfeed.bench(Slow(0.0001), fail, batch_size=8, seconds=1)

    class Broken(Slow):
        def __getitem__(self, i):
            raise KeyError("gone")

    with pytest.raises(KeyError, match="gone"):
        memfeed.bench(Broken(0.0001), seconds=1)


def test_random_numbers_are_where_they_were():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    memfeed.bench(Noisy(0.0001, 64), batch_size=8, seconds=1)
    assert torch.equal(torch.rand(2), expected)


def test_a_turn_has_its_parts_apart():
    def batches():
        for number in range(5):
            time.sleep(0.05 if not number else 0.01)
            yield torch.zeros(4)

    turn = Program([], 4, 0, False, step=compute(0.02)).run_turn(batches, [4] * 5, 1, 0.0)
    assert turn.rows == 16
    assert 0.0025 <= turn.waiting < turn.computing
    assert turn.computing >= 0.005
    assert turn.first_seconds >= 0.05
    assert turn.start_seconds == pytest.approx(turn.first_seconds - 4 * turn.waiting)
    assert turn.epoch_seconds(20) == pytest.approx(20 * turn.seconds_a_row + turn.start_seconds)


def test_batches_go_to_the_device_in_a_step_of_their_own():
    seen = []
    batches = [{"x": torch.zeros(2), "name": ["a", "b"]}] * 3
    device = torch.device("cpu")
    Program([], 2, 0, False, step=seen.append, device=device).run_turn(lambda: batches, [2] * 3, 1, 0.0)
    assert [one["name"] for one in seen] == [["a", "b"]] * 3


def test_a_verdict_without_loops_has_a_page():
    one = Verdict("cannot tell", "of a test", "something", 0, 0, 0)
    assert "of a test" in one._repr_html_()
