"""Codecs from the text of a user, and from a manifest."""

import importlib.util

import pytest

from memfeed.codecs import codec_of, parse_codec
from memfeed.codecs.jpeg import Jpeg
from memfeed.codecs.lossless import Lz4, Zstd
from memfeed.errors import CorruptStoreError, StoreError


@pytest.mark.parametrize(
    ("text", "codec"),
    [
        ("jpeg", Jpeg(quality=95, subsampling="4:4:4")),
        ("jpeg:92", Jpeg(quality=92, subsampling="4:2:0")),
        ("jpeg:90:4:4:4", Jpeg(quality=90, subsampling="4:4:4")),
        ("lz4", Lz4()),
        ("zstd", Zstd(level=1)),
        ("zstd:3", Zstd(level=3)),
    ],
)
def test_text_and_manifest_give_the_codec(text, codec):
    assert parse_codec(text) == codec
    assert codec_of(codec.name, codec.parameters()) == codec


@pytest.mark.parametrize(
    "text",
    [
        "",
        "zip",
        "lz4:1",
        "lz4:",
        "zstd:",
        "zstd:0",
        "zstd:x",
        "zstd:1:2",
        "ZSTD",
        "jpeg:",
        "jpeg:0",
        "jpeg:101",
        "jpeg:90:",
        "jpeg:90:4:1:1",
        "jpeg:x",
    ],
)
def test_other_text_is_refused_with_what_is_possible(text):
    with pytest.raises(ValueError, match='expected "jpeg", .*"lz4", "zstd" or "zstd:LEVEL"'):
        parse_codec(text)


def test_an_unknown_codec_is_refused_by_name():
    with pytest.raises(StoreError, match="found the codec 'jxl'; .* a newer memfeed may know it"):
        codec_of("jxl", {})


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("zstd", {}),
        ("zstd", {"level": 0}),
        ("zstd", {"level": "1"}),
        ("zstd", {"level": 1, "more": 1}),
        ("lz4", {"a": 1}),
    ],
)
def test_parameters_that_a_codec_cannot_have_are_damage(name, parameters):
    with pytest.raises(CorruptStoreError, match=f"of the codec {name}"):
        codec_of(name, parameters)


@pytest.mark.parametrize(("name", "module"), [("lz4", "lz4"), ("zstd", "zstandard"), ("jpeg", "simplejpeg")])
def test_a_missing_library_is_an_error_with_the_line_to_install_it(monkeypatch, name, module):
    find = importlib.util.find_spec
    monkeypatch.setattr("memfeed.system.messages.find_spec", lambda wanted: None if wanted == module else find(wanted))
    for make in (
        lambda: parse_codec(name),
        lambda: codec_of(name, parse_codec.__globals__["CODECS"][name]().parameters()),
    ):
        with pytest.raises(ModuleNotFoundError, match=r"pip install 'memfeed\[codecs\]'"):
            make()
