"""A pytest plugin that puts `memfeed.Loader` in the place of DataLoader in the tests of other projects.

`tools/peers_tests.py` loads it with ``-p peers_plugin``. The projects themselves are imported first and keep torch's
DataLoader, as they do where a user hands them a Loader. Then the name is replaced, so that every test module imported
after that, and each module named in MEMFEED_PEERS_PATCH, builds the replacement. It converts a map-style dataset with
`memfeed.cache` and passes everything else on.

MEMFEED_PEERS_LOADER chooses the replacement:

- ``memfeed``: `memfeed.Loader` over the store;
- ``store``: torch's own DataLoader over the store, which shows what the store alone changes;
- ``torch``: torch's own DataLoader over the dataset, which shows what passes without memfeed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
import os
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data
import torch.utils.data.dataloader
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import IterableDataset, TensorDataset

import memfeed

KIND = os.environ.get("MEMFEED_PEERS_LOADER", "memfeed")
DROP = os.environ.get("MEMFEED_PEERS_DROP") == "1"
SECONDS = int(os.environ.get("MEMFEED_PEERS_SECONDS", "90"))
RESULTS = os.environ.get("MEMFEED_PEERS_RESULTS")
IMPORT_FIRST = os.environ.get("MEMFEED_PEERS_IMPORT", "").split()
PATCH = os.environ.get("MEMFEED_PEERS_PATCH", "").split()
LEFT_OUT = set(json.loads(os.environ.get("MEMFEED_PEERS_LEFT_OUT", "[]")))
POSITIONAL = list(inspect.signature(TorchLoader.__init__).parameters)[2:]  # behind self and dataset
# what DROP leaves out
WITHOUT_MEANING = {
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
}

built = {"map": 0, "stream": 0}  # loaders that the running test has built


def is_stream(dataset: Any) -> bool:
    """Return True for a dataset without rows to look up."""
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")


def as_store(dataset: Any) -> Any:
    """Return a store of a map-style dataset, or ``dataset`` itself where a Loader takes it as it is."""
    if isinstance(dataset, memfeed.Store | TensorDataset | torch.Tensor):
        return dataset
    if isinstance(dataset, torch.utils.data.Subset) and isinstance(dataset.dataset, memfeed.Store):
        return dataset
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return memfeed.cache(dataset, None, workers=0, progress=False)


def known_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments by name, without those that mean nothing here and that `memfeed.Loader` does not have."""
    named = {**dict(zip(POSITIONAL, args, strict=False)), **kwargs}
    known = inspect.signature(memfeed.Loader.__init__).parameters
    return {name: value for name, value in named.items() if name in known or name not in WITHOUT_MEANING}


class AnyLoader(type):
    """The type of the replacements: ``isinstance(x, DataLoader)`` in a test is true for every DataLoader."""

    original: type

    def __instancecheck__(cls, instance: Any) -> bool:
        """Return True for every loader where ``cls`` is a replacement itself, not a subclass of one."""
        if "original" in cls.__dict__ and isinstance(instance, cls.__dict__["original"] | memfeed.Loader):
            return True
        return super().__instancecheck__(instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        """Return True for a subclass of the class replaced."""
        if "original" in cls.__dict__ and issubclass(subclass, cls.__dict__["original"]):
            return True
        return super().__subclasscheck__(subclass)


def replacement(original: type) -> type:
    """Return a class to stand where ``original`` stood."""
    base = memfeed.Loader if KIND == "memfeed" else original

    class Replacement(base, metaclass=AnyLoader):  # type: ignore[misc, valid-type]
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            """Return torch's loader for a stream, which is not what is tested."""
            dataset = args[0] if args else kwargs.get("dataset")
            if cls is Replacement and KIND == "memfeed" and is_stream(dataset):
                built["stream"] += 1
                return original(*args, **kwargs)
            return object.__new__(cls)

        @functools.wraps(base.__init__)  # frameworks inspect the signature
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            rest, named = args, dict(kwargs)
            dataset = args[0] if args else named.pop("dataset")
            rest = args[1:]
            built["stream" if is_stream(dataset) else "map"] += 1
            if not is_stream(dataset) and KIND != "torch":
                dataset = as_store(dataset)
            if KIND == "memfeed":
                named.pop("snapshot_every_n_steps", None)  # StatefulDataLoader's alone
            if KIND == "memfeed" and DROP:
                rest, named = (), known_arguments(rest, named)
            super().__init__(dataset, *rest, **named)

    Replacement.original = original
    Replacement.__name__ = Replacement.__qualname__ = original.__name__
    globals()[original.__name__] = Replacement  # where pickle looks for it
    return Replacement


def pytest_configure(config: pytest.Config) -> None:
    """Import the project under test, then replace the names."""
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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that are listed by hand as not applicable: some of them take minutes."""
    left_out = [item for item in items if is_named(name_of(item), LEFT_OUT)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def is_named(test: str, names: set[str]) -> bool:
    """Return True if ``names`` has the test, or the test without its parameters, or its class."""
    plain = test.split("[", 1)[0]
    return bool(names & {test, plain, plain.rsplit("::", 1)[0]})


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
