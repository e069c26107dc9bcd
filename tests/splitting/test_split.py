"""Which pipelines are found and cut, what is stored, and what a store remembers of the rest."""

import io
import pickle
import random
import sys
import time
import types

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from recipes import Photos, cifar, picture, reference_eval, reference_train
from torch.utils.data import ConcatDataset, DataLoader, Subset
from torchvision import tv_tensors
from torchvision.datasets import ImageFolder
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2

import memfeed
from memfeed import transforms as T
from memfeed.errors import LoaderError, RandomDataError, SplitError, StaleStoreError
from memfeed.random import Keys
from memfeed.splitting.split import split
from memfeed.transforms import decode as decode_module
from short_form import short_form

CROP = [v1.RandomCrop(32), v1.RandomHorizontalFlip(), v1.ToTensor()]


def converted(dataset, path, **options):
    return memfeed.cache(dataset, path, **{"split": True, "workers": 0, "progress": False, **options})


def photos(*steps, **options):
    return Photos(v1.Compose([*steps]), **{"count": 100, **options})


def names(store):
    return [type(one).__name__ for one in store.transform.transforms]


class Wrapper(torch.utils.data.Dataset):
    def __init__(self, inner):
        self.inner = inner

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, index):
        image, label = self.inner[index]
        return {"picture": image, "label": label}


@pytest.mark.parametrize(
    "wrap",
    [
        lambda d: Subset(d, range(40, 80)),
        lambda d: Subset(Subset(d, range(100)), range(30)),
        lambda d: ConcatDataset([d, Subset(d, [3])]),
        Wrapper,
    ],
)
def test_a_pipeline_inside_other_datasets_is_found(wrap, tmp_path):
    inner = photos(*CROP)
    dataset = wrap(inner)
    store = converted(dataset, tmp_path / "s.mf")
    assert len(store) == len(dataset)
    assert names(store) == ["RandomCrop", "RandomHorizontalFlip", "ToDtype"]
    assert inner.transform.transforms == CROP  # the user's dataset is as it was
    assert store.schema.fields[0].row_shape == (3, 64, 64)
    batch = next(iter(memfeed.Loader(store, 4)))
    assert (batch["picture"] if isinstance(batch, dict) else batch[0]).shape == (4, 3, 32, 32)


def test_image_folders_of_torchvision(tmp_path):
    for label in "ab":
        (tmp_path / "tree" / label).mkdir(parents=True)
        for i in range(3):
            Image.fromarray(picture()).save(tmp_path / "tree" / label / f"{i}.png")
    dataset = ImageFolder(str(tmp_path / "tree"), v1.Compose(CROP))
    store = converted(dataset, tmp_path / "s.mf")
    assert (store.classes, store.targets) == (["a", "b"], [0, 0, 0, 1, 1, 1])
    assert torch.equal(store[0][0], torch.from_numpy(picture()).permute(2, 0, 1))
    assert dataset.transforms.transform.transforms == CROP


class Listed(Photos):
    def __getitem__(self, index):
        image, label = torch.from_numpy(picture()).permute(2, 0, 1), index
        for step in self.transform:
            image = step(image)
        return image, label


class Augmented(Photos):
    def __init__(self, augment):
        super().__init__()
        self.augment = augment

    def __getitem__(self, index):
        return self.augment(torch.from_numpy(picture()).permute(2, 0, 1)), index


@pytest.mark.parametrize(
    ("dataset", "split"),
    [
        (Listed([v2.CenterCrop(48), v2.RandomCrop(32)]), True),
        (Augmented(v2.Compose([v2.CenterCrop(48), v2.RandomCrop(32)])), "augment"),
        (Augmented(torch.nn.Sequential(v2.CenterCrop(48), v2.RandomCrop(32))), "augment"),
        (Augmented(v2.Compose([v2.Compose([v2.CenterCrop(48)]), v2.RandomCrop(32)])), "augment"),
    ],
)
def test_lists_sequentials_and_named_attributes(dataset, split, tmp_path):
    store = converted(dataset, tmp_path / "s.mf", split=split)
    assert store.schema.fields[0].row_shape == (3, 48, 48)
    assert names(store) == ["RandomCrop"]


class Randomizable:
    """As MONAI's transforms: a generator of its own, which set_random_state seeds."""

    def set_random_state(self, seed):
        self.R = np.random.RandomState(seed)


