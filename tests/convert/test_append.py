"""Rows are added to a store, and stores put together, without a change to what is there."""

import os
import shutil
import tempfile
import time
from pathlib import Path
from threading import Thread

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch.utils.data import ConcatDataset, Subset, TensorDataset

import memfeed
from disk.watch import watched
from forked_programs import Program
from memfeed.building import commit, join
from memfeed.convert import append as appending
from memfeed.errors import (
    BuildError,
    CorruptStoreError,
    FieldError,
    MemfeedError,
    SchemaError,
    SpaceError,
    StaleStoreError,
    StoreError,
    StoreNotFoundError,
)
from memfeed.system import file_copies, files, libc
from support import Counting, Made, cache, equal, rich_sample
from torture.works import no_syncs


def some(first, last, make=rich_sample):
    return Made([make(i) for i in range(first, last)])


def simple(i):
    return {"x": torch.full((3,), float(i)), "boxes": torch.arange(i % 3) + i, "text": f"{i}" * (i % 4)}


def append(store, dataset, **options):
    return memfeed.append(store, dataset, **{"workers": 0, "progress": False, **options})


def concat(stores, path):
    return memfeed.concat(stores, path, progress=False)


def holds(store, rows, make=simple):
    store.verify()
    assert len(store) == len(rows)
    assert all(equal(store[at], make(row)) for at, row in enumerate(rows))
    return True


def inodes(path):
    return {
        str(file.relative_to(path)): file.stat().st_ino
        for file in path.rglob("*")
        if file.suffix in (".memmap", ".bin")
    }


class Dead(BaseException):
    """The process ends here: nothing that comes later changes a file."""


def dies(at):
    """A watch of files that ends the process at operation ``at``."""
    count = 0

    def each(operation, do):
        nonlocal count
        count += 1
        if count > at:
            raise Dead
        return do()

    return watched(each)


def die_at_last_sync(monkeypatch, path):
    """An append to the store at ``path`` is killed while it writes the second file of the store."""
    real, done = join._fill, []

    def fill(fd, pieces, hasher, end, bar):
        found = real(fd, pieces, hasher, end, bar)
        done.append(end)
        if len(done) == 2:
            raise Dead
        return found

    with monkeypatch.context() as m:
        m.setattr(join, "_fill", fill)
        m.setattr(appending, "clear", lambda root: None)
        with pytest.raises(Dead):
            append(path, some(20, 30, simple))
    assert path.with_name("a.mf.append").exists()


# --- append


def test_every_kind_of_field_gets_its_rows(path):
    old = cache(some(0, 23), path)
    before = inodes(path)
    store = append(old, some(23, 40))
    assert holds(store, range(40), rich_sample)
    assert holds(memfeed.open(path, types=store._view.types), range(40), rich_sample)
    assert os.listdir(path.parent) == ["a.mf"]
    assert all(inodes(path)[name] == inode for name, inode in before.items() if name != "checksums.bin")
    assert len(TensorDict.load_memmap(str(path))) == 40
    assert TensorDict.load_memmap(str(path))["label"].tolist() == list(range(40))
    assert {file.stat().st_mode & 0o777 for file in path.rglob("*") if file.is_file()} == {0o444}
    again = append(store, some(0, 5))
    assert holds(again, [*range(40), *range(5)], rich_sample)


def test_files_of_several_chunks(path):
    """The chunk in which the old rows end gets another checksum."""
    rows = torch.arange(3_000_000, dtype=torch.float32).view(-1, 2)
    cache(TensorDataset(rows[:700_000]), path)
    store = append(path, TensorDataset(rows[700_000:]))
    store.verify()
    assert torch.equal(store.column("0"), rows)


