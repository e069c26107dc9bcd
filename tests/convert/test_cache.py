import contextlib
import importlib
import linecache
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import textwrap
import threading
import time
from collections import namedtuple

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict
from torch.utils.data import IterableDataset, TensorDataset, get_worker_info

import memfeed
from memfeed.building.build import Build
from memfeed.building.claim import claim
from memfeed.convert import probe
from memfeed.errors import (
    BuildError,
    CopyError,
    RandomDataError,
    SampleError,
    SchemaError,
    SpaceError,
    StaleStoreError,
    StoreError,
)
from memfeed.store import format
from memfeed.system import files
from support import Made, Pair, equal, rich_sample
from torture.victims import ended, start


def cache(dataset, path=None, **options):
    return memfeed.cache(dataset, path, **{"progress": False, **options})


@pytest.mark.parametrize("workers", [0, 2])
def test_one_of_everything_comes_back(path, workers):
    dataset = Made(rich_sample, 60)
    store = cache(dataset, path, workers=workers)
    assert len(store) == 60
    for i in range(60):
        assert equal(store[i], dataset[i]), i
    store.verify()
    assert equal(cache(dataset, path)[7], dataset[7])
    assert not path.with_name("a.mf.build").exists()


def test_every_file_is_read_only_and_tensordict_opens_the_store(path):
    store = cache(Made(rich_sample, 9), path)
    assert {p.stat().st_mode & 0o777 for p in path.rglob("*") if p.is_file()} == {0o444}
    td = TensorDict.load_memmap(str(path))
    assert td.batch_size == (9,)
    assert torch.equal(td["image"], store.column("image"))
    assert set(td["boxes"].keys()) == {"start", "dims"}
    assert not (path / ".build").exists()


# --- kinds of input


class Counting(IterableDataset):
    def __init__(self, n, make=lambda i: (torch.full((2,), i), i)):
        self.n, self.make = n, make

    def __iter__(self):
        info = get_worker_info()
        share, shares = (info.id, info.num_workers) if info else (0, 1)
        return (self.make(i) for i in range(share, self.n, shares))


@pytest.mark.parametrize("n", [1, 15, 16, 17, 300])
def test_iterables_of_unknown_length(path, n):
    store = cache(Counting(n), path)
    assert [label for _, label in store] == list(range(n))
    assert len(cache((x for x in Counting(n)), path.with_name("b.mf"))) == n
    assert equal(cache(Counting(n), path)[n - 1], (torch.full((2,), n - 1), n - 1))


def test_workers_of_an_iterable_share_it(path):
    store = cache(Counting(333), path, workers=2)
    assert sorted(label for _, label in store) == list(range(333))
    assert store.skipped == ()


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterable_whose_shapes_drift(path, workers):
    make = lambda i: torch.full((2 if i < 100 else 3,), i)  # noqa: E731
    store = cache(Counting(150, make), path, workers=workers)
    assert sorted((len(row), int(row[0])) for row in store) == [(2 if i < 100 else 3, i) for i in range(150)]


@pytest.mark.parametrize(
    "columns",
    [
        torch.arange(50),
        np.arange(100.0).reshape(50, 2),
        (torch.rand(50, 3), np.arange(50, dtype=np.uint16)),
        {"x": torch.rand(50, 2, 2), "y": {"z": torch.arange(50).to(torch.bfloat16)}},
        TensorDataset(torch.rand(50, 3), torch.arange(50)),
        TensorDict({"a": torch.rand(50, 3), "b": {"c": torch.arange(50)}}, [50]),
        Pair(images=torch.rand(50, 3), targets=torch.arange(50), batch_size=[50]),
        torch.arange(100).view(2, 50).t(),
    ],
    ids=["tensor", "array", "tuple", "dict", "TensorDataset", "TensorDict", "tensorclass", "strided"],
)
def test_columns_are_copied_whole(path, columns, monkeypatch):
    monkeypatch.setattr(probe, "SAMPLES", 4)
    store = cache(columns, path)
    rows = columns.tensors if isinstance(columns, TensorDataset) else columns
    for i in (0, 17, 49):
        if isinstance(rows, tuple):
            want = tuple(column[i] for column in rows)
        elif isinstance(rows, dict):
            want = {"x": rows["x"][i], "y": {"z": rows["y"]["z"][i]}}
        else:
            want = rows[i]
        assert equal(store[i], want)
    assert len(cache(columns, path)) == 50


def test_columns_of_text_go_row_by_row(path):
    td = TensorDict({"a": torch.arange(3), "s": NonTensorStack("x", "yy", "z")}, [3])
    store = cache(td, path)
    assert [store[i]["s"] for i in range(3)] == ["x", "yy", "z"]


