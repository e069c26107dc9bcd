import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfeed.schema.names import StemAssigner, decode_key, encode_key, is_stem, same_file

KEYS = st.text(st.characters() | st.sampled_from("%/\\.: aA"), max_size=12)


def test_stems_are_the_encoded_keys_where_those_are_safe_and_free():
    expected = {
        ("image",): "image",
        ("a", "b"): "a/b",
        ("a.b",): "a.b",
        (0,): "0",
        ("data",): "data",
        ("meta",): "meta",
        ("a b",): "a%20b",
        ("50%",): "50%25",
        ("a/b", "c:d"): "a%2Fb/c%3Ad",
        ("\xe9",): "\xe9",
        ("x" * 200,): "x" * 200,
        ("Image",): "c0",
        ("0",): "c1",
        ("shape",): "c2",
        ("",): "c3",
        ("..",): "c4",
        (".build",): "c5",
        ("x" * 201,): "c6",
        ("image.memmap",): "c7",
        ("memfeed.json",): "c8",
        ("c0",): "c9",
        ("e\u0301",): "c10",  # the same accent as above, written in two characters
        ("\ud800",): "c11",
    }
    stems = StemAssigner()
    assert {path: stems.assign(path) for path in expected} == expected
    assert len({same_file(stem) for stem in expected.values()}) == len(expected)
    assert all(map(is_stem, expected.values()))


@pytest.mark.parametrize(
    "bad",
    ["", "..", ".", "a/../b", "/a", "a//b", "a b", "a\0", "a\\b", "%", "%2E", "%2e%2E", "%41", "a%2fb", "a%", "a%zz"]
    + [".hidden", "x/shape", "_type", "a.memmap", "a.COPY", "meta.json", "x" * 201, "\ud800"],
)
def test_unsafe_stems_are_recognised(bad):
    assert not is_stem(bad)


@given(KEYS)
def test_a_key_is_decoded_from_its_name(key):
    name = encode_key(key)
    assert decode_key(name) == key
    assert not {"/", "\\", "\0"} & set(name)


@given(st.lists(st.lists(KEYS, min_size=1, max_size=3).map(tuple), unique=True, max_size=8))
def test_stems_are_safe_and_unique(paths):
    stems = StemAssigner()
    leaves = [path for path in paths if not any(path == other[: len(path)] != other for other in paths)]
    assigned = [stems.assign(path) for path in leaves]
    assert all(map(is_stem, assigned))
    assert len({same_file(stem) for stem in assigned}) == len(leaves)


def test_names_are_those_of_tensordict():
    encoding = pytest.importorskip("tensordict._utils_key_json", reason="this tensordict does not encode names")
    for key in ("a b", "50%", "", "..", "a/b", "x:y", "\xe9", "\x7f", "a\tb", "<|>"):
        assert encode_key(key) == encoding._encode_key_for_filesystem(key)
