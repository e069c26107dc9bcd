"""Power that fails, and processes that die, after every operation of a conversion."""

from __future__ import annotations

import hashlib
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from unittest import mock

from disk import Recorder, Replay
from memfeed.building.build import Build
from memfeed.building.partial import DURABLE, SKIPPED, SYNCING
from memfeed.convert import fingerprint
from memfeed.system import machine
from torture.victims import presence
from torture.works import PROBED, WORKS, digest, no_syncs, right, short_syncs

KILLED = ("kept", "kept")  # the process died, the machine lives
LOSSES = [("lost", "lost"), ("kept", "zeros"), ("kept", "lost"), ("lost", "kept"), ("some", "some"), KILLED]
NAMES = [name for name, work in WORKS.items() if not work.spread]
PARTS = 16


def record(directory: Path, name: str) -> Recorder:
    """A conversion with many sync points; notes which rows each has made durable, and the end."""
    work, path = WORKS[name], directory / "a.mf"
    if work.before:
        work.before(path)
    recorder = Recorder(directory)
    sync = Build.sync

    def noted(self: Build) -> None:
        sync(self)
        recorder.note(frozenset((self.presence() == DURABLE).nonzero()[0].tolist()))

    with no_syncs(), recorder, short_syncs(), mock.patch.object(Build, "sync", noted):
        work.do(path)
    recorder.note("finished")
    return recorder


def survive(directory: Path, name: str, notes: list[object], before: str, *, killed: bool) -> str:
    """What is left gives the right rows, and none that was there is read again: says what it was."""
    work, path = WORKS[name], directory / "a.mf"
    finished, found = "finished" in notes, "nothing"
    there = next((note for note in reversed(notes) if isinstance(note, frozenset)), frozenset())
    if (directory / "a.mf.build" / ".build" / "settings.json").exists():
        found, states = "build", presence(path)
        # who was killed in a sync cannot know if it failed: then only rows that are durable count
        if killed and not (directory / "a.mf.build" / ".build" / SYNCING).exists():
            there = frozenset(i for i, state in enumerate(states.tolist()) if state not in (0, SKIPPED))
    if path.exists():
        found = "store"
        if finished or not before or digest(path) != before:
            right(path, work)
            there = frozenset()
    assert found == "store" or not finished, "what was promised is gone"
    assert path.exists() or not before, "the old store is gone"
    boot = machine.boot_id() if killed else "another"
    compared = mock.patch.object(fingerprint, "indices_between", return_value=[])  # rows read again on purpose
    with no_syncs(), compared, mock.patch.object(machine, "boot_id", return_value=boot):
        read = (work.resume or work.do)(path)
    again = {i for i in there if read[i]} - PROBED - set(work.broken)
    assert not again, f"rows {again} were there and are computed again"
    right(path, work, resumed=True)
    left = [p.name for p in directory.iterdir() if p != path]
    assert not left, f"{left} are left"
    return found


def lose(recorder: Recorder, name: str, scratch: Path, part: int, parts: int, rng: random.Random) -> Counter[str]:
    """All losses after each operation whose number is ``part`` modulo ``parts``; states that are equal once."""
    counts: Counter[str] = Counter()
    seen: set[str] = set()
    replay, left = Replay(recorder), scratch / "left"
    replay.lose(left, *KILLED)
    before, more = digest(left / "a.mf") if WORKS[name].before else "", True
    while more:
        for names, data in LOSSES if replay.done % parts == part else ():
            killed = (names, data) == KILLED
            replay.lose(left, names, data, rng.randrange(1 << 30))
            state = f"{_state(left)} {len(replay.notes)} {killed}"
            if state in seen:
                continue
            seen.add(state)
            try:
                counts[survive(left, name, replay.notes, before, killed=killed)] += 1
            except Exception as error:
                where = f"{name}, after {replay.done} operations ({replay.last})"
                raise AssertionError(f"{where}, names {names}, bytes {data}: {error!r}") from error
        more = replay.step()
    return counts


def _state(root: Path) -> str:
    hashed = hashlib.sha256()
    for file in sorted(root.rglob("*")):
        hashed.update(str(file.relative_to(root)).encode() + (file.read_bytes() if file.is_file() else b"/"))
    return hashed.hexdigest()


def powerloss(seconds: float, rng: random.Random) -> dict[str, int]:
    """Every prefix of every conversion, a 16th of them after the other in an order drawn by chance, as time allows."""
    counts: Counter[str] = Counter()
    rounds = [(name, part) for part in range(PARTS) for name in NAMES]
    rng.shuffle(rounds)
    end = time.monotonic() + seconds
    for name, part in rounds:
        if time.monotonic() > end and counts["states"]:
            break
        with tempfile.TemporaryDirectory() as base, tempfile.TemporaryDirectory() as scratch:
            recorder = record(Path(base), name)
            for what, count in lose(recorder, name, Path(scratch), part, PARTS, rng).items():
                counts[f"left a {what}"] += count
                counts["states"] += count
        counts["rounds"] += 1
    counts["rounds in all"] = len(rounds)
    return dict(counts)
