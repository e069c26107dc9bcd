"""The samples that a collate_fn gets have the types of the dataset's own, also where the rest runs on batches."""

import copy
import sys
from types import ModuleType

import albumentations as A
import numpy as np
import optree
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, default_collate
from torchvision import tv_tensors
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2

import memfeed
from memfeed.schema import kept_tensors
from memfeed.system.threads import end_all
from short_form import short_form

_numbers = np.random.default_rng(0)
IMAGES = _numbers.integers(0, 256, (40, 16, 16, 3), dtype=np.uint8)
MASKS = _numbers.integers(0, 3, (40, 16, 16), dtype=np.uint8)
FLIP = A.HorizontalFlip(p=0.5)


class Made(Dataset):
    """The samples ``make(i)``, after a pipeline."""

    def __init__(self, transform, make):
        self.transform, self.make = transform, make

    def __len__(self):
        return len(IMAGES)

    def __getitem__(self, index):
        return self.make(self.transform, index)


def pil(index, mode="RGB"):
    return Image.fromarray(IMAGES[index]).convert(mode)


def image(index):
    return tv_tensors.Image(IMAGES[index].transpose(2, 0, 1).copy())


def mixed(transform, index):
    made = transform(image=IMAGES[index], mask=MASKS[index])
    others = {"number": np.int64(index), "share": np.float32(index), "index": index, "name": str(index)}
    return {**made, **others, "is_late": index > 20, "row": np.arange(3) + index, "list": [1, 2, index]}


DATASETS = {
    "arrays": Made(FLIP, lambda t, i: (t(image=IMAGES[i])["image"], i)),
    "arrays and values": Made(A.Compose([FLIP]), mixed),
    "arrays that change": Made(FLIP, lambda t, i: t(image=IMAGES[i])["image"].transpose(2, 0, 1).copy()),
    "steps of the user's": Made(A.Compose([FLIP, A.GaussNoise(p=1)]), lambda t, i: t(image=IMAGES[i])["image"]),
    "PIL": Made(v1.RandomHorizontalFlip(), lambda t, i: (t(pil(i)), i)),
    "PIL, grey": Made(v1.RandomHorizontalFlip(), lambda t, i: [t(pil(i, "L")), pil(i)]),
    "to an Image": Made(v2.Compose([v2.RandomHorizontalFlip(), v2.ToImage()]), lambda t, i: {"x": t(pil(i))}),
    "Image and Mask": Made(v2.RandomCrop(8), lambda t, i: t(image(i), tv_tensors.Mask(MASKS[i]))),
    "Image, twice": Made(v2.RandomCrop(8), lambda t, i: (t(image(i)), image(i), np.int16(i))),
}


@pytest.fixture(autouse=True)
def quiet(capsys):
    yield
    end_all()


def types(sample):
    return optree.tree_map(lambda leaf: (type(leaf), getattr(leaf, "dtype", getattr(leaf, "mode", None))), sample)


@pytest.mark.parametrize("name", short_form(DATASETS, 4))
def test_samples_have_the_types_of_the_dataset(name, tmp_path):
    dataset = DATASETS[name]
    for _ in range(2):  # filled, and opened again
        loader = memfeed.Loader(dataset, 10, cache=tmp_path / "s.mf", collate_fn=list)
        assert loader.store.transform.leaf_makers, "it is batched"
        for batch in loader:
            assert [types(sample) for sample in batch] == [types(dataset[0])] * 10
        loader.store.finish()


@pytest.mark.parametrize("is_joint", [True, False])
def test_masks_with_palettes_of_their_own_stay_images(is_joint, tmp_path):
    flip = v2.RandomHorizontalFlip(1.0)

    def make(transform, index):
        image, mask = pil(index), pil(index, "L").quantize(8)
        return transform(image, mask) if is_joint else (transform(image), mask)

    dataset = Made(v2.Compose([v2.RandomGrayscale(0.0), flip]), make)
    loader = memfeed.Loader(dataset, 10, cache=tmp_path / "s.mf", collate_fn=list)
    for index, sample in enumerate(sample for batch in loader for sample in batch):
        assert sample == dataset[index]


