"""Plain data in a dataset's attributes is hashed: equal data alike, in every process, and every change is seen."""

import copy
import dataclasses
import datetime
import decimal
import enum
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Dataset, Subset

from memfeed.convert import digests
from memfeed.convert.digests import PARTIAL, SOME, differ_in_all, digest_attributes, hash_value
from memfeed.convert.plain_data import leaves_of

scalars = st.none() | st.booleans() | st.integers(-5, 1 << 70) | st.floats(allow_nan=False) | st.text(max_size=3)
plain = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2) | st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=12,
)


class Of(Dataset):
    def __init__(self, n=200, **attributes):
        self.__dict__.update(attributes)
        self._n = n

    def __len__(self):
        return self._n

    def __getitem__(self, index):
        return index


def texts(dataset, **options):
    return {path: one.text for path, one in digest_attributes(leaves_of(dataset), **options).items()}


def exact(value):
    """Return plain data so that two compare equal only if they are the same to the last type."""
    if isinstance(value, list | tuple):
        return [exact(one) for one in value]
    if isinstance(value, dict):
        return {(type(key).__name__, key): exact(one) for key, one in value.items()}
    return (type(value).__name__, repr(value))


@settings(max_examples=300)
@given(plain, plain)
def test_two_values_have_one_digest_if_they_are_equal(one, other):
    assert hash_value(copy.deepcopy(one)) == hash_value(one) is not None
    # relative and absolute paths are hashed without the folder that they share
    if not any(mark in repr((one, other)) for mark in "/.~"):
        assert (hash_value(one) == hash_value(other)) == (exact(one) == exact(other))


@pytest.mark.parametrize("position", [0, 1, 499, 999])
@pytest.mark.parametrize(
    "make",
    [
        lambda: list(range(1000)),
        lambda: [float(i) for i in range(1000)],
        lambda: [i % 2 == 0 for i in range(1000)],
        lambda: [np.int64(i) for i in range(1000)],
        lambda: [f"{i}.png" for i in range(1000)],
        lambda: [None if i % 7 == 0 else i for i in range(1000)],
        lambda: np.arange(1000, dtype=np.int16),
        lambda: np.arange(2000)[::2],
        lambda: np.array([f"{i}" for i in range(1000)]),
        lambda: np.array([f"{i}" for i in range(1000)], object),
        lambda: torch.arange(1000),
        lambda: torch.arange(2000).view(1000, 2)[:, 0],
        lambda: torch.arange(1000).to(torch.bfloat16),
        lambda: torch.arange(1000).float().requires_grad_(),
    ],
)
def test_one_changed_label_of_a_thousand_is_always_seen(make, position):
    dataset = Of(1000, labels=make())
    before = texts(dataset)
    assert texts(Of(1000, labels=make())) == before
    with torch.no_grad():
        changed = make()
        changed[position] = changed[0 if position else 1]
    dataset.labels = changed
    after = texts(dataset)
    assert before["labels"] != after["labels"]


class Split(enum.Enum):
    TRAIN, TEST = 1, 2


class Level(enum.IntEnum):
    LOW, HIGH = 1, 2


class Number(float):
    pass


@pytest.mark.parametrize(
    "many",
    [list, lambda values: [*values, 3], lambda values: [Example(one) for one in values], lambda values: values[77]],
)
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Split.TRAIN, Split.TEST),
        (Level.LOW, Level.HIGH),
        (Number(1), Number(2)),
        (range(3), range(4)),
        (slice(3), slice(4)),
        (datetime.date(2020, 1, 1), datetime.date(2020, 1, 2)),
        (datetime.datetime(2020, 1, 1, 3), datetime.datetime(2020, 1, 1, 4)),
        (datetime.timedelta(1), datetime.timedelta(2)),
        (decimal.Decimal("1.0"), decimal.Decimal("1.00")),
    ],
)
def test_values_of_the_standard_library_count(one, other, many):
    same = [one] * 500
    before = texts(Of(500, x=many(same)))
    assert texts(Of(500, x=many(list(same)))) == before
    same[77] = other
    assert texts(Of(500, x=many(same))) != before


def test_the_mask_of_a_masked_array_counts():
    one = np.ma.masked_array(np.arange(100), mask=np.arange(100) == 3)
    other = one.copy()
    other.mask[40] = True
    assert hash_value(one) == hash_value(one.copy()) != hash_value(other)
    assert hash_value(one, 50) != hash_value(np.ma.masked_array(np.arange(100), mask=True), 50)
    assert hash_value(np.ma.masked_array(["a", None], mask=False)) == hash_value(np.ma.masked_array(["a", None]))


