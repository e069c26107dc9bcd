"""Pointwise: on the fused path as on the plain one, before and after what it stands beside, and what it refuses."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from image_batches import RecordingLender

from memfeed.errors import TransformError
from memfeed.random import Keys
from memfeed.transforms import (
    ColorJitter,
    Compose,
    Normalize,
    Pointwise,
    RandomCrop,
    RandomErasing,
    RandomHorizontalFlip,
    RandomResizedCrop,
    ToDtype,
)

FLOATS = ToDtype(torch.float32, scale=True)


def photos(n=6, dtype=torch.uint8):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (n, 3, 24, 20), dtype=torch.uint8, generator=generator).to(dtype)


def keys(n=6):
    return Keys(0, 0, torch.arange(n))


def gamma(x):
    return x.clamp(0, 1) ** 2.2


def invert(x):
    return 255 - x


def halve(x):
    return x / 2


PARTS = {
    "crop": lambda: RandomCrop(12, padding=2, fill=3),
    "flip": lambda: RandomHorizontalFlip(),
    "resize": lambda: RandomResizedCrop(14),
    "jitter": lambda: ColorJitter(0.3),
    "erase": lambda: RandomErasing(value=0.5),
    "scale": lambda: FLOATS,
    "double": lambda: ToDtype(torch.float64),
    "normalize": lambda: Normalize((0.4, 0.5, 0.6), (0.2, 0.3, 0.4)),
    "gamma": lambda: Pointwise(gamma),
    "exp": lambda: Pointwise(lambda x: torch.special.expit(x / 100)),
    "halve": lambda: Pointwise(halve),
    "channels": lambda: Pointwise(lambda x: x * torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1)),
}


@settings(max_examples=100)
@given(st.lists(st.sampled_from(sorted(PARTS)), max_size=6), st.sampled_from([torch.uint8, torch.float32]))
def test_fused_equals_plain(names, dtype):
    transform, images = Compose([PARTS[name]() for name in names]), photos(dtype=dtype)
    before = images.clone()
    got, expected = transform.apply(images, keys()), transform.reference(images, keys())
    assert torch.equal(images, before)
    assert got.dtype == expected.dtype
    whole = not got.dtype.is_floating_point or "resize" in names  # rounding may tip a value to the next integer
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1 if whole else 1e-3)


@pytest.mark.parametrize("fn", [gamma, invert, torch.sin, torch.nn.ReLU(), lambda x: torch.log(x - 99.0)])
def test_it_is_the_function_of_the_whole_batch(fn):
    images = photos(dtype=torch.float32)
    torch.testing.assert_close(Pointwise(fn).apply(images, keys()), fn(images), rtol=1e-6, atol=0, equal_nan=True)
    torch.testing.assert_close(Pointwise(fn)(images), fn(images), rtol=1e-6, atol=0, equal_nan=True)
    assert torch.equal(Pointwise(invert).apply(photos(), keys()), 255 - photos())


def test_image_by_image_in_one_pass():
    seen, lender = [], RecordingLender()

    def fn(x):
        seen.append(tuple(x.shape))
        return x * 2

    transform = Compose([RandomCrop(8), Normalize((0.5,) * 3, (0.5,) * 3), Pointwise(fn), RandomHorizontalFlip()])
    transform.apply(photos(), keys())
    del seen[:]
    got = transform.apply(photos(), keys(), allocator=lender)
    assert seen == [(3, 8, 8)] * 6
    assert lender.requests == [((6, 3, 8, 8), torch.float32)]
    torch.testing.assert_close(got, transform.reference(photos(), keys()))


def test_the_dtype_is_what_the_function_makes():
    transform = Compose([Pointwise(halve), Normalize((0.5,) * 3, (0.5,) * 3), ToDtype(torch.float16)])
    found = transform.params([1, 2], shape=(3, 8, 8))
    assert found["Pointwise.0"].dtype is torch.float32
    assert found["Normalize.0"].scale == (2.0,) * 3
    assert transform.apply(photos(), keys()).dtype is torch.float16
    assert Pointwise(lambda x: x.double()).apply(photos(), keys()).dtype is torch.float64
    assert Pointwise(lambda x: x > 9).apply(photos(), keys()).dtype is torch.bool


def test_gradients_flow():
    images = photos(dtype=torch.float32).requires_grad_()
    Compose([RandomCrop(8), Pointwise(torch.sin)]).apply(images, keys()).sum().backward()
    assert images.grad is not None


def test_copies_and_repr():
    for transform in (Pointwise(gamma), Pointwise(torch.compile(gamma))):
        assert repr(transform) == "Pointwise(gamma)"
        for again in (copy.deepcopy(transform), pickle.loads(pickle.dumps(Compose([transform]))).transforms[0]):
            assert repr(again) == "Pointwise(gamma)"
            assert hasattr(again.fn, "_torchdynamo_orig_callable") == hasattr(
                transform.fn, "_torchdynamo_orig_callable"
            )
    images = photos(dtype=torch.float32)
    again = pickle.loads(pickle.dumps(Pointwise(gamma)))
    assert torch.equal(again.apply(images, keys()), Pointwise(gamma).apply(images, keys()))


def fails(fn, **_):
    def compiled(image):
        raise FileNotFoundError("no C++ compiler")

    return compiled


@pytest.mark.parametrize(
    ("compiler", "how"),
    [
        (lambda fn, **_: lambda image: fn(image), "compiled"),
        (fails, "eager (compiling failed: FileNotFoundError)"),
        (lambda fn, **_: lambda image: fn(image) + 1, "eager (compiled, it gives other values)"),
        (lambda fn, **_: lambda image: fn(image).half(), "eager (compiled, it gives other values)"),
    ],
)
def test_it_is_compiled_where_that_pays_and_repr_says_what_became_of_it(compiler, how, monkeypatch):
    images = photos(dtype=torch.float32)
    want = Pointwise(gamma).apply(images, keys())
    monkeypatch.setattr(torch, "compile", compiler)
    eager = Pointwise(gamma)
    assert torch.equal(eager.apply(images, keys()), want)
    assert repr(eager) == "Pointwise(gamma, eager on cpu)"
    monkeypatch.setattr("memfeed.transforms.ops.values.COMPILED_ON", ("cpu",))
    transform = Pointwise(gamma)
    assert torch.equal(transform.apply(images, keys()), want)
    assert repr(transform) == f"Pointwise(gamma, {how} on cpu)"


@pytest.mark.parametrize("path", ["apply", "reference"])
@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda x: x.float().mean(), ["gave []", "of the same shape", "derive from"]),
        (lambda x: x[..., :1, :2], ["gave [", "of the same shape"]),
        (lambda x: None, ["gave a NoneType", "of the same shape"]),
        (lambda x: x - x.float().mean(), ["made other values of a part", "each value by itself"]),
        (lambda x: x.flip(-1), ["made other values of a part"]),
        (lambda x: x.float().cumsum(-1), ["made other values of a part"]),
        (lambda x: x + torch.rand(x.shape), ["made other values of a part", "without chance"]),
        (lambda x: x + torch.arange(x.shape[-1]), ["made other values of a part"]),
        (lambda x: x if x.shape[-1] == 1 else x + torch.ones(24, 20), ["failed on a part of an image", "each value"]),
        (lambda x: x.add_(1), ["wrote to its argument", "makes a new tensor"]),
    ],
)
def test_what_is_not_done_value_by_value(path, fn, words):
    images = photos()
    transform = Pointwise(fn)
    with pytest.raises(TransformError) as caught:
        getattr(transform, path)(images, keys())
    for word in ["Pointwise(", *words]:
        assert word in str(caught.value)
    assert torch.equal(images, photos())


def test_an_image_of_one_value_tells_nothing():
    images = photos(dtype=torch.float32)
    images[0] = 0
    with pytest.raises(TransformError, match="made other values of a part"):
        Pointwise(lambda x: x - x.mean()).apply(images, keys())


def test_no_function():
    with pytest.raises(TransformError, match="got a int; expected a function of a tensor; e.g. lambda"):
        Pointwise(3)
    assert Pointwise(gamma).apply(photos(0, torch.float32), keys(0)).shape == (0, 3, 24, 20)
