"""Compiled loops against torch: the same bytes and the same floats, whichever of them runs."""

import sys

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from image_batches import keys, photos, pictures

import memfeed
from forked_programs import run_program
from memfeed import Loader
from memfeed.random import Keys
from memfeed.system.compiled import Loops
from memfeed.transforms import (
    CenterCrop,
    ColorJitter,
    Compose,
    Normalize,
    RandomAffine,
    RandomCrop,
    RandomErasing,
    RandomGrayscale,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomRotation,
    RandomVerticalFlip,
    Resampled,
    Resize,
    ToDtype,
    Window,
)
from memfeed.transforms.backends import compiled_passes
from memfeed.transforms.backends.passes import fused
from memfeed.transforms.params.value_changes import Affine
from resample_cases import LAYOUTS, affines, batches, integers, resized, windows

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
RECIPE = Compose([RandomResizedCrop(24), RandomHorizontalFlip(), Normalize(MEAN, STD)])


@pytest.fixture(scope="module")
def loops():
    """Loops of this module's own: those of the process stay as they were."""
    pytest.importorskip("numba")
    made = Loops("memfeed.transforms.backends.loops")
    assert made.wait() is not None
    return made


@pytest.fixture
def heads(loops, monkeypatch):
    """Use compiled loops. Return a list of how many changes they did in each pass."""
    found = []

    def noted(*arguments):
        head = compiled_passes.head_of(*arguments)
        found.append(None if head is None else head.length)
        return head

    monkeypatch.setattr(compiled_passes, "LOOPS", loops)
    monkeypatch.setattr("memfeed.transforms.backends.passes.head_of", noted)
    return found


def by_torch(function):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_passes, "LOOPS", Loops("none", after=1 << 60))
        return function()


def padded_windows(draw, shape):
    n, _, h, w = shape
    height, width = draw(st.integers(1, h + 9)), draw(st.integers(1, w + 9))
    top = integers(draw, [-9] * n, [max(-9, h - height + 9)] * n)
    left = integers(draw, [-9] * n, [max(-9, w - width + 9)] * n)
    hflip, vflip = (integers(draw, [0] * n, [1] * n).astype(bool) for _ in range(2))
    return Window(top, left, height, width, hflip, vflip, draw(st.sampled_from([0, 7, 300.5])))


@st.composite
def cases(draw):
    """Images of bytes; a resize, a window, both or neither; an Affine and a layout."""
    image = draw(batches(60, (torch.uint8,), least=1))
    if draw(st.booleans()):
        sampled = draw(resized(image.shape, 60))
        window = draw(windows(image.shape, sampled.height, sampled.width))
        changes = [sampled] if window is None else [sampled, window]
    else:
        changes = [padded_windows(draw, image.shape)] if draw(st.booleans()) else []
    return image, changes, draw(affines(image.shape[1])), draw(st.sampled_from(LAYOUTS))


@settings(max_examples=150)
@given(case=cases())
def test_a_pass_gives_the_values_of_torch(loops, case):
    image, changes, affine, layout = case
    expected = by_torch(lambda: fused(image, changes, affine, layout))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_passes, "LOOPS", loops)
        found = fused(image, changes, affine, layout)
    assert found.dtype == expected.dtype
    assert found.stride() == expected.stride()
    assert torch.equal(found, expected)


@settings(max_examples=60)
@given(size=st.integers(1, 900), out=st.integers(16, 400), mode=st.sampled_from(["bilinear", "bicubic"]))
@example(size=512, out=16, mode="bicubic")
def test_weights_of_any_scale(loops, size, out, mode):
    """Each column of every output shows noise: a weight that is off by one would change some byte."""
    image = photos(1, 3, 40, max(size, 16))
    box = [np.array([number]) for number in (0, 0, 40, size)]
    sampled = [Resampled(*box, 40, out, mode), Resampled(*[box[i] for i in (1, 0, 3, 2)], out, 40, mode)]
    for change, given_image in zip(sampled, (image, image.mT.contiguous()), strict=True):
        expected = by_torch(lambda change=change, given_image=given_image: fused(given_image, [change], None))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compiled_passes, "LOOPS", loops)
            assert torch.equal(fused(given_image, [change], None), expected)