def test_readers_of_the_old_generation_keep_its_rows(path):
    store = cache(some(0, 40, simple), path)
    loader = memfeed.Loader(store, batch_size=4, shuffle=True, seed=3)
    expected = [batch["x"][:, 0].tolist() for batch in loader]
    loader = memfeed.Loader(store, batch_size=4, shuffle=True, seed=3)
    epoch = iter(loader)
    found = [next(epoch)["x"][:, 0].tolist() for _ in range(3)]
    state = loader.state_dict()
    new = append(path, some(40, 60, simple))
    assert found + [batch["x"][:, 0].tolist() for batch in epoch] == expected
    assert len(store) == 40
    assert sorted(x for batch in memfeed.Loader(new, batch_size=4) for x in batch["x"][:, 0].tolist()) == [*range(60)]
    with pytest.raises(MemfeedError, match="found a state with store .*expected a state of the same store"):
        memfeed.Loader(new, batch_size=4, shuffle=True, seed=3).load_state_dict(state)


@pytest.mark.parametrize("way", ["links", "copies"])
def test_a_store_that_was_open_and_not_read_keeps_its_rows(path, monkeypatch, way):
    types = cache(some(0, 23), path)._view.types
    old = memfeed.open(path, types=types)
    if way == "copies":
        monkeypatch.setattr(file_copies, "link", lambda one, other: False)
    append(path, some(23, 40))
    middle = memfeed.open(path, types=types)
    append(path, some(40, 60))
    for store, count in ((old, 23), (middle, 40)):
        assert len(store) == count
        assert all(equal(store[row], rich_sample(row)) for row in range(count))
        with pytest.raises(StoreError, match="found another store there"):
            store.verify()
    assert list((path / "generations.txt").read_text().split()) == [store._backing.digest for store in (old, middle)]
    late = memfeed.open(path)
    cache(some(0, 9), path, overwrite=True)
    with pytest.raises(StoreError, match="found another store there"):
        late[3]


def test_a_killed_append_leaves_the_store_as_it_was_and_goes_on(path, monkeypatch):
    cache(some(0, 20, simple), path)
    before = inodes(path)
    sizes = {name: (path / name).stat().st_size for name in before}
    die_at_last_sync(monkeypatch, path)
    assert any((path / name).stat().st_size > size for name, size in sizes.items())  # files are longer than their rows
    assert holds(memfeed.open(path), range(20))
    assert TensorDict.load_memmap(str(path))["x"].shape == (20, 3)
    cache(some(0, 20, simple), path)
    shutil.copytree(path, path.with_name("copy"))
    read = Made(lambda i: pytest.fail("read again") if i not in range(10) else simple(20 + i), 10)
    assert holds(append(path, read), range(30))
    assert inodes(path)["x.memmap"] == before["x.memmap"]
    assert not (path / "append.begun").exists()
    assert holds(memfeed.open(path.with_name("copy")), range(20))


def test_bytes_of_another_append_are_never_changed(path, monkeypatch, capfd):
    cache(some(0, 20, simple), path)
    before = inodes(path)
    die_at_last_sync(monkeypatch, path)
    with pytest.raises(StaleStoreError, match=r"a\.mf\.append: found the rows of an append of another dataset"):
        append(path, some(50, 60, simple))
    shutil.rmtree(path.with_name("a.mf.append"))
    reader = memfeed.open(path)
    assert holds(append(path, some(50, 60, simple)), [*range(20), *range(50, 60)])
    assert "an append of other rows was interrupted and left bytes after its end" in capfd.readouterr().err
    assert inodes(path)["x.memmap"] != before["x.memmap"]
    assert torch.equal(reader.column("x"), memfeed.open(path).column("x")[:20])


def test_a_copy_by_hard_links_keeps_its_files(path):
    cache(some(0, 20, simple), path)
    copy = path.with_name("copy.mf")
    shutil.copytree(path, copy, copy_function=os.link)
    before = inodes(copy)
    one = append(path, some(20, 30, simple))
    assert inodes(copy) == before
    assert set(before.values()).isdisjoint(inodes(path).values())
    assert not (copy / "append.begun").exists()
    assert holds(memfeed.open(copy), range(20))
    other = append(copy, some(60, 75, simple))
    assert holds(one, range(30))
    assert holds(other, [*range(20), *range(60, 75)])
    same = append(copy.with_name("copy.mf"), some(75, 76, simple))
    assert holds(one, range(30))
    assert holds(same, [*range(20), *range(60, 76)])


