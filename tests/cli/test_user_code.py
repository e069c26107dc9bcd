"""Datasets, transforms and classes that the command line names."""

import sys

import pytest
import torch

from memfeed.cli.error_lines import UsageError
from memfeed.cli.user_code import load_classes, load_dataset, load_transform

SOURCE = """
import torch
data = [1, 2]
def train():
    pass
class Inside:
    rows = [3]
    class Deeper:
        rows = [4]
def make():
    return [5]
def needs(x):
    return x
def fails():
    raise ValueError("no data")
def leaves():
    raise SystemExit(3)
flip = torch.nn.Identity()
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "some_data_of_test.py").write_text(SOURCE)
    (tmp_path / "broken_of_test.py").write_text("import a_module_that_is_not_there")
    (tmp_path / "raising_of_test.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in [name for name in sys.modules if name.endswith("_of_test") and "loops" not in name]:
        del sys.modules[name]


M = "some_data_of_test"


@pytest.mark.parametrize(
    ("text", "found"),
    [(f"{M}:data", [1, 2]), (f"{M}:make", [5]), (f"{M}:Inside.rows", [3]), (f"{M}:Inside.Deeper.rows", [4])],
)
def test_datasets(text, found):
    assert load_dataset(text) == found


def test_a_step_without_a_batch_that_makes_nothing():
    """A step that trains and takes no batch was called once, and its None was taken for no step."""
    with pytest.raises(UsageError, match="found that it takes no batch, and returns None; expected a function of a "):
        load_transform(f"{M}:train")


def test_transforms():
    assert isinstance(load_transform(f"{M}:flip"), torch.nn.Identity)
    assert load_transform(f"{M}:needs")(7) == 7  # it takes a batch
    assert load_transform(f"{M}:make") == [5]  # it makes a transform
    assert load_transform(f"{M}:data") == [1, 2]


def test_classes():
    (found,) = load_classes([f"{M}:Inside"])
    assert found.__name__ == "Inside"
    assert load_classes([]) == ()
    with pytest.raises(UsageError, match="found 'some_data_of_test:data', which is a list; expected a class"):
        load_classes([f"{M}:data"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data", "found 'data'; expected module:name, for example my_data:make_train"),
        ("a/b.py:make", "for example a.b:make for a/b.py"),
        ("./b.py:make", "for example b:make for b.py"),
        ("b.py", "for example b:make_train for b.py"),
        ("../b.py:make", "for example my_data:make_train for my_data.py"),
        (f"{M}:", "expected module:name"),
        (":data", "expected module:name"),
        (f"{M}:a b", "expected module:name"),
        (f"{M}:a..b", "expected module:name"),
        (f"{M}.py", "expected module:name"),
        ("", "expected module:name"),
        (f"{M}:nothing", "found no 'nothing' in some_data_of_test"),
        (f"{M}:Inside.nothing", "found no 'nothing' in some_data_of_test"),
        ("sys:nothing", r"found no 'nothing' in sys \(built in\)"),
        ("not_there_of_test:x", "found no module 'not_there_of_test' in"),
        (f"{M}.inner:x", f"found no module '{M}.inner'|importing {M}.inner raised"),
        ("broken_of_test:x", "importing broken_of_test raised ModuleNotFoundError"),
        ("raising_of_test:x", "importing raising_of_test raised ZeroDivisionError"),
        (f"{M}:fails", "calling some_data_of_test:fails raised ValueError: no data"),
        (f"{M}:leaves", "calling some_data_of_test:leaves raised SystemExit: 3"),
        (f"{M}:needs", "calling some_data_of_test:needs raised TypeError"),
    ],
)
def test_what_cannot_be_loaded(text, message):
    with pytest.raises(UsageError, match=message):
        load_dataset(text)


def test_an_interrupt_is_no_error_of_the_users_code(monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    load_dataset(f"{M}:data")
    monkeypatch.setattr(sys.modules[M], "make", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_dataset(f"{M}:make")
