"""Power losses: what a process did to files is recorded, and what could be left of any prefix of it is made again.

The model. A file's bytes are safe once the file was synced after they were written; its name is safe once the directory
was synced after the name was made, changed or removed. After a power loss:

- names that are not safe are all ``"lost"`` (each directory is as it was when it was last synced), all ``"kept"``, or
  those of a moment between (``"some"``: as a journal keeps them, in the order of the operations, and none older than
  the last sync of any directory);
- bytes that are not safe are ``"lost"`` (the file has the size and bytes that were last synced), ``"kept"``,
  ``"zeros"`` (the new size, and zeros where anything was written), or ``"some"``: each 512 bytes old, new or zeros.

A sync that failed does what it does in Linux: bytes that it was to write stay in memory, and no later sync writes them,
only another write of the same bytes does. Names are still to be synced: a journal keeps them.

File systems that show other files' old blocks in place of what was not synced (ext3 and ext4 with data=writeback) are
not modelled. A rename is one step. Permissions are not kept. What was there before the recording began is safe.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import random
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from disk.watch import Operation, watched

Names = Literal["lost", "kept", "some"]
Bytes = Literal["lost", "kept", "zeros", "some"]
_SECTOR = 512


@dataclass(eq=False)
class _File:
    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""
    dirty: list[tuple[int, int]] = field(default_factory=list)  # written since the last sync, as (first, last + 1)
    holes: list[tuple[int, int]] = field(default_factory=list)  # made since then: a journal keeps them

    def resize(self, size: int) -> None:
        if size < len(self.data):
            self.dirty.append((size, len(self.data)))
            self.holes.append((size, len(self.data)))
        del self.data[size:]
        self.data.extend(bytes(size - len(self.data)))

    def write(self, data: bytes, offset: int) -> None:
        self.resize(max(len(self.data), offset + len(data)))
        self.data[offset : offset + len(data)] = data
        self.dirty.append((offset, offset + len(data)))

    def punch(self, first: int, size: int) -> None:
        last = min(first + size, len(self.data))
        self.data[first:last] = bytes(max(last - first, 0))
        self.dirty.append((first, last))
        self.holes.append((first, last))

    def sync(self) -> None:
        synced = bytearray(self.synced[: len(self.data)].ljust(len(self.data), b"\0"))
        for first, last in self.dirty:
            last = min(last, len(self.data))
            synced[first:last] = self.data[first:last]
        self.synced, self.dirty, self.holes = bytes(synced), [], []

    def fail_to_sync(self) -> None:
        synced = bytearray(self.synced)
        for first, last in self.holes:
            synced[first:last] = bytes(max(min(last, len(synced)) - first, 0))
        self.synced, self.dirty, self.holes = bytes(synced), [], []

    def after_loss(self, how: Bytes, rng: random.Random) -> bytes:
        if how == "lost":
            return self.synced
        left = bytearray(self.data)
        if how == "kept":
            return bytes(left)
        for first, last in self.dirty:
            last = min(last, len(left))
            if how == "zeros":
                left[first:last] = bytes(max(last - first, 0))
                continue
            while first < last:
                end = min((first // _SECTOR + 1) * _SECTOR, last)
                old = self.synced[first:end].ljust(end - first, b"\0")
                left[first:end] = rng.choice((old, bytes(left[first:end]), bytes(end - first)))
                first = end
        return bytes(left)


@dataclass(eq=False)
class _Directory:
    names: dict[str, _File | _Directory] = field(default_factory=dict)
    synced: dict[str, _File | _Directory] = field(default_factory=dict)


class Recorder:
    """Records what this process does to files under ``base`` within the block, for a ``Replay``.

    ``note`` puts a word between two operations: what has been promised there. The first sync of which ``fails`` returns
    True fails with EIO, and is ``failed`` then.

    Example::

        with Recorder(tmp_path, fails=lambda one: one.path.endswith("x.memmap")) as recorder:
            build.sync()  # raises BuildError
            build.sync()  # does not, though bytes are lost
        recorder.lose(tmp_path / "left")
    """

    def __init__(self, base: Path, fails: Callable[[Operation], bool] | None = None) -> None:
        self.base = base.resolve()
        self.fails, self.failed = fails, ""
        self.before = _read(self.base)
        self.steps: list[Operation | object] = []
        self._stack = ExitStack()

    def __enter__(self) -> Recorder:
        self._stack.enter_context(watched(self._each))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.close()

    def note(self, what: object) -> None:
        """``what`` holds from here on."""
        self.steps.append(what)

    def lose(self, to: Path) -> None:
        """Make the directory ``to`` what a power loss now leaves: all names, and the bytes that were synced."""
        replay = Replay(self)
        while replay.step():
            pass
        replay.lose(to, "kept", "lost")

    def _each(self, operation: Operation, do: Callable[..., Any]) -> Any:
        is_here = Path(operation.path).is_relative_to(self.base) and not operation.path.endswith(" (deleted)")
        is_due = is_here and operation.kind == "sync" and not self.failed
        if is_due and self.fails is not None and self.fails(operation):
            self.failed = operation.path
            self.steps.append(dataclasses.replace(operation, kind="failed sync"))
            raise OSError(errno.EIO, os.strerror(errno.EIO), operation.path)
        result = do()
        if is_here:
            self.steps.append(operation)
        return result


def _read(path: Path) -> _Directory:
    """What lies there, all of it safe."""
    found = _Directory()
    for entry in path.iterdir():
        found.names[entry.name] = _read(entry) if entry.is_dir() else _File(bytearray(entry.read_bytes()))
        made = found.names[entry.name]
        if isinstance(made, _File):
            made.synced = bytes(made.data)
    found.synced = dict(found.names)
    return found


class Replay:
    """Goes through what a ``Recorder`` recorded, once; ``step`` does one operation, ``lose`` writes what may be left.

    ``notes`` are those that hold so far, ``done`` is how many operations were done, ``last`` says which was the last.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._base, self._steps, self._at = recorder.base, recorder.steps, 0
        self._top = recorder.before
        self._trees = [_names(self._top)]  # of every moment since a directory was last synced
        self.notes: list[object] = []
        self.done, self.last = 0, ""

    def step(self) -> bool:
        """The next operation; False at the end."""
        if self._at == len(self._steps):
            return False
        one = self._steps[self._at]
        self._at += 1
        if isinstance(one, Operation):
            self._do(one)
            self.done, self.last = self.done + 1, str(one)
        else:
            self.notes.append(one)
        return True

    def lose(self, to: Path, names: Names, data: Bytes, seed: int = 0) -> None:
        """Makes the directory ``to`` what a power loss now could leave of the base; what lies there is removed."""
        shutil.rmtree(to, ignore_errors=True)
        rng = random.Random(seed)
        if names == "lost":
            _write(to, _synced(self._top), data, rng)
        else:
            _write(to, self._trees[-1] if names == "kept" else rng.choice(self._trees), data, rng)

    def _do(self, one: Operation) -> None:
        above, name = self._place(one.path)
        if above is None or (one.kind not in ("create", "mkdir") and name not in above.names and name):
            return  # something that was made behind our back, as tensordict's scratch files are
        found = above.names.get(name) if name else above
        changed = True
        if one.kind == "create":
            above.names[name] = _File()
        elif one.kind == "mkdir":
            above.names[name] = _Directory()
        elif one.kind in ("unlink", "rmdir"):
            del above.names[name]
        elif one.kind in ("rename", "exchange", "link"):
            other, second = self._place(one.to)
            assert other is not None
            assert found is not None
            if one.kind == "exchange":
                above.names[name] = other.names[second]
            elif one.kind == "rename":
                del above.names[name]
            other.names[second] = found
        elif isinstance(found, _Directory):
            if one.kind == "sync":
                found.synced = dict(found.names)
                self._trees = []
        else:
            changed = False
            assert isinstance(found, _File)
            if one.kind == "write":
                found.write(one.data, one.offset)
            elif one.kind in ("truncate", "reserve"):
                found.resize(one.size)
            elif one.kind == "punch":
                found.punch(one.offset, one.size)
            elif one.kind == "sync":
                found.sync()
            elif one.kind == "failed sync":
                found.fail_to_sync()
        if changed:
            self._trees.append(_names(self._top))

    def _place(self, path: str) -> tuple[_Directory | None, str]:
        """The directory that a path is in, and its name there; the base itself has none."""
        parts = Path(path).relative_to(self._base).parts
        at = self._top
        for part in parts[:-1]:
            below = at.names.get(part)
            if not isinstance(below, _Directory):
                return None, ""
            at = below
        return at, parts[-1] if parts else ""


_Tree = dict[str, Any]  # name -> _File, or the tree of a directory


def _names(directory: _Directory) -> _Tree:
    return {name: _names(one) if isinstance(one, _Directory) else one for name, one in directory.names.items()}


def _synced(directory: _Directory) -> _Tree:
    return {name: _synced(one) if isinstance(one, _Directory) else one for name, one in directory.synced.items()}


def _write(path: Path, tree: _Tree, data: Bytes, rng: random.Random) -> None:
    os.mkdir(path)
    for name, one in tree.items():
        if isinstance(one, _File):
            (path / name).write_bytes(one.after_loss(data, rng))
        else:
            _write(path / name, one, data, rng)
