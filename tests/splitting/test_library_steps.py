"""Steps of other libraries are read as transforms that a recipe may name."""

import pytest

from memfeed.schema.recipe import TRANSFORMS
from memfeed.splitting import library_steps
from memfeed.splitting.library_steps import transforms_for


@pytest.mark.parametrize(("module", "table"), library_steps._TABLES)
def test_each_step_has_a_name_that_a_recipe_knows(module, table):
    readers = {name for name, reader in table.items() if reader is not library_steps._nothing}
    assert {library_steps._OUR_NAMES.get(name, name) for name in readers} <= TRANSFORMS.keys()
    library = pytest.importorskip(module)
    assert any(hasattr(library, name) for name in table)


def test_steps_are_read():
    v2 = pytest.importorskip("torchvision.transforms.v2")
    (asked,) = transforms_for(v2.CenterCrop(8))
    assert (asked.name, asked.arguments, asked.of_masks) == ("CenterCrop", {"size": [8, 8]}, False)
    assert transforms_for(v2.ToImage()) == []
    assert transforms_for(v2.GaussianBlur(3)) is None
    assert transforms_for(v2.RandomCrop(8, padding_mode="edge")) is None


def test_a_step_that_somebody_changed_is_not_known():
    v2 = pytest.importorskip("torchvision.transforms.v2")
    changed = v2.RandomHorizontalFlip()
    changed.forward = lambda image: image
    assert transforms_for(changed) is None
    assert transforms_for(type("RandomHorizontalFlip", (v2.RandomHorizontalFlip,), {})()) is None
