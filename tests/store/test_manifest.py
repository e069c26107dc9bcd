import json

import msgspec
import pytest
import torch

import memfeed
from memfeed.errors import StoreError
from memfeed.store.manifest import manifest_problem
from support import Made, Point


@pytest.fixture
def store(path):
    samples = [{"a": torch.arange(3) + i, "p": Point(i, "x" * i), "r": torch.arange(i)} for i in range(5)]
    return memfeed.cache(Made(samples), path, progress=False)


def rewrite(store, change):
    file = store.path / "memfeed.json"
    document = json.loads(file.read_text())
    change(document)
    file.chmod(0o644)
    file.write_text(json.dumps(document))


def set_(*keys, to):
    def change(document):
        at = document
        for key in keys[:-1]:
            at = at[key]
        at[keys[-1]] = to

    return change


def test_a_manifest_of_a_store_has_no_problem(store):
    assert manifest_problem(store._view.manifest) == ""
    assert manifest_problem(msgspec.structs.replace(store._view.manifest, rows=-1)) == "-1 rows"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_("version", to=4), "found format version 4; this memfeed reads versions 1 to 3: upgrade memfeed"),
        (set_("format", to="other"), "found format 'other'; expected 'memfeed'"),
        (set_("rows", to=-1), "found -1 rows"),
        (set_("rows", to=6), "bytes for a.memmap, where its shape gives 144"),
        (set_("rows", to="5"), "breaks the format"),
        (set_("schema", "fields", 0, "stem", to="../x"), r"field 'a': the file name '\.\./x'"),
        (set_("schema", "fields", 0, "stem", to="/etc/passwd"), "the file name '/etc/passwd'"),
        (set_("schema", "fields", 0, "stem", to="q"), "a list of files that is not that of its fields"),
        (set_("schema", "fields", 0, "stem", to="p"), "a field with the file name 'p/[xy]' inside another field's"),
        (set_("schema", "fields", 0, "stem", to="R"), "two fields with the file name 'r'"),
        (set_("schema", "fields", 0, "dtype", to="object"), "the dtype 'object'"),
        (set_("schema", "fields", 0, "shape", to=[-3]), r"the shape \(-3,\)"),
        (set_("schema", "fields", 0, "shape", to=[2**40, 2**40]), "too large to address"),
        (set_("schema", "fields", 0, "shape", to=[None]), r"fixed with shape \(None,\)"),
        (set_("schema", "fields", 0, "path", to=["z"]), "fields that are not the leaves of the structure"),
        (set_("schema", "structure", "dim_names", to=[None, "time"]), "2 names for 1 dims"),
        (set_("schema", "fields", 0, "stem", to="a b"), "the file name 'a b'"),
        (set_("schema", "fields", 0, "stem", to="%2E%2E"), "the file name '%2E%2E'"),
        (set_("schema", "structure", "keys", to=["a", "p"]), "a dict whose keys do not match its parts"),
        (set_("schema", "structure", "children", 1, "name", to="os.system('x')"), "as a Python name"),
        (set_("files", "a.memmap", to=2**63 - 1), "bytes for a.memmap"),
        (set_("files", "../../x", to=3), "a list of files"),
        (set_("skipped", to=[-1]), "a skipped index out of range"),
        (set_("chunk_bytes", to=0), "checksum chunks of 0 bytes"),
    ],
)
def test_a_manifest_that_does_not_hold_together_is_refused(store, change, message):
    rewrite(store, change)
    with pytest.raises(StoreError, match=message):
        memfeed.open(store.path)


def test_nesting_is_bounded(store):
    def change(document):
        node = document["schema"]["structure"]
        for _ in range(70):
            node = {"kind": "list", "children": [node]}
        document["schema"]["structure"] = node

    rewrite(store, change)
    with pytest.raises(StoreError, match="deeper than 64"):
        memfeed.open(store.path)


@pytest.mark.parametrize("where", [(), ("schema",), ("schema", "fields", 0), ("schema", "structure"), ("fingerprint",)])
def test_a_key_that_the_format_does_not_know_is_damage(store, where):
    """One bit of a key, and its value would be taken for left out."""

    def change(document):
        for part in where:
            document = document[part]
        key = next(iter(document))
        document[key + "x"] = document[key]

    rewrite(store, change)
    with pytest.raises(StoreError, match="breaks the format"):
        memfeed.open(store.path)