class RandShift(Randomizable):
    def __init__(self):
        self.set_random_state(0)

    def __call__(self, sample):
        return {**sample, "image": sample["image"] + float(self.R.uniform(0, 100))}


class Scaled:
    def __call__(self, sample):
        return {**sample, "image": sample["image"] / 2}


class Volumes(Photos):
    def __getitem__(self, index):
        return self.transform({"image": torch.full((1, 4, 4, 4), float(index)), "name": f"volume {index}"})


class MonaiCompose:
    def __init__(self, transforms):
        self.transforms = tuple(transforms)

    def __call__(self, sample):
        for step in self.transforms:
            sample = step(sample)
        return sample


MonaiCompose.__name__ = "Compose"


def test_steps_with_a_generator_of_their_own_are_seeded_by_the_key(tmp_path):
    store = converted(Volumes(MonaiCompose([Scaled(), RandShift()])), tmp_path / "s.mf")
    assert torch.equal(store[6]["image"], torch.full((1, 4, 4, 4), 3.0))

    def shifts(epoch):
        loader = memfeed.Loader(store, 50, seed=0)
        loader.set_epoch(epoch)
        return next(iter(loader))["image"][:, 0, 0, 0, 0] - torch.arange(50) / 2

    first = shifts(0)
    assert torch.equal(first, shifts(0))
    assert not torch.equal(first, shifts(1))
    assert first.min() < 20
    assert first.max() > 80


class Loaded:
    def __call__(self, sample):
        return {**sample, "image": torch.load(sample["image"])}


class Samples(RandShift):
    def __call__(self, sample):
        return [super(Samples, self).__call__(sample) for _ in range(2)]


class Paths(Photos):
    def __init__(self, directory, *steps):
        super().__init__(MonaiCompose(steps))
        self.paths = [str(directory / f"{i}.pt") for i in range(len(self))]
        for i, path in enumerate(self.paths):
            torch.save(torch.full((1, 4, 4), float(i)), path)

    def __getitem__(self, index):
        return self.transform({"image": self.paths[index], "label": index})


class RandName(Randomizable):
    def __init__(self):
        self.set_random_state(0)

    def __call__(self, sample):
        return {**sample, "label": sample["label"] + float(self.R.uniform(0, 100))}


def test_a_pipeline_may_read_its_images_itself(tmp_path):
    store = converted(Paths(tmp_path, Loaded(), Scaled(), RandShift()), tmp_path / "s.mf")
    assert torch.equal(store[6]["image"], torch.full((1, 4, 4), 3.0))
    batch = next(iter(memfeed.Loader(store, 50)))
    shifts = batch["image"][:, 0, 0, 0] - batch["label"] / 2
    assert len(shifts.unique()) == 50


def test_a_pipeline_that_makes_several_samples_of_one_is_made_again_whole(tmp_path):
    dataset = Paths(tmp_path, Loaded(), Samples())
    store = converted(dataset, tmp_path / "s.mf")
    first, second = next(iter(memfeed.Loader(store, 4)))
    assert first["image"].shape == second["image"].shape == (4, 1, 4, 4)


class OfEach(MonaiCompose):
    """As MONAI's Compose: a step after one that makes several samples is called for each of them."""

    def __call__(self, sample):
        for step in self.transforms:
            sample = [step(one) for one in sample] if isinstance(sample, list) else step(sample)
        return sample


def test_steps_that_are_called_for_each_of_several_samples(tmp_path):
    fixed, random_part = [Loaded()], [Samples(), RandShift()]
    random_part[1].set_random_state(1)
    dataset = Paths(tmp_path)
    dataset.transform = OfEach([*fixed, *random_part])
    with pytest.raises(
        SplitError, match=r"It does not call each of its steps once, in their order.*Compose\(\[Compose"
    ):
        converted(dataset, tmp_path / "s.mf")
    dataset.transform = OfEach([OfEach(fixed), OfEach(random_part)])  # as the error says
    first, second = next(iter(memfeed.Loader(converted(dataset, tmp_path / "s.mf"), 4)))
    assert first["image"].shape == second["image"].shape == (4, 1, 4, 4)


