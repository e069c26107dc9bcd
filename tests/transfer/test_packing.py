"""Small tensors in one copy: packed and unpacked, and moved by `to_device`."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from test_to_device import apart, host, together

from memfeed.transfer.packing import ALIGNMENT, MAX_PACKED_BYTES, can_pack, copy_packed, pack, unpack

DTYPES = [
    getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float16", "bfloat16"),
        *("float32", "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"),
    )
]


@st.composite
def tensors(draw):
    """Dense tensors of any dtype and shape, some of them views; every bit pattern may occur."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    count = torch.Size(shape).numel() * 2
    random = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8)
    flat = random % 2 == 1 if dtype == torch.bool else random.view(dtype)
    kind = draw(st.sampled_from(["plain", "strided", "transposed", "offset"]))
    if kind == "strided":
        return flat[::2].reshape(shape) if draw(st.booleans()) else flat.view(*shape, 2)[..., 0]
    made = flat[count // 2 :].view(shape) if kind == "offset" else flat[: count // 2].view(shape)
    return made.transpose(0, -1) if kind == "transposed" and shape else made


def bits(tensor: torch.Tensor) -> bytes:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1))
    return bytes(flat.view(torch.uint8).tolist())


@given(st.lists(tensors(), min_size=1, max_size=8))
def test_what_is_packed_comes_out(given):
    buffer, places = pack(given, host)
    found = unpack(buffer.clone(), places)
    for old, new in zip(given, found, strict=True):
        assert (new.dtype, new.shape, bits(new)) == (old.dtype, old.shape, bits(old))
        assert new.is_contiguous()
        assert (new.data_ptr() % ALIGNMENT == 0) or new.numel() == 0
    used = sorted((new.data_ptr(), new.data_ptr() + new.nbytes) for new in found if new.nbytes)
    assert all(stop <= start for (_, stop), (start, _) in zip(used, used[1:], strict=False)), "no two overlap"
    assert buffer.nbytes <= sum(old.nbytes + ALIGNMENT for old in given), "the buffer is no larger than it has to be"


@given(st.lists(tensors(), min_size=1, max_size=8))
def test_trees_move_together_as_each_by_itself(given):
    tree = {"a": given, "b": [(x, {"n": 1}) for x in given]}
    one, _ = together(tree)
    each = apart(tree)
    for (new, _), expected in zip(one["b"], each["a"], strict=True):
        assert (new.dtype, new.shape, bits(new)) == (expected.dtype, expected.shape, bits(expected))
        assert new.stride() == expected.stride() or new.numel() < 2


def test_conj_and_neg_bits_are_values_in_the_buffer():
    z = torch.complex(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
    given = [z.conj(), z.conj().imag, z]
    found = unpack(*pack(given, host))
    assert all(torch.equal(a, b) for a, b in zip(found, given, strict=True))


def test_small_tensors_travel_in_one_buffer_and_others_do_not():
    x, y = torch.ones(3), torch.ones(MAX_PACKED_BYTES // 4)
    _, buffers = together([x, {"y": y}, torch.arange(2), "text", x])
    assert [buffer.nbytes for buffer in buffers] == [MAX_PACKED_BYTES + 2 * ALIGNMENT]
    (a, b), buffers = together([x, y])
    assert len(buffers) == 1
    assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    assert together([x, "text", x])[1] == [], "one tensor needs no buffer"
    large = torch.ones(MAX_PACKED_BYTES // 4 + 1)
    others = [large, torch.ones(2, requires_grad=True), torch.eye(2).to_sparse(), torch.ones(2, 3).T]
    assert together([x, *others])[1] == []
    assert not any(map(can_pack, others))
    assert not can_pack(torch.empty(2, device="meta"))


def test_sources_may_be_written_again():
    given = [torch.full((3,), float(i)) for i in range(5)]
    found, _ = together(given)
    for x in given:
        x.fill_(-1)
    assert [x.tolist() for x in found] == [[float(i)] * 3 for i in range(5)]


def test_what_shares_a_buffer_does_not_share_a_graph():
    (x, y), _ = together([torch.ones(3), torch.ones(3)])
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * x).sum()
    y.zero_()  # y is not x: backward may not complain
    loss.backward()
    assert weight.grad.tolist() == [1.0] * 3
    assert not y._is_view()
    y.requires_grad_()
    y.sum().backward()
    assert x.tolist() == [1.0] * 3


def test_copy_packed_needs_no_values():
    found = copy_packed([torch.ones(2, 3), torch.tensor(1)], torch.device("meta"), non_blocking=False, allocate=host)
    assert [(x.device.type, x.shape, x.dtype) for x in found] == [
        ("meta", (2, 3), torch.float32),
        ("meta", (), torch.int64),
    ]
