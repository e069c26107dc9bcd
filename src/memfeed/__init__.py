"""memfeed: decode a PyTorch dataset once, train from it at the speed of memory.

store = memfeed.cache(dataset, "ants.mf")
loader = memfeed.Loader(store, batch_size=64, shuffle=True, device="cuda", transform=augment)
for images, labels in loader:
    ...
"""

import sys as _sys
from importlib.metadata import version as _version

if _sys.platform == "win32":  # a store renames and maps open files, which Windows does not allow
    raise ImportError("found Windows; memfeed needs Linux (or macOS): use WSL 2")

from memfeed import errors, transforms
from memfeed.convert.cache import cache
from memfeed.convert.writer import Writer
from memfeed.loading.collate import Collate
from memfeed.loading.loader import Loader
from memfeed.store.store import Store, open
from memfeed.transfer.to_device import to_device

__version__ = _version("memfeed")

__all__ = [
    "Collate",
    "Loader",
    "Store",
    "Writer",
    "__version__",
    "cache",
    "errors",
    "open",
    "to_device",
    "transforms",
]