def test_a_random_step_that_gets_no_image_is_named(tmp_path):
    with pytest.raises(SplitError, match="RandName, the first random step, gets no image"):
        converted(Paths(tmp_path, RandName(), Loaded()), tmp_path / "s.mf")


class Spoken(torch.utils.data.Dataset):
    """As datasets of speech: a method reads a file and draws; the tokens are beside it."""

    def __init__(self, folder, tokens, masks):
        self.files, self.tokens, self.masks = [str(folder / f"{i}.npy") for i in range(8)], tokens, masks
        for i, file in enumerate(self.files):
            np.save(file, np.full(40, i, np.float32))

    def __len__(self):
        return len(self.files)

    def read(self, file):
        start = random.randrange(8)
        return torch.from_numpy(np.load(file)[start : start + 32])

    def __getitem__(self, index):
        wave = self.read(self.files[index])
        return {
            "wave": wave,
            "tokens": self.tokens([3, 1, index]),
            **({"mask": self.masks} if self.masks.any() else {}),
        }


@pytest.mark.parametrize("tokens", [list, torch.tensor, np.array])
def test_a_random_method_that_reads_the_file_itself_is_named(tmp_path, tokens):
    with pytest.raises(SplitError, match="read, the first random step, gets no image, tensor or array"):
        converted(Spoken(tmp_path, tokens, torch.zeros(0)), tmp_path / "s.mf")


def test_what_takes_time_beside_a_file_that_a_random_method_reads_is_stored(tmp_path):
    store = converted(Spoken(tmp_path, list, torch.ones(64, 64)), tmp_path / "s.mf")
    assert next(iter(memfeed.Loader(store, 4)))["wave"].shape == (4, 32)


def test_the_same_transform_comes_from_the_directory_and_from_a_second_call(tmp_path):
    store = converted(cifar(False), tmp_path / "s.mf")
    opened = memfeed.open(tmp_path / "s.mf")
    again = converted(cifar(False), tmp_path / "s.mf")
    assert repr(opened.transform) == repr(store.transform) == repr(again.transform)
    assert opened == store == again
    batches = [next(iter(memfeed.Loader(one, 32, seed=3)))[0] for one in (store, opened, again)]
    assert torch.equal(batches[0], batches[1])
    assert torch.equal(batches[0], batches[2])
    assert store._view.manifest.version == 2
    with pytest.raises(AttributeError, match=r"found 'p' set on RandomHorizontalFlip, a part of a store's transform"):
        store.transform.transforms[1].p = 0.9


def test_a_second_call_takes_the_random_part_of_the_dataset_as_it_is_now(tmp_path, capsys):
    converted(photos(v1.RandomCrop(32), v1.ToTensor()), tmp_path / "s.mf")
    store = converted(photos(v1.RandomCrop(24), v1.ToTensor()), tmp_path / "s.mf")
    assert next(iter(memfeed.Loader(store, 2)))[0].shape[-1] == 24
    assert next(iter(memfeed.Loader(memfeed.open(tmp_path / "s.mf"), 2)))[0].shape[-1] == 32
    assert "overwrite=True" in capsys.readouterr().err
    with pytest.raises(StaleStoreError, match="split=True"):
        converted(photos(v1.RandomCrop(24), v1.ToTensor()), tmp_path / "s.mf", split=False)
    with pytest.raises(StaleStoreError):  # another fixed part
        converted(photos(v1.Pad(1), v1.RandomCrop(24), v1.ToTensor()), tmp_path / "s.mf")


def test_views_and_pickles_keep_the_transform(tmp_path):
    jitter = v1.Lambda(add_noise)
    store = converted(photos(v1.RandomCrop(32), v1.ToTensor(), jitter), tmp_path / "s.mf")
    assert names(store) == ["RandomCrop", "ToDtype", "PerSample"]
    for view in (store.subset(range(9)), store.split([0.5, 0.5])[1], pickle.loads(pickle.dumps(store))):
        assert repr(view.transform) == repr(store.transform)
        assert next(iter(memfeed.Loader(view, 4)))[0].shape == (4, 3, 32, 32)
    labels = store.select([1])
    assert next(iter(memfeed.Loader(labels, 4)))[1].tolist() == [0, 1, 2, 3]
    assert memfeed.Loader(store, 4, transform={}).dataset[0][0].shape == (3, 64, 64)
    assert next(iter(memfeed.Loader(store, 4, transform={})))[0].shape == (4, 3, 64, 64)
    other = next(iter(memfeed.Loader(store, 4, transform=T.CenterCrop(8))))[0]
    assert other.shape == (4, 3, 8, 8)


