"""Idioms of MONAI, of kornia, of PyTorch Geometric. MONAI's classes are written here with the same protocol."""

import functools
import warnings

import numpy as np
import torch
from idiom import Rows, Table, Tensors, mask_of
from torch.utils.data import Dataset

TABLE = Table()
KEYS = ("image", "mask")


class Randomizable:
    """As in MONAI: one generator of the class, until a state is set for an object."""

    R = np.random.RandomState()

    def set_random_state(self, seed=None, state=None):
        """Set a generator of its own."""
        self.R = np.random.RandomState(seed) if state is None else state
        return self


class RandFlipd(Randomizable):
    """Flip the images of a dict along their last axis, all or none."""

    def __init__(self, keys, prob=0.5):
        self.keys, self.prob = keys, prob

    def __call__(self, data):
        d = dict(data)
        if self.R.rand() < self.prob:
            for key in self.keys:
                d[key] = torch.flip(d[key], [-1])
        return d


class RandSpatialCropd(Randomizable):
    """Crop the images of a dict at one random place."""

    def __init__(self, keys, size):
        self.keys, self.size = keys, size

    def randomize(self, shape):
        """Draw where to crop."""
        self.place = [int(self.R.randint(0, n - self.size + 1)) for n in shape]

    def __call__(self, data):
        d = dict(data)
        self.randomize(d[self.keys[0]].shape[-2:])
        top, left = self.place
        for key in self.keys:
            d[key] = d[key][..., top : top + self.size, left : left + self.size].clone()
        return d


class ScaleIntensityd:
    """Scale the images of a dict to 0 to 1."""

    def __init__(self, keys):
        self.keys = keys

    def __call__(self, data):
        return {**data, **{key: data[key].float() / 255 for key in self.keys}}


class Compose(Randomizable):
    """As in MONAI: the steps are a property that only a new object changes; a seed is spread over the steps."""

    def __init__(self, transforms):
        self._transforms = tuple(transforms)

    @property
    def transforms(self):
        """Return the steps."""
        return self._transforms

    @transforms.setter
    def transforms(self, value):
        raise ValueError("the transforms of a Compose cannot be set")

    def set_random_state(self, seed=None, state=None):
        """Give each step a seed of its own."""
        super().set_random_state(seed, state)
        for step in self._transforms:
            if isinstance(step, Randomizable):
                step.set_random_state(int(self.R.randint(2**31)))
        return self

    def __call__(self, data):
        return functools.reduce(lambda made, step: step(made), self._transforms, data)