@pytest.mark.parametrize("moment", ["published", "renamed"])
def test_rows_whose_commit_was_done_are_not_added_again(path, monkeypatch, capfd, moment):
    cache(some(0, 20, simple), path)
    with monkeypatch.context() as m, pytest.raises(Dead):
        if moment == "published":
            real = commit.publish

            def publish(root, to, overwrite):
                real(root, to, overwrite=overwrite)
                if to == path:
                    raise Dead

            m.setattr(commit, "publish", publish)
        else:
            m.setattr(files, "exchange", lambda one, other: libc.exchange(one, other) or (_ for _ in ()).throw(Dead))
        append(path, some(20, 30, simple))
    assert holds(memfeed.open(path), range(30))
    assert holds(append(path, some(20, 30, simple)), range(30))
    assert "were appended before the process ended" in capfd.readouterr().err
    assert os.listdir(path.parent) == ["a.mf"]
    assert holds(append(path, some(20, 30, simple)), [*range(30), *range(20, 30)])


APPENDS = """
import sys, memfeed, torch
number = int(sys.argv[1])
rows = [{"x": torch.full((3,), 1000.0 * number + i), "text": "z" * (i % 5)} for i in range(10)]
memfeed.append(sys.argv[2], rows, workers=0, progress=False)
"""


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.long)])
def test_appends_of_several_processes_come_one_after_another(path, count):
    row = {"x": torch.zeros(3), "text": "abc"}
    cache(Made([row, row | {"text": ""}]), path)
    at = path.with_name("programs")
    at.mkdir()
    started = [Program(APPENDS, number, path, at=at) for number in range(count)]
    assert [program.wait() for program in started] == [0] * count
    store = memfeed.open(path)
    store.verify()
    numbers = store.column("x")[2:, 0].reshape(count, 10)
    assert sorted(numbers[:, 0].tolist()) == [1000 * number for number in range(count)]
    assert torch.equal(numbers, numbers[:, :1] + torch.arange(10))
    assert sorted(os.listdir(path.parent)) == ["a.mf", "programs"]


def test_an_append_waits_for_one_that_removes_its_rows(path, monkeypatch):
    cache(some(0, 20, simple), path)
    real, threads = commit.publish, []

    def publish(root, to, overwrite):
        real(root, to, overwrite=overwrite)
        if to == path and not threads:
            threads.append(Thread(target=append, args=(path, some(30, 40, simple))))
            threads[0].start()
            threads[0].join(timeout=0.3)
            assert threads[0].is_alive()

    monkeypatch.setattr(commit, "publish", publish)
    append(path, some(20, 30, simple))
    threads[0].join(timeout=60)
    assert holds(memfeed.open(path), range(40))
    assert os.listdir(path.parent) == ["a.mf"]


def test_another_dataset_after_a_commit_that_was_done(path, monkeypatch):
    cache(some(0, 20, simple), path)
    with monkeypatch.context() as m, pytest.raises(Dead):
        m.setattr(files, "rename", _dead_at(files.rename, "a.mf.append"))
        append(path, some(20, 30, simple))
    assert path.with_name("a.mf.append").exists()
    assert holds(append(path, some(30, 35, simple)), range(35))


def _dead_at(real, name):
    def rename(one, to):
        if one.name == name:
            raise Dead
        real(one, to)

    return rename


def test_samples_are_not_read_again_after_a_kill(path):
    cache(some(0, 20, simple), path)
    read = []

    def make(i):
        if i == 70 and len(read) < 200:
            raise Dead
        time.sleep(0.002)  # some 15 are one list, and a list that did not end is lost
        read.append(i)
        return simple(20 + i)

    with pytest.raises(Dead):
        append(path, Made(make, 100))
    assert path.with_name("a.mf.append.build").exists()
    assert holds(memfeed.open(path), range(20))
    count = len(read)
    read += [0] * 200
    assert holds(append(path, Made(make, 100)), range(120))
    assert len(read) - 200 - count < 112  # 132 without the rows that were written: 16 of them are read three times


