"""Values of a pipeline behave as plain ones, report operations, and refuse what cannot be made again."""

import copy
import pickle

import numpy as np
import pytest
import torch

from memfeed.errors import SplitError
from memfeed.splitting.traced import TracedArray, is_marked, marked, plain, traced_array


class Notes:
    """A recorder that notes the names of functions."""

    def __init__(self):
        self.is_inside, self.seen = False, []

    def refuse(self, reason):
        raise SplitError(reason)

    def operate(self, function, args, kwargs, run):
        self.seen.append(function.__name__)
        result = run(args, kwargs)
        return traced_array(np.asarray(result), self)

    def array(self, *args, **kwargs):
        self.seen.append("array")
        return np.array(list(args[0]), *args[1:], **kwargs)


@pytest.fixture
def notes():
    return Notes()


@pytest.mark.parametrize("value", [3, True, False, 2.5, "text", [1, 2], float("inf")], ids=repr)
def test_marked_values_are_equal_and_known(value, notes):
    made = marked(value, notes)
    assert is_marked(made)
    assert made is not value
    assert made == value
    assert repr(made) == repr(value)
    notes.is_inside = True
    assert type(plain(made)) is type(value)
    assert plain(made) == value


@pytest.mark.parametrize("value", [None, b"x", (1,), {1}, object(), np.float32(1), np.array([None])])
def test_what_is_of_no_class_that_can_be_marked(value, notes):
    assert marked(value, notes) is value
    assert not is_marked(value)
    assert plain(value) is value


def test_tensors_are_copies_of_their_class(notes):
    tensor = torch.ones(2, requires_grad=True)
    made = marked(tensor, notes)
    assert made is not tensor
    assert not made.requires_grad
    made.zero_()
    assert tensor.tolist() == [1, 1]
    assert type(marked(torch.nn.Parameter(torch.ones(1)), notes)) is torch.nn.Parameter


def test_a_bool_decides_nothing_outside_of_its_step(notes):
    made = marked(True, notes)
    with pytest.raises(SplitError, match="the dataset decides by a bool"):
        bool(made)
    notes.is_inside = True
    assert made


def test_operations_on_arrays_are_noted(notes):
    array = marked(np.arange(6.0).reshape(2, 3), notes)
    assert isinstance(array, TracedArray)
    results = [
        array + 1,
        np.add(1, array),
        array[0],
        array.T,
        array.mean(0),
        np.stack([array, array]),
        array.astype("f4"),
    ]
    assert notes.seen == ["add", "add", "__getitem__", "transpose", "mean", "stack", "astype"]
    assert all(isinstance(one, TracedArray) for one in results)
    assert results[0].view(np.ndarray).tolist() == [[1, 2, 3], [4, 5, 6]]
    notes.seen.clear()
    array[0] = 9
    np.add.reduce(array)
    assert notes.seen == ["__setitem__", "reduce"]
    assert [row.shape for row in array] == [(3,), (3,)]


@pytest.mark.parametrize(
    "take",
    [
        float,
        int,
        bool,
        lambda x: x.item(),
        lambda x: x.tolist(),
        lambda x: x.tobytes(),
        lambda x: [1, 2, 3][x],
        complex,
    ],
)
def test_values_are_not_taken_out_of_arrays(take, notes):
    array = marked(np.array(1), notes)
    with pytest.raises(SplitError, match="the dataset takes a value out of its pipeline's result"):
        take(array)
    notes.is_inside = True
    take(array)


def test_inside_a_step_nothing_is_noted(notes):
    array = marked(np.arange(3), notes)
    notes.is_inside = True
    assert not isinstance(array + 1, TracedArray)
    assert notes.seen == []


def test_arrays_share_the_memory_that_the_dataset_knows(notes):
    array = marked(np.arange(3), notes)
    assert type(plain(array)) is np.ndarray
    assert plain(array).__array_interface__["data"] == array.__array_interface__["data"]
    assert type(pickle.loads(pickle.dumps(array))) is np.ndarray


def test_lists_become_arrays_by_the_recorder(notes):
    made = marked([1, 2], notes)
    assert np.asarray(made).tolist() == [1, 2]
    assert notes.seen == ["array"]
    assert copy.copy(made) == [1, 2]


def test_images(notes):
    image_module = pytest.importorskip("PIL.Image")
    image = image_module.new("RGB", (4, 3), "red")
    made = marked(image, notes)
    assert is_marked(made)
    assert isinstance(made, image_module.Image)
    assert made.size == (4, 3)
    with pytest.raises(SplitError, match="the dataset reads the pixels of the image"):
        made.tobytes()
    own = plain(made)
    assert type(own) is image_module.Image
    assert own.tobytes() == image.tobytes()