def mask_follows(sample):
    """Return True if the mask has the bands of the image's red channel."""
    return torch.equal((sample["image"][0] * 255).round().long() // 28, sample["mask"][0].long())


class Volumes(Dataset):
    """As MONAI's Dataset: a list of dicts, and a transform of dicts."""

    def __init__(self, transform):
        images = Tensors()
        pairs = [(images.load(i), torch.from_numpy(mask_of(images.images[i]))[None]) for i in range(64)]
        self.data, self.transform = [dict(zip(KEYS, pair, strict=True)) for pair in pairs], transform

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.transform(self.data[index])


class CacheDataset(Volumes):
    """As MONAI's: what comes before the first random step is computed once, the rest runs in every epoch."""

    def __init__(self, transform):
        super().__init__(transform)
        steps = transform.transforms
        self.first = next(i for i, step in enumerate(steps) if isinstance(step, Randomizable))
        self.cached = [functools.reduce(lambda made, step: step(made), steps[: self.first], one) for one in self.data]

    def __getitem__(self, index):
        item = dict(self.cached[index])
        for step in self.transform.transforms[self.first :]:
            item = step(item)
        return item


def steps():
    return [ScaleIntensityd(["image"]), RandSpatialCropd(KEYS, 24), RandFlipd(KEYS)]


@TABLE.add("dict transforms that draw from a generator of their class", "MONAI (stand-ins)", "sample",
           invariant=mask_follows)  # fmt: skip
def class_generator():
    return Volumes(Compose(steps()))


@TABLE.add("dict transforms with set_random_state", "MONAI (stand-ins)", "sample", invariant=mask_follows)
def own_state():
    return Volumes(Compose(steps()).set_random_state(0))


@TABLE.add("CacheDataset, which applies the steps from the first random one", "MONAI (stand-ins)", "sample",
           "refused or right", invariant=mask_follows)  # fmt: skip
def cache_dataset():
    return CacheDataset(Compose(steps()))


@TABLE.add(
    "a crop of samples: a list of four crops of one image",
    "MONAI (stand-ins)",
    "sample",
    "several of one",
    is_slow=True,
)
def crop_samples():
    class RandSpatialCropSamplesd(RandSpatialCropd):
        def __call__(self, data):
            return [super(RandSpatialCropSamplesd, self).__call__(data) for _ in range(4)]

    return Volumes(Compose([ScaleIntensityd(["image"]), RandSpatialCropSamplesd(KEYS, 16)]))


@TABLE.add("a module of kornia for each sample", "kornia", "sample")
def kornia_sample():
    import kornia.augmentation as K

    class Images(Tensors):
        def __getitem__(self, index):
            return self.transform(self.load(index).float()[None] / 255)[0], self.labels[index]

    return Images(K.AugmentationSequential(K.RandomHorizontalFlip(p=0.5), K.RandomErasing(p=0.5), data_keys=["input"]))


@TABLE.add("image and mask through kornia's AugmentationSequential", "kornia", "sample",
           invariant=lambda s: torch.equal((s[0][0] * 255).round().long() // 28, s[1][0].long()))  # fmt: skip
def kornia_pair():
    import kornia.augmentation as K

    class Pairs(Tensors):
        def __getitem__(self, index):
            image, mask = self.load(index).float()[None] / 255, torch.from_numpy(mask_of(self.images[index]))
            image, mask = self.transform(image, mask.float()[None, None])
            return image[0], mask[0]

    return Pairs(K.AugmentationSequential(K.RandomHorizontalFlip(p=0.5), data_keys=["input", "mask"]))


def graphs(transform):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of what torch has deprecated
        from torch_geometric.data import Data

    class Graphs(Dataset):
        def __init__(self):
            self.transform = transform

        def __len__(self):
            return 64

        def __getitem__(self, index):
            count = 4 + index % 3
            positions = torch.arange(count * 2.0).reshape(count, 2) + index
            edges = torch.stack([torch.arange(count - 1), torch.arange(1, count)])
            return self.transform(Data(pos=positions, edge_index=edges, y=torch.tensor([index % 10])))

    return Graphs()


def geometric():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch_geometric.transforms as G
    return G


@TABLE.add("RandomJitter of the nodes of a graph", "PyTorch Geometric", "sample")
def graph_jitter():
    return graphs(geometric().RandomJitter(0.1))


@TABLE.add("Compose of fixed and random steps of a graph", "PyTorch Geometric", "sample")
def graph_compose():
    G = geometric()
    return graphs(G.Compose([G.Center(), G.RandomScale((0.8, 1.2)), G.RandomFlip(0, p=0.5)]))


@TABLE.add("fixed steps of a graph", "PyTorch Geometric", "whole")
def graph_fixed():
    G = geometric()
    return graphs(G.Compose([G.Center(), G.Distance()]))


@TABLE.add("an own BaseTransform that drops edges", "PyTorch Geometric", "sample")
def drop_edges():
    class DropEdges(geometric().BaseTransform):
        def forward(self, data):
            kept = torch.rand(data.edge_index.shape[1]) < 0.5
            data.edge_index = data.edge_index[:, kept]
            return data

    return graphs(DropEdges())


@TABLE.add("scikit-image's noise and a flip in one function", "scikit-image", "sample")
def scikit_image():
    from skimage.util import random_noise

    def augment(image):
        image = image if np.random.rand() < 0.5 else image[:, ::-1]
        return random_noise(image, var=0.01, rng=np.random.randint(2**31)).astype(np.float32)

    class Images(Rows):
        def __getitem__(self, index):
            return self.transform(self.images[index]), self.labels[index]

    return Images(augment)
