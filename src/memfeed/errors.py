"""The errors that memfeed raises.

Every message says what was found, what was expected, and what to do next. Each class also derives from the built-in
exception that plain Python code would raise in its place, so that ``except KeyError`` catches it too.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Any

NO_LENGTH = "no len; expected a dataset with both: give it def __len__(self), the number of samples"
"""The end of a message about a dataset that has ``[]``."""


def cut(text: str, width: int) -> str:
    """Return ``text`` in at most ``width`` characters; three dots stand for what is left out at the end."""
    return text if len(text) <= width else f"{text[: width - 3]}..."


def brief(value: Any, width: int = 60) -> str:
    """Return the repr of ``value``, cut to ``width`` characters, for messages."""
    return cut(repr(value), width)


def listed(items: Sequence[object], width: int = 160) -> str:
    """Return the first items joined by commas, in about ``width`` characters, and how many more there are."""
    shown: list[str] = []
    for item in items:
        text = str(item)
        if shown and sum(map(len, shown)) + 2 * len(shown) + len(text) > width:
            return f"{', '.join(shown)}, and {len(items) - len(shown)} more"
        shown.append(cut(text, width))
    return ", ".join(shown)


def escape(text: str, keep: str = "") -> str:
    """Return ``text`` with characters that can harm a terminal (control codes, surrogates) escaped as ``repr`` does.

    The characters ``keep`` stay.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in keep else repr(char)[1:-1] for char in text)


class MemfeedError(Exception):
    """The base class of all errors that memfeed raises itself.

    Their text may have names from a store or dataset in it: characters that can harm a terminal are escaped.
    """

    def __str__(self) -> str:
        return escape(super().__str__(), keep="\n\t")


class SchemaError(MemfeedError, TypeError):
    """A sample, or a value in it, is none that a store can hold, or does not fit the schema."""


class UnfitRowError(SchemaError):
    """A row of a store that is being filled has a shape that its column does not take; another kind of column would.

    Args:
        what: was found, and what was expected.
        advice: what to write.
        field_index: of the column.
        shape: of the row.
    """

    def __init__(self, what: str, advice: str = "", field_index: int = -1, shape: tuple[int, ...] = ()) -> None:
        super().__init__(f"{what}. {advice}" if advice else what)
        self.what, self.field_index, self.shape = what, field_index, shape


class FieldError(MemfeedError, KeyError):
    """A field was named that does not exist."""

    def __str__(self) -> str:
        # KeyError shows the repr of its argument, with quotes and escaped line breaks
        return escape(str(self.args[0]), keep="\n\t") if self.args else ""


class SampleError(MemfeedError, RuntimeError):
    """The dataset raised while a sample was read; the original exception is the cause."""


class NoSampleError(SampleError):
    """The dataset returned None in place of a sample."""


class RandomDataError(MemfeedError, ValueError):
    """The dataset returns random samples; a store would return the same ones in every epoch."""


class SplitError(MemfeedError, ValueError):
    """The pipeline of a dataset cannot be cut into a fixed and a random part, or only after a choice."""


class StaleStoreError(MemfeedError, ValueError):
    """The dataset differs from what was stored of it, or has changed since its loader was made."""


class StoreError(MemfeedError, ValueError):
    """A path is not a store, or is a store that this version cannot read."""


class StoreNotFoundError(StoreError, FileNotFoundError):
    """There is nothing at the path of a store."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.errno = errno.ENOENT


class CorruptStoreError(StoreError):
    """The files of a store differ from what its manifest says."""


class RemoteError(MemfeedError, OSError):
    """A store at an address cannot be reached, read or written; the message has no credentials."""


class ObjectNotFoundError(RemoteError, FileNotFoundError):
    """There is no such object, or no such bucket."""


class ObjectReplacedError(RemoteError):
    """An object was replaced after it was first looked at."""


class BuildError(MemfeedError, RuntimeError):
    """A store could not be finished; its build is kept and can be resumed."""


class SpaceError(MemfeedError, OSError):
    """The file system has too little space."""


class CopyError(MemfeedError, ValueError):
    """The input is memory-mapped already; it is copied only on request."""


class LoaderError(MemfeedError, ValueError):
    """The arguments of a loader contradict each other or its source."""


class TransformError(MemfeedError, ValueError):
    """A transform cannot be applied to its batch."""


class RowError(MemfeedError, IndexError):
    """A row number is out of range."""


def length_of(dataset: Any) -> int:
    """Return ``len(dataset)``. Raises SchemaError if that is no number of samples; the dataset's own errors go on."""
    if getattr(dataset, "ndim", None) == 0 and not hasattr(dataset, "batch_dims"):  # a TensorDict says it better
        raise SchemaError(
            f"found a {type(dataset).__name__} of no dims, which has no rows; expected a dataset with len and []: "
            "x.reshape(1) has one row"
        )
    try:
        return len(dataset)
    except (TypeError, ValueError, OverflowError) as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            raise  # from inside of its __len__
        found = type(dataset).__len__(dataset)
        raise SchemaError(
            f"found {brief(found)} from __len__ of {type(dataset).__name__}; expected the number of samples, an int "
            "from 0 to 2**63 - 1"
        ) from None
