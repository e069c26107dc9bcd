import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from memfeed.errors import LoaderError
from memfeed.loading.batch_forms import converter


def test_torch_is_left_alone():
    assert converter("torch") is None


def test_numpy_shares_memory_and_opens_containers():
    tensor, jagged = (
        torch.arange(6).view(2, 3),
        torch.nested.nested_tensor_from_jagged(torch.arange(5), torch.tensor([0, 2, 5])),
    )
    batch = {"x": tensor, "td": TensorDict({"a": torch.ones(2)}, [2]), "list": [tensor, "text"], "jagged": jagged}
    found = converter("numpy")(batch)
    found["x"][0, 0] = 9
    assert tensor[0, 0] == 9
    assert isinstance(found["td"]["a"], np.ndarray)
    assert found["list"][1] == "text"
    assert [row.tolist() for row in found["jagged"]] == [[0, 1], [2, 3, 4]]


def test_numpy_has_no_bfloat16():
    with pytest.raises(LoaderError, match="found torch.bfloat16"):
        converter("numpy")(torch.zeros(2, dtype=torch.bfloat16))


JAX_PROGRAM = """
import numpy as np
import torch
from memfeed.loading.batch_forms import converter

batch = (torch.arange(6.0).view(2, 3), torch.arange(2), torch.tensor([True, False]))
found = converter("jax")(batch)
assert all(type(array).__module__.startswith("jax") for array in found), found
assert [np.asarray(array).tolist() for array in found] == [tensor.tolist() for tensor in batch], found
assert [str(array.dtype) for array in found] == ["float32", "int32", "bool"], found
"""

# A device tensor that JAX cannot hold is copied; one that it can hold goes by DLPack, without the CPU.
JAX_DEVICE_PROGRAM = """
import sys
import torch
sys.path.insert(0, "tests")
from simulated_cuda import DeviceTensor, simulated
import jax
from memfeed.loading.batch_forms import converter

with simulated() as machine:
    tensor = torch.arange(6).to("cuda")
    convert = converter("jax")
    assert convert(tensor).tolist() == [0, 1, 2, 3, 4, 5]
    handed = []
    machine.syncs.clear()
    jax.devices = lambda kind: ["a GPU"] if kind == "gpu" else []
    jax.dlpack.from_dlpack = handed.append
    convert(tensor)
    assert type(handed[0]) is DeviceTensor and handed[0].dtype is torch.int32, handed
    assert not machine.syncs, machine.syncs
"""


@pytest.mark.long
@pytest.mark.skipif(find_spec("jax") is None, reason="JAX comes with the extra 'jax'")
def test_jax_arrays_have_the_values_and_are_on_its_device():
    # In a process of its own: where JAX was imported, it warns at every later fork, and warnings are errors here.
    program = JAX_PROGRAM + JAX_DEVICE_PROGRAM
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])
