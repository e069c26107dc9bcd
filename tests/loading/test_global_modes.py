"""`torch.inference_mode` and `torch.set_default_device` of the caller change neither stores nor batches."""

import ast
from pathlib import Path

import pytest
import torch

import memfeed
import memfeed.transforms as T

ROWS = 40


def sample(i):
    return {
        "image": torch.full((3, 16, 16), i, dtype=torch.uint8, device="cpu"),
        "tokens": torch.arange(i % 5, device="cpu"),
        "boxes": torch.zeros(2, 4, device="cpu"),
        "name": f"n{i}",
        "label": i,
    }


@pytest.fixture
def samples():
    return [sample(i) for i in range(ROWS)]


def test_maps_of_inference_mode_are_ordinary_tensors(tmp_path, samples):
    with torch.inference_mode():
        store = memfeed.cache(samples, tmp_path / "s.mf", progress=False)
        for field in ("image", "tokens", "label"):
            store.column(field)[0]
        loader = memfeed.Loader(store, 8)
        list(loader)
    assert not store.column("image").is_inference()
    assert not store.column("tokens")[3].is_inference()
    for batch in loader:
        assert not batch["image"].is_inference()
        assert not batch["tokens"].is_inference()
        (torch.ones((), requires_grad=True) * batch["image"]).sum().backward()


def is_inference(batch):
    if isinstance(batch, torch.Tensor):
        return batch.is_inference()
    parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else ()
    return any(map(is_inference, parts))


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"transform": T.RandomHorizontalFlip(on="image")},
        {"transform": {"image": lambda image: image.float()}},
        {"shuffle": True, "return_rows": True, "last": "pad"},
        {"pad": {"tokens": 0}},
        {"sampler": range(ROWS)},
        {"collate_fn": lambda samples: torch.stack([sample["image"] for sample in samples])},
        {"batch_size": 1},
    ],
    ids=lambda options: ",".join(options) or "plain",
)
def test_inference_mode_that_is_left_within_an_epoch(tmp_path, samples, options, prefetch):
    store = memfeed.cache(samples, tmp_path / "s.mf", progress=False)
    loader = memfeed.Loader(store, **{"batch_size": 4, "prefetch_factor": prefetch, **options})
    for _ in range(2):
        batches = iter(loader)
        with torch.inference_mode():
            next(batches)
        assert not any(is_inference(batch) for batch in batches)
        batches = iter(loader)
        next(batches)
        with torch.inference_mode():
            next(batches)
            assert torch.is_inference_mode_enabled()
        with torch.no_grad():
            next(batches)
            assert not torch.is_grad_enabled()
        batch = next(batches)
        image = batch if isinstance(batch, torch.Tensor) else batch["image"]
        (torch.ones((), requires_grad=True) * image.float()).sum().backward()


STEPS = [
    T.RandomHorizontalFlip(on="image"),
    T.RandomCrop(12, padding=2, on="image"),
    T.RandomResizedCrop(8, on="image"),
    T.RandomRotation(20, on="image"),
    T.RandomAffine(20, on="image"),
    T.ColorJitter(0.2, 0.2, 0.2, on="image"),
    T.RandomErasing(1.0, on="image"),
    T.Compose([T.RandomHorizontalFlip(on="image"), T.Normalize([0.5] * 3, [0.2] * 3, on="image")]),
]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: type(step).__name__)
def test_the_default_device_does_not_leak_into_transforms(tmp_path, samples, step):
    store = memfeed.cache(samples, tmp_path / "s.mf", progress=False)
    expected = [batch["image"] for batch in memfeed.Loader(store, 8, shuffle=True, seed=0, transform=step)]
    with torch.device("meta"):  # of this thread alone: it takes the work that other threads might take
        found = [batch["image"] for batch in memfeed.Loader(store, 8, shuffle=True, seed=0, transform=step)]
    assert all(map(torch.equal, found, expected))


MAKERS = {
    "arange", "as_tensor", "empty", "empty_strided", "eye", "from_file", "full", "linspace", "logspace", "ones", "rand",
    "randint", "randn", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros",
}  # fmt: skip


def test_each_tensor_that_is_made_names_its_device():
    package, found = Path(memfeed.__file__).parent, []
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MAKERS:
                named = {keyword.arg for keyword in node.keywords}
                if ast.unparse(node.func.value) == "torch" and not named & {"device", None}:
                    found.append(f"{path.relative_to(package)}:{node.lineno}")
    assert [one for one in found if not one.startswith(("cli/demo/", "testing/"))] == []


def test_the_default_device_does_not_leak_into_stores(tmp_path, samples):
    with torch.device("meta"):
        store = memfeed.cache(samples, tmp_path / "s.mf", workers=0, progress=False)
        with memfeed.Writer(tmp_path / "w.mf") as writer:
            for one in samples:
                writer.append(one)
        batch = next(iter(memfeed.Loader(store, ROWS)))
        rows = store[list(range(ROWS))]
        written = memfeed.open(tmp_path / "w.mf")[7]
    for found in (batch, rows):
        assert found["image"].device.type == found["tokens"].device.type == found["label"].device.type == "cpu"
        assert found["label"].tolist() == list(range(ROWS))
    assert written["tokens"].tolist() == [0, 1]
    assert written["label"] == 7
