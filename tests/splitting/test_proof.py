"""What proves a cut, what refuses one, and what is proven while a store is filled."""

import random

import pytest
import torch
from idiom import Rows, Tensors
from torchvision.transforms import v2

from memfeed.errors import SplitError
from memfeed.splitting import proof as proof_module
from memfeed.splitting import split as split_module
from memfeed.splitting.cut import StatefulError
from memfeed.splitting.proof import prove
from memfeed.splitting.rest import rest_of
from memfeed.splitting.split import CutDataset

FLIP = v2.RandomHorizontalFlip()


class Labelled(Tensors):
    def __getitem__(self, index):
        return self.transform(self.load(index)), self.label(self, index)


def counted(dataset, index):
    dataset.__dict__["reads"] = dataset.__dict__.get("reads", 0) + 1
    return dataset.reads


class BySeed(Rows):
    def __getitem__(self, index):
        torch.manual_seed(index)
        return super().__getitem__(index)


@pytest.mark.parametrize("dataset", [Rows(v2.CenterCrop(20)), BySeed(FLIP)])
def test_samples_that_are_the_same_under_all_seeds_need_no_cut(dataset):
    state = torch.get_rng_state()
    assert prove(dataset, range(6)) is None
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("seconds", "proven"), [(0.0, 4), (600.0, 9)])
def test_a_slow_dataset_is_proven_on_four_rows_at_first(seconds, proven, monkeypatch):
    monkeypatch.setattr(proof_module, "SECONDS", seconds)
    rows = [5, 1, 9, 3, 8, 2, 4, 30, 17]
    proof = prove(Rows(FLIP), rows)
    assert proof.rows == rows[:proven]
    assert proof.pending == set(rows[proven:])
    assert list(proof.reads) == rows
    assert [read.leaves[1] for read in proof.reads.values()] == [row % 10 for row in rows]
    assert f"on {proven} whole samples" in str(proof)


class Branching(Tensors):
    def __getitem__(self, index):
        return self.transform(self.load(index)), -1 if random.random() < 0.1 else index


class Rare:
    is_inverted = False

    def __call__(self, image):
        self.is_inverted = random.random() < 0.1
        return 255 - image if self.is_inverted else image


@pytest.mark.parametrize(
    ("dataset", "kind", "message"),
    [
        (Labelled(v2.CenterCrop(20), label=counted), StatefulError, "no generator has moved"),
        (Branching(FLIP), SplitError, "draws random numbers"),
        (Labelled(Rare(), label=lambda one, i: -1 if one.transform.is_inverted else i), SplitError, "on the seed"),
    ],
)
def test_a_label_that_depends_on_a_draw_or_on_a_count_is_refused(dataset, kind, message):
    with pytest.raises(kind, match=message):
        prove(dataset, range(4))


def filled(dataset, rows=range(8)):
    proof = prove(dataset, rows)
    return CutDataset(proof, rest_of(proof).layout, None, is_remade=False)


def test_a_sample_of_an_unseen_kind_is_an_error_with_its_row():
    cut = filled(Labelled(FLIP, label=lambda dataset, index: "last" if index == 60 else index))
    assert cut[59][1] == 59
    with pytest.raises(SplitError, match="sample 60: .*value str where others have value int"):
        cut[60]


def test_rows_are_proven_while_a_store_is_filled(monkeypatch):
    monkeypatch.setattr(proof_module, "SECONDS", 0.0)
    monkeypatch.setattr(split_module, "WATCH_SHARE", float("inf"))
    cut = filled(Rows(FLIP))
    counts = [cut.proven_rows for index in range(64) if cut[index] is not None]
    assert counts[:5] == [4, 4, 4, 4, 5]  # a pending row is proven at once: it may be the last one
    assert counts[8:33] == [8] * 25
    assert counts[33:] == [9] * 31


class Gain:
    source = random

    def __call__(self, image):
        return image * self.source.random()


def test_a_step_that_changes_after_the_proof_is_found():
    step = Gain()
    cut = filled(Tensors(step))
    step.source = random.SystemRandom()
    with pytest.raises(SplitError, match="make another sample"):
        [cut[index] for index in range(30, 36)]


class Plus:
    def __call__(self, values):
        return values + 1


PLUS = Plus()


class Keeps(torch.utils.data.Dataset):
    """Keeps what it drew when a sample was read first, and uses a pipeline of the module."""

    def __init__(self):
        self.kept = {}

    def __len__(self):
        return 2

    def __getitem__(self, index):
        if index not in self.kept:
            self.kept[index] = torch.rand(3)
        return PLUS(self.kept[index])


def test_a_dataset_that_has_kept_its_draws_is_not_read_again_to_look_elsewhere():
    with pytest.raises(SplitError, match="keeps what came of them"):
        prove(Keeps(), range(2))


class Boxed(Tensors):
    """Steps of a Compose that takes the labels of boxes out of the sample first: they cannot be called again by it."""

    def __getitem__(self, index):
        image, boxes = self.load(index).permute(1, 2, 0).numpy(), [[1.0, 2.0, 9.0, 10.0 + index % 3]]
        made = self.transform(image=image, bboxes=boxes, labels=[index % 3])
        return torch.from_numpy(made["image"].copy()), torch.as_tensor(made["bboxes"], dtype=torch.float32)


def test_a_pipeline_whose_half_raises_is_cut_before_all_of_it():
    """It was taken for one that cannot be cut: ValueError: Your 'label_fields' are not valid."""
    A = pytest.importorskip("albumentations")
    boxes = A.BboxParams(format="pascal_voc", label_fields=["labels"])
    dataset = Boxed(A.Compose([A.Resize(24, 24), A.HorizontalFlip(p=0.5)], bbox_params=boxes))
    assert prove(dataset, range(6)) is not None
