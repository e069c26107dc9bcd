"""Loaders that read a dataset in every epoch, as DataLoader does, for the judge: right ones, and wrong ones."""

from __future__ import annotations

import torch
from judge import BATCH
from judge_samples import parts_of, rebuilt
from torch.utils.data import default_collate


def plain_loader(change=lambda sample, row, epoch: sample, collate=default_collate, order=None):
    """Return a feed that reads the dataset in every epoch; `change` and `collate` may make it wrong."""

    def feed(dataset, path, epochs):
        generator = torch.Generator().manual_seed(7)  # a dataset may seed the global one

        def batches():
            for epoch in range(epochs):
                rows = torch.randperm(len(dataset), generator=generator).tolist() if order is None else order(epoch)
                for at in range(0, len(rows), BATCH):
                    some = rows[at : at + BATCH]
                    yield collate([change(dataset[row], row, epoch) for row in some]), some

        return "sample", batches()

    return feed


def collate_any(samples):
    """Return what `default_collate` makes of samples, and lists of leaves that it cannot collate."""
    try:
        return default_collate(samples)
    except (TypeError, RuntimeError, KeyError, AttributeError):
        parts = [parts_of(sample) for sample in samples]
    if parts[0] is None:
        return samples if samples[0] is not None else None
    return rebuilt(samples[0], {key: collate_any([part[key] for part in parts]) for key in parts[0]})
