"""Steps that keep in an attribute what they drew: that is no change of the dataset."""

import copy
import random

import pytest
import torch
from test_changes import Transformed

from memfeed import Loader
from memfeed.errors import StaleStoreError
from memfeed.system.threads import end_all
from short_form import short_form


class Turn:
    """Keeps what it drew, at each call or only where it is applied."""

    def __init__(self, p, always=True):
        self.p, self.always, self.angle, self.is_applied = p, always, 0.0, False

    def __call__(self, image):
        drawn = random.random()
        self.is_applied = drawn < self.p
        if self.always or self.is_applied:
            self.angle = drawn
        return image.flip(-1) if self.is_applied else image


@pytest.fixture(autouse=True)
def quiet(capsys):
    yield
    end_all()


@pytest.mark.parametrize("workers", short_form([0, 1]))
@pytest.mark.parametrize(
    "step", short_form([Turn(0.5), Turn(0.05, always=False), Turn(0.05), Turn(0.5, always=False)], 2)
)
def test_what_a_step_keeps_at_a_call_is_no_setting(path, step, workers):
    step = copy.copy(step)
    dataset = Transformed([step])
    loaders = []
    for seed in range(2):
        random.seed(seed)
        loaders.append(Loader(dataset, 20, shuffle=True, cache=path, num_workers=workers))
        for loader in (*loaders, *loaders):
            assert len(list(loader)) == 3
            dataset[seed]
    step.p = 0.9
    for loader in loaders:
        with pytest.raises(StaleStoreError, match=r"dataset\.transform\[0\]\.p is 0\.9, and was"):
            next(iter(loader))


def test_what_a_fixed_step_keeps_of_one_row_is_no_setting(path):
    class Sized:
        def __init__(self):
            self.darkest, self.factor = None, 2

        def __call__(self, image):
            self.darkest = int(image.min()) if image.min() > 47 * 48 else 0
            return image * self.factor

    dataset = Transformed([Sized()])
    loader = Loader(dataset, 20, cache=path)
    for index in range(60):
        dataset[index]
        assert len(list(loader)) == 3
    dataset.transform[0].factor = 3
    with pytest.raises(StaleStoreError, match=r"dataset\.transform\[0\]\.factor is 3, and was 2"):
        next(iter(loader))


def test_albumentations_keeps_the_parameters_of_its_last_call(path):
    A = pytest.importorskip("albumentations")

    class Mirror(A.DualTransform):
        def apply(self, img, **params):
            return img[:, ::-1]

    class Own(Transformed):
        def __getitem__(self, index):
            image = self.images[index].permute(1, 2, 0).to(torch.uint8).numpy()
            return self.transform(image=image)["image"].copy(), index

    dataset = Own(A.Compose([Mirror(p=0.5)]))
    for _ in range(4):
        loader = Loader(dataset, 20, cache=path)
        for index in range(4):
            assert len(list(loader)) == 3
            dataset[index]
    dataset.transform.transforms[0].p = 0.9
    with pytest.raises(StaleStoreError, match=r"p is 0\.9, and was 0\.5"):
        next(iter(loader))
