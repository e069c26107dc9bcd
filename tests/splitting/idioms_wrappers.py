"""Idioms of datasets around datasets, of rows of several kinds, and of samples that PIL or Hugging Face give."""

import random
import types
import warnings
from dataclasses import dataclass, field

import numpy as np
import torch
from idiom import ROWS, Rows, Table, Tensors, labels, pictures
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, random_split
from torchvision import transforms as v1
from torchvision.transforms import v2

TABLE = Table()
KINDS = "rows of two kinds"


def flip():
    return v1.Compose([v1.RandomHorizontalFlip(), v1.ToTensor()])


def crop():
    return v1.Compose([v1.RandomCrop(28), v1.RandomHorizontalFlip(), v1.ToTensor()])


class Wrapper(Dataset):
    """A dataset around another one, which applies a transform of its own."""

    def __init__(self, dataset, transform=None):
        self.dataset, self.transform = dataset, transform

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        image, label = self.dataset[index]
        return (self.transform(image) if self.transform else image), label


@TABLE.add("Subset of a dataset", "torch", "batched")
def subset():
    return Subset(Rows(crop(), count=96), range(16, 80))


@TABLE.add("random_split of a dataset", "torch", "batched")
def split():
    return random_split(Rows(crop(), count=96), [64, 32], torch.Generator().manual_seed(0))[0]


@TABLE.add("StackDataset of two datasets with random steps", "torch", "batched")
def stacked():
    return StackDataset(a=Rows(crop()), b=Subset(Rows(crop(), count=96), range(16, 80)))


@TABLE.add("a wrapper that transforms the samples of a Subset", "torch", "batched")
def wrapped_subset():
    return Wrapper(Subset(Rows(count=96), range(64)), crop())


@TABLE.add(
    "random steps in a dataset, fixed ones in its wrapper", "torch", "batched", "two pipelines, one in the other"
)
def nested():
    return Wrapper(Rows(v1.RandomHorizontalFlip()), v1.ToTensor())


@TABLE.add("a wrapper whose __getattr__ asks the inner dataset", "own code", "batched")
def getattr_wrapper():
    class Proxy(Dataset):
        def __init__(self, dataset):
            self.dataset = dataset

        def __getattr__(self, name):
            if name.startswith("__") or name == "dataset":
                raise AttributeError(name)
            return getattr(self.dataset, name)

        def __len__(self):
            return len(self.dataset)

        def __getitem__(self, index):
            return self.dataset[index]

    return Proxy(Rows(crop()))


@TABLE.add("a dataset that is a dataclass", "own code", "batched")
def dataclass_dataset():
    @dataclass
    class Photos(Dataset):
        transform: object
        images: np.ndarray = field(default_factory=pictures)

        def __len__(self):
            return len(self.images)

        def __getitem__(self, index):
            return {"image": self.transform(Image.fromarray(self.images[index])), "index": index}

    return Photos(crop())


@TABLE.add("a dataset with __getitems__", "torch", "batched")
def getitems():
    class Batched(Rows):
        def __getitems__(self, indices):
            return [self[index] for index in indices]

    return Batched(crop())


@TABLE.add("a dataset with __slots__ and without a base class", "own code", "batched")
def slots():
    class Photos:
        __slots__ = ("images", "transform")

        def __init__(self, transform):
            self.images, self.transform = pictures(), transform

        def __len__(self):
            return len(self.images)

        def __getitem__(self, index):
            return self.transform(Image.fromarray(self.images[index])), index

    return Photos(crop())


@TABLE.add("the pipeline is a property without a setter", "own code", "batched", "its pipeline cannot be set")
def read_only_property():
    class Photos(Rows):
        transform = property(lambda self: self.steps)

        def __init__(self):
            self.images, self.labels, self.steps = pictures(), labels(), crop()

    return Photos()


