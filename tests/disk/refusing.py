"""System calls that this process refuses, for tests in a process of their own: as a file system without them does."""

from __future__ import annotations

import ctypes
import platform
import struct
import sys

_NUMBERS = {
    "x86_64": {"link": 86, "linkat": 265, "pwrite64": 18, "pwritev": 296, "fallocate": 285, "ftruncate": 77},
    "aarch64": {"linkat": 37, "pwrite64": 68, "pwritev": 70, "fallocate": 47, "ftruncate": 46},
}
IS_POSSIBLE = sys.platform == "linux" and platform.machine() in _NUMBERS


def refuse(error_number: int, *names: str) -> None:
    """Let the system answer these calls of this thread, and of those that it starts, with an error (seccomp(2))."""
    known = _NUMBERS[platform.machine()]
    code = [struct.pack("HBBI", 0x20, 0, 0, 0)]  # load the number of the call
    for number in (known[name] for name in names if name in known):
        code += [struct.pack("HBBI", 0x15, 0, 1, number), struct.pack("HBBI", 0x06, 0, 0, 0x00050000 | error_number)]
    code.append(struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000))  # all others are answered
    held = ctypes.create_string_buffer(b"".join(code))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(
        22, 2, struct.pack("HxxxxxxP", len(code), ctypes.addressof(held)), 0, 0
    ):
        raise OSError(ctypes.get_errno(), "no filter of system calls")
