"""Every public transform on a simulated GPU: nothing waits, and the launches do not grow with the batch.

Without Triton, which has no kernel for a simulated device: with it there are fewer launches.
"""

import pytest
import torch

import memfeed
import memfeed.transforms as T
from memfeed.errors import TransformError
from memfeed.random import Keys
from memfeed.schema.jagged import jagged_tensor
from memfeed.transforms.ops import values
from simulated_cuda import simulated

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there: tests/cuda runs on it"),
    pytest.mark.skipif(
        not hasattr(torch._C, "_ensureCUDADeviceGuardSet"), reason="this torch cannot have tensors on a simulated GPU"
    ),
]
H, W, CLASSES = 20, 18, 5
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
FLOATS = T.ToDtype(torch.float32, scale=True)
ALONE = {
    "center crop": T.CenterCrop(8),
    "crop": T.RandomCrop(8),
    "crop with padding": T.RandomCrop((H, W), padding=4, fill=(1, 2, 3)),
    "horizontal flip": T.RandomHorizontalFlip(),
    "vertical flip": T.RandomVerticalFlip(),
    "flip": T.RandomFlip((0, 1)),
    "jitter": T.ColorJitter(0.3, 0.3, 0.3, 0.1),
    "gray": T.RandomGrayscale(0.5),
    "erase": T.RandomErasing(0.7),
    "erase by channel": T.RandomErasing(1.0, value=(1, 2, 3)),
    "noise": T.Compose([FLOATS, T.RandomErasing(0.7, value="random")]),
    "normalize": T.Normalize(MEAN, STD),
    "to dtype": FLOATS,
    "pointwise": T.Compose([FLOATS, T.Pointwise(lambda x: x * 2)]),
    "resized crop": T.Compose([FLOATS, T.RandomResizedCrop(8)]),
    "resize": T.Compose([FLOATS, T.Resize(8)]),
    "rotation": T.RandomRotation(10),
    "affine": T.Compose([FLOATS, T.RandomAffine(10, (0.1, 0.1), interpolation="bilinear", fill=(1, 2, 3))]),
    "mixup": T.Compose([FLOATS, T.MixUp(num_classes=CLASSES, on=["image", "label"])]),
    "cutmix": T.CutMix(num_classes=CLASSES, on=["image", "label"]),
    "crop, flip, normalize": T.Compose([T.RandomCrop(8), T.RandomHorizontalFlip(), T.Normalize(MEAN, STD)]),
    "normalize, then pad": T.Compose([T.Normalize(MEAN, STD), T.RandomCrop((H, W), padding=4)]),
    "function": T.Compose([lambda batch: batch, T.RandomCrop(8)], on="image"),
}
# a function of one sample and the decoder run on the CPU
ON_THE_CPU = {T.PerSample, T.Decode}
MOVING = ["center crop", "crop with padding", "horizontal flip", "flip", "resized crop", "resize", "rotation", "affine"]
VOLUMES = [
    T.CenterCrop(4),
    T.RandomCrop(4, padding=2, fill=7),
    T.RandomFlip((0, 1, 2)),
    T.Normalize((0.5,), (0.5,)),
    FLOATS,
]


@pytest.fixture(autouse=True)
def _without_compilers(monkeypatch):
    monkeypatch.setattr("memfeed.transforms.backends.passes.gpu_kernel", lambda device: None)
    monkeypatch.setattr(values, "COMPILED_ON", ())


def batch(n):
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(n, 3, 4, 4, generator=generator)  # smooth: a place that rounds apart hardly changes a value
    smooth = torch.nn.functional.interpolate(coarse, (H, W), mode="bicubic", align_corners=False).clamp(0, 1)
    return {
        "image": (smooth * 255).to(torch.uint8),
        "label": torch.randint(0, CLASSES, (n,), generator=generator),
    }


def with_followers(n):
    generator = torch.Generator().manual_seed(1)
    offsets = torch.arange(n + 1) * 2
    return {
        **batch(n),
        "mask": torch.randint(-9, 9, (n, H, W), generator=generator, dtype=torch.int16),
        "masks": torch.randint(0, 2, (n, 2, H, W), generator=generator).bool(),
        "boxes": torch.rand(n, 2, 4, generator=generator) * W,
        "points": torch.randint(0, W, (n, 3, 2), generator=generator),
        "jagged": jagged_tensor(torch.rand(2 * n, 4, generator=generator) * W, offsets),
    }


def run(transform, given):
    """Return what comes out, on the CPU, and the launches. Nothing may wait for the device."""
    n = len(given["image"])
    with simulated() as machine:
        there = {name: to_device(value) for name, value in given.items()}
        torch.cuda.synchronize()
        machine.syncs.clear()
        machine.devices[0].launches.clear()
        made = transform.apply(there, Keys(0, 0, torch.arange(n)))
        assert not machine.syncs
        launches = machine.devices[0].launches.total()
        return {name: part(value) for name, value in made.items()}, launches