def test_a_file_system_without_links_copies_and_says_so(path, monkeypatch, capfd):
    cache(some(0, 20, simple), path)
    before = inodes(path)
    monkeypatch.setattr(file_copies, "link", lambda one, other: False)
    assert holds(append(path, some(20, 30, simple), progress=True), range(30))
    assert "are copied, because they cannot be shared here" in capfd.readouterr().err
    assert inodes(path)["x.memmap"] != before["x.memmap"]


def test_files_of_another_user_are_not_made_longer(path, monkeypatch):
    cache(some(0, 20, simple), path)
    before = inodes(path)
    user = os.geteuid()
    real = os.lstat

    def lstat(at, **options):
        found = real(at, **options)
        return os.stat_result([*found[:4], user + 1, *found[5:]]) if str(at).endswith("x.memmap") else found

    monkeypatch.setattr(join.os, "lstat", lstat)
    assert holds(append(path, some(20, 30, simple)), range(30))
    assert inodes(path)["x.memmap"] != before["x.memmap"]
    assert inodes(path)["text/heap.bin"] == before["text/heap.bin"]


def clones(monkeypatch):
    """A file system with reflinks, as far as this can see."""
    made = []

    def clone_range(source, fd, offset):
        if offset % 4096:
            raise OSError(22, "Invalid argument")
        data = os.pread(source, os.fstat(source).st_size, 0)
        os.pwrite(fd, data, offset)
        made.append(len(data))

    monkeypatch.setattr(libc, "clone_range", clone_range)
    return made


def test_reflinks_leave_the_old_files_alone(path, monkeypatch, capfd):
    rows = torch.arange(4096 * 6).view(-1, 512)
    cache({"x": rows[:24], "y": torch.arange(24)}, path)
    before = inodes(path)
    copy = path.with_name("copy.mf")
    shutil.copytree(path, copy, copy_function=os.link)
    made = clones(monkeypatch)
    store = append(path, {"x": rows[24:], "y": torch.arange(24, 48)}, progress=True)
    assert "shared with their stores (reflinks)" in capfd.readouterr().err
    assert sorted(made) == [24 * 8, 24 * 4096, 24 * 4096]
    store.verify()
    assert torch.equal(store.column("x"), rows)
    assert inodes(path)["x.memmap"] != before["x.memmap"]
    assert (copy / "x.memmap").stat().st_size == 24 * 4096
    whole = concat([copy, path, copy], path.with_name("c.mf"))
    whole.verify()
    assert torch.equal(whole.column("x"), torch.cat([rows[:24], rows, rows[:24]]))


# --- what the store says of its dataset


def test_cache_knows_the_dataset_that_has_grown(path):
    cache(some(0, 20, simple), path)
    append(path, some(20, 50, simple))
    assert holds(cache(some(0, 50, simple), path), range(50))
    assert holds(cache(ConcatDataset([some(0, 20, simple), some(20, 50, simple)]), path), range(50))
    with pytest.raises(StaleStoreError, match="found 20 samples, expected 50"):
        cache(some(0, 20, simple), path)
    with pytest.raises(StaleStoreError, match="sample 49"):
        cache(Made(lambda i: simple(i if i < 49 else 7), 50), path)


def test_many_appends_keep_a_short_fingerprint(path):
    cache(some(0, 20, simple), path)
    for first in range(20, 32, 2):
        append(path, some(first, first + 2, simple))
    store = append(path, some(32, 100, simple))
    assert len(store._view.manifest.fingerprint.probes) <= 64
    assert holds(cache(some(0, 100, simple), path), range(100))


