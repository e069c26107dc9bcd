"""Batches of images, keys and an allocator that the tests of transforms share."""

import torch

from memfeed.random import Keys
from resample_cases import smooth_images


def photos(n=6, c=3, h=12, w=10, dtype=torch.uint8):
    """Images of noise."""
    images = torch.randint(0, 256, (n, c, h, w), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return images.to(dtype) / 255 if dtype.is_floating_point else images.to(dtype)


def pictures(n=6, c=3, h=24, w=20, dtype=torch.uint8, seed=0):
    """Smooth images: a coordinate that two paths round apart hardly changes a value."""
    smooth = smooth_images(n, c, h, w, seed)
    return smooth.to(dtype) if dtype.is_floating_point else (smooth * 255).round().to(dtype)


def keys(n=6, seed=0, epoch=0):
    return Keys(seed, epoch, torch.arange(n))


def params(transform, images):
    """What a single transform draws for images with keys()."""
    drawn = transform.params(range(len(images)), shape=images.shape[1:], dtype=images.dtype)
    return drawn[f"{type(transform).__name__}.0"]


class RecordingLender:
    """An allocator that keeps what it was asked for. It gives `buffer` if there is one, else new memory."""

    def __init__(self, buffer=None):
        self.buffer, self.requests = buffer, []

    def allocate(self, shape, dtype):
        self.requests.append((tuple(shape), dtype))
        return torch.empty(shape, dtype=dtype) if self.buffer is None else self.buffer
