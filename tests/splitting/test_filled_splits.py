"""Stores that are filled while they are read, of datasets that are cut, kept as encoded files, or rounded."""

import json
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from recipes import picture
from torch.utils.data import Dataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2

import memfeed
from memfeed import Loader
from memfeed.errors import RandomDataError, SplitError
from memfeed.loading.decoded import DecodedLoader
from memfeed.system.threads import end_all
from memfeed.testing import equal
from short_form import short_form
from support import wait_until

COUNT, BATCH = 48, 6
trainer = None  # the process that trains: it reads samples too, before the workers do


@pytest.fixture(autouse=True)
def no_filler_is_left():
    yield
    end_all()
    assert not multiprocessing.active_children()


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A folder of JPEG files of two sizes, none of which is the other turned."""
    root = tmp_path_factory.mktemp("tree")
    for i in range(COUNT):
        folder = root / "ab"[i % 2]
        folder.mkdir(exist_ok=True)
        Image.fromarray(np.roll(picture(*((44, 60) if i % 3 else (64, 48))), i, 1)).save(folder / f"{i:02}.jpg")
    return root


class Folder(ImageFolder):
    """Writes what workers read into a file, if there is one. It is slow then: workers are not far ahead."""

    log = None

    def __getitem__(self, index):
        if self.log is not None:
            time.sleep(0.01)
            if os.getpid() != trainer:
                with open(self.log, "a") as file:
                    file.write(f"{os.getpid()} {index}\n")
        return super().__getitem__(index)


def tripled(image):
    return image * 3


CROP = [v1.RandomCrop(24), v1.RandomHorizontalFlip(), v1.ToTensor()]
FORMS = {
    "batched": ([v1.Resize((32, 32)), *CROP], {"split": True}),
    "auto": ([v1.Resize((32, 32)), *CROP], {"split": "auto"}),
    "sample by sample": ([v1.Resize((32, 32)), v1.ColorJitter(0.4), v1.ToTensor()], {"split": True}),
    "several sizes": ([v1.RandomResizedCrop(24), v1.ToTensor()], {"split": True, "forms": "full"}),
    "short side": ([v1.RandomResizedCrop(24), v1.ToTensor()], {"split": True, "forms": 32}),
    "encoded": ([v1.Resize(32), *CROP], {"split": True, "forms": "encoded"}),
    "float16": ([v1.Resize((24, 24)), v1.ToTensor()], {"forms": {float: torch.float16}}),
    "bfloat16": ([v1.Resize((24, 24)), v1.ToTensor()], {"forms": {float: torch.bfloat16}}),
    "cut and rounded": (
        [v1.Resize((32, 32)), v1.ToTensor(), tripled, v1.RandomCrop(24), v1.RandomErasing()],
        {"split": True, "forms": {float: torch.bfloat16}},
    ),
}


def dataset_of(form, tree, log=None):
    dataset = Folder(str(tree), v1.Compose(FORMS[form][0]))
    dataset.log = log
    return dataset


def cached(form, dataset, path, workers=2, **options):
    return memfeed.cache(dataset, path, **FORMS[form][1], workers=workers, progress=False, **options)


def epoch_of(source, **options):
    return list(Loader(source, BATCH, shuffle=True, seed=7, **options))


def require_same_batches(batches, expected):
    assert len(batches) == len(expected)
    for batch, other in zip(batches, expected, strict=True):
        assert all(one.dtype == two.dtype and torch.equal(one, two) for one, two in zip(batch, other, strict=True))


def require_same_store(path, expected):
    """Fixed columns have the same bytes; rows of the others, which are written in another order, are equal."""
    store = memfeed.open(path)
    assert store.schema == expected.schema
    assert all(equal(store[i], expected[i]) for i in range(COUNT))
    for field in store.schema:
        if field.kind == "fixed":
            assert (path / f"{field.name}.memmap").read_bytes() == (expected.path / f"{field.name}.memmap").read_bytes()
    store.verify()


@pytest.mark.parametrize(("form", "workers"), [*((form, 2) for form in FORMS), ("batched", 0), ("encoded", 0)])
def test_epochs_and_store_are_those_of_a_conversion(form, workers, tree, tmp_path):
    expected = cached(form, dataset_of(form, tree), tmp_path / "c.mf", 0)
    batches = epoch_of(expected)
    store = cached(form, dataset_of(form, tree), tmp_path / "s.mf", workers, lazily=True)
    require_same_batches(epoch_of(store), batches)
    store.finish()
    require_same_batches(epoch_of(store), batches)
    require_same_store(tmp_path / "s.mf", expected)
    require_same_batches(epoch_of(cached(form, dataset_of(form, tree), tmp_path / "s.mf", lazily=True)), batches)


@pytest.mark.parametrize("form", ["auto", "sample by sample"])
def test_one_line_gives_the_batches_of_a_conversion(form, tree, tmp_path):
    expected = epoch_of(cached(form, dataset_of(form, tree), tmp_path / "c.mf", 0))
    for _ in range(2):
        loader = Loader(dataset_of(form, tree), BATCH, shuffle=True, seed=7, num_workers=2, cache=tmp_path / "s.mf")
        require_same_batches(list(loader), expected)
        loader.store.finish()


@pytest.mark.parametrize("form", ["several sizes", "short side", "encoded"])
def test_one_line_stores_images_in_the_form_that_keep_names(form, tree, tmp_path):
    expected, keep = epoch_of(cached(form, dataset_of(form, tree), tmp_path / "c.mf", 0)), FORMS[form][1]["forms"]

    def make(**options):
        return Loader(dataset_of(form, tree), BATCH, shuffle=True, seed=7, cache=tmp_path / "s.mf", **options)

    for options in ({"forms": keep}, {"forms": keep}, {}):  # the store remembers it
        loader = make(**options)
        require_same_batches(list(loader), expected)
        loader.store.finish()
    assert memfeed.open(tmp_path / "s.mf")._view.manifest.attributes.keep == keep
    rebuilt = Loader(make(forms=keep).store, BATCH, shuffle=True, seed=7, cache=tmp_path / "s.mf", forms=keep)
    require_same_batches(list(rebuilt), expected)
    with pytest.raises(memfeed.errors.StaleStoreError, match="found a store made with forms="):
        make(forms=33)


@pytest.mark.parametrize("form", ["auto", "sample by sample"])
def test_a_transform_does_not_replace_the_random_part_of_a_dataset_unsaid(form, tree, tmp_path):
    scaled = memfeed.transforms.Normalize([0.0] * 3, [0.5] * 3)
    with pytest.raises(
        memfeed.errors.LoaderError, match="found transform= beside a dataset whose random part is cut off"
    ):
        Loader(dataset_of(form, tree), BATCH, cache=tmp_path / "s.mf", transform=scaled)
    store = memfeed.cache(dataset_of(form, tree), tmp_path / "s.mf", split="auto", lazily=True, workers=0)
    both = epoch_of(store, transform=memfeed.transforms.Compose([store.transform, scaled]))
    for (images, _), (expected, _) in zip(both, epoch_of(store), strict=True):
        torch.testing.assert_close(images, expected * 2)
    bare = next(iter(Loader(dataset_of(form, tree), BATCH, cache=tmp_path / "s.mf", transform={})))
    assert bare[0].shape == (BATCH, 3, 32, 32)


def test_keep_without_images_that_are_resized(tree, tmp_path, capsys):
    store = memfeed.cache(dataset_of("batched", tree), tmp_path / "s.mf", split=True, workers=0, progress=False)
    for source in (store, torch.arange(3)):
        with pytest.raises(memfeed.errors.LoaderError, match="found forms=32 beside"):
            Loader(source, 2, forms=32)
    with pytest.raises(ValueError, match="found forms='small'"):
        Loader(dataset_of("batched", tree), 2, cache=tmp_path / "t.mf", forms="small")
    fixed = Folder(str(tree), v1.Compose([v1.Resize((24, 24)), v1.ToTensor()]))
    loader = Loader(fixed, 2, cache=tmp_path / "fixed.mf", forms=32)
    assert next(iter(loader))[0].shape == (2, 3, 24, 24)
    assert "forms=32 has no effect: no random step" in capsys.readouterr().err


OFF = {
    "cut": ([v1.Resize((32, 32)), v1.RandomCrop(32), v1.ToTensor()], {"split": True}, 1e-7),
    "of several sizes": ([v1.RandomHorizontalFlip(0.0), v1.PILToTensor()], {"split": True, "forms": "full"}, 0),
    "encoded": ([v1.Resize((32, 40)), v1.RandomHorizontalFlip(0.0), v1.PILToTensor()],
                {"split": True, "forms": "encoded"}, 1),
    "float16": ([v1.Resize((24, 24)), v1.ToTensor()], {"forms": {float: torch.float16}}, 2**-11),
    "bfloat16": ([v1.Resize((24, 24)), v1.ToTensor()], {"forms": {float: torch.bfloat16}}, 2**-8),
}  # fmt: skip


@pytest.mark.parametrize("form", OFF)
def test_without_randomness_each_row_is_what_the_dataset_gives(form, tree, tmp_path):
    steps, options, tolerance = OFF[form]
    dataset = ImageFolder(str(tree), v1.Compose(steps))
    store = memfeed.cache(dataset, tmp_path / "s.mf", **options, lazily=True, workers=2, progress=False)
    seen = []
    for (images, labels), rows in Loader(store, BATCH, shuffle=True, return_rows=True):
        for image, label, row in zip(images, labels, rows.tolist(), strict=True):
            expected, number = dataset[row]
            assert label == number
            assert (image.double() - expected.double()).abs().max() <= tolerance
            seen.append(row)
    assert sorted(seen) == list(range(COUNT))


# --- ranks, and a process that is killed


def digest(batch):
    return json.dumps([[float(part.double().sum()) for part in batch], batch[1].tolist()])


def train(form, tree, path, out, rank=0, world=1, killed_after=0):
    """Train an epoch, from the state in ``out`` if there is one; kill this process after some batches."""
    global trainer
    trainer = os.getpid()
    torch.set_num_threads(1)  # OpenMP in a forked process
    dataset = dataset_of(form, tree, f"{path}.log")
    options = {"shuffle": True, "seed": 7, "ranks": (rank, world)}
    if form == "auto":
        loader = Loader(dataset, BATCH, num_workers=2, cache=path, **options)
    else:
        loader = Loader(cached(form, dataset, path, lazily=True), BATCH, **options)
    if Path(f"{out}.state").exists():
        loader.load_state_dict(json.loads(Path(f"{out}.state").read_text()))
    for count, batch in enumerate(loader, 1):
        with open(out, "a") as file:
            file.write(digest(batch) + "\n")
        if count == killed_after:
            Path(f"{out}.state").write_text(json.dumps(loader.state_dict()))
            os.kill(os.getpid(), signal.SIGKILL)
    loader.store.finish()


def start(*arguments):
    process = multiprocessing.get_context("fork").Process(target=train, args=arguments)
    process.start()
    return process


def end(process, code=0):
    process.join(120)
    assert process.exitcode == code


def reads(path):
    """Return the processes that have read samples, and the samples in the order in which they were."""
    lines = [tuple(map(int, line.split())) for line in Path(f"{path}.log").read_text().splitlines()]
    return {pid for pid, _ in lines}, [index for _, index in lines]


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def no_proofs_while_filling(monkeypatch):
    """Prove all chosen rows at once, and no others: proofs read samples again in the workers."""
    monkeypatch.setattr("memfeed.splitting.proof.SECONDS", 600.0)
    monkeypatch.setattr("memfeed.splitting.split.WATCHED", 1 << 60)


@pytest.mark.long
@pytest.mark.usefixtures("no_proofs_while_filling")
@pytest.mark.parametrize("form", ["auto", "encoded"])
def test_two_ranks_fill_one_store_together(form, tree, tmp_path):
    expected = cached(form, dataset_of(form, tree), tmp_path / "c.mf", 0)
    path = tmp_path / "s.mf"
    for process in [start(form, tree, path, tmp_path / f"{rank}", rank, 2) for rank in range(2)]:
        end(process)
    for rank in range(2):
        batches = [digest(batch) for batch in epoch_of(expected, ranks=(rank, 2))]
        assert (tmp_path / f"{rank}").read_text().splitlines() == batches
    require_same_store(path, expected)
    # some are read again before the commit, when all rows are there
    once = reads(path)[1][: COUNT - len(expected._view.manifest.fingerprint.probes)]
    assert len(set(once)) == len(once), "no row is computed twice"


@pytest.mark.usefixtures("no_proofs_while_filling")
@pytest.mark.parametrize("form", short_form(["float16", "auto", "short side"]))
def test_after_a_kill_no_present_row_is_computed_again(form, tree, tmp_path):
    expected = cached(form, dataset_of(form, tree), tmp_path / "c.mf", 0)
    path, out = tmp_path / "s.mf", tmp_path / "out"
    end(start(form, tree, path, out, 0, 1, 2), -signal.SIGKILL)
    wait_until(lambda: not any(map(is_running, reads(path)[0])))
    presence = tmp_path / "s.mf.build" / ".build" / "presence"
    absent = np.flatnonzero(np.fromfile(presence, np.uint8) == 0).tolist() if presence.exists() else []
    Path(f"{path}.log").write_text("")
    end(start(form, tree, path, out))
    assert sorted(reads(path)[1][: len(absent)]) == absent
    assert out.read_text().splitlines() == [digest(batch) for batch in epoch_of(expected)]
    require_same_store(path, expected)


class Augmented(Dataset):
    """Photographs, of which those of a rare class get a step more."""

    def __init__(self, count, rare):
        self.targets = self.labels = [2 if i in rare else i % 2 for i in range(count)]
        self.transform = v2.Compose([v2.RandomCrop(12), v2.ToDtype(torch.float32)])
        self.more = v2.RandomHorizontalFlip()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = torch.full((3, 16, 16), index % 200, dtype=torch.uint8) + torch.arange(16, dtype=torch.uint8)
        image = self.transform(image)
        return (self.more(image) if self.labels[index] == 2 else image), self.labels[index]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_does_not_fit_the_cut_ends_one_run_and_the_next_reads_the_dataset_as_it_is(path, workers, capsys):
    dataset = Augmented(400, {211})
    dataset.labels, dataset.targets = dataset.targets, None
    loader = Loader(dataset, 16, shuffle=True, cache=path, num_workers=workers)
    with pytest.raises(SplitError, match="sample 211: .* Or run the program again: beside this cache= it reads"):
        list(loader)
    end_all()
    for _ in range(2):
        loader = Loader(dataset, 16, shuffle=True, cache=path, num_workers=workers)
        assert type(loader) is DecodedLoader
        assert sum(len(labels) for _, labels in loader) == 400
    said = capsys.readouterr().err
    assert f"is tried again after an edit of the dataset's source, or without {path}.build, which" in said
    assert "an earlier run was ended by SplitError: sample 211" in said
    assert "rows are kept" not in said


class Substituted(Dataset):
    """A sample that cannot be read is another one, chosen at random: no attribute draws that."""

    def __len__(self):
        return 400

    def __getitem__(self, index):
        return self[random.randrange(400)] if index == 211 else torch.tensor([index])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_random_sample_that_was_not_proven_ends_one_run_and_the_next_reads_the_dataset_as_it_is(
    path, workers, capsys
):
    """Each run ended with the error, though a DataLoader reads the dataset."""
    with pytest.raises(RandomDataError, match="sample 211 twice .* Or run the program again: beside this cache= it re"):
        list(Loader(Substituted(), 16, cache=path, num_workers=workers))
    end_all()
    loader = Loader(Substituted(), 16, cache=path, num_workers=workers)
    assert type(loader) is DecodedLoader
    assert len({torch.cat(list(loader))[211].item() for _ in range(6)}) > 1
    said = capsys.readouterr().err
    assert "an earlier run was ended by RandomDataError: found random samples: reading sample 211 twice" in said
    assert "rows are kept" not in said


class Mended(Augmented):
    """The samples of the rare class are as the others are."""

    def __getitem__(self, index):
        image, label = torch.full((3, 16, 16), index % 200, dtype=torch.uint8), self.labels[index]
        return self.transform(image), label


def _fixed(dataset):
    dataset.labels = [0] * len(dataset)
    dataset.transform = v2.ToDtype(torch.float32)
    return dataset


@pytest.mark.parametrize(
    "made", [lambda: Mended(400, {211}), lambda: Augmented(399, {}), lambda: _fixed(Augmented(400, {}))]
)
def test_a_sample_that_does_not_fit_the_cut_is_forgotten_for_another_source_or_dataset(path, made, capsys):
    dataset = Augmented(400, {211})
    dataset.labels, dataset.targets = dataset.targets, None
    with pytest.raises(SplitError, match="sample 211"):
        list(Loader(dataset, 16, shuffle=True, cache=path))
    end_all()
    mended = made()
    loader = Loader(mended, 16, cache=path)
    for _ in range(2):
        found = torch.cat([labels for _, labels in loader])
        assert found.tolist() == mended.labels
    loader.store.finish()
    assert path.is_dir()
    assert "an earlier run was ended" not in capsys.readouterr().err


@pytest.mark.parametrize("rare", [{211}, set(range(200, 206))])
def test_a_rare_class_with_a_step_of_its_own_is_among_the_samples_that_are_proven(path, rare):
    dataset = Augmented(400, rare)
    loader = Loader(dataset, 16, shuffle=True, cache=path)
    assert isinstance(loader, Loader)
    flips = {
        int(image[0, 0, 0] > image[0, 0, -1])
        for _ in range(8)
        for images, labels in loader
        for image in images[labels == 2]
    }
    assert flips == {0, 1}
