"""Transforms of whole batches, keyed by row: the same parameters for any batch size, rank count or resume point.

Named as in torchvision. Crops, flips, casts and normalisation that follow each other in a Compose run fused on the CPU.
"""

from memfeed.transforms.affine import Affine
from memfeed.transforms.compose import Compose
from memfeed.transforms.crop import CenterCrop, RandomCrop
from memfeed.transforms.flip import RandomHorizontalFlip, RandomVerticalFlip
from memfeed.transforms.transform import Transform
from memfeed.transforms.values import Normalize, ToDtype
from memfeed.transforms.window import Window

__all__ = [
    "Affine",
    "CenterCrop",
    "Compose",
    "Normalize",
    "RandomCrop",
    "RandomHorizontalFlip",
    "RandomVerticalFlip",
    "ToDtype",
    "Transform",
    "Window",
]
