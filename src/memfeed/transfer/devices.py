"""Check the device that a user names."""

from __future__ import annotations

import torch
from torch.utils.data import get_worker_info

from memfeed.errors import LoaderError


def check_device(device: torch.device | str | None) -> torch.device | None:
    """Return ``device`` as a torch.device; None stays None.

    Raises:
        LoaderError: torch does not know the device, this machine does not have it, or it is a CUDA device and this
            process is a DataLoader worker.
    """
    if device is None:
        return None
    try:
        checked = torch.device(device)
    except RuntimeError as error:
        raise LoaderError(
            f"found device {device!r}; expected one that torch knows, as cpu or cuda:0 ({error})"
        ) from None
    if checked.type == "cuda":
        if get_worker_info() is not None:
            raise LoaderError(
                "found a CUDA device inside a DataLoader worker; CUDA cannot be used after a fork: collate on the CPU "
                "and move each batch in the training loop with memfeed.to_device(batch, device)"
            )
        count = torch.cuda.device_count()
        if (checked.index or 0) >= count:
            raise LoaderError(
                f"found device {checked}; this machine has {count} CUDA devices: use cpu, or one that is there"
            )
    elif checked.type not in ("cpu", "meta"):
        module = getattr(torch, checked.type, None)  # torch.mps, torch.xpu, or that of a privately used backend
        if module is None or not module.is_available():
            raise LoaderError(
                f"found device {checked}, which this machine or this build of torch does not have; expected one that "
                'is there: device="cpu"'
            )
    return checked
