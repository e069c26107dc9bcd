"""Rotations, affine maps, colours and erased boxes: same values for same parameters, and same distributions."""

import numpy as np
import pytest
import torch
from scipy import stats
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode, v2

import memfeed
from memfeed.transforms import PerSample
from short_form import short_form

SIDE, COUNT = 32, 300
NEAREST, BILINEAR = InterpolationMode.NEAREST, InterpolationMode.BILINEAR


def noise(index, side=SIDE, dtype=torch.uint8):
    pixels = torch.from_numpy(np.random.RandomState(index).randint(0, 256, (3, side, side), np.uint8))
    return pixels if dtype == torch.uint8 else pixels / 255


class Tensors(torch.utils.data.Dataset):
    """(image, index): a tensor through ``transform``."""

    def __init__(self, transform, make=noise, count=COUNT):
        self.transform, self.make, self.count = transform, make, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.transform(self.make(index)), index


class Pairs(Tensors):
    """(image, mask)."""

    def __getitem__(self, index):
        return self.transform(tv_tensors.Image(noise(index)), tv_tensors.Mask(noise(index)[0] // 64))


def converted(dataset, path, **options):
    return memfeed.cache(dataset, path / "s.mf", split=True, workers=0, progress=False, **options)


WARPS = {
    "rotation": lambda mode: v2.RandomRotation(40, mode, fill=9.0 if mode is NEAREST else None),
    "rotation about a corner": lambda mode: v2.RandomRotation((10, 80), mode, center=(0, 0), fill=None),
    "moves": lambda mode: v2.RandomAffine(0, translate=(0.2, 0.4), interpolation=mode),
    "shears": lambda mode: v2.RandomAffine(20, (0.2, 0.1), (0.7, 1.5), (-20, 20, -10, 30), mode, fill=None),
    "all": lambda mode: v2.RandomAffine((5, 60), (0.2, 0.1), (0.7, 1.5), 15, mode, fill=None, center=(3, 20)),
}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("mode", [NEAREST, BILINEAR])
@pytest.mark.parametrize("name", WARPS)
def test_warps_have_counterparts(name, mode, dtype, tmp_path):
    """The split compares the values itself, with the parameters that were drawn: else it is PerSample."""
    step = WARPS[name](mode)
    store = converted(Tensors(step, lambda i: noise(i, dtype=dtype), 8), tmp_path)
    assert [type(one).__name__ for one in store.transform.transforms] == [type(step).__name__]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("mode", [NEAREST, BILINEAR])
@pytest.mark.parametrize("angle", short_form([17, -130]))
def test_one_angle_gives_the_values_of_torchvision(angle, mode, dtype, tmp_path):
    """Without randomness: all drawn values are the same."""
    steps = (
        v2.RandomRotation((angle, angle), mode, fill=None),
        v2.RandomAffine((angle, angle), scale=(1.3, 1.3), shear=(5, 5, 12, 12), interpolation=mode, fill=None),
    )
    for number, step in enumerate(steps):
        dataset = Tensors(step, lambda i: noise(i, dtype=dtype), 8)
        store = memfeed.cache(dataset, tmp_path / f"{number}.mf", split=True, workers=0, progress=False)
        assert not isinstance(store.transform.transforms[0], PerSample)
        images, _ = next(iter(memfeed.Loader(store, 8)))
        for index, image in enumerate(images):
            far = (image.double() - dataset[index][0].double()).abs() > (1 if dtype == torch.uint8 else 1e-4)
            assert far.double().mean() <= 1e-3


def test_masks_are_warped_with_their_images(tmp_path):
    store = converted(
        Pairs(v2.RandomAffine(30, scale=(0.5, 1.5), interpolation=BILINEAR, fill=None), count=8), tmp_path
    )
    assert [type(one).__name__ for one in store.transform.transforms] == ["RandomAffine"]
    _, masks = next(iter(memfeed.Loader(store, 8)))
    assert set(masks.unique().tolist()) == {0, 1, 2, 3}


def test_warps_with_other_values_stay_as_they_are_and_the_split_says_so(tmp_path, capsys):
    masks_filled = v2.RandomRotation(40, fill=200)  # memfeed fills masks with 0
    store = memfeed.cache(Pairs(masks_filled, count=8), tmp_path / "m.mf", split=True, workers=0)
    assert isinstance(store.transform.transforms[0], PerSample)
    assert "sample by sample in one process, as they are: RandomRotation" in capsys.readouterr().err
    others = [
        (v2.RandomRotation(40, BILINEAR), noise),  # torchvision blends the edges with fill=0 twice
        (v2.RandomAffine(9, interpolation=BILINEAR), to_pil),  # Pillow samples in another way
    ]
    for number, (step, make) in enumerate(others):
        store = memfeed.cache(
            Tensors(v2.Compose([step, v2.ToImage()]), make, 8), tmp_path / f"{number}.mf", split=True, workers=0
        )
        assert isinstance(store.transform.transforms[0], PerSample)
        assert f"as they are: {type(step).__name__}" in capsys.readouterr().err


def to_pil(index):
    return v2.functional.to_pil_image(noise(index))


# --- distributions


def plain(index):
    """Return an image of three colours, whose factors can be read from its pixels."""
    image = torch.full((3, SIDE, SIDE), 100, dtype=torch.uint8)
    image[0, :, : SIDE // 2], image[2, : SIDE // 2] = 140, 60
    return image


def levels(image):
    return [float(value) for value in image[:, ::20, ::20].flatten()]


def box(image):
    """Return top, left, height and width of the erased box; zeros if there is none."""
    rows, columns = ((image[0] == 7).any(axis).nonzero().flatten().tolist() for axis in (1, 0))
    return [rows[0], columns[0], len(rows), len(columns)] if rows else [0, 0, 0, 0]


def corners(image):
    """Return where a warped ramp of columns and rows has its corners."""
    return [float(image[c, y, x]) for c in (0, 1) for y in (4, -5) for x in (4, -5)]


def ramp(index):
    rows, columns = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    return torch.stack([columns, rows, rows]).float() / SIDE + 1


DISTRIBUTIONS = {
    "brightness": (v2.ColorJitter(brightness=0.5), plain, levels),
    "contrast": (v2.ColorJitter(contrast=(0.5, 1.2)), plain, levels),
    "saturation": (v2.ColorJitter(saturation=0.7), plain, levels),
    "hue": (v2.ColorJitter(hue=(-0.1, 0.3)), plain, levels),
    "order": (v2.ColorJitter(0.4, 0.4, 0.4, 0.1), plain, levels),
    "erasing": (v2.RandomErasing(0.6, value=7), plain, box),
    "a large box": (v2.RandomErasing(1.0, scale=(0.3, 0.9), ratio=(0.2, 5.0), value=7), plain, box),
    "rotation": (v2.RandomRotation((-20, 60), BILINEAR, fill=None), ramp, corners),
    "affine": (v2.RandomAffine(30, (0.1, 0.3), (0.8, 1.1), (0, 20), BILINEAR, fill=None), ramp, corners),
}


@pytest.mark.parametrize("name", short_form(DISTRIBUTIONS, 5))
def test_parameters_have_the_distribution_of_the_original(name, tmp_path):
    step, make, observed = DISTRIBUTIONS[name]
    dataset = Tensors(step, make)
    store = converted(dataset, tmp_path)
    assert [type(one) for one in store.transform.transforms] != [PerSample]
    torch.manual_seed(0)
    theirs = np.array([observed(dataset[i][0]) for i in range(COUNT)])
    images, _ = next(iter(memfeed.Loader(store, COUNT, seed=0)))
    ours = np.array([observed(image) for image in images])
    assert len(np.unique(theirs, axis=0)) > 20, "the pixels show what was drawn"
    for column in range(ours.shape[1]):
        assert stats.ks_2samp(np.round(ours[:, column], 4), np.round(theirs[:, column], 4)).pvalue > 1e-4
    # what goes together: the differences of the values
    for left, right in zip(range(ours.shape[1] - 1), range(1, ours.shape[1]), strict=True):
        spans = [np.round(values[:, right] - values[:, left], 4) for values in (ours, theirs)]
        assert stats.ks_2samp(*spans).pvalue > 1e-4
