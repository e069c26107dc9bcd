"""Rot is found, and mended from the dataset without touching what is healthy."""

import hashlib
from collections import Counter

import numpy as np
import pytest
import torch

import memfeed
from memfeed.cli import main
from memfeed.convert.probe import probe_indices
from memfeed.errors import BuildError, CorruptStoreError, SpaceError, StaleStoreError, StoreError
from memfeed.store import format
from support import Made, equal

ROWS = 600
PROBED = set(probe_indices(ROWS))


def sample(i):
    g = torch.Generator().manual_seed(i)
    return {
        "image": torch.randint(0, 256, (3, 80, 80), generator=g, dtype=torch.uint8),  # 11.5 MB: three chunks
        "sound": torch.randint(-9, 9, (1000 + i % 7 * 500,), generator=g, dtype=torch.int32),  # 6 MB: two chunks
        "text": f"sample {i}",
        "label": i,
    }


class Counted(Made):
    def __init__(self, change=None, n=ROWS):
        super().__init__(sample, n)
        self.read, self.change = Counter(), change

    def __getitem__(self, i):
        self.read[i] += 1
        found = super().__getitem__(i)
        return self.change(found, i) if self.change else found


@pytest.fixture
def store(path):
    return memfeed.cache(Counted(), path, workers=0, progress=False)


def rot(store, name, at):
    """One bit flips."""
    file = store.path / name
    file.chmod(0o644)
    with open(file, "r+b") as handle:
        handle.seek(at)
        byte = handle.read(1)[0]
        handle.seek(at)
        handle.write(bytes([byte ^ 16]))


def mend(store, dataset, **options):
    return memfeed.repair(dataset, store.path, progress=False, **options)


def whole(store):
    store.verify()
    assert all(equal(store[i], sample(i)) for i in range(ROWS))
    assert sorted(p.name for p in store.path.parent.iterdir()) == [store.path.name]


