"""Rows as compressed bytes, and back: lossless (zstd, LZ4), and images as JPEG.

Codecs have names: in the text that a user writes, and in a manifest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memfeed.codecs.contract import Codec
from memfeed.codecs.jpeg import Jpeg
from memfeed.codecs.lossless import Lz4, Zstd
from memfeed.errors import CorruptStoreError, StoreError, brief

__all__ = ["CODECS", "Codec", "Jpeg", "Lz4", "Zstd", "codec_of", "parse_codec"]

CODECS: dict[str, type[Jpeg] | type[Lz4] | type[Zstd]] = {"jpeg": Jpeg, "lz4": Lz4, "zstd": Zstd}
SYNTAX = '"jpeg", "jpeg:QUALITY", "jpeg:QUALITY:SUBSAMPLING" (4:4:4, 4:2:2 or 4:2:0), "lz4", "zstd" or "zstd:LEVEL"'


def codec_of(name: str, parameters: Mapping[str, Any]) -> Codec:
    """Return the codec of a manifest.

    Raises StoreError for a name that this version does not know, CorruptStoreError for parameters that its codec
    cannot have, ModuleNotFoundError with the line to install if its library is missing.
    """
    if name not in CODECS:
        raise StoreError(
            f"found the codec {brief(name)}; expected one of {', '.join(CODECS)}: a newer memfeed may know it, "
            "pip install -U memfeed"
        )
    codec_class = CODECS[name]
    try:
        codec = codec_class(**parameters)
        if dict(codec.parameters()) != dict(parameters):
            raise ValueError("expected all of its parameters")
    except (TypeError, ValueError) as error:
        raise CorruptStoreError(f"found the parameters {brief(parameters)} of the codec {name}: {error}") from None
    codec.require()
    return codec


def parse_codec(text: str) -> Codec:
    """Return the codec that a user names.

    ``"zstd:3"`` is level 3. ``"jpeg:90"`` is quality 90, with the subsampling that `Jpeg` gives to it;
    ``"jpeg:90:4:4:4"`` says both.

    Raises ValueError for any other text, ModuleNotFoundError with the line to install if the library is missing.
    """
    name, _, rest = text.partition(":")
    codec: Codec
    try:
        if name == "jpeg" and text != name:
            quality, colon, subsampling = rest.partition(":")
            if colon and not subsampling:
                raise ValueError("no subsampling")
            codec = Jpeg(quality=int(quality), subsampling=subsampling)
        elif name == "jpeg":
            codec = Jpeg()
        elif name == "lz4" and not rest and text == name:
            codec = Lz4()
        elif name == "zstd":
            codec = Zstd(level=int(rest)) if text != name else Zstd()
        else:
            raise ValueError("unknown codec")
    except ValueError as error:
        raise ValueError(f"found the form {brief(text)} ({error}); expected {SYNTAX}") from None
    codec.require()
    return codec