def test_hugging_face_datasets(path):
    datasets = pytest.importorskip("datasets")
    rows = {"ids": [list(range(i)) for i in range(30)], "label": list(range(30)), "text": [f"t{i}" for i in range(30)]}
    dataset = datasets.Dataset.from_dict(rows)
    store = cache(dataset, path)
    assert [store[i] for i in range(30)] == [dataset[i] for i in range(30)]
    assert store.schema.fields[0].kind == "jagged"
    assert equal(cache(dataset, path)[3], dataset[3])


def test_a_class_for_samples_and_batches(path):
    pairs = [(torch.full((3,), i), i) for i in range(5)]
    store = cache(Made(pairs), path, type=Pair)
    assert equal(store[3], Pair(images=torch.full((3,), 3), targets=torch.tensor(3), batch_size=[]))
    assert isinstance(store[1:3], Pair)
    assert type(memfeed.open(path)[3]).__name__ == "TensorDict"
    assert isinstance(memfeed.open(path, types=(Pair,))[3], Pair)
    assert isinstance(cache(Made(pairs), path, type=Pair)[0], Pair)


def test_names_and_dtypes(path):
    store = cache(
        Made([(torch.tensor([i, 2]), i) for i in range(5)]),
        path,
        fields=("mask", "label"),
        dtypes={"mask": torch.uint8},
    )
    assert store.column("mask").dtype == torch.uint8
    assert (path / "mask.memmap").stat().st_size == 10
    assert equal(store[2], (torch.tensor([2, 2], dtype=torch.uint8), 2))
    with pytest.raises(SchemaError, match=r"sample 3, field mask: found the value 300, which uint8 would change"):
        cache(
            Made([torch.tensor([100 * i]) for i in range(5)]),
            path.with_name("b.mf"),
            fields=("mask",),
            dtypes={"mask": torch.uint8},
        )


def test_other_names_than_the_stored_ones_are_told(path):
    cache(Made([(1, 2)] * 3), path, fields=("a", "b"))
    assert len(cache(Made([(1, 2)] * 3), path)) == 3
    with pytest.raises(StaleStoreError, match=r"found fields=\['c', 'd'\], expected \['a', 'b'\]"):
        cache(Made([(1, 2)] * 3), path, fields=("c", "d"))


def test_a_temporary_store_goes_with_its_last_user():
    store = cache(torch.arange(10))
    where, view = store.path, store[2:4]
    subset = store.subset([1, 2])
    del store
    assert where.exists()
    assert subset[0] == 1
    del subset
    assert not where.exists()
    assert view.tolist() == [2, 3]


@pytest.mark.real_data
def test_photographs(photos, path):
    torchvision = pytest.importorskip("torchvision")
    from torchvision.transforms import v2

    dataset = torchvision.datasets.ImageFolder(photos / "train", v2.Compose([v2.Resize((64, 64)), v2.PILToTensor()]))
    store = cache(dataset, path, workers=2)
    assert store.column(0).shape == (244, 3, 64, 64)
    for i in (0, 100, 243):
        assert equal(store[i], dataset[i])
    raw = torchvision.datasets.ImageFolder(photos / "val")
    images = cache(raw, path.with_name("b.mf"), workers=2)
    assert images.schema.fields[0].describe() == "list uint8 [*, *, *]"
    for i in (0, 152):
        assert torch.equal(images[i][0], v2.functional.pil_to_tensor(raw[i][0]))


# --- drift


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("shapes", "kind"),
    [
        (lambda i: (3, 4) if i != 71 else (5, 4), "jagged float32 [*, 4]"),
        (lambda i: (3, 4) if i != 71 else (3, 5), "list float32 [*, *]"),
        (lambda i: (i % 5, 4) if i != 71 else (2, 9), "list float32 [*, *]"),
        (lambda i: (3, 4) if i not in (71, 150) else (4, 4) if i == 71 else (3, 1), "list float32 [*, *]"),
    ],
)
def test_the_first_row_that_differs_promotes_its_column(path, workers, shapes, kind):
    dataset = Made(lambda i: (torch.full(shapes(i), float(i)), i), 200)
    store = cache(dataset, path, workers=workers)
    assert store.schema.fields[0].describe() == kind
    for i in range(200):
        assert equal(store[i], dataset[i])
    store.verify()
    assert equal(cache(dataset, path)[71], dataset[71])


def test_a_drift_of_dtype_or_rank_or_structure_names_the_sample(path):
    for change, message in [
        (torch.zeros(2, dtype=torch.int64), r"sample 71, field x: found dtype int64; expected float32"),
        (torch.zeros(2, 1), r"sample 71, field x: found 2 dims \[2, 1\]; expected 1 \(float32 \[2\]\)"),
        ([1.0], r"sample 71"),
        ("text", r"sample 71, field x: found str; expected float32 \[2\]"),
        (None, r"sample 71, field x: found NoneType; expected float32 \[2\]"),
    ]:
        dataset = Made(lambda i, change=change: {"x": torch.zeros(2) if i != 71 else change}, 200)
        for workers in (0, 2):
            with pytest.raises(SchemaError, match=message):
                cache(dataset, path, workers=workers)
            shutil.rmtree(path.with_name("a.mf.build"), ignore_errors=True)


