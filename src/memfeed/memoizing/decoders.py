"""Decoders of libraries whose results are kept: they answer from the disk, in the thread that reads samples alone.

A decoder is replaced by its name, if its library is imported and has the version that is known here. The replacement
does what the library's own function does, except while a `Reading` is active. A reference that was taken before (``from
cv2 import imread``) still leads to the library's own function.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import importlib
import inspect
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from memfeed.errors import SchemaError
from memfeed.memoizing.code import hash_function
from memfeed.memoizing.kept import Kept, report_at_exit
from memfeed.memoizing.keys import Key, Keys, encode_key, hash_content, note_file
from memfeed.memoizing.pillow import PillowDecoder


class Known(NamedTuple):
    """A decoder of a library.

    Args:
        module: where it is found, and replaced, by ``name``.
        package: of which the version counts: it is part of the key.
        versions: the first major version that is known, and the first that is not.
    """

    module: str
    name: str
    package: str
    versions: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


PILLOW = Known("PIL.ImageFile", "ImageFile.load", "pillow", (10, 14))
KNOWN = (
    PILLOW,
    Known("cv2", "imread", "opencv", (4, 6)),
    Known("cv2", "imdecode", "opencv", (4, 6)),
    Known("torchvision.io", "read_image", "torchvision", (0, 1)),
    Known("torchvision.io", "decode_image", "torchvision", (0, 1)),
    Known("torchvision.io.image", "decode_image", "torchvision", (0, 1)),
    *(
        Known("torchcodec.decoders", f"decode_{name}", "torchcodec", (0, 1))
        for name in ("image", "jpeg", "png", "webp", "gif", "avif", "heic")
    ),
    Known("soundfile", "read", "soundfile", (0, 1)),
    Known("torchaudio", "load", "torchaudio", (2, 3)),
    Known("nibabel.arrayproxy", "ArrayProxy.__array__", "nibabel", (4, 6)),
)
_COMPRESSED = (".gz", ".bz2", ".zst")
_LEAST_ASKED, _LEAST_ANSWERED = 4, 0.25  # calls that say what a decoder is asked for; the share that was asked before


class Reading:
    """The decoders that answer from the results at ``path`` while samples are read.

    Args:
        path: the directory of the results.
        decoders: functions of the user's, each as its module and its name there; dots lead to those of a class.
        left: decoders of libraries, as they are shown, that are left alone.
    """

    def __init__(self, path: Path, decoders: Sequence[tuple[str, str]] = (), left: Collection[str] = ()) -> None:
        self.path, self.decoders, self.left = path, tuple(decoders), set(left)
        self.asked: list[tuple[str, Key]] | None = None  # the decoder and the key of each call, where a list is set
        self._kept: dict[str, Kept] = {}
        self.seconds = 0.0  # that results took in this process, from the disk or computed
        report_at_exit(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reading_elsewhere, (self.path, self.decoders, self.left, imported_libraries())

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Let the decoders answer from the results, in this thread, during the block."""
        before = _here.reading
        self.begin()
        try:
            yield
        finally:
            _here.reading = before

    def begin(self) -> None:
        """Let the decoders answer from the results in this thread from now on: that of a worker process."""
        _replace_known()
        for module, name in self.decoders:
            _replace(module, name, f"{module}.{name}", "")
        _here.reading = self

    def result(self, name: str, digest: str, key: Key, compute: Callable[[], Any], *, prove: bool = False) -> Any:
        """Return the result of a decoder, from the disk or from ``compute``, in which no decoder answers."""
        started = time.perf_counter()
        if self.asked is not None:
            self.asked.append((name, key))

        def alone() -> Any:
            _here.reading = None
            try:
                return compute()
            finally:
                _here.reading = self

        if digest not in self._kept:
            self._kept[digest] = Kept(self.path, None, name, digest, prove=prove)
        try:
            return self._kept[digest].result(key, alone)
        finally:
            self.seconds += time.perf_counter() - started

    @property
    def seconds_decoding(self) -> float:
        """Seconds that the calls of this process took to compute, or would have taken."""
        return sum(one.seconds for one in self._kept.values())

    @property
    def is_called(self) -> bool:
        """True if a decoder was asked for a result in this process."""
        return bool(self._kept)

    def leave_parts(self, first: Sequence[tuple[str, Key]], again: Sequence[tuple[str, Key]]) -> list[str]:
        """Leave the libraries' decoders alone that are asked for other parts of the same files at each read.

        Their results would fill the disk, and answer nothing. ``first`` and ``again`` are what was asked by two reads
        of the same samples. A file that only one of them asks for says nothing: it may have been drawn too.
        """
        texts, files = {key.text for _, key in first}, {(name, *key.files) for name, key in first if key.files}
        for known in map(str, KNOWN):
            found = [key.text in texts for name, key in again if name == known and (name, *key.files) in files]
            if len(found) >= _LEAST_ASKED and sum(found) < _LEAST_ANSWERED * len(found):
                self.left.add(known)
        return sorted(self.left)

    def used(self) -> list[Kept]:
        """Return the results of each decoder that this process has called."""
        return [one for one in self._kept.values() if one.is_used]


def imported_libraries() -> list[str]:
    """Return the modules with decoders that are imported. Pillow imports its own when it opens its first image."""
    return sorted({known.module for known in KNOWN if known.module in sys.modules})


def _reading_elsewhere(
    path: Path, decoders: Sequence[tuple[str, str]], left: Collection[str], libraries: Sequence[str]
) -> Reading:
    """Return a reading in a process that was not forked, where a decoder is replaced before the first sample too."""
    for name in libraries:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    return Reading(path, decoders, left)


class _Here(threading.local):
    reading: Reading | None = None


