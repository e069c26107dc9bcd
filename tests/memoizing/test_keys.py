"""The key of a call: equal for equal calls, however they are written, and another one for another argument."""

import os
from pathlib import PurePosixPath

import numpy as np
import pytest

from memfeed.errors import SchemaError
from memfeed.memoizing.keys import Keys, encode_key, hash_content, note_file


def f(a, b=2, *rest, c=3, **more): ...


def plain(a, b=2): ...


def only_named(*, a=1): ...


def key(function, *arguments, **named):
    return Keys(function, "f", "d").of(arguments, named).text


@pytest.mark.parametrize(
    ("function", "one", "other"),
    [
        (plain, ((1,), {}), ((), {"a": 1, "b": 2})),
        (plain, ((1, 2), {}), ((1,), {"b": 2})),
        (f, ((1,), {}), ((), {"a": 1, "b": 2, "c": 3})),
        (f, ((1, 2), {"z": 1}), ((1,), {"z": 1, "b": 2})),
        (only_named, ((), {}), ((), {"a": 1})),
    ],
)
def test_a_call_has_one_key(function, one, other):
    assert key(function, *one[0], **one[1]) == key(function, *other[0], **other[1])


VALUES = [
    None, True, False, 0, 1, 2, -1, 1.0, -0.0, 0.0, float("nan"), float("inf"), 1e300, 10**40, "", "1", "None",
    "\ud800",
    b"", b"1", PurePosixPath("1"), (), [], {}, (1,), [1], {"a": 1}, {1: 1}, {"1": 1}, ((1,),), ([1],), [[1]],
    {"path": "1"},
    {"bytes": "31"}, np.int64(1), np.int32(1), np.float32(1), np.bool_(True), ["a", "b"], ["ab"], [1, [2]], [[1], 2],
]  # fmt: skip


def test_values_that_differ_have_keys_that_differ():
    keys = [key(plain, value) for value in VALUES]
    assert len(set(keys)) == len(VALUES)
    assert keys == [key(plain, value) for value in VALUES]


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    "value", [object(), {1.5: 1}, {None: 1}, {1}, np.zeros(2), 1j, np.complex64(1), Text("a"), len]
)
@pytest.mark.parametrize("nest", [lambda x: x, lambda x: [x], lambda x: {"a": (x,)}])
def test_what_no_key_can_hold(value, nest):
    with pytest.raises(SchemaError, match=r"f: found argument a of class \w+ \(of [\w.]+\); expected str"):
        key(plain, nest(value))


@pytest.mark.parametrize("call", [((), {}), ((1, 2, 3), {}), ((1,), {"c": 1}), ((1,), {"a": 1})])
def test_a_call_that_python_refuses_is_refused(call):
    with pytest.raises(TypeError):
        key(plain, *call[0], **call[1])


def test_functions_without_a_signature_take_their_arguments_as_they_are():
    keys = Keys(type("C", (), {"__call__": lambda self, *a: 0, "__signature__": 3})(), "f", "d")
    assert keys.of((1,), {"x": 2}).text != keys.of((2,), {"x": 2}).text


def test_name_and_digest_are_part_of_the_key():
    texts = {Keys(plain, name, digest).of((1,), {}).text for name in "fg" for digest in "de"}
    assert len(texts) == 4


def test_files_count_with_size_and_time(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_bytes(b"12")
    found = Keys(plain, "f", "d").of((str(path), [path]), {})
    assert found.files == {str(path): [2, path.stat().st_mtime_ns]}
    os.utime(path, ns=(1, 1))
    assert Keys(plain, "f", "d").of((str(path), [path]), {}).text != found.text
    monkeypatch.chdir(tmp_path)
    assert Keys(plain, "f", "d").of(("a.txt",), {}).files == {str(path): [2, 1]}


def test_directories_count_with_their_time(tmp_path):
    """A slice that is added to a series is seen. A word alone, such as "train", may mean something else."""
    (tmp_path / "one").write_bytes(b"1")
    texts = [Keys(plain, "f", "d").of((path, 1), {}).text for path in (str(tmp_path), tmp_path)]
    os.utime(tmp_path, ns=(1, 1))
    again = [Keys(plain, "f", "d").of((path, 1), {}).text for path in (str(tmp_path), tmp_path)]
    assert len({*texts, *again}) == 4


@pytest.mark.parametrize("text", ["", "a\0b", "x" * 5000, "/no/such/file", ".", "/dev/null"])
def test_text_that_is_no_file(text):
    files = {}
    note_file(text, files)
    assert files == {}


def test_content():
    assert hash_content(b"1") == hash_content(memoryview(b"1")) != hash_content(b"2")
    assert encode_key({"a": float("nan")}) == b'{"a":NaN}'


def test_content_that_is_too_large_has_no_hash(monkeypatch):
    monkeypatch.setattr("memfeed.memoizing.keys._MOST_BYTES", 3)
    assert hash_content(b"123") is not None
    assert hash_content(b"1234") is None
