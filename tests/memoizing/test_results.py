"""Results taken apart and made again: equal to the last bit and type, in the same order in memory, or refused."""

import math
import sys

import numpy as np
import pytest
import torch

from memfeed.errors import CorruptStoreError, SchemaError
from memfeed.memoizing.results import back, decode, encode, memory_order
from memfeed.schema.compare import describe_difference, difference
from memfeed.schema.fields import DEEPEST
from memfeed.store.memo_format import make_blob, read_footer


def blob_of(result):
    tree, leaves = encode(result)
    return np.concatenate(make_blob(bytes(16), 1.0, tree, leaves))


def again(result, **options):
    blob = blob_of(result)
    return decode(read_footer(blob, len(blob), "here").layout, blob, **options)


def nested(depth):
    value = 1
    for _ in range(depth):
        value = [value]
    return value


VALUES = [
    None, True, 0, -(1 << 70), 1.5, -0.0, math.inf, "é", "", "\ud800", b"", b"ab", (), [], {}, (None, [1, (2.0,)]),
    {"a": (1,), 2: [b"x"]}, torch.arange(6).view(2, 3), torch.zeros(0, 3), torch.tensor(3),
    torch.ones(3, dtype=torch.bfloat16),
    torch.ones(2, dtype=torch.complex64).conj(), torch.ones(1).expand(4), torch.arange(6)[::2], np.arange(6)[::-1],
    np.zeros((2, 0)), np.array(1.5), np.float16(2), np.bool_(True), nested(DEEPEST),
    [torch.ones(1), {"a": np.ones(2, "f4")}],
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:40])
def test_a_result_comes_back(value):
    found = again(value)
    problem = difference(found, value)
    assert problem is None, describe_difference(found, value)
    assert type(found) is type(value)
    if isinstance(value, float):
        assert math.copysign(1, found) == math.copysign(1, value)


def test_the_order_in_memory_comes_back():
    tensor = torch.arange(24).view(2, 3, 4).permute(2, 0, 1)
    array = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    assert again(tensor).stride() == tensor.stride()
    assert again(array).strides == array.strides
    assert torch.equal(again(tensor), tensor)
    assert np.array_equal(again(array), array)


@pytest.mark.parametrize(
    ("strides", "shape", "order"),
    [
        ((4, 1), (3, 4), []), ((1, 3), (3, 4), [1, 0]), ((0, 1), (3, 4), []), ((1, 3), (0, 4), []), ((), (), []),
        ((-1, 3), (3, 4), []), ((1, 12, 3), (3, 2, 4), [1, 2, 0]), ((1, 1), (1, 4), []),
    ],
)  # fmt: skip
def test_order_of_dims(strides, shape, order):
    assert memory_order(strides, shape) == order
    assert [order[dim] for dim in back(order)] == sorted(order)


@pytest.mark.parametrize("order", [[1], [0, 0], [2, 0], [-1, 0]])
def test_what_is_no_order(order):
    with pytest.raises(ValueError, match="an order of dims"):
        back(order)


def cycle():
    value = []
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), "found object"), ({1.5: 1}, "found dict"), ({1}, "found set"), (torch.eye(2).to_sparse(), "sparse"),
        (torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged), "found a nested tensor"),
        (torch.ones(2, requires_grad=True), "with a gradient"), (torch.empty(2, device="meta"), "on meta"),
        (torch.nn.Parameter(torch.ones(1)), "found a Parameter"), (np.array(["a"]), "dtype <U1"),
        (np.array([1], ">i4"), "dtype >i4"), (np.ma.array([1]), "found MaskedArray"),
        (nested(DEEPEST + 1), "nested more than"),
        (nested(5000), "nested more than"), (cycle(), "nested more than"), (10**3000, "an int of more than 8,192 bits"),
        ({"a": [10**3000]}, r"an int of more than 8,192 bits\) in the result\['a'\]\[0\]|in the result\['a'\]\[0\]"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)  # fmt: skip
def test_what_cannot_be_kept(value, message):
    with pytest.raises(SchemaError, match=message):
        encode(value)


def test_memory_is_shared_and_written_only_where_it_may_be():
    blob = blob_of([np.arange(4), {"a": [1]}])
    layout = read_footer(blob, len(blob), "here").layout
    array, plain = decode(layout, blob)
    array[0], plain["a"][0] = 9, 9
    assert decode(layout, blob)[0][0] == 9
    assert decode(layout, blob)[1] == {"a": [1]}
    with pytest.raises(ValueError, match="read-only"):
        decode(layout, blob, writable=False)[0][0] = 1


@pytest.mark.parametrize(
    "tree",
    [None, 3, [], ["tensor"], ["tensor", 7], ["tensor", "a"], ["odd", 1], ["tensor", 0, [0, 0]], ["tensor", 0, 5],
     ["dict", [1]], ["tuple", 3], ["image", "RGB", [1, 1], 0], ["list", [["tensor", -9]]]],
)  # fmt: skip
def test_a_damaged_layout(tree):
    blob = np.concatenate(make_blob(bytes(16), 1.0, tree, [("int64", (2,), np.zeros(16, np.uint8))]))
    with pytest.raises(CorruptStoreError, match="found a memoized result with a layout that cannot be read"):
        decode(read_footer(blob, len(blob), "here").layout, blob)


def test_images_of_pillow():
    image_module = pytest.importorskip("PIL.Image")
    for mode in ("L", "RGB", "RGBA", "P", "1", "I;16", "F"):
        image = image_module.new(mode, (5, 3))
        image.info = {"dpi": (72, 72)}
        found = again(image)
        assert (found.mode, found.size, found.tobytes(), found.info) == (mode, (5, 3), image.tobytes(), image.info)


def test_an_image_without_pillow_is_the_line_that_installs_it(monkeypatch):
    image = pytest.importorskip("PIL.Image").new("L", (5, 3))
    blob = blob_of(image)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'memfeed\[vision\]'"):
        decode(read_footer(blob, len(blob), "here").layout, blob)