def add_noise(image):
    return image + torch.rand(())


def test_torch_dataloaders_with_collate_and_workers(tmp_path):
    store = converted(cifar(False), tmp_path / "s.mf")
    expected = next(iter(memfeed.Loader(store, 8, seed=0)))[0]
    for workers in (0, 1):
        batch = next(iter(DataLoader(store, 8, collate_fn=memfeed.Collate(seed=0), num_workers=workers)))
        assert torch.equal(batch[0], expected)


def test_workers_and_resume(tmp_path):
    dataset = photos(v1.RandomCrop(32), v1.ToTensor(), v1.Lambda(add_noise))
    store = converted(dataset, tmp_path / "s.mf", workers=2)
    loader = memfeed.Loader(store, 10, shuffle=True, seed=0)
    batches = []
    for step, batch in enumerate(loader):
        batches.append(batch[0])
        if step == 3:
            state = loader.state_dict()
    again = memfeed.Loader(converted(dataset, tmp_path / "s.mf"), 10, shuffle=True, seed=0)
    again.load_state_dict(state)
    assert all(torch.equal(a, b[0]) for a, b in zip(batches[4:], again, strict=True))


def test_two_stores_need_one_transform(tmp_path):
    one = converted(photos(v1.RandomCrop(32), v1.ToTensor()), tmp_path / "a.mf")
    same = converted(photos(v1.RandomCrop(32), v1.ToTensor(), count=20), tmp_path / "b.mf")
    other = converted(photos(v1.RandomCrop(24), v1.ToTensor()), tmp_path / "c.mf")
    assert next(iter(memfeed.Loader([one, same], 4)))[0].shape == (4, 3, 32, 32)
    with pytest.raises(LoaderError, match="different transforms"):
        memfeed.Loader([one, other], 4)
    assert next(iter(memfeed.Loader([one, other], 4, transform=one.transform)))[0].shape == (4, 3, 32, 32)


class Paint:
    """A random step of the user's, whose repr does not say what it does."""

    def __init__(self, value):
        self.value = value

    def __repr__(self):
        return "Paint()"

    def __call__(self, image):
        return Image.new("RGB", image.size, (self.value, random.randrange(256), 0))


def test_functions_of_two_stores_are_compared_by_what_they_hold(tmp_path):
    stores = [
        converted(photos(Paint(value), v1.ToTensor(), count=8), tmp_path / f"{number}.mf")
        for number, value in enumerate((51, 51, 102))
    ]
    for images, _ in memfeed.Loader(stores[:2], 4):
        assert (images[:, 0] * 255).round().unique().tolist() == [51]
    with pytest.raises(LoaderError, match="or with functions in them that are not known to be equal"):
        memfeed.Loader(stores, 4)
    local = [converted(photos(lambda image: Paint(51)(image), v1.ToTensor(), count=8), tmp_path / n) for n in "xy"]
    with pytest.raises(LoaderError, match="not known to be equal"):
        memfeed.Loader(local, 4)
    assert len(memfeed.Loader([local[0], local[0]], 4)) == 4


def test_the_manifest_has_the_number_of_samples_that_were_proven(tmp_path, monkeypatch):
    monkeypatch.setattr("memfeed.splitting.proof.SECONDS", 0.0)  # most of them as they are stored
    small = converted(photos(*CROP, count=10), tmp_path / "small.mf")
    assert small._view.manifest.attributes.proven >= 10  # the row that is read last too
    store = converted(cifar(False), tmp_path / "s.mf")
    assert store._view.manifest.attributes.proven >= 16  # all that were chosen, by the end, and some of the others


def test_auto_splits_only_what_is_random(tmp_path):
    store = converted(reference_eval(True), tmp_path / "eval.mf", split="auto")
    assert store.transform is None
    assert store.schema.fields[0].dtype == "float32"
    assert converted(cifar(False), tmp_path / "train.mf", split="auto").transform is not None
    assert converted(cifar(False), tmp_path / "train.mf", split="auto").transform is not None
    assert converted(list(range(20)), tmp_path / "list.mf", split="auto").transform is None


