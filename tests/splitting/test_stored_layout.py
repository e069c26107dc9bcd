"""Where a store keeps what is stored of a sample."""

import pytest
import torch
from idiom import Rows, Tensors
from PIL import Image
from torchvision.transforms import v2

from memfeed.schema.compare import equal
from memfeed.splitting.proof import prove
from memfeed.splitting.stored_layout import PATTERN, InPlace, in_place, named

FLIP = v2.RandomHorizontalFlip()


def proven(dataset, count=6):
    proof = prove(dataset, range(count))
    return proof.cut, list(proof.reads.values())


class Views(Tensors):
    def __getitem__(self, index):
        image = self.load(index)
        return {"one": self.transform(image), "two": self.transform(image), "label": index}


class Kinds(Tensors):
    def __getitem__(self, index):
        sample = {"image": self.transform(self.load(index)), "id": index}
        return {**sample, "weight": float(index), "box": torch.arange(4)} if index % 2 else {**sample, "name": "even"}


class Palette(Rows):
    def load(self, index):
        return Image.fromarray(self.images[index]).convert("P", palette=Image.Palette.ADAPTIVE, colors=16)


class Louder:
    """A random step of dicts, as of programs for sound; the next one adds a key before the others."""

    def __call__(self, sample):
        louder = {**sample, "wave": sample["wave"] * torch.rand(())}
        return {"input": louder["wave"].cumsum(-1), **louder}


class Sounds(Tensors):
    def __getitem__(self, index):
        return self.transform({"path": f"{index}.wav", "wave": self.load(index).float(), "rate": 8000})


@pytest.mark.parametrize("cls", [Rows, Tensors])
def test_a_stored_sample_looks_like_a_finished_one(cls):
    cut, reads = proven(cls(FLIP))
    layout = in_place(cut.patterns, reads[0])
    assert isinstance(layout, InPlace)
    image, label = layout.stored(0, reads[3].leaves)
    assert label == 3
    assert torch.equal(image, torch.from_numpy(cut.dataset.images[3]).permute(2, 0, 1))
    assert [layout.path(0, leaf) for leaf in range(2)] == [(0,), (1,)]


def test_an_image_that_several_leaves_are_made_of_is_one_field():
    cut, reads = proven(Views(FLIP))
    assert in_place(cut.patterns, reads[0]) is None
    layout = named(cut.patterns)
    assert layout.names == (("one", "label"),)
    assert layout.empty == {}
    assert sorted(layout.stored(0, reads[0].leaves)) == ["label", "one"]
    assert [layout.path(0, leaf) for leaf in range(3)] == [("one",), ("one",), ("label",)]


def test_the_entries_of_a_dict_that_steps_add_to_keep_their_names():
    cut, reads = proven(Sounds(Louder()))
    assert in_place(cut.patterns, reads[0]) is None
    layout = named(cut.patterns)
    stored = layout.stored(0, reads[2].leaves)
    assert (stored["path"], stored["rate"]) == ("2.wav", 8000)
    assert equal(stored["wave"], cut.dataset.load(2).float())
    assert sorted(stored) == ["path", "rate", "wave"]


def test_samples_of_two_patterns_have_empty_fields():
    cut, reads = proven(Kinds(FLIP))
    assert in_place(cut.patterns, reads[0]) is None
    layout = named(cut.patterns)
    assert set(layout.names[0]) == {"image", "id", "name"}
    assert set(layout.names[1]) == {"image", "id", "weight", "box"}
    assert sorted(layout.empty) == ["box", "name", "weight"]
    samples = [layout.stored(cut.known(read), read.leaves) for read in reads]
    assert [sample[PATTERN] for sample in samples] == [0, 1, 0, 1, 0, 1]
    assert [sample["name"] for sample in samples[:2]] == ["even", ""]
    assert [sample["weight"] for sample in samples[:2]] == [0.0, 1.0]
    assert (samples[0]["box"].shape, samples[0]["box"].dtype) == ((0,), torch.int64)
    assert {tuple(sample) for sample in samples} == {tuple(samples[0])}


def test_the_palette_of_an_image_has_a_field():
    cut, _ = proven(Palette(FLIP))
    assert named(cut.patterns).names == (("0", "0_palette", "1"),)


@pytest.mark.parametrize("cls", [Rows, Tensors, Views, Kinds, Palette])
def test_loaded_is_the_inverse_of_stored(cls):
    cut, reads = proven(cls(FLIP))
    layout = named(cut.patterns)
    for read in reads:
        number = cut.known(read)
        pattern, leaves = layout.loaded(layout.stored(number, read.leaves))
        assert pattern is cut.patterns[number]
        assert all(map(equal, leaves, read.leaves))
        assert len(leaves) == len(read.leaves)
        assert equal(cut.rebuild(pattern, leaves, read.states), read.sample)
