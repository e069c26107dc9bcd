"""Rows that nvJPEG decodes, beside those that the CPU decodes."""

import numpy as np
import pytest
import torch

import memfeed
from memfeed.transfer import nvjpeg
from support import Made, cache

pytest.importorskip("simplejpeg")
pytestmark = pytest.mark.filterwarnings("ignore:.*TorchCodec:UserWarning")


def photo(i):
    """Return a smooth image: nvJPEG and libjpeg-turbo interpolate colors differently at edges."""
    y, x = np.mgrid[:96, :128]
    waves = [np.sin((x + c * 40 + i) / 17) + np.cos((y - i) / (13 + c)) for c in range(3)]
    return torch.from_numpy(((np.stack(waves) + 2) * 60).astype(np.uint8))


@pytest.mark.parametrize("form", ["jpeg:95", "jpeg:90"])
def test_pixels_are_those_of_the_cpu_but_for_a_few_levels(path, form):
    store = cache(Made(lambda i: {"image": photo(i), "label": i}, 64), path, forms={"image": form})
    options = {"batch_size": 16, "shuffle": True, "seed": 0}
    loader = memfeed.Loader(store, **options, device="cuda", placement={"image": "nvjpeg"})
    on_cpu = memfeed.Loader(store, **options)
    for _ in range(2):
        for batch, expected in zip(loader, on_cpu, strict=True):
            assert batch["image"].device.type == "cuda"
            difference = (batch["image"].cpu().int() - expected["image"].int()).abs()
            assert difference.float().mean() < 1.5
            assert difference.max() <= 16
            assert torch.equal(batch["label"].cpu(), expected["label"])


def test_images_that_the_device_still_reads_are_not_overwritten(path):
    """The decoder writes on a stream of its own, into memory that was freed while this stream still reads it."""
    store = cache(Made(lambda i: {"image": photo(i), "label": i}, 64), path, forms={"image": "jpeg:95"})
    plain = memfeed.Loader(store, 64)
    (everything,) = [batch["image"] for batch in plain]
    device = torch.device("cuda")
    blobs = store._view.columns[0].blobs(np.arange(64))
    with torch.cuda.stream(torch.cuda.Stream()):
        found = []
        for first in range(0, 64, 8):
            images = nvjpeg.decode(blobs[first : first + 8], device)
            torch.cuda._sleep(20_000_000)  # the stream reads the images long after the decoder has returned them
            found.append(torch.stack(images))
            del images
        torch.cuda.current_stream().synchronize()
    assert (torch.cat(found).cpu().int() - everything.int()).abs().float().mean() < 1.5
