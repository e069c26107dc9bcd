"""What the manifests of several stores become in the store of all their rows."""

import numpy as np
import pytest

import memfeed
from memfeed.building.join import (
    MOST_PROBES,
    Part,
    merged_attributes,
    merged_fingerprint,
    merged_schema,
    merged_skipped,
)
from memfeed.errors import SchemaError
from support import Made


class Labelled(Made):
    def __init__(self, labels, classes=None, targets=None):
        super().__init__(labels)
        if classes is not None:
            self.classes = classes
        if targets is not None:
            self.targets = targets


@pytest.fixture
def part(tmp_path):
    numbers = iter(range(100))

    def make(dataset, **options):
        path = tmp_path / f"{next(numbers)}.mf"
        return Part(path, memfeed.cache(dataset, path, workers=0, progress=False, **options)._view.manifest)

    return make


class Broken(Made):
    def __getitem__(self, index):
        if index in (1, 3):
            raise OSError("broken")
        return super().__getitem__(index)


def test_skipped_samples_are_counted_through_all_datasets(part):
    broken, whole = part(Broken(list(range(5))), on_error="skip"), part(Made(list(range(4))))
    assert broken.sample_count == 5
    assert merged_skipped([broken]) == (1, 3)
    assert merged_skipped([whole, broken, broken]) == (5, 7, 10, 12)


def test_schemas_that_differ_name_the_way_out(part):
    with pytest.raises(SchemaError, match=r"Write one of them again with memfeed.cache \(forms= and fields="):
        merged_schema([part(Made([1, 2])), part(Made([1.0, 2.0]))])
    one = part(Made([1, 2]))
    assert merged_schema([one, one]) == one.manifest.schema


# --- attributes


def test_classes_are_those_of_the_first_and_must_not_differ(part):
    cats, none, dogs = (part(Labelled([0, 1], classes)) for classes in (["cat", "dog"], None, ["dog", "cat"]))
    assert merged_attributes([cats, none])[0].classes == cats.attributes.classes
    assert merged_attributes([none, cats])[0].classes is None
    with pytest.raises(SchemaError, match="found another classes than that of .*; expected the same, in"):
        merged_attributes([cats, none, dogs])


def test_targets_that_are_a_column_stay_so(part):
    own = [part(Labelled(labels, targets=labels)) for labels in ([0, 1], [2, 0, 1])]
    attributes, targets = merged_attributes(own)
    assert targets is None
    assert attributes.targets == own[0].attributes.targets
    assert attributes.targets.field is not None


def test_targets_beside_the_columns_are_put_together(part):
    column, beside = part(Labelled([0, 1], targets=[0, 1])), part(Labelled([5, 6, 7], targets=[2, 0, 1]))
    assert (column.attributes.targets.field is None, beside.attributes.targets.field) == (False, None)
    for parts, expected in (([column, beside], [0, 1, 2, 0, 1]), ([beside, column], [2, 0, 1, 0, 1])):
        attributes, targets = merged_attributes(parts)
        assert targets.tolist() == expected
        assert targets.dtype == np.int64
        assert attributes.targets.field is None
    without = part(Labelled([5, 6]))
    with pytest.raises(SchemaError, match="found a dataset without targets; expected them, as the other rows have"):
        merged_attributes([beside, without])
    assert merged_attributes([without, beside])[1] is None


# --- fingerprints


def test_probes_have_the_numbers_of_all_samples(part):
    first, second = part(Broken(list(range(5))), on_error="skip"), part(Made(list(range(10, 13))))
    found = merged_fingerprint([first, second])
    own = [one.manifest.fingerprint.probes for one in (first, second)]
    assert found.length == 8
    assert [probe.index for probe in found.probes] == [p.index for p in own[0]] + [5 + p.index for p in own[1]]
    assert [probe.hashes for probe in found.probes] == [probe.hashes for probe in (*own[0], *own[1])]
    assert found.kind == "map"


def test_many_probes_are_thinned(part):
    one = part(Made(list(range(40))))
    assert len(one.manifest.fingerprint.probes) > 2
    found = merged_fingerprint([one] * 30)
    assert len(found.probes) <= MOST_PROBES
    assert found.probes[-1].index > 40 * 25
    assert found.length == 1200


def test_one_store_without_a_fingerprint_leaves_none(part, tmp_path):
    with memfeed.Writer(tmp_path / "w.mf") as w:
        w.append(1)
    written = Part(tmp_path / "w.mf", memfeed.open(tmp_path / "w.mf")._view.manifest)
    assert merged_fingerprint([part(Made([1, 2])), written]) is None


def test_random_samples_leave_no_probes(part):
    certain, random = part(Made([1, 2])), part(Made([3, 4]), allow="random")
    assert not random.manifest.fingerprint.probes
    assert merged_fingerprint([certain, random]).probes == ()


def test_iterables_have_no_length(part):
    iterable, rows = part(iter([1, 2, 3])), part(Made([1, 2]))
    assert merged_fingerprint([iterable, rows]).length is None
    assert merged_fingerprint([iterable, rows]).kind == "iterable"
    assert merged_fingerprint([rows, iterable]) is None
