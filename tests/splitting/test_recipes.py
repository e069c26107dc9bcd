"""Split pipelines equal the originals with their randomness off, and draw from the same distribution with it on."""

import numpy as np
import pytest
import torch
from recipes import COUNT, RECIPES, albumentations, cifar, reference_eval, reference_train, segmentation, v2_dtypes
from scipy import stats

import memfeed
from memfeed.transforms import PerSample
from short_form import short_form

BATCHED = {
    reference_train: "RandomResizedCrop RandomHorizontalFlip ToDtype Normalize RandomErasing",
    reference_eval: "ToDtype Normalize",
    cifar: "RandomCrop RandomHorizontalFlip ToDtype Normalize",
    segmentation: "RandomResizedCrop RandomHorizontalFlip ToDtype ToDtype Normalize",
    albumentations: "RandomCrop RandomHorizontalFlip PerSample Normalize",
    v2_dtypes: "RandomResizedCrop RandomHorizontalFlip ColorJitter ToDtype Normalize",
}
ONE_LEVEL = 1.01 / 255 / 0.224  # of 8 bits, after Normalize: resampling rounds


def converted(dataset, path, **options):
    return memfeed.cache(dataset, path / "s.mf", split=True, workers=0, progress=False, **options)


def parts(sample):
    return list(sample.values()) if isinstance(sample, dict) else list(sample)


@pytest.mark.parametrize("recipe", short_form(RECIPES, 3))
def test_a_split_pipeline_equals_the_original_with_its_randomness_off(recipe, tmp_path):
    dataset = recipe(True)
    store = converted(dataset, tmp_path)
    batch = next(iter(memfeed.Loader(store, 8)))
    for index in range(8):
        for ours, theirs in zip(parts(batch), parts(dataset[index]), strict=True):
            theirs = torch.as_tensor(theirs)
            assert ours.dtype == theirs.dtype
            assert ours[index].shape == theirs.shape
            tolerance = ONE_LEVEL if theirs.dtype.is_floating_point else 0
            torch.testing.assert_close(ours[index], theirs.as_subclass(torch.Tensor), atol=tolerance, rtol=0)


@pytest.mark.parametrize("recipe", short_form(RECIPES, 3))
def test_what_is_stored_and_what_is_batched(recipe, tmp_path):
    store = converted(recipe(False), tmp_path)
    assert store.schema.fields[0].dtype == "uint8"  # before ToTensor, Normalize and the like
    assert [type(one).__name__ for one in store.transform.transforms] == BATCHED[recipe].split()


def observed(sample):
    """Return what the pixels of a transformed image say about the parameters that were drawn.

    Red is the column in the original and green the row: so their ratios at the edges show place, size and mirroring.
    """
    image = parts(sample)[0].double()
    red, green = image[0], image[1]
    middle = image.shape[-1] // 2
    found = red[middle, 3], red[middle, -4], green[3, middle], green[-4, middle]
    return [round(value.item(), 3) for value in found]  # two ways to normalise differ in the last bit


@pytest.mark.parametrize("recipe", short_form([r for r in RECIPES if r is not reference_eval], 3))
def test_parameters_have_the_distribution_of_the_original(recipe, tmp_path):
    dataset = recipe(False)
    store = converted(dataset, tmp_path)
    torch.manual_seed(0)
    theirs = np.array([observed(dataset[i]) for _ in range(3) for i in range(COUNT)])
    ours = []
    for epoch in range(3):
        loader = memfeed.Loader(store, COUNT, seed=0)
        loader.set_epoch(epoch)
        batch = parts(next(iter(loader)))
        ours += [observed([image]) for image in batch[0]]
    ours = np.array(ours)
    for column in range(ours.shape[1]):
        assert stats.ks_2samp(ours[:, column], theirs[:, column]).pvalue > 1e-4
    # where an image was cut and how wide go together
    spans = [values[:, 1] - values[:, 0] for values in (ours, theirs)]
    assert stats.ks_2samp(*spans).pvalue > 1e-4


def test_masks_follow_their_images(tmp_path):
    store = converted(segmentation(False), tmp_path)
    images, masks = next(iter(memfeed.Loader(store, 32, shuffle=True)))
    red = (images[:, 0] * 0.229 + 0.485) * 255
    assert masks.dtype == torch.int64
    assert ((red / 16 - masks).abs() < 2.5).double().mean() > 0.99  # a mask is red // 16


def test_what_has_no_counterpart_is_called_for_each_sample(tmp_path):
    store = converted(albumentations(False), tmp_path)
    (own,) = [one for one in store.transform.transforms if isinstance(one, PerSample)]
    assert [type(step).__name__ for step in own.fn.steps] == ["RandomBrightnessContrast"]
    with pytest.raises(memfeed.errors.StoreError, match="RandomBrightnessContrast"):
        memfeed.open(tmp_path / "s.mf").transform  # noqa: B018
