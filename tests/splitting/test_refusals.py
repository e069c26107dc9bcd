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

from memfeed.convert.splits import rows_to_prove
from memfeed.errors import SplitError
from memfeed.splitting.proof import prove
from memfeed.splitting.rest import rest_of
from memfeed.splitting.split import CutDataset

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
    assert "expected other seeds: leave seed= of an albumentations" in refusal(Arrays(with_seed))
    tied = v1.Compose([v1.ToTensor(), Shift(7), Shift(7)])
    assert "which are in the same state, so they draw the same numbers" in refusal(Rows(tied))
    assert prove(Rows(v1.Compose([v1.ToTensor(), Shift(7), Shift(8)])), rows_to_prove(64)) is not None


class Some(Rows):
    """Two steps that draw from generators in one state, for all samples but the first that is looked at."""

    def __init__(self, transform):
        super().__init__(transform)
        self.more = v1.Compose([Shift(7), Shift(7)])

    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return (image if index == rows_to_prove(len(self))[0] else self.more(image)), label


def test_steps_that_draw_the_same_numbers_for_some_samples_are_refused_too():
    assert "which are in the same state" in refusal(Some(v1.Compose([FLIP, v1.ToTensor()])))


class Twice(Shift):
    def __call__(self, image):
        return super().__call__(super().__call__(image))


def test_steps_whose_generators_are_soon_apart_are_split():
    """As the two generators of each random step of MONAI, which begin in one state."""
    apart = v1.Compose([v1.ToTensor(), Shift(7), Twice(7)])
    assert prove(Rows(apart), rows_to_prove(64)) is not None


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
    assert re.search(
        "(decides by a bool|nothing of its result is in the sample|something beside the random steps)", said
    )


class Conditioned(Tensors):
    """The dataset tells its step the class of the sample, by an attribute of the step; few samples are of class 1."""

    def __getitem__(self, index):
        self.tell(int(index in (13, 40)))
        return self.transform(self.load(index)), index


class Inversion:
    label = 0

    def set_label(self, label):
        self.label = label

    def __call__(self, image):
        return 255 - image if random.random() < (0.9 if self.label else 0.1) else image


class ByAttribute(Conditioned):
    def tell(self, label):
        self.transform.label = label


class BySetter(Conditioned):
    def tell(self, label):
        self.transform.set_label(label)


class OfMethod(Conditioned):
    def tell(self, label):
        self.label = label

    def inverted(self, image):
        return self.inner(image)

    def inner(self, image):
        return 255 - image if random.random() < (0.9 if self.label else 0.1) else image

    def __getitem__(self, index):
        self.tell(int(index in (13, 40)))
        return self.inverted(self.load(index)), index


@pytest.mark.parametrize("make", [ByAttribute, BySetter, OfMethod])
def test_an_attribute_that_the_dataset_sets_for_a_random_step_is_refused_when_it_changes(make):
    dataset = make(Inversion())
    proof = prove(dataset, [1, 2, 3, 4])  # all of one class
    with pytest.raises(SplitError, match="the dataset changes the attribute 'label', which a random step reads"):
        for index in range(64):
            proof.cut.read(index)


class Counting(OfMethod):
    def tell(self, label):
        self.label, self.reads = 0, self.__dict__.get("reads", 0) + 1


def test_an_attribute_that_no_random_step_reads_may_change():
    proof = prove(Counting(None), range(4))
    assert all(proof.cut.known(proof.cut.read(index)) == 0 for index in range(64))


class Seeding:
    def __call__(self, image):
        torch.manual_seed(0)
        return image + int(255 * random.random())


def test_a_step_that_seeds_a_generator_is_refused():
    said = refusal(Tensors(v1.Compose([Seeding(), FLIP])))
    assert "dataset.transform seeds a random generator, so that later steps and samples always draw the same" in said


