"""The samples that are read first: their classes, their memory, and what no store can hold."""

import time
from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch

import memfeed
from memfeed.convert import probe
from memfeed.errors import (
    SchemaError,
)
from support import Made, cache, equal


def test_namedtuples_defined_elsewhere_come_back_equal(path):
    other = namedtuple("Other", "a b")
    cache(Made([other(1, "x"), other(2, "y")]), path)
    reopened = memfeed.open(path)
    assert reopened[1] == other(2, "y")
    assert reopened[1]._fields == ("a", "b")
    assert type(memfeed.open(path, types=(other,))[1]) is other


def test_a_buffer_that_is_used_again_does_not_change_what_was_read(path):
    buffer = torch.zeros(3)

    def fill(i):
        buffer.fill_(i)
        return buffer

    for dataset in (Made(fill, 50), (fill(i) for i in range(50))):
        store = cache(dataset, path, overwrite=path.exists(), workers=0)
        if isinstance(dataset, Made):
            probed = probe.probe_indices(50)
            assert [int(store[i][0]) for i in probed] == probed
        else:
            assert [int(row[0]) for row in store] == list(range(50))


def test_two_classes_of_one_name_are_refused(path):
    one, other = namedtuple("Item", "a"), namedtuple("Item", "b")
    with pytest.raises(SchemaError, match=r"found two classes named Item .* rename one"):
        cache(Made([(one(1), other(2))] * 3), path)


def test_a_slow_first_sample_does_not_hide_the_others(path, monkeypatch):
    monkeypatch.setattr(probe, "MOST_SECONDS", 0.2)

    def slow(i):
        if i == 0:
            time.sleep(0.3)
        return {"o": None if i % 2 else torch.ones(2), "r": torch.arange(i % 3)}

    dataset = Made(slow, 20)
    assert cache(dataset, path).schema.fields[0].optional
    assert len(cache(dataset, path)) == 20


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged), "found a nested tensor"),
        (torch.zeros(2, device="meta"), "found a meta tensor"),
        (2**70, "found the int 1180591620717411303424; expected one that fits int64"),
    ],
)
def test_odd_leaves_name_sample_and_field(path, value, message):
    with pytest.raises(SchemaError, match=f"sample 0, field a: {message}"):
        cache(Made([{"a": value}] * 3), path)


def test_tuples_and_lists_of_other_classes_are_tuples_and_lists(path):
    class Mine(list):
        pass

    shared = {"k": 1}
    dataset = Made(lambda i: {"size": torch.zeros(i, 2).shape, "l": Mine([i, 2]), "p": shared, "q": shared}, 5)
    assert equal(cache(dataset, path)[3], {"size": (3, 2), "l": [3, 2], "p": {"k": 1}, "q": {"k": 1}})


def test_what_the_first_sample_takes_is_no_time_of_each(monkeypatch):
    """It opens files and imports modules: a first epoch of 7 s was announced as one of 91 s."""
    now = [0.0]

    def read(index):
        now[0] += 1.0 if now[0] else 1000.0
        return torch.arange(3) + index

    monkeypatch.setattr(probe, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(probe, "MOST_SECONDS", 1e6)
    assert probe.probe_map(Made(read, 100), range(16), may_be_random=True).seconds == 1.0
    now[0] = 0.0
    assert probe.probe_map(Made(read, 100), [7], may_be_random=True).seconds == 1000.0


def test_what_the_checks_of_a_sample_take_is_no_time_of_it(monkeypatch):
    """On a busy machine a sample of microseconds counted as one of 0.3 s: no sample was compared between two epochs."""
    now = [0.0]

    def read(index):
        now[0] += 1.0
        return torch.arange(3) + index

    def read_checked(*args):
        now[0] += 100.0
        return checked(*args)

    checked = probe.read_checked
    monkeypatch.setattr(probe, "read_checked", read_checked)
    monkeypatch.setattr(probe, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(probe, "MOST_SECONDS", 1e6)
    assert probe.probe_map(Made(read, 100), range(16), may_be_random=False).seconds == 1.0
