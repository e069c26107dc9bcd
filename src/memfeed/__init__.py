"""memfeed: decode a PyTorch dataset once, train from it at the speed of memory.

store = memfeed.cache(dataset, "ants.mf")
loader = memfeed.Loader(store, batch_size=64, shuffle=True, device="cuda", transform=augment)
for images, labels in loader:
    ...
"""

import sys as _sys
from typing import TYPE_CHECKING

if _sys.platform == "win32":  # a store renames and maps open files, which Windows does not allow
    raise ImportError("found Windows; memfeed needs Linux (or macOS): use WSL 2")

if TYPE_CHECKING:
    from memfeed import errors, transforms
    from memfeed.convert.cache import cache
    from memfeed.convert.writer import Writer
    from memfeed.loading.collate import Collate
    from memfeed.loading.loader import Loader
    from memfeed.remote.pull import pull
    from memfeed.remote.push import push
    from memfeed.store.store import Store, open
    from memfeed.transfer.to_device import to_device

    __version__: str

__all__ = [
    "Collate",
    "Loader",
    "Store",
    "Writer",
    "__version__",
    "cache",
    "errors",
    "open",
    "pull",
    "push",
    "to_device",
    "transforms",
]

_MODULES = {
    "Collate": "memfeed.loading.collate",
    "Loader": "memfeed.loading.loader",
    "Store": "memfeed.store.store",
    "Writer": "memfeed.convert.writer",
    "cache": "memfeed.convert.cache",
    "open": "memfeed.store.store",
    "pull": "memfeed.remote.pull",
    "push": "memfeed.remote.push",
    "to_device": "memfeed.transfer.to_device",
}


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