def test_dims_that_fields_fixed_do_not_drift(path):
    dataset = Made(lambda i: {"x": torch.zeros(2 if i != 71 else 3)}, 200)
    with pytest.raises(SchemaError, match=r"sample 71, field x: found dims \[3\]; expected float32 \[2\], as like= or"):
        cache(dataset, path, fields={"x": "fixed"})


# --- errors of the dataset


class Bad(Made):
    def __getitem__(self, index):
        if index in (5, 71, 199):
            raise ValueError(f"broken file {index}")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_that_raises(path, workers):
    with pytest.raises(
        SampleError, match=r"sample \d+: the dataset raised ValueError: broken file \d+; mend"
    ) as caught:
        cache(Bad(rich_sample, 200), path, workers=workers)
    assert isinstance(caught.value.__cause__, ValueError)
    assert not path.exists()


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_that_raise_can_be_left_out(path, workers):
    dataset = Bad(rich_sample, 200)
    store = cache(dataset, path, workers=workers, on_error="skip")
    assert store.skipped == (5, 71, 199)
    assert len(store) == 197
    kept = [i for i in range(200) if i not in store.skipped]
    for row, i in enumerate(kept):
        assert equal(store[row], dataset[i])
    store.verify()
    assert len(cache(dataset, path, on_error="skip")) == 197


def test_rows_that_were_written_are_not_computed_again(path):
    read = []

    class Once(Made):
        def __getitem__(self, index):
            read.append(index)
            if index == 150 and len(read) < 400:
                raise OSError("disk went away")
            return index

    dataset = Once(None, 200)
    with pytest.raises(SampleError, match=r"\d+ rows are kept in .*a\.mf\.build; the same call goes on from there"):
        cache(dataset, path, workers=0)
    first = len(read)
    read.extend([0] * (400 - first))
    store = cache(dataset, path, workers=0)
    again = read[400:]
    assert [store[i] for i in range(200)] == list(range(200))
    assert len(set(again)) < 80, "only the probe and what was missing"
    assert not path.with_name("a.mf.build").exists()


def test_a_killed_worker_leaves_a_build_that_resumes(path):
    class Deadly(Made):
        def __getitem__(self, index):
            if index == 120 and not path.with_name("died").exists() and get_worker_info() is not None:
                path.with_name("died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return torch.full((3,), index)

    dataset = Deadly(None, 200)
    with pytest.raises(
        BuildError, match=r"a worker process died .*rows that were written are kept: call cache\(\) again"
    ):
        cache(dataset, path, workers=2)
    assert not path.exists()
    store = cache(dataset, path, workers=2)
    assert [int(row[0]) for row in store] == list(range(200))


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_dataset_says_of_workers_is_no_death_of_ours(path, workers):
    said = "Caught RuntimeError in DataLoader worker process 0; DataLoader worker (pid 7) is killed"

    class Nested(Made):
        def __getitem__(self, index):
            if index == 30:
                raise RuntimeError(said)
            return index

    class Unready(IterableDataset):
        def __iter__(self):
            if get_worker_info() is not None or workers == 0:
                raise RuntimeError(said)
            yield from range(100)

    with pytest.raises(SampleError, match=r"sample 30: the dataset raised RuntimeError: Caught"):
        cache(Nested(None, 100), path, workers=workers)
    with pytest.raises(SampleError if workers else RuntimeError, match=r"RuntimeError: Caught|^Caught"):
        cache(Unready(), path.with_name("b.mf"), workers=workers)


def test_a_death_is_told_between_reports(path, monkeypatch):
    """torch's handler would raise it in the midst of a sync, or of ending the other workers."""
    sync, whole = Build.sync_if_due, []

    class Slow(Made):
        def __getitem__(self, index):
            time.sleep(0.02)
            return super().__getitem__(index)

    def killing(build):
        if not whole:
            worker = next(child for child in multiprocessing.active_children() if child.daemon)
            whole.append(False)
            os.kill(worker.pid, signal.SIGKILL)
            time.sleep(0.5)
            whole[0] = True
        sync(build)

    with monkeypatch.context() as m, pytest.raises(BuildError, match="a worker process died"):
        m.setattr(Build, "sync_if_due", killing)
        cache(Slow(torch.tensor, 200), path, workers=2)
    assert whole == [True]
    assert not multiprocessing.active_children()
    assert len(cache(Made(torch.tensor, 200), path, workers=2)) == 200


def test_an_exception_that_cannot_be_pickled_arrives(path):
    class Odd(Exception):
        def __init__(self, a, b):
            super().__init__(a)
            self.lock = __import__("threading").Lock()

    def make(i):
        if i == 71:
            raise Odd(1, 2)
        return i

    with pytest.raises(SampleError, match="sample 71: the dataset raised Odd"):
        cache(Made(make, 200), path, workers=2)


# --- randomness


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
        (lambda i: int(torch.rand(()) < 0), "drew from the global generator of torch"),
        (lambda i: int(np.random.rand() < 0), "drew from the global generator of numpy"),
        (lambda i: int(random.random() < 0), "drew from the global generator of random"),
        (lambda i: np.random.default_rng().random(), "gave different values in field drawn"),
    ],
)
def test_random_samples_are_caught(path, draw, found):
    with pytest.raises(RandomDataError, match=found) as caught:
        cache(Flipped(draw), path)
    assert "RandomFlip(p=0.1)" in str(caught.value)
    assert "Loader(..., transform=...)" in str(caught.value)
    assert not path.with_name("a.mf.build").exists()
    assert len(cache(Flipped(draw), path, allow_random=True)) == 50
    assert len(cache(Flipped(draw), path, allow_random=True)) == 50


