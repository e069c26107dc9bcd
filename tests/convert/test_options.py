"""The arguments of a conversion: what they mean, and what has no meaning."""

import pytest
import torch

from memfeed.convert.options import check_metadata, options_of
from memfeed.errors import FieldError, SchemaError

DATA = [1, 2]


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, {"fields": None, "workers": None, "on_ray": False, "allow_random": False, "copy_existing": False}),
        ({"fields": "image"}, {"fields": ("image",)}),
        ({"fields": ["a", "b"]}, {"fields": ("a", "b")}),
        ({"fields": {"a": "jagged"}}, {"fields": {"a": "jagged"}}),
        ({"workers": 0}, {"workers": 0, "on_ray": False}),
        ({"workers": "ray"}, {"workers": None, "on_ray": True}),
        ({"workers": "ray:8"}, {"workers": 8, "on_ray": True}),
        ({"allow": "random"}, {"allow_random": True, "copy_existing": False}),
        ({"allow": ("random", "copy")}, {"allow_random": True, "copy_existing": True}),
        ({"on_error": "skip"}, {"skips_errors": True}),
        ({"progress": False}, {"says": False}),
        ({"split": True, "forms": 256}, {"keep": 256}),
        ({"budget": "2KB"}, {"budget": 2000}),
        ({"metadata": {"a": [1]}}, {"metadata": {"a": [1]}}),
    ],
    ids=str,
)
def test_meaning(given, found):
    options = options_of(DATA, **given)
    assert {name: getattr(options, name) for name in found} == found


def test_dtypes_are_those_of_the_forms():
    forms = options_of(DATA, forms={float: torch.float16, "a": torch.int8}).forms
    assert (forms.floats, forms.dtypes) == (torch.float16, {"a": torch.int8})


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"fields": 3}, FieldError, "found fields=3; expected a name for each leaf"),
        ({"fields": ["a", 1]}, FieldError, "found fields="),
        ({"fields": ["a", ""]}, FieldError, "found fields="),
        ({"forms": [torch.float16]}, ValueError, "found forms="),
        ({"forms": "lossy"}, ValueError, "without budget"),
        ({"budget": "much"}, ValueError, "found budget="),
        ({"forms": {float: torch.float16, "a": torch.float32}}, ValueError, "whose float rounds field 'a' too"),
        ({"workers": -1}, ValueError, "found workers=-1"),
        ({"workers": 1.5}, ValueError, "found workers=1.5"),
        ({"workers": "ray:"}, ValueError, "found workers='ray:'"),
        ({"workers": "ray:0"}, ValueError, "found workers='ray:0'"),
        ({"workers": "dask"}, ValueError, "found workers='dask'"),
        ({"allow": "all"}, ValueError, "found allow='all'"),
        ({"allow": ["random", "all"]}, ValueError, "found allow="),
        ({"allow": None}, ValueError, "found allow=None"),
        ({"on_error": "ignore"}, ValueError, "found on_error='ignore'"),
        ({"worker_init_fn": 3}, ValueError, "found worker_init_fn=3"),
        ({"forms": 64}, ValueError, "found forms=64 without split"),
        ({"forms": 4, "split": True}, ValueError, "found forms=4"),
        ({"forms": True, "split": True}, ValueError, "found forms=True"),
        ({"forms": "half", "split": True}, ValueError, "found forms='half'"),
        ({"length": 5, "workers": 2}, ValueError, "found length=5 with workers=2"),
    ],
    ids=str,
)
def test_no_meaning(given, error, message):
    with pytest.raises(error, match=message):
        options_of(DATA, **given)


def test_an_iterator_is_read_by_one_process():
    with pytest.raises(ValueError, match="found workers=2 for an iterator"):
        options_of(iter(DATA), workers=2)
    assert options_of(iter(DATA), workers=0).workers == 0


class OwnIterator(list):
    """Has rows, and is its own iterator, as a Taskset of learn2learn."""

    def __iter__(self):
        return self

    def __next__(self):
        raise StopIteration


def test_workers_read_the_rows_of_a_dataset_that_is_an_iterator_too():
    assert options_of(OwnIterator(DATA), workers=2).workers == 2


def test_metadata_is_a_copy():
    given = {"a": [1, {"b": None}], "c": 1.5, "d": "é", "e": True}
    found = check_metadata(given)
    assert found == given
    found["a"].append(2)
    assert given["a"] == [1, {"b": None}]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ([1], r"found metadata=\[1\]; expected a dict"),
        ({"a": float("nan")}, r"found metadata\['a'\] = nan"),
        ({"a": [1, (2,)]}, r"found metadata\['a'\]\[1\] = \(2,\)"),
        ({"a": {1: 2}}, r"found metadata\['a'\] with the key 1 = 2"),
        ({"a": b"x"}, r"found metadata\['a'\] = b'x'"),
        ({"a": "x" * (2 << 20)}, "found metadata of 2,097,160 bytes"),
    ],
    ids=lambda value: f"{value!r:.20}",
)
def test_what_is_no_metadata(metadata, message):
    with pytest.raises(SchemaError, match=message):
        check_metadata(metadata)
