"""The files that a dataset's attributes name are compared by size and time; a folder that was moved is the same."""

import contextlib
import os
import shutil
import subprocess

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from memfeed.convert import file_digests
from memfeed.convert.file_digests import digest_files, digest_single_files
from memfeed.convert.plain_data import leaves_of
from memfeed.convert.probe import probe_indices
from memfeed.errors import StaleStoreError
from support import cache

N = 60
OTHER = next(i for i in range(20, N) if i not in probe_indices(N))  # a sample that is not compared


class Coco:
    """Annotations."""


class Slotted:
    __slots__ = ("image",)

    def __init__(self, image):
        self.image = image


class Files(Dataset):
    """Samples of files: one row of numbers each."""

    def __init__(self, root, form="records"):
        paths = sorted(str(path) for path in root.glob("*.npy"))
        self.root = str(root)
        if form == "records":
            self.samples = [(path, 0) for path in paths]
        elif form == "names":
            self.names = [os.path.basename(path) for path in paths]
        elif form == "dict":
            self.labels = dict.fromkeys(paths, 0)
        elif form == "frame":
            pandas = pytest.importorskip("pandas")
            self.table = pandas.DataFrame({"file": [os.path.basename(path) for path in paths], "label": 0})
        elif form == "dicts":
            self.data = [{"image": path, "label": 0} for path in paths]
        elif form == "dict of dicts":
            self.coco = Coco()
            self.coco.imgs = {i: {"id": i, "file_name": os.path.basename(path)} for i, path in enumerate(paths)}
        elif form == "objects":
            self.data = [Slotted(path) for path in paths]
        elif form == "stems":
            self.root, self.ids = str(root.parent), [os.path.basename(path)[:-4] for path in paths]
        elif form == "numbers":
            self.root, self.ids = str(root.parent), np.arange(N)

    def __len__(self):
        return N

    def __getitem__(self, index):
        folder = "" if self.root.endswith(("data", "moved", "copied")) else "data"
        return torch.from_numpy(np.load(os.path.join(self.root, folder, f"{index:03}.npy")))


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "data"
    root.mkdir()
    for i in range(N):
        np.save(root / f"{i:03}.npy", np.full(4, i))
        os.utime(root / f"{i:03}.npy", ns=(i, 10**18 + i))
    return root


def rewrite(file, value):
    np.save(file, np.full(4, value))


FORMS = ["records", "names", "dict", "dicts", "dict of dicts", "objects"]


@pytest.mark.parametrize("form", [*FORMS, "stems", "numbers", "frame", "none"])
def test_a_file_of_many_that_was_rewritten_is_seen(folder, path, form):
    cache(Files(folder, form), path)
    assert len(cache(Files(folder, form), path)) == N
    rewrite(folder / f"{OTHER:03}.npy", 7)  # of the same size, and not among the samples that are compared
    with pytest.raises(StaleStoreError, match=r"found other values in dataset\.[a-z_'\[\].*/ ]+ \(file times\)"):
        cache(Files(folder, form), path)


def test_a_folder_that_two_attributes_name_counts_once(folder, path):
    """Its digests became one of both, in which each change was one of all times: only a warning."""
    dataset = Files(folder, "stems")
    dataset.again = dataset.root + "/"
    cache(dataset, path)
    rewrite(folder / f"{OTHER:03}.npy", 7)
    with pytest.raises(StaleStoreError, match=r"found other values in dataset\.[a-z_'\[\].*/ ]+ \(file times\)"):
        cache(dataset, path)


