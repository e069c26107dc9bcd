"""The properties of a store: its path, its progress, and the attributes of its dataset."""

from __future__ import annotations

import copy
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset

from memfeed.errors import StoreError, listed
from memfeed.schema.fields import Schema
from memfeed.store.backing import PartTransforms
from memfeed.store.columns import FixedColumn
from memfeed.store.dataset_attributes import in_form, targets_column
from memfeed.store.row_supply import FillProgress
from memfeed.store.view import View
from memfeed.system.messages import format_bytes, printable

if TYPE_CHECKING:
    from memfeed.transforms import Transform


class Facts(Dataset[Any]):
    """The part of a `Store` that reads no row."""

    def __init__(self, view: View) -> None:
        self._view, self._backing = view, view.backing

    @property
    def schema(self) -> Schema:
        """The fields, in order, and the structure of a sample. It may change once while the store is filled."""
        return self._view.schema

    @property
    def path(self) -> Path:
        """The directory; "(memory)" for columns that a loader reads in place."""
        return self._view.path

    @property
    def digest(self) -> str:
        """A hash of the manifest and of the row numbers, in hexadecimal: it differs for every store and view.

        While the store is filled it is a hash of its dataset and of the row numbers.
        """
        return self._view.digest()

    def progress(self) -> FillProgress:
        """Return how many rows can be read, of how many: ``(present, total, skipped)``, of the base store.

        All of them, except while the store is filled (``memfeed.cache(..., lazily=True)``).
        """
        return self._view.progress()

    def finish(self) -> None:
        """Wait until all rows are there and the store is committed. Return immediately for a finished store.

        Raises what the dataset raised for a row, or what keeps rows from being written.
        """
        if self._view.supply is not None:
            self._view.supply.finish()

    @property
    def nbytes(self) -> int:
        """Bytes on disk of the selected columns, for all rows of the base store."""
        return sum(self._view.field_bytes())

    @property
    def skipped(self) -> tuple[int, ...]:
        """The dataset indices of samples that were left out (``on_error="skip"``).

        While the store is filled they are those that were tried so far.
        """
        supply = self._view.supply
        return self._view.skipped if supply is None else supply.skipped()

    @property
    def metadata(self) -> dict[str, Any]:
        """The JSON dict that was passed as ``metadata=``, a copy; {} without one."""
        manifest = self._backing.manifest
        return copy.deepcopy(manifest.metadata) if manifest is not None and manifest.metadata else {}

    @property
    def transform(self) -> Transform | None:
        """The steps that `cache(split=True)` left out of the pipeline, as one transform of batches; None without steps.

        A `Loader` without ``transform=`` applies it, before a ``collate_fn`` gets the samples; ``store[i]`` is the
        sample before it. StoreError if steps of it are functions of the dataset's own, which a store cannot hold:
        `cache(dataset, path, split=True)` has them.
        """
        own = self._backing.transform
        if own is not None:
            return own.one() if isinstance(own, PartTransforms) else own  # type: ignore[no-any-return]
        recipe = self._view.recipe
        if not recipe:
            return None
        from memfeed.transforms.from_recipe import make_pipeline  # most trainings need no transforms

        made = make_pipeline(recipe)
        if made is None:
            own = listed([step.shown for step in recipe if step.shown], 120)
            raise StoreError(
                f"{self.path}: found a store whose pipeline goes on with functions of its dataset ({own}), which a "
                "store cannot hold; expected them from the dataset: store = memfeed.cache(dataset, path, split=True), "
                "or another transform: Loader(store, transform=...), with {} for none"
            )
        return made.as_of_store()

    @property
    def classes(self) -> list[Any]:
        """The names of the classes, as the dataset's own ``classes``. AttributeError if it had none."""
        own = self._own("classes")
        return list(self._attribute("classes")) if own is None else own

    @property
    def class_to_idx(self) -> dict[str, int]:
        """The number of each class, as the dataset's own ``class_to_idx``. AttributeError if it had none."""
        own = self._own("class_to_idx")
        return dict(self._attribute("class_to_idx")) if own is None else own

    @property
    def targets(self) -> Any:
        """The class number of each row of this view, as the dataset's own ``targets``. AttributeError if it had none.

        A list of ints if the dataset had a list, else an int64 tensor [n]. Made once, and shared by later uses. In
        ``loader.dataset`` of a loader that was made of a dataset they are the dataset's own object.
        """
        own = self._own("targets")
        return self._kept_targets if own is None else own

    @cached_property
    def _kept_targets(self) -> list[int] | torch.Tensor:
        self._view.require_filled("targets")
        targets = self._attribute("targets")
        assert self._backing.manifest is not None
        field, file = targets_column(self._backing.manifest.schema.fields, targets, self.path)
        numbers = FixedColumn(field, file, self._backing.row_count, self._backing.check).data
        return in_form(numbers if self._view.rows is None else numbers[torch.from_numpy(self._view.rows)], targets.form)

    def _own(self, name: str) -> Any:
        """Return an attribute of the dataset, where it is at hand and has the same rows: a program may change it."""
        if self._backing.masks_rows or self._view.skipped or not self._view.has_all_rows:
            return None
        return getattr(self._backing.dataset, name, None)

    def _attribute(self, name: str) -> Any:
        manifest = self._backing.manifest
        found = getattr(manifest.attributes, name) if manifest is not None and manifest.attributes else None
        if found is None:
            raise AttributeError(
                f"found no {name} in {self.path}: its dataset had none, or the store is older than this attribute; "
                f"expected a dataset with .{name}: write the store again with overwrite=True"
            )
        return found

    def __len__(self) -> int:
        return len(self._view)

    def __repr__(self) -> str:
        size = "no rows" if self._backing.row_count is None else f"{len(self):,} rows"
        shown = [f"  {printable(field.name)}: {field.describe()}" for field in self.schema.fields[:20]]
        more = [f"  ... and {len(self.schema) - 20} more"] if len(self.schema) > 20 else []
        made = [f"  ({self._backing.description})"] if self._backing.description else []
        kept = self._backing.manifest.attributes if self._backing.manifest is not None else None
        names = [f"  classes: {printable(listed(kept.classes, 100))}"] if kept and kept.classes else []
        head = f"Store({str(self.path)!r}, {size}, {format_bytes(self.nbytes)})"
        return "\n".join([head, *shown, *more, *names, *made])
