"""Programs that no store can serve give what they give without memfeed, batch by batch, and read decoded files."""

from __future__ import annotations

import functools
import io
import pickle
import random
import subprocess
import sys
import threading
import wave
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, get_worker_info

import memfeed
from memfeed.errors import LoaderError, RandomDataError, SchemaError
from memfeed.loading import decoded
from memfeed.loading.decoded import DecodedLoader
from memfeed.memoizing import decoders, kept
from memfeed.schema.compare import describe_difference, difference
from memfeed.system import messages
from support import Made

PILLOW = "PIL.ImageFile.ImageFile.load"


@pytest.fixture(autouse=True)
def as_found():
    """Leave the libraries, and what this process knows of results, as they were."""
    messages.say_once.cache_clear()
    yield
    decoders.restore()
    kept._memos.clear()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return the paths of 12 small photographs."""
    folder = tmp_path_factory.mktemp("photos")
    for i in range(12):
        pixels = np.random.default_rng(i).integers(0, 255, (60 + 3 * i, 90, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{i:02}.{'png' if i % 3 else 'jpg'}")
    return sorted(map(str, folder.iterdir()))


class Photos(Dataset):
    """Opens files; what it makes of them is random, and no pipeline can be found."""

    def __init__(self, files):
        self.files = files

    def __len__(self):
        return len(self.files)

    def open(self, index):
        with Image.open(self.files[index % len(self.files)]) as image:
            return image.convert("RGB")


def crop(image, side=32):
    """Return a random part of an image. It belongs to no dataset, so no pipeline can be cut before it."""
    x, y = random.randrange(image.width - side), random.randrange(image.height - side)
    return torch.from_numpy(np.asarray(image.crop((x, y, x + side, y + side))).copy())


class SimClr(Photos):
    def __getitem__(self, index):
        image = self.open(index)
        return crop(image), crop(image), index


class CycleGan(Photos):
    def __getitem__(self, index):
        return {"a": crop(self.open(index)), "b": crop(self.open(random.randrange(len(self.files))))}


class Mosaic(Photos):
    """Draws from a generator of its own too."""

    def __init__(self, files):
        super().__init__(files)
        self.generator = np.random.default_rng(5)

    def __getitem__(self, index):
        rows = [index, *self.generator.integers(len(self.files), size=3).tolist()]
        return torch.cat([crop(self.open(row)) for row in rows])


class CropsByLabel(Photos):
    """Four crops of each file, as a list of dicts, as MONAI's transforms with ``num_samples=4``."""

    def __getitem__(self, index):
        image = self.open(index)
        return [{"image": crop(image), "label": index % 2} for _ in range(4)]


class Detection(Photos):
    def __getitem__(self, index):
        image = self.open(index)
        boxes = torch.tensor([[3.0, 4.0, 20.0, 30.0]] * (index % 3 + 1))
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            boxes[:, [0, 2]] = image.width - boxes[:, [2, 0]]
        return torch.from_numpy(np.asarray(image).copy()), {"boxes": boxes, "labels": torch.ones(len(boxes))}


class OneOfTwo(Photos):
    def __getitem__(self, index):
        one, other = self.open(index), self.open(index + 1)
        return crop(one if random.random() < 0.5 else other)


class TwiceAndThumbnail(Photos):
    def __getitem__(self, index):
        image = Image.open(self.files[index])
        first = crop(image.convert("RGB"))
        small = Image.open(self.files[index])
        small.thumbnail((40, 40))
        drafted = Image.open(self.files[index])
        drafted.draft("L", (30, 30))
        again = crop(image.convert("RGB"))
        return first, again, small.size[0], torch.from_numpy(np.asarray(drafted.convert("L")).copy()).float().mean()


class FromBytes(Photos):
    def __getitem__(self, index):
        return crop(Image.open(io.BytesIO(Path(self.files[index]).read_bytes())).convert("RGB"))


class Epochs(Photos):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        return crop(self.open(index + self.epoch)), self.epoch


class ShuffleBuffer(IterableDataset):
    def __init__(self, files):
        self.files = files

    def __len__(self):
        return len(self.files)

    def __iter__(self):
        worker, held = get_worker_info(), []
        for file in self.files[worker.id :: worker.num_workers] if worker else self.files:
            held.append(file)
            if len(held) > 3:
                yield crop(Image.open(held.pop(random.randrange(len(held)))).convert("RGB"))
        yield from (crop(Image.open(file).convert("RGB")) for file in random.sample(held, len(held)))


def lists(batch):
    return list(zip(*batch, strict=True))


