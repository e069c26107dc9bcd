"""`memfeed.memoize`: keep the results of a function on disk, for all processes of this machine."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar, overload

from memfeed.errors import SchemaError
from memfeed.memoizing import kept
from memfeed.memoizing.code import hash_and_reads
from memfeed.memoizing.kept import Kept, Report
from memfeed.memoizing.keys import Keys
from memfeed.store.memo_format import MARKER
from memfeed.system import files
from memfeed.system.messages import parse_bytes

P = ParamSpec("P")
R = TypeVar("R")


class Memoized(Generic[P, R]):
    """A function whose results are kept; `memfeed.memoize` makes it. ``__wrapped__`` is the function itself."""

    __wrapped__: Callable[P, R]

    def __init__(self, function: Callable[P, R], path: Path, size: int | None, mapped: bool, version: object) -> None:
        functools.update_wrapper(self, function)
        self._function, self._path, self._size = function, path, size
        self._mapped, self._version = mapped, version
        self._name: str = getattr(function, "__qualname__", type(function).__qualname__)
        kept.report_at_exit(self)

    def __repr__(self) -> str:
        return f"<memoized {self._name} in {self._path}>"

    def __reduce__(self) -> Any:
        found: Any = sys.modules.get(getattr(self, "__module__", ""))
        for part in self._name.split("."):
            found = getattr(found, part, None)
        if found is self:
            return self._name  # as a function is pickled: by its name
        return Memoized, (self._function, self._path, self._size, self._mapped, self._version)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    @functools.cached_property
    def _kept(self) -> Kept:
        digest, self._reads = hash_and_reads(self._function, self._version)
        return Kept(self._path, self._size, self._name, digest, mapped=self._mapped)

    @functools.cached_property
    def _keys(self) -> Keys:
        return Keys(self._function, self._name, self._kept.digest)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Return the result of a call, from the disk if it is there. It belongs to the caller."""
        if "_reads" in vars(self) and self._reads.are_changed():
            for name in ("_kept", "_keys"):
                vars(self).pop(name, None)
        key = self._keys.of(args, kwargs)
        return self._kept.result(key, lambda: self._compute(args, kwargs))  # type: ignore[no-any-return]

    def _compute(self, args: Any, kwargs: Any) -> Any:
        before = repr((args, kwargs))
        result = self._function(*args, **kwargs)
        if repr((args, kwargs)) != before:
            raise SchemaError(
                f"{self._name}: found that it changes its arguments, {before:.80}, which no kept result does; expected "
                "arguments that stay as they are: copy them in the function"
            )
        return result

    def report(self) -> Report:
        """Return how many calls of this run were answered from the disk; see `Report`."""
        return self._kept.report()

    def used(self) -> list[Kept]:
        """Return the results, if this process or a child may have asked for one."""
        if not (("_kept" in vars(self) and self._kept.is_used) or os.path.exists(self._path / MARKER)):
            return []
        try:
            return [self._kept]
        except SchemaError:  # of a value that cannot be hashed: no process has called it
            return []


class _Memoize:
    """See `memfeed.memoize`."""

    @overload
    def __call__(
        self,
        function: str | os.PathLike[str],
        *,
        size: int | str | None = None,
        mapped: bool = False,
        version: object = None,
    ) -> Callable[[Callable[P, R]], Memoized[P, R]]: ...

    @overload
    def __call__(
        self,
        function: Callable[P, R],
        path: str | os.PathLike[str],
        *,
        size: int | str | None = None,
        mapped: bool = False,
        version: object = None,
    ) -> Memoized[P, R]: ...

    def __call__(
        self,
        function: Any,
        path: str | os.PathLike[str] | None = None,
        *,
        size: int | str | None = None,
        mapped: bool = False,
        version: object = None,
    ) -> Any:
        """Keep the results of a function on disk: each is computed once, for all processes and later runs.

        With the path alone this is a decorator. The key of a result is the arguments of the call, and the function's
        code with the values that it reads (defaults, globals, variables of an enclosing function). A str or path that
        names a file counts with the size of the file and the time of its last change.

        Args:
            function: any function whose result depends on its arguments alone. The arguments are str, bytes, numbers,
                None, paths, and tuples, lists and dicts of them. The result is tensors, arrays, images of Pillow,
                numbers, str, bytes, None, and tuples, lists and dicts of them, of any shape in each call.
            path: a directory for the results; it is made at the first call. Several functions may share it.
            size: the most bytes of results that are kept, about, as an int or ``"20GB"``; the ones that were used last
                stay. None keeps all.
            mapped: return arrays that cannot be written and tensors, both in a private map of the file, without a copy.
                What is written into such a tensor reaches neither the file nor another result.
            version: takes the place of the code in the key: change it when the results change.

        Returns:
            A function with the same arguments, which raises the errors below. What it returns belongs to the caller.

        Raises:
            RandomDataError: a result differs when it is computed again, or the function draws random numbers. That is
                tried for the first 16 keys.
            SchemaError: an argument or a result of another class, or the function reads a value that cannot be hashed.
            StoreError: something else is at the path, or other users may write there.
            CorruptStoreError: a result on the disk is damaged.

        If the disk is full, results are computed, and one warning is given.

        Example::

            @memfeed.memoize("photos.mf")
            def load(path):
                return np.asarray(Image.open(path).convert("RGB").resize((256, 256)))
        """
        most = parse_bytes("size", size)
        if isinstance(function, str | os.PathLike):
            if path is not None:
                raise TypeError(
                    f"found memoize({os.fspath(function)!r}, {path!r}); expected a function, then a path; or a path "
                    "alone, as a decorator"
                )
            return lambda wrapped: self(wrapped, function, size=size, mapped=mapped, version=version)
        if not callable(function) or path is None:
            raise TypeError(
                f"found memoize({function!r:.60}, {path!r}); expected a function and a path: "
                'memfeed.memoize(load, "photos.mf")'
            )
        return Memoized(function, files.local_path(path).absolute(), most, bool(mapped), version)

    def report(self) -> list[Report]:
        """Return the `Report` of each memoized function that this process knows. Each prints as one line."""
        return [one.report() for one in kept.used()]


_Memoize.__doc__ = _Memoize.__call__.__doc__  # what help() shows

memoize = _Memoize()