class Boxed(torch.utils.data.Dataset):
    """Images with boxes, which go through one random pipeline."""

    def __init__(self):
        self.transforms = v2.Compose([v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True)])

    def __len__(self):
        return 20

    def __getitem__(self, index):
        image = tv_tensors.Image(torch.arange(3 * 8 * 8, dtype=torch.uint8).view(3, 8, 8))
        boxes = tv_tensors.BoundingBoxes([[1.0, 2.0, 3.0, 4.0]], format="XYXY", canvas_size=(8, 8))
        return self.transforms(image, {"boxes": boxes, "label": index})


class Drawn(torch.utils.data.Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return torch.rand(3)


def test_auto_says_why_it_cannot_split(tmp_path):
    with pytest.raises(RandomDataError, match=r"cannot be cut off: .*test_split.py:\d+.*draws"):
        converted(Drawing(v1.Compose([v1.ToTensor()])), tmp_path / "drawing.mf", split="auto")
    with pytest.raises(RandomDataError, match=r"Loader\(\.\.\., transform=\.\.\.\)"):  # without a pipeline
        converted(Drawn(), tmp_path / "drawn.mf", split="auto")


def test_boxes_follow_their_images_sample_by_sample(tmp_path):
    store = converted(Boxed(), tmp_path / "boxes.mf", split="auto")
    images, target = next(iter(memfeed.Loader(store, 20, seed=1)))
    flipped = images[:, 0, 0, 0] > 0  # the first pixel is 0, the last of its row is not
    assert 0 < flipped.sum() < 20
    expected = torch.where(flipped[:, None], torch.tensor([5.0, 2.0, 7.0, 4.0]), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert torch.equal(target["boxes"][:, 0], expected)
    assert target["label"].tolist() == list(range(20))


def test_a_random_part_that_turns_images_as_their_exif_data_say_is_refused(tmp_path):
    def turned(image):
        image = ImageOps.exif_transpose(image)
        return torch.from_numpy(np.array(image.rotate(180) if random.random() < 0.5 else image))

    with pytest.raises(SplitError, match="read the Exif data"):
        converted(Photos(turned), tmp_path / "s.mf")


# --- images of several sizes


def test_a_random_resize_of_several_sizes_stores_what_keep_says(tmp_path):
    def dataset():
        return photos(
            v1.RandomResizedCrop(24), v1.RandomHorizontalFlip(), v1.ToTensor(), sizes=((60, 80), (80, 64)), count=40
        )

    whole = converted(dataset(), tmp_path / "full.mf", forms="full")
    assert sorted({tuple(whole[i][0].shape) for i in range(4)}) == [(3, 60, 80), (3, 80, 64)]
    small = converted(dataset(), tmp_path / "small.mf", forms=32)
    assert sorted({tuple(small[i][0].shape) for i in range(4)}) == [(3, 32, 43), (3, 40, 32)]
    for store in (whole, small):
        assert next(iter(memfeed.Loader(store, 8)))[0].shape == (8, 3, 24, 24)
    with pytest.raises(StaleStoreError):
        converted(dataset(), tmp_path / "small.mf", forms=40)


SIZES = ((60, 80), (80, 64))


def cropped(count=40):
    return photos(v1.RandomResizedCrop(24), v1.ToTensor(), sizes=SIZES, count=count)


@pytest.mark.parametrize("lazily", [False, True])
@pytest.mark.parametrize("keep", short_form([32, "full"]))
def test_the_choice_of_a_store_is_that_of_later_calls(keep, lazily, tmp_path):
    path = tmp_path / "s.mf"
    store = memfeed.cache(cropped(), path, split="auto", forms=keep, lazily=lazily, workers=0, progress=False)
    if lazily:
        assert next(iter(memfeed.Loader(store, 8)))[0].shape == (8, 3, 24, 24)
        store.finish()
    assert memfeed.open(path)._view.manifest.attributes.keep == keep
    loader = memfeed.Loader(cropped(), 8, seed=0, cache=path)
    assert torch.equal(next(iter(loader))[0], next(iter(memfeed.Loader(memfeed.open(path), 8, seed=0)))[0])
    assert converted(cropped(), path) == memfeed.open(path)
    assert len(memfeed.append(path, cropped(10), split=True, workers=0, progress=False)) == 50
    again = converted(cropped(), path, overwrite=True)  # a new store is a new choice, here of small images
    assert again._view.manifest.attributes.keep == "full"
    whole = photos(v1.Resize((24, 24)), v1.ToTensor(), sizes=SIZES)
    assert memfeed.cache(whole, path, overwrite=True, workers=0, progress=False).transform is None


def test_a_loader_takes_the_choice_and_says_it(tmp_path, capsys):
    begun = memfeed.cache(cropped(), tmp_path / "small.mf", split="auto", forms=32, lazily=True, workers=0)
    small = memfeed.Loader(cropped(), 8, num_workers=0, cache=tmp_path / "small.mf")
    assert next(iter(memfeed.Loader(begun, 8)))[0].shape == (8, 3, 24, 24)
    assert next(iter(small))[0].shape == (8, 3, 24, 24)
    assert small.store[0][0].shape == (3, 32, 43)
    capsys.readouterr()
    loader = memfeed.Loader(cropped(), 8, num_workers=0, cache=tmp_path / "s.mf")
    assert "of decoded images (forms=256 smaller images)" in capsys.readouterr().err
    assert loader.store[0][0].shape == (3, 60, 80)


def jpegs(folder, *steps):
    for label in "ab":
        (folder / label).mkdir(parents=True)
        for i in range(4):
            size = (70, 90) if i % 2 else (80, 72)
            Image.fromarray(picture(*size)).save(folder / label / f"{i}.jpg")
    return ImageFolder(str(folder), v1.Compose([*steps]))


def test_encoded_files_are_decoded_in_every_epoch(tmp_path):
    steps = [v1.Resize(32), v1.RandomCrop(24), v1.RandomHorizontalFlip(), v1.ToTensor()]
    dataset = jpegs(tmp_path / "tree", *steps)
    store = converted(dataset, tmp_path / "s.mf", forms="encoded", fields=["image", "label"])
    assert store[5] == ((tmp_path / "tree" / "b" / "1.jpg").read_bytes(), 1)
    assert names(store) == ["Decode", "Resize", "RandomCrop", "RandomHorizontalFlip", "ToDtype"]
    opened = memfeed.open(tmp_path / "s.mf")
    batches = [next(iter(memfeed.Loader(one, 8, seed=0))) for one in (store, opened)]
    assert torch.equal(batches[0][0], batches[1][0])
    assert batches[0][0].shape == (8, 3, 24, 24)
    assert batches[0][1].tolist() == [0] * 4 + [1] * 4


def test_encoded_files_give_the_original_without_randomness(tmp_path):
    dataset = jpegs(tmp_path / "tree", v1.Resize(40), v1.CenterCrop(32), v1.PILToTensor())
    store = converted(dataset, tmp_path / "s.mf", forms="encoded")
    images, _ = next(iter(memfeed.Loader(store, 8)))
    for index, image in enumerate(images):
        assert (image.int() - dataset[index][0].int()).abs().max() <= 1


def test_a_damaged_file_names_its_row(tmp_path):
    batch = [[b"no image"], torch.zeros(1)]
    with pytest.raises(memfeed.errors.TransformError, match="row 7"):
        T.Decode().apply(batch, Keys(0, 0, torch.tensor([7])))
    with pytest.raises(SplitError, match=r"forms='encoded' for Photos.*ImageFolder"):
        converted(photos(*CROP), tmp_path / "s.mf", forms="encoded")


# --- what cannot be split


class Unseeded:
    def __init__(self):
        self.rng = random.SystemRandom()

    def __call__(self, image):
        return image + self.rng.random()


class Both(Wrapper):
    def __init__(self, inner, transform):
        super().__init__(inner)
        self.transform = transform

    def __getitem__(self, index):
        image, label = self.inner[index]
        return self.transform(image), label


class Item(Photos):
    def __getitem__(self, index):
        image = self.transform(torch.from_numpy(picture()).permute(2, 0, 1))
        return image, image.float().mean().item()


class Drawing(Photos):
    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return image, label + random.random()


class Counting(Photos):
    reads = 0

    def __getitem__(self, index):
        Counting.reads += 1
        return super().__getitem__(index)[0], Counting.reads


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (photos(*CROP), {"split": "augment"}, "attribute 'augment'"),
        ([1, 2, 3], {}, "no random step"),
        (torch.rand(4, 3), {}, "map-style dataset"),
        (Augmented(Unseeded()), {"split": "augment"}, "no generator has moved"),
        (Item(v2.RandomCrop(32)), {}, "takes a value out of its pipeline's result"),
    ],
)
def test_a_pipeline_that_cannot_be_cut(dataset, options, message, tmp_path):
    with pytest.raises(SplitError, match=message) as raised:
        converted(dataset, tmp_path / "s.mf", **options)
    assert len(str(raised.value)) < 400
    assert not (tmp_path / "s.mf").exists()


