"""Time the transfer of many small tensors and of a few large ones to a device.

Every contender must give the same tree before it is timed; one that does not move all tensors is listed apart. With a
GPU a time ends when all data has arrived. Without one nothing is moved: the tree is on the CPU and stays there, and
only the walk through the tree is timed (torch.save and torch.load always copy).

    python benchmarks/to_device.py [--device cuda]
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from typing import Any

import optree
import torch
from tensordict import TensorDict
from torch.utils import _pytree as pytree

import memfeed
from measure import Check, in_turns, medians, parser, ratio, seconds_of, table, write
from memfeed.transfer.to_device import move

OURS, PYTREE = "memfeed.to_device", "torch's pytree"
TENSORDICT = "TensorDict.from_dict, .to"
Tree = dict[str, Any]


def many_small(leaves: int = 200) -> Tree:
    """Return dicts of dicts, lists and tuples of float32 or int64 tensors with 10 to 1,000 elements."""
    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(10, 1001, (leaves,), generator=generator).tolist()
    made = [torch.rand(n, generator=generator) if i % 4 else torch.arange(n) for i, n in enumerate(counts)]
    return {
        f"group{i}": {"boxes": made[i : i + 2], "pair": (made[i + 2], made[i + 3]), "deep": {"x": made[i + 4]}}
        for i in range(0, leaves, 5)
    }


def few_large() -> Tree:
    """Return a batch of images: uint8 [64, 3, 256, 256], float32 [64, 128, 128] and int64 [64]."""
    return {
        "image": torch.randint(0, 256, (64, 3, 256, 256), dtype=torch.uint8),
        "depth": torch.rand(64, 128, 128),
        "label": torch.arange(64),
    }


def saved_and_loaded(tree: Tree, device: torch.device) -> Tree:
    file = io.BytesIO()
    torch.save(tree, file)
    file.seek(0)
    loaded: Tree = torch.load(file, map_location=device)
    return loaded


def by_tensordict(tree: Tree, device: torch.device) -> Any:
    return TensorDict.from_dict(tree, batch_size=[]).to(device, non_blocking=True)


def contenders(device: torch.device) -> dict[str, Callable[[Tree], Any]]:
    def leaf(x: torch.Tensor) -> torch.Tensor:
        return x.to(device, non_blocking=True)

    made: dict[str, Callable[[Tree], Any]] = {
        OURS: lambda tree: memfeed.to_device(tree, device),
        PYTREE: partial(pytree.tree_map, leaf),
        "optree": lambda tree: optree.tree_map(leaf, tree),
        "torch.save, torch.load": lambda tree: saved_and_loaded(tree, device),
        TENSORDICT: lambda tree: by_tensordict(tree, device),
    }
    if device.type == "cuda":
        made["memfeed, each by itself"] = lambda tree: move(
            tree, device, non_blocking=True, strict=False, allocate=None
        )
    try:
        import tree as dm_tree
    except ImportError:
        return made
    return {**made, "dm-tree": lambda tree: dm_tree.map_structure(leaf, tree)}


def is_equal(made: Any, tree: Tree, device: torch.device) -> bool:
    """Return True if ``made`` is ``tree`` on the device."""
    there, expected = optree.tree_flatten(made), optree.tree_flatten(tree)
    return there[1] == expected[1] and all(
        isinstance(a, torch.Tensor) and a.device == device and a.dtype == b.dtype and torch.equal(a.cpu(), b)
        for a, b in zip(there[0], expected[0], strict=True)
    )


def left_behind() -> int:
    """Count the tensors, of two in a list in a dict, that TensorDict.from_dict(...).to("meta") does not move."""
    moved = TensorDict.from_dict({"boxes": [torch.ones(1), torch.ones(2)]}, batch_size=[]).to("meta")
    held = moved.get("boxes")
    values = held.tolist() if hasattr(held, "tolist") and not isinstance(held, torch.Tensor) else held
    return sum(isinstance(x, torch.Tensor) and x.device.type != "meta" for x in values)


def race(tree: Tree, device: torch.device, rounds: int, least: float) -> dict[str, Any]:
    roads = contenders(device)
    for name, road in roads.items():
        made = road(tree)
        if name != TENSORDICT and not is_equal(made, tree, device):
            raise AssertionError(f"{name} gave another tree")

    def run(road: Callable[[Tree], Any]) -> None:
        road(tree)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    seconds = in_turns({name: partial(seconds_of, partial(run, road)) for name, road in roads.items()}, rounds, least)
    leaves = optree.tree_leaves(tree)
    return {
        "leaves": len(leaves),
        "bytes": sum(x.nbytes for x in leaves),
        "median_seconds": medians(seconds),
        "ratios": {name: ratio(seconds, name, OURS) for name in seconds},
        "seconds": seconds,
    }


def main() -> None:
    arguments = parser("to_device-cuda" if torch.cuda.is_available() else "to_device", __doc__)
    arguments.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = arguments.parse_args()
    device = torch.empty(0, device=options.device).device
    rounds, least = (2, 0.0) if options.quick else (30, 0.02)
    works = {
        "many small": race(many_small(), device, rounds, least),
        "few large": race(few_large(), device, rounds, least),
    }
    walk_only = device.type == "cpu"
    for name, found in works.items():
        table(
            f"{name}: {found['leaves']} tensors, {found['bytes'] / 1e6:.1f} MB, {device}"
            + (": nothing is moved, the walk alone" if walk_only else ""),
            ["", "us", "memfeed is x times as fast"],
            [
                [who, f"{time_s * 1e6:,.0f}", f"{found['ratios'][who]:.2f}"]
                for who, time_s in found["median_seconds"].items()
            ],
        )
    left = left_behind()
    print(f"TensorDict.from_dict(...).to leaves {left} of 2 tensors in a list where they were")
    least_times = 1.0 if walk_only else 2.0
    what = "many small tensors: torch's pytree takes"
    checks = [Check(what, works["many small"]["ratios"][PYTREE], least_times, at_least=True)]
    write(
        options,
        {"device": str(device), "walk_only": walk_only, "rounds": rounds},
        {"works": works, "tensordict_leaves_behind": left, "tensors_in_a_list": 2},
        checks,
    )


if __name__ == "__main__":
    main()
