"""The patches in examples/programs are small and described, and Loader gives what DataLoader gives for their idioms.

The datasets here are written anew, in the manner of the programs. No program is fetched.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, random_split

import memfeed

PROGRAMS = Path(__file__).parents[2] / "examples" / "programs"
PATCHES = sorted(PROGRAMS.glob("*.patch"))
PAGE = (PROGRAMS / "README.md").read_text()
MOST_LINES = 5


def added_lines(patch: Path) -> list[str]:
    """Return the lines that a patch adds."""
    return [line[1:] for line in patch.read_text().splitlines() if line.startswith("+") and not line.startswith("+++")]


def test_there_are_ten_patches():
    assert len(PATCHES) >= 10


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_a_patch_has_at_most_five_lines_and_none_of_the_program(patch):
    lines = patch.read_text().splitlines()
    assert 1 <= len(added_lines(patch)) <= MOST_LINES
    allowed = re.compile(r"diff --git a/\S+ b/\S+|--- a/\S+|\+\+\+ b/\S+|@@ -\d+,0 \+\d+(,\d+)? @@|\+(?!\+\+).*")
    assert [line for line in lines if not allowed.fullmatch(line)] == [], "a line of the program"
    for hunk in re.split(r"@@.*@@", patch.read_text())[1:]:
        body = "\n".join(line[1:] for line in hunk.splitlines() if line.startswith("+") and not line.startswith("+++"))
        ast.parse(f"def f():\n{textwrap.indent(textwrap.dedent(body), '    ')}")


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_the_page_names_the_repository_and_the_commit_of_a_patch(patch):
    rows = [line for line in PAGE.splitlines() if f"({patch.name})" in line]
    assert len(rows) == 1
    assert re.search(r"https://github\.com/[\w.-]+/[\w.-]+", rows[0])
    assert re.search(r"`[0-9a-f]{40}`", rows[0])


def test_the_page_names_no_other_patches():
    assert {*re.findall(r"\((\w+\.patch)\)", PAGE)} == {patch.name for patch in PATCHES}


v1 = pytest.importorskip("torchvision.transforms", reason="the pipelines need torchvision, of the extra 'vision'")
Image = pytest.importorskip("PIL.Image", reason="the images need Pillow, of the extra 'vision'")
TO_FLOAT = [v1.ToTensor(), v1.Normalize((0.5, 0.4, 0.3), (0.2, 0.25, 0.3))]


@pytest.fixture(autouse=True)
def _seeds():
    """Make the draws of every test the same each time."""
    torch.manual_seed(0)
    np.random.seed(0)


def noise(rows: int, height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (rows, height, width, 3), dtype=np.uint8)


class Pictures(Dataset):
    """PIL images and labels, with a pipeline in `transform`, as in torchvision's datasets."""

    def __init__(self, pictures, transform):
        self.pictures, self.transform = pictures, transform

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, index):
        return self.transform(Image.fromarray(self.pictures[index])), index


def leaves(sample) -> list[torch.Tensor]:
    if isinstance(sample, dict):
        return [leaf for key in sample for leaf in leaves(sample[key])]
    return [sample] if isinstance(sample, torch.Tensor) else [leaf for part in sample for leaf in leaves(part)]


def samples(loader) -> Counter:
    """Return how often each sample comes in an epoch: its dtypes, its shapes and all its bytes."""
    found: Counter = Counter()
    for batch in loader:
        parts = leaves(batch)
        found.update(
            tuple((part.dtype, part[i].shape, part[i].numpy().tobytes()) for part in parts)
            for i in range(len(parts[0]))
        )
    return found


def assert_batches_are_the_same(ours, theirs) -> None:
    """Compare two epochs batch by batch: form, dtypes, values."""
    ours, theirs = list(ours), list(theirs)
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert type(one) is type(other)
        assert not isinstance(one, dict) or list(one) == list(other)
        torch.testing.assert_close(leaves(one), leaves(other), rtol=0, atol=0)


def assert_epochs_are_the_same(ours, theirs) -> None:
    """Compare the samples of two epochs of each, in any order."""
    assert len(ours) == len(theirs)
    expected = samples(theirs)
    assert [samples(ours) == expected for _ in range(2)] == [True, True]


def by_row(loader) -> dict[int, torch.Tensor]:
    """Return the images of an epoch by their labels, which are the row numbers."""
    found = {int(row): image for images, rows in loader for image, row in zip(images, rows, strict=True)}
    assert sum(len(rows) for _, rows in loader) == len(found), "a row comes twice"
    return found