def test_other_forms_than_those_of_the_store_are_refused(path):
    data = TensorDataset(torch.arange(60).view(20, 3), torch.arange(20))
    memfeed.cache(data, path, fields=["x", "y"], progress=False)
    with pytest.raises(StaleStoreError, match=r"a store whose field x is raw; expected zstd .*, as forms= says"):
        append(path, data, forms={"x": "zstd"})
    with pytest.raises(FieldError, match="no field 'z'; expected one of: x, y"):
        append(path, data, forms={"z": "raw"})
    assert len(append(path, data, forms={"x": "raw"})) == 40
    with pytest.raises(StaleStoreError, match=r"a store whose field x is raw"):
        memfeed.cache(ConcatDataset([data, data]), path, forms={"x": "zstd"}, progress=False)


def test_what_a_writer_and_iterables_made(path):
    with memfeed.Writer(path) as writer:
        for i in range(5):
            writer.append(simple(i))
    assert holds(append(path, some(5, 9, simple)), range(9))
    other = path.with_name("b.mf")
    cache(Counting(9), other)
    store = append(other, Counting(4))
    assert [row[1] for row in store] == [*range(9), *range(4)]
    assert len(append(other, Counting(9), length=2)) == 15


def test_skipped_samples_and_repair(path):
    def broken(i):
        if i in (3, 24):
            raise ValueError("broken")
        return simple(i)

    cache(Made(broken, 20), path, on_error="skip")
    store = append(path, Made(lambda i: broken(20 + i), 12), on_error="skip")
    rows = [i for i in range(32) if i not in (3, 24)]
    assert store.skipped == (3, 24)
    assert holds(store, rows)
    assert holds(cache(Made(broken, 32), path, on_error="skip"), rows)
    (path / "x.memmap").chmod(0o644)
    with open(path / "x.memmap", "r+b") as file:
        file.seek(25 * 12)
        file.write(b"rot")
    with pytest.raises(CorruptStoreError, match=r"x\.memmap: found other bytes than were written"):
        append(path, some(32, 33, simple))
    assert holds(memfeed.repair(Made(broken, 32), path, on_error="skip"), rows)


def test_repair_of_a_store_whose_append_was_killed(path, monkeypatch):
    cache(some(0, 20, simple), path)
    die_at_last_sync(monkeypatch, path)
    (path / "text" / "heap.bin").chmod(0o644)
    with open(path / "text" / "heap.bin", "r+b") as file:
        file.write(b"rot")
    assert holds(memfeed.repair(some(0, 20, simple), path), range(20))
    assert holds(append(path, some(20, 30, simple)), range(30))


class Labelled(Made):
    def __init__(self, labels, classes=("ant", "bee"), add=0):
        super().__init__([(torch.full((2,), float(label)), label) for label in labels])
        self.classes, self.targets = list(classes), [label + add for label in labels]


def test_classes_and_targets(path):
    cache(Labelled([0, 1, 1]), path)
    store = append(path, Labelled([1, 0]))
    assert store.classes == ["ant", "bee"]
    assert store.targets == [0, 1, 1, 1, 0]
    assert append(path, Made([(torch.zeros(2), 1)])).targets == [0, 1, 1, 1, 0, 1]
    with pytest.raises(SchemaError, match="found another classes than that of"):
        append(path, Labelled([0, 1], classes=("bee", "ant")))
    shutil.rmtree(path.with_name("a.mf.append"))
    apart = append(path, Labelled([1, 0], add=5))  # a column has them no more
    assert apart.targets == [0, 1, 1, 1, 0, 1, 6, 5]
    apart.verify()
    assert append(path, Labelled([1])).targets == [0, 1, 1, 1, 0, 1, 6, 5, 1]
    with pytest.raises(SchemaError, match="found a dataset without targets"):
        append(path, Made([(torch.zeros(2), 1)]))