@pytest.mark.parametrize(("cls", "cause"), [(Drawing, r"test_split.py:\d+"), (Counting, "state that outlives a read")])
def test_samples_that_are_random_without_a_random_step(cls, cause, tmp_path):
    with pytest.raises(SplitError, match=cause) as raised:
        converted(cls(v1.Compose([v1.ToTensor()])), tmp_path / "s.mf")
    assert len(str(raised.value)) < 400


def test_several_pipelines(tmp_path):
    inner = photos(*CROP)
    outer = Wrapper(inner)
    outer.transform = v1.Compose([v1.Pad(1)])
    assert names(converted(outer, tmp_path / "s.mf"))[0] == "RandomCrop"  # the other one is never called
    outer = Subset(outer, range(20))
    outer.dataset = Both(inner, outer.dataset.transform)
    both = converted(outer, tmp_path / "both.mf")  # a fixed step of the outer dataset comes after the random ones
    assert names(both)[1:3] == ["RandomCrop", "RandomHorizontalFlip"]
    assert next(iter(memfeed.Loader(both, 4)))[0].shape[-1] == 34


@pytest.mark.parametrize("keep", [0, "whole", True, 2.5])
def test_a_choice_without_a_meaning(keep, tmp_path):
    with pytest.raises(ValueError, match="expected"):
        converted(reference_train(True), tmp_path / "s.mf", forms=keep)
    with pytest.raises(ValueError, match="split"):
        memfeed.cache(reference_train(True), tmp_path / "s.mf", forms=256)


