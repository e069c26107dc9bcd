"""The interface of a codec: one row of a column to a blob of bytes, and back into memory of the caller."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from memfeed.errors import CorruptStoreError
from memfeed.system import messages

Array = npt.NDArray[Any]
Blob = npt.NDArray[np.uint8]
Shape = tuple[int | None, ...]


class Codec(Protocol):
    """The form of the rows of one column. A frozen description: it holds no data, and any thread may call it.

    A blob is a one-dimensional, contiguous array of uint8. It is not trusted: a method that reads one raises
    CorruptStoreError before it takes memory for more than `out` has.
    """

    name: ClassVar[str]
    lossless: ClassVar[bool]
    module: ClassVar[str]  # of its library

    def parameters(self) -> Mapping[str, int | str]:
        """Return the parameters for a manifest: `codec_of(codec.name, codec.parameters())` equals the codec."""
        ...

    @classmethod
    def require(cls) -> None:
        """Raise ModuleNotFoundError with the line to install if the codec's library is missing."""
        messages.require("codecs", cls.module)

    def fitted(self, dtype: np.dtype[Any], shape: Shape) -> Codec:
        """Return this codec with the parameters that depend on the column filled in. The codec must accept it."""
        return self

    def accepts(self, dtype: np.dtype[Any], shape: Shape) -> str:
        """Return a sentence that says why rows of this dtype and shape cannot be encoded; empty if they can.

        None stands for a dim that varies between rows.
        """
        ...

    def encode(self, row: Array) -> bytes:
        """Return the blob of one row, a C-contiguous array of the machine's byte order that `accepts` allows.

        Raises SchemaError for a row that has more in one dim than a blob can say.
        """
        ...

    def shape(self, blob: Blob) -> tuple[int, ...]:
        """Return the shape of a row from the header of its blob. Takes no memory.

        Raises CorruptStoreError if there is no valid header.
        """
        ...

    def check(self, blob: Blob) -> None:
        """Raise CorruptStoreError for a blob that is cut off, or has bytes behind its end, as far as that is cheap.

        It is for blobs that another decoder gets. By default nothing is looked for.
        """
        return

    def decode(self, blob: Blob, out: Array) -> None:
        """Fill `out`, which has the row's shape and dtype, and any strides.

        Raises CorruptStoreError if the blob does not hold exactly one row of this shape and dtype. `out` then has
        any values.
        """
        ...


def corrupt(found: str, expected: str) -> CorruptStoreError:
    """Return the error for a blob that is no row."""
    return CorruptStoreError(f"a coded row: found {found}; expected {expected}: the store is damaged, run verify()")
