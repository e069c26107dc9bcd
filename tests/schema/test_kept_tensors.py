"""Tensors of other libraries that keep what they hold beside their numbers. Those of graphs: test_graphs."""

import json
import sys
import types
from enum import Enum

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import memfeed
from memfeed.errors import SchemaError, StaleStoreError
from memfeed.schema import kept_tensors
from memfeed.schema.kept_tensors import make_kept
from support import Made, cache, equal


class Keys(str, Enum):
    AFFINE = "affine"


class MetaTensor(torch.Tensor):
    """What memfeed knows of MONAI's: its name, its module and its attributes."""

    def as_tensor(self):
        return self.as_subclass(torch.Tensor)


MetaTensor.__module__ = "monai.data.meta_tensor"


@pytest.fixture(autouse=True)
def monai(monkeypatch):
    module = types.ModuleType("monai.data.meta_tensor")
    module.MetaTensor = MetaTensor
    for name in ("monai", "monai.data"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    kept_tensors._class.cache_clear()
    yield
    kept_tensors._class.cache_clear()


def scan(i, **more):
    made = torch.full((1, 2, 3), float(i)).as_subclass(MetaTensor)
    made._meta = {
        Keys.AFFINE: torch.eye(4, dtype=torch.float64) / 3 * i,
        "spatial_shape": np.array([2, 3], np.int16),
        "scale": np.float32(0.1),
        "filename_or_obj": f"{i}.nii",
        "nested": {"pair": (1, [2.5, None, True]), "half": torch.ones(2, dtype=torch.bfloat16)},
        "empty": np.zeros((0, 3)),
        **more,
    }
    made._applied_operations, made._pending_operations, made._is_batch = [{"class": "Spacing"}] * (i % 3), [], False
    return made


def same(one, other):
    state, expected = vars(one), vars(other)
    if state.keys() != expected.keys() or not torch.equal(one.as_tensor(), other.as_tensor()):
        return False
    return type(one) is type(other) and all(equal(state[name], expected[name]) for name in state)


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"cache": True}])
def test_what_a_tensor_knows_comes_back_with_its_sample(path, options):
    samples = [{"image": scan(i), "label": i} for i in range(20)]
    options = {name: path if name == "cache" else value for name, value in options.items()}
    loader = memfeed.Loader(samples, 4, collate_fn=list, **options)
    found = [sample for batch in loader for sample in batch]
    for sample in (*found, *loader.store):
        expected = samples[int(sample["label"])]["image"]
        assert list(sample["image"]._meta) == list(expected._meta)
        assert same(sample["image"], expected)
    assert len(found) == 20


def test_a_batch_is_that_of_dataloader(path):
    samples = [scan(i) for i in range(8)]
    for batch, expected in zip(memfeed.Loader(cache(samples, path), 4), DataLoader(samples, 4), strict=True):
        assert type(batch) is type(expected)
        assert torch.equal(batch.as_tensor(), expected.as_tensor())


def test_a_change_of_what_a_tensor_knows_is_noticed(path):
    memfeed.cache([scan(i) for i in range(20)], path, progress=False)
    with pytest.raises(StaleStoreError, match=r"no longer matches what was stored: field state, sample 0"):
        memfeed.cache([scan(i, filename_or_obj="other.nii") for i in range(20)], path, progress=False)


def test_what_json_does_not_say_is_refused(path):
    with pytest.raises(SchemaError, match=r"sample 0, field value: found a MetaTensor that holds a object; expected"):
        cache([scan(i, thing=object()) for i in range(8)], path)
    unknown = scan(0)
    unknown._cache = 1
    with pytest.raises(SchemaError, match="found a MetaTensor with _cache, which a store does not know"):
        cache([unknown] * 8, path)


def test_keys_that_are_strings_of_an_enum(path):
    """As those of MONAI's `meta`; they are looked up by the strings that they are equal to."""
    samples = [{Keys.AFFINE: torch.eye(2) * i, "label": i} for i in range(8)]
    for batch, expected in zip(memfeed.Loader(samples, 4, cache=path), DataLoader(samples, 4), strict=True):
        assert torch.equal(batch[Keys.AFFINE], expected["affine"])
        assert batch.keys() == expected.keys()


def test_a_batch_is_not_taken_apart(path):
    with memfeed.Writer(path) as writer:
        writer.append({"image": scan(1)})
        with pytest.raises(SchemaError, match="found a batch of MetaTensor; expected samples: append them one by one"):
            writer.extend({"image": scan(2)})


def test_parts_of_another_name(path):
    cache([scan(i) for i in range(8)], path)
    manifest = path / "memfeed.json"
    contents = json.loads(manifest.read_text())
    contents["schema"]["structure"]["keys"] = ["numbers", "rest"]
    manifest.write_text(json.dumps(contents))
    with pytest.raises(memfeed.errors.StoreError, match="a tensor with other parts than numbers, state"):
        memfeed.open(path)


class Derived(MetaTensor):
    pass


def test_a_derived_class_is_refused(path):
    with pytest.raises(SchemaError, match="found Derived .*of which a store would lose the class"):
        cache(Made(lambda i: scan(i).as_subclass(Derived), 8), path)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("MetaTensor", [torch.zeros(2)]),
        ("MetaTensor", [torch.zeros(2), "[1]"]),
        ("MetaTensor", [torch.zeros(2), '{"__class__": 1}']),
        ("MetaTensor", [torch.zeros(2), '{"_meta": ["torch", "load", [], []]}']),
        ("MetaTensor", [torch.zeros(2), '{"_meta": ["numpy", "<f4", false, [4611686018427387904], []]}']),
        ("MetaTensor", [torch.zeros(2), '{"_meta": ' + '["list", ' * 5000 + "1" + "]" * 5000 + "}"]),
    ],
)
def test_parts_of_a_stranger(name, parts):
    with pytest.raises(SchemaError, match=f"as the parts of a {name}, which refuses them .*; expected its numbers"):
        make_kept(name, parts)


def test_a_class_that_is_not_known_and_a_library_that_is_not_there(monkeypatch):
    with pytest.raises(SchemaError, match="found a tensor of the class Popen .*a version of memfeed that knows it"):
        make_kept("Popen", [torch.zeros(2), "{}"])
    monkeypatch.setitem(sys.modules, "monai.data.meta_tensor", None)
    with pytest.raises(SchemaError, match=r"of the class MetaTensor .*pip install monai"):
        make_kept("MetaTensor", [torch.zeros(2), "{}"])
