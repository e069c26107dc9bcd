"""Notice which files a dataset opens when samples are read, by the audit events of Python: "open", "sqlite3.connect".

What a library in C opens by itself raises none. Of some the functions that read a file are replaced meanwhile, also
under the names that modules of the user have for them. Threads that a sample starts, and what it gives to pools of
threads or to asyncio, read for the sample.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import operator
import os
import sys
import threading
import types
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from functools import cache
from typing import Any
from urllib.parse import unquote

from memfeed.splitting.generators import LIBRARIES, is_library

MOST_FILES = 4096
_WRITES = os.O_WRONLY | os.O_RDWR
_MAKES = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
_OF_PYTHON = {
    os.path.join(prefix, folder)  # not all of a prefix, which may be /usr, or the folder of the program
    for prefix in (sys.prefix, sys.base_prefix)
    for folder in ("bin", "etc", "include", "lib", "lib64", "share")
}
_NO_DATA = tuple(os.path.join(folder, "") for folder in (*LIBRARIES, *_OF_PYTHON, "/proc", "/sys", "/dev"))
_IN_MEMORY = "/dev/shm/"  # where a program may put copies of its files
_CODE = (".py", ".pyc", ".so")
_MEMFEED = os.path.dirname(os.path.dirname(__file__))

_READERS = (
    *(("cv2", name) for name in ("imread", "imreadmulti", "VideoCapture")),
    *(("torchvision.io", name) for name in ("read_image", "decode_image", "read_file")),
    ("torchvision.io.image", "read_file"),  # its functions call this one
    ("soundfile", "SoundFile.__init__"),  # read, blocks and info make one
    ("torchaudio", "load"),
    ("h5py", "File.__init__"),
    ("pandas", "read_parquet"),
    *(("pyarrow.parquet", name) for name in ("read_table", "ParquetFile.__init__", "ParquetDataset.__init__")),
    *(("pyarrow.feather", name) for name in ("read_table", "read_feather")),
    ("torch", "from_file"),
    ("safetensors", "safe_open"),
    ("safetensors.torch", "load_file"),
    ("SimpleITK", "ReadImage"),
    ("SimpleITK", "ImageFileReader.SetFileName"),
    ("SimpleITK", "ImageSeriesReader.SetFileNames"),
    ("rasterio", "open"),
    ("av", "open"),
    ("decord", "VideoReader.__init__"),
    ("netCDF4", "Dataset"),
    *(("polars", f"{verb}_{form}") for verb in ("read", "scan") for form in ("parquet", "csv", "ipc", "ndjson")),
    *(("pyarrow", name) for name in ("memory_map", "OSFile", "input_stream")),
    *(("pyarrow.ipc", name) for name in ("open_file", "open_stream")),
    ("pyarrow.dataset", "dataset"),
    ("pyarrow.csv", "read_csv"),
)
_MODES_OF_WRITING = dict.fromkeys(("w", "w-", "w+", "wb", "x", "x+", "a", "ab"), os.O_RDWR | os.O_CREAT) | {
    "r+": os.O_RDWR
}

_here: ContextVar[OpenedFiles | None] = ContextVar("_here", default=None)  # what notices files
_started: weakref.WeakKeyDictionary[threading.Thread, OpenedFiles] = weakref.WeakKeyDictionary()  # by a sample
_lock = threading.Lock()
_replaced: dict[tuple[str, str], Any] = {}  # the libraries' own functions, while a thread reads samples
_reading = 0  # threads that do


class OpenedFiles:
    """The files that were opened while samples were read: absolute paths, in the order of the first time.

    ``samples`` are the indices of the samples that were read. A file in a folder in which one was written is left out:
    the dataset keeps results there, and another run finds more of them. A file that is there and is opened for both, as
    ``np.memmap`` does, is written if its time changes.
    """

    def __init__(self) -> None:
        self.samples: set[int] = set()
        self._read: dict[str, int | None] = {}  # with its time, if it may be written too
        self._written: set[str] = set()
        self._blocks = 0  # that read a sample now

    def files(self) -> list[str]:
        """Return the files that were opened only to be read, and that are there."""
        changed = {one for one, time in self._read.items() if time is not None and time != _time_of(one)}
        written = self._written | set(map(os.path.dirname, changed))
        return [one for one in self._read if os.path.dirname(one) not in written and os.path.isfile(one)]

    @contextlib.contextmanager
    def noticed(self, index: int) -> Iterator[None]:
        """Notice the files that are opened within a block that reads sample ``index``, by it or for it."""
        _listen()
        self.samples.add(index)
        _replace(1)
        self._blocks += 1
        try:
            with _noticing(self):
                yield
        finally:
            self._blocks -= 1
            _replace(-1)

    def note(self, path: Any, flags: int) -> None:
        """Add a file that is opened with these flags of open(2). A thread may go on after the block: it adds none."""
        if not self._blocks:
            return
        name = os.path.abspath(os.fsdecode(path))
        if flags & _WRITES and flags & _MAKES:
            self._written.add(os.path.dirname(name))
        elif self._read.get(name) is None and len(self._read) < MOST_FILES and not _is_no_data(name):
            self._read[name] = _time_of(name) if flags & _WRITES else None


def _is_no_data(name: str) -> bool:
    return (name.startswith(_NO_DATA) and not name.startswith(_IN_MEMORY)) or name.endswith(_CODE)


def _time_of(name: str) -> int | None:
    try:
        return os.stat(name).st_mtime_ns
    except OSError:
        return None


@contextlib.contextmanager
def _noticing(opened: OpenedFiles) -> Iterator[None]:
    token = _here.set(opened)
    try:
        yield
    finally:
        _here.reset(token)


@cache
def _listen() -> None:
    with contextlib.suppress(RuntimeError):  # a listener of the program's may refuse others
        sys.addaudithook(_note)


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("open", "sqlite3.connect"):
        with contextlib.suppress(Exception):  # of a path of the user's, one of no file, or an event of the user's
            opened = _here.get() or (_started.get(threading.current_thread()) if _reading and _started else None)
            path = arguments[0]
            if event != "open" and isinstance(path, str) and path.startswith("file:"):
                path = unquote(path.removeprefix("file:").partition("?")[0])
            if opened is not None and not isinstance(path, int):
                opened.note(path, arguments[2] if event == "open" else 0)


class _Reader:
    """A function, method or class of a library that notes which files it is asked for.

    It is pickled as the library's own.
    """

    def __init__(self, module: str, name: str, function: Any) -> None:
        self._place, self._function = (module, name), function
        functools.update_wrapper(self, function, updated=())

    def __getattr__(self, name: str) -> Any:
        if name == "_function":  # of an object that is only made
            raise AttributeError(name)
        return getattr(self._function, name)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        is_bound = instance is not None and hasattr(type(self._function), "__get__")  # not a function in C
        return types.MethodType(self, instance) if is_bound else self

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, self._function)

    def __subclasscheck__(self, cls: type) -> bool:
        return issubclass(cls, self._function)

    def __or__(self, other: Any) -> Any:
        return self._function | other  # as in an annotation

    def __ror__(self, other: Any) -> Any:
        return other | self._function

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._function,)  # of a class of the user's that a sample makes

    def __reduce__(self) -> Any:
        return _reader, self._place

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = [
            one for each in (*args, *kwargs.values()) for one in (each if isinstance(each, list | tuple) else [each])
        ]
        modes = (_MODES_OF_WRITING.get(one) for one in (*args, *kwargs.values()) if isinstance(one, str))
        flags = next(filter(None, modes), os.O_RDONLY)  # a list may have the names of columns
        for one in given:
            if isinstance(one, str | os.PathLike):
                _note("open", (one, "r", flags))
        return self._function(*args, **kwargs)


class _Pool(_Reader):
    """The method that gives a function to a pool of threads: its thread reads for the sample that asks for it."""

    def __call__(self, pool: Any, /, *args: Any, **kwargs: Any) -> Any:
        opened = _here.get()
        if opened is not None and args:
            args = _noticing(opened)(args[0]), *args[1:]
        return self._function(pool, *args, **kwargs)


class _Start(_Reader):
    """The method that starts a thread: one that a sample starts reads for it."""

    def __call__(self, thread: threading.Thread) -> Any:
        opened = _here.get()
        if opened is not None:
            _started[thread] = opened
        return self._function(thread)


_OF_THREADS: dict[tuple[str, str], type[_Reader]] = {
    ("concurrent.futures.thread", "ThreadPoolExecutor.submit"): _Pool,
    **{("multiprocessing.pool", f"ThreadPool.{name}"): _Pool for name in ("apply_async", "_map_async", "imap")},
    ("multiprocessing.pool", "ThreadPool.imap_unordered"): _Pool,
    ("threading", "Thread.start"): _Start,
}


def _reader(module: str, name: str) -> Any:
    return operator.attrgetter(name)(importlib.import_module(module))


def _owner(module: str, name: str) -> tuple[Any, str]:
    """Return what has the function, a module or a class, and its name there."""
    parent, _, last = name.rpartition(".")
    imported = sys.modules.get(module)
    return getattr(imported, parent, None) if parent else imported, last


def _replace(count: int) -> None:
    """Replace functions of imported libraries as the first thread begins to read. Put them back after the last."""
    global _reading
    with _lock:
        _reading += count
        if not _reading:
            while _replaced:
                place, function = _replaced.popitem()
                owner, name = _owner(*place)
                if isinstance(getattr(owner, name, None), _Reader):  # a sample may replace it too
                    setattr(owner, name, function)
            return
        own: dict[int, _Reader] = {}
        for place in (*_READERS, *_OF_THREADS):
            owner, name = _owner(*place)
            function = getattr(owner, name, None)
            if owner is not None and callable(function) and place not in _replaced:
                _replaced[place] = function
                own[id(function)] = reader = _OF_THREADS.get(place, _Reader)(*place, function)
                setattr(owner, name, reader)
        for module, name in _names_of_user(len(sys.modules)) if own else ():
            function = vars(sys.modules.get(module, types)).get(name)
            if id(function) in own:
                _replaced[module, name] = function
                setattr(sys.modules[module], name, own[id(function)])


@functools.lru_cache(1)
def _names_of_user(count: int) -> list[tuple[str, str]]:
    """Return the variables of the user's modules that may be a function of `_READERS`, for a number of modules.

    The dicts are copied: while a list is made of one, the garbage collector may run code that imports a module.
    """
    own = {id(one) for one in _replaced.values()}
    return [
        (module, name)
        for module, one in sys.modules.copy().items()
        if isinstance(one, types.ModuleType) and _is_of_user(module, one)
        for name, value in vars(one).copy().items()
        if id(value) in own or type(value) is _Reader
    ]


def _is_of_user(name: str, module: types.ModuleType) -> bool:
    """Return True for the program, also in a notebook, where it has no file, and for modules of no library."""
    file = vars(module).get("__file__")
    is_known = isinstance(file, str) and file.startswith((*LIBRARIES, _MEMFEED))  # most are, and this is fast
    return name in ("__main__", "__mp_main__") or (not is_known and not is_library(module))
