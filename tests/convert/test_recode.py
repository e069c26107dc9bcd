"""`memfeed.recode`: a store in other forms."""

import os
import signal
from pathlib import Path

import pytest
import torch

import memfeed
from forked_programs import Program
from memfeed.cli import main
from memfeed.errors import BuildError, CorruptStoreError, FieldError, SchemaError, StaleStoreError, StoreError
from memfeed.schema.compare import equal
from support import Made


class Few:
    """A dataset with classes, targets, and a sample that is broken."""

    classes = ("ant", "bee")
    targets = tuple(index % 2 for index in range(30))

    def __len__(self):
        return 30

    def __getitem__(self, index):
        if index == 4:
            raise ValueError("broken")
        rows = torch.arange(3 * (12 + index % 3) * 14, dtype=torch.int32).view(3, -1, 14) % 200
        return rows.to(torch.uint8), torch.arange(index % 9), f"number {index}", index % 2


@pytest.fixture
def store(tmp_path):
    return memfeed.cache(
        Few(), tmp_path / "a.mf", workers=0, progress=False, on_error="skip", metadata={"by": "hand"},
        fields=["image", "tokens", "text", "label"],
    )  # fmt: skip


def kinds(store):
    return [field.coding.codec if field.coding else field.kind for field in store._view.manifest.schema]


def rows_of(store):
    return [store[row] for row in range(len(store))]


def test_a_store_goes_through_several_forms_and_back(store, tmp_path):
    forms = ["zstd", {"image": "lz4"}, {"tokens": "raw"}, {"image": "zstd:9", "tokens": "lz4"}, "raw"]
    expected = [
        ["zstd", "zstd", "str", "fixed"],
        ["lz4", "zstd", "str", "fixed"],
        ["lz4", "jagged", "str", "fixed"],
        ["zstd", "lz4", "str", "fixed"],
        ["jagged", "jagged", "str", "fixed"],
    ]
    last = store
    for number, (form, kind) in enumerate(zip(forms, expected, strict=True)):
        last = memfeed.recode(last, tmp_path / f"{number}.mf", form, progress=False)
        assert kinds(last) == kind
        assert equal(rows_of(last), rows_of(store))
        last.verify(progress=False)
        assert (last.skipped, last.classes, list(last.targets), last.metadata) == (
            store.skipped, store.classes, list(store.targets), {"by": "hand"},
        )  # fmt: skip
        opened = memfeed.cache(Few(), last.path, on_error="skip", fields=["image", "tokens", "text", "label"])
        assert opened == last
    assert last.schema == store.schema
    assert last._view.manifest.fingerprint == store._view.manifest.fingerprint