def jpeg(**options):
    pixels = np.random.RandomState(0).randint(0, 256, (40, 60, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", **options)
    return file.getvalue()


def test_torchcodec_decodes_jpeg_files_where_it_gives_what_pillow_gives(monkeypatch):
    """A stand-in for the library: what counts is when it is asked, and when it is not."""
    asked = []

    def decode_jpeg(data):
        asked.append(data)
        if data[:100] == progressive[:100]:
            raise RuntimeError("not supported")
        return of_pillow(data)

    def of_pillow(data):
        return torch.from_numpy(np.array(Image.open(io.BytesIO(data)).convert("RGB"))).permute(2, 0, 1)

    plain, progressive = jpeg(), jpeg(progressive=True, quality=20)
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees, which torchcodec would do, and Pillow does not
    turned = jpeg(exif=exif)
    module = types.ModuleType("torchcodec.decoders")
    module.decode_jpeg = decode_jpeg
    monkeypatch.setitem(sys.modules, "torchcodec", types.ModuleType("torchcodec"))
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", module)
    decode_module._torchcodec.cache_clear()
    try:
        for data in (plain, progressive, turned):
            assert torch.equal(decode_module.decode(data), of_pillow(data))
        assert asked[-2:] == [plain, progressive]
        module.decode_jpeg = lambda data: of_pillow(data) ^ 1  # another version of the JPEG library
        decode_module._torchcodec.cache_clear()
        assert torch.equal(decode_module.decode(plain), of_pillow(plain))
        assert decode_module._torchcodec() is None
    finally:
        decode_module._torchcodec.cache_clear()


@pytest.mark.parametrize("seconds", [0.0, 0.005])
def test_the_line_says_where_a_dataloader_may_be_faster(seconds):
    class Noisy(torch.utils.data.Dataset):
        def __len__(self):
            return 32

        def __getitem__(self, index):
            if seconds:
                time.sleep(seconds)
            return self.transform(torch.full((8,), float(index)))

        def transform(self, values):
            return values + random.random()

    line = split(Noisy(), range(8), None, None, ".", cuts_fixed=False).line
    assert "as they are: transform" in line
    assert ("made sample by sample, the random part takes" in line) == (not seconds)
