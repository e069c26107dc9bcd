"""The transform Decode: bytes of image files to images."""

from __future__ import annotations

import io
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import optree
import torch

from memfeed.errors import TransformError
from memfeed.random import Keys
from memfeed.schema.names import display, find_field
from memfeed.schema.ragged_list import RaggedList
from memfeed.schema.tensordicts import is_tensor_collection
from memfeed.transforms.batch_fields import On
from memfeed.transforms.transform import Transform

B = TypeVar("B")


class Decode(Transform):
    """Decode the bytes of image files (JPEG, PNG and what else Pillow reads) in threads, in RGB, uint8 [3, h, w].

    The field becomes a list of images, on the device of the batch's tensors. Needs Pillow.

    Args:
        on: the field of bytes, by its key, position or path; None for the only one.

    Raises:
        TransformError: no field of bytes, or several and no `on`; bytes that are no image, with the row.
    """

    of_whole_batches = takes_bytes = True

    def change_batch(self, batch: B, keys: Keys, stream: str, on: On) -> B:
        """Decode one field; see `Operation.change_batch`."""
        leaves: list[Any]
        accessors, leaves, structure = optree.tree_flatten_with_accessor(
            batch, is_leaf=lambda node: _is_bytes(node) or is_tensor_collection(node),  # type: ignore[arg-type]
            none_is_leaf=True, namespace="memfeed",
        )  # fmt: skip
        paths = [tuple(e.field if isinstance(e, optree.NamedTupleEntry) else e.entry for e in a) for a in accessors]
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
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data)) as image:
            array = np.array(image.convert("RGB"))
    except Exception as error:  # Pillow raises SyntaxError, ValueError and others of its own for bad files
        raise TransformError(
            f"found no image that can be decoded in row {row} ({type(error).__name__}: {str(error)[:100]}); expected "
            "the bytes of an image file: memfeed verify says whether the store is damaged"
        ) from error
    return torch.from_numpy(array).permute(2, 0, 1)


def _is_bytes(value: Any) -> bool:
    return type(value) is list and bool(value) and all(isinstance(one, bytes) for one in value)
