"""Files that samples are read from count, whatever their names are made of: a change of one is an error."""

import asyncio
import contextlib
import gc
import hashlib
import json
import os
import pickle
import sqlite3
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from operator import attrgetter

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset

from memfeed.convert import opened_files
from memfeed.convert.changes import differ
from memfeed.convert.file_digests import digest_files
from memfeed.convert.opened_files import OpenedFiles
from memfeed.convert.probe import probe_indices
from memfeed.errors import StaleStoreError
from memfeed.loading.loader import Loader
from support import cache

N = 60
OTHER = next(i for i in range(20, N) if i not in probe_indices(N))  # a sample that is not compared


def opened_by(read, samples=1):
    opened = OpenedFiles()
    for index in range(samples):
        with opened.noticed(index):
            read(index)
    return [os.path.basename(one) for one in opened.files()]


def test_files_that_are_opened_to_read(tmp_path):
    for name in ("a.bin", "b.bin"):
        (tmp_path / name).write_bytes(b"1")
    sqlite3.connect(tmp_path / "c.db").close()

    def read(index):
        (tmp_path / "a.bin").read_bytes()
        os.close(os.open(os.fsencode(tmp_path / "b.bin"), os.O_RDONLY))
        sqlite3.connect(f"file:{tmp_path}/c%2edb?mode=ro", uri=True).close()
        open(os.dup(0)).close()
        sqlite3.connect(":memory:").close()
        json.loads("{}")
        sys.audit("open")
        with pytest.raises(FileNotFoundError):
            (tmp_path / "none").read_bytes()

    assert opened_by(read) == ["a.bin", "b.bin", "c.db"]


def test_code_devices_and_folders_that_are_written_to_are_none(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"1")
    (tmp_path / "code.py").write_text("1")

    def read(index):
        open(tmp_path / "code.py").close()
        open("/proc/self/status").close()
        open(threading.__file__).close()
        open(sys.executable, "rb").close()
        (tmp_path / "a.bin").read_bytes()
        if index:
            (tmp_path / "a.cached").write_bytes(b"2")

    assert opened_by(read) == ["a.bin"]
    assert opened_by(read, 2) == []


@pytest.mark.parametrize(
    ("name", "is_data"),
    [
        ("/dev/shm/a.png", True),
        ("/processed/a.png", True),
        (f"{sys.prefix}/data/a.png", True),  # it may be /usr, and the program in /usr/src
        (f"{sys.prefix}/share/a.png", False),
        ("/dev/video0", False),
    ],
)
def test_folders_without_data(name, is_data, monkeypatch):
    monkeypatch.setattr(os.path, "isfile", lambda path: True)
    assert opened_by(lambda index: sys.audit("open", name, "r", os.O_RDONLY)) == [os.path.basename(name)] * is_data


def test_a_file_that_is_opened_for_both_is_written_if_its_time_changes(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"1")
    assert opened_by(lambda index: np.memmap(tmp_path / "a.bin")) == ["a.bin"]  # its mode is "r+"
    os.utime(tmp_path / "a.bin", (0, 0))
    assert opened_by(lambda index: np.memmap(tmp_path / "a.bin").fill(index)) == []


def test_only_within_the_block_and_in_threads_of_the_sample(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"1")
    opened, begun, ended = OpenedFiles(), threading.Event(), threading.Event()

    def later():
        begun.wait(30)
        (tmp_path / "a.bin").read_bytes()
        ended.set()

    threading.Thread(target=later).start()  # no sample starts it
    with opened.noticed(0):
        begun.set()
        assert ended.wait(30)
        begun.clear(), ended.clear()
        other = threading.Thread(target=later)
        other.start()
    begun.set(), other.join()  # it reads when the sample is there
    (tmp_path / "a.bin").read_bytes()
    assert opened.files() == []


def in_thread(function, name):
    thread = threading.Thread(target=lambda: setattr(thread, "found", function(name)))
    thread.start()
    thread.join()
    return thread.found


