"""Watch a dataset whose store is in use: what its attributes held, and which of them have changed since."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from memfeed.convert.dataset_settings import EMPTY, is_replaced, settings_of
from memfeed.convert.digests import PARTIAL, SOME, Digest, differ_in_all, digest_attributes
from memfeed.convert.file_digests import digest_files, digest_single_files
from memfeed.convert.opened_files import OpenedFiles
from memfeed.convert.plain_data import OF_MODULE, Leaf, leaves_of
from memfeed.errors import RandomDataError, brief
from memfeed.splitting.places import CallablePlace
from memfeed.splitting.unread import Unread
from memfeed.system import machine

EPOCH_SECONDS = 0.1  # that hashing may take when an epoch begins; of the largest attributes some values are hashed
FEWEST = 64  # values of each of them
TOLD_SECONDS = 0.5  # of hashing when a store is made or compared


class OwnStateError(RandomDataError):
    """A sample differs when it is read again, though no generator moved: by what a read leaves in the dataset."""


class State(NamedTuple):
    """The attributes of a dataset at one time: digests of its data, and the settings of its pipelines."""

    digests: dict[str, Digest]
    settings: dict[str, Any]

    def stable(self, later: State) -> State:
        """Return the attributes that are the same in a later state: the rest changes when the dataset is read."""
        return State(
            {path: one for path, one in later.digests.items() if _same(self.digests.get(path), one)},
            {path: one for path, one in later.settings.items() if path in self.settings and self.settings[path] == one},
        )

    def changed_until(self, later: State) -> set[str]:
        """Return the attributes that differ in a later state, or that only one of the two has.

        The length of a container that another object replaced counts too: a step may put there what it drew, and an
        empty one after a call without a draw.
        """
        stays = self.stable(later)
        both = {*self.digests, *self.settings, *later.digests, *later.settings}
        changed = both - {path for path in both if path in stays.digests or path in stays.settings}
        return changed | {path for path, one in self.settings.items() if is_replaced(one, later.settings.get(path))}

    def without(self, paths: set[str]) -> State:
        """Return this state without some attributes."""
        return State(
            {path: one for path, one in self.digests.items() if path not in paths},
            {path: one for path, one in self.settings.items() if path not in paths},
        )


class Watched:
    """A dataset, and what its attributes held before and after some samples were read.

    Args:
        dataset: as the user gave it, so that what is assigned to its attributes later is seen.
        target: the directory of its store; None for a temporary one, which no later run compares with files.
    """

    def __init__(self, dataset: Any, target: Path | None) -> None:
        self.dataset, self._target = dataset, target
        self.read = dataset  # the object whose samples are read: a copy, if its pipeline is cut
        self._places: Sequence[CallablePlace] = ()
        self.steps_after_cut: Sequence[Any] = ()  # of its pipelines: no stored value depends on them
        self._unread = Unread(dataset)
        self.opened = None if target is None else OpenedFiles()  # by the samples that were probed
        self.inferred: Any = None  # of these samples
        self.leaf_makers: Mapping[Any, Callable[[Any], Any]] = {}  # of their arrays and PIL images
        self.device: torch.device | None = None  # of their tensors, if it is not the CPU
        self.seconds = 0.0  # that one of them took
        self.checks = 0  # at the beginnings of epochs
        self.filled: list[str] = []  # attributes that were None or empty, and are not now: other data, or what was read
        self.checked_at: float | None = None  # `time.monotonic` of the last one
        leaves = leaves_of(dataset)
        self._before = State(digest_attributes(leaves), settings_of(dataset))
        self._files_before = self._single_files(leaves)  # reading may write a log
        self._paths = {leaf.path for leaf in leaves}
        self._has_read = False
        self._known: State | None = None
        self._files: dict[str, Digest] | None = None
        self._some: dict[str, int] = {}  # how many values of the largest attributes are hashed when an epoch begins

    def read_cut(self, marked: Any, places: Sequence[CallablePlace], after: Sequence[Any]) -> None:
        """Take a copy of the dataset whose samples are read, and what was called when it was cut, and after the cut."""
        self.read, self._places, self.steps_after_cut = marked, places, after
        now = {path: one for path, one in settings_of(self.dataset, places).items() if one != EMPTY}  # reading empties
        self._before.settings.update(now | self._before.settings)

    def close_opened(self) -> None:
        """Close what reading has opened and cannot be sent to processes, if they are started and not forked."""
        if machine.start_method() != "fork":
            self._unread.close(self.dataset)
            if self.read is not self.dataset:
                self._unread.close(self.read)

    def note_first(self) -> None:
        """Remember the data that the dataset has loaded when its first sample was read, and not when it was made.

        It counts as if it had been there before. Settings do not: a process keeps its number, or the time.
        """
        if self._has_read:
            return
        self._has_read = True
        loaded = [leaf for leaf in self._leaves() if leaf.path not in self._paths and leaf.kind != "setting"]
        self._before.digests.update(digest_attributes(loaded))
        self._files_before.update(self._single_files(loaded))

    def _leaves(self) -> list[Leaf]:
        """Return the plain data of the dataset, and what the object that is read has loaded."""
        leaves = leaves_of(self.dataset, is_cut=bool(self._places))
        if self.read is self.dataset:
            return leaves
        loaded = [leaf for leaf in leaves_of(self.read) if leaf.path not in self._paths]
        return [leaf for leaf in leaves if leaf.path in self._paths] + loaded

    def digests(self) -> dict[str, Digest]:
        """Return the digests of the dataset's data and files that stayed the same while samples were probed."""
        if self._known is None or self._files is None:
            leaves = self._leaves()
            now = digest_attributes(leaves)
            self._known = self._before.stable(State(now, settings_of(self.dataset, self._places)))
            single = self._single_files(leaves)
            same = {path: one for path, one in single.items() if _same(self._files_before.get(path), one)}
            changing = now.keys() - self._known.digests.keys()
            if self._target is not None:
                same |= digest_files(leaves, self._target, changing, self.opened)
            self._files = same
        return {**self._known.digests, **self._files}

    def _single_files(self, leaves: Sequence[Leaf]) -> dict[str, Digest]:
        return {} if self._target is None else digest_single_files(leaves)

    def changed_by_reading(self) -> list[str]:
        """Return the attributes with data that has changed since this was made."""
        now = digest_attributes(self._leaves())
        before = self._before.digests
        return [
            path for path, one in now.items() if one.kind == "data" and path in before and not _same(before[path], one)
        ]

    def follow(self) -> None:
        """Begin to watch: what is there now is what later states are compared with."""
        self.digests()
        assert self._known is not None
        seconds = 0.0
        for path, digest in sorted(self._known.digests.items(), key=lambda item: item[1].seconds):
            seconds += digest.seconds
            if seconds > EPOCH_SECONDS:
                self._some[path] = SOME
        if self._some:
            found = self._digests_of_some()
            most = EPOCH_SECONDS / len(self._some)
            long = {path: found[path].seconds for path in self._some if path in found and found[path].seconds > most}
            if long:  # each value is a list of records, say
                self._some |= {path: max(FEWEST, int(SOME * most / seconds)) for path, seconds in long.items()}
                found = self._digests_of_some()
            known = {path: found.get(path, digest) for path, digest in self._known.digests.items()}
            self._known = self._known._replace(digests=known)

    def spent(self) -> str:
        """Return how long hashing took until `follow`, and for which attribute most; "" for less than half a second."""
        found = [*self._before.digests.items(), *(self._known.digests.items() if self._known else ())]
        seconds = sum(digest.seconds for _, digest in found)
        if seconds < TOLD_SECONDS:
            return ""
        slowest = max(found, key=lambda item: item[1].seconds)[0]
        return f"{seconds:.1f} s went to hashing the dataset's attributes, most to {shown(slowest)}"

    def changed(self, reads: Iterator[object] | None = None) -> tuple[str, bool] | None:
        """Return the attribute that has changed since, and True if it belongs to a pipeline; None if none has changed.

        ``reads`` reads one sample at each step, and is used only if something has changed. What these reads change too
        is left out from now on: a step keeps there what it drew last.
        """
        assert self._known is not None
        now, were = self._now(), self._before.settings
        same = [(path, old) for path, old in self._known.settings.items() if path in were and were[path] == old]
        self.filled = [path for path, old in same if old == EMPTY and path not in now.settings]
        while (found := self._difference(now)) is not None and reads and next(reads, None) is not None:
            before, now = now, self._now()
            self._known = self._known.without(before.changed_until(now))
        return found

    def _difference(self, now: State) -> tuple[str, bool] | None:
        assert self._known is not None
        for path, digest in now.digests.items():
            if path in self._known.digests and differ(self._known.digests[path].text, digest.text):
                return f"{shown(path)} has another content", False
        for path, digest in self._known.digests.items():
            if digest.kind == "setting" and path not in now.digests and now.settings.get(path) == EMPTY:
                return f"{shown(path)} is {EMPTY}, and had content", False
        for path, value in now.settings.items():
            if path in self._known.settings and self._known.settings[path] != value:
                old = self._known.settings[path]
                return f"{shown(path)} is {_brief(value)}, and was {_brief(old)}", True
        return None

    def forget_what_reading_changes(self) -> None:
        """Leave out, from now on, what has changed since ``changed`` was called, by reading some samples."""
        assert self._known is not None
        self._known = self._known.stable(self._now())

    def _now(self) -> State:
        return State(self._digests_of_some(), settings_of(self.dataset, self._places))

    def _digests_of_some(self) -> dict[str, Digest]:
        return digest_attributes(self._leaves(), lambda path: self._some.get(path, 0))