def test_the_attributes_of_objects_in_an_array_count():
    def make(label):
        array = np.empty(300, object)
        array[:] = [Example(label if i == 77 else i) for i in range(300)]
        return texts(Of(300, ex=array))

    assert make(1)["ex[*].label"] == make(1)["ex[*].label"] != make(2)["ex[*].label"]


@pytest.mark.parametrize("at", [0, 700, 999])
def test_records_are_hashed_by_column(at, tmp_path, monkeypatch):
    records = [(f"/data/a/{i}.png", i % 10) for i in range(1000)]
    before = texts(Of(samples=records, imgs=records))
    assert set(before) == {"samples", "_n"}, "one object is found once"
    moved = [(f"/elsewhere/x/{i}.png", i % 10) for i in range(1000)]
    assert texts(Of(samples=moved)) == before
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "0.png").touch()
    for root in ("x/", "../x/"):  # paths that are relative to the working directory
        assert texts(Of(samples=[(path.replace("/elsewhere/x/", root), label) for path, label in moved])) == before
    for root in ("y/", "z/"):  # words that name no file
        assert texts(Of(samples=[(path.replace("/elsewhere/x/", root), label) for path, label in moved])) != before
    moved[at] = (moved[at][0], 11)
    assert texts(Of(samples=moved))["samples"] != before["samples"]
    records[at] = (records[at][0] + "x", records[at][1])
    assert texts(Of(samples=records))["samples"] != before["samples"]


class Slotted:
    __slots__ = ("label",)

    def __init__(self, label):
        self.label = label


class Holder:
    def __init__(self, label):
        self.name, self.parts = "a", [Slotted(label)]


@dataclasses.dataclass
class Example:
    label: int
    meta: object = None


@pytest.mark.parametrize("at", [1, 77, 199])
@pytest.mark.parametrize(
    ("make", "path"),
    [
        (Example, "ex[*].label"),
        (Slotted, "ex[*].label"),
        (lambda i: ("a", Slotted(i)), "ex[*][1].label"),
        (lambda i: {"a": 0, "b": [Example(i)]}, "ex[*]['b']"),
        (Holder, "ex[*].parts"),
        (lambda i: Example(0, Slotted(i)), "ex[*].meta.label"),
        (lambda i: Example(i) if i % 3 else None, "ex[*].label"),
    ],
)
@pytest.mark.parametrize("kind", [list, lambda values: dict(enumerate(values))])
def test_the_attributes_of_objects_in_a_list_count(make, path, at, kind):
    before = texts(Of(ex=kind([make(i) for i in range(200)])))
    assert texts(Of(ex=kind([make(i) for i in range(200)]))) == before
    after = texts(Of(ex=kind([make(i if i != at else 1000) for i in range(200)])))
    assert [one for one in before if before[one] != after[one]] == [path]
    assert not differ_in_all(before[path], after[path])


def test_of_objects_what_is_no_data_does_not_count():
    class Record:
        def __init__(self, owner, index):
            self.owner, self.index, self.text = owner, index, f"a{index}"
            self._hash = hash((self.text, id(self)))
            self.tool, self.lock, self.log, self.next = owner.tool, threading.Lock(), logging.getLogger("x"), self
            self.random, self.generator, self.call = random.Random(), np.random.default_rng(), lambda: index

    def make():
        dataset = Of()
        dataset.tool = Holder(time.monotonic())
        dataset.records = [Record(dataset, i) for i in range(200)]
        dataset.pairs = [(i, one, dataset.tool) for i, one in enumerate(dataset.records)]
        dataset.ragged = [(i,) if i % 2 else (i, one) for i, one in enumerate(dataset.records)]
        return dataset

    one = texts(make())
    assert one == texts(make())
    assert {"ragged", "pairs[*][1].text", "records[*].next.text", "records[*].text"} <= one.keys()
    assert not any("tool" in path or "_hash" in path or "[2]" in path for path in one)


def test_digests_of_objects_in_many_datasets_have_groups_too():
    def parts(changed):
        return ConcatDataset([Of(ex=[Example(i + (i == changed)) for i in range(200)]) for _ in range(20)])

    one, other = (texts(parts(changed))["datasets[*].ex[*].label"] for changed in (None, 7))
    assert one != other
    assert not differ_in_all(one, other)


def test_the_lists_of_a_class_count_if_they_have_an_entry_for_each_sample():
    class Labelled(Of):
        labels, sizes, shared, registry = list(range(200)), np.arange(200), {i: i for i in range(200)}, [1] * 150

    dataset = Labelled()
    before = texts(dataset)
    assert set(before) == {"labels", "sizes", "_n"}
    Labelled.labels[77] = 3
    assert texts(dataset)["labels"] != before["labels"]
    dataset.labels = list(range(200))
    assert texts(dataset) == before