def test_their_values_are_those_of_the_batch(tmp_path):
    dataset = DATASETS["arrays and values"]
    batch = next(iter(memfeed.Loader(dataset, 10, cache=tmp_path / "s.mf", seed=3)))
    collated = next(iter(memfeed.Loader(dataset, 10, cache=tmp_path / "s.mf", seed=3, collate_fn=default_collate)))
    batch["list"] = list(batch["list"].T)
    assert optree.tree_map(np.array_equal, batch, collated) == optree.tree_map(lambda leaf: True, batch)


@pytest.mark.parametrize(
    ("transform", "takes_pil"),
    [(FLIP, False), (v1.RandomHorizontalFlip(), True), (v1.Compose([v1.RandomHorizontalFlip(), v1.ToTensor()]), True)],
)
def test_arrays_that_no_pipeline_made_keep_their_axes(transform, takes_pil, tmp_path):
    def make(transform, index):
        return transform(pil(index)) if takes_pil else transform(image=IMAGES[index])["image"], IMAGES[-index]

    dataset = Made(transform, make)
    (batch,) = memfeed.Loader(dataset, 40, cache=tmp_path / "s.mf")
    assert np.array_equal(batch[1], np.stack([dataset[i][1] for i in range(40)]))


class MetaTensor(torch.Tensor):
    """What memfeed knows of MONAI's: its name, its module and its attributes."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        made = super().__torch_function__(func, types, args, kwargs)
        if type(made) is cls and not vars(made):
            made.__dict__ = copy.deepcopy(vars(next(one for one in args if type(one) is cls)))
        return made

    def __deepcopy__(self, memo):
        return self.clone()


MetaTensor.__module__ = "monai.data.meta_tensor"


def scan(index):
    """As MONAI's LoadImage: a volume that knows its file, and which steps were taken."""
    made = torch.from_numpy(IMAGES[index]).float().as_subclass(MetaTensor)
    made._meta, made._applied_operations = {"file": f"{index}.nii", "affine": torch.eye(4) * index}, []
    made._pending_operations, made._is_batch = [], False
    return made


def random_crop(image):
    """A random step that reads what the tensor knows, and notes what it did."""
    at = int(torch.randint(0, 9, ()))
    made = image[at : at + 8] + image._meta["affine"][0, 0]
    made._meta["start"] = at
    made._applied_operations.append({"class": "Crop", "id": id(random_crop), "start": at})
    return made


def test_what_monai_knows_of_an_image_is_kept_before_a_random_step(path, monkeypatch):
    module = ModuleType("monai.data.meta_tensor")
    module.MetaTensor = MetaTensor
    for name in ("monai", "monai.data", module.__name__):
        monkeypatch.setitem(sys.modules, name, module)
    kept_tensors._class.cache_clear()
    dataset = Made(v1.Compose([scan, random_crop]), lambda steps, index: {"image": steps(index), "row": index})
    loader = memfeed.Loader(dataset, 8, cache=path, collate_fn=list, require="samples")
    found = [sample for _ in range(2) for batch in loader for sample in batch]
    kept_tensors._class.cache_clear()
    assert len({sample["image"]._meta["start"] for sample in found}) > 5
    for sample in found:
        image, row = sample["image"], int(sample["row"])
        start = image._meta["start"]
        assert type(image) is MetaTensor
        assert image._meta["file"] == f"{row}.nii"
        assert [operation["start"] for operation in image._applied_operations] == [start]
        assert torch.equal(
            image.as_subclass(torch.Tensor), torch.from_numpy(IMAGES[row][start : start + 8]) + float(row)
        )


def test_graphs_of_a_dataset_that_holds_them_are_their_own(tmp_path):
    geometric = pytest.importorskip("torch_geometric.data")

    class Graphs(Dataset):
        def __init__(self):
            self.graphs = [geometric.Data(x=torch.ones(1 + i % 3, 2), y=i) for i in range(40)]

        def __len__(self):
            return 40

        def __getitem__(self, index):
            return self.transform(copy.copy(self.graphs[index]))

        def transform(self, graph):
            graph.x = graph.x * torch.rand(1)
            return graph

    loader = memfeed.Loader(Graphs(), 4, cache=tmp_path / "g.mf", collate_fn=list)
    for batch in (*loader, *loader):
        assert [graph.num_nodes for graph in batch] == [1 + graph.y % 3 for graph in batch]
