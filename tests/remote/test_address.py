from pathlib import Path

import pytest

import memfeed
from memfeed.errors import StoreError
from memfeed.remote.connections import is_address, parse_address
from memfeed.store.backing import Backing


@pytest.mark.parametrize(
    ("text", "kind", "shown", "name"),
    [
        ("s3://bucket/data/ants.mf", "s3", "s3://bucket/data/ants.mf", "ants.mf"),
        ("S3://bucket/ants.mf/", "s3", "s3://bucket/ants.mf", "ants.mf"),
        ("s3://bucket", "s3", "s3://bucket", "bucket"),
        ("gs://bucket/a", "gs", "gs://bucket/a", "a"),
        ("az://container/a", "az", "az://container/a", "a"),
        ("azure://container/a", "az", "azure://container/a", "a"),
        ("https://host:8080/a%20b.mf", "http", "https://host:8080/a%20b.mf", "a b.mf"),
        ("file:///data/ants.mf", "file", "file:///data/ants.mf", "ants.mf"),
        ("memory://x/y", "memory", "memory://x/y", "y"),
    ],
)
def test_an_address_is_its_kind_and_name(text, kind, shown, name):
    found = parse_address(text)
    assert (found.kind, str(found), found.name) == (kind, shown, name)
    assert is_address(text)
    assert parse_address(found) is found


def test_what_pathlib_made_of_an_address_is_that_address():
    for text in ("s3://bucket/ants.mf", "file:///data/ants.mf", "https://host/ants.mf"):
        assert parse_address(Path(text)) == parse_address(text)


@pytest.mark.parametrize("text", ["/data/ants.mf", "ants.mf", "C_/x", "a:b/c", 3, None])
def test_a_path_is_no_address(text):
    assert not is_address(text)


def test_credentials_are_never_shown():
    found = parse_address("https://user:PASSWORD@host/a?sig=SIGNATURE")
    for text in (str(found), repr(found), f"{found}"):
        assert "PASSWORD" not in text
        assert "SIGNATURE" not in text
        assert "user" not in text
    assert "PASSWORD" in found.url


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ftp://host/a", "unknown scheme"),
        ("s3:///a", "without a bucket"),
        ("https:///a", "without a bucket or host"),
        ("file://host/a", "absolute path"),
        ("file:///", "absolute path"),
        ("s3://key:PASSWORD@bucket/a", "credentials come from the environment"),
        ("s3://bucket/a?sig=PASSWORD", "credentials come from the environment"),
        ("s3://bucket:PASSWORD/a", "that is none"),
        ("ants.mf", "a path"),
    ],
)
def test_a_bad_address_is_one_clear_error(text, says):
    with pytest.raises(StoreError, match=says) as raised:
        parse_address(text)
    assert "PASSWORD" not in str(raised.value)
    assert len(str(raised.value)) < 400


def test_the_parts_of_a_store_do_not_show_how_it_is_opened_again(tmp_path):
    schema = memfeed.cache([1, 2], tmp_path / "s.mf", progress=False).schema
    backing = Backing(None, schema, 2, "", lambda index: None, remake=(print, ("http://ada:secret@host/a.mf",)))
    assert "secret" not in repr(backing)