PROGRAMS = {
    "SimCLR": (SimClr, {}),
    "CycleGAN": (CycleGan, {}),
    "a mosaic": (Mosaic, {}),
    "four crops of each file": (CropsByLabel, {"collate_fn": lambda batch: sum(batch, [])}),
    "detection": (Detection, {"collate_fn": lists}),
    "one of two files": (OneOfTwo, {}),
    "a file twice, thumbnail and draft": (TwiceAndThumbnail, {}),
    "files in memory": (FromBytes, {}),
    "set_epoch": (Epochs, {}),
    "an IterableDataset": (ShuffleBuffer, {"shuffle": False}),
    "a generator": (SimClr, {"generator": torch.Generator().manual_seed(3)}),
    "drop_last": (SimClr, {"drop_last": True}),
    "a sampler": (SimClr, {"shuffle": False, "sampler": [3, 1, 1, 7]}),
    "worker_init_fn": (SimClr, {"worker_init_fn": lambda worker: random.seed(100 + worker)}),
    "batch_size=None": (SimClr, {"batch_size": None}),
}


def epochs(make, dataset, **options):
    """Return the batches of three epochs, under equal seeds."""
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    if "generator" in options:
        options["generator"].manual_seed(3)
    loader = make(dataset, **options)
    found = []
    for epoch in range(3):
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        found.append(list(loader))
    return found, loader


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_batch_is_the_programs_own(tmp_path, files, name, workers):
    dataset, options = PROGRAMS[name]
    options = {"batch_size": 4, "shuffle": True, "num_workers": workers, **options}
    expected, _ = epochs(DataLoader, dataset(files), **options)
    for _ in range(2):  # the second run finds the files that the first kept
        found, loader = epochs(memfeed.Loader, dataset(files), cache=tmp_path / "p.mf", **options)
        assert isinstance(loader, DecodedLoader)
        assert difference(found, expected) is None, describe_difference(found, expected)
    assert len(memfeed.open(tmp_path / "p.mf")) > 0
    if not (workers and name == "an IterableDataset"):  # no sample of it is read here, and the workers have ended
        assert sum(one.report().hits for one in loader.decoded.used()) > 0
    assert loader.dataset.files is files
    assert len(loader) == len(DataLoader(dataset(files), **options))


@pytest.mark.parametrize("workers", [0, 2])
def test_four_crops_by_label_of_monai(tmp_path, workers):
    """As its tutorials crop volumes: ``RandCropByPosNegLabeld`` with ``num_samples=4``."""
    monai, nibabel = pytest.importorskip("monai"), pytest.importorskip("nibabel")
    from monai import transforms as T
    from monai.data import list_data_collate

    items = []
    for i in range(4):
        volume = np.random.default_rng(i).normal(size=(24, 28, 20)).astype(np.float32)
        names = {"image": str(tmp_path / f"image{i}.nii.gz"), "label": str(tmp_path / f"label{i}.nii.gz")}
        nibabel.save(nibabel.Nifti1Image(volume, np.eye(4)), names["image"])
        nibabel.save(nibabel.Nifti1Image((volume > 1).astype(np.uint8), np.eye(4)), names["label"])
        items.append(names)
    both = ["image", "label"]

    def dataset():
        return monai.data.Dataset(
            items,
            T.Compose([
                T.LoadImaged(both), T.EnsureChannelFirstd(both), T.ScaleIntensityd("image"),
                T.RandCropByPosNegLabeld(both, "label", spatial_size=(8, 8, 8), num_samples=4),
                T.RandRotate90d(both, prob=0.5, spatial_axes=(0, 2)), T.EnsureTyped(both, track_meta=False),
            ]),
        )  # fmt: skip

    def read(make, **options):
        monai.utils.set_determinism(3)
        loader = make(dataset(), 2, shuffle=True, num_workers=workers, collate_fn=list_data_collate, **options)
        found = [[{name: batch[name].clone() for name in both} for batch in loader] for _ in range(3)]
        return found, loader

    expected, _ = read(DataLoader)
    for _ in range(2):
        found, loader = read(memfeed.Loader, cache=tmp_path / "p.mf")
        assert isinstance(loader, DecodedLoader)
        assert difference(found, expected) is None
    assert sum(one.report().hits for one in loader.decoded.used()) > 0


