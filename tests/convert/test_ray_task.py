"""What a Ray task does, and what `cache` refuses with workers="ray": in this process, without Ray."""

import errno
import fcntl
import os
import pickle
import sys
from contextlib import contextmanager

import msgspec
import pytest
import torch

import memfeed
from memfeed.building.build import Build
from memfeed.building.claim import claim
from memfeed.building.partial import ABSENT, DURABLE, WRITTEN
from memfeed.cli import main
from memfeed.convert import ray_engine, watchdog
from memfeed.convert.forms import coded_schema, forms_of
from memfeed.convert.ray_engine import TaskSpec, _RayWorker, require_same_build
from memfeed.convert.write_run import Report, RunWriter, WritePlan
from memfeed.errors import BuildError, SampleError
from memfeed.schema.codec import decoded_row
from memfeed.schema.infer import infer
from memfeed.schema.tree import Flattener
from memfeed.store.ragged import ragged_files, read_rows
from memfeed.system import files


class Numbers:
    def __len__(self):
        return 20

    def __getitem__(self, row):
        if row == 13:
            raise KeyError(row)
        return torch.tensor([row, row]), torch.arange(row)


@pytest.fixture(autouse=True)
def _this_process_is_no_worker(monkeypatch):
    monkeypatch.setattr(ray_engine, "prepare_like_dataloader", lambda *_: None)
    monkeypatch.setattr(ray_engine, "VISIBLE_SECONDS", 0.0)


@contextmanager
def begun(path):
    """Yield a claimed build, and what a task gets of it."""
    found = infer([Numbers()[1], Numbers()[2]])
    with claim(path) as root:
        build = Build.begin(root, found.schema, 20, None)
        yield build, TaskSpec(root, build.settings, WritePlan(Flattener(found.structure)), b"", 1)


def with_dataset(spec, dataset, init=None):
    return spec._replace(pickled=pickle.dumps((dataset, init)))


def test_a_task_writes_rows_and_leaves_their_presence_to_the_head(path):
    with begun(path) as (build, spec):
        result = _RayWorker(with_dataset(spec, Numbers()), 0).compute(range(4, 9))
        assert result.marks == [(4, 5, WRITTEN)]
        assert (result.report.row_count, result.failure) == (5, None)
        assert not build.presence().any()
        x = (build.root / "0.memmap").read_bytes()
        assert torch.frombuffer(bytearray(x), dtype=torch.int64).view(20, 2)[4:9, 0].tolist() == [4, 5, 6, 7, 8]


def test_a_task_writes_compressed_rows(path):
    found = infer([Numbers()[1], Numbers()[2]])
    schema = coded_schema(found.schema, forms_of({1: "zstd"}))
    with claim(path) as root:
        build = Build.begin(root, schema, 20, None)
        spec = TaskSpec(root, build.settings, WritePlan(Flattener(found.structure)), b"", 1)
        result = _RayWorker(with_dataset(spec, Numbers()), 0).compute(range(4, 9))
        assert result.marks == [(4, 5, WRITTEN)]
        (row,) = read_rows(build.root, schema.fields[1], [7])
        assert decoded_row(schema.fields[1], row).buffers[0].view("int64").tolist() == list(range(7))


def test_a_task_tells_the_rows_that_it_wrote_before_an_error(path, monkeypatch):
    monkeypatch.setattr(WritePlan, "rows_per_write", 2)
    with begun(path) as (_, spec):
        result = _RayWorker(with_dataset(spec, Numbers()), 0).compute(range(10, 16))
    assert result.marks == [(10, 2, WRITTEN), (12, 1, WRITTEN)]
    ((row, failure),) = result.report.failed
    assert row == 13
    assert isinstance(failure.error, SampleError)
    assert str(failure.error).startswith("sample 13: the dataset raised KeyError: 13")
    assert isinstance(failure.cause, KeyError)


def test_the_columns_are_on_the_disk_before_a_task_ends(path, monkeypatch):
    synced = []
    monkeypatch.setattr(ray_engine._TaskBuild, "sync_columns", lambda self: synced.append(list(self.marks)))
    with begun(path) as (_, spec):
        worker = _RayWorker(with_dataset(spec, Numbers()), 0)
        worker.compute(range(3))
        worker.compute(range(13, 14))  # writes nothing
    assert synced == [[(0, 3, WRITTEN)]]


def test_a_sync_that_fails_for_one_task_fails_for_all_of_its_machine(path, monkeypatch):
    """They share the memory that is lost. Linux tells each descriptor that was open then, and no other."""
    lost, told, armed = [], set(), []

    class System:
        def __getattr__(self, name):
            return getattr(os, name)

        def fdatasync(self, fd):
            name = os.readlink(f"/proc/self/fd/{fd}")
            if name.endswith("0.memmap") and armed and not lost:
                lost.append(set(os.listdir("/proc/self/fd")))
            if lost and name.endswith("0.memmap") and str(fd) in lost[0] - told:
                told.add(str(fd))
                raise OSError(errno.EIO, "lost")

    monkeypatch.setattr(files, "os", System())
    with begun(path) as (_, spec):
        one, other = (_RayWorker(with_dataset(spec, Numbers()), number) for number in range(2))
        one.compute(range(1))
        other.compute(range(1, 2))
        armed.append(True)
        for worker in (one, other):
            with pytest.raises(BuildError, match="while waiting for the disk"):
                worker.compute(range(2, 4))


