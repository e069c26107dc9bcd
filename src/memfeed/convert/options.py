"""The arguments of `memfeed.cache` that say how to convert."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from memfeed.schema.fields import Kind


class ConvertOptions(msgspec.Struct, frozen=True):
    """The options of one conversion; see `memfeed.cache`. ``record`` is its argument ``type``."""

    fields: Sequence[str] | Mapping[Any, Kind] | None
    dtypes: Mapping[Any, torch.dtype] | None
    record: type[Any] | None
    worker_count: int | None
    skip_errors: bool
    allow_random: bool
    check: bool
    overwrite: bool
    progress: bool

    @property
    def record_types(self) -> tuple[type, ...]:
        """Return the class that samples come back as, if the user named one."""
        return (self.record,) if self.record else ()
