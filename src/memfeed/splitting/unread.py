"""What a dataset held before its first sample was read here, so that it can be sent to other processes as it was."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import torch

MOST_ENTRIES = 100  # of a dict of settings


class Unread:
    """The attributes of a dataset, and of those inside it, before a sample is read.

    Many datasets open a database when the first sample is read, because what is open cannot be pickled: each worker of
    a DataLoader opens its own. Here samples are read before there are workers.
    """

    def __init__(self, dataset: Any) -> None:
        self._before = [
            ({name: _flag_of(value) for name, value in owner.items()}, _dicts_of(owner))
            for owner in attributes_inside(dataset)
        ]

    def close(self, dataset: Any) -> None:
        """Put back None, or nothing, where reading has put what cannot be pickled; the flags and dicts beside it too.

        ``dataset`` is the one that was given, or a copy of it with as many datasets inside.
        """
        for owner, (before, dicts) in zip(attributes_inside(dataset), self._before, strict=False):
            opened = [n for n, value in owner.items() if before.get(n) is None and _is_opened(value)]
            for name in opened:
                del owner[name]
            if opened:
                owner.update({name: value for name, value in before.items() if value is not ...})
                for own, content in dicts:
                    own.clear()
                    own.update(content)


def share_opened(copy: Any, dataset: Any) -> None:
    """Give a dataset what a copy of it has opened: not every database can be opened twice in a process."""
    for theirs, own in zip(attributes_inside(copy), attributes_inside(dataset), strict=False):
        opened = [n for n, value in theirs.items() if own.get(n) is None and _is_opened(value)]
        if opened:
            flags = [n for n, value in theirs.items() if type(value) is bool]
            own.update({n: theirs[n] for n in opened + flags})


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


def _flag_of(value: Any) -> Any:
    return value if value is None or type(value) is bool else ...  # not the value, which may be large


def _dicts_of(owner: dict[str, Any]) -> list[tuple[dict[Any, Any], dict[Any, Any]]]:
    return [(value, dict(value)) for value in owner.values() if type(value) is dict and len(value) < MOST_ENTRIES]


def _is_opened(value: Any) -> bool:
    """Return True for what cannot be pickled. Not for a function, which may be a step that is watched."""
    if (
        callable(value)
        or value is None
        or isinstance(value, bool | int | float | str | bytes | torch.Tensor | np.ndarray)
    ):
        return False
    try:
        pickle.dumps(value)
    except Exception:  # a class may raise anything
        return True
    return False