@TABLE.add("class-conditional augmentation", "torchvision v1", "sample", KINDS + ": some do not call the pipeline")
def class_conditional():
    class Conditional(Rows):
        def __getitem__(self, index):
            image = self.load(index)
            is_rare = self.labels[index] == 3
            return (self.transform(image) if is_rare else self.to_tensor(image)), self.labels[index]

    return Conditional(flip(), to_tensor=v1.ToTensor())


@TABLE.add("random samples of one class only", "torchvision v1", "refused", KINDS)
def random_class():
    class OneClass(Rows):
        def __getitem__(self, index):
            x = self.transform(self.load(index))
            return (x.flip(-1) if self.labels[index] == 7 and random.random() < 0.5 else x), self.labels[index]

    return OneClass(v1.ToTensor())


@TABLE.add("a pipeline that is random for some classes only", "own code", "sample")
def random_class_in_pipeline():
    def transform(image, label):
        x = v1.functional.to_tensor(image)
        return (x.flip(-1) if label > 6 and random.random() < 0.5 else x), label

    class OneClass(Rows):
        def __getitem__(self, index):
            return self.transform(self.load(index), self.labels[index])

    return OneClass(transform)


@TABLE.add("ConcatDataset, one part without a pipeline", "torch", "sample", KINDS)
def concat_without():
    class Plain(Rows):
        def __getitem__(self, index):
            return torch.from_numpy(self.images[index]).permute(2, 0, 1) / 255, self.labels[index]

    return ConcatDataset([Rows(flip(), count=48), Plain(count=16)])


@TABLE.add("ConcatDataset of parts with other pipelines", "torch", "sample", "each row runs its own")
def concat_of_two():
    vertical = v1.Compose([v1.RandomVerticalFlip(), v1.ToTensor()])
    return ConcatDataset([Rows(flip(), count=32), Rows(vertical, count=32)])


@TABLE.add("ConcatDataset of two v1.Lambda pipelines that print alike", "torch", "sample", "each row runs its own")
def concat_of_lambdas():
    first = v1.Compose([v1.RandomHorizontalFlip(), v1.ToTensor(), v1.Lambda(lambda x: x * 2)])
    second = v1.Compose([v1.RandomHorizontalFlip(), v1.ToTensor(), v1.Lambda(lambda x: 1 - x)])
    return ConcatDataset([Rows(first, count=32), Rows(second, count=32)])


@TABLE.add("ConcatDataset of parts with the same pipeline object", "torch", "batched")
def concat_of_same():
    steps = crop()
    return ConcatDataset([Rows(steps, count=32), Rows(steps, count=32)])


@TABLE.add("a change after the pipeline in some rows only", "torchvision v1", "sample", KINDS)
def changed_rows():
    class Changed(Rows):
        def __getitem__(self, index):
            x = self.transform(self.load(index))
            return (1 - x if index % 9 == 4 else x), self.labels[index]

    return Changed(crop())


@TABLE.add("a leaf that only some rows have", "torchvision v1", "refused", KINDS)
def dropped_leaf():
    class Partly(Rows):
        def __getitem__(self, index):
            sample = {"image": self.transform(self.load(index)), "label": self.labels[index]}
            return sample if index % 8 else {"image": sample["image"]}

    return Partly(crop())


@TABLE.add("retry logic: another index is drawn if a sample raises", "own code", "refused", "draws another row")
def retry():
    class Retry(Rows):
        def __getitem__(self, index):
            try:
                if index % 13 == 5:
                    raise OSError("truncated file")
                return self.transform(self.load(index)), self.labels[index]
            except OSError:
                return self[random.randrange(len(self))]

    return Retry(crop())


@TABLE.add("retry logic: the next index if a sample raises", "own code", "batched", "the same row each time")
def retry_next():
    class Retry(Rows):
        def __getitem__(self, index):
            if index % 13 == 5:
                return self[index + 1]
            return self.transform(self.load(index)), self.labels[index]

    return Retry(crop())


@TABLE.add("accelerate's cv example: the pipeline is called image_transform", "torchvision v1", "batched",
           "an attribute of any name", levels=2.0)  # fmt: skip
