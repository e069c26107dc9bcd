"""Keep the pixels that Pillow decodes. Opening, mode, size, Exif and ``info`` stay Pillow's own."""

from __future__ import annotations

import io
import os
import stat
import sys
from collections.abc import Callable
from typing import Any

from memfeed.memoizing.keys import Key, encode_key, hash_content
from memfeed.memoizing.results import pixels_of

_MODES = frozenset({"1", "L", "P", "LA", "RGB", "RGBA", "CMYK", "I;16", "I"})


class PillowDecoder:
    """``ImageFile.load`` of JPEG and PNG files of one frame, whose pixels are kept.

    Any other image, one after ``draft``, and ``LOAD_TRUNCATED_IMAGES`` are Pillow's own.

    Args:
        own: Pillow's function.
        name: it is named so in reports.
        digest: of the function and of Pillow's version.
    """

    def __init__(self, own: Callable[..., Any], name: str, digest: str) -> None:
        self._own, self._name, self._digest = own, name, digest

    def load(self, image: Any, result: Callable[..., Any]) -> Any:
        """Load an image; ``result`` keeps pixels by a key."""
        key = self._key(image)
        if key is None:
            return self._own(image)
        returned = []

        def compute() -> Any:
            returned.append(self._own(image))
            return pixels_of(image)

        pixels = result(self._name, self._digest, key, compute)
        return returned[0] if returned else self._fill(image, pixels)

    def _key(self, image: Any) -> Key | None:
        """Return the key of an image that is not loaded yet, or None for one that is left to Pillow."""
        module: Any = sys.modules["PIL.ImageFile"]
        kind = (type(image).__module__, type(image).__name__)
        if (
            kind not in (("PIL.JpegImagePlugin", "JpegImageFile"), ("PIL.PngImagePlugin", "PngImageFile"))
            or not image.tile
            or image.mode not in _MODES
            or image.fp is None
            or image.decoderconfig
            or module.LOAD_TRUNCATED_IMAGES
            or getattr(image, "is_animated", False)
        ):
            return None
        files: dict[str, list[int]] = {}
        source = _identify(image, files)
        if source is None:
            return None
        content = {
            "function": self._name, "digest": self._digest, "source": source, "files": files,
            "image": [image.mode, list(image.size), repr(image.tile)],
        }  # fmt: skip
        return Key(encode_key(content), files)

    def _fill(self, image: Any, pixels: Any) -> Any:
        """Do what Pillow's load does, with pixels that are known."""
        module: Any = sys.modules["PIL.ImageFile"]
        base: Any = sys.modules["PIL.Image"].Image
        tile, image.tile, image.map = image.tile, [], None
        module.ImageFile.load_prepare(image)
        base.frombytes(image, pixels.tobytes())
        image.readonly = 0
        if type(image).__name__ == "PngImageFile":
            _go_behind_pixels(image, tile)
        image.load_end()
        if image._exclusive_fp and image._close_exclusive_fp_after_loading:
            image.fp.close()
        image.fp = None
        return base.load(image)


def _identify(image: Any, files: dict[str, list[int]]) -> Any:
    """Return the identity of the file of an image, and note the file; None for a file of another kind."""
    file = image.fp
    if isinstance(file, io.BytesIO):
        return hash_content(file.getbuffer())
    name = getattr(file, "name", None)
    if not isinstance(file, io.BufferedReader) or not isinstance(name, str) or not name:
        return None
    try:
        found = os.fstat(file.fileno())
    except (OSError, ValueError):
        return None
    if not stat.S_ISREG(found.st_mode):
        return None
    path = os.path.abspath(name)
    files[path] = [found.st_size, found.st_mtime_ns]
    return {"path": path}


def _go_behind_pixels(image: Any, tile: Any) -> None:
    """Put the file of a PNG image where reading its pixels leaves it: behind the data of the last chunk of them."""
    at = tile[0][2] - 8
    while True:
        image.fp.seek(at)
        head = image.fp.read(8)
        if head[4:] != b"IDAT":
            break
        at += 12 + int.from_bytes(head[:4], "big")
    image.fp.seek(at - 4)  # its checksum comes next
    image._PngImageFile__idat = 0