def test_the_slots_of_a_dataset_count():
    class Plain:
        __slots__ = ("labels",)

        def __getitem__(self, index):
            return self.labels[index]

        def __len__(self):
            return 200

    dataset = Plain()
    assert texts(dataset) == {}
    dataset.labels = [0] * 200
    assert set(texts(dataset)) == {"labels"}


def test_what_is_no_plain_data_has_no_digest(tmp_path):
    class Handle:
        def __init__(self):
            self.counter, self.lock = 3, threading.Lock()

    found = texts(
        Of(
            transform=lambda x: x,
            lock=threading.Lock(),
            generator=torch.Generator(),
            rng=np.random.default_rng(),
            handle=Handle(),
            model=torch.nn.Linear(2, 2),
            empty=[],
            none=None,
            root=tmp_path,
            place="/nowhere/at/all",
            meta=torch.empty(3, device="meta"),
        )
    )
    assert set(found) == {"_n"}


def test_annotations_in_an_object_of_another_class_count_but_its_settings_do_not():
    class Coco:
        def __init__(self):
            self.anns = {i: {"id": i, "box": [i, 2.0]} for i in range(300)}
            self.verbose = True

    one, other = Of(coco=Coco()), Of(coco=Coco())
    assert texts(one) == texts(other)
    assert set(texts(one)) == {"coco.anns", "_n"}
    other.coco.anns[77]["box"][1] = 3.0
    assert texts(one)["coco.anns"] != texts(other)["coco.anns"]


def test_inner_datasets_are_walked_and_many_have_one_digest():
    class Wrapper:
        def __init__(self, dataset):
            self.dataset = dataset

        def __getitem__(self, index):
            return self.dataset[index]

    inner = Of(targets=list(range(200)))
    assert "dataset.dataset.targets" in texts(Subset(Wrapper(inner), range(100)))
    assert "indices" in texts(Subset(inner, list(range(100))))
    assert "datasets[1].targets" in texts(ConcatDataset([Of(), inner]))
    parts = [Of(targets=[i] * 200) for i in range(40)]
    before = texts(ConcatDataset(parts))
    assert "datasets[*].targets" in before
    parts[33].targets[5] = 77
    assert texts(ConcatDataset(parts))["datasets[*].targets"] != before["datasets[*].targets"]


def test_data_and_settings_are_told_apart():
    dataset = Of(50, targets=[0] * 50, config={"lr": 0.1}, size=3, names=["a"] * 100, mean=torch.zeros(3))
    kinds = {path: one.kind for path, one in digest_attributes(leaves_of(dataset)).items()}
    expected = {"targets": "data", "config": "setting", "size": "setting", "names": "data", "mean": "data"}
    assert kinds == {**expected, "_n": "setting"}


def test_tables_are_hashed_by_column():
    pandas, polars, arrow = pytest.importorskip("pandas"), pytest.importorskip("polars"), pytest.importorskip("pyarrow")
    columns = {"file": [f"{i}.png" for i in range(200)], "label": list(range(200)), "score": [0.5] * 200}
    for make in (pandas.DataFrame, polars.DataFrame, arrow.table):
        before = texts(Of(table=make(columns)))
        assert {"table['file']", "table['label']", "table['score']"} <= set(before)
        changed = {**columns, "label": [*range(199), 3]}
        after = texts(Of(table=make(changed)))
        assert [path for path in before if before[path] != after[path]] == ["table['label']"]
        partial = texts(Of(table=make(columns)), some=lambda path: SOME)
        assert all(text.startswith(PARTIAL) for text in partial.values())


def test_of_what_is_too_large_some_is_hashed(monkeypatch):
    monkeypatch.setattr(digests, "MOST_SECONDS", 60.0)  # on a busy machine too
    monkeypatch.setattr(digests, "MOST_BYTES", 32 << 20)
    monkeypatch.setattr(digests, "MOST_VALUES", 100_000)
    large = np.zeros(40 << 20, np.uint8)
    nested = [{str(i): i} for i in range(30_000)]
    before = texts(Of(large=large, nested=nested, small=list(range(200))))
    assert {path: text[:1] == PARTIAL for path, text in before.items()} == {
        "large": True,
        "nested": True,
        "small": False,
        "_n": False,
    }
    assert texts(Of(large=large.copy(), nested=copy.deepcopy(nested), small=list(range(200)))) == before
    large[-1] = 1
    assert texts(Of(large=large))["large"] != before["large"]
    assert texts(Of(large=np.zeros(39 << 20, np.uint8)))["large"] != before["large"]