def accelerate_pets():
    class PetsDataset(Dataset):
        def __init__(self, file_names, image_transform=None, label_to_id=None):
            self.file_names, self.image_transform, self.label_to_id = file_names, image_transform, label_to_id

        def __len__(self):
            return len(self.file_names)

        def __getitem__(self, idx):
            raw_image = Image.fromarray(pictures(ROWS)[self.file_names[idx]])
            image = raw_image.convert("RGB")
            if self.image_transform is not None:
                image = self.image_transform(image)
            return {"image": image, "label": self.file_names[idx] % 10}

    steps = [v1.RandomResizedCrop((24, 24), scale=(0.5, 1.0)), v1.ToTensor()]
    return PetsDataset(list(range(ROWS)), v1.Compose(steps))


def hugging_face():
    import datasets

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return datasets.Dataset.from_dict(
            {"pixels": list(pictures(ROWS)), "label": labels()},
            datasets.Features({"pixels": datasets.Array3D((32, 32, 3), "uint8"), "label": datasets.Value("int64")}),
        )


def transforms_of_rows():
    steps = v2.Compose([v2.ToImage(), v2.RandomCrop(28), v2.RandomHorizontalFlip(), v2.ToPureTensor()])

    def transforms(examples):
        examples["pixels"] = [steps(np.array(image, np.uint8)) for image in examples["pixels"]]
        return examples

    return transforms


@TABLE.add("with_transform of a Dataset", "Hugging Face datasets", "sample", "draws inside the format of the dataset")
def with_transform():
    return hugging_face().with_transform(transforms_of_rows())


@TABLE.add("set_transform of a Dataset", "Hugging Face datasets", "sample", "draws inside the format of the dataset")
def set_transform():
    dataset = hugging_face()
    dataset.set_transform(transforms_of_rows())
    return dataset


@TABLE.add("a Dataset of Hugging Face in a torch Dataset with a pipeline", "Hugging Face datasets", "batched")
def wrapped_hugging_face():
    class Images(Wrapper):
        def __getitem__(self, index):
            row = self.dataset[index]
            return {"image": self.transform(Image.fromarray(np.array(row["pixels"], np.uint8))), "label": row["label"]}

    return Images(hugging_face(), crop())


class Modes(Rows):
    """Images of other modes of PIL; without ToTensor at the end they are samples as they are."""

    def load(self, index):
        image = Image.fromarray(self.images[index])
        return image.convert(self.modes[index % len(self.modes)])


for _mode, _expected in {"L": "batched", "RGBA": "batched", "LA": "batched", "1": "sample", "I;16": "batched"}.items():
    TABLE.add(f"PIL images of mode {_mode}", "torchvision v1", _expected)(
        lambda mode=_mode: Modes(
            v1.Compose([v1.RandomCrop(28), v1.RandomHorizontalFlip(), v1.PILToTensor()]), modes=(mode,)
        )
    )

for _modes in [("CMYK", "RGBA"), ("L", "P")]:
    TABLE.add(
        f"PIL images of modes {' and '.join(_modes)}, made RGB after the flip", "torchvision v1", "sample", KINDS
    )(
        lambda modes=_modes: Modes(
            v1.Compose([v1.RandomHorizontalFlip(), v1.Lambda(lambda image: image.convert("RGB")), v1.ToTensor()]),
            modes=modes,
        )
    )


@TABLE.add("PIL images without ToTensor", "torchvision v1", "batched", "no DataLoader collates them; [c, h, w] tensors")
def pil_result():
    return Rows(v1.Compose([v1.RandomCrop(28), v1.RandomHorizontalFlip()]))


@TABLE.add("a crop of a random size: batches are lists", "own code", "sample", "no DataLoader collates them")
def random_size():
    def transform(x):
        side = int(torch.randint(16, 32, ()))
        return x[:, :side, :side].clone()

    return Tensors(transform)


