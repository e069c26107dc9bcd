"""Sparse tensors, and those of other libraries, with what they hold beside their numbers. Graphs: test_graphs."""

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
from memfeed.schema.kept_tensors import make_kept, open_kept
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
    with pytest.raises(StaleStoreError, match=r"field state, sample 0: found '.*other\.nii.*, expected '.*0\.nii"):
        memfeed.cache([scan(i, filename_or_obj="other.nii") for i in range(20)], path, progress=False)


def traced():
    """Scans with the operations that MONAI notes: each has the address of its transform, as any object of a process."""
    spacing, scale = object(), object()
    samples = [scan(i) for i in range(20)]
    for sample in samples:
        inner = {"class": "Zoom", "id": id(scale), "extra_info": {}}
        sample._applied_operations = [{"class": "Spacing", "id": id(spacing), "extra_info": {"zoom": inner, "id": 7}}]
    return samples


def test_the_addresses_of_transforms_are_no_difference(path):
    """They are others in each process; an ``id`` that is "none" is one that MONAI does not compare."""
    first, second = traced(), traced()
    assert first[0]._applied_operations != second[0]._applied_operations
    memfeed.cache(first, path, progress=False)
    store = memfeed.cache(second, path, progress=False)
    inner = {"class": "Zoom", "id": "none", "extra_info": {}}
    expected = [{"class": "Spacing", "id": "none", "extra_info": {"zoom": inner, "id": 7}}]
    assert store[3]._applied_operations == expected


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


LAYOUTS = {
    "sparse_coo": lambda dense: dense.to_sparse(),
    "sparse_csr": lambda dense: dense.to_sparse_csr(),
    "sparse_csc": lambda dense: dense.to_sparse_csc(),
    "sparse_bsr": lambda dense: dense.to_sparse_bsr((2, 2)),
    "sparse_bsc": lambda dense: dense.to_sparse_bsc((2, 2)),
}


def sparse(layout, i, dtype=torch.float32):
    drawn = torch.rand(4 + 2 * (i % 3), 6, generator=torch.Generator().manual_seed(i))
    return LAYOUTS[layout]((drawn * (drawn > 0.6) * 10).to(dtype))


def same_sparse(one, other):
    facts = [(x.layout, x.shape, x.dtype, x.layout is torch.sparse_coo and x.is_coalesced()) for x in (one, other)]
    numbers = zip(open_kept(one)[:-1], open_kept(other)[:-1], strict=True)
    return facts[0] == facts[1] and all(map(torch.equal, *zip(*numbers, strict=True)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.bool, torch.complex64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sparse_tensors_come_back(path, layout, dtype):
    if layout[-3:] in ("bsr", "bsc") and dtype not in (torch.float32, torch.complex64):
        pytest.skip("torch makes no blocks of this dtype")
    samples = [{"matrix": sparse(layout, i, dtype), "label": i} for i in range(20)]
    store = cache(samples, path)
    assert all(same_sparse(store[i]["matrix"], samples[i]["matrix"]) for i in range(20))
    for k, batch in enumerate(memfeed.Loader(store, 4, collate_fn=list)):
        assert all(same_sparse(sample["matrix"], samples[4 * k + j]["matrix"]) for j, sample in enumerate(batch))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.sparse_coo_tensor(
            [[0, 0, 1], [1, 1, 0]], [1.0, 2.0, 3.0], (2, 3), check_invariants=True
        ),  # not coalesced
        torch.rand(4, 3).to_sparse(1),  # rows as values
        torch.zeros(2, 2).to_sparse(),
        torch.eye(3).to_sparse_csr().requires_grad_(),
    ],
    ids=["not coalesced", "hybrid", "empty", "with a gradient"],
)
def test_sparse_tensors_that_are_rare(path, tensor):
    assert same_sparse(cache([tensor, tensor], path)[1], tensor.detach())


def test_a_sparse_tensor_that_its_dataset_changes(path):
    """The dataset writes to one tensor again and again: a store has each of its states."""
    held = torch.eye(3).to_sparse_csr()

    class Reused(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, i):
            held.values()[:] = i
            return held

    found = cache(Reused(), path)
    assert [found[i].values().tolist() for i in range(8)] == [[i] * 3 for i in range(8)]


@pytest.mark.parametrize("change", [1.5, "indices"])
def test_a_sparse_tensor_that_changed_is_noticed(path, change):
    memfeed.cache([torch.eye(3).to_sparse() for _ in range(20)], path, progress=False)
    other = torch.eye(3).flip(0).to_sparse() if change == "indices" else (torch.eye(3) * change).to_sparse()
    with pytest.raises(StaleStoreError, match=f"field {'indices' if change == 'indices' else 'values'}, sample 0"):
        memfeed.cache([other] * 20, path, progress=False)


def test_a_batch_of_sparse_tensors_is_refused_as_by_dataloader(path):
    samples = [torch.eye(3).to_sparse()] * 8
    for loader in (DataLoader(samples, 4), memfeed.Loader(cache(samples, path), 4)):
        with pytest.raises(RuntimeError, match="Batches of sparse tensors are not currently supported"):
            next(iter(loader))


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("sparse_coo", [torch.tensor([[0, 7]]), torch.ones(2), '{"size": [3], "is_coalesced": true}']),
        ("sparse_coo", [torch.tensor([[1, 0]]), torch.ones(2), '{"size": [3], "is_coalesced": true}']),
        ("sparse_coo", [torch.tensor([[0, 1]]), torch.ones(2), '{"size": [3]}']),
        ("sparse_coo", [torch.tensor([[0, 1]]), torch.ones(2), '{"size": 3, "is_coalesced": false}']),
        ("sparse_csr", [torch.tensor([0, 1, 9]), torch.tensor([0]), torch.ones(1), '{"size": [2, 2]}']),
        ("sparse_csr", [torch.tensor([0, 1, 1]), torch.tensor([-1]), torch.ones(1), '{"size": [2, 2]}']),
        (
            "sparse_csr",
            [torch.tensor([0, 1, 1]), torch.tensor([0]), torch.ones(1), '{"size": [2, 4611686018427387904]}'],
        ),
        ("sparse_csr", [torch.tensor([0, 1, 1]), torch.tensor([0]), torch.ones(1), "[]"]),
        ("sparse_bsr", [torch.tensor([0, 1]), torch.tensor([0]), torch.ones(1), '{"size": [2, 2]}']),
    ],
)
def test_parts_of_a_sparse_tensor_that_lie(name, parts):
    with pytest.raises(SchemaError, match=f"as the parts of a {name}, which refuses them .*; expected its "):
        make_kept(name, parts)


def test_a_class_that_is_not_known_and_a_library_that_is_not_there(monkeypatch):
    with pytest.raises(SchemaError, match="found a tensor of the class Popen .*a version of memfeed that knows it"):
        make_kept("Popen", [torch.zeros(2), "{}"])
    monkeypatch.setitem(sys.modules, "monai.data.meta_tensor", None)
    with pytest.raises(SchemaError, match=r"of the class MetaTensor .*pip install monai"):
        make_kept("MetaTensor", [torch.zeros(2), "{}"])
