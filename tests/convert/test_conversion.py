"""Conversions that are interrupted, resumed, or started again."""

import json
import random
import shutil
import textwrap
import time

import pytest
import torch

import memfeed
from memfeed.convert import conversion
from memfeed.errors import (
    SampleError,
    SchemaError,
    SpaceError,
    StaleStoreError,
)
from memfeed.store import format
from support import Counting, Made, cache, equal


def test_rows_that_were_written_are_not_computed_again(path):
    read = []

    class Once(Made):
        def __getitem__(self, index):
            read.append(index)
            if index == 150 and len(read) < 400:
                raise OSError("disk went away")
            return index

    dataset = Once(None, 200)
    with pytest.raises(SampleError, match=r"\d+ rows are kept in .*a\.mf\.build; the same call resumes from there"):
        cache(dataset, path, workers=0)
    first = len(read)
    read.extend([0] * (400 - first))
    store = cache(dataset, path, workers=0)
    again = read[400:]
    assert [store[i] for i in range(200)] == list(range(200))
    assert len(set(again)) < 80, "only the probe and what was missing"
    assert not path.with_name("a.mf.build").exists()


CODE = """
    import torch
    class D(torch.utils.data.Dataset):
        def __len__(self):
            return 100
        def __getitem__(self, i):
            if i == 90 and {stop}:
                raise ValueError("stop")
            return torch.tensor([i {bug}])
"""


def test_overwriting_takes_no_row_of_code_that_was_changed(path, tmp_path, monkeypatch):
    """An interrupted build of a dataset that had a fault, which the samples that are compared do not show."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def dataset(name, **parts):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(CODE.format(**parts)))
        return __import__(name).D()

    with pytest.raises(SampleError):
        cache(dataset("one", stop=True, bug="+ (i == 50) * 1000"), path, workers=0)
    assert path.with_name("a.mf.build").exists()
    store = cache(dataset("two", stop=False, bug=""), path, workers=0, overwrite=True)
    assert [int(row) for row in store] == list(range(100))


def test_too_little_space_is_said_at_once(path, monkeypatch):
    monkeypatch.setattr("memfeed.system.files.free_bytes", lambda path: 1000)
    with pytest.raises(SpaceError, match=r"found 1,000 bytes free; expected at least 800,000 for 100,000 rows of 8 B"):
        cache(torch.arange(100_000), path)
    assert not path.with_name("a.mf.build").exists()


def test_the_budget_and_the_bar_are_shown(path, capsys):
    memfeed.cache(Made(lambda i: torch.zeros(1000), 50), path, progress=True)
    err = capsys.readouterr().err
    assert "memfeed: 50 rows, 200.0 KB, about" in err
    assert "free ->" in err
    assert "50.0/50.0" in err


def test_an_iterable_goes_on_with_the_workers_it_began_with(path):
    """Where a worker's rows go depends on how many share the iterable: another number would mix them up."""

    class Stops(Counting):
        def __iter__(self):
            for sample in super().__iter__():
                if sample[1] == 250 and not path.with_name("again").exists():
                    raise OSError("gone")
                yield sample

    for first, then in ((2, 0), (0, 2)):
        path.with_name("again").unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)
        with pytest.raises(SampleError, match=r"the iterable raised OSError: gone"):
            cache(Stops(300), path, workers=first)
        path.with_name("again").touch()
        store = cache(Stops(300), path, workers=then)
        assert sorted(label for _, label in store) == list(range(300))


def test_skipped_rows_are_tried_again(path):
    class Mended(Made):
        bad = (5, 71)

        def __getitem__(self, index):
            if index in self.bad:
                raise (KeyboardInterrupt if index == 71 else ValueError)("broken")
            return index

    dataset = Mended(None, 200)
    with pytest.raises(KeyboardInterrupt):
        cache(dataset, path, on_error="skip", workers=0)
    dataset.bad = ()
    store = cache(dataset, path, workers=0)
    assert [int(x) for x in store] == list(range(200))
    assert store.skipped == ()


def test_a_list_whose_length_turns_out_to_vary_can_be_started_anew(path):
    dataset = Made(lambda i: {"t": [1] if i != 71 else [1, 2]}, 200)
    with pytest.raises(SchemaError, match=r"sample 71: found a list of 2 at t.* pass fields=\{'t': 'jagged'\}"):
        cache(dataset, path, workers=0)
    with pytest.raises(StaleStoreError, match="found the fields t; expected t.0"):
        cache(dataset, path, fields={"t": "jagged"})
    store = cache(dataset, path, fields={"t": "jagged"}, overwrite=True)
    assert [store[i]["t"] for i in (70, 71)] == [[1], [1, 2]]