def test_another_size_is_named(folder, path):
    cache(Files(folder), path)
    times = (folder / f"{OTHER:03}.npy").stat()
    np.save(folder / f"{OTHER:03}.npy", np.full(5, OTHER))
    os.utime(folder / f"{OTHER:03}.npy", ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(StaleStoreError, match=r"dataset\.samples \(file sizes\)"):
        cache(Files(folder), path)


@pytest.mark.parametrize("form", [*FORMS, "none"])
def test_a_moved_folder_is_the_same(folder, path, form):
    cache(Files(folder, form), path)
    shutil.move(folder, folder.with_name("moved"))
    assert len(cache(Files(folder.with_name("moved"), form), path)) == N


def test_a_copy_with_other_times_is_told_and_its_rows_are_compared(folder, path):
    cache(Files(folder), path)
    copied = folder.with_name("copied")
    shutil.copytree(folder, copied, copy_function=shutil.copyfile)
    with pytest.warns(match=r"dataset\.samples \(file times\) differs from .* but the samples compared are the same"):
        assert len(cache(Files(copied), path)) == N
    rewrite(copied / f"{OTHER:03}.npy", 7)
    with pytest.raises(StaleStoreError, match=rf"field value, sample {OTHER}: found 7 at \[0\], expected {OTHER}"):
        cache(Files(copied), path)


def test_one_file_counts_with_its_bytes(tmp_path, path, monkeypatch):
    class Table(Dataset):
        def __init__(self, file):
            self.file, self.n = str(file), 5

        def __len__(self):
            return self.n

        def __getitem__(self, index):
            return index

    file = tmp_path / "labels.csv"
    for whole in (1 << 20, 10):
        monkeypatch.setattr(file_digests, "WHOLE_BYTES", whole)
        file.write_bytes(b"a,b\n" * 5000)
        cache(Table(file), path, overwrite=True)
        other = tmp_path / "other" / "labels.csv"
        other.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, other)
        with pytest.warns(match=r"dataset\.file \(file times\)") if whole == 10 else contextlib.nullcontext():
            assert len(cache(Table(other), path)) == 5
        other.write_bytes(b"c,b\n" + b"a,b\n" * 4999)
        with pytest.raises(StaleStoreError, match=r"dataset\.file \(file\)"):
            cache(Table(other), path)


def test_a_file_that_reading_writes_is_left_out(tmp_path, path):
    class Logged(Dataset):
        def __init__(self):
            self.log = str(tmp_path / "log")

        def __len__(self):
            return 50

        def __getitem__(self, index):
            with open(self.log, "a") as file:
                file.write(f"{index}\n")
            return index

    for _ in range(3):
        assert len(cache(Logged(), path, workers=0)) == 50


def test_a_folder_counts_only_for_a_dataset_without_data(folder, path, monkeypatch):
    store = folder / "store.mf"
    cache(Files(folder, "none"), store)
    assert len(cache(Files(folder, "none"), store)) == N, "its own store is no data"
    (folder / ".hidden").touch()
    subprocess.run(["cp", "-r", store, folder / "other.mf"], check=True)
    assert len(cache(Files(folder, "none"), store)) == N
    (folder / "more.npy").touch()
    with pytest.raises(StaleStoreError, match=r"dataset\.root \(files\)"):
        cache(Files(folder, "none"), store)
    monkeypatch.chdir(folder)
    assert digest_files(leaves_of(Files(folder, "none")), store) == {}


def test_of_many_files_some_stand_for_all(folder, monkeypatch):
    leaves = leaves_of(Files(folder))
    monkeypatch.setattr(file_digests, "SOME", 20)
    every = digest_files(leaves, folder)
    monkeypatch.setattr(file_digests, "MOST_SECONDS", 0.0)
    some = digest_files(leaves, folder)
    assert set(every) - set(some) == {"samples (file sizes)", "samples (file times)"}
    assert {path: every[path] for path in some} == some
    (folder / "000.npy").unlink()
    assert digest_files(leaves, folder) == {}, "without the first file the list may be one of other names"


def test_names_that_are_no_files_are_left_alone(tmp_path):
    class Words(Dataset):
        def __init__(self):
            self.words, self.name, self.bad = ["cat", "dog"] * 60, "cat", "a\0b"
            self.path, self.odd = tmp_path, ["a\0b"] * 120

    assert digest_files(leaves_of(Words()), tmp_path) == digest_single_files(leaves_of(Words())) == {}


def test_files_below_a_folder_count_only_if_they_have_the_names_of_all_samples(folder, path):
    cache(Files(folder, "stems"), path)
    (folder.parent / "preview").mkdir()
    for i in range(N):
        (folder.parent / "preview" / f"{i:03}.png").touch()  # of another program, after the store was made
    for i in range(N - 1):
        (folder / f"{i:03}.txt").touch()
    assert len(cache(Files(folder, "stems"), path)) == N
    names = digest_files(leaves_of(Files(folder, "stems")), path)
    assert {name.partition(" (")[0] for name in names} == {"ids in data/*.npy", "ids in preview/*.png"}