def test_the_rest_of_a_cut_pipeline_stays(tmp_path):
    from PIL import Image
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    for index in range(12):
        folder = tmp_path / "tree" / "ab"[index % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.linear_gradient("L").rotate(index * 9).convert("RGB").resize((60, 50)).save(folder / f"{index}.png")
    pipeline = v2.Compose([v2.Resize(40), v2.RandomCrop(32), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
    old = memfeed.cache(ImageFolder(str(tmp_path / "tree"), pipeline), tmp_path / "a.mf", split=True, progress=False)
    new = memfeed.recode(old, tmp_path / "b.mf", "zstd", progress=False)
    assert kinds(new)[0] == "zstd"
    options = {"batch_size": 4, "shuffle": True, "seed": 3}
    assert equal(list(memfeed.Loader(new, **options)), list(memfeed.Loader(old, **options)))


KILLED = """
import os, signal, sys
import memfeed
from memfeed.building.rows import RowWriter
write, count = RowWriter.write_runs, 0
def dies(self, *arguments):
    global count
    count += 1
    if count == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return write(self, *arguments)
RowWriter.write_runs = dies
import memfeed.building.copy_rows as copy_rows
copy_rows._AT_ONCE = 4000
memfeed.recode(sys.argv[1], sys.argv[2], "zstd", progress=False)
"""


def test_after_a_kill_the_same_call_goes_on(store, tmp_path, tmp_path_factory, monkeypatch):
    killed = Program(KILLED, store.path, tmp_path / "b.mf", at=tmp_path_factory.mktemp("program"))
    assert killed.wait() == -signal.SIGKILL, killed.err.read_text()
    from memfeed.building.rows import RowWriter

    written, write = [], RowWriter.write_runs
    monkeypatch.setattr(RowWriter, "write_runs", lambda self, *a: written.append(a[0]) or write(self, *a))
    new = memfeed.recode(store, tmp_path / "b.mf", "zstd", progress=False)
    assert 0 < sum(count for runs in written for _, count in runs) < len(store)
    assert equal(rows_of(new), rows_of(store))
    new.verify(progress=False)
    assert sorted(os.listdir(tmp_path)) == ["a.mf", "b.mf"]


@pytest.mark.parametrize(
    ("form", "error", "said"),
    [
        ({"x": "zstd"}, FieldError, "no field 'x'"),
        ({"text": "zstd"}, SchemaError, "rows of str"),
        ({"tokens": "jpeg"}, SchemaError, "uint8 images"),
        (256, ValueError, "need the dataset"),
        ({"image": torch.float32}, ValueError, "need the dataset"),
        ("zip", ValueError, "expected for each field"),
    ],
)
def test_forms_that_cannot_be(store, tmp_path, form, error, said):
    with pytest.raises(error, match=said):
        memfeed.recode(store, tmp_path / "b.mf", form, progress=False)
    assert os.listdir(tmp_path) == ["a.mf"]


def test_places_that_cannot_be(store, tmp_path):
    with pytest.raises(StoreError, match="expected a new path"):
        memfeed.recode(store, store.path, "zstd")
    with pytest.raises(StoreError, match="whole store"):
        memfeed.recode(store.subset([1, 2]), tmp_path / "b.mf", "zstd")
    with pytest.raises(StoreError):
        memfeed.recode(tmp_path / "none.mf", tmp_path / "b.mf", "zstd")


def test_what_jpeg_changed_is_not_forgotten(tmp_path, capsys):
    images = torch.arange(12 * 3 * 16 * 16).view(12, 3, 16, 16).mul(7).remainder(251).to(torch.uint8)
    data = Made(lambda i: {"image": images[i], "mask": torch.full((16, 16), i, dtype=torch.uint8)}, 12)
    first = memfeed.cache(data, tmp_path / "a.mf", forms={"image": "jpeg:50"}, workers=0, progress=False)
    losses = first._view.manifest.attributes.losses
    assert losses[0].mean > 5
    for number, form in enumerate([{"mask": "zstd"}, {"image": "zstd"}, "raw"]):
        store = memfeed.recode(first, tmp_path / f"{number}.mf", form, progress=False)
        assert store._view.manifest.attributes.losses == losses
        assert store._view.manifest.version == 3
        assert main(["inspect", str(store.path)]) == 0
        assert f"pixels differ by {losses[0].mean:.2f} of 255" in capsys.readouterr().out
        for _ in (loader := memfeed.Loader(data, 4, cache=store.path)):
            pass
        assert sum(len(batch["mask"]) for batch in loader) == 12
        if number:
            with pytest.raises(
                StaleStoreError, match="after JPEG had changed its pixels; expected those of the dataset"
            ):
                memfeed.cache(data, store.path, forms={"image": "zstd" if number == 1 else "raw"})


@pytest.mark.parametrize("form", [{"image": "zstd"}, "raw"])
def test_a_repair_computes_no_pixels_that_jpeg_changed(tmp_path, form):
    images = torch.arange(12 * 3 * 16 * 16).view(12, 3, 16, 16).mul(7).remainder(251).to(torch.uint8)
    data = Made(lambda i: {"image": images[i], "label": i}, 12)
    first = memfeed.cache(data, tmp_path / "a.mf", forms={"image": "jpeg:50"}, workers=0, progress=False)
    store = memfeed.recode(first, tmp_path / "b.mf", form, progress=False)
    rows = rows_of(store)

    def damage(name):
        (store.path / name).chmod(0o644)
        with open(store.path / name, "r+b") as file:
            file.write(b"\xff\xff")

    damage("label.memmap")
    assert equal(rows_of(memfeed.repair(data, store.path)), rows)
    damage("image.memmap" if form == "raw" else "image/heap.bin")
    with pytest.raises(StoreError, match="found damage in field image, which memfeed.recode stored as .* after JPEG"):
        memfeed.repair(data, store.path)
    assert sorted(os.listdir(tmp_path)) == ["a.mf", "b.mf"]


def test_a_damaged_store_is_not_recoded(store, tmp_path):
    name = store.path / "label.memmap"
    name.chmod(0o644)
    with open(name, "r+b") as file:
        file.write(b"\xff")
    with pytest.raises(CorruptStoreError, match=r"label.memmap: found other bytes .* memfeed.repair"):
        memfeed.recode(store, tmp_path / "b.mf", "zstd", progress=False)
    assert os.listdir(tmp_path) == ["a.mf"]


def test_another_process_that_was_first_is_told(store, tmp_path, monkeypatch):
    from memfeed.building import copy_rows

    claim = copy_rows.claim

    def late(path):  # the other process writes the store while this one waits for the lock
        monkeypatch.setattr(copy_rows, "claim", claim)
        memfeed.recode(store, path, "lz4", progress=False)
        return claim(path)

    monkeypatch.setattr(copy_rows, "claim", late)
    with pytest.raises(StoreError, match=r"b\.mf: found something there; expected a new path"):
        memfeed.recode(store, tmp_path / "b.mf", "zstd", progress=False)
    assert kinds(memfeed.open(tmp_path / "b.mf"))[0] == "lz4"
    assert sorted(os.listdir(tmp_path)) == ["a.mf", "b.mf"]


def test_rows_of_an_unfinished_conversion_stay(store, tmp_path):
    with pytest.raises(ZeroDivisionError), memfeed.Writer(tmp_path / "b.mf") as writer:
        writer.append({"x": 1})
        _ = 1 / 0
    with pytest.raises(BuildError, match=r"b\.mf\.build: found an unfinished build; expected none"):
        memfeed.recode(store, tmp_path / "b.mf", "zstd", progress=False)
    with memfeed.Writer(tmp_path / "b.mf") as writer:
        assert len(writer) == 1


def test_the_command(store, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["recode", "a.mf", "b.mf", "--form", "image=zstd:5", "--form", "tokens=lz4"]) == 0
    assert kinds(memfeed.open(Path("b.mf"))) == ["zstd", "lz4", "str", "fixed"]
    capsys.readouterr()
    assert main(["inspect", "b.mf"]) == 0
    out = capsys.readouterr().out
    assert "image: zstd level=5, 1/" in out
    assert "rows/s decoded by one core" in out
    for arguments, said in (
        (["a.mf", "c.mf"], "found no --form"),
        (["a.mf", "c.mf", "--form", "image=zip"], "expected for each field"),
        (["a.mf", "c.mf", "--form", "zstd", "--form", "image=lz4"], "one form for all fields"),
        (["a.mf", "b.mf", "--form", "zstd"], "expected a new path"),
    ):
        assert main(["recode", *arguments]) == 2
        out, err = capsys.readouterr()
        assert said in err
        assert len(err.splitlines()) == 1
