"""What memfeed raises.

Every message says what was found, what was expected, and what to do next. Each class also derives
from the built-in exception that plain Python code would raise there, so ``except KeyError`` and the like keep working.
"""

from __future__ import annotations


class MemfeedError(Exception):
    """The root of every error that memfeed raises on purpose."""


class SchemaError(MemfeedError, TypeError):
    """A sample, or a value in it, does not fit what a store can hold or what the schema says."""


class FieldError(MemfeedError, KeyError):
    """A field that does not exist was named."""

    def __str__(self) -> str:
        # KeyError shows the repr of its argument: quotes and "\\n" in the middle of a sentence.
        return str(self.args[0]) if self.args else ""


class SampleError(MemfeedError, RuntimeError):
    """The dataset raised while a sample was read; the original exception is the cause."""


class RandomDataError(MemfeedError, ValueError):
    """The dataset returns random samples, which a store would freeze."""


class StaleStoreError(MemfeedError, ValueError):
    """A finished store no longer says what the dataset says."""


class StoreError(MemfeedError, ValueError):
    """A path is not a store, or not one that this version can read."""


class CorruptStoreError(StoreError):
    """A store's files are not what its manifest says."""


class BuildError(MemfeedError, RuntimeError):
    """A store could not be finished; its build stays and can be resumed."""


class SpaceError(MemfeedError, OSError):
    """Too little room on the file system."""


class CopyError(MemfeedError, ValueError):
    """The input is a memory-mapped store already; copying it has to be asked for."""


class LoaderError(MemfeedError, ValueError):
    """A loader's arguments do not fit together or do not fit its source."""


class TransformError(MemfeedError, ValueError):
    """A transform cannot be applied to the batch it was given."""


class RowError(MemfeedError, IndexError):
    """A row number is out of range."""