class Blanked(Tensors):
    def blanked(self, image):
        is_blank = random.random() < 0.001
        return (image * 0 if is_blank else image + int(99 * random.random())), is_blank


class DecidesByBool(Blanked):
    def __getitem__(self, index):
        image, is_blank = self.blanked(self.load(index))
        return image, -1 if is_blank else index


class ReturnsBool(Blanked):
    def __getitem__(self, index):
        image, is_blank = self.blanked(self.load(index))
        return image, is_blank, torch.tensor(is_blank)


def test_a_bool_of_a_random_step_is_a_leaf_and_no_decision():
    assert "decides by a bool that a random step returned" in refusal(DecidesByBool(None))
    proof = prove(ReturnsBool(None), range(4))
    assert [None in pattern.links for pattern in proof.cut.patterns] == [False]


class Erased(Tensors):
    """The second step changes the result of the first one in place: sometimes, or rarely."""

    def __getitem__(self, index):
        image = self.transform(self.load(index).float())
        return image, self.erase(image)


@pytest.mark.parametrize("p", [1.0, 0.5])
def test_whole_samples_are_made_again_if_a_step_changes_what_an_earlier_one_returned(p):
    proof = prove(Erased(FLIP, erase=v1.RandomErasing(p, inplace=True)), range(8))
    assert rest_of(proof).is_remade
    assert not rest_of(prove(Erased(FLIP, erase=v1.RandomErasing(p)), range(8))).is_remade


def test_a_step_that_changes_an_earlier_result_after_the_proof_is_refused():
    dataset = Erased(FLIP, erase=v1.RandomErasing(0.5))
    proof = prove(dataset, range(8))
    rest = rest_of(proof)
    dataset.erase.inplace = True
    cut = CutDataset(proof, rest.layout, None, is_remade=rest.is_remade)
    with pytest.raises(SplitError, match="changes, in place, what an earlier call returned"):
        [cut[index] for index in range(16)]


def test_a_sample_that_draws_in_another_place_than_the_proven_ones_is_named():
    class Rare(Tensors):
        def __getitem__(self, index):
            image = self.transform(self.load(index))
            return image + torch.rand(()) if index == 13 else image

    dataset = Rare(FLIP)
    proof = prove(dataset, range(8))
    cut = CutDataset(proof, rest_of(proof).layout, None, is_remade=False)
    with pytest.raises(SplitError, match=r"^sample 13: .* draws random numbers.*test_refusals.py:\d+\)\. None of"):
        [cut[index] for index in range(8, 16)]


class Packed:
    """What a pipeline's last step may put numbers in: OpenMMLab's DataSample, for example. It equals only itself."""

    def __init__(self, image):
        self.image = image


def test_an_object_that_equals_only_itself_is_named():
    found = refusal(Tensors(v1.Compose([FLIP, lambda image: {"image": image, "packed": Packed(image)}])))
    assert found.startswith("found an object of test_refusals.Packed in field 0.packed of a sample, which equals no")


def test_an_object_that_fails_as_a_copy_is_no_error_of_its_own():
    class Augmenter:
        def __init__(self):
            self.own = id(self)

        def flip(self, image):
            if self.own != id(self):
                raise RuntimeError("a copy")
            return image[::-1].copy() if random.random() < 0.5 else image

    class Own(Rows):
        def __getitem__(self, index):
            return self.augmenter.flip(self.images[index])

    assert "no attribute or method of Own draws" in refusal(Own(augmenter=Augmenter()))


def test_a_refusal_names_the_step_of_another_object_that_draws():
    class Augmenter:
        def choose(self):
            self.flips = random.random() < 0.5

        def apply(self, image):
            return image[::-1].copy() if self.flips else image

    class Own(Rows):
        def __getitem__(self, index):
            self.augmenter.choose()
            return self.augmenter.apply(self.images[index])

    assert "dataset.augmenter.choose draws, and that nothing of its result" in refusal(Own(augmenter=Augmenter()))