def test_a_store_of_a_split_pipeline(path, photos):
    datasets = pytest.importorskip("torchvision.datasets")
    from torchvision.transforms import v2

    pipeline = v2.Compose([v2.Resize((32, 32)), v2.PILToTensor(), v2.RandomHorizontalFlip()])
    data = datasets.ImageFolder(photos / "train", pipeline)
    cache(Subset(data, range(8)), path, split=True, workers=0)
    with pytest.raises(StoreError, match=r"expected the same here: append\(store, dataset, split=True\)"):
        append(path, Subset(data, range(8, 12)))
    store = append(path, Subset(data, range(8, 12)), split=True)
    assert len(store) == 12
    assert store.transform is not None


# --- what does not fit


def test_metadata_stay(path):
    cache(some(0, 4, simple), path, metadata={"a": [1]})
    assert append(path, some(4, 6, simple)).metadata == {"a": [1]}


def test_one_shape_in_the_new_rows_fits_a_column_whose_rows_vary(path):
    cache(
        Made(
            [
                {"x": torch.arange(i % 3), "m": None if i % 2 else "a", "j": {"a": i} if i % 2 else [i, "s"]}
                for i in range(8)
            ]
        ),
        path,
    )
    new = [{"x": torch.arange(5), "m": None, "j": {"a": i}} for i in range(4)]
    assert equal(append(path, Made(new))[9], new[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s | {"x": torch.zeros(4)}, r"field x: found float32 \[4\], expected float32 \[3\]"),
        (lambda s: s | {"x": torch.zeros(3, dtype=torch.float64)}, r"field x: found float64 \[3\], expected float32"),
        (lambda s: s | {"new": 1}, "new"),
        (lambda s: {"x": s["x"], "text": s["text"]}, "boxes"),
        (lambda s: s | {"text": b"bytes"}, "field text: found bytes, expected str"),
        (lambda s: tuple(s.values()), "found"),
    ],
)
def test_samples_that_do_not_fit(path, change, message):
    store = cache(some(0, 9, simple), path)
    with pytest.raises(SchemaError, match=f"do not fit the store: .*{message}") as error:
        append(path, Made([change(simple(i)) for i in range(4)]))
    assert len(str(error.value)) < 400
    assert holds(store, range(9))
    assert os.listdir(path.parent) == ["a.mf"]


def test_a_later_sample_that_does_not_fit(path):
    cache(some(0, 9, simple), path)
    with pytest.raises(SchemaError, match=r"sample 20, field x: found dims \[4\]; expected float32 \[3\]"):
        append(path, Made(lambda i: simple(i) | ({"x": torch.zeros(4)} if i == 20 else {}), 41))
    assert holds(memfeed.open(path), range(9))


def test_dtypes_cast_as_they_did(path):
    cache(some(0, 9, simple), path, forms={"x": torch.float16})
    store = append(path, some(9, 12, simple), forms={"x": torch.float16})
    assert store[11]["x"].tolist() == [11.0] * 3


def test_what_is_no_whole_store(path):
    store = cache(some(0, 9, simple), path)
    new = some(9, 12, simple)
    for view in (store.subset([1, 2]), store.select("x")):
        with pytest.raises(StoreError, match="found a view of a store"):
            append(view, new)
        with pytest.raises(StoreError, match="found a view of a store"):
            concat([store, view], path.with_name("b.mf"))
    with pytest.raises(StoreNotFoundError):
        append(path.with_name("none.mf"), new)
    TensorDict({"x": torch.zeros(3)}, [3]).memmap(str(path.with_name("td")))
    with pytest.raises(StoreError, match="found no store of memfeed's own"):
        append(path.with_name("td"), new)
    with pytest.raises(ValueError, match="expected a list of one or more stores"):
        memfeed.concat([], path.with_name("b.mf"))
    with pytest.raises(ValueError, match="on_error"):
        append(path, new, on_error="stop")


def test_a_store_that_is_being_filled_is_refused(path):
    store = cache(some(0, 40, simple), path, lazily=True, workers=0)  # 16 rows are probed
    with pytest.raises(StoreError, match="being filled"):
        append(store, some(40, 42, simple))
    store.finish()
    assert holds(append(store, some(40, 42, simple)), range(42))


