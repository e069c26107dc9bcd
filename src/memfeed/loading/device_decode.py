"""Rows of a JPEG field that a GPU decodes: `placement="nvjpeg"`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from memfeed.errors import CorruptStoreError, LoaderError
from memfeed.schema.codec import Int64Array
from memfeed.store.coded_columns import CodedColumn
from memfeed.store.column import Column
from memfeed.transfer import nvjpeg
from memfeed.transfer.page_locked import is_out_of_memory


class DeviceDecoder:
    """Decode the rows of one column on a device.

    Only the bytes of the blobs go over the bus. Each header is compared with the field before, so that no blob makes
    the device take more memory than its field says.
    """

    def __init__(self, column: CodedColumn, device: torch.device) -> None:
        self._column, self._device = column, device
        self._layout = str(getattr(column.codec, "layout", "chw"))

    def __call__(self, ids: Int64Array) -> Any:
        """Return the leaf of a batch: uint8 [k, *shape], or a list of k images where their sizes differ."""
        field = self._column.field
        blobs = self._column.blobs(ids)
        try:
            images = [_arranged(image, self._layout) for image in nvjpeg.decode(blobs, self._device)]
        except RuntimeError as error:
            if is_out_of_memory(error):  # columns may make room
                raise
            raise CorruptStoreError(
                f"field {field.name}: nvJPEG refuses the rows {ids[:8].tolist()} ({error}); expected JPEG images, and "
                'torchcodec or torchvision with nvJPEG: run verify(), or read them with placement="mapped"'
            ) from error
        if field.kind != "fixed":
            return images
        if not images:
            return torch.empty((0, *field.row_shape), dtype=torch.uint8, device=self._device)
        return torch.stack(images)


def _arranged(image: torch.Tensor, layout: str) -> torch.Tensor:
    """Return an image [c, h, w] in the layout of its field."""
    if layout == "hwc":
        return image.permute(1, 2, 0).contiguous()
    return image[0] if layout == "hw" else image


def decoders_of(columns: Sequence[Column], places: Sequence[str], device: torch.device) -> dict[int, DeviceDecoder]:
    """Return the decoders of the columns that are decoded on ``device``, by field index."""
    return {
        index: DeviceDecoder(column, device)
        for index, (column, where) in enumerate(zip(columns, places, strict=True))
        if where == "nvjpeg" and isinstance(column, CodedColumn)
    }


def check_decoded(columns: Sequence[Column], requests: Sequence[str], device: torch.device | None) -> None:
    """Raise LoaderError for "nvjpeg" among ``requests`` where the rows of that column cannot be decoded on ``device``.

    Raises ModuleNotFoundError with the line to install if torchcodec and torchvision are missing.
    """
    for column, request in zip(columns, requests, strict=True):
        if request != "nvjpeg":
            continue
        stored, field = column.stored.field, column.field
        is_jpeg = isinstance(column, CodedColumn) and stored.coding is not None and stored.coding.codec == "jpeg"
        if not is_jpeg or field.kind not in ("fixed", "list") or field.optional:
            raise LoaderError(
                f'found placement "nvjpeg" for field {field.name}, which is {stored.describe()}; expected images that '
                "a store has as JPEG, of one size or of several heights and widths, and no windows: "
                'memfeed.cache(..., forms={"image": "jpeg:95"})'
            )
        if device is None or device.type != "cuda":
            raise LoaderError(
                f'found placement "nvjpeg" and device={device}; expected device="cuda", whose GPU decodes'
            )
        nvjpeg.require()
