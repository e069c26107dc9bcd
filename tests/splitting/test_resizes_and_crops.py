"""Counterparts of crops that pad, which show every place as often, and of PIL images that are resized."""

import importlib

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import v2

from memfeed.random import Keys
from memfeed.splitting import counterparts
from memfeed.splitting.counterparts import counterpart
from memfeed.splitting.step_values import Value
from memfeed.transforms import Resize
from memfeed.transforms.from_recipe import make_transform

DRAWS = 2000


def counterpart_of(step, *images):
    return counterpart(step, [Value(images, {})], [(str(at),) for at in range(len(images))])


def places(height, width):
    """Return an image whose pixels say where they are; none of them is 0."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack([rows + 1, columns + 1, rows + columns + 1]).to(torch.uint8)


@pytest.mark.parametrize(
    ("size", "options"),
    [
        ((5, 4), {}),
        ((9, 8), {"padding": 2}),
        ((9, 8), {"padding": [2]}),
        ((8, 15), {"padding": [5, 1]}),
        ((16, 9), {"padding": (1, 2, 3, 7), "fill": 200}),
        ((9, 9), {"pad_if_needed": True}),
        ((16, 7), {"padding": [0, 3, 2, 1], "pad_if_needed": True, "fill": (9, 8, 7)}),
    ],
    ids=str,
)
@pytest.mark.parametrize("library", [v1, v2], ids=["v1", "v2"])
def test_crops_that_pad_show_every_place_as_often(library, size, options):
    step, image = library.RandomCrop(size, **options), places(7, 6)
    given = v2.functional.to_pil_image(image)
    (recipe,) = counterpart_of(step, given)
    ours = make_transform(recipe).apply({"0": image.expand(DRAWS, -1, -1, -1)}, Keys(0, 0, torch.arange(DRAWS)))["0"]
    torch.manual_seed(0)
    theirs = torch.stack([v2.functional.pil_to_tensor(step(given)) for _ in range(DRAWS)])
    _, which = torch.cat([ours, theirs]).flatten(1).unique(dim=0, return_inverse=True)
    counts = np.stack([torch.bincount(part, minlength=int(which.max()) + 1).numpy() for part in which.split(DRAWS)])
    assert counts.min() > 0, "both show the same places, each of them"
    assert stats.chi2_contingency(counts).pvalue > 1e-4 if counts.shape[1] > 1 else "padding" not in options


@pytest.mark.parametrize(
    ("fill", "has_mask", "found"),
    [
        (7, False, True),
        (7, True, False),  # v2 fills masks too
        (0, True, True),
        ({tv_tensors.Image: 7, tv_tensors.Mask: 0}, True, True),
        ({tv_tensors.Image: 7, "others": 0}, True, True),
        ({tv_tensors.Mask: 0, tv_tensors.Image: 7}, True, False),
        ({"others": 7}, False, True),
    ],
    ids=str,
)
def test_fills_of_images_and_masks(fill, has_mask, found):
    """Of 8 rows and columns, few draws show the one of padding: the fills are compared, and not what is drawn alone."""
    images = [tv_tensors.Image(places(60, 60)), tv_tensors.Mask(places(60, 60)[0])][: 1 + has_mask]
    made = counterpart_of(v2.RandomCrop(8, padding=1, fill=fill), *images)
    assert (made is not None) == found
    assert not found or made[0].arguments["fill"] == (0 if fill == 0 else 7)


def noise(height, width):
    return Image.fromarray(np.random.RandomState(0).randint(0, 256, (height, width, 3)).astype(np.uint8))


RESIZES = [
    v1.RandomResizedCrop(56, (1.0, 1.0), (1.0, 1.0)),
    v2.RandomResizedCrop(56, (1.0, 1.0), (1.0, 1.0)),
    v1.Resize((56, 56)),
    v2.Resize((56, 56)),
]


@pytest.fixture
def bytes_as_bytes(monkeypatch):
    """torchvision 0.21 resizes bytes as floats where the CPU's capability is not called AVX2."""
    geometry = importlib.import_module("torchvision.transforms.v2.functional._geometry")
    if hasattr(geometry, "_do_native_uint8_resize_on_cpu"):
        monkeypatch.setattr(geometry, "_do_native_uint8_resize_on_cpu", lambda mode: True)


