"""A store is exactly what the dataset gives, also where the dataset uses its memory again."""

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import memfeed
from memfeed.convert.write_run import RunWriter
from memfeed.errors import BuildError
from memfeed.schema import values
from support import equal

N = 1000
FEW = 150


class Filled(Dataset):
    """Fills one buffer and returns it."""

    def __init__(self):
        self.buffer = torch.zeros(3)

    def __len__(self):
        return N

    def __getitem__(self, index):
        return self.buffer.fill_(index)


class FilledTogether(Filled):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class FilledArrays(Filled):
    def __init__(self):
        self.buffer = {"x": np.zeros(3), "nested": (np.zeros(2, np.int16), "text")}

    def __getitem__(self, index):
        self.buffer["x"][:] = index
        self.buffer["nested"][0][:] = index
        return self.buffer


class FilledStream(IterableDataset):
    def __iter__(self):
        buffer = torch.zeros(3)
        for index in range(N):
            yield buffer.fill_(index)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dataset", [Filled, FilledTogether, FilledArrays, FilledStream])
def test_every_row_is_what_the_dataset_gave(dataset, workers):
    store = memfeed.cache(dataset(), workers=0 if dataset is FilledStream else workers, progress=False)
    found = store[:]["x"] if dataset is FilledArrays else store[:]
    assert found[:, 0].tolist() == list(range(N))
    if dataset is FilledArrays:
        assert store[:]["nested"][0][:, 1].tolist() == list(range(N))


def rows_from(index):
    """Return what `check_rows` expects of sample `index`, in new memory."""
    return {
        "tensor": torch.full((3,), index),
        "array": np.full(2, index),
        "list": [index, index],
        "json": {"k": [index, {"deep": [index]}]},
        "bytes": bytearray([index % 256]),
        "td": TensorDict({"x": torch.full((2,), index), "note": NonTensorData([index])}),
    }


class FilledKinds(Dataset):
    """Fills one object of each kind."""

    def __init__(self, ring=1):
        self.slots = [rows_from(0) for _ in range(ring)]

    def __len__(self):
        return FEW

    def __getitem__(self, index):
        slot = self.slots[index % len(self.slots)]
        slot["tensor"].fill_(index)
        slot["array"][:] = index
        slot["list"][:] = [index, index]
        slot["json"]["k"][0] = slot["json"]["k"][1]["deep"][0] = index
        slot["bytes"][0] = index % 256
        slot["td"]["x"].fill_(index)
        slot["td"]["note"][0] = index
        return slot


class FilledKindsTogether(FilledKinds):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class OnlyThisKind(FilledKindsTogether):
    """Returns one of the objects, in a ring of three."""

    def __init__(self, kind):
        super().__init__(ring=3)
        self.kind = kind

    def __getitem__(self, index):
        return super().__getitem__(index)[self.kind]


class FilledKindsStream(IterableDataset):
    def __init__(self):
        self.source = FilledKinds()

    def __iter__(self):
        return map(self.source.__getitem__, range(FEW))


def check_rows(store, kinds=None):
    for index in range(FEW):
        expected = rows_from(index)
        expected["bytes"] = bytes(expected["bytes"])
        assert equal(store[index], expected[kinds] if kinds else expected), index


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("dataset", [FilledKinds, FilledKindsTogether])
def test_no_kind_of_object_is_stored_late(dataset, workers):
    check_rows(memfeed.cache(dataset(), workers=workers, progress=False))


@pytest.mark.parametrize("kind", rows_from(0))
def test_samples_read_together_share_no_object(kind):
    check_rows(memfeed.cache(OnlyThisKind(kind), workers=0, progress=False), kind)


def test_iterables_and_writers_copy_too(tmp_path):
    check_rows(memfeed.cache(FilledKindsStream(), progress=False))
    check_rows(memfeed.cache(map(FilledKinds().__getitem__, range(FEW)), progress=False))
    source = FilledKinds()
    with memfeed.Writer(tmp_path / "w.mf") as writer:
        for index in range(FEW):
            writer.append(source[index])
    check_rows(memfeed.open(tmp_path / "w.mf"))


def test_a_repair_copies_too(tmp_path):
    store = memfeed.cache(FilledKinds(), tmp_path / "a.mf", workers=0, progress=False)
    file = store.path / "tensor.memmap"
    file.chmod(0o644)
    file.write_bytes(bytes(file.stat().st_size))
    check_rows(memfeed.repair(FilledKinds(), store.path, progress=False))


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_that_are_not_what_was_probed_are_never_committed(tmp_path, workers, monkeypatch):
    monkeypatch.setattr(values, "copy_value", lambda leaf: leaf)  # as if memfeed kept what it was lent
    with pytest.raises(
        BuildError, match=r"in row \d+, field value, another value than .*remove .*a\.mf\.build"
    ) as error:
        memfeed.cache(Filled(), tmp_path / "a.mf", workers=workers, progress=False)
    assert len(str(error.value)) - 3 * len(str(tmp_path)) < 600
    assert not (tmp_path / "a.mf").exists()


def test_a_row_that_changed_after_it_was_probed_is_never_committed(tmp_path, monkeypatch):
    written = RunWriter.write

    def write(self, row, samples, index, report):
        samples = [[torch.zeros(3)] if row == 0 else leaves for leaves in samples]
        return written(self, row, samples, index, report)

    monkeypatch.setattr(RunWriter, "write", write)
    stream = (torch.full((3,), float(i + 1)) for i in range(40))
    with pytest.raises(BuildError, match="in row 0, field value, another value"):
        memfeed.cache(stream, tmp_path / "a.mf", progress=False)


class Rounding(Dataset):
    """Computes with another rounding in worker processes."""

    def __init__(self, difference):
        self.difference = difference

    def __len__(self):
        return 200

    def __getitem__(self, index):
        change = self.difference if get_worker_info() else 0
        return {"x": torch.linspace(-1, 1, 9) * index + change, "none": torch.tensor([float("nan")]), "n": index}


def test_floats_may_be_rounded_in_another_way_in_workers(tmp_path):
    memfeed.cache(Rounding(1e-6), tmp_path / "a.mf", workers=2, progress=False)
    memfeed.cache(Rounding(1e-6), tmp_path / "a.mf", workers=2, progress=False)
    with pytest.raises(BuildError, match="field x, another value"):
        memfeed.cache(Rounding(9.0), tmp_path / "b.mf", workers=2, progress=False)
    store = memfeed.cache(Rounding(9.0), tmp_path / "b.mf", workers=2, allow="random", progress=False)
    assert len(store) == 200


class OwnIterator:
    """An iterable whose __iter__ starts again and returns itself."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        self.at = 0
        return self

    def __next__(self):
        if self.at == 40:
            raise StopIteration
        self.at += 1
        return torch.tensor(self.at - 1)


class SizedOwnIterator(OwnIterator):
    def __len__(self):
        return 40


@pytest.mark.parametrize("dataset", [OwnIterator, SizedOwnIterator])
def test_an_iterable_that_is_its_own_iterator_is_read_once(dataset):
    assert memfeed.cache(dataset(), progress=False)[:].tolist() == list(range(40))
