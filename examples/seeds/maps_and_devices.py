"""A TensorDict, its memory map, and its device: what tensordict writes is a store, and a store is one of its maps."""

import torch
from tensordict import TensorDict

import memfeed

ROWS = 1000

if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    made = TensorDict({"a": torch.rand(ROWS, 10), "b": {"c": torch.rand(ROWS)}}, [ROWS])
    made.memmap("upstream")  # a directory that tensordict wrote is opened as it is

    store = memfeed.open("upstream")
    assert (store[:] == made).all()
    assert torch.equal(store[7]["b", "c"], made["b", "c"][7])
    assert store.to(device).device.type == device  # all rows, on a device

    # rows that come one after another, in reserved space, as memmap_like has it
    with memfeed.Writer("rows.mf", like=made[0], length=ROWS) as writer:
        for first in range(0, ROWS, 100):
            writer[first : first + 100] = made[first : first + 100]
    ours = memfeed.open("rows.mf")
    assert (TensorDict.load_memmap("rows.mf") == made).all()  # and tensordict opens what memfeed wrote
    assert (ours.tensordict() == made).all()  # mapped, without a copy

    total = sum(batch["a"].sum() for batch in memfeed.Loader(ours, 100, shuffle=True, device=device))
    assert torch.allclose(total.cpu(), made["a"].sum(), rtol=1e-4)
    print(f"{ROWS} rows from tensordict to memfeed and back, on {device}")
