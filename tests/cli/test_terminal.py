"""Names from data and paths reach a terminal escaped: from every command, from the progress bar, in errors."""

import sys

import pytest
import torch

import memfeed
from memfeed.cli import main
from memfeed.errors import (
    BuildError,
    FieldError,
    MemfeedError,
    SampleError,
    SchemaError,
    SpaceError,
    StoreError,
    StoreNotFoundError,
)
from memfeed.system.messages import printable
from memfeed.system.progress import Progress, write_line

EVIL = "\x1b[2J\x1b]0;owned\x07\u202e"
SHOWN = r"\x1b[2J\x1b]0;owned\x07\u202e"
MODULE = f"""
import torch
def data():
    return {{{EVIL!r}: torch.arange(4)}}
def changed():
    return {{{EVIL!r}: torch.arange(4) + 1}}
"""


@pytest.fixture(autouse=True)
def _in_directory(tmp_path, monkeypatch):
    (tmp_path / "evil_sets.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "evil_sets", raising=False)


def is_harmless(text):
    return all(char.isprintable() or char in "\r\n" for char in text)


def test_cache_and_verify_send_no_codes(capsys):
    name = f"{EVIL}.mf"
    for words in (["cache", "evil_sets:data", name, "--progress"], ["verify", name, "--progress"], ["inspect", name]):
        assert main(words) == 0
        shown = capsys.readouterr()
        assert SHOWN in shown.out
        assert SHOWN in shown.err or words[0] == "inspect"
        assert is_harmless(shown.out), words
        assert is_harmless(shown.err), words
    assert main(["cache", "evil_sets:changed", name]) == 2
    shown = capsys.readouterr().err
    assert SHOWN in shown
    assert is_harmless(shown)


@pytest.mark.parametrize("kind", [BuildError, FieldError, SampleError, SchemaError, StoreError, StoreNotFoundError])
def test_the_text_of_an_error_is_escaped(kind):
    error = kind(f"field {EVIL}:\n\tfound \udc80")
    assert str(error) == f"field {SHOWN}:\n\tfound \\udc80"
    assert isinstance(error, MemfeedError)


def test_the_text_of_an_error_of_the_disk_is_escaped():
    error = SpaceError(28, f"{EVIL}: found no room")
    assert str(error) == f"[Errno 28] {SHOWN}: found no room"
    assert error.strerror == f"{EVIL}: found no room"


def test_the_progress_bar_escapes_its_title_and_lines(capsys):
    with Progress(EVIL, 2, unit=" rows", progress=True) as bar:
        bar.say(f"to {EVIL}")
        bar.advance(2)
    write_line(EVIL)
    shown = capsys.readouterr().err
    assert shown.count(SHOWN) >= 3
    assert is_harmless(shown)


def test_a_store_shows_its_names_escaped(path):
    store = memfeed.cache({EVIL: torch.arange(3)}, path, progress=False)
    assert f"  {SHOWN}: int64 []" in repr(store)
    assert is_harmless(repr(store))
    assert store.column(EVIL).tolist() == [0, 1, 2]
    with pytest.raises(FieldError) as caught:
        store.column("other")
    assert is_harmless(str(caught.value))


def test_text_without_codes_stays():
    assert printable("größe 图 x.y[0]") == "größe 图 x.y[0]"
