"""Hashes of the source of datasets: what an edit between two runs changes, and what no edit changes."""

import importlib
import inspect
import linecache
import os
import sys
import warnings

import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

import memfeed
from memfeed.convert.source_hash import hash_source, is_changed_source


class Plain(Dataset):
    pass


class Other(Dataset):
    x = 1


def test_source_is_that_of_the_class_and_of_those_inside():
    assert hash_source(Plain()) == hash_source(Plain())
    assert hash_source(Plain())[1].endswith(".Plain")
    assert hash_source(Plain())[0] != hash_source(Other())[0]
    assert hash_source(Subset(Plain(), [0]))[0] != hash_source(Subset(Other(), [0]))[0]
    assert hash_source([1])[1] == "builtins.list"


def test_a_class_without_source_and_a_circle_end():
    made = type("Made", (), {})()
    made.dataset = made
    assert hash_source(made)[0] == hash_source(made)[0]


def test_a_class_whose_file_was_changed_to_what_is_no_python(tmp_path, monkeypatch):
    (tmp_path / "edited_later.py").write_text("class Edited:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    made = importlib.import_module("edited_later").Edited()
    (tmp_path / "edited_later.py").write_text("class Edited:\n    def f(:\n")
    assert hash_source(made)[1] == "edited_later.Edited"


def test_a_source_is_found_once_until_its_file_is_written_again(tmp_path, monkeypatch):
    code = "def size(): return 1\nclass Kept:\n    def read(self): return size()\n"
    (tmp_path / "kept_source.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    made = importlib.import_module("kept_source").Kept()
    found, asked, getsource = [], [], inspect.getsource
    monkeypatch.setattr(inspect, "getsource", lambda one: asked.append(one) or getsource(one))
    for text in (code, code, code.replace("1", "100"), code.replace("read", "reads")):
        (tmp_path / "kept_source.py").write_text(text)
        os.utime(tmp_path / "kept_source.py", (1, 1))
        linecache.checkcache()
        found.append((hash_source(made)[0], len(asked)))
    hashes, counts = zip(*found, strict=True)
    assert counts == (3, 3, 6, 9), "the class and its functions, when their file is another one"
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3


CALLS = """
class Base:
    def size(self): return 1  # {base}
class Proxy:
    def __getattr__(self, name): raise KeyError(name)
class First: proxy = Proxy()
class Found(Base):
    def __getattr__(self, name): raise KeyError(name)
    def __getitem__(self, i):
        if i == 9:
            import imported_at_times
            return imported_at_times.go(i)
        return made(i), First, Second().go(i)
class Second:
    def go(self, i): return i  # {other}
{made}
"""


def calling(tmp_path, monkeypatch, made, **words):
    text = CALLS.replace("{made}", made)
    for word in ("base", "other"):
        text = text.replace("{" + word + "}", words.get(word, ""))
    return source_hash(tmp_path, monkeypatch, text)


def source_hash(tmp_path, monkeypatch, text):
    return hash_source(made_from(tmp_path, monkeypatch, text).Found())[0]


def made_from(tmp_path, monkeypatch, text):
    (tmp_path / "calling.py").write_text(text)
    linecache.clearcache()
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "calling", raising=False)
    importlib.invalidate_caches()
    return importlib.import_module("calling")


@pytest.mark.parametrize("place", ["base", "other"])
def test_a_changed_base_class_or_class_that_a_method_names_is_a_change(tmp_path, monkeypatch, place):
    one, again, other = (
        calling(tmp_path, monkeypatch, "made = len", **{place: word}) for word in ("one", "one", "other")
    )
    assert one == again
    assert is_changed_source(one, other)


def test_a_function_of_no_module_counts(tmp_path, monkeypatch):
    made = "exec('def made(x): return x + {}', names := dict()); made = names['made']"
    one, again, other = (calling(tmp_path, monkeypatch, made.format(number)) for number in (1, 1, 2))
    assert not is_changed_source(one, again)
    assert is_changed_source(one, other)


def test_a_module_that_only_one_of_two_programs_has_imported_is_no_change(tmp_path, monkeypatch):
    name = "imported_at_times"
    without = calling(tmp_path, monkeypatch, "made = len")
    found = []
    for number in (1, 2):
        (tmp_path / f"{name}.py").write_text(f"def go(x): return x + {number}")
        monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.import_module(name)
        found.append(calling(tmp_path, monkeypatch, "made = len"))
    monkeypatch.delitem(sys.modules, name)
    assert without not in found
    assert not is_changed_source(without, found[0])
    assert not is_changed_source(found[0], without)
    assert is_changed_source(*found)


PARTS = """
import functools
import torch
K = {edit}
def go(x, k=1): return x + {edit}
class Sized:
    size = {edit}
    def __call__(self, x): return x * self.size
class Step:
    def __call__(self, x): return self.do(x)
    def do(self, x): return go(x)
class Compose:
    def __init__(self, steps): self.steps = steps
    def __call__(self, x): return self.steps[0](x)
def twice(function):
    @functools.wraps(function)
    def inner(*args): return function(*args) + {edit}
    return inner
@twice
def doubled(x): return x
LOAD = functools.partial(go, k=2)
STEP = Step()
class Found:
    def __init__(self): self.step = {attribute}
    def __getitem__(self, i): return {sample}
    {member}
"""
HELD = ["Step()", "[Step()]", "{'a': Step()}", "Compose([Step()])", "functools.partial(go, k=2)", "Step().do", "go"]


@pytest.mark.parametrize(
    "words",
    [
        *({"attribute": held} for held in HELD),
        *({"sample": sample} for sample in ("LOAD(i)", "STEP(i)", "doubled(i)")),
        {"member": "@twice\n    def other(self, i): return i"},
        {"member": "@functools.cached_property\n    def table(self): return go(1)"},
        {"member": "@functools.lru_cache(8)\n    def table(self): return go(1)"},
        {"member": "@torch.no_grad()\n    def table(self): return go(1)"},
        {"member": "def table(self, k=K): return k"},
        {"member": "step_of_class = Step()"},
        {"sample": "i + K"},
        {"sample": "Sized()(i)"},
        {"attribute": "Sized()"},
    ],
    ids=str,
)
def test_an_edit_of_what_a_dataset_calls_is_a_change(tmp_path, monkeypatch, words):
    one, again, other = (edited_parts(tmp_path, monkeypatch, edit, **words) for edit in ("1", "1", "2"))
    assert one == again
    assert is_changed_source(one, other)


SETTINGS = """
import argparse
import calling_config as config
from calling_config import Config, MEANS, SIZE
args = argparse.Namespace(size=config.OF_ARGS, rate=config.RATE)
class Found:
    def __getitem__(self, i): return {sample}
"""
CONFIG = "SIZE = 1\nMEANS = (1,)\nOF_ARGS = 1\nRATE = 1\nclass Config:\n    SIDE = 1\n    RATE = 1\n"


@pytest.mark.parametrize(
    ("sample", "edited"),
    [
        ("SIZE", "SIZE = "),
        ("MEANS", "MEANS = ("),
        ("config.SIZE", "SIZE = "),
        ("args.size", "OF_ARGS = "),
        ("Config.SIDE", "SIDE = "),
    ],
)
def test_an_edit_of_a_setting_in_another_file_is_a_change(tmp_path, monkeypatch, sample, edited):
    def settings(*edits):
        config = CONFIG
        for edit in edits:
            config = config.replace(f"{edit}1", f"{edit}2")
        (tmp_path / "calling_config.py").write_text(config)
        monkeypatch.delitem(sys.modules, "calling_config", raising=False)
        return source_hash(tmp_path, monkeypatch, SETTINGS.replace("{sample}", sample))

    one, again, other = settings(), settings("RATE = "), settings(edited)
    assert one == again, "no method names it"
    assert is_changed_source(one, other)


def test_what_reading_a_sample_counts_is_no_setting(tmp_path, monkeypatch):
    text = """
class Stats:
    def __init__(self): self.read, self.size = 0, 3
    def add(self): self.read += 1
STATS = Stats()
class Found:
    def __getitem__(self, i):
        STATS.add()
        return i * STATS.size + STATS.read
"""
    found = made_from(tmp_path, monkeypatch, text)
    before = hash_source(found.Found())
    found.Found()[0]
    assert hash_source(found.Found()) == before
    found.STATS.size = 4
    assert is_changed_source(hash_source(found.Found())[0], before[0])


def test_an_edit_of_what_a_dataset_does_not_call_is_no_change(tmp_path, monkeypatch):
    one, other = (edited_parts(tmp_path, monkeypatch, edit) for edit in ("1", "2"))
    assert one == other


def test_an_edit_of_what_a_dataclass_keeps_beside_what_is_read_is_no_change(tmp_path, monkeypatch):
    """It warned of a learning rate in a config that the dataset has as an attribute."""
    text = """
import dataclasses
@dataclasses.dataclass
class Config:
    size: int = 1
    rate: float = {edit}
    def area(self): return self.size ** 2{more}
class Found:
    def __init__(self): self.config = Config()
    def __getitem__(self, i): return i * self.config.size
"""
    one, same, other = (
        source_hash(tmp_path, monkeypatch, text.replace("{edit}", edit).replace("{more}", more))
        for edit, more in (("1", ""), ("2", ""), ("2", " + 1"))
    )
    assert not is_changed_source(one, same)
    assert is_changed_source(one, other)


def edited_parts(tmp_path, monkeypatch, edit, **words):
    text = PARTS.replace("{edit}", edit)
    for word, default in (("attribute", "None"), ("sample", "i"), ("member", "pass")):
        text = text.replace("{" + word + "}", words.get(word, default))
    return source_hash(tmp_path, monkeypatch, text)


def test_no_file_is_searched_for_each_class_that_is_called(tmp_path, monkeypatch):
    """To find a class in a file parses all of it: 256 classes of 9,000 lines took a minute."""
    asked, getsource = [], inspect.getsource
    monkeypatch.setattr(inspect, "getsource", lambda code: asked.append(code) or getsource(code))
    calling(tmp_path, monkeypatch, "made = len")
    assert [one.__name__ for one in asked if isinstance(one, type)] == ["Found"]


class Ones(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return 1


class Twos(Ones):
    def __getitem__(self, index):
        return 2


class Outer(Ones):
    def __init__(self, base):
        self.base = base


@pytest.mark.parametrize("wrapped", [Outer, lambda one: ConcatDataset([one, one]), lambda one: Subset(one, [0])])
def test_the_classes_of_datasets_inside_count(wrapped):
    assert hash_source(wrapped(Ones())) == hash_source(wrapped(Ones()))
    one, other = (hash_source(wrapped(inner))[0] for inner in (Ones(), Twos()))
    assert is_changed_source(one, other)


def test_of_a_cut_dataset_the_class_is_the_one_of_the_user(path):
    v2 = pytest.importorskip("torchvision.transforms.v2")

    class Cropped(Ones):
        transform = v2.RandomCrop(4)

        def __getitem__(self, index):
            return self.transform(torch.full((3, 8, 8), index, dtype=torch.uint8))

    store = memfeed.cache(Cropped(), path, split=True, workers=0, progress=False)
    assert store._view.manifest.fingerprint.source_name.endswith("Cropped")


CROPPED = """
import random
import torch
from torch.utils.data import Dataset
from torchvision.transforms import v2
class Fixed:
    def __call__(self, image): return image.clamp(0, FIXED)
class Drawn:
    def __call__(self, image): return image + random.random() * DRAWN
class Cropped(Dataset):
    def __init__(self): self.transform = v2.Compose([Fixed(), v2.RandomCrop(4), Drawn()])
    def __len__(self): return 4
    def __getitem__(self, index): return self.transform(torch.full((3, 8, 8), float(index)))
"""


@pytest.mark.parametrize(("edited", "counts"), [("FIXED", True), ("DRAWN", False)])
def test_of_a_cut_dataset_the_source_of_the_steps_before_the_cut_counts(tmp_path, monkeypatch, edited, counts):
    """Those after it are run again in each epoch, as they are now."""
    pytest.importorskip("torchvision.transforms.v2")
    found = []
    for value in ("200", "201"):
        text = CROPPED.replace(edited, value).replace("FIXED", "200").replace("DRAWN", "0.5")
        made = made_from(tmp_path, monkeypatch, text).Cropped()
        store = memfeed.cache(made, tmp_path / value, split=True, workers=0, progress=False)
        found.append(store._view.manifest.fingerprint.source)
    assert is_changed_source(*found) == counts


CELL = """
class Numbers:
    def __len__(self):
        return 60

    def __getitem__(self, i):
        return i{change}
"""


@pytest.mark.parametrize("has_lines", [False, True])
def test_a_class_of_a_notebook_that_changes_is_told(path, has_lines):
    """A notebook keeps the lines of its cells; a prompt keeps none."""

    def run(change, number):
        text, file = CELL.format(change=change), f"<cell {number}>"
        if has_lines:
            linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        names = {"__name__": "__main__"}
        exec(compile(text, file, "exec"), names)
        return names["Numbers"]()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        memfeed.cache(run("", 1), path, workers=0, progress=False)
        memfeed.cache(run("", 2), path, workers=0, progress=False)
    with pytest.warns(UserWarning, match="the source of __main__.Numbers, or of what it calls, has changed since"):
        memfeed.cache(run(" + (i == 41) * 9", 3), path, workers=0, progress=False)
