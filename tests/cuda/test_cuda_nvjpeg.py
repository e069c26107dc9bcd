"""Rows that nvJPEG decodes, beside those that the CPU decodes."""

import numpy as np
import pytest
import torch

import memfeed
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
    for _ in range(2):
        for batch, expected in zip(loader, memfeed.Loader(store, **options), strict=True):
            assert batch["image"].device.type == "cuda"
            difference = (batch["image"].cpu().int() - expected["image"].int()).abs()
            assert difference.float().mean() < 1.5
            assert difference.max() <= 16
            assert torch.equal(batch["label"].cpu(), expected["label"])
