"""Hashes of samples: equal for equal bytes and dims, by samples and by columns alike."""

import numpy as np
import torch
from torch.utils.data import Dataset, Subset

from memfeed.convert.fingerprint import (
    hash_columns,
    hash_packed,
    hash_rows,
    hash_samples,
    targets_of,
)
from memfeed.convert.probe import probe_indices
from memfeed.schema import codec
from memfeed.schema.infer import infer
from memfeed.schema.tree import Flattener


def field_of(*samples):
    return infer(list(samples)).schema.fields[0]


def hash_of(field, value):
    return hash_packed(field, codec.pack(field, [value]))


def test_values_that_differ_have_hashes_that_differ():
    field = field_of(torch.zeros(2, 3), torch.zeros(3, 2), torch.zeros(6, 1))
    values = [torch.zeros(2, 3), torch.zeros(3, 2), torch.ones(2, 3), torch.zeros(0, 3), torch.zeros(3, 0)]
    assert len({hash_of(field, value) for value in values}) == len(values)
    assert hash_of(field, values[0]) == hash_of(field, torch.zeros(2, 3))
    fixed = field_of(torch.zeros(2))
    assert hash_of(fixed, torch.tensor([0.0, 1.0])) != hash_of(fixed, torch.tensor([1.0, 0.0]))


def test_rows_are_hashed_one_by_one():
    field = field_of("a", "b")
    rows = [codec.pack(field, [text]) for text in ("a", "", "ab")]
    assert list(hash_rows(field, rows)) == [hash_packed(field, row) for row in rows]
    assert list(hash_rows(field, [])) == []


def test_columns_have_the_hashes_of_their_samples():
    columns = {"x": torch.arange(80.0).view(40, 2), "y": np.arange(40, dtype=np.int32)}
    samples = [{"x": columns["x"][i], "y": columns["y"][i]} for i in range(40)]
    found = infer(samples)
    by_column = hash_columns(found.schema, list(columns.values()), found.casts, 40)
    indices = probe_indices(40)
    flattener = Flattener(found.structure)
    packed = [codec.pack_sample(found.schema, flattener(samples[i]), found.casts, i) for i in indices]
    assert by_column == hash_samples(found.schema, indices, packed)
    assert [probe.index for probe in by_column] == list(indices)


def test_a_subset_by_keys_of_a_dataset_with_targets_has_none():
    class Keyed(Dataset):
        targets = (0, 1)

        def __len__(self):
            return 2

    assert targets_of(Subset(Keyed(), ["a", "b"]), 2) is None
    assert targets_of(Subset(Keyed(), [0, 1]), 2) is not None