def differences(stored: Mapping[str, str], found: Mapping[str, Digest]) -> tuple[list[str], list[str]]:
    """Return the attributes that differ from those stored: of data, and of settings, which may differ between runs.

    Where the times of all files differ and no size, they may have been copied: that counts as a setting. So does an
    attribute of records that differs throughout: it may be drawn, or a time.
    """
    data: list[str] = []
    settings: list[str] = []
    for path, digest in found.items():
        old = stored.get(path)
        if old is None or not differ(old, digest.text):
            continue
        has_groups = digest.kind in ("times", "records")
        is_weak = digest.kind == "setting" or (has_groups and differ_in_all(old, digest.text))
        (settings if is_weak else data).append(path)
    return data, settings


def differ(one: str, other: str) -> bool:
    """Return True if two digests are of different data: one of all values says nothing about one of some."""
    return one != other and one.startswith(PARTIAL) == other.startswith(PARTIAL)


def shown(path: str) -> str:
    """Return the expression that reaches an attribute from the dataset."""
    if path.startswith("len("):
        return f"len({shown(path[4:-1])})"
    if path.startswith(OF_MODULE):
        return path.removeprefix(OF_MODULE)
    return f"dataset{'' if not path or path[0] == '[' else '.'}{path}"


def _same(one: Digest | None, other: Digest) -> bool:
    return one is not None and one.text == other.text


def _brief(value: Any) -> str:
    if isinstance(value, str) and value == EMPTY:
        return value
    return getattr(value, "co_name", None) or getattr(value, "__qualname__", None) or brief(value)
