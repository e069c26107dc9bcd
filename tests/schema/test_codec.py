import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memfeed.errors import SchemaError
from memfeed.schema import codec
from memfeed.schema.compare import tensors_equal
from memfeed.schema.fields import DTYPES
from memfeed.schema.infer import infer


def field_of(value, **options):
    return infer([value], **options).schema.fields[0]


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_is_packed_as_its_bytes(name):
    tensor = torch.randint(0, 2, (3, 5)).to(DTYPES[name])
    packed = codec.pack(field_of(tensor), [tensor, tensor])
    both = torch.from_numpy(np.concatenate(packed.buffers)).view(DTYPES[name]).view(2, 3, 5)
    assert tensors_equal(both[0].clone(), tensor)
    assert tensors_equal(both[1].clone(), tensor)


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(6).view(2, 3).t(),
        torch.randn(2, 2, dtype=torch.complex64).conj(),
        torch.nn.Parameter(torch.ones(2)),
        np.arange(6).reshape(2, 3)[::-1, ::2],
        np.arange(4, dtype=">i4"),
        np.broadcast_to(np.float32(3), (2, 2)),
        np.bool_(True),
    ],
    ids=["transposed", "conj", "parameter", "strides", "big endian", "read-only", "scalar"],
)
def test_arrays_of_every_make(value):
    want = (
        value.detach().resolve_conj()
        if isinstance(value, torch.Tensor)
        else torch.from_numpy(np.array(value.astype(value.dtype.newbyteorder("="))))
    )
    packed = codec.pack(field_of(value), [value])
    assert packed.buffers[0].tobytes() == want.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=4), inner, max_size=4)),
    max_leaves=10,
)


@settings(max_examples=300)
@given(json_values)
def test_json_comes_back_equal_or_is_refused(value):
    try:
        text = codec.encode_json(value)
    except SchemaError:
        assert any(text in repr(value) for text in ("nan", "inf", "\\ud")) or _has_big_int(value)
        return
    field = infer([{"v": {"k": 1}}], fields={"v": "json"}).schema.fields[0]
    assert codec.decode_bytes(field, text) == value


def _has_big_int(value):
    if isinstance(value, list | dict):
        return any(map(_has_big_int, value.values() if isinstance(value, dict) else value))
    return isinstance(value, int) and not -(2**63) <= value < 2**64


@pytest.mark.parametrize("value", [float("nan"), float("inf"), (1, 2), {1: 2}, {"a": {1, 2}}, "\ud800", object(), b"x"])
def test_what_json_would_change_is_refused(value):
    with pytest.raises(SchemaError, match=r"JSON"):
        codec.encode_json({"k": value})


def test_lone_surrogates_are_refused_as_text():
    with pytest.raises(SchemaError, match="no valid text"):
        codec.pack(field_of("x"), ["ok", "\ud800"])


def test_errors_say_which_of_the_values():
    field = field_of(torch.zeros(3))
    with pytest.raises(SchemaError, match="found dtype int64; expected float32") as caught:
        codec.pack(field, [torch.zeros(3), torch.zeros(3), torch.zeros(3, dtype=torch.int64)])
    assert caught.value.position == 2
    with pytest.raises(codec.ShapeMismatchError) as mismatch:
        codec.pack(field, [torch.zeros(3), torch.zeros(4)])
    assert (mismatch.value.position, mismatch.value.shape) == (1, (4,))


@pytest.mark.parametrize(("first", "later"), [(1, True), (1, 1.0), (True, 1), (1.0, 1), ("a", b"a"), (1, "a")])
def test_python_values_do_not_change_type(first, later):
    with pytest.raises(SchemaError, match=r"found"):
        codec.pack(field_of(first), [first, later])