_here = _Here()
_replaced: set[str] = set()
_lock = threading.Lock()


def _replace_known() -> None:
    """Replace the decoders of libraries that are imported, each once in a process."""
    for known in KNOWN:
        if str(known) in _replaced or known.module not in sys.modules:
            continue
        version = _version(known)
        if version is None:
            _replaced.add(str(known))  # of a version that is not known: it is left alone
        else:
            _replace(known.module, known.name, str(known), version)


def _version(known: Known) -> str | None:
    """Return the version of a library, None if it is not a known one."""
    module = sys.modules[known.module.partition(".")[0]]
    version = str(getattr(module, "__version__", ""))
    if not version:
        try:
            version = metadata.version(known.package)
        except metadata.PackageNotFoundError:
            return None
    major = version.partition(".")[0]
    first, last = known.versions
    return version if major.isdigit() and first <= int(major) < last else None


def _replace(module: str, path: str, shown: str, version: str) -> None:
    """Replace a function of a module that is imported, or of a class of it. Does nothing for another module."""
    with _lock:
        if shown in _replaced or module not in sys.modules:
            return
        owner: Any = sys.modules[module]
        *outer, name = path.split(".")
        for part in outer:
            owner = getattr(owner, part)
        own = inspect.getattr_static(owner, name)
        make = _SPECIAL.get(shown, _by_arguments)
        made: Any = make(getattr(owner, name), shown, version)
        setattr(owner, name, staticmethod(made) if isinstance(own, staticmethod) else made)
        _replaced.add(shown)
        _originals.append((owner, name, own))


_originals: list[tuple[Any, str, Any]] = []


def why_left_alone() -> str:
    """Return in words why Pillow's decoder keeps nothing, though its version is known; "" if it keeps results."""
    if getattr(sys.modules.get("PIL.ImageFile"), "LOAD_TRUNCATED_IMAGES", False):
        return "what Pillow decodes is not kept while ImageFile.LOAD_TRUNCATED_IMAGES is set"
    return ""


def restore() -> None:
    """Put the libraries' own functions back."""
    with _lock:
        while _originals:
            owner, name, own = _originals.pop()
            setattr(owner, name, own)
        _replaced.clear()


def _by_arguments(function: Callable[..., Any], shown: str, version: str) -> Callable[..., Any]:
    """Return a function whose results are kept by the arguments; with others than a key can hold it is the function."""
    digest = hash_function(function, version or None)
    keys = _Keys(function, shown, digest)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        reading = _here.reading
        if reading is None or shown in reading.left:
            return function(*args, **kwargs)
        try:
            key = keys.of(args, kwargs)
        except (SchemaError, TypeError):
            return function(*args, **kwargs)
        if version and not key.files and b'"content"' not in key.text:  # nothing says when the result changes
            return function(*args, **kwargs)
        made = []

        def compute() -> Any:
            made.append(function(*args, **kwargs))
            return made[-1]

        try:
            return reading.result(shown, digest, key, compute, prove=not version)
        except SchemaError:
            if made and version:  # what the library returned cannot be kept: a tensor on a GPU, for example
                return made[-1]
            raise

    return call


def _array_of_proxy(function: Callable[..., Any], shown: str, version: str) -> Callable[..., Any]:
    """Return the function that makes an array of a compressed image of nibabel: `np.asanyarray(x.dataobj)`."""
    digest = hash_function(function, version)

    @functools.wraps(function)
    def array(self: Any, dtype: Any = None, **options: Any) -> Any:
        reading, files = _here.reading, dict[str, list[int]]()
        path = self.file_like
        if reading is None or options or not isinstance(path, str) or not path.endswith(_COMPRESSED):
            return function(self, dtype, **options)  # a plain file is mapped, which takes no time
        note_file(path, files)
        if not files:
            return function(self, dtype)
        scaled = [self.dtype.str, list(self.shape), self.offset, repr(self.slope), repr(self.inter)]
        content = {
            "function": shown, "digest": digest, "image": scaled, "files": files,
            "dtype": None if dtype is None else np.dtype(dtype).str,
        }  # fmt: skip
        return reading.result(shown, digest, Key(encode_key(content), files), lambda: function(self, dtype))

    return array


class _Keys(Keys):
    """Keys of decoders: files that are in memory count by a hash of their bytes, modes by their names."""

    def _encode(self, value: Any, name: str, files: dict[str, list[int]]) -> Any:
        if isinstance(value, enum.Enum):
            return {"enum": [type(value).__qualname__, value.name]}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value)}
        if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
            return {"dtype": np.dtype(value).str}
        if isinstance(value, torch.Tensor) and value.dtype == torch.uint8 and value.dim() == 1 and value.is_cpu:
            return _content_of(value.contiguous().numpy())
        if type(value) is np.ndarray and value.dtype == np.uint8 and value.ndim == 1:
            return _content_of(np.ascontiguousarray(value))
        if type(value) is bytes:
            return _content_of(np.frombuffer(value, np.uint8))
        return super()._encode(value, name, files)


def _content_of(data: npt.NDArray[np.uint8]) -> dict[str, str]:
    found = hash_content(data.data)
    if found is None:
        raise SchemaError("found an encoded file that is too large for a key; expected less: the library decodes it")
    return found


def _pillow(function: Callable[..., Any], shown: str, version: str) -> Callable[..., Any]:
    decoder = PillowDecoder(function, shown, hash_function(function, version))

    @functools.wraps(function)
    def load(self: Any) -> Any:
        reading = _here.reading
        return function(self) if reading is None else decoder.load(self, reading.result)

    return load


_SPECIAL = {
    str(PILLOW): _pillow,
    "nibabel.arrayproxy.ArrayProxy.__array__": _array_of_proxy,
}