def test_an_unfinished_build_of_the_store_is_kept(path):
    cache(some(0, 30, simple), path)

    def fails(i):
        if i == 25:
            raise ValueError("broken")
        return simple(i)

    with pytest.raises(MemfeedError, match="rows are kept"):
        cache(Made(fails, 33), path, overwrite=True, workers=0)
    with pytest.raises(BuildError, match="found an unfinished build"):
        append(path, some(30, 31, simple))
    assert path.with_name("a.mf.build").exists()


# --- concat


def test_concat(path, capfd):
    cache(some(0, 23), path)
    cache(some(23, 40), path.with_name("b.mf"))
    before = {name: (path / name).read_bytes() for name in inodes(path)}
    store = memfeed.concat([path, memfeed.open(path.with_name("b.mf")), path], path.with_name("c.mf"))
    assert holds(
        memfeed.open(store.path, types=cache(some(0, 23), path)._view.types), [*range(40), *range(23)], rich_sample
    )
    assert "23 + 17 + 23 rows" in capfd.readouterr().err
    assert before == {name: (path / name).read_bytes() for name in before}
    assert len(TensorDict.load_memmap(str(store.path))) == 63
    with pytest.raises(StoreError, match="found something there"):
        concat([path], path.with_name("c.mf"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s | {"x": torch.zeros(4)}, r"field x: found float32 \[4\], expected float32 \[3\]"),
        (
            lambda s: s | {"boxes": torch.zeros(2, dtype=torch.int64)},
            r"field boxes: found int64 \[2\], expected jag",
        ),
        (lambda s: s | {"new": 1}, "found the fields new; expected none beside the others"),
        (lambda s: {"x": s["x"], "text": s["text"]}, "found fewer fields; expected boxes"),
        (lambda s: dict(reversed(s.items())), "found the fields in another order"),
    ],
)
def test_stores_that_differ_are_not_concatenated(path, change, message):
    one = cache(some(0, 9, simple), path)
    other = cache(Made([change(simple(i)) for i in range(5)]), path.with_name("b.mf"))
    with pytest.raises(SchemaError, match=message) as error:
        concat([one, other], path.with_name("c.mf"))
    assert len(str(error.value)) < 600
    assert sorted(os.listdir(path.parent)) == ["a.mf", "b.mf"]


@pytest.mark.parametrize(
    ("one", "other", "difference"),
    [
        ((torch.uint8, (3, 16, 16), "zstd"), (torch.uint8, (3, 16, 16), "lz4"), r"as lz4, expected .* as zstd"),
        ((torch.uint8, (3, 16, 16), "jpeg"), (torch.uint8, (16, 16, 3), "jpeg"), r"found uint8 \[16, 16, 3\] as jpeg"),
        ((torch.int32, (64,), "zstd"), (torch.float32, (64,), "zstd"), r"found float32 \[64\] as zstd, expected int32"),
        (
            (torch.int32, (64,), "zstd"),
            (torch.int32, (8, 8), "zstd"),
            r"found int32 \[8, 8\] as zstd, expected int32 \[64",
        ),
        ((torch.int32, (64,), "zstd:1"), (torch.int32, (64,), "zstd:9"), None),
    ],
)
def test_coded_rows_are_joined_only_if_one_codec_reads_them(tmp_path, one, other, difference):
    stores = [
        memfeed.cache([{"x": torch.ones(shape, dtype=dtype)}] * 4, tmp_path / str(i), forms={"x": form}, progress=False)
        for i, (dtype, shape, form) in enumerate((one, other))
    ]
    if difference is None:
        assert torch.equal(memfeed.concat(stores, tmp_path / "c", progress=False)[7]["x"], torch.ones(64).int())
        return
    with pytest.raises(SchemaError, match=rf"field x: .*{difference}.*memfeed\.recode"):
        memfeed.concat(stores, tmp_path / "c", progress=False)
    assert not (tmp_path / "c").exists()


