"""Save and load: nested values, a tensorclass with text, weights in part, and rows in chunks, without pickle."""

import torch
from tensordict import TensorDict, tensorclass

import memfeed

ROWS = 500


@tensorclass
class Scan:
    data: torch.Tensor
    note: str


if __name__ == "__main__":
    # the weights of a model, and a part of them
    model = torch.nn.Transformer(32, 2, 1, 1, 64)
    weights = TensorDict.from_module(model).data
    weights.memmap("weights")
    stored = memfeed.open("weights")
    part = memfeed.open("weights", select=["encoder"])
    assert 0 < len(part.schema) < len(stored.schema)
    other = torch.nn.Transformer(32, 2, 1, 1, 64)
    unfilled = stored.into(TensorDict.from_module(other).data)  # straight into memory that is there
    assert not unfilled.missing_keys
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))

    # rows of any nesting: text stays text, a class comes back by its name
    rows = [{"scan": Scan(torch.full((3,), float(i)), f"row {i}", batch_size=[]), "i": i} for i in range(ROWS)]
    store = memfeed.cache(rows, "scans.mf", types=Scan, progress=False)
    assert store[7]["scan"].note == "row 7"
    assert torch.equal(store[7]["scan"].data, torch.full((3,), 7.0))

    # rows in chunks, into space that is reserved at once
    datum = TensorDict({"image": torch.zeros(3, 16, 16, dtype=torch.uint8), "label": 0}, [])
    with memfeed.Writer("chunks.mf", like=datum.expand(ROWS)) as writer:
        for first in range(0, ROWS, 100):
            images = torch.full((100, 3, 16, 16), first // 100, dtype=torch.uint8)
            writer[first : first + 100] = {"image": images, "label": torch.arange(first, first + 100)}
    chunks = memfeed.open("chunks.mf", select=["label"])  # reads no image
    assert chunks[:]["label"].tolist() == list(range(ROWS))
    print(f"{len(stored.schema)} tensors of a model, {ROWS} nested rows, and {ROWS} rows in chunks")
