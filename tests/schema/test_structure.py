import numpy as np
import pytest
import torch
from tensordict import TensorDict
from test_infer import kinds

from memfeed.errors import SchemaError
from memfeed.schema.infer import infer


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([[1, 2], [3, 4]], {"0": "int64 []", "1": "int64 []"}),
        ([[1], [1, 2]], {"value": "jagged int64 [*]"}),
        ([[0.5] * 17] * 2, {"value": "float64 [17]"}),
        ([{"ids": [1, 2]}, {"ids": [3, 4]}], {"ids": "int64 [2]"}),
        ([{"ids": [1] * 512}] * 2, {"ids": "int64 [512]"}),
        ([{"ids": [1]}, {"ids": [3]}], {"ids.0": "int64 []"}),
        ([{"ids": [1, 2]}, {"ids": None}], {"ids": "list int64 [*] or None"}),
        ([([True, False], 1)] * 2, {"0": "bool [2]", "1": "int64 []"}),
        ([[], [1]], {"value": "jagged int64 [*]"}),
        ([[1, 2.0], [1]], {"value": "json"}),
        ([[True], [False, True]], {"value": "jagged bool [*]"}),
        ([{"a": [1, {"b": None}]}, {"a": 3}], {"a": "json"}),
        ([{"a": 1, "b": 2}, {"b": 3, "a": 4}], {"a": "int64 []", "b": "int64 []"}),
        ([np.float32(1), np.float32(2)], {"value": "float32 []"}),
        ([np.zeros((2, 0)), np.ones((2, 0))], {"value": "float64 [2, 0]"}),
    ],
)
def test_lists_and_json(samples, expected):
    assert kinds(samples) == expected


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([1, 2.0], r"sample 1, field value: found a Python number as float64 \[\]; expected a Python number as int64"),
        (
            [torch.zeros(2), torch.zeros(2).double()],
            r"sample 1, field value: found float64 \[2\]; expected float32 \[2\]",
        ),
        ([torch.zeros(2), torch.zeros(2, 2)], r"found float32 \[2, 2\]; expected float32 \[2\], as in sample 0"),
        ([{"a": object()}], r"sample 0, field a: found an object of builtins.object, which no column holds"),
        ([{"a": {1, 2}}], r"found an object of builtins.set"),
        ([{("x", 1): 1}], r"found the dict key \('x', 1\) of type tuple; expected str or int keys"),
        ([np.array(["a"])], r"found a numpy value of dtype <U1; expected a bool or a number"),
        ([2**70], r"found the int 1180591620717411303424; expected one that fits int64"),
        ([{"a": {"b": 1}}, {"a": {"b": torch.ones(1), "c": 1}}], r"found a structure that varies between samples"),
        ([TensorDict({"a": torch.zeros(2).to_sparse()}, [])], r"found a torch.sparse_coo tensor; expected a dense one"),
        ([torch.eye(2).to_sparse(), torch.eye(2)], r"sample 0, field value: found a torch.sparse_coo tensor"),
        ([None, None], r"found samples without any value"),
        ([{"x": float("nan"), "y": [1]}, {"x": 1.0}], r"holds more than JSON values"),
    ],
)
def test_samples_that_fit_no_column(samples, message):
    with pytest.raises(SchemaError, match=message):
        infer(samples)