def test_mnist_arguments_in_a_dict_and_no_shuffling(tmp_path):
    data = Pictures(noise(50, 28, 28), v1.Compose(TO_FLOAT))
    train_kwargs = {"batch_size": 16}
    ours = memfeed.Loader(data, **train_kwargs, cache=tmp_path / "train.mf")
    for _ in range(2):
        assert_batches_are_the_same(ours, DataLoader(data, **train_kwargs))


def test_imagenet_crops_of_photographs_of_several_sizes(tmp_path):
    plain = [np.full((40 + i, 50, 3), 10 * i, np.uint8) for i in range(20)]  # a crop of one colour is known
    crop = v1.Compose([v1.RandomResizedCrop(24), v1.RandomHorizontalFlip(), *TO_FLOAT])
    fixed = v1.Compose([v1.Resize(32), v1.CenterCrop(24), *TO_FLOAT])
    options = {"batch_size": 8, "num_workers": 0}
    train = memfeed.Loader(Pictures(plain, crop), **options, shuffle=True, sampler=None, cache=tmp_path / "train.mf")
    expected = by_row(DataLoader(Pictures(plain, crop), **options))
    for _ in range(2):
        images = by_row(train)
        assert images.keys() == expected.keys()
        for row, image in images.items():
            torch.testing.assert_close(image, expected[row], rtol=0, atol=1e-5)
    val = Pictures([*noise(20, 40, 50)], fixed)
    assert_batches_are_the_same(
        memfeed.Loader(val, **options, sampler=None, cache=tmp_path / "val.mf"), DataLoader(val, **options)
    )


def test_pytorch_cifar_each_image_is_one_of_the_crops_and_flips_of_its_row(tmp_path):
    pictures = noise(40, 8, 8)
    data = Pictures(pictures, v1.Compose([v1.RandomCrop(8, padding=2), v1.RandomHorizontalFlip(), *TO_FLOAT]))
    loader = memfeed.Loader(data, 16, shuffle=True, num_workers=0, cache=tmp_path / "train.mf")
    finish = v1.Compose(TO_FLOAT)
    drawn = Counter()
    for _ in range(4):
        for row, image in by_row(loader).items():
            padded = np.pad(pictures[row], ((2, 2), (2, 2), (0, 0)))
            windows = {(y, x): padded[y : y + 8, x : x + 8] for y in range(5) for x in range(5)}
            possible = {
                (*at, f): finish(w[:, ::-1].copy() if f else w.copy()) for at, w in windows.items() for f in (0, 1)
            }
            fitting = [key for key, one in possible.items() if float((one - image).abs().max()) < 1e-5]
            assert len(fitting) == 1
            drawn.update(fitting)
    assert len(drawn) > 35, "160 draws of 50 crops and flips"


def test_pytorch_cifar100_rotations_in_a_loader_that_a_function_returns(tmp_path):
    data = Pictures(np.full((30, 16, 16, 3), 200, np.uint8), v1.Compose([v1.RandomRotation(15), *TO_FLOAT]))

    def get_training_dataloader(batch_size, num_workers, shuffle):
        return memfeed.Loader(data, batch_size, shuffle, num_workers=num_workers, cache=tmp_path / "train.mf")

    loader = get_training_dataloader(8, 0, True)
    white, black = (v1.Compose(TO_FLOAT)(np.full((16, 16, 3), value, np.uint8)) for value in (200, 0))
    first, second = by_row(loader), by_row(loader)
    for image in first.values():
        assert bool((((image - white).abs() < 1e-5) | ((image - black).abs() < 1e-5)).all())
    assert sum(not torch.equal(first[row], second[row]) for row in first) > 15, "each epoch has its angles"


class Masked(Dataset):
    def __init__(self, rows):
        self.images = noise(rows, 12, 10)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = np.asarray(Image.fromarray(self.images[index]).resize((5, 6), Image.BICUBIC)).transpose(2, 0, 1) / 255.0
        mask = (self.images[index, ::2, ::2, 0] > 128).astype(np.int64)
        return {
            "image": torch.as_tensor(image.copy()).float().contiguous(),
            "mask": torch.as_tensor(mask.copy()).long(),
        }


def test_unet_dicts_of_images_and_masks_split_at_random(tmp_path):
    train, val = random_split(Masked(45), [35, 10], generator=torch.Generator().manual_seed(0))
    loader_args = {"batch_size": 4, "num_workers": 0}
    ours = memfeed.Loader(train, shuffle=True, **loader_args, cache=tmp_path / "train.mf")
    assert_epochs_are_the_same(ours, DataLoader(train, shuffle=True, **loader_args))
    ours = memfeed.Loader(val, drop_last=True, **loader_args, cache=tmp_path / "val.mf")
    assert_batches_are_the_same(ours, DataLoader(val, shuffle=False, drop_last=True, **loader_args))


