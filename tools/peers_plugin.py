"""A pytest plugin that puts `memfeed.Loader` in the place of DataLoader in the tests of other projects.

`tools/peers_tests.py` loads it with ``-p peers_plugin``. The projects themselves are imported first and keep torch's
DataLoader, as they do where a user hands them a Loader. Then the name is replaced, so that every test module imported
after that, and each module named in MEMFEED_PEERS_PATCH, builds the replacement. It passes every argument on as it is.

MEMFEED_PEERS_LOADER chooses the replacement:

- ``store``: a map-style dataset is converted with `memfeed.cache`, and `memfeed.Loader` reads the store;
- ``cache``: ``memfeed.Loader(dataset, cache=path)``;
- ``dataset``: ``memfeed.Loader(dataset)``;
- ``torch``: torch's own DataLoader, which shows what passes without memfeed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import signal
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch.utils.data
import torch.utils.data.dataloader
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import IterableDataset, TensorDataset

import memfeed

MODES = ("store", "cache", "dataset")
MODE = os.environ.get("MEMFEED_PEERS_LOADER", "torch")
SECONDS = int(os.environ.get("MEMFEED_PEERS_SECONDS", "60"))
RESULTS = os.environ.get("MEMFEED_PEERS_RESULTS")
IMPORT_FIRST = os.environ.get("MEMFEED_PEERS_IMPORT", "").split()
SELECTED = os.environ.get("MEMFEED_PEERS_SELECTED")  # a file with the names of the tests to run
PATCH = os.environ.get("MEMFEED_PEERS_PATCH", "").split()

T = TypeVar("T")
built = {"map": 0, "stream": 0}  # loaders that the running test has built


def is_stream(dataset: Any) -> bool:
    """Return True for a dataset without rows to look up."""
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")


def read_as_it_is(dataset: Any) -> bool:
    """Return True for what a Loader reads without making a store of it."""
    if isinstance(dataset, torch.utils.data.Subset):
        return isinstance(dataset.dataset, memfeed.Store)
    return isinstance(dataset, memfeed.Store | TensorDataset | torch.Tensor)


def as_store(dataset: Any) -> Any:
    """Return a store of a map-style dataset, or ``dataset`` itself where a Loader reads it as it is."""
    if read_as_it_is(dataset):
        return dataset
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return memfeed.cache(dataset, None, workers=0, progress=False)


originals: dict[type, type] = {}  # by replacement, which has no attribute more than a class of a user


class AnyLoader(type):
    """The type of the replacements: ``isinstance(x, DataLoader)`` in a test is true for every DataLoader."""

    def __instancecheck__(cls, instance: Any) -> bool:
        """Return True for every loader where ``cls`` is a replacement itself, not a subclass of one."""
        if cls in originals and isinstance(instance, originals[cls] | memfeed.Loader):
            return True
        return super().__instancecheck__(instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        """Return True for a subclass of the class replaced."""
        if cls in originals and issubclass(subclass, originals[cls]):
            return True
        return super().__subclasscheck__(subclass)


def replacement(original: type) -> type:
    """Return a class to stand where ``original`` stood."""
    base = memfeed.Loader if MODE in MODES else original

    class Replacement(base[T], metaclass=AnyLoader):  # type: ignore[misc, valid-type]
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            """Return torch's loader for a stream, which is not what is tested."""
            dataset = args[0] if args else kwargs.get("dataset")
            if cls is Replacement and MODE in MODES and is_stream(dataset):
                built["stream"] += 1
                return original(*args, **kwargs)
            return object.__new__(cls)

        @functools.wraps(base.__init__)  # frameworks inspect the signature
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            named = dict(kwargs)
            dataset, rest = (args[0], args[1:]) if args else (named.pop("dataset"), ())
            built["stream" if is_stream(dataset) else "map"] += 1
            if not is_stream(dataset) and MODE == "store":
                dataset = as_store(dataset)
            if not is_stream(dataset) and MODE == "cache" and not read_as_it_is(dataset):
                named.setdefault("cache", Path(tempfile.mkdtemp()) / "store")
            super().__init__(dataset, *rest, **named)

    originals[Replacement] = original
    Replacement.__name__ = Replacement.__qualname__ = original.__name__
    globals()[original.__name__] = Replacement  # where pickle looks for it
    return Replacement


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Import the project under test, then replace the names; a conftest.py may import the project too."""
    for name in IMPORT_FIRST:
        importlib.import_module(name)
    classes: dict[type, type] = {TorchLoader: replacement(TorchLoader)}
    modules = [torch.utils.data, torch.utils.data.dataloader]
    with contextlib.suppress(ImportError):
        from torchdata import stateful_dataloader
        from torchdata.stateful_dataloader import stateful_dataloader as inner

        classes[inner.StatefulDataLoader] = replacement(inner.StatefulDataLoader)
        modules += [stateful_dataloader, inner]
    modules += [importlib.import_module(name) for name in PATCH]
    for module in modules:
        for name, value in list(vars(module).items()):
            if isinstance(value, type) and value in classes:
                setattr(module, name, classes[value])


@contextlib.contextmanager
def limit(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in the block after so many seconds."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"the test ran for more than {seconds} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def name_of(item: pytest.Item) -> str:
    """Return the name of a test, its file relative to where pytest runs."""
    return "::".join([os.path.relpath(item.path), *item.nodeid.split("::")[1:]])


def is_named(test: str, names: set[str]) -> bool:
    """Return True if ``names`` has the test, or the test without its parameters, or its class."""
    plain = test.split("[", 1)[0]
    return bool(names & {test, plain, plain.rsplit("::", 1)[0]})


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that are not selected."""
    if SELECTED:
        names = set(json.loads(Path(SELECTED).read_text()))
        left_out = [item for item in items if not is_named(name_of(item), names)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if is_named(name_of(item), names)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    """Count the loaders of each test from zero."""
    built.update(map=0, stream=0)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    """Stop a test that hangs."""
    with limit(SECONDS):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Write one JSON line for each test: its name, its result, the loaders it built, and why it failed."""
    report = yield
    if RESULTS and (report.when == "call" or report.outcome != "passed") and report.when != "teardown":
        error = "" if call.excinfo is None else f"{call.excinfo.typename}: {call.excinfo.value}"
        line = {"test": name_of(item), "result": report.outcome, "built": dict(built), "error": error[:500]}
        with Path(RESULTS).open("a") as file:
            file.write(json.dumps(line) + "\n")
    return report