@pytest.mark.parametrize("name", ["{}_mask", "speaker{speaker}-mel-{}", "a.b-{}"])
def test_files_whose_names_hold_those_of_samples_count(folder, path, name):
    class Masks(Files):
        def __init__(self):
            self.root, self.ids = str(folder.parent), [f"u-{i}" for i in range(N)]

        def __getitem__(self, index):
            return torch.from_numpy(np.load(folder.parent / "masks" / f"{names[index]}.npy"))

    names = [name.format(f"u-{i}", speaker=i % 2) for i in range(N)]
    (folder.parent / "masks").mkdir()
    for one in names:
        rewrite(folder.parent / "masks" / f"{one}.npy", 1)
    cache(Masks(), path)
    rewrite(folder.parent / "masks" / f"{names[OTHER]}.npy", 7)
    with pytest.raises(StaleStoreError, match=r"dataset\.ids in masks/.*\.npy \(file times\)"):
        cache(Masks(), path)


@pytest.mark.parametrize("end", [".npy", ""])
def test_files_below_a_folder_that_a_method_writes_count(folder, path, monkeypatch, end):
    class Prompts(Files):
        def __init__(self):
            self.data = [{"source": f"{i:03}{end}", "prompt": "a photograph"} for i in range(N)]

        def __getitem__(self, index):
            """Read ./data/ and / below the directory of the program."""
            return torch.from_numpy(np.load("./data/" + self.data[index]["source"].removesuffix(".npy") + ".npy"))

    monkeypatch.chdir(folder.parent)
    cache(Prompts(), path)
    assert len(cache(Prompts(), path)) == N
    rewrite(folder / f"{OTHER:03}.npy", 7)
    with pytest.raises(StaleStoreError, match=r"dataset\.data\[\*\]\['source'\].* \(file times\)"):
        cache(Prompts(), path)


def test_lists_of_words_and_tokens_beside_a_folder_name_no_files(folder, path):
    class Tokens(Files):
        def __init__(self):
            super().__init__(folder, "none")
            self.tokens = [list(range(i, i + 500)) for i in range(N)]
            self.words, self.labels = [f"{i:03} words" for i in range(N)], [i % 10 for i in range(N)]

    assert digest_files(leaves_of(Tokens()), path) == {}


def test_the_file_of_an_open_handle_counts(tmp_path, path):
    h5py = pytest.importorskip("h5py")

    class Handles(Dataset):
        def __init__(self):
            self.file, self.rows = None, open(tmp_path / "rows.bin", "rb")  # noqa: SIM115

        def __len__(self):
            return 500

        def __getitem__(self, index):
            if self.file is None:
                self.file = h5py.File(tmp_path / "a.h5")
                self.column = self.file["x"]
            self.rows.seek(index)
            return int(self.column[index]), self.rows.read(1)[0]

        def close(self):
            self.rows.close()
            if self.file is not None:
                self.file.close()

    def run():
        dataset = Handles()
        try:
            return len(cache(dataset, path, workers=0))
        finally:
            dataset.close()

    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.arange(500)
        (tmp_path / "rows.bin").write_bytes(bytes(500))
    for _ in range(3):
        assert run() == 500
    with h5py.File(tmp_path / "a.h5", "r+") as file:
        file["x"][OTHER] = -1
    with pytest.raises(StaleStoreError, match=r"dataset\.column\.filename \(file\)"):
        run()
    with h5py.File(tmp_path / "a.h5", "r+") as file:
        file["x"][OTHER] = OTHER
    assert run() == 500
    (tmp_path / "rows.bin").write_bytes(bytes(OTHER) + b"a" + bytes(499 - OTHER))
    with pytest.raises(StaleStoreError, match=r"dataset\.rows\.filename \(file\)"):
        run()


def test_a_cache_by_path_names_no_files_to_compare(folder, path):
    class Caching(Files):
        def __init__(self):
            super().__init__(folder)
            self.cache = {}

        def __getitem__(self, index):
            file = self.samples[index][0]
            if file not in self.cache:
                self.cache[file] = super().__getitem__(index).tolist()
            return self.cache[file]

    cache(Caching(), path, workers=0)
    dataset = Caching()
    assert [dataset[i] for i in range(5)]
    assert len(cache(dataset, path, workers=0)) == N
