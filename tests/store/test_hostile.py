"""A store from a stranger can do no more than be wrong: attacks by name, then changes at random (see hostile.py)."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import hostile
import memfeed
from hostile import CORPUS, FIXTURES, Case, agree, exercise, tree_of, write_case
from memfeed.cli import main
from memfeed.errors import CorruptStoreError, SchemaError, StoreError
from memfeed.store import format


def claim(base: str, path: Path, change: Any) -> None:
    """A golden store with another manifest, its files and checksums as that says."""
    tree = tree_of(base)
    document = json.loads(tree["memfeed.json"])  # type: ignore[arg-type]
    change(document)
    tree["memfeed.json"] = json.dumps(document).encode()
    agree(tree)
    write_case(Case(base, tree), path)  # type: ignore[arg-type]


def field(number: int, **changes: Any) -> Any:
    return lambda document: document["schema"]["fields"][number].update(changes)


def node(**changes: Any) -> Any:
    return lambda document: document["schema"]["structure"].update(changes)


def empty_tuple_with_keys(document: Any) -> None:
    document["schema"]["structure"]["children"][-1] = {"kind": "tuple", "keys": ["x"]}


def int_keys_in_a_tensordict(document: Any) -> None:
    children = document["schema"]["structure"]["children"]
    keys = document["schema"]["structure"]["keys"]
    children[keys.index("batched")]["keys"] = [0]


def no_byte(document: Any) -> None:
    document["rows"] = 2**40
    document["schema"]["fields"] = document["schema"]["fields"][:1]
    document["schema"]["structure"] |= {"keys": ["fixed"], "children": [{"kind": "leaf"}]}


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        ("one", field(0, form="scalar"), r"fixed with shape \(2,\) in the form of a scalar"),
        ("numbers", field(0, form="list"), r"fixed with shape \(\) in the form of a list"),
        ("texts", field(0, form="scalar"), "in the form of a scalar"),
        ("jagged", field(1, stem="boxes/x"), "a field with the file name 'boxes/x' inside another"),
        ("no_elements", no_byte, "1099511627776 rows in no byte at all"),
        ("no_elements", field(0, shape=[2**48, 0, 2**20]), "too large to address|too many to address"),
        ("nested", empty_tuple_with_keys, "a tuple with keys"),
        ("nested", int_keys_in_a_tensordict, "a tensordict with keys that are no strings"),
        ("one", node(kind="shared", value="x"), "a value in the structure"),
        ("one", node(value=[1]), "a value in the structure"),
        ("one", node(kind="dict", keys=[2**70], children=[{"kind": "leaf"}]), "a key beyond 64 bits"),
        ("skipped", lambda document: document.update(skipped=[3, 1]), "skipped indices out of order"),
        ("skipped", lambda d: d["fingerprint"]["probes"][0]["hashes"].pop(), "a fingerprint that does not fit"),
    ],
)
def test_what_a_manifest_may_not_say(base: str, change: Any, message: str, path: Path) -> None:
    claim(base, path, change)
    with pytest.raises(StoreError, match=message):
        memfeed.open(path)


def test_text_that_is_no_utf8(path: Path) -> None:
    shutil.copytree(FIXTURES / "stores/one", path)
    text = (path / "memfeed.json").read_bytes()
    (path / "memfeed.json").write_bytes(text.replace(b'"name": "value"', b'"name": "\xff"'))
    with pytest.raises(StoreError, match=r"memfeed\.json: found a manifest that .*utf-8"):
        memfeed.open(path)


@pytest.mark.parametrize("name", ["memfeed.json", "checksums.bin", "one.memmap"])
@pytest.mark.parametrize("what", ["link", "fifo", "directory", "loop"])
def test_what_stands_in_the_place_of_a_file(name: str, what: str, path: Path, tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "stores/one", path)
    (path / "value.memmap").rename(path / "one.memmap")
    text = (path / "memfeed.json").read_text().replace("value.memmap", "one.memmap")
    (path / "memfeed.json").write_text(text.replace('"stem": "value"', '"stem": "one"'))
    memfeed.open(path).verify()
    (path / name).rename(tmp_path / "elsewhere")
    if what == "link":
        (path / name).symlink_to(tmp_path / "elsewhere")
    elif what == "loop":
        (path / name).symlink_to(name)
    elif what == "fifo":
        os.mkfifo(path / name)
    else:
        (path / name).mkdir()
    with pytest.raises(CorruptStoreError, match=f"{name}: found (a symbolic link|no plain file)"):
        memfeed.open(path)


def test_the_store_itself_may_be_named_by_a_link(path: Path) -> None:
    path.symlink_to(FIXTURES / "stores/one")
    memfeed.open(path).verify()


def test_names_that_are_one_to_python(path: Path) -> None:
    """Identifiers are normalised: a ligature and its letters would be one argument twice."""

    def change(document: Any) -> None:
        structure = document["schema"]["structure"]
        structure["children"][structure["keys"].index("point")] |= {"keys": ["\ufb01", "fi"]}

    claim("nested", path, change)
    with pytest.raises(SchemaError, match="expected Python names"):
        memfeed.open(path)[0]


def overwrite(file: Path, at: int, *numbers: int) -> None:
    file.chmod(0o644)
    data = bytearray(file.read_bytes())
    struct.pack_into(f"<{len(numbers)}q", data, at * 8, *numbers)
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("base", "stem", "at", "numbers"),
    [
        ("list", "picture", 0, (0, 2**62)),
        ("list", "picture", 0, (2**32, 2**32)),  # the product wraps round to 0
        ("list", "picture", 0, (-1, -1)),
        ("texts", "numberorNone", 2, (0,)),  # a number with no bytes
        ("texts", "numberorNone", 2, (-2,)),
    ],
)
def test_dims_that_lead_astray(base: str, stem: str, at: int, numbers: tuple[int, ...], path: Path) -> None:
    shutil.copytree(FIXTURES / "stores" / base, path)
    store = memfeed.open(path)
    names = {one.name.replace(" ", ""): one.stem for one in store.schema}
    overwrite(path / names[stem] / "dims.memmap", at, *numbers)
    row = at // len(numbers)
    for use in (lambda s: s[row], lambda s: s[:], lambda s: list(memfeed.Loader(s, 2))):
        with pytest.raises(CorruptStoreError, match=f"found row {row} of field"):
            use(memfeed.open(path))
    with pytest.raises(CorruptStoreError, match=r"dims\.memmap: found other bytes than were written"):
        store.verify()


@pytest.mark.parametrize("claimed", [2**62, 2**40, 2**32 + 1, -1])
def test_a_dim_of_nothing_hides_no_other(claimed: int, path: Path) -> None:
    """Rows [*, 0] take no place in the heap, so that nothing else bounds how many steps they have."""
    with memfeed.Writer(path) as writer:
        for steps in (1, 3):
            writer.append(torch.empty(steps, 0))
    assert [row.shape for row in memfeed.open(path)] == [(1, 0), (3, 0)]
    overwrite(path / "value" / "dims.memmap", 0, claimed)
    for use in (lambda s: s[0], lambda s: s[:], lambda s: list(memfeed.Loader(s, 2))):
        with pytest.raises(CorruptStoreError, match="found row 0 of field"):
            use(memfeed.open(path))


@pytest.mark.parametrize("by", [-1, 1, None])
def test_verify_looks_at_sizes_once_more(by: int | None, path: Path) -> None:
    shutil.copytree(FIXTURES / "stores/one", path)
    store = memfeed.open(path)
    file = path / "value.memmap"
    file.chmod(0o644)
    if by is None:
        file.unlink()
    else:
        os.truncate(file, file.stat().st_size + by)
    with pytest.raises(CorruptStoreError, match=r"value\.memmap: found"):
        store.verify()


@pytest.mark.parametrize("base", hostile.OURS)
def test_no_byte_of_a_column_changes_unseen(base: str, path: Path) -> None:
    shutil.copytree(FIXTURES / "stores" / base, path)
    store, rng = memfeed.open(path), random.Random(base)
    for name, size in store._view.manifest.files.items() if store._view.manifest else ():
        file = path / name
        file.chmod(0o644)
        data = file.read_bytes()
        for at in {0, size - 1, *(rng.randrange(size) for _ in range(3))} if size else ():
            file.write_bytes(data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :])
            with pytest.raises(CorruptStoreError, match=f"{name}: found other bytes"):
                store.verify()
        file.write_bytes(data)
    store.verify()


def test_inspect_sends_no_codes_to_the_terminal(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b[2J\x1b]0;owned\x07\u202e"
    claim("one", path, field(0, name=evil))
    assert main(["inspect", str(path)]) == 0
    overwrite(path / "value.memmap", 0, 7)
    assert main(["verify", str(path), "--no-progress"]) == 2
    shown = capsys.readouterr()
    assert r"\x1b[2J\x1b]0;owned\x07\u202e" in shown.out
    assert "\\x1b" in shown.err
    assert (shown.out + shown.err).replace("\n", "").isprintable()


def test_inspect_of_values_that_are_long_or_deep(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    TensorDict({"x": torch.zeros(2, 2**40, 0), "y": torch.zeros(2)}, [2]).memmap(path)
    assert main(["inspect", str(path)]) == 0
    assert "[1099511627776, 0] empty" in capsys.readouterr().out


# --- directories of tensordict


def td(path: Path, change: Any, name: str = "meta.json") -> None:
    shutil.copytree(FIXTURES / "tensordict-0.15.3", path)
    document = json.loads((path / name).read_text())
    change(document)
    (path / name).write_text(json.dumps(document))


def test_a_nested_tensor_of_no_rows_and_many_dims(path: Path) -> None:
    td(path, lambda d: d.update(none={"shape": [0, 2**48], "dtype": "torch.float32", "is_nested": True}))
    with pytest.raises(StoreError, match="found a nested tensor whose sizes are"):
        memfeed.open(path)


def test_metadata_that_is_deep(path: Path) -> None:
    deep: Any = 1
    for _ in range(400):
        deep = [deep]
    td(path, lambda d: d.update(data=deep), "split/meta.json")
    with pytest.raises(StoreError, match=r"split/meta\.json: found JSON nested deeper than 200"):
        memfeed.open(path)


def test_rows_in_no_byte(path: Path) -> None:
    path.mkdir()
    shape = [2**40]
    meta = {"shape": shape, "_type": "<class 'tensordict._td.TensorDict'>", "x": {"shape": [*shape, 0]}}
    meta["x"] |= {"dtype": "torch.float32"}  # type: ignore[operator]
    (path / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(StoreError, match=r"found 1,099,511,627,776 rows in no byte at all"):
        memfeed.open(path)


# --- at random


@pytest.mark.parametrize("case", sorted(CORPUS.glob("*.json")), ids=lambda path: path.stem)
def test_what_was_found_before(case: Path, tmp_path: Path) -> None:
    _, found = exercise(Case.from_json(case.read_text()), tmp_path / "s")
    assert found == []


def test_manifests_that_the_fuzzer_found() -> None:
    """Each takes another way through the decoder (fuzz_manifest.py)."""
    for path in sorted((FIXTURES / "manifests").iterdir()):
        with contextlib.suppress(StoreError):
            found = format.decode(path.read_bytes(), path)
            assert format.decode(format.encode(found), path) == found


def test_changes_at_random() -> None:
    counts = hostile.mutations(240, random.Random(7), cases=60)  # make torture runs more
    assert counts["cases"] == 60
    assert counts["opened"] > 0
    assert counts["refused"] > 0


def test_the_mutator_sees_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytearray(tree_of("one")["value.memmap"])  # type: ignore[arg-type]
    data[0] ^= 1
    case = Case("one", {"value.memmap": bytes(data)})
    assert Case.from_json(case.to_json()) == case
    assert exercise(case, tmp_path / "s") == (True, [])
    monkeypatch.setattr(memfeed.Store, "verify", lambda self: None)
    assert exercise(case, tmp_path / "s") == (True, ["verify: accepts columns that were changed"])
    monkeypatch.setattr(memfeed.Store, "tensordict", lambda self: [][1])
    assert any(found.startswith("tensordict: IndexError at") for found in exercise(case, tmp_path / "s")[1])
