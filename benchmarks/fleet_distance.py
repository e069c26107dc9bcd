"""How far the order of placement="sharded" is from a uniform shuffle, over some epochs of some ranks.

For fleet.py. The same is measured of a uniform permutation that is dealt to as many ranks, in each epoch anew.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from memfeed.order.orders import Order, Shuffled
from memfeed.order.pieces import RankCut, RankPieces

ROWS, BATCH, CLASSES = 500_000, 256, 1000
PAIRS = 20_000


def distances(quick: bool) -> dict[str, Any]:
    """Return the measures of some orders, by their names."""
    rows, epochs = (50_000, 4) if quick else (ROWS, 32)
    orders = {
        f"sharded, {ranks} ranks, {shuffle}, blocks of {block} rows": (ranks, shuffle, block)
        for ranks in ([4] if quick else [8, 64])
        for shuffle, block in ((True, 8), (True, 1024), ("blocks", 1024))
    }
    orders |= {f"uniform, {ranks} ranks": (ranks, None, 1) for ranks in ([4] if quick else [8, 64])}
    found = {name: measure(rows, epochs, *how) for name, how in orders.items()}
    return {"rows": rows, "batch_size": BATCH, "epochs": epochs, "classes": CLASSES, "orders": found}


def measure(rows: int, epochs: int, ranks: int, shuffle: Any, block_rows: int) -> dict[str, Any]:
    """Return how often rows meet in a batch of a rank, and how fast a rank sees all rows.

    ``neighbours`` and ``strangers`` are how often two rows beside each other, and two random rows, are in one batch of
    a rank, over what is expected of a uniform shuffle. ``unseen`` is the part of the rows that a rank has not read
    after 1, 8 and all epochs. ``seen_half`` is the number of epochs after which it has read half of them. ``classes``
    is how many of 1,000 classes, stored one after another, are in a batch of a rank; ``class_std`` is the standard
    deviation of the rows of a class in a rank's epoch, over that of a uniform shuffle.
    """
    generator = np.random.default_rng(0)
    one = generator.integers(0, rows - 1, PAIRS)
    other = generator.integers(0, rows, PAIRS)
    stride, labels = ranks * BATCH, np.arange(rows) * CLASSES // rows
    steps = rows // stride
    met = {"neighbours": 0, "strangers": 0}
    seen, unseen, classes, deviations = np.zeros(rows, bool), [], [], []
    used = block_rows
    for epoch in range(epochs):
        order: Order
        if shuffle is None:
            order = Shuffled(rows, 0, epoch)
        else:
            way = {"shuffle": bool(shuffle), "in_blocks": shuffle == "blocks", "block_rows": block_rows}
            order = RankPieces(rows, 0, epoch, cut=RankCut(ranks, BATCH), **way)
            used = order.block_rows
        line = np.concatenate([order(at, at + stride) for at in range(0, steps * stride, stride)])
        batch_of = np.full(rows, -1, np.int64)
        batch_of[line] = np.arange(len(line)) // BATCH
        for name, with_ in (("neighbours", one + 1), ("strangers", other)):
            met[name] += int(((batch_of[one] == batch_of[with_]) & (batch_of[one] >= 0) & (one != with_)).sum())
        own = line.reshape(steps, ranks, BATCH)[:, 0]
        seen[own.ravel()] = True
        unseen.append(1 - float(seen.mean()))
        classes += [len(np.unique(labels[batch])) for batch in own[:8]]
        deviations.append(float(np.bincount(labels[own.ravel()], minlength=CLASSES).std()))
    expected = epochs * PAIRS * (BATCH - 1) / (rows - 1)
    mean = steps * BATCH / CLASSES
    return {
        "block_rows": used,
        **{name: count / expected for name, count in met.items()},
        "unseen": {str(after): unseen[after - 1] for after in (1, 8, epochs) if after <= epochs},
        "seen_half": next((at + 1 for at, left in enumerate(unseen) if left <= 0.5), None),
        "classes": float(np.mean(classes)),
        "class_std": float(np.mean(deviations)) / float(np.sqrt(mean * (1 - 1 / ranks))),
    }