class Reader:
    """Opens the images of a dataset, and applies its transform: an object that is neither called nor indexed."""

    def __init__(self, images, transform):
        self.images, self.image_transforms = images, transform

    def item(self, index):
        return self.image_transforms(Image.fromarray(self.images[index]))


class ReadBy(Dataset):
    def __init__(self, reader):
        self.reader, self.labels = reader, labels()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.reader.item(index), self.labels[index]


@TABLE.add("a reader object holds the transform", "torch", "batched", "an object that is neither called nor indexed")
def reader():
    return ReadBy(Reader(pictures(), crop()))


class Augmenter:
    """Random steps as methods of one object, with settings."""

    def __init__(self, p, least):
        self.p, self.least = p, least

    def flip(self, array):
        return array[:, ::-1].copy() if random.random() < self.p else array

    def darken(self, array):
        return (array * np.random.uniform(self.least, 1.0)).astype(np.uint8)


class AugmentedBy(Dataset):
    def __init__(self, augmenter):
        self.augmenter, self.images, self.labels = augmenter, pictures(), labels()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        array = self.augmenter.flip(np.asarray(self.images[index]))
        return torch.from_numpy(self.augmenter.darken(array)).permute(2, 0, 1), self.labels[index]


@TABLE.add("the random steps are methods of an augmenter object", "NumPy", "sample")
def augmenter():
    return AugmentedBy(Augmenter(0.5, 0.7))


@TABLE.add("a list of augmenter objects", "NumPy", "sample")
def augmenters():
    class Each(AugmentedBy):
        def __getitem__(self, index):
            array = np.asarray(self.images[index])
            for one in self.augmenter:
                array = one.flip(array)
            return torch.from_numpy(array).permute(2, 0, 1), self.labels[index]

    return Each([Augmenter(0.5, 0.7), Augmenter(0.2, 0.7)])


CROP, FLIP = crop(), flip()
BY_SPLIT = {"train": crop(), "val": v1.ToTensor()}
IN_ORDER = [v1.RandomCrop(28), v1.RandomHorizontalFlip(), v1.ToTensor()]


@TABLE.add("the pipeline is a variable of the module", "torchvision v1", "batched")
def of_the_module():
    class Named(Rows):
        def __getitem__(self, index):
            return CROP(Image.fromarray(self.images[index])), self.labels[index]

    return Named(None)


@TABLE.add("pipelines in a dict of the module", "torchvision v1", "batched", "chosen by self.split")
def dict_of_the_module():
    class Named(Rows):
        split = "train"

        def __getitem__(self, index):
            return BY_SPLIT[self.split](Image.fromarray(self.images[index])), self.labels[index]

    return Named(None)


@TABLE.add("a list of steps of the module", "torchvision v1", "batched")
def list_of_the_module():
    class Named(Rows):
        def __getitem__(self, index):
            image = Image.fromarray(self.images[index])
            for step in IN_ORDER:
                image = step(image)
            return image, self.labels[index]

    return Named(None)


settings = types.ModuleType("settings")
settings.train, settings.__file__ = CROP, __file__


@TABLE.add("the pipeline is a variable of another module (config.transform)", "torchvision v1", "batched")
def of_another_module():
    class Named(Rows):
        def __getitem__(self, index):
            return settings.train(Image.fromarray(self.images[index])), self.labels[index]

    return Named(None)


AUGMENTED = Rows(CROP)


@TABLE.add("a dataset of the module, with a pipeline", "torchvision v1", "batched")
def dataset_of_the_module():
    class Wrapped(Dataset):
        def __len__(self):
            return len(AUGMENTED)

        def __getitem__(self, index):
            return AUGMENTED[index]

    return Wrapped()


@TABLE.add("two pipelines of the module, one in a reader object", "torchvision v1", "batched")
def of_the_module_in_a_reader():
    class Named(Reader):
        def item(self, index):
            image = Image.fromarray(self.images[index])
            return torch.cat([CROP(image), FLIP(image)[:, :28, :28]])

    return ReadBy(Named(pictures(), None))
