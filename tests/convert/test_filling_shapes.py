"""Rows of a store that is being filled that fit no column: a loader that takes such rows changes the column."""

import enum
import multiprocessing

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import memfeed
from memfeed import Loader
from memfeed.building.claim import share
from memfeed.convert.probe import probe_indices
from memfeed.errors import SchemaError, StoreError, UnfitRowError
from memfeed.store import format
from memfeed.system.locks import close_lock
from memfeed.system.messages import say_once
from memfeed.system.threads import end_all
from memfeed.testing import equal
from support import Made

Image = pytest.importorskip("PIL.Image")

N, BATCH = 90, 6
PROBED = set(probe_indices(N))
ODD = [row for row in (33, 47, 50, 71, 88) if row not in PROBED]


@pytest.fixture(autouse=True)
def no_filler_is_left():
    yield
    end_all()
    assert not multiprocessing.active_children()


class Sounds(Dataset):
    """Sounds of one length but for a few, as clips that were cut at the end of a recording."""

    def __len__(self):
        return N

    def __getitem__(self, index):
        count = 16 - ODD.index(index) - 1 if index in ODD else 16
        return torch.arange(count, dtype=torch.float32) + index, f"clip {index}", index


class Pictures(Dataset):
    """Images of one size but for some, of which first one side differs and then both do; arrays in a dict."""

    def __len__(self):
        return N

    def __getitem__(self, index):
        sides = {ODD[0]: (8, 9), ODD[1]: (7, 8), ODD[2]: (5, 3)}.get(index, (8, 8))
        return {"image": np.full((*sides, 3), index, np.uint8), "id": index}


class Titles(Dataset):
    """Texts and lists of tensors, of which a few are None."""

    def __len__(self):
        return N

    def __getitem__(self, index):
        title, boxes = f"title {index}", torch.full((1 + index % 2, 1 + index % 3), float(index))
        return {
            "title": None if index in ODD[:2] else title,
            "boxes": None if index in ODD[1:3] else boxes,
            "id": index,
        }


def require_rows(batches, dataset, key):
    """All rows came once, and each is the one of the dataset."""
    samples = [sample for batch in batches for sample in batch]
    assert sorted(sample[key] for sample in samples) == list(range(N))
    assert all(equal(sample, dataset[sample[key]]) for sample in samples)


def require_store(path, dataset):
    store = memfeed.open(path)
    assert len(store) == N
    assert all(equal(tensors(store[i]), tensors(dataset[i])) for i in range(N))
    store.verify()


def tensors(sample):
    return {**sample, "image": torch.as_tensor(sample["image"])} if "image" in sample else sample


@pytest.mark.parametrize("workers", [2, 0])
@pytest.mark.parametrize(("make", "key"), [(Sounds, 2), (Pictures, "id"), (Titles, "id")])
def test_every_row_comes_once_and_the_store_is_right(make, key, workers, tmp_path, capsys):
    dataset, path = make(), tmp_path / "s.mf"
    loader = Loader(dataset, BATCH, shuffle=True, seed=3, num_workers=workers, collate_fn=list, cache=path)
    for _ in range(2):
        require_rows(list(loader), dataset, key)
    loader.store.finish()
    require_rows(list(loader), dataset, key)
    require_store(path, dataset)
    assert "from now on" in capsys.readouterr().err
    again = Loader(dataset, BATCH, shuffle=True, seed=3, num_workers=workers, collate_fn=list, cache=path)
    require_rows(list(again), dataset, key)


def test_the_order_is_that_of_a_store_that_is_whole(tmp_path):
    dataset = Sounds()
    memfeed.cache(dataset, tmp_path / "whole.mf", workers=0, progress=False)
    one, other = (
        Loader(dataset, BATCH, shuffle=True, seed=3, collate_fn=list, cache=tmp_path / name)
        for name in ("whole.mf", "s.mf")
    )
    ids = [[sample[2] for sample in batch] for batch in other]
    assert ids == [[sample[2] for sample in batch] for batch in one]
    other.store.finish()
    assert memfeed.open(tmp_path / "s.mf").schema == one.store.schema


