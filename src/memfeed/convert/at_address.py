"""`memfeed.cache` to an address: build on this machine, then push."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import xxhash

from memfeed.errors import StaleStoreError, StoreError, StoreNotFoundError
from memfeed.remote.address import Address, parse_address
from memfeed.remote.layout import read_manifest
from memfeed.remote.pull import pull
from memfeed.remote.push import push
from memfeed.store import format
from memfeed.store.store import Store


def cache_at(
    address: str | os.PathLike[str] | Address, build: Callable[[Path], Store], *, replace: bool, progress: bool | None
) -> Store:
    """Return the store that ``build`` makes or opens in `build_directory`, after it was pushed to ``address``.

    A store that is at the address and not on this machine is pulled first. Raises StaleStoreError if another store than
    the one on this machine is at the address, unless ``replace``.
    """
    to = parse_address(address)
    if to.kind == "http":
        raise StoreError(f"{to}: found a web server, which memfeed only reads; expected s3://, gs://, az:// or file://")
    local = build_directory(to)
    try:
        digest = read_manifest(to).digest
    except StoreNotFoundError:
        digest = None
    if digest is not None and not replace and not local.exists() and not format.build_path(local).exists():
        pull(to, local, progress=progress)
    store = build(local)
    if digest is not None and not digest.startswith(store.digest) and not replace:
        raise StaleStoreError(
            f"{to}: found another store than that of this dataset on this machine ({local}); expected the same: remove "
            f"the one on this machine (rm -r {local}), or replace the one at the address: overwrite=True"
        )
    push(store.path, to, progress=progress)
    return store


def build_directory(address: Address) -> Path:
    """Return where a store for ``address`` is built: below ``$XDG_CACHE_HOME/memfeed``, or ``~/.cache/memfeed``."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base, "memfeed", f"{xxhash.xxh3_64_hexdigest(str(address).encode())}-{address.name}")
