"""Images whose channels lie together or apart, with OpenCV and without, on one thread and on several."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from image_batches import keys, params, pictures

from memfeed import transforms as T
from memfeed.system.share import Threads
from memfeed.transforms.params import pixels
from memfeed.transforms.params.pixels import box_pixels, copy_image, has_pixels, to_pixels, to_planes

LAYOUTS = {
    "planes": lambda image: image,
    "pixels": lambda image: image[None].contiguous(memory_format=torch.channels_last)[0],
    "window of planes": lambda image: torch.nn.functional.pad(image, (2, 1, 1, 3))[:, 1:-3, 2:-1],
    "window of pixels": lambda image: LAYOUTS["pixels"](torch.nn.functional.pad(image, (2, 1, 1, 3)))[:, 1:-3, 2:-1],
    "pixels of four bytes": lambda image: LAYOUTS["pixels"](torch.nn.functional.pad(image, (0, 0, 0, 0, 0, 1)))[:-1],
    "last bytes of pixels": lambda image: LAYOUTS["pixels"](torch.nn.functional.pad(image, (0, 0, 0, 0, 1, 0)))[1:],
    "turned": lambda image: image.mT.contiguous().mT,
}


@pytest.fixture(params=["OpenCV", "torch"])
def mover(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(pixels, "_opencv", lambda: None)
    else:
        pytest.importorskip("cv2")


def test_opencv_is_imported_by_one_thread_at_a_time(monkeypatch):
    importing, together, both_ask = threading.Lock(), [], threading.Barrier(2)

    def import_module(name):
        together.append(not importing.acquire(blocking=False))
        time.sleep(0.05)  # a thread that does not wait asks meanwhile
        if not together[-1]:
            importing.release()
        return name

    def ask():
        both_ask.wait()
        return pixels._opencv()

    monkeypatch.setattr(pixels, "import_module", import_module)
    pixels._opencv.cache_clear()
    try:
        with ThreadPoolExecutor(2) as threads:
            assert [one.result() for one in [threads.submit(ask), threads.submit(ask)]] == ["cv2", "cv2"]
        assert not any(together)
    finally:
        pixels._opencv.cache_clear()


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_moved_pixels_keep_their_values(mover, layout, channels):
    plain = pictures(1, channels, 9, 7)[0]
    image = LAYOUTS[layout](plain)
    assert torch.equal(image, plain)
    if channels < 5:
        assert torch.equal(to_pixels(image).permute(2, 0, 1), plain)
    is_whole = "bytes" not in layout or (layout == "pixels of four bytes" and channels == 3)
    assert has_pixels(image) == ("pixels" in layout and is_whole and 1 < channels < 5)
    if has_pixels(image):
        assert torch.equal(to_planes(image), plain)
    for target_layout in LAYOUTS.values():
        for dtype in (torch.uint8, torch.float32):
            target = target_layout(torch.zeros(channels, 9, 7, dtype=dtype))
            copy_image(image, target)
            assert torch.equal(target, plain.to(dtype))


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("layout", ["planes", "pixels"])
@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_resized_crops_are_torchvisions_in_every_layout(functional, mover, memory_format, channels, layout, mode):
    from torchvision.transforms import InterpolationMode

    images = pictures(6, channels, 40, 33)
    crop = T.RandomResizedCrop((16, 24), interpolation=mode)
    drawn = params(crop, images)
    places = zip(images, drawn.top, drawn.left, drawn.box_height, drawn.box_width, strict=True)
    options = {"size": [16, 24], "interpolation": InterpolationMode(mode), "antialias": True}
    resized_crop = partial(functional.resized_crop, **options)
    expected = torch.stack([resized_crop(image, *map(int, box)) for image, *box in places])
    given = images if layout == "planes" else images.contiguous(memory_format=torch.channels_last)
    found = T.Compose([crop], memory_format=memory_format).apply(given, keys())
    assert torch.equal(found, expected)
    assert found.is_contiguous(memory_format=memory_format)
    flip, normalize = T.RandomHorizontalFlip(p=1), T.Normalize([0.5] * channels, [0.2] * channels)
    found = T.Compose([crop, flip, normalize], memory_format=memory_format).apply(given, keys())
    torch.testing.assert_close(found, (expected.flip(-1) / 255 - 0.5) / 0.2, rtol=0, atol=2e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_boxes_of_pixels_hold_the_pixels_of_the_box(mover, layout):
    for channels, height, width in ((3, 9, 7), (4, 9, 7), (3, 520, 512)):  # the last is larger than the memory for it
        plain = pictures(1, channels, height, width)[0]
        for top, left, h, w in ((0, 0, height, width), (2, 3, height - 2, width - 3), (1, 0, 3, 2)):
            found = box_pixels(LAYOUTS[layout](plain), top, left, h, w)
            assert torch.equal(found[0, :channels], plain[:, top : top + h, left : left + w])
            assert found.stride(1) == 1


@pytest.mark.parametrize("in_inference_first", [False, True])
def test_memory_of_a_thread_serves_inference_mode_and_others(in_inference_first):
    images, crop = pictures(2, 3, 20, 20), T.RandomResizedCrop(8)

    def both():
        found = []
        for mode in (in_inference_first, not in_inference_first):
            with torch.inference_mode(mode):
                found.append(crop.apply(images, keys(2)).clone())
        return found

    with ThreadPoolExecutor(1) as thread:  # a thread that has no memory yet
        one, other = thread.submit(both).result()
    assert torch.equal(one, other)


AUGMENT = {
    "crop": [T.RandomCrop(20), T.RandomHorizontalFlip(), T.Normalize([0.5] * 3, [0.2] * 3)],
    "resized crop": [T.RandomResizedCrop(20), T.RandomHorizontalFlip(), T.Normalize([0.5] * 3, [0.2] * 3)],
    "half": [T.Resize((20, 20)), T.ToDtype(torch.bfloat16, scale=True), T.Normalize([0.5] * 3, [0.2] * 3)],
    "colours": [T.ColorJitter(0.4, 0.4, 0.4, 0.1), T.RandomGrayscale(), T.RandomErasing(p=1, value=7)],
    "warps": [T.RandomAffine(30, (0.1, 0.1), (0.9, 1.1), 10, "bilinear"), T.RandomRotation(30)],
    "values": [T.Normalize([0.5] * 3, [0.2] * 3)],
    "a user's": [T.RandomCrop(20), T.ToDtype(torch.float32), T.Pointwise(lambda x: x.sqrt())],
}


@pytest.mark.parametrize("augment", AUGMENT)
@pytest.mark.parametrize("is_list", [False, True])
def test_threads_share_a_batch(augment, is_list, monkeypatch):
    monkeypatch.setattr("memfeed.transforms.backends.passes.PART_BYTES", 1)
    monkeypatch.setattr("memfeed.transforms.backends.passes.CACHED_BYTES", 3 * 20 * 20 * 4 * 3)
    images = pictures(37, 3, 30, 28)
    if is_list:
        images = [image[:, : 24 + at % 5] for at, image in enumerate(images)]
    transform = T.Compose(AUGMENT[augment])
    found = {}
    for count in (1, 3):
        with Threads(count).in_use():
            found[count] = transform.apply(images, keys(37))
    expected = transform.reference(images, keys(37))
    assert len(found[1]) == 37
    for one, three, plain in zip(found[1], found[3], expected, strict=True):
        assert torch.equal(one, three)
        is_half = plain.dtype is torch.bfloat16  # the reference rounds at each step
        torch.testing.assert_close(one, plain, rtol=0 if is_half else 1e-5, atol=0.03 if is_half else 1e-5)


def test_an_output_that_is_kept_is_never_written_again():
    transform = T.Compose(AUGMENT["resized crop"])
    images = pictures(16, 3, 256, 256)
    kept, copies = [], []
    for epoch in range(4):
        kept.append(transform.apply(images, keys(16, epoch=epoch))[3:, 1].numpy())
        copies.append(kept[-1].copy())
        pieces = params(T.RandomResizedCrop(9), images)
        resized = [pieces.one(images[at], at) for at in range(6)]
        assert len({piece.data_ptr() for piece in resized}) == 6
    assert all((one == copy).all() for one, copy in zip(kept, copies, strict=True))


def test_an_output_that_is_freed_is_used_again():
    transform = T.Compose(AUGMENT["crop"])
    images = pictures(16, 3, 30, 28)
    places = set()
    for epoch in range(6):
        output = transform(images) if epoch % 2 else transform.apply(images, keys(16, epoch=epoch))
        places.add(output.data_ptr())
    assert len(places) <= 2
