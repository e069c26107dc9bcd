"""Small file systems of several kinds, mounted for a test: only root may, and only where the kernel has them."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


def run(*words: str) -> None:
    """Run a command; skip the test if it does not exist or is refused."""
    if shutil.which(words[0]) is None:
        pytest.skip(f"there is no {words[0]} command")
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"{' '.join(words[:3])} is refused here: {done.stderr.strip()}")


@contextlib.contextmanager
def mounted(at: Path, kind: str, size: int) -> Iterator[Path]:
    """Mount a file system with ``size`` bytes free at the new directory ``at``: "tmpfs", "ramfs" or "ext4" (a loop)."""
    at.mkdir()
    if kind == "ext4":
        image = at.with_suffix(".img")
        with open(image, "wb") as file:
            file.truncate(size + (1 << 20))  # its own tables take a part
        run("mkfs.ext4", "-q", "-O", "^has_journal,^resize_inode", "-N", "256", "-m", "0", str(image))
        run("mount", "-o", "loop", str(image), str(at))
    else:
        run("mount", "-t", kind, "-o", f"size={size}" if kind == "tmpfs" else "defaults", kind, str(at))
    try:
        if kind == "ext4":  # leave no more than was asked for
            (at / "lost+found").rmdir()
            spare = shutil.disk_usage(at).free - size
            assert spare >= 0
            if spare:
                (at / "filler").write_bytes(bytes(spare))
        yield at
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)