def seeded(i):
    torch.manual_seed(i)
    return torch.rand(3)


@pytest.mark.parametrize("draw", [seeded, lambda i: float("nan"), lambda i: np.random.default_rng(i).random(3)])
def test_samples_that_seed_themselves_are_not_random(path, draw):
    assert len(cache(Flipped(draw), path)) == 50


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
    assert len(cache(RandomStream(), path, allow_random=True)) == 10


# --- stale data


def test_stale_values_are_explained(path):
    cache(Made([{"x": torch.tensor([i, 2]), "s": "a"} for i in range(100)]), path)
    changed = [{"x": torch.tensor([i, 2]), "s": "a"} for i in range(100)]
    changed[99]["x"][1] = 7
    with pytest.raises(
        StaleStoreError, match=r"field x, sample 99: found 7 at \[1\], expected 2 \(1 elements differ\)"
    ) as caught:
        cache(Made(changed), path)
    for part in ("overwrite=True", "check=False", "seed it there"):
        assert part in str(caught.value)
    assert equal(cache(Made(changed), path, check=False)[99]["x"], torch.tensor([99, 2]))
    assert equal(cache(Made(changed), path, overwrite=True)[99]["x"], torch.tensor([99, 7]))


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([{"x": 1}] * 9, r"found 9 samples, expected 10"),
        ([{"x": 1.0}] * 10, r"field x: found float64 \[\], expected int64 \[\]"),
        ([{"y": 1}] * 10, r"found the fields y; expected x"),
        ([{"x": torch.tensor(1)}] * 10, r"field x: found int64 \[\], expected int64 \[\]"),
    ],
)
def test_a_dataset_of_another_kind_is_explained(path, samples, message):
    cache(Made([{"x": 1}] * 10), path)
    with pytest.raises(StaleStoreError, match=message):
        cache(Made(samples), path)


def test_values_drawn_in_init_look_stale_and_the_message_says_so(path):
    def noise(seed):
        return Made(list(torch.rand(20, 3, generator=torch.Generator().manual_seed(seed))))

    cache(noise(1), path)
    with pytest.raises(StaleStoreError, match="draws values when it is made .* seed it there"):
        cache(noise(2), path)


def test_a_changed_class_source_is_only_reported(path, tmp_path, monkeypatch):
    code = """
        from torch.utils.data import Dataset
        class D(Dataset):
            def __len__(self): return 5
            def __getitem__(self, i): return i  # {}
    """
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for comment, warns in (("one", False), ("one", False), ("other", True)):
        (tmp_path / "changing.py").write_text(textwrap.dedent(code).replace("{}", comment))
        linecache.clearcache()
        monkeypatch.delitem(sys.modules, "changing", raising=False)
        dataset = importlib.import_module("changing").D()
        with pytest.warns(match=r"the source of changing\.D has changed") if warns else contextlib.nullcontext():
            cache(dataset, path)


def test_readers_keep_the_old_data_when_a_store_is_replaced(path):
    old = cache(torch.arange(100), path)
    column = old.column(())
    new = cache(torch.arange(100) * 2, path, overwrite=True)
    assert column[50] == 50
    assert new.column(())[50] == 100
    assert not path.with_name("a.mf.build").exists()


def test_a_reader_never_mixes_two_stores(path):
    """Columns are mapped on first use: one that was not used before must not come from the store that is there now."""

    def columns(value):
        return {"x": torch.full((5,), value), "y": torch.full((5,), value)}

    old = cache(columns(1), path)
    assert old.column("x")[3] == 1
    cache(columns(2), path, overwrite=True)
    for use in (lambda: old[3], lambda: old.column("y"), old.verify):
        with pytest.raises(StoreError, match=r"found another store there than the one that was opened.*open it again"):
            use()
    assert old.column("x")[3] == 1
    assert equal(memfeed.open(path)[3], {"x": torch.tensor(2), "y": torch.tensor(2)})


