"""Steps that remember something of a sample, and steps whose methods were replaced: right, or refused."""

import random
from contextvars import ContextVar

import pytest
import torch
from torch.utils.data import Dataset

from memfeed import Loader
from memfeed.convert.splits import rows_to_prove
from memfeed.errors import SplitError
from memfeed.splitting.proof import SEEDS, prove, prove_row
from memfeed.splitting.split import split

v1 = pytest.importorskip("torchvision.transforms")
ROWS, EPOCHS = 32, 8


class Images(Dataset):
    """Images whose columns count from the row's number, so that a moved or flipped one can be told."""

    def __init__(self, transform):
        self.transform = transform

    def __len__(self):
        return ROWS

    def image(self, index):
        return (torch.arange(16).expand(3, 16, 16) * 8 + index).to(torch.uint8)

    def __getitem__(self, index):
        return self.transform(self.image(index)), index


def cut(dataset):
    return split(dataset, rows_to_prove(len(dataset)), None, None, ".", cuts_fixed=False)


class Pair(Images):
    def __getitem__(self, index):
        return self.transform(self.image(index)), self.transform(self.image(index)), index


class FlipsPairs:
    """Draws for the first image of a pair, and does the same with the second."""

    def __init__(self):
        self.drawn = None

    def __call__(self, image):
        does = random.random() < 0.5 if self.drawn is None else self.drawn
        self.drawn = does if self.drawn is None else None
        return image.flip(-1) if does else image


def test_a_step_that_remembers_the_first_call_of_a_sample(tmp_path):
    dataset = Pair(v1.Compose([FlipsPairs(), v1.ConvertImageDtype(torch.float32)]))
    loader = Loader(dataset, batch_size=8, cache=tmp_path / "a.mf")
    seen = set()
    for _ in range(EPOCHS):
        for one, other, _ in loader:
            assert torch.equal(one, other)
            seen |= {bool(image[0, 0, 0] > image[0, 0, 1]) for image in one}
    assert seen == {True, False}


def test_a_step_that_leaves_something_for_a_later_one(tmp_path):
    shared = {}

    class Tag:
        def __call__(self, image):
            shared["tag"] = random.randrange(4)
            return image // 4 + 60 * shared["tag"]

    class AddTag:
        def __call__(self, image):
            return torch.cat([image, torch.full((1, *image.shape[1:]), float(shared["tag"]))])

    steps = [Tag(), v1.RandomHorizontalFlip(), v1.ConvertImageDtype(torch.float32), AddTag()]
    loader = Loader(Images(v1.Compose(steps)), batch_size=8, cache=tmp_path / "a.mf")
    for _ in range(EPOCHS):
        for images, _ in loader:
            assert torch.equal((images[:, 0, 0, 0] * 255 / 60).floor(), images[:, 3, 0, 0])


def test_steps_without_memory_stay_in_batches():
    class Invert:
        def __call__(self, image):
            return 255 - image if random.random() < 0.5 else image

    made = cut(Images(v1.Compose([Invert(), v1.RandomHorizontalFlip(), Invert()])))
    assert "batched: RandomHorizontalFlip; sample by sample in one process, as they are: Invert, Invert" in made.line


def test_the_line_counts_the_steps_of_several_views():
    class Views(Images):
        def __getitem__(self, index):
            return [self.transform(self.image(index)) for _ in range(3)]

    made = cut(Views(v1.Compose([v1.RandomHorizontalFlip(), v1.ConvertImageDtype(torch.float32)])))
    assert "batched: RandomHorizontalFlip (3 times), ToDtype (3 times)" in made.line


DOMAIN = ContextVar("domain", default=0)


class BySortedDomain(Images):
    """The neighbours of nearly every row have its domain."""

    def __getitem__(self, index):
        DOMAIN.set(index // (ROWS // 2))
        return super().__getitem__(index)


def test_what_a_step_is_told_of_a_row_is_not_taken_from_another_row():
    def shift(image):
        return image + random.randrange(4) + 100 * DOMAIN.get()

    with pytest.raises(SplitError, match="make another sample of what would be stored"):
        prove(BySortedDomain(shift), rows_to_prove(ROWS))


@pytest.mark.parametrize("in_class", [False, True])
def test_a_replaced_method_of_a_step_is_kept(tmp_path, monkeypatch, in_class):
    crop = v1.RandomCrop(12)
    owner = v1.RandomCrop if in_class else crop
    replaced = lambda image, output_size: (0, random.choice([1, 3]), 12, 12)  # noqa: E731
    monkeypatch.setattr(owner, "get_params", staticmethod(replaced) if in_class else replaced)
    dataset = Images(v1.Compose([crop, v1.ConvertImageDtype(torch.float32)]))
    loader = Loader(dataset, batch_size=8, cache=tmp_path / "a.mf")
    lefts = {
        round(float(image[0, 0, 0] * 255 - index) / 8)
        for _ in range(EPOCHS)
        for images, indices in loader
        for image, index in zip(images, indices, strict=True)
    }
    assert lefts == {1, 3}


def test_a_pipeline_in_an_attribute_of_the_class_is_found():
    class Flipped(Images):
        transform = v1.Compose([v1.RandomHorizontalFlip()])

        def __init__(self):
            pass

    assert "split dataset.transform before RandomHorizontalFlip" in cut(Flipped()).line


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_scripted_pipeline_is_called_as_a_whole():
    scripted = torch.jit.script(torch.nn.Sequential(v1.RandomHorizontalFlip(), v1.ConvertImageDtype(torch.float32)))
    assert "sample by sample in one process, as they are" in cut(Images(scripted)).line


class Pool:
    """Keeps a piece of each image that it gets, and adds one once it has enough of them."""

    def __init__(self):
        self.pieces, self.count = [], 10**9

    def __call__(self, image):
        self.pieces.append(1.0)
        return image + torch.rand(()) + (self.pieces[0] if len(self.pieces) > self.count else 0)


def test_a_step_that_changes_for_good_is_not_taken_for_one_that_tells_watched_steps():
    pool = Pool()
    made = cut(Images(pool)).dataset.cut
    errors = []
    for calls in range(24):  # the change comes at another place of a proof each time
        pool.count = len(pool.pieces) + calls
        try:
            prove_row(made, 0, SEEDS)
        except SplitError as error:
            errors.append(str(error))
        pool.count = 10**9
    assert len(errors) > 5
    assert not any("watched step" in error for error in errors)
