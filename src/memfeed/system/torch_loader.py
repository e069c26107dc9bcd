"""torch's own DataLoader, also in a program that puts another class or a function in the place of its name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic

import torch.utils.data.dataloader  # noqa: F401  # it makes the class

if TYPE_CHECKING:
    from torch.utils.data.dataloader import DataLoader as DataLoader
else:
    _PLACE = "torch.utils.data.dataloader", "DataLoader"
    DataLoader = next(one for one in Generic.__subclasses__() if (one.__module__, one.__qualname__) == _PLACE)