def test_ragged_columns_are_not_mixed_either(path):
    def rows(value):
        return Made(lambda i: {"x": torch.full((i % 3 + value,), value), "y": i}, 9)

    old = cache(rows(1), path, workers=0)
    old.column("y")
    cache(rows(2), path, workers=0, overwrite=True)
    with pytest.raises(StoreError, match="found another store there"):
        old[3]


def test_a_store_that_is_replaced_while_it_is_opened_is_the_new_one(path, monkeypatch):
    cache(torch.arange(5), path)
    real, times = format.check_file, []

    def then(*arguments):
        times.append(1)
        if len(times) == 1:
            cache(torch.arange(7), path.with_name("b.mf"))
            shutil.rmtree(path)
            path.with_name("b.mf").rename(path)
        real(*arguments)

    monkeypatch.setattr(format, "check_file", then)
    assert len(memfeed.open(path)) == 7


def test_what_is_not_ours_is_left_alone(path):
    (path.with_name("a.mf.build")).mkdir()
    (path.with_name("a.mf.build") / "mine").write_text("mine")
    with pytest.raises(StoreError, match=r"a\.mf\.build: found something that is no build of memfeed's"):
        cache(torch.arange(5), path)
    assert (path.with_name("a.mf.build") / "mine").read_text() == "mine"
    shutil.rmtree(path.with_name("a.mf.build"))
    path.with_name("a.mf.build").write_text("a file")
    with pytest.raises(StoreError, match=r"a\.mf\.build: found something that is no build of memfeed's"):
        cache(torch.arange(5), path)
    path.with_name("a.mf.build").unlink()
    for name in ("a.mf.old", "a.mf.bak"):
        path.with_name(name).mkdir()
        (path.with_name(name) / "mine").write_text("mine")
    cache(torch.arange(5), path)
    cache(torch.arange(6), path, overwrite=True)
    assert all((path.with_name(name) / "mine").exists() for name in ("a.mf.old", "a.mf.bak"))


@pytest.mark.parametrize("name", ["b.mf.build", "b.mf.build.old", ".build"])
def test_no_store_is_made_where_builds_are(tmp_path, name):
    """The store beside it would take it for a leftover."""
    with pytest.raises(StoreError, match=r"expected one that ends in no \.build"):
        cache(torch.arange(3), tmp_path / name)
    with pytest.raises(StoreError, match=r"expected one that ends in no \.build"), memfeed.Writer(tmp_path / name):
        pass
    assert not list(tmp_path.iterdir())


def test_what_a_replacement_left_is_swept_by_who_opens_the_store(path, monkeypatch):
    cache(torch.arange(5), path)
    real = files.exchange

    def then_dead(one, other):
        if not real(one, other):
            pytest.skip("this file system cannot exchange")
        raise BuildError("dead")

    with monkeypatch.context() as m, pytest.raises(BuildError, match="dead"):
        m.setattr(files, "exchange", then_dead)
        cache(torch.arange(6), path, overwrite=True)
    assert sorted(p.name for p in path.parent.iterdir()) == ["a.mf", "a.mf.build"]
    assert len(cache(torch.arange(6), path)) == 6
    assert [p.name for p in path.parent.iterdir()] == ["a.mf"]
    assert not (path / ".build").exists()


def test_a_builder_at_work_is_not_waited_for_by_who_only_opens(path):
    store = cache(torch.arange(5), path)
    (path / ".build").mkdir()  # as if something had been left
    held, opened = threading.Event(), threading.Event()

    def build():
        with claim(path):
            held.set()
            opened.wait(30)

    thread = threading.Thread(target=build)
    thread.start()
    held.wait(60)
    try:
        assert len(cache(torch.arange(5), path)) == len(store)
        assert thread.is_alive(), "it holds the lock still"
    finally:
        opened.set()
        thread.join()


CODE = """
    import torch
    class D(torch.utils.data.Dataset):
        def __len__(self):
            return 100
        def __getitem__(self, i):
            if i == 90 and {stop}:
                raise ValueError("stop")
            return torch.tensor([i {bug}])
"""


