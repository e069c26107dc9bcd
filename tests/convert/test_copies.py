"""What is kept of a sample is a copy, in one piece, of any memory that the sample has."""

import torch

import memfeed
from memfeed.schema import values
from memfeed.testing import equal


def test_a_copy_is_contiguous_and_shares_no_memory():
    base = torch.arange(24.0).view(2, 3, 4)
    for given in (
        base,
        base.permute(2, 0, 1),
        base[:, ::2],
        base[0, 0, 0],
        base[:0],
        base.bfloat16().mT,
        base[:1].expand(3, 3, 4),
    ):
        copied = values.copy_value(given)
        assert torch.equal(copied, given)
        assert copied.dtype == given.dtype
        assert copied.shape == given.shape
        assert not copied.numel() or copied.untyped_storage().data_ptr() != given.untyped_storage().data_ptr()
    turned = values.copy_value(base.permute(2, 0, 1))
    assert turned.is_contiguous()
    conjugate = torch.tensor([[1 + 2j, 3j]]).conj()
    assert torch.equal(values.copy_value(conjugate), conjugate)


def test_a_tensor_of_one_element_may_have_any_stride(tmp_path):
    """contiguous() leaves it as it is, and its bytes cannot be viewed."""
    odd = [torch.as_strided(torch.arange(10.0), (1,), (3,), offset) for offset in range(5)]
    grid = [torch.as_strided(torch.arange(40), (1, 1), (7, 5), offset) for offset in range(5)]
    samples = [{"x": x, "y": y, "z": y.numpy()} for x, y in zip(odd, grid, strict=True)]
    store = memfeed.cache(samples, tmp_path / "a.mf", progress=False)
    assert all(equal(store[i]["x"], odd[i]) and equal(store[i]["y"], grid[i]) for i in range(5))
    column = torch.as_strided(torch.arange(10.0), (1, 1), (9, 4), 2)
    assert memfeed.cache({"x": column}, tmp_path / "b.mf", progress=False)[0]["x"].tolist() == [2.0]
    assert next(iter(memfeed.Loader({"x": column}, 1)))["x"].tolist() == [[2.0]]
