"""JPEG files decoded on a CUDA device by nvJPEG, through torchcodec, or torchvision where that is not installed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec

import torch

from memfeed.system import messages

Decode = Callable[[list[torch.Tensor], torch.device], list[torch.Tensor]]


def require() -> None:
    """Raise ModuleNotFoundError with the line to install if neither torchcodec nor torchvision is installed."""
    if find_spec("torchcodec") is None:
        messages.require("vision", "torchvision")


def decode(blobs: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Return the images of JPEG files, uint8 [c, h, w] each, on ``device``: c is 1 for gray files, 3 for others.

    The bytes go to the device, which decodes them; the memory is ready for its current stream. The values are those of
    nvJPEG, which differ by a few levels from those of libjpeg-turbo. On the CPU they are those of libjpeg-turbo.

    Args:
        blobs: the files, uint8 [bytes] each, in memory of the CPU that is only read.
        device: a CUDA device, or the CPU.

    Raises:
        RuntimeError: the library was built without nvJPEG, or a file is damaged.
    """
    if not len(blobs):
        return []
    if device.type == "cuda":
        # nvJPEG writes on a stream of its own, into memory that was freed while this stream may still read it
        torch.cuda.current_stream(device).synchronize()
    return decoder()(list(blobs), device)


@cache
def decoder() -> Decode:
    """Return the function of the library that is installed. A list of files is one batch for nvJPEG."""
    try:
        from torchcodec.decoders import decode_jpeg

        return lambda files, device: decode_jpeg(files, mode="UNCHANGED", device=device)
    except (ImportError, OSError, RuntimeError):  # not installed, an older one, or one without the libraries it needs
        from torchvision.io import ImageReadMode, decode_jpeg

        return lambda files, device: decode_jpeg(files, ImageReadMode.UNCHANGED, device)
