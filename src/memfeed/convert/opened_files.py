"""Notice which files a dataset opens when samples are read, by the audit events of Python: "open", "sqlite3.connect".

What a library in C opens by itself raises none. Of some the functions that read a file are replaced meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any

from memfeed.splitting.generators import LIBRARIES

MOST_FILES = 4096
_WRITES = os.O_WRONLY | os.O_RDWR
_NO_DATA = (*LIBRARIES, sys.prefix, sys.base_prefix, "/proc", "/sys", "/dev")
_CODE = (".py", ".pyc", ".so")

_READERS = (
    *(("cv2", name) for name in ("imread", "imreadmulti")),
    *(("torchvision.io", name) for name in ("read_image", "decode_image", "read_file")),
    ("soundfile", "read"),
    ("torchaudio", "load"),
)

_here = threading.local()  # what notices files in each thread
_lock = threading.Lock()
_replaced: dict[tuple[str, str], Any] = {}  # the libraries' own functions, while a thread reads samples
_reading = 0  # threads that do


class OpenedFiles:
    """The files that were opened while samples were read: absolute paths, in the order of the first time.

    ``samples`` are the indices of the samples that were read. A file in a folder in which one was written is left out:
    the dataset keeps results there, and another run finds more of them.
    """

    def __init__(self) -> None:
        self.samples: set[int] = set()
        self._read: dict[str, None] = {}
        self._written: set[str] = set()

    def files(self) -> list[str]:
        """Return the files that were opened only to be read, and that are there."""
        return [one for one in self._read if os.path.dirname(one) not in self._written and os.path.isfile(one)]

    @contextlib.contextmanager
    def noticed(self, index: int) -> Iterator[None]:
        """Notice the files that this thread opens within a block that reads sample ``index``."""
        _listen()
        self.samples.add(index)
        outer, _here.opened = getattr(_here, "opened", None), self
        _replace(1)
        try:
            yield
        finally:
            _replace(-1)
            _here.opened = outer

    def note(self, path: Any, flags: int) -> None:
        """Add a file that is opened with these flags of open(2)."""
        name = os.path.abspath(os.fsdecode(path))
        if flags & _WRITES:
            self._written.add(os.path.dirname(name))
        elif len(self._read) < MOST_FILES and not name.startswith(_NO_DATA) and not name.endswith(_CODE):
            self._read[name] = None


@cache
def _listen() -> None:
    with contextlib.suppress(RuntimeError):  # a listener of the program's may refuse others
        sys.addaudithook(_note)


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("open", "sqlite3.connect"):
        opened = getattr(_here, "opened", None)
        with contextlib.suppress(Exception):  # of a path of the user's, one of no file, or an event of the user's
            if opened is not None and not isinstance(arguments[0], int):
                opened.note(arguments[0], arguments[2] if event == "open" else 0)


class _Reader:
    """A function of a library that notes which files it is asked for. It is pickled as the library's own."""

    def __init__(self, module: str, name: str, function: Any) -> None:
        self._place, self._function = (module, name), function
        functools.update_wrapper(self, function)

    def __reduce__(self) -> Any:
        return _reader, self._place

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for one in (*args, *kwargs.values()):
            if isinstance(one, str | os.PathLike):
                _note("open", (one, "r", 0))
        return self._function(*args, **kwargs)


def _reader(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _replace(count: int) -> None:
    """Replace functions of imported libraries as the first thread begins to read. Put them back after the last."""
    global _reading
    with _lock:
        _reading += count
        if not _reading:
            while _replaced:
                (module, name), function = _replaced.popitem()
                if isinstance(getattr(sys.modules.get(module), name, None), _Reader):  # a sample may replace it too
                    setattr(sys.modules[module], name, function)
            return
        for module, name in _READERS:
            function = getattr(sys.modules.get(module), name, None)
            if callable(function) and (module, name) not in _replaced:
                _replaced[module, name] = function
                setattr(sys.modules[module], name, _Reader(module, name, function))
