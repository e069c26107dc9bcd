"""Values of tensordict and other libraries are known without importing them."""

import subprocess
import sys

import numpy as np
import pytest
import tensordict
import torch
from tensordict import LazyStackedTensorDict, TensorDict

from memfeed.schema.tensordicts import is_a, is_tensor_collection, is_tensorclass, is_tensordict
from support import Pair

TD = TensorDict({"a": torch.ones(2)}, [2])
PAIR = Pair(torch.ones(2), torch.ones(2), batch_size=[2])


@pytest.mark.parametrize(
    ("value", "collection", "of_class", "of_dict"),
    [
        (TD, True, False, True),
        (LazyStackedTensorDict(TD, TD), True, False, True),
        (PAIR, True, True, True),
        (Pair, True, True, False),
        (TensorDict, True, False, False),
        (torch.ones(1), False, False, False),
        ({"a": 1}, False, False, False),
        (None, False, False, False),
        (int, False, False, False),
    ],
)
def test_kinds(value, collection, of_class, of_dict):
    assert (is_tensor_collection(value), is_tensorclass(value), is_tensordict(value)) == (collection, of_class, of_dict)


def test_classes_by_name():
    assert is_a(TD, "tensordict", "TensorDict")
    assert is_a(TD, "tensordict", "no_such_class", "TensorDictBase")
    assert not is_a(TD, "tensordict", "no_such_class")
    assert not is_a(PAIR, "tensordict", "TensorDictBase")
    assert is_a(np.zeros(1), "numpy", "ndarray")
    assert not is_a(1, "no_such_library", "Table")
    assert "no_such_library" not in sys.modules


def test_half_imported(monkeypatch):
    monkeypatch.delattr(tensordict, "is_tensorclass")
    assert not is_tensorclass(PAIR)


def test_nothing_is_imported():
    lines = (
        "import sys; from memfeed.schema import tensordicts as t; "
        "assert not any(f(1) for f in (t.is_tensor_collection, t.is_tensorclass, t.is_tensordict)); "
        "assert not t.is_a(1, 'tensordict', 'TensorDict'); assert 'tensordict' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", lines], check=True, timeout=60)