def test_a_resized_crop_is_torchvisions(heads, functional):
    images = photos(8, 3, 256, 256)
    transform = RandomResizedCrop(224)
    drawn = transform.params(range(8), shape=(3, 256, 256), dtype=torch.uint8)["RandomResizedCrop.0"]
    places = zip(images, drawn.top, drawn.left, drawn.box_height, drawn.box_width, strict=True)
    expected = [functional.resized_crop(i, *map(int, place), [224, 224], antialias=True) for i, *place in places]
    assert torch.equal(transform.apply(images, keys(8)), torch.stack(expected))
    assert heads == [1]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("transforms", "length"),
    [
        ([RandomResizedCrop(24), RandomHorizontalFlip(), RandomVerticalFlip(), Normalize(MEAN, STD)], 2),
        ([RandomResizedCrop(24, interpolation="bicubic"), Normalize(MEAN, STD), ToDtype(torch.float16)], 1),
        ([Resize(32), CenterCrop(24), ToDtype(torch.bfloat16, scale=True)], 2),
        ([RandomCrop(32, padding=4), RandomHorizontalFlip(), Normalize(MEAN, STD)], 1),
        ([RandomHorizontalFlip(), ToDtype(torch.float32)], 1),
        ([CenterCrop((45, 30)), RandomHorizontalFlip(), Normalize(MEAN, STD)], 1),
        ([Resize(32), CenterCrop((37, 24)), Normalize(MEAN, STD)], 1),
        ([RandomResizedCrop(24), RandomHorizontalFlip(), ColorJitter(0.4, 0.4, 0.4), Normalize(MEAN, STD)], 2),
        ([RandomCrop(24), RandomErasing(1.0)], 1),
        ([Resize(32), RandomCrop(40, padding=8, fill=9), Normalize(MEAN, STD)], 1),
        ([Normalize(MEAN, STD)], 0),
        ([ToDtype(torch.float64, scale=True)], 0),
        ([ColorJitter(0.4), RandomCrop(24)], None),
        ([RandomResizedCrop(24, interpolation="nearest")], None),
        ([RandomResizedCrop(24, antialias=False)], None),
        ([RandomResizedCrop(8)], None),
    ],
    ids=str,
)
def test_pipelines(heads, transforms, length, layout):
    transform, images = Compose(transforms, memory_format=layout), pictures(20, 3, 40, 36)
    expected = by_torch(lambda: transform.apply(images, keys(20)))
    heads.clear()
    found = transform.apply(images, keys(20))
    assert heads == [length]
    assert found.stride() == expected.stride()
    assert torch.equal(found, expected)


def test_images_of_several_sizes(heads):
    images = [photos(1, 3, 20 + 3 * i, 50 - 5 * i)[0] for i in range(4)] * 2
    expected = by_torch(lambda: RECIPE.apply(images, keys(8)))
    heads.clear()
    assert torch.equal(RECIPE.apply(images, keys(8)), expected)
    assert heads == [2]


def test_a_loader_reads_rows_of_the_map(heads, tmp_path):
    images = photos(40, 3, 80, 72)
    store = memfeed.cache({"image": images}, tmp_path / "s.mf", progress=False)
    options = {"shuffle": True, "seed": 0, "transform": RECIPE}
    expected = by_torch(lambda: [batch["image"] for batch in Loader(store, 16, **options)])
    for batch, wanted in zip(Loader(store, 16, **options), expected, strict=True):
        assert torch.equal(batch["image"], wanted)
    assert heads.count(2) >= 3  # a loader may begin the next epoch


@pytest.fixture
def turns(monkeypatch):
    """Use compiled loops of one image. Return the names of those that were called."""
    pytest.importorskip("numba")
    loops = Loops("memfeed.transforms.backends.color_loops").wait()
    found = []

    class Noted:
        def get(self, work=0):
            return self

        def __getattr__(self, name):
            if name in ("recolor", "turn"):
                found.append(name)
            return getattr(loops, name)

    monkeypatch.setattr(compiled_passes, "COLOR_LOOPS", Noted())
    return found


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    image=batches(40, (torch.uint8,), least=1).filter(lambda image: image.shape[1] in (1, 3)),
    seed=st.integers(0, 1000),
    fill=st.sampled_from([0, 7]),
)
def test_colours_and_turns_are_those_of_torch(turns, image, seed, fill):
    for transform in (
        ColorJitter(0.9, 0.9, 0.9, 0.5),
        ColorJitter(hue=(0.49, 0.5)),
        RandomGrayscale(0.5),
        RandomRotation(180, fill=fill),
        RandomAffine(180, (0.5, 0.5), (1e-6, 3), (-40, 40, -40, 40), fill=fill),
    ):
        transform, some = Compose([transform]), Keys(seed, 0, torch.arange(len(image)))
        assert torch.equal(transform.apply(image, some), transform.reference(image, some)), transform


