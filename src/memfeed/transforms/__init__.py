"""Transforms of whole batches, keyed by row: the same parameters for any batch size, rank count or resume point.

Named as in torchvision. Neighbours in a Compose run fused on the CPU, in as few passes over the pixels as they allow.
"""

from memfeed.transforms.affine import Affine
from memfeed.transforms.color import ColorJitter, Gray, Jitter, RandomGrayscale
from memfeed.transforms.compose import Compose
from memfeed.transforms.crop import CenterCrop, RandomCrop
from memfeed.transforms.erase import Erased, RandomErasing
from memfeed.transforms.flip import RandomHorizontalFlip, RandomVerticalFlip
from memfeed.transforms.geometry import Geometry, Imagewise
from memfeed.transforms.mix import CutMix, MixUp
from memfeed.transforms.per_sample import PerSample
from memfeed.transforms.pointwise import Mapped, Pointwise
from memfeed.transforms.resample import Resampled
from memfeed.transforms.resize import RandomResizedCrop, Resize
from memfeed.transforms.rotate import RandomAffine, RandomRotation
from memfeed.transforms.transform import ImageTransform, Transform
from memfeed.transforms.values import Normalize, ToDtype
from memfeed.transforms.warp import Warped
from memfeed.transforms.window import Window

__all__ = [
    "Affine",
    "CenterCrop",
    "ColorJitter",
    "Compose",
    "CutMix",
    "Erased",
    "Geometry",
    "Gray",
    "ImageTransform",
    "Imagewise",
    "Jitter",
    "Mapped",
    "MixUp",
    "Normalize",
    "PerSample",
    "Pointwise",
    "RandomAffine",
    "RandomCrop",
    "RandomErasing",
    "RandomGrayscale",
    "RandomHorizontalFlip",
    "RandomResizedCrop",
    "RandomRotation",
    "RandomVerticalFlip",
    "Resampled",
    "Resize",
    "ToDtype",
    "Transform",
    "Warped",
    "Window",
]
