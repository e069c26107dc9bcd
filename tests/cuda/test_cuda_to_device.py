"""to_device where it matters: small tensors in one copy, on a GPU."""

import gc
from collections import UserDict

import pytest
import torch
from tensordict import TensorDict
from torch.nn.utils.rnn import pack_sequence

import memfeed
from memfeed import Loader, to_device
from memfeed.transfer.packing import MAX_PACKED_BYTES
from memfeed.transfer.to_device import move
from support import Made, Pair, equal

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs an NVIDIA GPU: torch.cuda.is_available() is False"
)

DTYPES = (torch.bool, torch.uint8, torch.int16, torch.int64, torch.bfloat16, torch.float32, torch.complex64)


def made(count=200):
    """A tree of many small tensors of several dtypes and shapes, and of everything that is not small and plain."""
    small = [
        torch.randint(0, 2 if dtype is torch.bool else 100, (i % 7, 1 + i % 5)).to(dtype)
        for i, dtype in zip(range(count), DTYPES * count, strict=False)
    ]
    return {
        "small": [{"x": x, "pair": (x, torch.tensor(i))} for i, x in enumerate(small)],
        "large": torch.rand(MAX_PACKED_BYTES),
        "transposed": torch.rand(3, 4).T,
        "channels_last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "user": UserDict(x=torch.ones(2)),
        "packed": pack_sequence([torch.ones(3), torch.zeros(2)]),
        "td": TensorDict({"x": torch.rand(4, 2), "deep": {"y": torch.rand(4)}}, [4]),
        "text": "text",
    }


def flat(tree):
    return [(x["x"], *x["pair"]) for x in tree["small"]]


def copies(function):
    """How many copies to the device a call makes."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    return sum("HtoD" in event.name for event in profile.events())


@pytest.mark.parametrize("non_blocking", [True, False])
def test_together_is_as_each_by_itself(non_blocking):
    tree = made()
    device = torch.empty(0, device="cuda").device
    new = to_device(tree, "cuda", non_blocking=non_blocking)
    each = move(tree, device, non_blocking=False, strict=False, allocate=None)
    torch.cuda.synchronize()
    for found, expected in zip(flat(new), flat(each), strict=True):
        assert found[0] is found[1]
        for a, b in zip(found, expected, strict=True):
            assert (a.device, a.dtype, a.shape) == (device, b.dtype, b.shape)
            assert torch.equal(a, b)
    for name in ("large", "transposed", "channels_last"):
        assert torch.equal(new[name], each[name])
        assert new[name].stride() == tree[name].stride()
    assert equal(new["user"]["x"].cpu(), tree["user"]["x"])
    assert new["packed"].data.device == device
    assert new["packed"].batch_sizes.device.type == "cpu"
    assert new["td"]["deep", "y"].device == device
    back = to_device(new, "cpu")
    assert all(torch.equal(a[0], b[0]) for a, b in zip(flat(back), flat(tree), strict=True)), "waited for"
    assert to_device(new, "cuda")["large"] is new["large"]


@pytest.mark.filterwarnings("ignore")  # the profiler's own
def test_small_tensors_are_one_copy():
    tensors = [torch.full((i + 1,), i) for i in range(50)]
    to_device(tensors, "cuda")
    assert copies(lambda: to_device(tensors, "cuda")) == 1


def test_sources_may_be_written_again_at_once():
    tensors = [torch.zeros(1000) for _ in range(64)]
    found = []
    torch.cuda._sleep(50_000_000)  # the copies have to wait for this
    for step in range(40):
        for x in tensors:
            x.fill_(step)
        found.append(to_device(tensors, "cuda"))
    torch.cuda.synchronize()
    for step, moved in enumerate(found):
        assert all(bool((x == step).all()) for x in moved)


def test_a_tree_that_does_not_fit_leaves_nothing_behind():
    tree = [torch.ones(100), torch.ones(100), torch.empty(1).expand(1 << 45)]
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with pytest.raises(torch.OutOfMemoryError):
        to_device(tree, "cuda")
    gc.collect()  # the error's traceback
    assert torch.cuda.memory_allocated() == before
    assert to_device(tree[:2], "cuda")[0].sum().item() == 100


def test_who_keeps_one_keeps_the_buffer_and_no_more():
    tensors = [torch.ones(MAX_PACKED_BYTES, dtype=torch.uint8) for _ in range(8)]
    gc.collect()
    before = torch.cuda.memory_allocated()
    kept = to_device(tensors, "cuda")[0]
    assert torch.cuda.memory_allocated() - before == 8 * MAX_PACKED_BYTES
    del kept
    assert torch.cuda.memory_allocated() == before


def sample(kind, i):
    x = torch.full((4,), float(i))
    if kind == "tensordict":
        return TensorDict({"x": x}, [])
    if kind == "tensorclass":
        return Pair(images=x, targets=torch.tensor(i), batch_size=[])
    return {"x": x, "label": i}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 2)

    def forward(self, batch):
        return self.linear(batch.images if isinstance(batch, Pair) else batch["x"])


@pytest.mark.filterwarnings("ignore")  # later torch deprecates DataParallel
@pytest.mark.parametrize("kind", ["dict", "tensordict", "tensorclass"])
def test_batches_pass_through_data_parallel(kind, path):
    store = memfeed.cache(Made(lambda i: sample(kind, i), 12), path, progress=False)
    model = torch.nn.DataParallel(Model().cuda(0), device_ids=[0])
    for batch in Loader(store, 4, shuffle=True, seed=0):
        model.zero_grad()
        model(to_device(batch, "cuda:0")).sum().backward()
        assert all(p.grad is not None for p in model.parameters())


def test_scatter_takes_moved_and_unmoved_batches():
    batch = {"x": torch.arange(8.0).view(4, 2), "label": torch.arange(4)}
    for given in (batch, to_device(batch, "cuda:0")):
        (part,) = torch.nn.parallel.scatter(given, [0])
        assert equal({key: value.cpu() for key, value in part.items()}, batch)