@pytest.mark.parametrize("workers", [0, 2])
def test_sound_is_decoded_once(tmp_path, workers):
    soundfile = pytest.importorskip("soundfile")
    for i in range(4):
        with wave.open(str(tmp_path / f"{i}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(8000)
            file.writeframes(np.random.default_rng(i).integers(-9999, 9999, 800, np.int16).tobytes())

    class Sounds(Photos):
        def __getitem__(self, index):
            sound, rate = soundfile.read(self.files[index])
            begin = random.randrange(len(sound) - 100)
            return torch.from_numpy(sound[begin : begin + 100]), rate

    names = [str(tmp_path / f"{i}.wav") for i in range(4)]
    expected, _ = epochs(DataLoader, Sounds(names), num_workers=workers)
    found, loader = epochs(memfeed.Loader, Sounds(names), cache=tmp_path / "p.mf", num_workers=workers)
    assert difference(found, expected) is None
    assert sum(one.report().hits for one in loader.decoded.used()) >= 12


def sounds(folder, count, frames):
    """Write files of noise and return their names."""
    names = [str(folder / f"{i}.wav") for i in range(count)]
    for i, name in enumerate(names):
        pytest.importorskip("soundfile").write(name, np.random.default_rng(i).normal(size=frames) / 9, 8000)
    return names


@pytest.mark.parametrize("workers", [0, 2])
def test_parts_of_sounds_are_not_kept(tmp_path, capsys, workers):
    soundfile = pytest.importorskip("soundfile")
    names = sounds(tmp_path, 8, 9000)

    class Parts(Photos):
        def __getitem__(self, index):
            begin = random.randrange(8000)
            return torch.from_numpy(soundfile.read(self.files[index], start=begin, stop=begin + 100)[0])

    expected, _ = epochs(DataLoader, Parts(names), num_workers=workers)
    found, loader = epochs(memfeed.Loader, Parts(names), cache=tmp_path / "p.mf", num_workers=workers)
    assert difference(found, expected) is None
    assert "no result of soundfile.read is kept" in " ".join(capsys.readouterr().err.split())
    (used,) = loader.decoded.used()
    assert used.report().misses <= 16  # the samples that were read to find it out


def test_files_that_are_drawn_are_kept(tmp_path, capsys):
    soundfile = pytest.importorskip("soundfile")
    names = sounds(tmp_path, 40, 900)

    class Drawn(Photos):
        def __getitem__(self, index):
            return torch.from_numpy(soundfile.read(random.choice(self.files))[0])

    loader = memfeed.Loader(Drawn(names), cache=tmp_path / "p.mf")
    list(loader)
    assert "no result of" not in " ".join(capsys.readouterr().err.split())
    assert sum(one.report().misses for one in loader.decoded.used()) > 16


def test_a_damaged_file_raises_the_same_error(tmp_path, files):
    path = tmp_path / "cut.jpg"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (300, 300, 3), np.uint8)).save(path)
    path.write_bytes(path.read_bytes()[:-9000])
    names = files * 8
    names[37] = str(path)  # not one of the samples that are looked at before
    dataset = SimClr(names)
    with pytest.raises(OSError, match="truncated") as expected:
        dataset[37]
    loader = memfeed.Loader(dataset, cache=tmp_path / "p.mf", sampler=[1, 37])
    for _ in range(2):
        with pytest.raises(OSError, match="truncated") as found:
            list(loader)
        assert str(found.value) == str(expected.value)


class TestTheLine:
    def test_says_why_and_what_it_is_worth(self, tmp_path, files, capsys):
        memfeed.Loader(SimClr(files), cache=tmp_path / "p.mf")
        line = " ".join(capsys.readouterr().err.split())
        assert (
            f"{tmp_path / 'p.mf'}: no store, neither batched nor sample by sample; the dataset is read as it is" in line
        )
        assert "found random samples" in line
        assert "Decoding is" in line
        assert "of the time of a sample (8 samples)" in line

    def test_says_what_is_expected(self, tmp_path, files, capsys):
        memfeed.Loader(type("PhotographsOfInsectsForTraining", (SimClr,), {})(files), cache=tmp_path / "p.mf")
        line = " ".join(capsys.readouterr().err.split())
        assert "expected a pipeline in an attribute of the dataset, as self.transform = Compose([...])." in line

    def test_says_how_to_read_all_of_a_long_reason(self, tmp_path, files, capsys):
        memfeed.Loader(SimClr(files), cache=tmp_path / "p.mf")
        shown = (
            capsys.readouterr().err.partition("in every epoch: ")[2].partition("... (require='samples' raises all")[0]
        )
        with pytest.raises(RandomDataError) as whole:
            memfeed.Loader(SimClr(files), cache=tmp_path / "p.mf", require="samples")
        assert len(shown) < len(str(whole.value))
        assert str(whole.value).startswith(shown)

    def test_says_that_the_gain_is_small(self, tmp_path, files, capsys):
        class Slow(SimClr):
            def __getitem__(self, index):
                sorted(np.random.rand(40_000).tolist())
                return super().__getitem__(index)

        memfeed.Loader(Slow(files), cache=tmp_path / "p.mf")
        line = capsys.readouterr().err
        assert "the gain is small. Most of the time goes to" in line
        assert "sorted" in line

    def test_says_that_no_decoder_was_called(self, tmp_path, files, capsys, monkeypatch):
        class Undecoded(SimClr):
            def __getitem__(self, index):
                return np.random.rand(3)

        memfeed.Loader(Undecoded(files), cache=tmp_path / "p.mf")
        line = capsys.readouterr().err
        assert "No decoder with kept results was called (8 samples): no gain. Most of the time goes to" in line
        monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
        memfeed.Loader(SimClr(files), cache=tmp_path / "q.mf")
        line = capsys.readouterr().err
        assert "what Pillow decodes is not kept while ImageFile.LOAD_TRUNCATED_IMAGES is set): no gain." in line

    def test_says_that_an_earlier_run_kept_them(self, tmp_path, files, capsys):
        list(memfeed.Loader(SimClr(files), cache=tmp_path / "p.mf"))
        capsys.readouterr()
        messages.say_once.cache_clear()
        memfeed.Loader(SimClr(files), cache=tmp_path / "p.mf")
        assert "an earlier run kept them there" in capsys.readouterr().err