def test_only_rotten_rows_of_a_fixed_column_are_computed(store, capsys):
    row = 3 * 80 * 80
    rot(store, "image.memmap", format.CHUNK_BYTES + 5)
    with pytest.raises(CorruptStoreError, match=r"image\.memmap: .*field image, rows 218 to 436.*memfeed.repair"):
        store.verify()
    data = Counted()
    whole(memfeed.repair(data, store.path))
    rotten = set(range(format.CHUNK_BYTES // row, (2 * format.CHUNK_BYTES - 1) // row + 1))
    assert set(data.read) == PROBED | rotten
    assert max(data.read.values()) == 1
    assert f"{len(rotten)} of 600 rows repaired (bad chunks: 1)" in capsys.readouterr().err


def test_rows_of_a_heap_are_found_by_their_places(store):
    starts = np.fromfile(store.path / "sound/start.memmap", np.int64) * 4
    rot(store, "sound/heap.bin", format.CHUNK_BYTES + 10)
    data = Counted()
    whole(mend(store, data))
    ends = starts + [4 * (1000 + i % 7 * 500) for i in range(ROWS)]
    size = (store.path / "sound/heap.bin").stat().st_size
    rotten = set(np.flatnonzero((starts < min(2 * format.CHUNK_BYTES, size)) & (ends > format.CHUNK_BYTES)).tolist())
    assert 0 < len(rotten) < ROWS
    assert set(data.read) == PROBED | rotten


@pytest.mark.parametrize("names", [["sound/start.memmap"], ["sound/dims.memmap"], ["text/dims.memmap", "label.memmap"]])
def test_rows_without_a_place_get_a_new_one(store, names):
    for name in names:
        rot(store, name, 7 * 8 + 2)
    whole(mend(store, Counted()))


def test_all_files_at_once_and_bits_everywhere(store):
    for name, size in store._view.manifest.files.items():
        rot(store, name, size // 2)
        rot(store, name, size - 1)
    whole(mend(store, Counted()))


def test_readers_keep_the_store_they_have_and_the_rest_is_what_it_was(store):
    rot(store, "label.memmap", 80)
    before = store[10]["label"], store[11]["label"]
    hashed = hashlib.sha256((store.path / "image.memmap").read_bytes()).hexdigest()
    mended = mend(store, Counted())
    assert (store[10]["label"], store[11]["label"]) == before
    assert mended[10]["label"] == 10 != before[0]
    assert hashlib.sha256((mended.path / "image.memmap").read_bytes()).hexdigest() == hashed
    assert mended._view.manifest.fingerprint == store._view.manifest.fingerprint
    assert memfeed.open(store.path).tensordict()["label"][10] == 10


def test_a_whole_store_is_left_alone(store, capsys):
    data, before = Counted(), store.digest
    assert memfeed.repair(data, store.path).digest == before
    assert "no row is damaged" in capsys.readouterr().err
    assert set(data.read) == PROBED, "the store is compared with the dataset as ever"


def test_left_out_rows_keep_their_numbers(path):
    class Broken(Counted):
        def __getitem__(self, i):
            if i in (3, 250):
                raise ValueError(i)
            return super().__getitem__(i)

    store = memfeed.cache(Broken(), path, workers=0, progress=False, on_error="skip")
    rot(store, "image.memmap", 9_000_000)
    mended = mend(store, Broken(), on_error="skip")
    mended.verify()
    assert mended.skipped == (3, 250)
    assert all(equal(mended[i], sample(i + 1 + (i >= 249))) for i in range(3, ROWS - 2))


def test_columns_in_memory_can_mend_too(path):
    data = {"x": torch.rand(700, 2000), "y": torch.arange(700)}
    store = memfeed.cache(data, path, progress=False)
    rot(store, "x.memmap", 5_000_000)
    mended = mend(store, data)
    mended.verify()
    assert torch.equal(torch.as_tensor(mended.column("x")), data["x"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s, i: {**s, "label": i + 1}, "field label, sample 0: found 1, expected 0"),
        (lambda s, i: {**s, "label": -i} if i == 300 else s, "field label, sample 300: found another value"),
        (lambda s, i: {**s, "sound": s["sound"][1:]} if i == 300 else s, "field sound, sample 300: found dims"),
    ],
)
def test_a_dataset_that_gives_other_rows_is_refused(store, change, message):
    rot(store, "image.memmap", format.CHUNK_BYTES + 5)
    before = store.digest
    with pytest.raises(StaleStoreError, match=message):
        mend(store, Counted(change))
    assert memfeed.open(store.path).digest == before
    assert [*store.path.parent.iterdir()] == [store.path]
    whole(mend(store, Counted()))


def test_what_no_row_explains_is_an_error(store):
    rot(store, "checksums.bin", 3)
    with pytest.raises(
        CorruptStoreError,
        match=r"checksums\.bin: found other bytes .*write the store again, memfeed\.cache\(\.\.\., overwrite=True",
    ):
        mend(store, Counted())
    (store.path / "memfeed.json").chmod(0o644)
    (store.path / "memfeed.json").write_text("{")
    with pytest.raises(
        CorruptStoreError,
        match=r"manifest that cannot be read .*write all of it with memfeed\.cache\(\.\.\., overwrite=True",
    ):
        mend(store, Counted())
    whole(memfeed.cache(Counted(), store.path, overwrite=True, workers=0, progress=False))


def test_a_cut_file_is_an_error_at_open_and_no_signal(store):
    file = store.path / "image.memmap"
    file.chmod(0o644)
    with open(file, "r+b") as handle:
        handle.truncate(100)
    with pytest.raises(CorruptStoreError, match=r"image\.memmap: found 100 bytes; expected"):
        memfeed.open(store.path)
    with pytest.raises(
        CorruptStoreError, match=r"found 100 bytes.*write all of it with memfeed\.cache\(\.\.\., overwrite=True"
    ):
        mend(store, Counted())


def test_swapped_files_are_found(path):
    store = memfeed.cache((torch.arange(50), torch.arange(50) + 1), path, progress=False)
    one, other = path / "0.memmap", path / "1.memmap"
    one.rename(path / "x")
    other.rename(one)
    (path / "x").rename(other)
    with pytest.raises(CorruptStoreError, match=r"0\.memmap: found other bytes .*field 0, rows 0 to 49"):
        store.verify()
    data = (torch.arange(50), torch.arange(50) + 1)
    mend(store, data).verify()


def test_stores_that_cannot_be_mended_say_so(path):
    with pytest.raises(StoreError, match="found nothing to repair; expected a store: make one"):
        memfeed.repair(Counted(), path)
    assert not list(path.parent.iterdir())
    with memfeed.Writer(path) as writer:
        writer.append(sample(0))
    with pytest.raises(StoreError, match="whose rows cannot be recomputed one by one"):
        memfeed.repair(Counted(), path)


def test_a_repair_that_dies_changes_nothing(store, monkeypatch):
    rot(store, "label.memmap", 80)
    before = store.digest
    with monkeypatch.context() as m, pytest.raises(BuildError, match="dead"):
        m.setattr("memfeed.building.commit.publish", lambda *a, **k: (_ for _ in ()).throw(BuildError("dead")))
        mend(store, Counted())
    assert memfeed.open(store.path).digest == before
    whole(mend(store, Counted()))


def test_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "rot_data.py").write_text("import torch\ndef make():\n    return torch.arange(90), torch.arange(90)\n")
    assert main(["cache", "rot_data:make", "out.mf", "--no-progress"]) == 0
    rot(memfeed.open("out.mf"), "1.memmap", 9)
    assert main(["verify", "out.mf"]) == 2
    assert "--repair" in capsys.readouterr().err
    assert main(["cache", "rot_data:make", "out.mf", "--repair"]) == 0
    assert "90 of 90 rows repaired" in capsys.readouterr().err
    assert main(["verify", "out.mf"]) == 0


def test_the_advice_about_room_fits_the_call(store, monkeypatch):
    rot(store, "image.memmap", 5_000)
    monkeypatch.setattr("memfeed.system.files.free_bytes", lambda path: 1000)
    with pytest.raises(
        SpaceError, match=r"found 1,000 bytes free; expected at least .* for a copy of .*: free some space$"
    ):
        mend(store, Counted())


def test_arguments_that_are_no_dataset_and_path_are_named(store):
    with pytest.raises(TypeError, match=r"found a path, and then an object of Counted; .*memfeed\.repair\(dataset, '"):
        memfeed.repair(store.path, Counted())
    with pytest.raises(TypeError, match=r"found the store .* itself as the dataset; expected the dataset"):
        memfeed.repair(store, store.path)
    with pytest.raises(TypeError, match="found None; expected the path of the store to repair"):
        memfeed.repair(Counted(), None)
    with pytest.raises(StoreError, match="found generator, an iterable, whose samples have no numbers"):
        mend(store, (row for row in Counted()))