def test_overwriting_takes_no_row_of_code_that_was_changed(path, tmp_path, monkeypatch):
    """An interrupted build of a dataset that had a fault, which the samples that are compared do not show."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def dataset(name, **parts):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(CODE.format(**parts)))
        return __import__(name).D()

    with pytest.raises(SampleError):
        cache(dataset("one", stop=True, bug="+ (i == 50) * 1000"), path, workers=0)
    assert path.with_name("a.mf.build").exists()
    store = cache(dataset("two", stop=False, bug=""), path, workers=0, overwrite=True)
    assert [int(row) for row in store] == list(range(100))


class Growing(IterableDataset):
    def __init__(self, n, dies=None):
        self.n, self.dies = n, dies

    def __iter__(self):
        info = get_worker_info()
        for i in range(info.id, self.n, info.num_workers) if info else range(self.n):
            if i == self.dies:
                raise ValueError("dead")
            yield torch.tensor([i])


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterable_that_became_shorter_is_refused(path, workers, monkeypatch):
    monkeypatch.setattr("memfeed.convert.write_run.MOST_ROWS_A_WRITE", 16)
    with pytest.raises(SampleError):
        cache(Growing(400, dies=301), path, workers=workers)
    with pytest.raises(BuildError, match=r"ended after [\d,]+ samples; expected at least .*remove that directory"):
        cache(Growing(60), path, workers=workers)
    assert sorted(int(row) for row in cache(Growing(400), path, workers=workers)) == list(range(400))


def test_a_thread_does_not_wait_for_itself(path):
    with memfeed.Writer(path) as writer:
        writer.append(torch.arange(3))
        with pytest.raises(BuildError, match="this very thread is building it already"):
            cache(torch.arange(3), path)


# --- inputs that are refused


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Made([]), r"found an empty dataset \(0 samples\)"),
        (torch.zeros(0, 3), r"found an empty dataset"),
        (iter([]), r"the iterable is empty"),
        ("folder", r"found a str; expected a dataset"),
        ({"a": [1, 2]}, r"found a dict; expected a dataset"),
        (3, r"found int, which has neither len and \[\] nor iter"),
        ((torch.zeros(3), torch.zeros(4)), r"found columns of different lengths \(0: 3, 1: 4\)"),
        (Made([lambda: 1]), r"found an object of builtins.function, which no column holds"),
    ],
)
def test_what_is_no_dataset(path, dataset, message):
    with pytest.raises(SchemaError, match=message):
        cache(dataset, path)
    assert list(path.parent.iterdir()) == []


def test_arguments_that_make_no_sense(path):
    with pytest.raises(ValueError, match='found on_error=\'ignore\'; expected "raise" or "skip"'):
        cache(torch.arange(3), path, on_error="ignore")
    with pytest.raises(ValueError, match="found workers=-1"):
        cache(torch.arange(3), path, workers=-1)


@pytest.mark.parametrize("make", ["file", "directory", "full"])
def test_a_path_that_is_something_else(path, make):
    if make == "file":
        path.write_text("mine")
    else:
        path.mkdir()
        if make == "full":
            (path / "thesis.tex").write_text("mine")
    for options in ({}, {"overwrite": True}, {"check": False}):
        with pytest.raises(StoreError, match="is no|no memfeed store"):
            cache(torch.arange(3), path, **options)
    assert path.exists()


def test_data_that_is_mapped_already_is_not_copied_by_accident(path, tmp_path):
    store = cache(torch.arange(10), path)
    td = TensorDict({"a": torch.arange(10)}, [10]).memmap(str(tmp_path / "td"))
    pair = Pair(images=torch.rand(10), targets=torch.arange(10), batch_size=[10]).memmap(str(tmp_path / "tc"))
    for data, where in (
        (store, path),
        (td, tmp_path / "td"),
        (TensorDict.load_memmap(str(tmp_path / "td")), tmp_path / "td"),
        (pair, tmp_path / "tc"),
    ):
        with pytest.raises(CopyError, match=rf"memory-mapped already, at .*memfeed\.open\('{where}"):
            cache(data, tmp_path / "copy.mf")
    for data in (store, td, pair):
        copy = cache(data, tmp_path / "copy.mf", copy_existing=True, overwrite=(tmp_path / "copy.mf").exists())
        assert len(copy) == 10
        copy.verify()


def test_a_target_that_is_its_own_source_is_always_refused(path, tmp_path):
    store = cache(torch.arange(10), path)
    td = TensorDict({"a": torch.arange(10)}, [10]).memmap(str(tmp_path / "td"))
    for data, target in ((store, path), (store, path / "inside"), (td, tmp_path / "td"), (store.subset([1]), path)):
        with pytest.raises(CopyError, match="found the source of the data itself"):
            cache(data, target, copy_existing=True, overwrite=True)


def test_too_little_space_is_said_at_once(path, monkeypatch):
    monkeypatch.setattr("memfeed.system.files.free_bytes", lambda path: 1000)
    with pytest.raises(SpaceError, match=r"found 1,000 bytes free; expected at least 800,000 for 100,000 rows of 8 B"):
        cache(torch.arange(100_000), path)
    assert not path.with_name("a.mf.build").exists()


def test_the_build_of_another_dataset_is_not_gone_on_with(path):
    def make(n):
        return Made(lambda i: torch.full((n,), i) if i != 150 else (_ for _ in ()).throw(OSError("gone")), 200)

    with pytest.raises(SampleError):
        cache(make(3), path)
    with pytest.raises(StaleStoreError, match=r"a\.mf\.build: found that the dataset no longer matches"):
        cache(make(4), path)
    assert (
        len(cache(torch.arange(7), path, overwrite=True) if path.exists() else cache(make(3), path, on_error="skip"))
        == 199
    )


def test_the_budget_and_the_bar_are_shown(path, capsys):
    memfeed.cache(Made(lambda i: torch.zeros(1000), 50), path)
    err = capsys.readouterr().err
    assert "memfeed: 50 rows, 200.0 KB, about" in err
    assert "free ->" in err
    assert "50.0/50.0" in err


def test_namedtuples_defined_elsewhere_come_back_equal(path):
    other = namedtuple("Other", "a b")
    cache(Made([other(1, "x"), other(2, "y")]), path)
    reopened = memfeed.open(path)
    assert reopened[1] == other(2, "y")
    assert reopened[1]._fields == ("a", "b")
    assert type(memfeed.open(path, types=(other,))[1]) is other


def test_an_iterable_goes_on_with_the_workers_it_began_with(path):
    """Where a worker's rows go depends on how many share the iterable: another number would mix them up."""

    class Stops(Counting):
        def __iter__(self):
            for sample in super().__iter__():
                if sample[1] == 250 and not path.with_name("again").exists():
                    raise OSError("gone")
                yield sample

    for first, then in ((2, 0), (0, 2)):
        path.with_name("again").unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)
        with pytest.raises(SampleError, match=r"the iterable raised OSError: gone"):
            cache(Stops(300), path, workers=first)
        path.with_name("again").touch()
        store = cache(Stops(300), path, workers=then)
        assert sorted(label for _, label in store) == list(range(300))


