"""Keys that no file name, and no JSON, can hold as they are."""

import functools

import pytest
import torch

import memfeed
from memfeed.errors import SchemaError
from support import equal


def nested(leaf, depth, key):
    return functools.reduce(lambda inside, _: {key: inside}, range(depth), leaf)


@pytest.mark.parametrize("key", ["k", "k" * 90, "k" * 300, "ü/\n"])
def test_keys_that_are_long_and_nested_deep(path, key):
    samples = [nested({"a": torch.tensor(i), "b": "x" * i}, 60, key) for i in range(4)]
    store = memfeed.cache(samples, path, progress=False)
    assert all(equal(store[i], samples[i]) for i in range(4))


@pytest.mark.parametrize("key", ["\udc80", "a\ud800b"])
def test_a_key_that_is_no_text_is_named(path, key):
    with pytest.raises(SchemaError, match=r"found a key that is no valid text \('.*\\ud"):
        memfeed.cache([{key: torch.tensor(i)} for i in range(4)], path, progress=False)
    assert list(path.parent.iterdir()) == []