def in_pool(function, name):
    with ThreadPoolExecutor(1) as pool:
        return next(pool.map(function, [name]))


@pytest.fixture
def begun():
    """Pools and a loop whose threads are there before the first sample is read."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    with ThreadPoolExecutor(1) as pool, ThreadPool(1) as other:
        pool.submit(int).result()
        yield pool, other, loop
    asyncio.run_coroutine_threadsafe(loop.shutdown_default_executor(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join(), loop.close()


@pytest.mark.parametrize("form", ["thread", "pool", "pool of before", "apply", "map", "imap", "loop of before"])
def test_what_threads_of_a_sample_open(tmp_path, begun, form):
    (tmp_path / "a.bin").write_bytes(b"1")
    pool, other, loop = begun
    own = (threading.Thread.start, ThreadPoolExecutor.submit)
    run = {
        "thread": in_thread,
        "pool": in_pool,
        "pool of before": lambda function, name: pool.submit(function, name).result(),
        "apply": lambda function, name: other.apply(function, [name]),
        "map": lambda function, name: other.map(function, [name])[0],
        "imap": lambda function, name: next(other.imap(function, [name])),
        "loop of before": lambda function, name: asyncio.run_coroutine_threadsafe(
            asyncio.to_thread(function, name), loop
        ).result(),
    }[form]
    assert opened_by(lambda index: run(open, tmp_path / "a.bin").close()) == ["a.bin"]
    assert own == (threading.Thread.start, ThreadPoolExecutor.submit)


@pytest.mark.parametrize(("name", "file"), [("reads", "reads.py"), ("__mp_main__", None)])  # of a notebook: no file
def test_a_name_that_a_module_has_for_a_function(tmp_path, monkeypatch, name, file):
    cv2 = pytest.importorskip("cv2")
    opened_files._names_of_user.cache_clear()
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    module = types.ModuleType(name)
    module.imread = cv2.imread  # from cv2 import imread
    module.__file__ = file and str(tmp_path / file)
    monkeypatch.setitem(sys.modules, name, module)
    assert opened_by(lambda index: module.imread(str(tmp_path / "a.png"))) == ["a.png"]
    assert module.imread is cv2.imread


@pytest.mark.filterwarnings("ignore:The image decoding:DeprecationWarning")
@pytest.mark.parametrize(
    ("module", "name"), [("cv2", "imread"), ("torchvision.io", "read_image"), ("torchvision.io.image", "read_file")]
)
def test_functions_of_libraries_in_c(tmp_path, module, name):
    library = pytest.importorskip(module)
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    own, kept = getattr(library, name), []

    def read(index):
        kept.append(getattr(library, name))
        assert getattr(library, name)(str(tmp_path / "a.png")) is not None
        own_class = type("Own", (), {"read": kept[0], "own": own})  # a module that a sample imports may have it
        assert isinstance(own_class().read, types.MethodType) == isinstance(own_class().own, types.MethodType)

    assert opened_by(read) == ["a.png"]
    assert getattr(library, name) is own is pickle.loads(pickle.dumps(kept[0]))
    assert kept[0](str(tmp_path / "a.png")).shape


def video(file):
    cv2 = pytest.importorskip("cv2")
    writer = cv2.VideoWriter(file, cv2.VideoWriter_fourcc(*"MJPG"), 5, (32, 32))
    writer.write(np.zeros((32, 32, 3), np.uint8))
    writer.release()


def sound(file):
    pytest.importorskip("soundfile").write(file, np.zeros(9), 8000)


def volume(file):
    with pytest.importorskip("h5py").File(file, "w") as opened:
        opened["x"] = np.zeros(3)


def table(file):
    pytest.importorskip("pandas").DataFrame({"x": [1.0]}).to_parquet(file)


def feather(file):
    pytest.importorskip("pandas").DataFrame({"x": [1.0]}).to_feather(file)


def weights(file):
    pytest.importorskip("safetensors.torch").save_file({"x": torch.zeros(3)}, file)


def scan(file):
    sitk = pytest.importorskip("SimpleITK")
    sitk.WriteImage(sitk.GetImageFromArray(np.zeros((3, 4), np.int16)), file)


def raster(file):
    rasterio = pytest.importorskip("rasterio")
    with rasterio.open(file, "w", driver="GTiff", height=4, width=4, count=1, dtype="uint8") as opened:
        opened.write(np.zeros((1, 4, 4), np.uint8))


def grid(file):
    pytest.importorskip("netCDF4").Dataset(file, "w").close()


@pytest.mark.filterwarnings("ignore:Dataset has no geotransform")
@pytest.mark.parametrize(
    ("written", "name", "end", "module", "attribute"),
    [
        (video, "VideoCapture", "avi", "cv2", "VideoCapture"),
        (sound, "SoundFile", "wav", "soundfile", "SoundFile.__init__"),
        (sound, "read", "wav", "soundfile", "SoundFile.__init__"),
        (sound, "info", "wav", "soundfile", "SoundFile.__init__"),
        (volume, "File", "h5", "h5py", "File.__init__"),
        (table, "read_parquet", "parquet", "pandas", "read_parquet"),
        (table, "read_table", "parquet", "pyarrow.parquet", "read_table"),
        (table, "ParquetFile", "parquet", "pyarrow.parquet", "ParquetFile.__init__"),
        (table, "ParquetDataset", "parquet", "pyarrow.parquet", "ParquetDataset.__init__"),
        (table, "dataset", "parquet", "pyarrow.dataset", "dataset"),
        (feather, "open_file", "feather", "pyarrow.ipc", "open_file"),
        (feather, "read_table", "feather", "pyarrow.feather", "read_table"),
        (weights, "load_file", "safetensors", "safetensors.torch", "load_file"),
        (table, "read_parquet", "parquet", "polars", "read_parquet"),
        (table, "scan_parquet", "parquet", "polars", "scan_parquet"),
        (feather, "memory_map", "feather", "pyarrow", "memory_map"),
        (feather, "OSFile", "feather", "pyarrow", "OSFile"),
        (video, "open", "avi", "av", "open"),
        (video, "VideoReader", "avi", "decord", "VideoReader.__init__"),
        (scan, "ReadImage", "mha", "SimpleITK", "ReadImage"),
        (raster, "open", "tif", "rasterio", "open"),
        (grid, "Dataset", "nc", "netCDF4", "Dataset"),
    ],
)
def test_classes_and_tables_of_libraries_in_c(tmp_path, written, name, end, module, attribute):
    written(file := str(tmp_path / f"a.{end}"))
    library = pytest.importorskip(module)
    own, kept = attrgetter(attribute)(library), []

    def read(index):
        kept.append(attrgetter(attribute)(library))
        opened = getattr(library, name)(file)
        if isinstance(kept[0]._function, type):
            assert isinstance(opened, getattr(library, name))
            own_class = types.new_class("Own", (getattr(library, name),))
            assert issubclass(own_class, kept[0]._function)
            assert issubclass(own_class, kept[0])
            assert (kept[0] | None) == (kept[0]._function | None) == (None | kept[0])
            assert getattr(library, name).__name__ == name

    assert opened_by(read) == [f"a.{end}"]
    assert attrgetter(attribute)(library) is own is pickle.loads(pickle.dumps(kept[0]))


def test_names_of_columns_are_no_modes_of_writing(tmp_path):
    pandas = pytest.importorskip("pandas")
    pandas.DataFrame({"x": [1.0], "w": [2.0]}).to_parquet(tmp_path / "a.parquet")
    assert opened_by(lambda index: pandas.read_parquet(tmp_path / "a.parquet", columns=["x", "w"])) == ["a.parquet"]


def test_a_folder_in_which_a_library_in_c_writes_is_left_out(tmp_path):
    h5py = pytest.importorskip("h5py")
    volume(tmp_path / "a.h5")

    def read(index):
        h5py.File(tmp_path / "a.h5").close()
        h5py.File(tmp_path / f"{index}.h5", mode="a").close()

    assert opened_by(read) == []


def test_threads_that_read_at_once_put_the_functions_back():
    cv2 = pytest.importorskip("cv2")
    own, here, other = cv2.imread, contextlib.ExitStack(), contextlib.ExitStack()
    with ThreadPoolExecutor(1) as pool:
        here.enter_context(OpenedFiles().noticed(0))
        pool.submit(other.enter_context, OpenedFiles().noticed(1)).result()
        here.close()
        assert cv2.imread is not own, "the other thread still reads"
        pool.submit(other.close).result()
    assert cv2.imread is own


def test_code_that_imports_a_module_while_garbage_is_collected(monkeypatch):
    """As ``__del__`` of an object that is thrown away may do: a list of the items of a dict makes garbage."""
    made = []

    def imports(phase, info):
        made.append(f"made_while_collecting_{len(made)}")
        monkeypatch.setitem(sys.modules, made[-1], types.ModuleType(made[-1]))

    before = gc.get_threshold()
    opened_files._names_of_user.cache_clear()
    gc.callbacks.append(imports)
    gc.set_threshold(10)
    try:
        with OpenedFiles().noticed(0):
            pass
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(imports)
    assert made


def test_what_a_sample_puts_in_the_place_of_a_function_stays(monkeypatch):
    cv2 = pytest.importorskip("cv2")
    monkeypatch.setattr(cv2, "imread", cv2.imread)  # put back at the end
    other = [].append
    opened_by(lambda index: setattr(cv2, "imread", other))
    assert cv2.imread is other


class Computed(Dataset):
    """Samples of files whose names are in no attribute."""

    def __init__(self, root, form):
        self.get = {"file": lambda: str(root), "parts": lambda: str(root), "one": lambda: str(root)}[form]
        self.form, self.labels = form, [0] * N

    def __len__(self):
        return N

    def name(self, index):
        if self.form == "file":
            return f"{self.get()}/{index % 3}/{index:03d}.json"
        return f"{self.get()}/part-{index * 4 // N}.json" if self.form == "parts" else f"{self.get()}/all.json"

    def __getitem__(self, index):
        with open(self.name(index)) as file:
            return torch.tensor(json.load(file)[str(index)]), self.labels[index]


@pytest.mark.parametrize("form", ["file", "parts", "one"])
def test_a_change_of_a_file_that_no_attribute_names_is_an_error(tmp_path, path, form):
    dataset, rows = Computed(tmp_path, form), {}
    for index in range(N):
        rows.setdefault(dataset.name(index), {})[str(index)] = float(index)
    for name, row in rows.items():
        os.makedirs(os.path.dirname(name), exist_ok=True)
        with open(name, "w") as file:
            json.dump(row, file)
    cache(dataset, path)
    assert cache(Computed(tmp_path, form), path)[OTHER][0] == OTHER
    rows[dataset.name(OTHER)][str(OTHER)] = 0.5
    with open(dataset.name(OTHER), "w") as file:
        json.dump(rows[dataset.name(OTHER)], file)
    with pytest.raises(StaleStoreError, match=r"json \((file|file sizes|file times)\)"):
        cache(Computed(tmp_path, form), path)


class FromTable(Dataset):
    """Opens a table at the first sample, and keeps it open."""

    def __init__(self, folder):
        self.folder, self.table = folder, None

    def __len__(self):
        return N

    def __getitem__(self, i):
        if self.table is None:
            self.table = sqlite3.connect(self.folder / "a.db", check_same_thread=False)
        return self.table.execute("select value from t where i = ?", (i,)).fetchone()[0]


def test_a_file_that_the_first_sample_opens_and_that_stays_open(tmp_path, path):
    """A loader reads a sample before it looks for a cut."""
    (tmp_path / "data").mkdir()
    with contextlib.closing(sqlite3.connect(tmp_path / "data" / "a.db")) as table:
        table.execute("create table t (i integer, value integer)")
        table.executemany("insert into t values (?, ?)", [(i, i) for i in range(N)])
        table.commit()
        assert len(list(Loader(FromTable(tmp_path / "data"), 10, cache=path, num_workers=0))) == N // 10
        table.execute("update t set value = -1 where i = ?", (OTHER,))
        table.commit()
    with pytest.raises(StaleStoreError, match=r"other values in a\.db \(file\)"):
        Loader(FromTable(tmp_path / "data"), 10, cache=path)


def test_results_that_a_dataset_keeps_beside_its_files_are_no_change(tmp_path, path):
    for index in range(N):
        (tmp_path / f"{index}.json").write_text(json.dumps(index))

    class Keeping(Computed):
        def __getitem__(self, index):
            kept = tmp_path / f"{index}.kept"
            if not kept.exists():
                kept.write_text((tmp_path / f"{index}.json").read_text())
            return torch.tensor(json.loads(kept.read_text()))

    cache(Keeping(tmp_path, "file"), path)
    for index in range(N):
        (tmp_path / f"{index}.kept").write_text(json.dumps(index))
    cache(Keeping(tmp_path, "file"), path)


def test_the_files_of_a_temporary_store_are_not_looked_at(tmp_path, monkeypatch):
    for index in range(N):
        (tmp_path / f"{index}.json").write_text(json.dumps(index))

    class Named(Computed):
        def name(self, index):
            return f"{tmp_path}/{index}.json"

        def __getitem__(self, index):
            with open(self.name(index)) as file:
                return torch.tensor(json.load(file))

    looked = []
    monkeypatch.setattr("memfeed.convert.changes.digest_files", lambda *given: looked.append(given) or {})
    assert cache(Named(tmp_path, "file"), None)[OTHER] == OTHER
    assert not looked


@pytest.mark.parametrize("each", [1, 4])  # samples in each file
def test_results_that_the_program_writes_beside_the_files_are_no_change(tmp_path, path, each):
    class Numbered(Computed):
        def name(self, index):
            return f"{tmp_path}/{index // each}.json"

    dataset = Numbered(tmp_path, "file")
    for first in range(0, N, each):
        (tmp_path / f"{first // each}.json").write_text(json.dumps({first + i: first + i for i in range(each)}))
    cache(dataset, path)
    (tmp_path / "metrics.json").write_text("{}")
    assert cache(dataset, path)[OTHER][0] == OTHER
    with open(tmp_path / f"{OTHER // each}.json", "a") as file:
        file.write(" ")
    with pytest.raises(StaleStoreError, match=r"json \(file sizes\)"):
        cache(dataset, path)


@pytest.mark.parametrize("form", ["digits", "words", "folders", "shared"])
def test_the_next_run_may_read_fewer_samples(tmp_path, form):
    """Its digests have the same values, though it has seen fewer folders and names."""

    def name(index):
        stem = hashlib.sha256(b"%d" % index).hexdigest() if form == "words" else f"{index:03d}"
        stem = f"part-{index // 20}" if form == "shared" else stem
        folder = f"{index % 7}" if form == "folders" else "abc"[index % 3]
        return tmp_path / folder / f"{stem}.json"

    for index in range(N):
        name(index).parent.mkdir(exist_ok=True)
        name(index).write_text(json.dumps(index))

    def digests(count):
        opened = OpenedFiles()
        for index in range(count):
            with opened.noticed(index):
                name(index).read_text()
        return digest_files([], tmp_path / "s.mf", (), opened)

    every = digests(16)
    assert every
    for count in range(1, 16):
        fewer = digests(count)
        assert {path: one.text for path, one in fewer.items() if path in every and every[path].text != one.text} == {}
    name(20).write_text("[20, 21]")
    assert any(differ(one.text, digests(16)[path].text) for path, one in every.items())