@pytest.mark.parametrize(
    ("transform", "images", "names"),
    [
        (ColorJitter(0.4, 0.4, 0.4, 0.1), photos(2, 3, 257, 256), {"recolor"}),
        (ColorJitter(contrast=0.4), photos(2, 3, 257, 257), set()),  # torch's sum of so many bytes is rounded
        (ColorJitter(0.4), photos(2, 1, 40, 40), set()),
        (RandomGrayscale(1.0), photos(2, 3, 40, 40), {"recolor"}),
        (RandomRotation(30), photos(2, 4, 40, 40)[..., ::2], {"turn"}),
        (RandomRotation(30, interpolation="bilinear"), photos(2, 3, 40, 40), set()),
        (RandomRotation(30), photos(2, 3, 40, 40, torch.float32), set()),
    ],
    ids=str,
)
def test_which_images_are_recoloured_and_turned_by_loops(turns, transform, images, names):
    images = images if images.size(0) == 2 else images[None]
    expected = transform.reference(images, keys(2))
    turns.clear()
    found = Compose([transform]).apply(images, keys(2))
    assert {*turns} == names
    if images.dtype is torch.uint8:
        assert torch.equal(found, expected)


def test_boxes_beyond_the_image_are_left_to_torch(heads):
    images = photos(1, 3, 40, 40)
    box = [np.array([number]) for number in (30, 0, 40, 40)]
    fused(images, [Resampled(*box, 24, 24)], None)
    assert heads == [None]


def test_other_bytes_are_left_to_torch(heads):
    box = [np.array([number]) for number in (0, 0, 20, 20)]
    for images in (
        photos(1, 3, 40, 40, torch.int16),
        photos(1, 3, 40, 80)[..., ::2],
        photos(1, 3, 40, 40).contiguous(memory_format=torch.channels_last),
        photos(1, 5, 40, 40),
        photos(1, 3, 40, 15)[:, :, :20],
    ):
        fused(images, [Resampled(*(np.minimum(one, images.shape[-1]) for one in box), 24, 24)], None)
    assert heads == [None] * 5


def test_an_affine_that_no_loop_computes_as_torch_does_is_left_to_torch(heads, monkeypatch):
    monkeypatch.setattr(compiled_passes, "scale_and_shift", lambda *_: None)  # its output is not what the loops give
    compiled_passes._constants.cache_clear()
    assert compiled_passes._constants(Affine(torch.float32, (0.3,), (0.1,)), 1) is None
    compiled_passes._constants.cache_clear()


def test_no_byte_outside_of_the_image_is_read(loops, tmp_path):
    """The image ends where its memory ends; and begins where it begins."""
    code = """
import ctypes, mmap, sys
import numpy as np, torch
from memfeed.transforms import Compose, Normalize, RandomHorizontalFlip, RandomResizedCrop, Resize
from memfeed.transforms.backends import compiled_passes
from memfeed.random import Keys
page = mmap.PAGESIZE
memory = mmap.mmap(-1, 3 * page)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
protect = ctypes.CDLL(None, use_errno=True).mprotect
protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
for first in (0, 2):
    assert protect(address + first * page, page, 0) == 0
images = torch.frombuffer(memory, dtype=torch.uint8)[page : 2 * page]
compiled_passes.LOOPS.wait()
for c, h, w in ((1, page // 16, 16), (4, 32, 32), (1, 64, 64)):
    rows = images.view(-1, c, h, w)
    for transform in (Resize((31, 33)), RandomResizedCrop(20), RandomHorizontalFlip(1.0)):
        Compose([transform, Normalize([0.5] * c, [0.5] * c)]).apply(rows, Keys(0, 0, torch.arange(len(rows))))
print("done")
"""
    assert run_program(code, at=tmp_path) == "done\n"


def test_without_numba_the_values_are_the_same(monkeypatch):
    """Beside the tests above, which compare both where numba is installed."""
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.setattr(compiled_passes, "LOOPS", Loops("memfeed.transforms.backends.loops"))
    images = photos(4, 3, 40, 40)
    assert compiled_passes.LOOPS.wait() is None
    torch.testing.assert_close(RECIPE.apply(images, keys(4)), RECIPE.reference(images, keys(4)), rtol=0, atol=2e-6)
