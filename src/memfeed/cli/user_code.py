"""Datasets and transforms of the user, found by ``module:name``."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from memfeed.cli.error_lines import UsageError


def load_dataset(text: str) -> Any:
    """Return the dataset that ``module:name`` names. A function or class of that name is called without arguments.

    Raises UsageError if there is no such name, or if the user's code raises.
    """
    found = _find(text)
    if not callable(found):
        return found
    with _code_of_user(f"calling {text}"):
        return found()


def load_transform(text: str) -> Any:
    """Return the transform that ``module:name`` names. A function that needs no argument is called to make one.

    Raises UsageError if there is no such name, if the user's code raises, or if it makes nothing.
    """
    found = _find(text)
    if not callable(found) or isinstance(found, torch.nn.Module):
        return found
    try:
        inspect.signature(found).bind()
    except (TypeError, ValueError):
        return found  # it needs an argument: it is the transform itself, and takes a batch
    with _code_of_user(f"calling {text}"):
        made = found()
    if made is None:
        raise UsageError(f"{text}: found that it takes no batch, and returns None; expected a function of a batch")
    return made


def load_classes(texts: Iterable[str]) -> tuple[type, ...]:
    """Return the classes that each ``module:name`` names. Raise UsageError where there is none."""
    found = tuple(map(_find, texts))
    for text, cls in zip(texts, found, strict=True):
        if not isinstance(cls, type):
            raise UsageError(f"found {text!r}, which is a {type(cls).__name__}; expected a class")
    return found


def _find(text: str) -> Any:
    module, colon, name = text.partition(":")
    is_file = module.endswith(".py")
    if is_file or not (colon and name and all(part.isidentifier() for part in [*module.split("."), *name.split(".")])):
        path = os.path.relpath(module) if os.path.isabs(module) else os.path.normpath(module)
        is_below = is_file and all(part.isidentifier() for part in path[:-3].split(os.sep))
        example = f"{path[:-3].replace(os.sep, '.')}:{name or 'make_train'}" if is_below else "my_data:make_train"
        file = f"{example.partition(':')[0].replace('.', '/')}.py"
        raise UsageError(f"found {text!r}; expected module:name, for example {example} for {file}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    with _code_of_user(f"importing {module}"):
        try:
            found: Any = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not (module + ".").startswith(error.name + "."):
                raise
            raise UsageError(
                f"found no module {error.name!r} in {here} and none installed; expected the module that defines {name}"
            ) from None
    place = getattr(found, "__file__", None) or "built in"
    for part in name.split("."):
        if not hasattr(found, part):
            raise UsageError(f"{text}: found no {part!r} in {module} ({place}); expected a name in it")
        found = getattr(found, part)
    return found


@contextmanager
def _code_of_user(action: str) -> Iterator[None]:
    """Raise what the user's code raises in the block as UsageError; Ctrl-C, and an error of ours, as it is."""
    try:
        yield
    except (KeyboardInterrupt, UsageError):
        raise
    except BaseException as error:
        raise UsageError(f"{action} raised {type(error).__name__}: {error}") from error
