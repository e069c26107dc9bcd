"""Load the Triton kernel, if it works on the GPU."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch

from memfeed.system.messages import warn
from memfeed.transforms.params.value_changes import Affine


def kernel_for(images: torch.Tensor | list[torch.Tensor]) -> ModuleType | None:
    """Return the module `kernel` if it takes these images, on a CUDA device where Triton works.

    It takes a batch [n, c, h, w], and a list of images [c, h, w].
    """
    first, dims = (images[0], 3) if isinstance(images, list) else (images, 4)
    return gpu_kernel(first.device) if first.device.type == "cuda" and first.ndim == dims else None


@cache
def gpu_kernel(device: torch.device) -> ModuleType | None:
    """Return the module `kernel` if it runs on `device`. Return None without Triton, or with a warning if it fails.

    Triton is imported here and not before, because the import is slow and the CPU path does not need it.
    """
    if find_spec("triton") is None:
        return None
    try:
        from memfeed.transforms.backends import kernel

        kernel.launch(torch.zeros(1, 1, 1, 1, device=device), None, Affine(torch.float16), torch.contiguous_format)
    except Exception as error:  # any kind: from Triton, from a compiler that it calls, from the driver
        warn(
            f"Triton does not work on {device} ({type(error).__name__}: {error}); expected to compile the kernel of "
            "memfeed.transforms with it; transforms run there one by one, which is slower; Triton needs a C compiler"
        )
        return None
    return kernel
