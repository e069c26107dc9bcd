"""Ask which file memory is mapped from, whoever mapped it: numpy, torch, Arrow. Linux only."""

from __future__ import annotations

import bisect
import contextlib
import re
from collections.abc import Callable

_LINE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ (\d+) +(/.*)")
# memory that processes share without a file of the user's
_UNNAMED = re.compile(r"/dev/zero|/dev/shm/torch_|/memfd:|/SYSV|.* \(deleted\)$")


def file_lookup() -> Callable[[int], str | None]:
    """Return a function from an address to the path of the file that is mapped there, or None.

    It knows the maps of this moment. On other systems than Linux it returns None for every address.
    """
    maps: list[tuple[int, int, str]] = []
    with contextlib.suppress(OSError), open("/proc/self/maps") as lines:
        for line in lines:
            found = _LINE.match(line)
            if found is not None and found[3] != "0" and not _UNNAMED.match(found[4]):
                maps.append((int(found[1], 16), int(found[2], 16), found[4]))
    starts = [start for start, _, _ in maps]

    def lookup(address: int) -> str | None:
        at = bisect.bisect_right(starts, address) - 1
        return maps[at][2] if at >= 0 and address < maps[at][1] else None

    return lookup
