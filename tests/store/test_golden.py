"""Stores that the first versions of the format wrote, byte for byte, and what each of their rows must be.

fixtures/make_stores.py wrote them and the literals beside them, from the samples themselves.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from torchvision import tv_tensors

import memfeed
from memfeed.codecs import CODECS
from memfeed.schema.fields import DTYPES
from memfeed.store import format

FIXTURES = Path(__file__).parents[1] / "fixtures"
sys.path.insert(0, str(FIXTURES))

import make_stores  # noqa: E402

STORES = FIXTURES / "stores"


def files_of(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


@pytest.fixture(params=make_stores.NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def read_only(name: str, path: Path) -> Path:
    shutil.copytree(STORES / name, path)
    for part in [path, *path.rglob("*")]:
        part.chmod(0o555 if part.is_dir() else 0o444)
    return path


def test_every_row_is_what_was_written(name: str, read_only: Path) -> None:
    expected = json.loads((STORES / f"{name}.json").read_text())
    before = files_of(read_only)
    store = memfeed.open(read_only, types=make_stores.TYPES)
    store.verify()
    assert len(store) == len(expected)
    got: list[Any] = [json.loads(json.dumps(make_stores.literal(store[row]))) for row in range(len(store))]
    assert got == expected
    assert len(list(memfeed.Loader(store, 2))) == -(-len(store) // 2)
    assert files_of(read_only) == before


def _renamed(files: dict[str, bytes], stems: dict[str, str]) -> dict[str, bytes]:
    """The files of a store whose columns have other names."""
    for old, new in stems.items():
        texts = {f'"{old}{end}': f'"{new}{end}' for end in ('"', "/", ".memmap")}
        for was, now in texts.items():
            files[format.MANIFEST] = files[format.MANIFEST].replace(was.encode(), now.encode())
        files = {
            new + file.removeprefix(old) if file.startswith((f"{old}/", f"{old}.memmap")) else file: data
            for file, data in files.items()
        }
    return files


def test_a_store_is_written_today_as_it_was(name: str, path: Path) -> None:
    """All but tensordict's own metadata, the hash of the dataset's source text in the fingerprint, and odd names.

    Names with characters other than letters, digits, _ and - were ``c<N>`` before they were encoded.
    """
    make_stores.write(name, path)
    now, then = files_of(path), files_of(STORES / name)
    if name == "coded":  # libraries of codecs may write other bytes; `test_every_row_is_what_was_written` reads these
        assert now.keys() == then.keys()
        return
    old, new = (format.decode(files[format.MANIFEST], path).schema for files in (then, now))
    stems = {was.stem: is_now.stem for was, is_now in zip(old, new, strict=True) if was.stem != is_now.stem}
    assert all(re.fullmatch(r"(.*/)?c\d+", stem) for stem in stems)
    then = _renamed(then, stems)
    if name in ("skipped", "attributes"):
        for files in (now, then):
            manifest = json.loads(files[format.MANIFEST])
            del manifest["fingerprint"]["source"], manifest["fingerprint"]["source_name"]
            manifest["fingerprint"].pop("digests", None)  # stores of that time have none
            files[format.MANIFEST] = json.dumps(manifest).encode()
    if name == "later" and not hasattr(tv_tensors, "KeyPoints"):  # as torchvision 0.21: boxes without this
        then[format.MANIFEST] = then[format.MANIFEST].replace(b',\n      "clamping_mode": "soft"', b"")
    assert now.keys() == then.keys()
    assert [file for file in now if now[file] != then[file] and not file.endswith("meta.json")] == []


def test_every_dtype_and_kind_is_among_them() -> None:
    schemas = [memfeed.open(STORES / name).schema for name in make_stores.NAMES]
    fields = [field for schema in schemas for field in schema]
    assert {field.dtype for field in fields if field.kind == "fixed"} >= {*DTYPES}
    assert {field.kind for field in fields} == {"fixed", "jagged", "list", "str", "bytes", "json"}
    assert {field.form for field in fields} == {"tensor", "scalar", "list"}
    assert {field.kind for field in fields if field.optional} == {"list", "str"}
    coded = [field.coding for field in memfeed.open(STORES / "coded")._view.manifest.schema if field.coding]
    assert {coding.codec for coding in coded} == {*CODECS}


def test_the_versions_and_the_attributes() -> None:
    versions = {
        name: json.loads((STORES / name / format.MANIFEST).read_text())["version"] for name in make_stores.NAMES
    }
    expected = {name: 2 if name in make_stores.VERSION_2 else 1 for name in make_stores.NAMES}
    assert versions == {**expected, "coded": 3}
    store, dataset = memfeed.open(STORES / "attributes"), make_stores.Attributes()
    assert store.classes == dataset.classes
    assert store.class_to_idx == dataset.class_to_idx
    assert store.targets == dataset.targets
    assert store.metadata == {"license": "CC0", "rates": [8000, 0.5]}


def test_they_are_small() -> None:
    for name in make_stores.NAMES:
        assert sum(map(len, files_of(STORES / name).values())) < 50_000
