"""`memfeed.cache`: stores that are written, opened, replaced, or left alone."""

import shutil
import threading
from collections import namedtuple

import pytest
import torch
from tensordict import TensorDict

import memfeed
from memfeed.building.claim import claim
from memfeed.errors import (
    BuildError,
    SchemaError,
    StoreError,
)
from memfeed.store import format
from memfeed.system import files
from support import Made, Pair, cache, equal, rich_sample


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


def test_a_class_for_samples_and_batches(path):
    pairs = [(torch.full((3,), i), i) for i in range(5)]
    store = cache(Made(pairs), path, types=Pair)
    assert equal(store[3], Pair(images=torch.full((3,), 3), targets=torch.tensor(3), batch_size=[]))
    assert isinstance(store[1:3], Pair)
    assert type(memfeed.open(path)[3]).__name__ == "TensorDict"
    assert isinstance(memfeed.open(path, types=(Pair,))[3], Pair)
    assert isinstance(memfeed.open(path, types=Pair)[3], Pair)
    assert isinstance(cache(Made(pairs), path, types=Pair)[0], Pair)


class Plain:
    pass


@pytest.mark.parametrize("use", ["cache", "open", "writer"])
@pytest.mark.parametrize("types", [Plain, [Pair, Plain], [3], [int]])
def test_types_are_record_classes(path, use, types):
    cache(Made([(torch.zeros(3), 1)] * 5), path.with_name("other.mf"))
    with pytest.raises(SchemaError, match=r"found types=.*; expected tensorclass, dataclass or namedtuple classes"):
        if use == "cache":
            cache(Made([(torch.zeros(3), 1)] * 5), path, types=types)
        elif use == "open":
            memfeed.open(path.with_name("other.mf"), types=types)
        else:
            memfeed.Writer(path, types=types)
    assert not path.exists()


def test_one_class_at_most_replaces_the_outermost_container(path):
    Other = namedtuple("Other", "a b")
    with pytest.raises(SchemaError, match="found types= with Pair, Other, which no sample holds; expected one"):
        cache(Made([(torch.zeros(3), 1)] * 5), path, types=[Pair, Other])
    samples = [(Other(torch.zeros(3), i), i) for i in range(5)]
    store = cache(Made(samples), path, types=[Other, Pair])
    assert type(store[1]).__name__ == "Pair"
    assert isinstance(store[1].images, Other)


def test_names_and_dtypes(path):
    store = cache(
        Made([(torch.tensor([i, 2]), i) for i in range(5)]),
        path,
        fields=("mask", "label"),
        forms={"mask": torch.uint8},
    )
    assert store.column("mask").dtype == torch.uint8
    assert (path / "mask.memmap").stat().st_size == 10
    assert equal(store[2], (torch.tensor([2, 2], dtype=torch.uint8), 2))
    with pytest.raises(SchemaError, match=r"sample 3, field mask: found the value 300, which uint8 would change"):
        cache(
            Made([torch.tensor([100 * i]) for i in range(5)]),
            path.with_name("b.mf"),
            fields=("mask",),
            forms={"mask": torch.uint8},
        )


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

    def then(*arguments, **options):
        times.append(1)
        if len(times) == 1:
            cache(torch.arange(7), path.with_name("b.mf"))
            shutil.rmtree(path)
            path.with_name("b.mf").rename(path)
        real(*arguments, **options)

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


def replacing(how, path):
    if how == "overwrite":
        cache(torch.arange(6), path, overwrite=True)
    elif how == "append":
        memfeed.append(path, torch.arange(6), progress=False)
    else:
        column = path / "value.memmap"
        column.chmod(0o644)
        column.write_bytes(b"x" + column.read_bytes()[1:])
        memfeed.repair(torch.arange(5), path, progress=False)


@pytest.mark.parametrize("how", ["overwrite", "append", "repair"])
@pytest.mark.parametrize("name", ["notes.txt", "runs/one/model.pt", "meta/value.memmap"])
def test_files_of_others_in_a_store_are_not_removed(path, how, name):
    """A directory that takes the place of the old one does not have them."""
    cache(torch.arange(5), path)
    (path / name).parent.mkdir(parents=True, exist_ok=True)
    (path / name).write_text("mine")
    (path / ".DS_Store").write_text("")
    with pytest.raises(StoreError, match=rf"found {name}, which is no file of the store, .*: move it"):
        replacing(how, path)
    assert (path / name).read_text() == "mine"
    (path / name).unlink()
    replacing(how, path)
    assert not (path / ".DS_Store").exists()


def test_no_store_is_made_inside_another(path):
    cache(torch.arange(5), path)
    for inner in (path / "inner.mf", path / "a" / "b.mf"):
        with pytest.raises(StoreError, match=rf"path inside the store {path}, .* such as {path.with_name(inner.name)}"):
            cache(torch.arange(3), inner)
        with pytest.raises(StoreError, match="inside the store"), memfeed.Writer(inner) as writer:
            writer.append(1)


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


def test_a_thread_does_not_wait_for_itself(path):
    with memfeed.Writer(path) as writer:
        writer.append(torch.arange(3))
        with pytest.raises(BuildError, match="this very thread is building it already"):
            cache(torch.arange(3), path)


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
    for options in ({}, {"overwrite": True}):
        with pytest.raises(StoreError, match="is no|no memfeed store"):
            cache(torch.arange(3), path, **options)
    assert path.exists()


def test_links_are_followed_once(path, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link.mf").symlink_to(tmp_path / "real" / "b.mf")
    cache(torch.arange(5), tmp_path / "link.mf")
    cache(torch.arange(6), tmp_path / "link.mf", overwrite=True)
    assert (tmp_path / "link.mf").is_symlink()
    assert len(memfeed.open(tmp_path / "link.mf")) == 6
    assert [p.name for p in (tmp_path / "real").iterdir()] == ["b.mf"]
