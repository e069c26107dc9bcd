"""The transform Decode: bytes of image files to images."""

from __future__ import annotations

import contextlib
import functools
import io
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch

from memfeed.errors import TransformError
from memfeed.random import Keys
from memfeed.schema.jagged import RaggedList
from memfeed.schema.names import display, find_field
from memfeed.system.messages import require
from memfeed.transforms.batch_fields import On, flatten, names_of
from memfeed.transforms.transform import Transform

B = TypeVar("B")
_JPEG = b"\xff\xd8"


class Decode(Transform):
    """Decode the bytes of image files (JPEG, PNG and what else Pillow reads) in threads, in RGB, uint8 [3, h, w].

    The field becomes a list of images, on the device of the batch's tensors. Needs Pillow. Where torchcodec has
    `decode_jpeg` it decodes JPEG files, to the same values.

    Args:
        on: the field of bytes, by its key, position or path; None for the only one.

    Raises:
        TransformError: no field of bytes, or several and no `on`; bytes that are no image, with the row.
    """

    of_whole_batches = takes_bytes = True

    def change_batch(self, batch: B, keys: Keys, stream: str, on: On) -> B:
        """Decode one field; see `Operation.change_batch`."""
        accessors, leaves, structure = flatten(batch, _is_bytes)
        paths = list(map(names_of, accessors))
        found = [index for index, leaf in enumerate(leaves) if _is_bytes(leaf)]
        if on is not None:
            named = find_field(on, paths, list(map(display, paths)))
            found = [index for index in found if index == named]
        if len(found) != 1:
            raise TransformError(
                f"found {len(found)} fields of bytes{'' if on is None else f' named {on!r}'}; expected one list of "
                "bytes, one for each row: name it with on="
            )
        device = next((leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)), torch.device("cpu"))
        files, rows = leaves[found[0]], keys.rows.tolist()
        with ThreadPoolExecutor(min(os.cpu_count() or 1, len(files))) as pool:  # Pillow lets other threads run
            leaves[found[0]] = RaggedList(image.to(device) for image in pool.map(decode, files, rows))
        changed: Any = structure.unflatten(leaves)
        return changed  # type: ignore[no-any-return]


def decode(data: bytes, row: int = 0) -> torch.Tensor:
    """Return an image file in RGB, uint8 [3, h, w]. Raise TransformError, with the row, for bytes that are no image."""
    require("vision", "PIL")
    try:
        # torchcodec would turn an image as its Exif data say, which Pillow does not
        if data[:2] == _JPEG and b"Exif\0\0" not in data and (decode_jpeg := _torchcodec()) is not None:
            with contextlib.suppress(RuntimeError, ValueError):  # Pillow reads more kinds of JPEG, or says why not
                return decode_jpeg(data)
        from PIL import Image

        with Image.open(io.BytesIO(data)) as image:
            array = np.array(image.convert("RGB"))
    except Exception as error:  # Pillow raises SyntaxError, ValueError and others of its own for bad files
        raise TransformError(
            f"found no image that can be decoded in row {row} ({type(error).__name__}: {str(error)[:100]}); expected "
            "the bytes of an image file: memfeed verify says whether the store is damaged"
        ) from error
    return torch.from_numpy(array).permute(2, 0, 1)


@functools.cache
def _torchcodec() -> Callable[[bytes], torch.Tensor] | None:
    """Return a function that decodes a JPEG file with torchcodec; None without it, or without the libraries it needs.

    It is compared with Pillow first: another version of the JPEG library rounds in another way, and a store would give
    other images where torchcodec is not installed.
    """
    try:
        from torchcodec.decoders import decode_jpeg
    except (ImportError, OSError, RuntimeError):  # RuntimeError: for want of FFmpeg
        return None
    from PIL import Image

    noise = np.random.RandomState(0).randint(0, 256, (24, 32, 3), np.uint8)
    for quality, subsampling in ((90, 0), (75, 2)):
        file = io.BytesIO()
        Image.fromarray(noise).resize((59, 41)).save(file, "JPEG", quality=quality, subsampling=subsampling)
        with Image.open(file) as image:
            expected = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        if not torch.equal(decode_jpeg(file.getvalue()), expected):
            return None
    return decode_jpeg  # type: ignore[no-any-return]


def _is_bytes(value: Any) -> bool:
    return type(value) is list and bool(value) and all(isinstance(one, bytes) for one in value)