def test_single_samples(tmp_path):
    dataset = Sounds()
    loader = Loader(dataset, None, num_workers=2, cache=tmp_path / "s.mf")
    require_rows([map(tuple, loader)], dataset, 2)


def test_a_state_from_before_the_change_goes_on_after_it(tmp_path):
    dataset = Sounds()

    def make():
        return Loader(dataset, BATCH, shuffle=True, seed=3, num_workers=2, collate_fn=list, cache=tmp_path / "s.mf")

    loader = make()
    iterator = iter(loader)
    first = [next(iterator)]
    state = loader.state_dict()
    rest = list(iterator)
    del iterator, loader
    end_all()
    resumed = make()
    resumed.load_state_dict(state)
    after = list(resumed)
    assert equal(after, rest)
    require_rows(first + after, dataset, 2)


def test_an_interrupted_filling_goes_on_with_the_new_column(tmp_path):
    dataset = Sounds()
    loader = Loader(dataset, BATCH, collate_fn=list, cache=tmp_path / "s.mf")
    for batch in loader:
        if any(sample[2] in ODD for sample in batch):
            break
    del loader, batch
    end_all()
    assert not (tmp_path / "s.mf").exists()
    again = Loader(dataset, BATCH, shuffle=True, num_workers=2, collate_fn=list, cache=tmp_path / "s.mf")
    require_rows(list(again), dataset, 2)
    again.store.finish()
    require_store(tmp_path / "s.mf", dataset)


def test_rows_views_and_other_loaders_read_the_new_column(tmp_path):
    dataset = Sounds()
    loader = Loader(dataset, BATCH, num_workers=2, collate_fn=list, cache=tmp_path / "s.mf")
    store = loader.store
    other = Loader(store, BATCH, shuffle=True, seed=1, collate_fn=list)
    part, begun = store.split([0.5, 0.5], seed=0)[0], iter(other)
    batches = [next(begun)]
    require_rows(list(loader), dataset, 2)
    require_rows(batches + list(begun), dataset, 2)
    assert all(equal(store[i], dataset[i]) for i in range(N))
    assert all(equal(sample, dataset[sample[2]]) for sample in part)
    assert part.schema == store.schema


def test_a_loader_of_whole_batches_ends_with_an_error(tmp_path):
    dataset = Sounds()
    loader = Loader(dataset, BATCH, num_workers=2, collate_fn=list, cache=tmp_path / "s.mf")
    begun = iter(Loader(loader.store, BATCH))
    next(begun)
    require_rows(list(loader), dataset, 2)
    with pytest.raises(StoreError, match="another loader has changed a column"):
        list(begun)


def read_all(store, go, found):
    go.wait()
    for row in range(N):
        try:
            found.put(equal(store[row], Sounds()[row]))
        except StoreError as error:
            found.put(str(error))


def test_a_forked_process_never_reads_a_row_from_the_old_column(tmp_path):
    dataset = Sounds()
    loader = Loader(dataset, BATCH, num_workers=2, collate_fn=list, cache=tmp_path / "s.mf")
    fork = multiprocessing.get_context("fork")
    go, found = fork.Event(), fork.Queue()
    child = fork.Process(target=read_all, args=(loader.store, go, found))
    child.start()
    require_rows(list(loader), dataset, 2)
    go.set()
    read = [found.get(timeout=60) for _ in range(N)]
    child.join()
    assert all("a column has changed" in one for one in read)
    require_rows(list(DataLoader(loader.store, BATCH, num_workers=1, collate_fn=list)), dataset, 2)