class Views:
    def __init__(self, base):
        self.base = base

    def __call__(self, image):
        return [self.base(image) for _ in range(2)]


class Darker:
    """Draws with NumPy, and works on a PIL image, as the blur of SimCLR does."""

    def __call__(self, image):
        return Image.fromarray((np.asarray(image) * np.random.uniform(0.5, 1.0)).astype(np.uint8))


def test_simclr_two_views_of_each_image(tmp_path):
    plain = np.repeat(np.arange(80, 230, 5, dtype=np.uint8), 16 * 16 * 3).reshape(30, 16, 16, 3)
    steps = [v1.RandomResizedCrop(8), v1.RandomApply([v1.ColorJitter(0.1)], p=0.8), Darker(), v1.ToTensor()]
    data = Pictures(plain, Views(v1.Compose(steps)))
    options = {"batch_size": 8, "num_workers": 0}
    loader = memfeed.Loader(data, **options, shuffle=True, drop_last=True, cache=tmp_path / "views.mf")
    seen = []
    for _ in range(3):
        epoch = list(loader)
        assert len(epoch) == 3
        for views, rows in epoch:
            assert isinstance(views, list)
            assert [(view.dtype, view.shape) for view in views] == [(torch.float32, (8, 3, 8, 8))] * 2
            full = torch.as_tensor(plain[rows, 0, 0, 0]).float() / 255
            shares = [view[:, 0, 0, 0] / full for view in views]
            assert all(bool((share > 0.4).all() and (share < 1.15).all()) for share in shares)
            assert float((shares[0] - shares[1]).abs().max()) > 0.01, "two draws"
            seen += [tuple(view[i].numpy().tobytes() for view in views) for i in range(8)]
    assert len({*seen}) > 60, "each epoch has its views"