def test_rows_of_the_head_are_durable_before_a_task_can_hear_of_a_failed_sync(path, monkeypatch):
    """The head is not told of it: its own descriptors are newer, and its next sync succeeds."""
    told = []

    def tasks(ray, build, *_):
        told.append(build.presence()[[0, 19]].tolist())
        raise BuildError("0.memmap: found that the disk refused while waiting for the disk")

    monkeypatch.setattr(ray_engine, "_Tasks", tasks)
    with begun(path) as (build, spec):
        writer = RunWriter(build, spec.plan, may_promote=True)
        for index in (0, 19):  # as those that were probed
            writer.write(index, [spec.plan.flattener(Numbers()[index])], index, Report())
        writer.rows.close()
        with pytest.raises(BuildError), ray_engine.open_ray_tasks(None, build, b"", spec.plan, 1):
            pass
    assert told == [[DURABLE, DURABLE]]


def test_tasks_of_one_process_share_its_heap_space(path):
    """Space is granted in extents of 64 KiB: one for each task would make the heap larger than its rows."""
    with begun(path) as (build, spec):
        worker = _RayWorker(with_dataset(spec, Numbers()), 0)
        for row in range(1, 13):
            worker.compute(range(row, row + 1))
        assert ragged_files(build.root, build.schema.fields[1]).heap.stat().st_size == 64 << 10


def test_a_task_of_an_older_generation_writes_nothing(path):
    with begun(path) as (build, spec):
        worker = _RayWorker(with_dataset(spec, Numbers()), 0)
        build.bar_writers()
        result = worker.compute(range(3))
        assert isinstance(result.failure.error, BuildError)
        assert "found builder 2 at work; expected to be it (1)" in str(result.failure.error)
        assert result.marks == []
        assert (build.presence() == ABSENT).all()


def test_a_directory_that_a_node_does_not_see_is_refused(path, tmp_path):
    with begun(path) as (build, spec):
        require_same_build(build.root, spec.settings)
        with pytest.raises(BuildError, match="found on .* no such directory; expected the directory of the process"):
            require_same_build(tmp_path / "elsewhere.build", spec.settings)
        with pytest.raises(BuildError, match="another directory there"):
            require_same_build(tmp_path, spec.settings)
        with pytest.raises(BuildError, match="another build there"):
            require_same_build(build.root, msgspec.structs.replace(spec.settings, rows=21))


def test_locks_that_nodes_do_not_share_are_refused(path, monkeypatch):
    with begun(path) as (build, spec):
        monkeypatch.setattr(fcntl, "flock", lambda *_: None)  # as on a mount with local locks
        with pytest.raises(BuildError, match=r"its lock is free, although .* holds it; expected locks that all nodes"):
            require_same_build(build.root, spec.settings)


def test_a_dataset_whose_module_a_node_lacks_is_named(path):
    with begun(path) as (_, spec), pytest.raises(BuildError, match="cannot be unpickled on .*no_such_module"):
        _RayWorker(spec._replace(pickled=b"cno_such_module\nDataset\n."), 0)


def test_a_task_names_the_sample_that_does_not_return(path, monkeypatch, capfd):
    """Ray shows what a task prints to the head."""
    monkeypatch.setattr(watchdog, "STALL_SECONDS", 0.2)
    said = []

    class Slow(Numbers):
        def __getitem__(self, row):
            while row == 7 and not said:
                pass
            return super().__getitem__(row)

    monkeypatch.setattr(watchdog, "write_line", said.append)
    with begun(path) as (_, spec):
        monkeypatch.setattr(ray_engine, "_unpickle", lambda _: (Slow(), None))
        _RayWorker(spec, 0).compute(range(6, 9))
    assert f"process {os.getpid()} has been reading sample 7 for" in said[0]


def test_ray_that_is_not_installed_gets_the_line_that_installs_it(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"found workers=.ray. without Ray .*: pip install 'memfeed\[ray\]'"):
        memfeed.cache(Numbers(), path, workers="ray")
    assert not path.parent.exists() or not [*path.parent.iterdir()]


def test_options_that_mean_nothing_on_ray_are_refused(path):
    with pytest.raises(ValueError, match="found workers='ray' with lazily=True or without a path"):
        memfeed.cache(Numbers(), path, workers="ray", lazily=True)
    with pytest.raises(ValueError, match="found workers='ray:2' with lazily=True or without a path"):
        memfeed.cache(Numbers(), workers="ray:2")
    with pytest.raises(ValueError, match="found workers='ray'; expected a number"):
        memfeed.append(path, Numbers(), workers="ray")


@pytest.mark.parametrize("workers", ["dask", "ray:", "ray:0", "ray:-1", "ray:two", "ray:1:2", -1, 1.5])
def test_workers_of_no_meaning_are_refused(path, workers):
    with pytest.raises(ValueError, match=r"found workers=.*; expected 0 or more, None to choose, or \"ray\""):
        memfeed.cache(Numbers(), path, workers=workers)


@pytest.mark.parametrize("dataset", [torch.arange(20), iter([1, 2, 3])])
def test_rows_without_numbers_are_refused(path, dataset, monkeypatch):
    monkeypatch.setattr("memfeed.convert.cache.import_ray", lambda: None)
    with pytest.raises(ValueError, match='found workers="ray" for .*leave workers= out'):
        memfeed.cache(dataset, path, workers="ray")


def test_the_command_line_passes_the_engine(tmp_path, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ray_cli_sets.py").write_text("numbers = [(1, 2), (3, 4)]")
    assert main(["cache", "--workers", "ray", "ray_cli_sets:numbers", "out.mf"]) == 2
    assert 'found workers="ray" without Ray' in capfd.readouterr().err