def test_what_cannot_be_read_is_left_out():
    class Odd(dict):
        def values(self):
            raise OSError("gone")

        def __len__(self):
            return 300

        def __iter__(self):
            raise OSError("gone")

    loop = []
    loop += [loop] * 200
    found = texts(Of(loop=loop, odd=Odd(), text="a\ud800"))
    assert set(found) <= {"_n", "text", "loop"}


IN_PROCESSES = """
import numpy as np
from memfeed.convert.digests import digest_attributes, hash_value
from memfeed.convert.plain_data import leaves_of

class Record:
    def __init__(self, index):
        self.pairs, self.tags, self.text = {("a", index), ("b", None)}, {Tag("a"), Tag("b"), Tag("c")}, f"a{index}"

class Tag:
    def __init__(self, name):
        self.name = name
    def __hash__(self):
        return hash(self.name)
    def __eq__(self, other):
        return self.name == other.name

class Data:
    def __init__(self):
        self.records = [Record(i) for i in range(200)]
        self.pairs = {(f"a{i}", i) for i in range(200)} | {None, 3, "b"}
        self.sets = {frozenset((f"a{i}", "b", "c")) for i in range(200)}

digests = {path: one.text for path, one in digest_attributes(leaves_of(Data())).items()}
assert {"pairs", "sets", "records[*].pairs", "records[*].tags", "records[*].text"} <= digests.keys()
value = [{"a", "b", "c"}, {"x": 1, "y": [2.5, None, True]}, ("p", b"q"), np.arange(3)]
print(hash_value(value), digests)
"""


def test_of_a_large_set_some_values_count_in_no_order():
    """To sort a million of its words took seconds whenever an epoch began."""
    words = [f"word {i}" for i in range(5000)]
    some = hash_value({*words}, 64)
    assert some == hash_value({*reversed(words)}, 64)
    assert some != hash_value({*words, "another"}, 64)
    assert hash_value({*words}) == hash_value({*reversed(words)})
    assert hash_value({3, 1, 2}) == hash_value([1, 2, 3])


@pytest.mark.long
def test_digests_are_the_same_in_every_process():
    def run(seed):
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)}
        command = [sys.executable, "-c", IN_PROCESSES]
        return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout

    assert run("1") == run("2") == run("3")


def test_digests_of_sets_of_numbers_are_those_that_stores_have():
    assert hash_value({3, 1, 2}) == hash_value([1, 2, 3])
    pairs = {(3, 4), (1, 2), (5, 6)}
    assert hash_value(pairs) == hash_value(list(pairs)), "their order is the same in every process"


def test_tensors_of_a_list_are_hashed_as_each_of_them_is():
    whole = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)
    values = [
        whole,
        whole.mT,
        whole[:, ::2],
        whole[0, 0, :1],
        whole[:0],
        torch.tensor(3),
        whole.clone().requires_grad_(),
        whole.bfloat16(),
        whole.bool(),
        torch.view_as_complex(whole[..., :2].contiguous()).conj(),
        torch._neg_view(whole),
    ]
    one, other = xxhash.xxh3_64(), xxhash.xxh3_64()
    budgets = [digests._Budget(), digests._Budget()]
    digests._feed_tensors(one, values, budgets[0], 0)
    for value in values:
        digests._feed(other, value, budgets[1], 1)
    assert one.hexdigest() == other.hexdigest()
    assert (budgets[0].values, budgets[0].bytes) == (budgets[1].values, budgets[1].bytes)


def test_a_time_limit_of_the_caller_is_not_data_that_cannot_be_read():
    """It was swallowed, and what it came in was not compared."""

    def too_long(*_):
        raise TimeoutError

    class Slow(os.PathLike):
        def __fspath__(self):
            signal.raise_signal(signal.SIGALRM)
            return "name"

    before = signal.signal(signal.SIGALRM, too_long)
    try:
        with pytest.raises(TimeoutError):
            hash_value(Slow())
    finally:
        signal.signal(signal.SIGALRM, before)


def test_some_entries_of_a_large_dict_are_hashed():
    """Its pairs are not made for all of them: that took a second for five million, in each epoch."""
    table = {i: str(i) for i in range(100_000)}
    before = hash_value(table, some=SOME)
    assert before == hash_value([*table.items()], some=SOME)
    table[digests.chosen(len(table))[7]] = "another"
    assert hash_value(table, some=SOME) != before
