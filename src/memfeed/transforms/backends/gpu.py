"""Whether there is a kernel for a GPU."""

from __future__ import annotations

import warnings
from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch

from memfeed.transforms.params.affine import Affine


@cache
def gpu_kernel(device: torch.device) -> ModuleType | None:
    """The module `kernel`, tried on this device; None where Triton is not there, or warns that it does not work.

    Triton is imported here and not before: it takes a while, and on the CPU nobody needs it.
    """
    if find_spec("triton") is None:
        return None
    try:
        from memfeed.transforms.backends import kernel

        kernel.launch(torch.zeros(1, 1, 1, 1, device=device), None, Affine(torch.float16), torch.contiguous_format)
    except Exception as error:  # of any kind: Triton's, a compiler's that it calls, the driver's
        warnings.warn(
            f"Triton does not work on {device} ({type(error).__name__}: {error}); expected to compile the kernel of "
            "memfeed.transforms with it; transforms run there one by one, which is slower; Triton needs a C compiler",
            stacklevel=2,
        )
        return None
    return kernel
