"""``forms={float: ...}``: tensors of floats rounded to 16 bits."""

import numpy as np
import pytest
import torch

import memfeed
from memfeed.convert import budget
from memfeed.convert.forms import Rounded
from memfeed.errors import SchemaError


class Floats(torch.utils.data.Dataset):
    classes = ("a", "b")

    def __init__(self, largest=1.0):
        self.largest, self.targets = largest, [0, 1] * 10

    def __len__(self):
        return 20

    def __getitem__(self, index):
        values = torch.linspace(0, self.largest, 7) + index / 7
        return {"x": values, "y": values.double().numpy(), "z": 1 / 3, "n": torch.tensor(index), "label": index % 2}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("workers", [0, 2])
def test_tensors_of_floats_are_rounded(dtype, workers, path):
    store = memfeed.cache(Floats(), path, forms={float: dtype}, workers=workers, progress=False)
    sample = Floats()[5]
    assert torch.equal(store[5]["x"], sample["x"].to(dtype))
    assert torch.equal(store[5]["y"], torch.from_numpy(sample["y"]).to(dtype))
    assert store[5]["z"] == 1 / 3  # a Python number is not a tensor
    assert (store[5]["n"].item(), store.classes, store.targets) == (5, ["a", "b"], [0, 1] * 10)
    assert next(iter(memfeed.Loader(store, 4)))["x"].dtype is dtype
    assert memfeed.cache(Floats(), path, forms={float: dtype}, progress=False) == store
    with pytest.raises(memfeed.errors.StaleStoreError, match=rf"cache\(\.\.\., forms={{float: {dtype}}}\)"):
        memfeed.cache(Floats(), path, progress=False)


def test_values_beyond_float16_are_refused(path):
    with pytest.raises(SchemaError, match=r"100000 in sample 0.*choose forms={float: torch.bfloat16}"):
        memfeed.cache(Floats(100_000.0), path, forms={float: torch.float16}, workers=0, progress=False)
    memfeed.cache(Floats(100_000.0), path, forms={float: torch.bfloat16}, workers=0, progress=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_error_advises_only_what_helps(dtype):
    rows = Rounded([torch.tensor([float("nan"), -1e300, float("inf")], dtype=torch.float64)], dtype)
    most = "65,504" if dtype is torch.float16 else r"3\.3895e\+38"
    with pytest.raises(SchemaError, match=rf"1e\+300 in sample 0, .* at most {most}: leave forms={{float: ...}} out"):
        rows[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"forms": torch.float16}, r"found forms=torch.float16; .* forms={float: torch.float16} rounds"),
        ({"forms": "x"}, "found forms='x'; expected for each field"),
        ({"forms": {float: torch.float16, "x": torch.float32}}, "whose float rounds field 'x' too; .* leave one"),
        ({"allow": None}, 'found allow=None; expected "random" or "copy"'),
        ({"allow": [["copy"]]}, r'found allow=\[\[.copy.\]\]; expected "random" or "copy"'),
        ({"worker_init_fn": 3}, "found worker_init_fn=3; expected a function"),
    ],
)
def test_arguments_without_a_meaning(options, message, path):
    with pytest.raises(ValueError, match=message):
        memfeed.cache(Floats(), path, progress=False, **options)


def test_rounding_without_a_meaning(path):
    with pytest.raises(ValueError, match="float16 or torch.bfloat16"):
        memfeed.cache(Floats(), path, forms={float: torch.float32}, progress=False)
    with pytest.raises(ValueError, match="forms="):
        memfeed.cache(np.zeros((4, 2), np.float32), path, forms={float: torch.float16}, progress=False)


def test_a_large_store_is_told_of_smaller_forms(path, monkeypatch, capsys):
    memfeed.cache(Floats(), path, workers=0)
    assert "--dry-run" not in capsys.readouterr().err
    monkeypatch.setattr(budget, "LARGE_SHARE", 0.0)
    memfeed.cache(Floats(), path, workers=0, overwrite=True)
    assert "--dry-run" in capsys.readouterr().err
