"""The tape of what a dataset does with results of its pipeline."""

import contextlib
import copy

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import tv_tensors
from torchvision.transforms import functional

from memfeed.errors import SplitError
from memfeed.schema.compare import equal
from memfeed.schema.values import class_of
from memfeed.splitting.leaves import take_apart
from memfeed.splitting.recording import Recording
from memfeed.splitting.traced import plain

START = (0, 0)


class Labels(torch.Tensor):
    """A class of tensors as users write one."""


def record(work, leaf):
    """Return the recording of ``work(leaf)``, and its result; entry 0 of the tape stands for the pipeline."""
    run = Recording()
    run.tape.append(None)
    with run:
        result = work(run.mark(leaf, START))
    return run, result


def replay(run, leaf, result):
    """Return what the tape makes of another leaf."""
    node = run.node_of(result)
    assert node is not None
    made = {START: leaf}
    for number, entry in enumerate(run.tape[1:], 1):
        values = [made.get(link, value) for link, value in zip(entry.links, entry.values, strict=True)]
        args, kwargs = entry.form.build(values)
        for index, one in enumerate(take_apart(entry.function(*args, **kwargs))[0]):
            made[number, index] = one
    return made[node]


def fill(x):
    x[0] = 7
    x += 2
    return x


TORCH = {
    "arithmetic": lambda x: (x[1:, None] * 2 + 1).sqrt() / x.max(),
    "several": lambda x: x.max(dim=0)[1] + x.split(1)[2].sum(),
    "in place": lambda x: fill(x).relu_(),
    "to NumPy": lambda x: np.flip(x.numpy(), 0) * 2,
    "properties": lambda x: x.T.reshape(-1) * x.shape[0] * len(x) * x.dim(),
}
NUMPY = {
    "in place": lambda x: np.clip(fill(x), 0, 8, out=x),
    "to torch": lambda x: torch.from_numpy(x.transpose(1, 0)) + 1,
}


@pytest.mark.parametrize("name", TORCH)
def test_operations_of_torch_are_made_again(name):
    check(TORCH[name], *torch.rand(2, 3, 2))


@pytest.mark.parametrize("name", NUMPY)
def test_operations_of_numpy_are_made_again(name):
    check(NUMPY[name], *np.random.default_rng(0).random((2, 3, 2), np.float32))


def check(work, first, second):
    run, result = record(work, copy.deepcopy(first))
    assert equal(plain(result), work(copy.deepcopy(first)))
    assert equal(plain(replay(run, copy.deepcopy(second), result)), work(copy.deepcopy(second)))


VALUES = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x[0, 0]),
    "bool": lambda x: 1 if x[0, 0] > 0.5 else 0,
    "tolist": lambda x: x.tolist(),
}


@pytest.mark.parametrize("make", [torch.ones, np.ones])
@pytest.mark.parametrize("name", VALUES)
def test_values_taken_out_are_refused_even_if_the_dataset_goes_on(name, make):
    def swallows(x):
        with contextlib.suppress(Exception):
            return VALUES[name](x)
        return "default"

    with pytest.raises(SplitError, match="takes a value out"):
        record(VALUES[name], make((3, 2)))
    run, _ = record(swallows, make((3, 2)))
    assert "takes a value out" in run.refused


@pytest.mark.parametrize("work", [np.asarray, lambda x: x.getpixel((0, 0)), lambda x: x.resize((2, 2))])
def test_pixels_of_an_image_are_refused(work):
    with pytest.raises(SplitError, match="reads the pixels"):
        record(work, Image.new("RGB", (4, 4)))


@pytest.mark.parametrize(
    "work",
    [lambda x: np.array(x), lambda x: np.asarray(x, np.float32) / 255, lambda x: np.array(x)[:, :, :1].copy(),
     functional.to_tensor, functional.pil_to_tensor],
)  # fmt: skip
def test_an_array_of_an_image_is_made_again(work):
    first, second = (Image.effect_noise((4, 3), sigma).convert("RGB") for sigma in (20, 90))
    run, result = record(work, first)
    assert equal(plain(result), work(first))
    assert equal(plain(replay(run, second, result)), work(second))


@pytest.mark.parametrize("work", [tv_tensors.Image, lambda x: tv_tensors.Mask(x[0]), lambda x: x.as_subclass(Labels)])
def test_a_tensor_of_a_derived_class_is_made_again(work):
    first, second = torch.rand(2, 3, 4, 4)
    run, result = record(work, first.clone())
    assert type(result) is type(work(first))
    assert equal(replay(run, second, result), work(second))
    assert torch.Tensor.as_subclass(second, Labels).__class__ is Labels
    assert run.node_of(result) != START


@pytest.mark.parametrize("leaf", [3, 2.5, "text", [1, 2]])
def test_equal_values_of_other_origin_are_not_known(leaf):
    run, marked = record(lambda x: x, leaf)
    assert run.node_of(marked) == START
    assert run.node_of(type(leaf)(leaf)) is None
    assert marked == leaf
    assert type(plain(marked)) is class_of(marked) is type(leaf)
    image = Image.new("L", (4, 3), 5)
    run, marked = record(lambda x: x, image)
    assert (run.node_of(marked), type(plain(marked)), class_of(marked)) == (START, Image.Image, Image.Image)
    assert equal(plain(marked), image)


@pytest.mark.parametrize("work", [np.array, np.asarray, lambda x: np.array(x, np.float32), torch.tensor])
def test_an_array_of_a_marked_list_is_made_again(work):
    run, result = record(work, [1.0, 2.0])
    assert equal(plain(replay(run, [3.0, 4.0], result)), work([3.0, 4.0]))


class Doubled(torch.overrides.TorchFunctionMode):
    """A mode of the user's, which ends after the call that it was entered in."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        return made * 2 if func is torch.Tensor.add else made


@pytest.mark.parametrize("fails", [False, True])
def test_operations_within_a_call_are_not_noted_and_later_ones_are(fails):
    told = []

    class Told(Recording):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            told.append(func)
            return super().__torch_function__(func, types, args, kwargs)

    run = Told()
    run.tape.append(None)
    with run:
        leaf = run.mark(torch.ones(2), START)
        told.clear()
        with contextlib.suppress(ZeroDivisionError), run.call():
            assert equal(leaf.mul(3), torch.full((2,), 3.0))
            assert 1 / (not fails)
        assert not told
        result = leaf.mul(3)
    assert told
    assert equal(replay(run, torch.ones(2), result), torch.full((2,), 3.0))


def test_a_mode_of_other_code_holds_around_and_within_a_call():
    run = Recording()
    run.tape.append(None)
    with run:
        leaf, other = run.mark(torch.ones(2), START), torch.ones(2)
        with Doubled():
            with run.call():
                within = other.add(1)
            around = other.add(1)
        after, result = other.add(1), leaf.add(1)
    assert within.tolist() == around.tolist() == [4, 4]
    assert after.tolist() == torch.ones(2).add(1).tolist() == [2, 2]
    assert equal(replay(run, torch.ones(2), result), torch.full((2,), 2.0))