def test_ranks_are_told_that_each_reads_all_samples(tmp_path, files, capsys, monkeypatch):
    monkeypatch.setattr(decoded, "joined_world_size", lambda: 2)
    sampler = torch.utils.data.DistributedSampler(files, num_replicas=2, rank=1)
    memfeed.Loader(SimClr(files), cache=tmp_path / "p.mf", sampler=sampler)
    assert "DistributedSampler" not in capsys.readouterr().err
    assert len(list(memfeed.Loader(SimClr(files), cache=tmp_path / "p.mf"))) == len(files)
    assert "pass sampler=torch.utils.data.DistributedSampler(dataset)" in capsys.readouterr().err


def test_a_rank_that_joins_the_process_group_later_is_told_so_too(tmp_path, files, capsys, monkeypatch):
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    memfeed.Loader(SimClr(files), cache=tmp_path / "one.mf")
    line = capsys.readouterr().err
    assert "reads all samples on each rank, as a DataLoader does, unless a trainer divides it" in line
    assert "reads as rank" not in line


class TestWithoutAPath:
    @pytest.mark.parametrize("workers", [0, 2])
    @pytest.mark.parametrize("name", ["SimCLR", "a mosaic", "detection"])
    def test_is_a_data_loader(self, files, name, workers):
        dataset, options = PROGRAMS[name]
        options = {"batch_size": 4, "shuffle": True, "num_workers": workers, **options}
        expected, _ = epochs(DataLoader, dataset(files), **options)
        found, loader = epochs(memfeed.Loader, dataset(files), **options)
        assert difference(found, expected) is None, describe_difference(found, expected)
        assert type(loader) is DataLoader

    def test_says_why(self, files, capsys):
        memfeed.Loader(SimClr(files))
        line = capsys.readouterr().err
        assert line.startswith("memfeed: SimClr: no store, so it is read as it is in every epoch, as by a DataLoader (")
        assert "found random samples" in line
        assert line.count("\n") == 1

    @pytest.mark.parametrize("path", [None, "kept.mf"])
    def test_samples_of_kinds_that_no_column_holds(self, tmp_path, capsys, path):
        dataset = [torch.tensor(0), torch.tensor(1), {"a": torch.tensor(2)}, {"a": torch.tensor(3)}]
        path = path and tmp_path / path
        found, expected = list(memfeed.Loader(dataset, 2, cache=path)), list(DataLoader(dataset, 2))
        assert difference(found, expected) is None
        assert "found Tensor (int64 []); expected dict, as in sample 2" in capsys.readouterr().err
        with pytest.raises(SchemaError, match="expected dict, as in sample 2"):
            memfeed.Loader(dataset, 2, cache=path, require="samples")

    def test_where_a_program_has_put_loader_in_the_place_of_data_loader(self, tmp_path):
        program = (
            "import torch, memfeed\n"
            "from torch.utils.data import Dataset\n"
            "theirs, torch.utils.data.DataLoader = torch.utils.data.DataLoader, memfeed.Loader\n"
            "class Draws(Dataset):\n"
            "    def __len__(self): return 3\n"
            "    def __getitem__(self, index): return torch.rand(2)\n"
            "assert type(torch.utils.data.DataLoader(Draws())) is theirs\n"
            "assert len(list(torch.utils.data.DataLoader(Draws(), cache='kept.mf'))) == 3\n"
        )
        path = tmp_path / "program.py"
        path.write_text(program)
        done = subprocess.run([sys.executable, path], cwd=tmp_path, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr

    @pytest.mark.parametrize("require", ["batched", "samples"])
    def test_a_store_can_be_required(self, files, require):
        with pytest.raises(RandomDataError, match="found random samples"):
            memfeed.Loader(SimClr(files), require=require)

    def test_arguments_that_torch_does_not_have(self, files):
        with pytest.raises(RandomDataError, match="It can be read as it is, by a plain DataLoader, which has no seed="):
            memfeed.Loader(SimClr(files), seed=3)

    def test_decoders_need_a_path(self, files):
        with pytest.raises(LoaderError, match="found decoders= without a path"):
            memfeed.Loader(SimClr(files), decoders=[read_raw])


class TestRefused:
    @pytest.mark.parametrize("options", [{"decoders": ()}, {"require": "batched"}, {"require": "samples"}], ids=str)
    def test_where_the_user_says_so(self, tmp_path, files, options):
        with pytest.raises(RandomDataError):
            memfeed.Loader(SimClr(files), cache=tmp_path / "p.mf", **options)
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize(
        "options", [{"device": "cpu"}, {"seed": 3}, {"transform": {}}, {"forms": 256}, {"last": "pad"},
                    {"budget": "1GB"}, {"shuffle": memfeed.Blocks()}], ids=str,
    )  # fmt: skip
    def test_arguments_that_torch_does_not_have(self, tmp_path, files, options):
        name = next(iter(options))
        with pytest.raises(RandomDataError, match=f"a plain DataLoader, which has no {name}=: leave these out"):
            memfeed.Loader(SimClr(files), cache=tmp_path / "p.mf", **options)

    def test_methods_of_a_derived_class_which_would_be_lost(self, tmp_path, files):
        class Mine(memfeed.Loader):
            """Adds nothing but a default."""

            def __init__(self, *arguments, **options):
                super().__init__(*arguments, batch_size=3, **options)

        class Other(Mine):
            def __iter__(self):
                return super().__iter__()

        # what Lightning leaves behind
        Mine.__setattr__ = functools.wraps(memfeed.Loader.__setattr__)(lambda *given: object.__setattr__(*given))
        assert len(list(Mine(SimClr(files), cache=tmp_path / "p.mf"))) == 4
        with pytest.raises(LoaderError, match=r"a plain DataLoader, which has no Other.__iter__: leave these out"):
            Other(SimClr(files), cache=tmp_path / "p.mf")

    @pytest.mark.parametrize("options", [{"require": "all"}, {"decoders": [3]}, {"decoders": "cv2"}], ids=str)
    def test_wrong_values(self, tmp_path, files, options):
        with pytest.raises(LoaderError, match=f"found {next(iter(options))}="):
            memfeed.Loader(SimClr(files), cache=tmp_path / "p.mf", **options)

    def test_without_a_dataset(self):
        with pytest.raises(LoaderError, match="found require= without a dataset that becomes a store"):
            memfeed.Loader(torch.arange(3), require="batched")

    def test_a_local_function(self, tmp_path, files):
        with pytest.raises(LoaderError, match="expected functions that can be found by their names"):
            memfeed.Loader(SimClr(files), cache=tmp_path / "p.mf", decoders=[lambda path: path])


class Flips(Dataset):
    """A pipeline that can be cut; ``own`` is a step without a counterpart."""

    def __init__(self, files, own=False):
        from torchvision.transforms import v2

        self.files = files
        steps = [v2.Lambda(lambda x: x + torch.rand(1))] if own else []
        self.transform = v2.Compose([v2.PILToTensor(), v2.Resize((32, 32)), v2.RandomHorizontalFlip(), *steps])

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        return self.transform(Image.open(self.files[index]).convert("RGB")), index


def test_require_batched_is_met_by_a_pipeline_of_counterparts(tmp_path, files):
    pytest.importorskip("torchvision")
    loader = memfeed.Loader(Flips(files), 4, cache=tmp_path / "p.mf", require="batched")
    assert type(loader) is memfeed.Loader
    assert len(list(loader)) == 3
    with pytest.raises(LoaderError, match='found require="batched", and steps that run sample by sample'):
        memfeed.Loader(Flips(files, own=True), 4, cache=tmp_path / "q.mf", require="batched")
    loader = memfeed.Loader(Flips(files, own=True), 4, cache=tmp_path / "r.mf", require="samples")
    assert len(list(loader)) == 3


def read_raw(path):
    """Return the pixels of a file, in a format of the user's."""
    READ.append(path)
    return np.asarray(Image.open(path).convert("RGB"))


READ: list[str] = []


class Raw(Photos):
    def __getitem__(self, index):
        image = read_raw(self.files[index])
        begin = random.randrange(20)
        return torch.from_numpy(image[begin : begin + 30].copy())


def test_a_decoder_of_the_user(tmp_path, files):
    READ.clear()
    expected, _ = epochs(DataLoader, Raw(files))
    READ.clear()
    found, loader = epochs(memfeed.Loader, Raw(files), cache=tmp_path / "p.mf", decoders=[read_raw])
    assert difference(found, expected) is None
    reads = len(READ)
    list(loader)
    assert len(READ) == reads


def test_the_library_is_its_own_outside_of_the_loader(tmp_path, files):
    own = ImageFile.ImageFile.load
    loader = memfeed.Loader(SimClr(files), cache=tmp_path / "p.mf")
    list(loader)
    counted = sum(one.report().hits + one.report().misses for one in loader.decoded.used())
    for path in files:
        Image.open(path).load()
    assert sum(one.report().hits + one.report().misses for one in loader.decoded.used()) == counted
    assert ImageFile.ImageFile.load is not own


class Broken(Dataset):
    """Samples of which some are None, for a collate_fn that leaves them out."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return None if index in (3, 17) else (torch.full((4,), index), index)


def without_none(samples):
    return torch.utils.data.default_collate([sample for sample in samples if sample is not None])


@pytest.mark.parametrize("path", [None, "here"])
def test_samples_that_are_none_are_left_to_the_collate_fn(tmp_path, path, capsys):
    cache = None if path is None else tmp_path / path
    loader = memfeed.Loader(Broken(), 5, collate_fn=without_none, cache=cache)
    expected = DataLoader(Broken(), 5, collate_fn=without_none)
    assert [difference(*pair) for pair in zip(loader, expected, strict=True)] == [None] * 4
    assert "sample 3: found None" in capsys.readouterr().err
    with pytest.raises(memfeed.errors.SampleError, match="sample 3: found None"):
        memfeed.Loader(Broken(), 5)


class Together(Dataset):
    """Of which a batch is read by ``__getitems__``."""

    def __init__(self, kind):
        self.kind = kind

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.arange(index % 5 + 1)

    def __getitems__(self, rows):
        samples = [self[row] for row in rows]
        if self.kind == "padded to the longest of the batch":
            longest = max(map(len, samples))
            return [torch.nn.functional.pad(one, (0, longest - len(one))) for one in samples]
        if self.kind == "noise":
            return [one + torch.randn(len(one)) for one in samples]
        if self.kind == "one number for a batch":
            number = random.randrange(100)
            return [one + number for one in samples]
        return {"batch": torch.cat(samples)}  # a batch already


@pytest.mark.parametrize(
    "kind", ["padded to the longest of the batch", "noise", "one number for a batch", "a finished batch"]
)
def test_samples_that_depend_on_those_read_with_them(tmp_path, capsys, kind):
    options = {"batch_size": 4, "collate_fn": lambda samples: samples}
    expected, _ = epochs(DataLoader, Together(kind), **options)
    found, _ = epochs(memfeed.Loader, Together(kind), cache=tmp_path / "p.mf", **options)
    assert "found that Together.__getitems__, by which a batch is read, gives a" in capsys.readouterr().err
    assert [list(map(repr, one)) for one in found] == [list(map(repr, one)) for one in expected]


class Negatives(Dataset):
    """As programs for recommendations have it: a method samples what an epoch reads, and the loop calls it."""

    def __len__(self):
        return 40

    def sample(self):
        self.items = [random.randrange(1000) for _ in range(40)]

    def __getitem__(self, index):
        return index, self.items[index]


class Turns(Dataset):
    at = 0

    def __len__(self):
        return 40

    def __getitem__(self, _):
        self.at += 1
        return self.at


class Patches(Dataset):
    """A queue of random patches, whatever the index, as TorchIO has it."""

    def __init__(self):
        self.queue = []

    def __len__(self):
        return 40

    def __getitem__(self, _):
        if not self.queue:
            self.queue = [random.random() for _ in range(1000)]
        return self.queue.pop()


@pytest.mark.parametrize("kind", [Turns, Patches, lambda: Subset(Patches(), range(20))])
def test_a_dataset_that_gives_samples_in_turn_is_told_that_some_were_read(tmp_path, capsys, kind):
    loader = memfeed.Loader(kind(), 8, cache=tmp_path / "turns.mf")
    assert type(loader) is DecodedLoader
    assert ": some samples were read to find that out. If it gives them in turn" in capsys.readouterr().err


class TurnsOfFiles(Turns):
    """Gives decoded files, each with a number that counts its reads."""

    def __init__(self, files):
        self.files, self.at = files, 0

    def __getitem__(self, index):
        return super().__getitem__(index), np.array(Image.open(self.files[index % 12]).convert("RGB"))[:8, :8]


def test_the_second_run_is_told_too(tmp_path, capsys, files):
    for _ in range(2):
        messages.say_once.cache_clear()
        dataset = TurnsOfFiles(files)
        loader = memfeed.Loader(dataset, 8, cache=tmp_path / "turns.mf")
        assert "Put its counter or queue back when the loader is made" in capsys.readouterr().err
    dataset.at = 0
    assert next(iter(loader))[0].tolist() == next(iter(DataLoader(TurnsOfFiles(files), 8)))[0].tolist()


class TestALibraryThatIsImportedLate:
    """Pillow imports the module of its decoder when it opens its first image."""

    PROGRAM = """if True:
        import random, sys
        import numpy, torch
        from PIL import Image
        import memfeed

        class Photos(torch.utils.data.Dataset):
            def __len__(self):
                return len(FILES)
            def __getitem__(self, index):
                top = random.randrange(9)
                return numpy.array(Image.open(FILES[index]).convert("RGB"))[top:top + 9, :9].copy()

        import memfeed.loading.decoded
        assert "PIL.ImageFile" not in sys.modules
        list(memfeed.Loader(Photos(), 6, cache="kept.mf"))
    """

    def test_the_second_run_says_what_decoding_takes(self, tmp_path):
        files = [str(tmp_path / f"{i:02}.jpg") for i in range(4)]
        pixels = np.random.default_rng(0).integers(0, 255, (600, 700, 3), np.uint8)
        for file in files:
            Image.fromarray(pixels).save(file, quality=95)
        path = tmp_path / "program.py"
        path.write_text(f"FILES = {files!r}\n{self.PROGRAM}")
        for _ in range(2):
            done = subprocess.run([sys.executable, path], cwd=tmp_path, capture_output=True, text=True, timeout=100)
            assert "Decoding is " in done.stderr, done.stderr

    def test_a_process_that_is_not_forked_imports_it_before_its_first_sample(self, tmp_path):
        sent = pickle.dumps(decoders.Reading(tmp_path / "kept.mf"))  # Pillow's is imported here
        program = (
            "import pickle, sys, memfeed.memoizing.decoders\nassert 'PIL.ImageFile' not in sys.modules\n"
            f"pickle.loads({sent!r})\nassert 'PIL.ImageFile' in sys.modules"
        )
        subprocess.run([sys.executable, "-c", program], timeout=100, check=True)


def test_a_random_dataset_that_stays_as_it_is_is_not_told(tmp_path, capsys):
    memfeed.Loader(Made(lambda _: random.random(), 40), 8, cache=tmp_path / "random.mf")
    told = capsys.readouterr().err
    assert "in turn" not in told
    assert "thread" not in told


def test_a_thread_is_told_that_other_threads_may_have_drawn(tmp_path, capsys):
    dataset = Made(lambda _: random.random(), 40)
    thread = threading.Thread(target=memfeed.Loader, args=(dataset, 8), kwargs={"cache": tmp_path / "random.mf"})
    thread.start()
    thread.join()
    assert "this loader was made in a thread." in capsys.readouterr().err


def test_a_dataset_that_is_prepared_after_its_loader_was_made(tmp_path, capsys):
    loader = memfeed.Loader(Negatives(), 10, cache=tmp_path / "p.mf")
    said = capsys.readouterr().err
    assert "nothing is kept, as no sample can be read yet" in said
    assert "each of the 4 samples that were read raises (sample" in said
    assert not (tmp_path / "p.mf").exists()
    found = []
    for _ in range(2):
        loader.dataset.sample()
        assert [items.tolist() for _, items in loader] == np.reshape(loader.dataset.items, (4, 10)).tolist()
        found.append(loader.dataset.items)
    assert found[0] != found[1]
    with pytest.raises(memfeed.errors.SampleError, match="expected a dataset that is ready when its Loader is made"):
        memfeed.Loader(Negatives(), 10, require="samples")


class Mended(Dataset):
    """Its transform raises in the first run of a program, and is mended for the next one."""

    def __init__(self, transform):
        self.transform = transform

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return self.transform(torch.full((3,), float(index)))


def test_a_dataset_that_raised_and_was_mended_becomes_a_store(tmp_path):
    def wrong(value):
        return value + random.random() + value.missing

    loader = memfeed.Loader(Mended(wrong), 10, cache=tmp_path / "p.mf")
    with pytest.raises(AttributeError, match="missing"):
        next(iter(loader))
    loader = memfeed.Loader(Mended(torch.neg), 10, cache=tmp_path / "p.mf")
    assert isinstance(loader, memfeed.Loader)
    assert torch.cat(list(loader))[:, 0].tolist() == [-float(row) for row in range(40)]


@pytest.mark.parametrize("given", [None, lambda worker: random.seed(100 + worker)], ids=["none", "given"])
def test_lightning_seeds_the_workers_of_each_rank(tmp_path, files, monkeypatch, given):
    """As after `seed_everything(workers=True)`: the trainer gives its function to a loader that has none."""
    fabric = pytest.importorskip("lightning.fabric.utilities.data")
    monkeypatch.setenv("PL_SEED_WORKERS", "1")

    def make(cls):
        def seeded(dataset, **options):
            loader = cls(dataset, 4, num_workers=2, worker_init_fn=given, **options)
            fabric._auto_add_worker_init_fn(loader, 1)
            return loader

        return seeded

    expected, _ = epochs(make(DataLoader), SimClr(files))
    found, loader = epochs(make(memfeed.Loader), SimClr(files), cache=tmp_path / "p.mf")
    assert isinstance(loader, DecodedLoader)
    assert difference(found, expected) is None
    assert sum(one.report().hits for one in loader.decoded.used()) > 0


def test_the_switch_of_lightning_alone_leaves_the_decoders_in_workers(tmp_path, files, monkeypatch):
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    _, loader = epochs(memfeed.Loader, SimClr(files), cache=tmp_path / "p.mf", num_workers=1)
    assert loader.worker_init_fn is None
    assert sum(one.report().hits for one in loader.decoded.used()) > len(files)


def test_a_loader_of_the_parts_keeps_the_decoders_in_workers(tmp_path, files):
    """As Accelerate makes one."""
    loader = memfeed.Loader(SimClr(files), cache=tmp_path / "p.mf", num_workers=1)
    _, _ = epochs(DataLoader, loader.dataset, num_workers=1, worker_init_fn=loader.worker_init_fn)
    assert sum(one.report().hits for one in loader.decoded.used()) > len(files)


def test_an_iterable_without_a_path_is_read_as_it_is(capsys):
    class Stream(IterableDataset):
        def __iter__(self):
            yield from torch.arange(5)

    messages.say_once.cache_clear()
    loader = memfeed.Loader(Stream(), 2)
    assert type(loader) is DataLoader
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4]]
    line = capsys.readouterr().err
    assert "Stream: no store, so it is read as it is in every epoch, as by a DataLoader (nothing is kept)" in line
    assert "with cache='PATH' they are written to a store there first" in line
    with pytest.raises(LoaderError, match=r"with cache='PATH' .* which has no seed=: leave these out"):
        memfeed.Loader(Stream(), 2, seed=0)
    with pytest.raises(LoaderError, match=r"found Stream, an IterableDataset, without cache=; .* cache='PATH'"):
        memfeed.Loader(Stream(), 2, shuffle=True)


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("is_cached", [True, False])
def test_lightning_makes_it_again_of_what_its_hook_saw(tmp_path, monkeypatch, is_known, is_cached):
    of_fabric = pytest.importorskip("lightning.fabric.utilities.data")
    if not is_known:  # the class is imported in the hook
        monkeypatch.setattr(of_fabric, "get_all_subclasses", lambda cls: set())
    dataset = Made(lambda i: (torch.rand(2), i), 30)
    with of_fabric._replace_dunder_methods(DataLoader, "dataset"):
        loader = memfeed.Loader(dataset, 7, shuffle=True, cache=tmp_path / "s.mf" if is_cached else None)
    again = of_fabric._update_dataloader(loader, range(0, 30, 2))
    assert type(again) is type(loader)
    assert torch.cat([rows for _, rows in again]).tolist() == [*range(0, 30, 2)]


def test_what_only_a_loader_of_a_store_has_is_told(tmp_path):
    loader = memfeed.Loader(Made(lambda i: torch.rand(2), 40), 4, cache=tmp_path / "a.mf")
    assert isinstance(loader, DecodedLoader)
    assert not hasattr(loader, "state_dict"), "who looks for it finds none"
    with pytest.raises(AttributeError, match=r"no attribute 'state_dict': it is a DataLoader .*StatefulDataLoader"):
        loader.state_dict()
    with pytest.raises(AttributeError, match=r"no attribute 'skip': it is a DataLoader .*raises the reason$"):
        loader.skip(1)
    with pytest.raises(AttributeError, match=r"no attribute 'other'$"):
        loader.other  # noqa: B018
