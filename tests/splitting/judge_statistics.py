"""Compare samples of two sources: what is drawn in each row, how often, and how the leaves of a sample go together.

Every sample is one outcome, all leaves together. Sources are compared row by row, under the hypothesis that the samples
of a row come from one distribution: then it does not matter which of the two sources gave which of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from judge_samples import leaves_of

LARGEST_P = 1e-6  # of all tests of one comparison together
_SIMULATED = 300
_PAIRS = 12
_COARSE = 64  # distinct values, above which a leaf with several dims is an image rather than a mask


@dataclass(eq=False)
class Draw:
    """One sample: what must be equal exactly, its leaves of numbers, and its features."""

    key: tuple[Any, ...]
    numbers: dict[Any, np.ndarray]
    features: dict[Any, np.ndarray] = field(default_factory=dict)


def draw_of(tree: Any) -> Draw:
    """Return a sample as what is compared."""
    key: list[Any] = []
    numbers, features = {}, {}
    for path, leaf in leaves_of(tree).items():
        if not isinstance(leaf, torch.Tensor):
            key.append((path, type(leaf).__name__, repr(leaf)))
            features[path] = np.array([hash(repr(leaf)) % 65_521], np.float64)
            continue
        key.append((path, str(leaf.dtype), tuple(leaf.shape)))
        values = (torch.view_as_real(leaf) if leaf.is_complex() else leaf).to(torch.float64).numpy()
        numbers[path] = np.nan_to_num(values, nan=-12_345.0, posinf=1e30, neginf=-1e30)
        features[path] = leaf_features(numbers[path])
    return Draw(tuple(key), numbers, features)


def leaf_features(values: np.ndarray) -> np.ndarray:
    """Return numbers that describe a leaf: mean, spread, moments along width and height, corners, size."""
    if values.size == 0:
        return np.full(10, -1e6)
    if values.ndim == 0:
        return values.reshape(1)
    planes = values.reshape(1, 1, -1) if values.ndim == 1 else values.reshape(-1, *values.shape[-2:])
    if values.ndim == 3 and values.shape[2] <= 4 < values.shape[0]:
        planes = values.transpose(2, 0, 1)
    first, last = planes[0], planes[-1]
    height, width = first.shape
    across, down = np.linspace(-1, 1, width), np.linspace(-1, 1, height)
    corners = [first[0, 0], first[0, -1], first[-1, 0], first[-1, -1], last[height // 2, width // 2]]
    moments = [(first.mean(0) * across).mean(), (first.mean(1) * down).mean()]
    return np.array([values.mean(), *moments, *corners, values.std(), float(height * 1000 + width)])


def tolerance_of(found: list[np.ndarray], levels: float) -> float:
    """Return by how much the numbers of a leaf may differ: those of images by `levels` of 8 bits.

    Args:
        found: the leaf in some samples.
        levels: 0 allows what the rounding of floats makes.
    """
    low, high = min(float(one.min(initial=0)) for one in found), max(float(one.max(initial=0)) for one in found)
    is_whole = all(bool((one == np.round(one)).all()) for one in found[:8])
    rounding = 0.0 if is_whole else 2e-5 * max(1.0, high - low)
    is_image = found[0].ndim >= 3 and len(np.unique(found[0])) > _COARSE
    if not levels or not is_image:
        return rounding or 1e-3
    return rounding + levels * (1.001 if is_whole else 1.02 * (high - low) / 255)


def compare(
    theirs: list[list[Draw]], ours: list[list[Draw]], levels: float, batches: list[list[tuple[int, int]]] | None = None
) -> list[str]:
    """Return what differs between two sources, an empty list if nothing does.

    Args:
        theirs: of each row, its samples from the original dataset.
        ours: of each row, as many samples.
        levels: see `tolerance_of`.
        batches: of each batch of ours, its samples as (row, which of the row's samples).
    """
    every = [draw for row in theirs for draw in row]
    paths = {path for draw in every for path in draw.numbers}
    tolerances = {path: tolerance_of([d.numbers[path] for d in every if path in d.numbers], levels) for path in paths}
    return [
        *outcomes_differ(theirs, ours, tolerances),
        *features_differ(theirs, ours, tolerances),
        *rows_differ(theirs, ours, tolerances),
        *draws_are_shared(ours, batches or []),
    ]


def outcomes_differ(theirs: list[list[Draw]], ours: list[list[Draw]], tolerances: dict[Any, float]) -> list[str]:
    """Return what differs in which samples occur in each row, and how often."""
    tables = [_table(one, other, tolerances) for one, other in zip(theirs, ours, strict=True)]
    generator = np.random.default_rng(0)
    found = np.array([_statistics(table) for table in tables]).sum(0)
    simulated = np.zeros((_SIMULATED, 2))
    for table in tables:
        drawn = generator.multivariate_hypergeometric(table.sum(0), int(table[0].sum()), _SIMULATED)
        simulated += _statistics(np.stack([drawn, table.sum(0) - drawn], 1)).T
    scale = np.maximum(simulated.std(0), 1e-9)
    distance = (found - simulated.mean(0)) / scale
    reasons = []
    if scale[0] > 1e-6 and distance[0] > 7:
        strangers = sum(int(table[1][table[0] == 0].sum()) for table in tables)
        total = sum(int(table[1].sum()) for table in tables)
        reasons.append(
            f"other samples, or other frequencies ({distance[0]:.0f} standard errors; {strangers} of {total} are none "
            "that the dataset gave)"
        )
    if scale[1] > 1e-6 and abs(distance[1]) > 7:
        reasons.append(
            f"samples of a row repeat {'more' if distance[1] > 0 else 'less'} often than the dataset's "
            f"({abs(distance[1]):.0f} standard errors)"
        )
    return reasons


def _statistics(tables: np.ndarray) -> np.ndarray:
    """Return chi-square, and by how many more pairs of samples of the second source are equal; tables [..., 2, k]."""
    one, other = tables[..., 0, :].astype(float), tables[..., 1, :].astype(float)
    square = ((one - other) ** 2 / (one + other)).sum(-1)
    return np.stack([square, ((other**2 - one**2) / 2).sum(-1)])


def _table(theirs: list[Draw], ours: list[Draw], tolerances: dict[Any, float]) -> np.ndarray:
    """Return how often each distinct sample of a row occurs in each source: [2, k]."""
    numbers: list[int] = []
    known: dict[Any, int] = {}
    groups: dict[Any, list[tuple[int, np.ndarray]]] = {}
    for draw in [*theirs, *ours]:
        scaled = [draw.numbers[path].ravel() / tolerances.get(path, 1e-3) for path in draw.numbers]
        flat = np.concatenate([*scaled, np.zeros(1)])
        exact = (draw.key, flat.tobytes())
        if exact not in known:
            group = groups.setdefault(draw.key, [])
            near = next((n for n, other in group if np.abs(other - flat).max() <= 1.0), None)
            if near is None:
                near = sum(map(len, groups.values()))
                group.append((near, flat))
            known[exact] = near
        numbers.append(known[exact])
    count = max(numbers) + 1
    sides = (numbers[: len(theirs)], numbers[len(theirs) :])
    table = np.stack([np.bincount(side, minlength=count) for side in sides])
    return table[:, table.sum(0) > 0]


def features_differ(theirs: list[list[Draw]], ours: list[list[Draw]], tolerances: dict[Any, float]) -> list[str]:
    """Return the features of whole samples whose distributions differ, and draws that rows of a batch share."""
    paths = sorted({path for row in [*theirs, *ours] for draw in row for path in draw.features}, key=repr)
    columns, allowed, names = _columns(theirs, ours, paths, tolerances)
    centre = columns.mean((0, 2), keepdims=True)
    spread = np.abs(columns - centre).max((0, 1, 2))
    kept = np.flatnonzero(spread > 0)
    one, other = ((columns[side] - centre[0])[..., kept].reshape(-1, len(kept)) for side in (0, 1))
    worst: dict[str, tuple[float, str]] = {}
    limit = math.log(2 * max(1, len(kept)) / LARGEST_P)
    for column, at in enumerate(kept):
        distance, beyond = _distance(one[:, column], other[:, column], 2 * allowed[at] + 1e-9)
        strength = max(len(one) * distance**2 / limit, beyond * math.log(2) / limit)
        if strength > 1 and strength > worst.get(names[at], (0.0, ""))[0]:
            shown = f"distance {distance:.2f}, {beyond} beyond the other's range"
            worst[names[at]] = (strength, shown)
    ranked = sorted(worst.items(), key=lambda item: -item[1][0])[:3]
    return [f"{name} has another distribution ({shown})" for name, (_, shown) in ranked]


def rows_differ(theirs: list[list[Draw]], ours: list[list[Draw]], tolerances: dict[Any, float]) -> list[str]:
    """Return rows in which all samples of one source are far beyond all samples of the other, in a feature of a leaf.

    Far means that the means differ by more than 7 standard errors, from the spread within all rows.
    """
    paths = sorted({path for row in [*theirs, *ours] for draw in row for path in draw.features}, key=repr)
    for path in paths:
        values, _ = _block(theirs, ours, path)
        gap = np.maximum(values[0].min(1) - values[1].max(1), values[1].min(1) - values[0].max(1))  # [rows, d]
        means = values.mean(2)
        within = (values - means[:, :, None]).std((0, 1, 2))
        error = np.maximum(within * math.sqrt(2 / values.shape[2]), 1e-9)
        far = (gap > 2 * tolerances.get(path, 1e-3)) & (np.abs(means[0] - means[1]) > 7 * error)
        rows = np.flatnonzero(far.any(1)).tolist()
        if rows:
            return [f"other values in rows {rows[:5]}, of {len(rows)}: leaf {list(path)}"]
    return []


def draws_are_shared(ours: list[list[Draw]], batches: list[list[tuple[int, int]]]) -> list[str]:
    """Return a sentence if the samples of a batch are drawn together: then the means of batches differ too much."""
    batches = [batch for batch in batches if len(batch) > 1]
    paths = {path for row in ours for draw in row for path in draw.features}
    for path in sorted(paths if len(batches) > 7 else (), key=repr):
        rows = [[draw.features.get(path, np.zeros(1))[:3] for draw in row] for row in ours]
        if len({len(values) for row in rows for values in row}) > 1:
            continue
        values = np.array(rows)
        values = values - values.mean(1, keepdims=True)
        scale = values.std((0, 1))
        means = np.array([np.mean([values[at] for at in batch], 0) * math.sqrt(len(batch)) for batch in batches])
        ratio = (means**2).mean(0) / np.maximum(scale**2, 1e-12)
        largest = float((ratio * (scale > 1e-6)).max())
        if largest > 1 + 12 * math.sqrt(2 / len(batches)):
            return [f"rows of a batch share their draws: leaf {list(path)} ({largest:.1f} times the variance)"]
    return []


def _columns(
    theirs: list[list[Draw]], ours: list[list[Draw]], paths: list[Any], tolerances: dict[Any, float]
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Return features [2, rows, draws, d] of whole samples, what each may differ by [d], and their names."""
    blocks, allowed, names = [], [], []
    for path in paths:
        block, width = _block(theirs, ours, path)
        blocks.append(block)
        allowed.append(np.full(width, tolerances.get(path, 1e-3)))
        names += [f"leaf {list(path)}"] * width
    scales = [np.maximum(block.std((0, 1, 2)), 1e-9) for block in blocks]
    shares = [(block - block.mean((0, 1, 2))) / scale for block, scale in zip(blocks, scales, strict=True)]
    slack = [np.minimum(tolerance / scale, 1.0) for tolerance, scale in zip(allowed, scales, strict=True)]
    pairs = [(i, j) for i in range(len(paths)) for j in range(i + 1, len(paths))][:_PAIRS]
    for i, j in pairs:
        left, right = shares[i][..., :8, None], shares[j][..., None, :8]
        both = slack[i][:8, None] + slack[j][None, :8]
        count = left.shape[-2] * right.shape[-1]
        for made, how in ((left - right, "minus"), (left * right, "times")):
            blocks.append(made.reshape(*made.shape[:3], count))
            allowed.append((both * (1 if how == "minus" else 4)).ravel())
            names += [f"leaf {list(paths[i])} {how} leaf {list(paths[j])}"] * count
    return np.concatenate(blocks, -1), np.concatenate(allowed), names


def _block(theirs: list[list[Draw]], ours: list[list[Draw]], path: Any) -> tuple[np.ndarray, int]:
    """Return the features [2, rows, draws, width] of a leaf, and their number."""
    width = max(len(d.features.get(path, ())) for side in (theirs, ours) for row in side for d in row)
    missing = np.full(width, -1e6)
    return np.array(
        [[[_padded(d.features.get(path, missing), width) for d in row] for row in side] for side in (theirs, ours)]
    ), width


def _padded(values: np.ndarray, width: int) -> np.ndarray:
    return values if len(values) == width else np.concatenate([values, np.full(width - len(values), -1e6)])


def _distance(one: np.ndarray, other: np.ndarray, slack: float) -> tuple[float, int]:
    """Return the distance of Kolmogorov and Smirnov, and how many values are beyond the range of the other source.

    Values that differ by no more than `slack` count as equal.
    """
    left, right = np.sort(one), np.sort(other)
    steps = np.arange(1, len(left) + 1) / len(left)
    distance = 0.0
    beyond = 0
    for a, b in ((left, right), (right, left)):
        distance = max(distance, float((steps - np.searchsorted(b, a + slack, "right") / len(b)).max()))
        beyond = max(beyond, int((a > b[-1] + slack).sum()), int((a < b[0] - slack).sum()))
    return distance, beyond
