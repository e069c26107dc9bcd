"""Transforms of whole batches, keyed by row: the same parameters for any batch size, rank count or resume point.

The names are those of torchvision. Neighbours in a Compose are fused: as few passes over the pixels as they allow.
"""

from memfeed.transforms.compose import Compose
from memfeed.transforms.decode import Decode
from memfeed.transforms.mix import CutMix, MixUp
from memfeed.transforms.ops.color import ColorJitter, RandomErasing, RandomGrayscale
from memfeed.transforms.ops.crop import CenterCrop, RandomCrop, RandomFlip, RandomHorizontalFlip, RandomVerticalFlip
from memfeed.transforms.ops.resize import RandomResizedCrop, Resize
from memfeed.transforms.ops.rotate import RandomAffine, RandomRotation
from memfeed.transforms.ops.values import Normalize, Pointwise, ToDtype
from memfeed.transforms.params.geometry import Geometry, Imagewise, Warped
from memfeed.transforms.params.resample import Resampled
from memfeed.transforms.params.value_changes import Affine, Erased, Gray, Jitter, Mapped
from memfeed.transforms.params.window import VolumeWindow, Window
from memfeed.transforms.per_sample import PerSample
from memfeed.transforms.transform import ImageTransform, Transform

__all__ = [
    "Affine",
    "CenterCrop",
    "ColorJitter",
    "Compose",
    "CutMix",
    "Decode",
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
    "RandomFlip",
    "RandomGrayscale",
    "RandomHorizontalFlip",
    "RandomResizedCrop",
    "RandomRotation",
    "RandomVerticalFlip",
    "Resampled",
    "Resize",
    "ToDtype",
    "Transform",
    "VolumeWindow",
    "Warped",
    "Window",
]
