"""Disks that refuse: every operation of every kind of conversion fails once, and the next try gives what it has to."""

from __future__ import annotations

import errno
import random
import tempfile
import time
from collections import Counter
from pathlib import Path

from disk import Faults
from memfeed.errors import BuildError, SpaceError
from torture.works import WORKS, digest, right

CODES = (errno.ENOSPC, errno.EIO, 0)
RARE_CODES = (errno.EDQUOT, errno.EROFS)


def fail_once(directory: Path, name: str, at: int, code: int, *, lasting: bool = False) -> bool:
    """One conversion whose operation ``at`` fails, then another try; False where there are fewer operations.

    Of a conversion in several processes the operation fails in each that comes so far.
    """
    work, path, before = WORKS[name], directory / "a.mf", ""
    if work.before:
        work.before(path)
        before = digest(path)
    try:
        with Faults(at, code, lasting=lasting) as faults:
            work.do(path)
    except (SpaceError, BuildError) as error:
        assert code, f"a short write is no error: {error}"
        assert isinstance(error, SpaceError) == (code in (errno.ENOSPC, errno.EDQUOT)), (faults.failed, error)
        assert str(directory) in str(error), error
        if isinstance(error, SpaceError):
            assert "bytes more" in str(error), error
        if before and digest(path) != before:
            right(path, work)  # the error came after the exchange
    else:
        right(path, work)
        if faults.failed is None and not work.spread:
            return False
    work.do(path)
    right(path, work)
    assert not [p for p in directory.iterdir() if p != path and list(p.iterdir())], list(directory.iterdir())
    return True


def operations(name: str) -> list[str]:
    """The kind of each operation of a conversion; one in several processes is taken as one in this."""
    work = WORKS["convert" if WORKS[name].spread else name]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "a.mf"
        if work.before:
            work.before(path)
        with Faults() as faults:
            work.do(path)
    return [operation.kind for operation in faults.operations]


def faults(seconds: float, rng: random.Random) -> dict[str, int]:
    """Every operation with every kind of fault once, in an order drawn by chance, as far as the time goes."""
    counts: Counter[str] = Counter()
    points = [
        (name, at, code)
        for name in WORKS
        for at, kind in enumerate(operations(name))
        for code in CODES
        if code or kind == "write"
    ]
    rng.shuffle(points)
    counts["injection points"] = len(points)
    end = time.monotonic() + seconds
    for name, at, code in points:
        if time.monotonic() > end:
            break
        lasting = bool(code) and rng.random() < 0.3
        if code and rng.random() < 0.2:
            code = rng.choice(RARE_CODES)
        with tempfile.TemporaryDirectory() as directory:
            try:
                done = fail_once(Path(directory), name, at, code, lasting=lasting)
            except Exception as error:
                what = errno.errorcode.get(code, "a short write")
                raise AssertionError(f"{name}, operation {at}, {what}, lasting={lasting}: {error!r}") from error
        counts["tried"] += 1
        counts[f"{name}" if done else "of them without effect"] += 1
    return dict(counts)