# --- what an attack once got past


def test_lists_of_mixed_numbers_are_never_cut_to_integers(path):
    ragged = Made(lambda i: {"a": [1] * (i % 5 + 1) if i != 19 else [1, 2.5]}, 100)
    with pytest.raises(SchemaError, match=r"sample 19, field a: found a list of float and int; expected jagged int64"):
        cache(ragged, path)
    shutil.rmtree(path.with_name("a.mf.build"))
    boxes = Made(lambda i: {"bbox": [1, 2.5, i] if i % 2 else [1.5, 2, i]}, 40)
    store = cache(boxes, path)
    assert store.schema.fields[0].kind == "json"
    assert all(equal(store[i], boxes[i]) for i in range(40))


def test_a_buffer_that_is_used_again_does_not_change_what_was_read(path):
    buffer = torch.zeros(3)

    def fill(i):
        buffer.fill_(i)
        return buffer

    for dataset in (Made(fill, 50), (fill(i) for i in range(50))):
        store = cache(dataset, path, overwrite=path.exists(), workers=0)
        if isinstance(dataset, Made):
            probed = probe.indices_of(50)
            assert [int(store[i][0]) for i in probed] == probed
        else:
            assert [int(row[0]) for row in store] == list(range(50))


def test_an_iterator_is_not_shared_by_workers(path):
    with pytest.raises(ValueError, match=r"found workers=2 for an iterator, which every worker would iterate"):
        cache((i for i in range(100)), path, workers=2)


def test_an_iterable_that_can_be_iterated_once(path):
    class Once(IterableDataset):
        def __init__(self):
            self.g = iter(range(50))

        def __iter__(self):
            return self.g

    assert [int(x) for x in cache(Once(), path)] == list(range(50))


@pytest.mark.parametrize(("before", "after"), [(100, 5), (5, 8), (5, 4)])
def test_an_iterable_that_shrank_or_grew_is_stale(path, before, after):
    cache(Counting(before), path)
    assert len(cache(Counting(before), path)) == before
    with pytest.raises(StaleStoreError, match=rf"samples.*expected {before}"):
        cache(Counting(after), path)


def test_namedtuples_of_columns_and_tuples_that_are_half_columns(path):
    pair = namedtuple("pair", "x y")
    store = cache(pair(torch.arange(9), torch.rand(9, 2)), path)
    assert len(store) == 9
    assert (type(store[3]).__name__, int(store[3].x)) == ("pair", 3)
    with pytest.raises(SchemaError, match="found columns of which 1 is a list; expected tensors or arrays"):
        cache((torch.arange(3), ["a", "b", "c"]), path.with_name("b.mf"))


def test_two_classes_of_one_name_are_refused(path):
    one, other = namedtuple("Item", "a"), namedtuple("Item", "b")
    with pytest.raises(SchemaError, match=r"found two classes named Item .* rename one"):
        cache(Made([(one(1), other(2))] * 3), path)


