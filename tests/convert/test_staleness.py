"""A store is compared with its dataset, and the error says which value differs."""

import contextlib
import importlib
import linecache
import sys
import textwrap

import pytest
import torch

import memfeed
from memfeed.errors import (
    BuildError,
    SampleError,
    StaleStoreError,
)
from support import Counting, Made, cache, equal


def test_other_names_than_the_stored_ones_are_told(path):
    cache(Made([(1, 2)] * 3), path, fields=("a", "b"))
    assert len(cache(Made([(1, 2)] * 3), path)) == 3
    with pytest.raises(StaleStoreError, match=r"found fields=\['c', 'd'\], expected \['a', 'b'\]"):
        cache(Made([(1, 2)] * 3), path, fields=("c", "d"))


def test_stale_values_are_explained(path):
    cache(Made([{"x": torch.tensor([i, 2]), "s": "a"} for i in range(100)]), path)
    changed = [{"x": torch.tensor([i, 2]), "s": "a"} for i in range(100)]
    changed[99]["x"][1] = 7
    with pytest.raises(
        StaleStoreError, match=r"field x, sample 99: found 7 at \[1\], expected 2 \(1 elements differ\)"
    ) as caught:
        cache(Made(changed), path)
    for part in ("overwrite=True", "memfeed.open(path)", "seed it there"):
        assert part in str(caught.value)
    assert equal(memfeed.open(path)[99]["x"], torch.tensor([99, 2]))
    assert equal(cache(Made(changed), path, overwrite=True)[99]["x"], torch.tensor([99, 7]))


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([{"x": 1}] * 9, r"found 9 samples, expected 10"),
        ([{"x": 1.0}] * 10, r"field x: found float64 \[\], expected int64 \[\]"),
        ([{"y": 1}] * 10, r"found the fields y; expected x"),
        ([{"x": torch.tensor(1)}] * 10, r"field x: found int64 \[\] \(tensor\), expected int64 \[\] \(scalar\)"),
    ],
)
def test_a_dataset_of_another_kind_is_explained(path, samples, message):
    cache(Made([{"x": 1}] * 10), path)
    with pytest.raises(StaleStoreError, match=message):
        cache(Made(samples), path)


def test_values_drawn_in_init_look_stale_and_the_message_says_so(path):
    def noise(seed):
        return Made(list(torch.rand(20, 3, generator=torch.Generator().manual_seed(seed))))

    cache(noise(1), path)
    with pytest.raises(StaleStoreError, match="draws values when it is made .* seed it there"):
        cache(noise(2), path)


@pytest.mark.parametrize("place", ["class", "function", "method of a class", "maker"])
def test_a_changed_source_of_a_class_or_of_what_it_calls_is_only_reported(path, tmp_path, monkeypatch, place):
    code = """
        import functools
        from torch.utils.data import Dataset
        class Rare:
            @staticmethod
            def factor(i): return 1  # {method of a class}
        @functools.lru_cache
        def scaled(i): return i * Rare.factor(i)  # {function}
        def numbers(): return [1]  # {maker}
        class D(Dataset):
            def __init__(self): self.numbers = numbers()
            def __len__(self): return 5
            def __getitem__(self, i): return [scaled(j) for j in [i]][0]  # {class}
    """
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for comment, warns in (("one", False), ("one", False), ("other", place != "maker")):
        (tmp_path / "changing.py").write_text(textwrap.dedent(code).replace("{" + place + "}", comment))
        linecache.clearcache()
        monkeypatch.delitem(sys.modules, "changing", raising=False)
        dataset = importlib.import_module("changing").D()
        message = r"the source of changing\.D, or of what it calls, has changed"
        with pytest.warns(match=message) if warns else contextlib.nullcontext():
            cache(dataset, path)


def test_the_build_of_another_dataset_is_not_gone_on_with(path):
    def make(n):
        return Made(lambda i: torch.full((n,), i) if i != 150 else (_ for _ in ()).throw(OSError("gone")), 200)

    with pytest.raises(SampleError):
        cache(make(3), path)
    with pytest.raises(StaleStoreError, match=r"a\.mf\.build: found that the dataset no longer matches"):
        cache(make(4), path)
    assert (
        len(cache(torch.arange(7), path, overwrite=True) if path.exists() else cache(make(3), path, on_error="skip"))
        == 199
    )


@pytest.mark.parametrize(("before", "after"), [(100, 5), (5, 8), (5, 4)])
def test_an_iterable_that_shrank_or_grew_is_stale(path, before, after):
    cache(Counting(before), path)
    assert len(cache(Counting(before), path)) == before
    with pytest.raises(StaleStoreError, match=rf"samples.*expected {before}"):
        cache(Counting(after), path)


def test_columns_that_changed_do_not_go_on_with_the_build_of_others(path, monkeypatch):
    with monkeypatch.context() as m:
        m.setattr("memfeed.building.build.Build.commit", lambda *a, **k: (_ for _ in ()).throw(BuildError("stopped")))
        with pytest.raises(BuildError, match="stopped"):
            cache(torch.arange(1000), path)
    changed = torch.arange(1000)
    changed[-1] = 7
    with pytest.raises(StaleStoreError, match=r"field value, sample 999: found another value than was stored"):
        cache(changed, path)
    assert torch.equal(cache(torch.arange(1000), path).column(()), torch.arange(1000))


class Cached(Made):
    """Keeps its results in a dict that more than one dataset fills."""

    def __init__(self, kept, note):
        super().__init__([torch.tensor(i) for i in range(50)])
        self.kept, self.note = kept, note

    def __getitem__(self, index):
        return torch.tensor(self.kept.setdefault(index, index))


def test_what_the_comparison_of_rows_adds_to_a_cache_is_no_change(path):
    def loaded(full, note):
        return memfeed.Loader(Cached({i: i for i in full}, note), 10, cache=path)

    assert len(list(loaded(range(50), "one"))) == 5
    with pytest.warns(match="dataset.note, dataset.kept differs"):
        again = loaded([i for i in range(50) if i != 43], "other")  # which only the comparison reads
    assert torch.equal(torch.cat(list(again)), torch.arange(50))