@pytest.mark.usefixtures("bytes_as_bytes")
@pytest.mark.parametrize("step", RESIZES, ids=["v1 crop", "v2 crop", "v1", "v2"])
@pytest.mark.parametrize("size", [(58, 58), (232, 58), (40, 90)])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_resized_pil_images_have_counterparts(step, size, mode, monkeypatch):
    """Pillow rounds in another way, and resizes some images rows first: pixels of noise differ by two levels."""
    monkeypatch.setattr(step, "interpolation", v2.InterpolationMode(mode))
    (recipe,) = counterpart_of(step, noise(*size))
    assert recipe.name == type(step).__name__
    pillow = torch.from_numpy(np.array(noise(*size).resize((56, 56), Image.Resampling[mode.upper()]))).permute(2, 0, 1)
    pixels = torch.from_numpy(np.array(noise(*size))).permute(2, 0, 1)[None]
    levels = (Resize((56, 56), mode).apply({"0": pixels}, Keys(0, 0, torch.arange(1)))["0"][0].double() - pillow).abs()
    assert levels.max() <= 2 or mode == "bicubic"
    assert levels.mean() < 0.45
    assert levels.max() == 2 or (size, mode) != ((58, 58), "bilinear"), "one level is not enough"


@pytest.mark.parametrize("step", RESIZES, ids=["v1 crop", "v2 crop", "v1", "v2"])
@pytest.mark.parametrize("wrong", ["nearby", "brighter", "without antialias", "bicubic", "a pixel"])
def test_other_resizes_are_refused(step, wrong, monkeypatch):
    def apply(self, batch, keys):
        image = batch["0"]
        if wrong == "without antialias":
            image = torch.nn.functional.interpolate(image, (56, 56), mode="bilinear")
        elif wrong == "bicubic":
            image = torch.nn.functional.interpolate(image, (56, 56), mode="bicubic", antialias=True)
        elif wrong == "a pixel":
            image = original(self, batch, keys)["0"]
            image[..., -1, -1] ^= 16
        else:
            image = original(self, batch, keys)["0"]
            image = image.roll(1, -1) if wrong == "nearby" else image.clamp(max=253) + 2
        return {"0": image}

    smooth = noise(9, 9).resize((120, 120), Image.Resampling.BICUBIC)
    assert counterpart_of(step, smooth)
    original = counterparts.Transform.apply
    monkeypatch.setattr(counterparts.Transform, "apply", apply)
    assert counterpart_of(step, smooth) is None


@pytest.mark.parametrize("library", [v1, v2], ids=["v1", "v2"])
def test_what_pillow_resizes_in_another_way_is_refused(library, monkeypatch):
    """A tensor is resized alike: so a look at that alone would not do."""
    functions = importlib.import_module(f"{library.__name__}.functional")
    original = functions.resized_crop

    def resized_crop(image, *arguments, **options):
        result = original(image, *arguments, **options)
        return result.point(lambda level: level + 1) if isinstance(image, Image.Image) else result

    step = library.RandomResizedCrop(56)
    assert counterpart_of(step, noise(58, 90))
    monkeypatch.setattr(functions, "resized_crop", resized_crop)
    assert counterpart_of(step, noise(58, 90)) is None


def test_the_nearest_pixel_is_no_matter_of_rounding():
    """Pillow takes the pixel at the middle of each new one, torch the first: here one column of 20 is another."""
    edge = Image.fromarray(np.tile(np.where(np.arange(120) < 80, 9, 14).astype(np.uint8), (120, 1)))
    step = v2.Resize((20, 20), v2.InterpolationMode.NEAREST)
    assert counterpart_of(step, v2.functional.pil_to_tensor(edge))
    assert counterpart_of(step, edge) is None