def test_where_another_process_fills_the_store_the_next_run_changes_the_column(tmp_path, capsys):
    loader = Loader(Sounds(), BATCH, num_workers=2, collate_fn=list, cache=tmp_path / "s.mf")
    shared = share(format.build_path(tmp_path / "s.mf"))
    try:
        with pytest.raises(UnfitRowError, match=r"found dims \[15\]; expected float32 \[16\].*run the program again"):
            list(loader)
    finally:
        close_lock(shared)
    del loader
    end_all()
    assert "from now on" not in capsys.readouterr().err
    again = Loader(Sounds(), BATCH, num_workers=2, collate_fn=list, cache=tmp_path / "s.mf")
    assert again.store.schema.fields[0].kind == "jagged"
    assert "from now on" in capsys.readouterr().err
    require_rows(list(again), Sounds(), 2)
    again.store.finish()
    require_store(tmp_path / "s.mf", Sounds())


@pytest.mark.parametrize("note", [b"", b'{"field_index": 7, "dims": [3]}', b'{"field_index": 0, "dims": [3, 4]}',
                                  b'{"field_index": 0, "dims": [16]}', b'{"field_index": 1, "dims": []}'])  # fmt: skip
def test_a_shape_that_was_noted_and_means_nothing_changes_no_column(note, tmp_path):
    loader = Loader(Sounds(), BATCH, collate_fn=list, cache=tmp_path / "s.mf")
    next(iter(loader))
    del loader
    end_all()
    (tmp_path / "s.mf.build" / ".build" / "unfit-1.json").write_bytes(note)
    again = Loader(Sounds(), BATCH, collate_fn=list, cache=tmp_path / "s.mf")
    assert [field.kind for field in again.store.schema] == ["fixed", "str", "fixed"]


@pytest.mark.parametrize("options", [{}, {"transform": lambda batch: batch}])
def test_columns_stay_for_whole_batches(options, tmp_path):
    loader = Loader(Sounds(), BATCH, num_workers=2, cache=tmp_path / "s.mf", **options)
    with pytest.raises(SchemaError, match=r"found dims \[15\]; expected float32 \[16\].*a collate_fn and no transform"):
        list(loader)


def test_none_without_a_collate_fn_is_an_error_that_says_what_to_write(tmp_path):
    with pytest.raises(SchemaError, match=r"field title: found None; expected str, as .*a collate_fn and no transform"):
        list(Loader(Titles(), BATCH, cache=tmp_path / "s.mf"))


class Modes(Dataset):
    """PIL images of one mode, but for a few."""

    def __init__(self, usual, *others, at=ODD):
        self.modes = {**dict.fromkeys(range(N), usual), **dict(zip(at, others, strict=False))}

    def __len__(self):
        return N

    def __getitem__(self, index):
        values = np.random.default_rng(index).integers(0, 256, (6, 5, 4), dtype=np.uint8)
        return Image.fromarray(values).convert("RGB").convert(self.modes[index])


@pytest.mark.parametrize("usual", ["RGB", "L", "RGBA"])
@pytest.mark.parametrize("at", [ODD, sorted(PROBED)[1:]], ids=["late", "probed"])
def test_a_collate_fn_gets_the_images_of_a_few_in_their_own_modes(usual, at, tmp_path):
    dataset = Modes(usual, *({"RGB", "L", "RGBA"} - {usual}), at=at)
    loader = Loader(dataset, BATCH, collate_fn=list, cache=tmp_path / "s.mf")
    for _ in range(2):
        images = [image for batch in loader for image in batch]
        assert [image.mode for image in images] == list(dataset.modes.values())
        assert all(images[i].tobytes() == dataset[i].tobytes() for i in range(N))


@pytest.mark.parametrize(("usual", "other"), [("L", "P"), ("RGB", "YCbCr"), ("RGBA", "CMYK"), ("RGB", "P"), ("L", "1")])
def test_an_image_whose_channels_do_not_tell_its_mode_is_an_error(usual, other, tmp_path):
    with pytest.raises(SchemaError, match=rf"sample {ODD[0]}, .* a PIL image of the mode {other}; .* convert it"):
        list(Loader(Modes(usual, other), BATCH, collate_fn=list, cache=tmp_path / "s.mf"))
    with pytest.raises(SchemaError, match=rf"sample {ODD[0]}, .* a PIL image of the mode {other}; .* convert it"):
        memfeed.cache(Modes(usual, other), tmp_path / "t.mf", workers=0, progress=False)