def test_concat_of_what_may_be_none_and_what_is_not(path):
    one = cache(Made(["a", "b"]), path)
    other = cache(Made(["c", None]), path.with_name("b.mf"))
    assert list(concat([one, other], path.with_name("c.mf"))) == ["a", "b", "c", None]


def test_concat_of_a_store_that_was_replaced(path):
    one = cache(some(0, 9, simple), path)
    cache(some(1, 9, simple), path, overwrite=True)
    with pytest.raises(StoreError, match="found another store there than the one that was opened"):
        concat([one], path.with_name("c.mf"))
    assert os.listdir(path.parent) == ["a.mf"]


# --- anything in any order


@settings(max_examples=12, phases=[phase for phase in Phase if phase != Phase.shrink])
@given(st.data())
def test_any_sequence_with_kills(data):
    """Appends and concats, killed at any operation and called again, against lists of rows."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=base) as directory, no_syncs():
        stores, next_row = {}, 0
        for number in range(data.draw(st.integers(2, 5))):
            what = data.draw(st.sampled_from(["append", "append", "concat", "link"])) if stores else "new"
            old = data.draw(st.sampled_from(sorted(stores))) if stores else ""
            path, target = Path(directory) / old, Path(directory) / f"{number}.mf"
            count = data.draw(st.integers(1, 6))
            rows = list(range(next_row, next_row + count))
            next_row += count
            if what == "link":
                shutil.copytree(path, target, copy_function=os.link)
                stores[target.name] = stores[old]
                continue
            if what == "new":
                stores[target.name] = [0, 1, 2, *rows]  # lengths vary
                do = lambda to=target, rows=stores[target.name]: cache(Made(list(map(simple, rows))), to)  # noqa: E731
            elif what == "append":
                before = stores[old]
                stores[old] = [*before, *rows]
                do = lambda to=path, rows=rows: append(to, Made(list(map(simple, rows))))  # noqa: E731
            else:
                second = data.draw(st.sampled_from(sorted(stores)))
                stores[target.name] = [*stores[old], *stores[second]]
                parts = [path, path.with_name(second)]
                do = lambda parts=parts, to=target: concat(parts, to)  # noqa: E731
            kill = data.draw(st.integers(0, 300))
            try:
                with dies(kill):
                    do()
            except Dead:
                if what == "append":
                    found = memfeed.open(path)
                    assert holds(found, before) if len(found) == len(before) else holds(found, stores[old])
                    if len(found) > len(before) and not path.with_name(f"{old}.append").exists():
                        continue  # it had ended: another call adds the rows again
                try:
                    do()
                except StoreError as error:
                    assert what == "concat"
                    assert "found something there" in str(error)
        for name, rows in stores.items():
            assert holds(memfeed.open(Path(directory) / name), rows)
        assert all(name.endswith((".mf", ".mf.build.appended")) for name in os.listdir(directory))


def test_arguments_in_the_order_of_cache_are_named(tmp_path):
    with pytest.raises(TypeError, match=r"found list as the store .*memfeed\.append\(path, dataset\)"):
        memfeed.append([1, 2], tmp_path / "a.mf")


def test_the_advice_about_room_fits_an_append(path, monkeypatch):
    store = cache(Made(simple, 5), path)
    monkeypatch.setattr("memfeed.system.files.free_bytes", lambda path: 10)
    with pytest.raises(SpaceError, match=r"found 10 bytes free; expected at least .* rows of .*: free some space$"):
        append(store, Made(simple, 50))
    with pytest.raises(SpaceError, match=r"found 10 bytes free; .*: free some space, or choose another path$"):
        concat([store, store], path.with_name("b.mf"))


@pytest.mark.parametrize("wrong", [5, None, Made, "a.mf"])
def test_what_is_no_list_of_stores_is_named(path, wrong):
    with pytest.raises(ValueError, match=r"found an object of .* to concatenate; expected a list"):
        concat(wrong, path)
