"""The attributes of a dataset before its first sample was read, so that it can be sent to other processes as it was."""

from __future__ import annotations

import pickle
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from memfeed.splitting.generators import generators_in
from memfeed.splitting.tracer import Marked

MOST_ENTRIES = 100  # of a dict of settings
_MOST_OWNERS = 256


class Unread:
    """The attributes of a dataset, and of the objects inside it, before a sample is read.

    Many datasets open a database when the first sample is read, because what is open cannot be pickled: each worker of
    a DataLoader opens its own. Here samples are read before there are workers.
    """

    def __init__(self, dataset: Any) -> None:
        self._before = {
            path: ({name: _flag_of(value) for name, value in owner.items()}, _dicts_of(owner))
            for path, owner in (_owners(dataset, with_steps=True) | _owners(dataset)).items()
        }

    def close(self, dataset: Any) -> None:
        """Put back None, or nothing, where reading has put what cannot be pickled; the flags and dicts beside it too.

        ``dataset`` is the one that was given, or a copy of it.
        """
        self._put_back(_owners(dataset), _is_opened)

    def drop_generators(self, dataset: Any) -> None:
        """Put back None, or nothing, where reading has put what holds a random generator; in steps too.

        Each worker makes one of its own then, from its own seed. Forked from one, all would draw the same numbers.
        """
        self._put_back(_owners(dataset, with_steps=True), lambda value: bool(generators_in(value)))

    def _put_back(self, owners: dict[tuple[Any, ...], dict[Any, Any]], is_new: Callable[[Any], bool]) -> None:
        for path, owner in owners.items():
            before, dicts = self._before.get(path, (owner, []))
            opened = [n for n, value in owner.items() if before.get(n) is None and is_new(value)]
            for name in opened:
                del owner[name]
            if opened:
                owner.update({name: value for name, value in before.items() if value is not ...})
                for own, content in dicts:
                    own.clear()
                    own.update(content)


def share_opened(copy: Any, dataset: Any) -> None:
    """Give a dataset what a copy of it has opened: not every database can be opened twice in a process."""
    owners = _owners(dataset)
    for path, theirs in _owners(copy).items():
        own = owners.get(path, theirs)
        missing = {n: value for n, value in theirs.items() if own.get(n) is None}
        opened = {n: value for n, value in missing.items() if _is_opened(value)}
        if opened:  # with what was read beside it
            beside = {n: value for n, value in missing.items() if not callable(value)}
            own.update(opened | beside | {n: value for n, value in theirs.items() if type(value) is bool})


def attributes_inside(dataset: Any) -> list[dict[str, Any]]:
    """Return the attributes of a dataset, and of those inside it: of a Subset, a ConcatDataset, a wrapper."""
    found: dict[int, dict[str, Any]] = {}
    ahead = [dataset]
    while ahead:
        own = getattr(ahead.pop(), "__dict__", None)
        if isinstance(own, dict) and id(own) not in found:
            found[id(own)] = own
            parts = own.get("datasets", ())
            ahead += [own.get("dataset"), *(parts if isinstance(parts, list | tuple) else ())]
    return list(found.values())


def _owners(dataset: Any, *, with_steps: bool = False) -> dict[tuple[Any, ...], dict[Any, Any]]:
    """Return the attributes of a dataset and of the objects that it holds, and its short dicts, by the ways to them.

    Objects that can be called, such as the steps of a pipeline, only ``with_steps``.

    A copy has the same ways, though it may have two copies of one object.
    """
    found: dict[tuple[Any, ...], dict[Any, Any]] = {}
    ahead: list[tuple[tuple[Any, ...], Any, frozenset[int]]] = [((), dataset, frozenset())]
    while ahead and len(found) < _MOST_OWNERS:
        path, value, above = ahead.pop()
        if isinstance(value, dict | list | tuple) and len(value) >= MOST_ENTRIES:
            continue
        own = value if isinstance(value, dict) else getattr(value, "__dict__", None)
        if isinstance(value, list | tuple):
            own = dict(enumerate(value))
        elif isinstance(own, dict):
            found[path] = own
        if isinstance(own, dict) and id(value) not in above:
            inside = above | {id(value)}
            ahead += [((*path, name), one, inside) for name, one in reversed(own.items()) if _may_own(one, with_steps)]
    return found


def _may_own(value: Any, with_steps: bool) -> bool:
    """Return True for an object, and for a container, that may hold what is opened. Steps that are watched may not."""
    if isinstance(value, dict | list | tuple):
        return True
    is_other = isinstance(value, type | types.ModuleType | torch.Tensor | np.ndarray) or (
        callable(value) and not with_steps
    )
    return not is_other and isinstance(getattr(value, "__dict__", None), dict)


def _flag_of(value: Any) -> Any:
    return value if value is None or type(value) is bool else ...  # not the value, which may be large


def _dicts_of(owner: dict[str, Any]) -> list[tuple[dict[Any, Any], dict[Any, Any]]]:
    return [(value, dict(value)) for value in owner.values() if type(value) is dict and len(value) < MOST_ENTRIES]


def _is_opened(value: Any) -> bool:
    """Return True for what cannot be pickled. Not for a function, nor for a step that is watched."""
    is_step = isinstance(value, types.FunctionType | types.MethodType) or issubclass(type(value), Marked)
    if is_step or value is None or isinstance(value, bool | int | float | str | bytes | torch.Tensor | np.ndarray):
        return False
    try:
        pickle.dumps(value)
    except Exception:  # a class may raise anything
        return True
    return False
