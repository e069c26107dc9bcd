"""Samples that were read together, with the methods of their batch where that is a TensorDict."""

import copy
import pickle

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from memfeed.store.gather import ReadSamples

NONE = np.empty(0, np.int64)


def test_a_list_of_samples():
    samples = ReadSamples(iter([1, 2]), {"a": 1}, NONE, NONE, None, {})
    assert samples == [1, 2]
    with pytest.raises(AttributeError, match="found no attribute 'to' of a list of samples"):
        samples.to("cpu")
    with pytest.raises(AttributeError):
        samples.__array__  # noqa: B018


def test_methods_of_a_tensordict():
    batch = TensorDict({"a": torch.arange(2)}, [2])
    samples = ReadSamples(batch.unbind(0), batch, NONE, NONE, None, {})
    assert samples.to(torch.float32)["a"].dtype is torch.float32
    assert samples.batch_size == torch.Size([2])
    assert len(samples) == 2
    with pytest.raises(AttributeError):
        samples.no_such_method()


def test_copies_do_not_look_for_a_batch_that_is_not_there_yet():
    samples = ReadSamples([1], None, NONE, NONE, None, {})
    assert copy.copy(samples) == [1]
    assert pickle.loads(pickle.dumps(samples)) == [1]
