"""A refusal names the leaf, the sample and the seed that differ, the cause, and what to write."""

import itertools
import random
import re

import albumentations as A
import numpy as np
import pytest
import torch
from idiom import Rows, Tensors
from idioms_arrays import Arrays
from torchvision.transforms import transforms as v1

from memfeed.errors import SplitError
from memfeed.splitting.proof import prove, rows_to_prove

FLIP = v1.RandomHorizontalFlip()
POINTS = [(1.0, 2.0), (30.0, 4.0)]
ARRAY = np.array(POINTS, np.float32)
FLIPPED = A.Compose([A.HorizontalFlip(p=0.5)], keypoint_params=A.KeypointParams(format="xy"))


def refusal(dataset):
    with pytest.raises(SplitError) as caught:
        prove(dataset, rows_to_prove(len(dataset)))
    return str(caught.value)


class Keypoints(Rows):
    """The key points as a function of what the pipeline returned, which is written in the dataset itself."""

    def __getitem__(self, index):
        made = self.transform(image=self.images[index], keypoints=self.points)
        return made["image"], type(self).change(made["keypoints"])


def keypoints(change, points):
    cls = type("Changed", (Keypoints,), {})
    cls.change = staticmethod(change)
    return cls(FLIPPED, points=points)


@pytest.mark.parametrize("points", [POINTS, ARRAY], ids=["list", "array"])
@pytest.mark.parametrize(
    "change",
    [
        lambda points: np.array(points),
        lambda points: np.array(points, dtype=np.float32),
        lambda points: np.array(points) / 32,
        lambda points: np.array(points).reshape(-1),
        lambda points: torch.from_numpy(np.array(points, np.float32)),
        np.asarray,
        torch.tensor,
    ],
)
def test_an_array_made_of_a_result_is_followed(change, points):
    usual = np.array
    proof = prove(keypoints(change, points), rows_to_prove(64))
    assert [None in pattern.links for pattern in proof.cut.patterns] == [False]
    assert np.array is usual


def test_an_array_of_parts_of_a_result_is_followed():
    proof = prove(keypoints(lambda points: np.array([points[1], points[0]]), ARRAY), rows_to_prove(64))
    assert [None in pattern.links for pattern in proof.cut.patterns] == [False]


def test_numbers_that_are_taken_out_one_by_one_are_named():
    text = refusal(keypoints(lambda points: np.array([[x / 2, y] for x, y in points]), POINTS))
    assert "field 1 of sample 60, which would be stored, depends on the seed: under seed 1 found 0.5 at [0, 0]" in text
    assert "expected 15.0 (2 elements differ) as under seed 0" in text
    assert "takes numbers out of a result of its pipeline one by one" in text
    assert "np.array(points)" in text


def test_another_way_under_another_seed_is_named():
    class Sometimes(Tensors):
        def __getitem__(self, index):
            image = self.transform(self.load(index))
            return image, (image[0] if image[0, 0, 0] > image[0, 0, -1] else self.load(index)[0])

    assert "takes a value out of its pipeline's result (__bool__)" in refusal(Sometimes(FLIP))


def test_a_counter_is_told_from_code_that_looks_at_the_steps():
    count = itertools.count()

    def counting(image):
        return image + random.randrange(2) + next(count) % 2

    text = refusal(Tensors(counting))
    assert "of sample 60 (seed 0): field 0: found" in text
    assert "a counter, a cache, the time, os.urandom" in text

    class Looking(Tensors):
        def __getitem__(self, index):
            return self.transform(self.load(index)), int(type(self.transform) is v1.RandomHorizontalFlip)

    text = refusal(Looking(FLIP))
    assert "another sample 60 under the same seed (0) while its steps are watched: field 1: found 0, expected 1" in text
    assert "Ask isinstance(x, C)" in text


def test_a_step_that_no_seed_sets_is_not_blamed_on_exif_data():
    count = itertools.count(1)
    said = refusal(Rows(v1.Compose([FLIP, v1.ToTensor(), lambda image: image / next(count)])))
    assert "Exif" not in said
    assert "something changes from call to call that no seed sets" in said


class Shift:
    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def __call__(self, image):
        return image + float(self.rng.random())


def test_steps_that_draw_the_same_numbers_are_refused():
    with_seed = A.Compose([A.RandomCrop(24, 24), A.HorizontalFlip(), A.VerticalFlip()], seed=137)
    assert "expected generators with different seeds: leave seed= of an albumentations" in refusal(Arrays(with_seed))
    tied = v1.Compose([v1.ToTensor(), Shift(7), Shift(7)])
    assert "which are in the same state, so they draw the same numbers" in refusal(Rows(tied))
    assert prove(Rows(v1.Compose([v1.ToTensor(), Shift(7), Shift(8)])), rows_to_prove(64)) is not None


class Decides(Rows):
    """A method draws, rarely with an effect, and the dataset's own code decides by what it returns."""

    def is_dropped(self):
        return random.random() < 0.001

    def __getitem__(self, index):
        caption = "" if self.is_dropped() else f"caption {index}"
        return self.transform(self.load(index)), caption


class Writes(Tensors):
    """A method draws and rarely writes into its argument; it returns nothing."""

    def cut_out(self, image):
        if random.random() < 0.001:
            image[:, :16, :16] = 0

    def __getitem__(self, index):
        image = self.load(index).clone()
        self.cut_out(image)
        return self.transform(image), self.labels[index]


@pytest.mark.parametrize("make", [Decides, Writes])
def test_a_rare_decision_outside_the_steps_is_refused(make):
    steps = [FLIP, v1.ToTensor()] if make is Decides else [FLIP]
    said = refusal(make(v1.Compose(steps)))
    assert re.search("(draws, and that nothing of its result is in the sample|something beside the random steps)", said)