class OtherModes(Dataset):
    """PIL images of one mode, which the channels do not tell, and a NumPy scalar; ``palette`` by index."""

    def __init__(self, mode, palette=lambda index: range(30)):
        self.mode, self.palette = mode, palette

    def __len__(self):
        return N

    def __getitem__(self, index):
        values = np.random.default_rng(index).integers(0, 256, (6, 5, 4), dtype=np.uint8)
        if self.mode == "P":
            image = Image.fromarray(values[..., 0] % 10)
            image.putpalette(bytes(self.palette(index)))
        elif self.mode == "PA":
            image = Image.fromarray(values[..., 0] % 10).convert("P").convert("PA")
        elif self.mode in ("I;16", "I", "F"):
            image = Image.fromarray(values[..., 0].astype({"I;16": "u2", "I": "i4", "F": "f4"}[self.mode]) * 200)
        else:
            image = Image.fromarray(values).convert("L" if self.mode == "LA" else "RGB").convert(self.mode)
        return image, np.int16(index)


@pytest.mark.parametrize("mode", ["1", "LA", "P", "CMYK", "YCbCr", "HSV", "I;16", "I", "F"])
def test_a_collate_fn_gets_images_of_other_modes_as_they_were(mode, tmp_path):
    dataset = OtherModes(mode)
    for _ in range(2):  # filled, and opened again
        loader = Loader(dataset, BATCH, collate_fn=list, cache=tmp_path / "s.mf")
        for index, (image, number) in enumerate(sample for batch in loader for sample in batch):
            assert image == dataset[index][0]
            assert (type(number), number) == (np.int16, index)
        loader.store.finish()
    (image, _), *_ = next(iter(DataLoader(loader.dataset, BATCH, collate_fn=loader.collate_fn)))
    assert image == dataset[0][0]


@pytest.mark.parametrize(
    "dataset", [OtherModes("PA"), OtherModes("P", lambda index: range(index, index + 30))], ids=["PA", "palettes"]
)
def test_a_line_says_which_images_a_collate_fn_gets_as_tensors(dataset, tmp_path, capsys):
    say_once.cache_clear()
    (image, _), *_ = next(iter(Loader(dataset, BATCH, collate_fn=list, cache=tmp_path / "s.mf")))
    assert isinstance(image, torch.Tensor)
    assert "the collate_fn gets a PIL image (field 0) as a tensor" in capsys.readouterr().err
    Loader(dataset, BATCH, cache=tmp_path / "s.mf")
    Loader(OtherModes("P"), BATCH, collate_fn=list)
    assert "as a tensor" not in capsys.readouterr().err


def test_a_palette_that_is_not_that_of_the_first_samples_is_an_error(tmp_path):
    dataset = OtherModes("P", lambda index: range(index == ODD[0], 30 + (index == ODD[0])))
    with pytest.raises(SchemaError, match=rf"sample {ODD[0]}, field 0: .* the mode P with the same palette.*np\.array"):
        list(Loader(dataset, BATCH, collate_fn=list, cache=tmp_path / "s.mf"))


class Part(enum.IntEnum):
    TRAIN, TEST = 3, 4


class Word(enum.StrEnum):
    GOOD, BAD = "good", "bad"


def test_a_collate_fn_gets_members_of_an_enum(tmp_path):
    dataset = [{"part": Part(3 + i % 2), "word": list(Word)[i % 2], "i": i} for i in range(N)]
    for _ in range(2):
        loader = Loader(Made(dataset), BATCH, collate_fn=list, cache=tmp_path / "s.mf")
        for sample in (sample for batch in loader for sample in batch):
            assert sample["part"] is dataset[sample["i"]]["part"]
            assert sample["word"] is dataset[sample["i"]]["word"]
        loader.store.finish()