def test_skipped_rows_are_tried_again(path):
    class Mended(Made):
        bad = (5, 71)

        def __getitem__(self, index):
            if index in self.bad:
                raise (KeyboardInterrupt if index == 71 else ValueError)("broken")
            return index

    dataset = Mended(None, 200)
    with pytest.raises(KeyboardInterrupt):
        cache(dataset, path, on_error="skip", workers=0)
    dataset.bad = ()
    store = cache(dataset, path, workers=0)
    assert [int(x) for x in store] == list(range(200))
    assert store.skipped == ()


def test_links_are_followed_once(path, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link.mf").symlink_to(tmp_path / "real" / "b.mf")
    cache(torch.arange(5), tmp_path / "link.mf")
    cache(torch.arange(6), tmp_path / "link.mf", overwrite=True)
    assert (tmp_path / "link.mf").is_symlink()
    assert len(memfeed.open(tmp_path / "link.mf")) == 6
    assert [p.name for p in (tmp_path / "real").iterdir()] == ["b.mf"]


def test_a_read_only_map_is_not_copied_into_memory(path, tmp_path):
    np.save(tmp_path / "a.npy", np.arange(200_000))
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r")
    loader = memfeed.Loader(mapped, 100)
    assert loader.store.column(()).data_ptr() == mapped.ctypes.data
    assert torch.equal(cache(mapped, path).column(()), torch.arange(200_000))


def test_numpy_text_of_hugging_face(path):
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"t": ["a", "bé"], "x": [1, 2]}).with_format("numpy")
    store = cache(dataset, path)
    assert [row["t"] for row in store] == ["a", "bé"]


def test_a_slow_first_sample_does_not_hide_the_others(path, monkeypatch):
    monkeypatch.setattr(probe, "MOST_SECONDS", 0.2)

    def slow(i):
        if i == 0:
            time.sleep(0.3)
        return {"o": None if i % 2 else torch.ones(2), "r": torch.arange(i % 3)}

    dataset = Made(slow, 20)
    assert cache(dataset, path).schema.fields[0].optional
    assert len(cache(dataset, path)) == 20


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(2).to_sparse(), "found a torch.sparse_coo tensor"),
        (torch.zeros(2, device="meta"), "found a meta tensor"),
        (2**70, "found the int 1180591620717411303424; expected one that fits int64"),
    ],
)
def test_odd_leaves_name_sample_and_field(path, value, message):
    with pytest.raises(SchemaError, match=f"sample 0, field a: {message}"):
        cache(Made([{"a": value}] * 3), path)


def test_tuples_and_lists_of_other_classes_are_tuples_and_lists(path):
    class Mine(list):
        pass

    shared = {"k": 1}
    dataset = Made(lambda i: {"size": torch.zeros(i, 2).shape, "l": Mine([i, 2]), "p": shared, "q": shared}, 5)
    assert equal(cache(dataset, path)[3], {"size": (3, 2), "l": [3, 2], "p": {"k": 1}, "q": {"k": 1}})


def in_child(path, action):
    child = start(path.with_name("stderr"), action, path)
    assert ended(child)
    assert child.exitcode == 0, path.with_name("stderr").read_text()


def spawning(path):
    multiprocessing.set_start_method("spawn", force=True)
    store = cache(Made(rich_sample, 40), path, workers=1)
    assert all(equal(store[i], rich_sample(i)) for i in range(40))


def test_workers_may_be_spawned(path):
    in_child(path, spawning)


def many_columns(path):
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 4096))
    store = cache({f"c{i}": torch.arange(3) + i for i in range(400)}, path)
    assert int(store[2]["c399"]) == 401


def test_more_columns_than_file_descriptors(path):
    in_child(path, many_columns)


def test_a_list_whose_length_turns_out_to_vary_can_be_started_anew(path):
    dataset = Made(lambda i: {"t": [1, 2, 3] if i != 71 else [1, 2, 3, 4]}, 200)
    with pytest.raises(SchemaError, match=r"sample 71: found a list of 4 at t.* pass fields=\{'t': 'jagged'\}"):
        cache(dataset, path, workers=0)
    with pytest.raises(StaleStoreError, match="found the fields t; expected t.0, t.1, t.2"):
        cache(dataset, path, fields={"t": "jagged"})
    store = cache(dataset, path, fields={"t": "jagged"}, overwrite=True)
    assert [store[i]["t"] for i in (70, 71)] == [[1, 2, 3], [1, 2, 3, 4]]


def test_columns_that_changed_do_not_go_on_with_the_build_of_others(path, monkeypatch):
    with monkeypatch.context() as m:
        m.setattr("memfeed.building.build.Build.commit", lambda *a, **k: (_ for _ in ()).throw(BuildError("stopped")))
        with pytest.raises(BuildError, match="stopped"):
            cache(torch.arange(1000), path)
    changed = torch.arange(1000)
    changed[-1] = 7
    with pytest.raises(StaleStoreError, match=r"field value, sample 999: found another value than was stored"):
        cache(changed, path)
    assert torch.equal(cache(torch.arange(1000), path).column(()), torch.arange(1000))