def to_device(value):
    if value.is_nested:
        return jagged_tensor(value.values().cuda(), value.offsets().cuda())
    return value.cuda()


def part(value):
    return value.values().cpu() if value.is_nested else value.cpu()


def check(transform, make, atol=1e-4):
    """That it gives what the CPU gives, in as many launches for 64 images as for 32."""
    given = make(64)
    expected = {name: part(value) for name, value in transform.reference(given, Keys(0, 0, torch.arange(64))).items()}
    got, launches = run(transform, given)
    assert launches == run(transform, make(32))[1]
    for name, value in expected.items():
        assert got[name].dtype is value.dtype
        if name.startswith("mask"):  # between two pixels, either may be rounded to
            assert (got[name] == value).float().mean() > 0.99, name
        else:
            torch.testing.assert_close(got[name], value, rtol=1e-4, atol=atol)


def test_every_public_transform_is_tried():
    public = {one for name in T.__all__ if isinstance(one := getattr(T, name), type) and issubclass(one, T.Transform)}
    parts = [part for transform in [*ALONE.values()] for part in transform.modules()]
    assert public - {T.Transform, T.ImageTransform} - ON_THE_CPU == {type(part) for part in parts} & public


@pytest.mark.parametrize("name", ALONE)
def test_nothing_waits(name):
    transform = ALONE[name]
    transform.on = transform.on or (["image", "label"] if "mix" in name else "image")
    if name == "pointwise":  # its first batch is checked, which waits once
        transform.apply(batch(2), Keys(0, 0, torch.arange(2)))
    check(transform, batch, atol=1 if name in ("jitter", "gray", "rotation") else 1e-4)


@pytest.mark.parametrize("name", MOVING)
def test_nothing_waits_for_masks_boxes_and_points(name):
    names = ["image", "mask", "masks", "boxes", "points", "jagged"]
    parts = ALONE[name].transforms if isinstance(ALONE[name], T.Compose) else [ALONE[name]]
    one = next(part for part in parts if part is not FLOATS)
    before, one.on = one.on, names
    try:
        check(T.Compose([one]), with_followers, atol=1)
    finally:
        one.on = before


@pytest.mark.parametrize("transform", VOLUMES, ids=repr)
def test_nothing_waits_for_volumes(transform):
    def volumes(n):
        return {"image": torch.randint(0, 256, (n, 1, 6, 8, 7), dtype=torch.uint8, generator=torch.manual_seed(0))}

    check(T.Compose([transform], on="image"), volumes)


def test_points_of_images_of_several_sizes():
    rows = [torch.zeros(3, 10 + i % 3, 12, dtype=torch.uint8) for i in range(6)]
    points = torch.arange(6 * 2 * 2).view(6, 2, 2).float()
    transform = T.Compose([T.RandomHorizontalFlip(), T.Resize((5, 6))], on=["image", "points"])
    expected = transform.apply({"image": rows, "points": points}, Keys(0, 0, torch.arange(6)))["points"]
    with simulated() as machine:
        there = memfeed.to_device({"image": rows, "points": points}, "cuda")
        torch.cuda.synchronize()
        machine.syncs.clear()
        moved = transform.apply(there, Keys(0, 0, torch.arange(6)))["points"]
        assert not machine.syncs
        torch.testing.assert_close(moved.cpu(), expected)


def test_classes_beyond_the_last_are_an_error_on_a_device_too():
    given = batch(8)
    given["label"][3] = CLASSES
    transform = T.CutMix(num_classes=CLASSES, on=["image", "label"])
    with pytest.raises(TransformError, match="has class 5 in row 3; expected classes from 0 to 4"):
        transform.apply(given, Keys(0, 0, torch.arange(8)))
    with pytest.raises(RuntimeError, match=r"'label' .*has other classes; expected 0 to 4"):
        run(transform, given)


def test_a_loader_mixes_on_the_device_without_waiting():
    given, steps = (
        batch(64),
        [T.RandomCrop(8), FLOATS, T.RandomErasing(1.0, value="random"), T.MixUp(num_classes=CLASSES)],
    )
    loader = memfeed.Loader(given, 16, seed=0, shuffle=True, transform=T.Compose(steps))
    expected = [{name: value.clone() for name, value in batch.items()} for batch in loader]
    with simulated() as machine:
        loader = memfeed.Loader(given, 16, seed=0, shuffle=True, transform=T.Compose(steps), device="cuda")
        next(iter(loader))
        loader.set_epoch(0)
        torch.cuda.synchronize()
        machine.syncs.clear()
        made = list(loader)
        assert not {key: count for key, count in machine.syncs.items() if "mix" in key[1] or "box" in key[1]}
        for got, want in zip(made, expected, strict=True):
            torch.testing.assert_close({k: v.cpu() for k, v in got.items()}, want, rtol=1e-4, atol=1e-4)
