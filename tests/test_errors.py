"""The text of errors: cut to a width, and harmless in a terminal."""

import errno
import pickle

import pytest

from memfeed import errors
from memfeed.errors import FieldError, MemfeedError, StoreNotFoundError, brief, escape, listed

CLASSES = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, MemfeedError)]


@pytest.mark.parametrize(
    ("value", "width", "text"),
    [
        ("ab", 60, "'ab'"),
        ("a" * 58, 60, repr("a" * 58)),
        ("a" * 59, 60, "'" + "a" * 56 + "..."),
        ([], 3, "[]"),
        (10**9, 5, "10..."),
    ],
)
def test_brief(value, width, text):
    assert brief(value, width) == text
    assert len(brief(value, width)) <= width


@pytest.mark.parametrize(
    ("items", "width", "text"),
    [
        ([], 10, ""),
        (["a", "b"], 10, "a, b"),
        (["aaaa", "bbbb"], 10, "aaaa, bbbb"),
        (["aaaa", "bbbbb"], 10, "aaaa, and 1 more"),
        (["a" * 20, "b"], 10, "aaaaaaa..., and 1 more"),
        ([1, 2, 3, 4, 5], 6, "1, 2, and 3 more"),
        (["", ""], 0, ", and 1 more"),
    ],
)
def test_listed(items, width, text):
    assert listed(items, width) == text


@pytest.mark.parametrize(
    ("text", "keep", "escaped"),
    [
        ("plain é", "", "plain é"),
        ("a\x1b[31m", "", "a\\x1b[31m"),
        ("a\nb\t", "", "a\\nb\\t"),
        ("a\nb\t", "\n\t", "a\nb\t"),
        ("\ud800", "", "\\ud800"),
        ("\u202e'", "", "\\u202e'"),
        ("", "", ""),
    ],
)
def test_escape(text, keep, escaped):
    assert escape(text, keep) == escaped


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_each_error_shows_its_message_and_survives_a_pickle(cls):
    error = cls("found \x1b[0m; expected\nmore")
    assert str(error) == "found \\x1b[0m; expected\nmore"
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (cls, str(error))
    assert cls is MemfeedError or len(cls.__mro__) > len(MemfeedError.__mro__)


def test_errors_of_plain_python():
    assert str(FieldError()) == ""
    assert isinstance(FieldError("x"), KeyError)
    error = StoreNotFoundError("gone")
    assert isinstance(error, FileNotFoundError)
    assert error.errno == errno.ENOENT
