"""memfeed: decode a PyTorch dataset once, train from it at the speed of memory.

store = memfeed.cache(dataset, "ants.mf")
loader = memfeed.Loader(store, batch_size=64, shuffle=True, device="cuda", transform=augment)
for images, labels in loader:
    ...
"""

import os as _os
import sys as _sys
from typing import TYPE_CHECKING

if _sys.platform == "win32":  # a store renames and maps open files, which Windows does not allow
    raise ImportError("found Windows; memfeed needs Linux (or macOS): use WSL 2")

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memfeed import errors, transforms
    from memfeed.convert.append import append, concat
    from memfeed.convert.cache import cache, repair
    from memfeed.convert.recode import recode
    from memfeed.convert.writer import Writer
    from memfeed.loading.collate import Collate
    from memfeed.loading.index_samplers import Tokens
    from memfeed.loading.loader import Loader
    from memfeed.memoizing.memoize import memoize
    from memfeed.order.choice import Blocks
    from memfeed.random import Keys
    from memfeed.remote.push_pull import pull, push
    from memfeed.schema.names import Names
    from memfeed.store.store import Store
    from memfeed.transfer.to_device import to_device
    from memfeed.verdict.bench import bench

    __version__: str

__all__ = [
    "Blocks",
    "Collate",
    "Keys",
    "Loader",
    "Store",
    "Tokens",
    "Writer",
    "__version__",
    "append",
    "bench",
    "cache",
    "concat",
    "errors",
    "memoize",
    "open",
    "pull",
    "push",
    "recode",
    "repair",
    "to_device",
    "transforms",
]

_MODULES = {
    "Blocks": "memfeed.order.choice",
    "Collate": "memfeed.loading.collate",
    "Keys": "memfeed.random",
    "Loader": "memfeed.loading.loader",
    "Store": "memfeed.store.store",
    "Tokens": "memfeed.loading.index_samplers",
    "Writer": "memfeed.convert.writer",
    "append": "memfeed.convert.append",
    "bench": "memfeed.verdict.bench",
    "cache": "memfeed.convert.cache",
    "concat": "memfeed.convert.append",
    "memoize": "memfeed.memoizing.memoize",
    "pull": "memfeed.remote.push_pull",
    "push": "memfeed.remote.push_pull",
    "recode": "memfeed.convert.recode",
    "repair": "memfeed.convert.cache",
    "to_device": "memfeed.transfer.to_device",
}


def open(
    path: "str | _os.PathLike[str]",
    *,
    select: "Names | None" = None,
    types: "type | Iterable[type]" = (),
    cache_dir: "str | _os.PathLike[str] | None" = None,
    size: "int | str | None" = None,
) -> "Store":
    """Open a store: a directory that `cache` wrote, one of ``TensorDict.memmap()``, or a store at an address.

    Reads the manifest and checks the size of every file; nothing is mapped and no class is imported by name. The rows
    of a store at an address (``s3://``, ``gs://``, ``az://``, ``https://``) are fetched into ``cache_dir`` before they
    are read, each once. Its ``progress()`` says how much is there, and its ``finish()`` fetches the rest.

    Args:
        path: the directory, or the address.
        select: open only these fields, named as for `Store.select`; of a store at an address only these are fetched.
        types: the namedtuple, dataclass and tensorclass classes of the samples, one or several, found by their names.
            Without them a namedtuple is returned as an equal generated one, a dataclass as a dict, a tensorclass as a
            TensorDict.
        cache_dir: a directory of this machine for the rows of a store at an address. Processes may share one.
        size: the most bytes that the cache takes, as an int or ``"200GB"``. None, or more than the store has: all rows
            stay, and with the last of them the cache is an ordinary store, which is opened without the network.
            A smaller one is for rows in order and ``shuffle=Blocks()``; a ``Loader`` refuses what has no room in it.

    Raises:
        StoreError: ``path`` is not a store (or one of a newer format), or ``cache_dir`` is that of another store, or in
            use with another size.
        CorruptStoreError: the store is damaged.
        RemoteError: the address cannot be reached, and ``cache_dir`` has nothing of it.
        FieldError: a field that it does not have.

    Example::

        store = memfeed.open("s3://bucket/imagenet.mf", cache_dir="/nvme/imagenet", size="200GB")
    """
    if cache_dir is None and size is None and ":/" not in _os.fsdecode(path):
        from memfeed.store.opened import open as open_local

        return open_local(path, select=select, types=types)
    from memfeed.remote.opening import open_remote

    store = open_remote(path, cache_dir, size, types)
    return store if select is None else store.select(select)


if not TYPE_CHECKING:  # type checkers know the names from above, and report all others

    def __getattr__(name: str) -> object:
        """Import what a public name needs when it is first used: a training imports no conversion (PEP 562)."""
        from importlib import import_module, metadata

        if name in ("errors", "transforms"):
            return import_module(f"memfeed.{name}")
        if name == "__version__":
            value: object = metadata.version("memfeed")
        elif name in _MODULES:
            value = getattr(import_module(_MODULES[name]), name)
        else:
            raise AttributeError(f"module 'memfeed' has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