class Sums(Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        a, b = divmod(index, 10)
        digits = [a, b, *map(int, f"{a + b:02d}"[::-1])]
        y = torch.tensor(digits[1:], dtype=torch.long)
        y[:1] = -1
        return torch.tensor(digits[:-1], dtype=torch.long), y


def test_mingpt_draws_with_replacement_without_end(tmp_path):
    data = Sums()

    def steps(loader):
        """Take batches with `next`, as a loop over iterations does."""
        data_iter = iter(loader)
        return [next(data_iter) for _ in range(30)]

    options = {"batch_size": 16, "num_workers": 0}
    theirs = DataLoader(data, sampler=RandomSampler(data, replacement=True, num_samples=int(1e10)), **options)
    ours = memfeed.Loader(data, sampler=theirs.sampler, **options, cache=tmp_path / "train.mf")
    assert len(ours) == len(theirs) == 625_000_000
    torch.manual_seed(3)
    expected = steps(theirs)
    torch.manual_seed(3)
    found = steps(ours)
    assert_batches_are_the_same(found, expected)
    drawn = Counter(str(row.tolist()) for x, y in found for row in torch.cat([x, y], 1))
    assert sum(drawn.values()) == 480
    assert len(drawn) > 90, "each row is as likely"


class Pairs(Dataset):
    """One image, small and large, from one file."""

    def __init__(self, folder):
        self.names = sorted(folder.iterdir())
        self.small = v1.Compose([v1.CenterCrop(24), v1.Resize(8), v1.ToTensor()])
        self.large = v1.Compose([v1.CenterCrop(24), v1.ToTensor()])

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        with Image.open(self.names[index]) as opened:
            y, _, _ = opened.convert("YCbCr").split()
        return self.small(y.copy()), self.large(y)


def test_super_resolution_an_image_and_its_small_copy(tmp_path):
    (tmp_path / "images").mkdir()
    for i, pixels in enumerate(noise(21, 30, 40)):
        Image.fromarray(pixels[: 22 + i % 9]).save(tmp_path / "images" / f"{i}.png")
    data = Pairs(tmp_path / "images")
    ours = memfeed.Loader(data, 8, shuffle=True, num_workers=0, cache=tmp_path / "train.mf")
    assert_epochs_are_the_same(ours, DataLoader(data, 8, shuffle=True))


class Named(Dataset):
    """Labels from the names of files, in dicts."""

    def __init__(self, names, pictures, transform):
        self.names, self.pictures, self.image_transform = names, pictures, transform
        self.label_to_id = {"ant": 0, "bee": 1}

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        image = self.image_transform(Image.fromarray(self.pictures[index]))
        return {"image": image, "label": self.label_to_id[self.names[index].split("_")[0]]}


def test_accelerate_cv_dicts_through_prepare(tmp_path):
    accelerate = pytest.importorskip("accelerate", reason="the loop needs accelerate, of the extra 'trainers'")
    names = [f"{('ant', 'bee')[i % 3 == 0]}_{i}.jpg" for i in range(30)]
    data = Named(names, noise(30, 20, 24), v1.Compose([v1.Resize((12, 12)), v1.ToTensor()]))
    accelerator = accelerate.Accelerator(cpu=True)
    ours = accelerator.prepare(memfeed.Loader(data, 8, shuffle=True, num_workers=0, cache=tmp_path / "train.mf"))
    theirs = accelerator.prepare(DataLoader(data, 8, shuffle=True))
    assert_epochs_are_the_same(ours, theirs)


class Halves(Dataset):
    """Two halves of one image; the flip is left to the loader, as the patch of pix2pix does."""

    def __init__(self, pictures):
        self.pictures = pictures
        self.transform = v1.Compose([v1.Resize((8, 8), Image.BICUBIC), v1.ToTensor(), v1.Normalize(0.5, 0.5)])

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, index):
        image = Image.fromarray(self.pictures[index])
        width, height = image.size
        a, b = image.crop((0, 0, width // 2, height)), image.crop((width // 2, 0, width, height))
        return {"A": self.transform(a), "B": self.transform(b)}


def test_pix2pix_one_flip_for_both_halves(tmp_path):
    left = noise(30, 8, 8)
    data = Halves(np.concatenate([left, 255 - left], 2))
    flip = memfeed.transforms.RandomHorizontalFlip(on=["A", "B"])
    loader = memfeed.Loader(data, 8, shuffle=True, transform=flip, cache=tmp_path / "train.mf")
    plain = {data[i]["A"].numpy().tobytes(): i for i in range(30)}
    mirrored = {data[i]["A"].flip(-1).contiguous().numpy().tobytes(): i for i in range(30)}
    flips, rows = 0, Counter()
    for _ in range(3):
        for batch in loader:
            torch.testing.assert_close(batch["A"], -batch["B"], rtol=0, atol=1e-6)
            keys = [image.numpy().tobytes() for image in batch["A"]]
            flips += sum(key in mirrored for key in keys)
            rows.update(plain.get(key, mirrored.get(key)) for key in keys)
    assert rows == dict.fromkeys(range(30), 3)
    assert 25 < flips < 65


class Captions(Dataset):
    def __init__(self, transform):
        self.pictures, self.transform = noise(25, 16, 16), transform
        self.captions = [f"<start> {'word ' * (i % 5 + 1)}{i} <end>" for i in range(25)]
        self.words = {word: i for i, word in enumerate(sorted({w for c in self.captions for w in c.split()}))}

    def __len__(self):
        return len(self.captions)

    def __getitem__(self, index):
        caption = [self.words[word] for word in self.captions[index].split()]
        return self.transform(Image.fromarray(self.pictures[index])), torch.Tensor(caption)


def pad_captions(data):
    """Sort by length, stack the images, pad the captions."""
    data.sort(key=lambda pair: len(pair[1]), reverse=True)
    images, captions = zip(*data, strict=True)
    lengths = [len(caption) for caption in captions]
    targets = torch.zeros(len(captions), max(lengths)).long()
    for i, caption in enumerate(captions):
        targets[i, : lengths[i]] = caption
    return torch.stack(images, 0), targets, lengths


def test_image_captioning_a_collate_fn_that_pads(tmp_path):
    data = Captions(v1.Compose([v1.CenterCrop(12), *TO_FLOAT]))
    options = {"shuffle": False, "num_workers": 0, "collate_fn": pad_captions}
    ours, theirs = memfeed.Loader(data, 8, **options, cache=tmp_path / "fixed.mf"), DataLoader(data, 8, **options)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one[:2], other[:2], rtol=0, atol=0)
        assert one[2] == other[2]
    cropped = Captions(v1.Compose([v1.RandomCrop(12), v1.RandomHorizontalFlip(), *TO_FLOAT]))
    loader = memfeed.Loader(cropped, 8, **{**options, "shuffle": True}, cache=tmp_path / "cropped.mf")
    expected = Counter(str(cropped[i][1].long().tolist()) for i in range(25))
    for _ in range(2):
        batches = list(loader)
        assert all(list(lengths) == sorted(lengths, reverse=True) for _, _, lengths in batches)
        assert all(images.shape[1:] == (3, 12, 12) and images.dtype is torch.float32 for images, _, _ in batches)
        found = (row[:n] for _, targets, lengths in batches for row, n in zip(targets, lengths, strict=True))
        assert Counter(str(row.tolist()) for row in found) == expected
