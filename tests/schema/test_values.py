import numpy as np
import pytest
import torch
from tensordict import TensorDict

from memfeed.errors import SchemaError
from memfeed.schema import values


def test_pil_images_are_uint8_chw():
    image_module = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 255, (5, 7, 3), dtype=np.uint8)
    rgb = image_module.fromarray(pixels)
    assert torch.equal(values.as_tensor(rgb), torch.from_numpy(pixels).permute(2, 0, 1))
    for mode, shape in {"L": (1, 5, 7), "RGBA": (4, 5, 7), "P": (1, 5, 7), "1": (1, 5, 7)}.items():
        tensor = values.as_tensor(rgb.convert(mode))
        assert (tuple(tensor.shape), tensor.dtype) == (shape, torch.uint8)


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [
        (torch.tensor([1, 300]), torch.uint8, "found the value 300, which uint8 would change"),
        (torch.tensor([-1]), torch.uint8, "found the value -1"),
        (torch.tensor([0.5]), torch.int64, "found the value 0.5"),
        (torch.tensor([0.1], dtype=torch.float64), torch.float32, "found the value 0.1"),
        (torch.tensor([float("nan")]), torch.int32, "found the value nan"),
        (torch.tensor([2**53 + 1]), torch.float64, "found the value 9007199254740993"),
        (torch.tensor([200], dtype=torch.uint8), torch.int8, "found the value 200"),
        (torch.tensor([-1]), torch.uint64, "found the value -1"),
        (torch.tensor([2**63], dtype=torch.uint64), torch.int64, "found the value 9223372036854775808"),
    ],
)
def test_a_lossy_cast_is_refused(value, dtype, message):
    with pytest.raises(SchemaError, match=message):
        values.cast_exactly(value, dtype)


def test_an_exact_cast_keeps_nan():
    cast = values.cast_exactly(torch.tensor([1.5, float("nan")], dtype=torch.float64), torch.float16)
    assert cast[0] == 1.5
    assert cast[1].isnan()


@pytest.mark.parametrize("value", [torch.ones(2), np.ones(2), bytearray(b"ab"), TensorDict({"x": torch.ones(2)}, [])])
def test_a_copy_of_a_value_shares_no_memory(value):
    copied = values.copy_value(value)
    part, other = (value["x"], copied["x"]) if isinstance(value, TensorDict) else (value, copied)
    part[0] = 7
    assert other[0] != 7