def test_a_store_that_exists_is_opened_once(path, monkeypatch):
    dataset = Made(lambda i: torch.tensor(i), 40)
    cache(dataset, path)
    read, found = format.read_manifest, []
    monkeypatch.setattr(format, "read_manifest", lambda root: found.append(root) or read(root))
    assert int(cache(dataset, path)[7]) == 7
    assert found == [path]


def test_a_store_that_is_replaced_while_it_is_compared_is_opened_again(path, monkeypatch):
    dataset = Made(lambda i: torch.tensor(i), 40)
    cache(dataset, path)
    make = conversion.open_or_convert

    def replace_first(*arguments):
        monkeypatch.undo()
        cache(dataset, path, overwrite=True, metadata={"new": True})
        return make(*arguments)

    monkeypatch.setattr("memfeed.convert.cache.open_or_convert", replace_first)
    assert cache(dataset, path).metadata == {"new": True}


def bytes_by_name(store):
    return {str(one.relative_to(store.path)): one.read_bytes() for one in store.path.rglob("*") if one.is_file()}


def uneven_sample(index):
    time.sleep(random.SystemRandom().random() / 1000)  # so that no worker is always the first
    return {
        "number": index,
        "text": "word " * (index % 7),
        "points": torch.full((index % 5, 2), index),
        "nested": [{"late": torch.full((2 + (index in (71, 150)),), index)}, None if index % 11 else b"x" * index],
    }


def test_a_conversion_writes_the_same_bytes_with_any_number_of_workers(tmp_path, monkeypatch):
    """Also of ``late``, whose length varies from row 71 on: its column is fixed at first."""
    monkeypatch.setattr("memfeed.convert.jobs.MOST_SECONDS", 600.0)  # a busy machine changes no order
    data = Made(uneven_sample, 200)
    alone, *others = (cache(data, tmp_path / f"{workers}.mf", workers=workers) for workers in (0, 1, 2, 3, 4))
    expected = bytes_by_name(alone)
    state = json.loads(json.dumps(memfeed.Loader(others[1], 8, shuffle=True, seed=1).state_dict()))
    for store in others:
        assert bytes_by_name(store) == expected
        assert store.digest == alone.digest
    assert all(equal(row, uneven_sample(i)) for i, row in enumerate(others[-1]))
    late = alone.path / "nested" / "0" / "late"
    assert late.joinpath("heap.bin").stat().st_size == 8 * (200 * 2 + 2), "no gap is left of the fixed column"
    memfeed.Loader(alone, 8, shuffle=True, seed=1).load_state_dict(state)


class Captions(Made):
    """Rows of which one, that no probe reads, has None where the others have text, bytes and a list."""

    def __init__(self, missing=(301,), broken=-1):
        super().__init__(self.sample, 400)
        self.missing, self.broken = missing, broken

    def sample(self, index):
        if index == self.broken:
            raise OSError("the disk")
        values = f"text {index}", b"%d" % index, torch.full((1 + index % 2, 1 + index % 3), index)
        return (index, *((None, None, None) if index in self.missing else values))


@pytest.mark.parametrize("workers", [0, 2])
def test_none_comes_late_where_the_others_are_text_bytes_or_lists(path, workers):
    store = cache(Captions(), path, workers=workers)
    assert [field.optional for field in store.schema] == [False, True, True, True]
    assert all(equal(store[i], Captions()[i]) for i in range(400))
    store.verify()
    assert equal(store[300:303][1], ["text 300", None, "text 302"])
    assert cache(Captions(), path).digest == store.digest


def test_a_build_in_which_none_came_late_goes_on(path):
    for broken in (320, 360):
        with pytest.raises(SampleError):
            cache(Captions((301, 350), broken), path, workers=0)
    assert [i for i, sample in enumerate(cache(Captions((301, 350)), path, workers=0)) if sample[1] is None] == [
        301,
        350,
    ]


def test_late_none_in_other_columns_is_an_error_that_says_what_to_write(path):
    for value, advice in ((torch.ones(3), "return a tensor in its place"), (7, r"fields={'value': \"json\"}")):
        samples = [value] * 301 + [None] + [value] * 98
        with pytest.raises(SchemaError, match=r"sample 301, field value: found None; expected .*" + advice):
            cache(Made([{"value": sample} for sample in samples]), path, workers=0, overwrite=True)
    with pytest.raises(SchemaError, match="field 1: found None; expected str, as like= or fields="):
        cache(Captions(), path, workers=0, fields={"1": "str"}, overwrite=True)
