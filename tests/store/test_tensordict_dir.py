"""Every kind of directory that tensordict writes: the rows and batches of its own reader, or an error with a name."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import (
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_tensorclass,
    lazy_stack,
    tensorclass,
)

from memfeed.errors import CorruptStoreError, StoreError
from memfeed.store import format, tensordict_dir
from memfeed.store.format import LARGEST_JSON
from memfeed.store.opened import open as open_store
from memfeed.store.store import Store
from tensordicts import (
    ENCODED,
    KINDS,
    Inner,
    Sample,
    _classes,
    _lazy,
    _lazy_classes,
    _non_tensors,
    _piece,
    _plain,
    _sample,
    numbers,
)


def _is_container(value: Any) -> bool:
    return isinstance(value, TensorDictBase) or (is_tensorclass(value) and not isinstance(value, NonTensorData))


def _value(container: Any, key: str) -> Any:
    return getattr(container, key) if is_tensorclass(container) else container[key]


def _keys(container: Any) -> set[str]:
    return {key for key in container.keys() if _value(container, key) is not None or not is_tensorclass(container)}  # noqa: SIM118


def _check_row(ours: Any, theirs: Any) -> None:
    if _is_container(theirs):
        assert _keys(ours) == _keys(theirs)
        assert ours.batch_size == theirs.batch_size
        for key in _keys(theirs):
            _check_row(_value(ours, key), _value(theirs, key))
    elif isinstance(theirs, torch.Tensor):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    else:
        assert type(ours) is type(theirs) or isinstance(theirs, list)
        assert ours == theirs


def _ragged(container: Any) -> bool:
    """Whether a batch holds a jagged tensor or a list of tensors, so that its own batch_size is [k]."""
    values = [_value(container, key) for key in _keys(container)]
    return any(
        _ragged(value)
        if _is_container(value)
        else getattr(value, "is_nested", isinstance(value, list) and isinstance(value[0], torch.Tensor))
        for value in values
    )


def _check_batch(ours: Any, theirs: Any, rows: list[Any]) -> None:
    """``ours`` is the batch ``theirs`` of the rows ``rows``, which tensordict may be unable to stack itself."""
    if _is_container(rows[0]):
        assert _keys(ours) == _keys(rows[0])
        assert tuple(ours.batch_size) == (len(rows), *(() if _ragged(ours) else rows[0].batch_size))
        for key in _keys(rows[0]):
            their_rows = [_value(row, key) for row in rows]
            theirs_too = None if isinstance(their_rows[0], torch.Tensor) else _value(theirs, key)
            _check_batch(_value(ours, key), theirs_too, their_rows)
    elif isinstance(rows[0], torch.Tensor):
        for row, their in zip(ours.unbind(0) if isinstance(ours, torch.Tensor) else ours, rows, strict=True):
            _check_row(row, their)
    else:
        assert ours == theirs


def _outline(value: Any) -> Any:
    return {key: _outline(_value(value, key)) for key in _keys(value)} if _is_container(value) else None


def _loaded(path: Path, written: Any) -> Any:
    """What tensordict's own reader makes of ``path``; what was written where it loses a leaf (0.8: the empty ones)."""
    loaded = TensorDict.load_memmap(path, **ENCODED)
    first = 0 if written.batch_dims else ...
    return loaded if _outline(loaded[first]) == _outline(written[first]) else written


@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_batches_are_those_of_load_memmap(kind: str, tmp_path: Path) -> None:
    written = KINDS[kind]()
    written.memmap(tmp_path / "td", **ENCODED)
    theirs = _loaded(tmp_path / "td", written)
    store = open_store(tmp_path / "td")
    n = len(theirs)
    assert len(store) == n
    rows = [theirs[i] for i in range(n)]
    for i in range(n):
        _check_row(store[i], rows[i])
        assert not is_tensorclass(store[i])
    _check_batch(store[:], theirs, rows)
    _check_batch(store[[n - 1, 0, n - 1]], theirs[[n - 1, 0, n - 1]], [rows[n - 1], rows[0], rows[n - 1]])
    _check_batch(store.subset([n - 1, 0])[:2], theirs[[n - 1, 0]], [rows[n - 1], rows[0]])
    _check_batch(store.tensordict(), theirs, rows)
    for sample, row in zip(store.__getitems__(range(n)), rows, strict=True):
        _check_row(sample, row)


@pytest.mark.parametrize("make", [_classes, _lazy_classes])
def test_a_tensorclass_comes_back_with_types(make: Any, tmp_path: Path) -> None:
    make().memmap(tmp_path / "td")
    theirs = TensorDict.load_memmap(tmp_path / "td")
    store = open_store(tmp_path / "td", types=(Sample, Inner))
    for i in range(len(theirs)):
        assert type(store[i]) is Sample
        assert type(store[i].inner) is Inner
        assert store[i].missing is None
        assert store[i].note == theirs[i].note
        _check_row(store[i], theirs[i])
    batch = store[:2]
    assert type(batch) is Sample
    assert type(batch.inner) is Inner
    _check_batch(batch, theirs[:2], [theirs[0], theirs[1]])


def test_a_shared_list_as_long_as_the_batch_stays_shared(tmp_path: Path) -> None:
    _non_tensors().memmap(tmp_path / "td")
    store = open_store(tmp_path / "td")
    assert store[:][0]["as_long_as_the_batch"] == [1, 2, 3]
    assert isinstance(store[:2].get("as_long_as_the_batch"), NonTensorData)


def test_the_class_given_must_have_the_fields(tmp_path: Path) -> None:
    _sample(2).memmap(tmp_path / "td")
    wrong = type("Sample", (), {"_fields": ("image",)})
    with pytest.raises(TypeError, match="found a tensorclass Sample with the fields"):
        open_store(tmp_path / "td", types=(wrong,))[0]


def test_fields_say_what_a_batch_is(tmp_path: Path) -> None:
    _lazy().memmap(tmp_path / "td")
    store = open_store(tmp_path / "td")
    assert {field.name: field.describe() for field in store.schema} == {
        "same": "int64 [2, 2]",
        "scalar": "int64 []",
        "ids": "jagged int64 [*]",
        "mask": "jagged bool [*]",
        "image": "jagged float32 [3, *, 2]",
        "empty": "float32 [0, 3]",
        "sometimes": "jagged float32 [*]",
        "text": "str",
        "tree": "json",
        "deep.er.x": "jagged float32 [*, 2]",
    }
    assert store.schema.fields[-1].path == ("deep", "er", "x")
    batch = store[[0, 11, 3]]
    assert batch["same"].shape == (3, 2, 2)
    assert batch["ids"].offsets() is batch["mask"].offsets()
    assert (batch["ids"] * batch["mask"]).is_nested
    assert store.nbytes == sum(file.stat().st_size for file in (tmp_path / "td").rglob("*.memmap"))
    assert [row.shape for row in store.column("ids")[:3]] == [(1,), (2,), (3,)]
    assert store.column("same")[4].tolist() == [[5, 5], [5, 5]]


def test_a_fixed_column_is_a_view_of_a_private_map(tmp_path: Path) -> None:
    _plain().memmap(tmp_path / "td")
    store = open_store(tmp_path / "td")
    image = store.column("image")
    assert image.shape == (6, 3, 2)
    assert store.tensordict()["image"].data_ptr() == image.data_ptr()
    image.zero_()
    assert open_store(tmp_path / "td").column("image").any()
    assert store.nbytes == 6 * (6 + 1 + 2 + 16 + 32 + 8)


def test_weights_have_columns_but_no_rows(tmp_path: Path) -> None:
    weights = TensorDict({"w": numbers(3, 4), "b": {"step": torch.tensor(7), "none": torch.empty(0)}, "name": "mlp"})
    weights["pieces"] = lazy_stack([TensorDict({"v": numbers(2) + i}) for i in range(3)])
    weights.memmap(tmp_path / "td")
    store = open_store(tmp_path / "td")
    assert "no rows" in repr(store)
    assert torch.equal(store.column("w"), weights["w"])
    assert store.column("b.step").shape == ()
    whole = store.tensordict()
    theirs = _loaded(tmp_path / "td", weights)
    assert whole.batch_size == ()
    assert whole["name"] == theirs["name"]
    assert whole["b"].batch_size == ()
    for key in ("w", ("b", "step"), ("b", "none"), ("pieces", "v")):
        assert torch.equal(whole[key], theirs[key])
    assert whole["w"].data_ptr() == store.column("w").data_ptr()
    assert set(store.select("b").tensordict().keys()) == {"b"}
    for use in (len, lambda s: s[0], lambda s: s[:2], lambda s: s.split([1.0])):
        with pytest.raises(StoreError, match=r"batch_size \[\], which has no rows"):
            use(store)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_strided_nested_tensors_are_ragged(tmp_path: Path) -> None:
    rows = {
        "jagged": [numbers(i, 2) for i in (2, 1, 3)],
        "images": [numbers(3, i, 4 - i) for i in (2, 1, 3)],
        "equal": [numbers(2) + i for i in range(3)],
    }
    nested = {key: torch.nested.nested_tensor(value) for key, value in rows.items()}
    TensorDict(nested | {"x": numbers(3)}, [3]).memmap(tmp_path / "td")
    store = open_store(tmp_path / "td")
    theirs = TensorDict.load_memmap(tmp_path / "td")
    assert [field.kind for field in store.schema] == ["jagged", "list", "jagged", "fixed"]
    for key, value in rows.items():
        assert all(torch.equal(a, b) for a, b in zip(theirs[key].unbind(0), value, strict=True))
        for batch, order in ((store[[2, 0]], [2, 0]), (store.tensordict(), [0, 1, 2])):
            got = batch[key].unbind() if isinstance(batch[key], torch.Tensor) else batch[key]
            assert all(torch.equal(a, value[b]) for a, b in zip(got, order, strict=True))
        for i in range(3):
            assert torch.equal(store[i][key], value[i])
    assert store.nbytes == sum(t.numel() for value in rows.values() for t in value) * 4 + 12
    _cut(tmp_path / "td/jagged.memmap", 1)
    with pytest.raises(CorruptStoreError, match=r"jagged\.memmap: found 47 bytes; expected 48"):
        open_store(tmp_path / "td")


def test_float8_is_read_though_tensordict_cannot(tmp_path: Path) -> None:
    value = numbers(3, 2).to(torch.float8_e4m3fn)
    TensorDict({"x": value}, [3]).memmap(tmp_path / "td")
    assert torch.equal(open_store(tmp_path / "td")[:]["x"].float(), value.float())


def test_names_as_older_versions_wrote_them(tmp_path: Path) -> None:
    tensors = {name: numbers(2) + 10 * i for i, name in enumerate(["a b", "a%20b", "a%2520b", "50%", "..", ""])}
    td = TensorDict(tensors | {"c:d": TensorDict({"x": numbers(2)}, [2])}, [2])
    td.memmap(tmp_path / "td", **ENCODED)
    for key in [*tensors, "c:d"] if ENCODED else []:
        name = {"..": "%2E%2E", "": "%"}.get(key, key.replace("%", "%25").replace(" ", "%20").replace(":", "%3A"))
        suffix = ".memmap" if key in tensors else ""
        if (tmp_path / "td" / (name + suffix)).exists():  # the first versions that encode leave ".." and "" as they are
            (tmp_path / "td" / (name + suffix)).rename(tmp_path / "td" / (key + suffix))
    assert (tmp_path / "td/a b.memmap").exists()
    store = open_store(tmp_path / "td")
    assert {field.path for field in store.schema} == {*((key,) for key in tensors), ("c:d", "x")}
    for key, tensor in tensors.items():
        assert store[1][key] == tensor[1], key
    assert store[1]["c:d", "x"] == 1


def test_values_as_older_tensorclasses_wrote_them(tmp_path: Path) -> None:
    """Before NonTensorData, a tensorclass kept its own values in its own meta.json."""
    Inner(points=numbers(2), batch_size=[2]).memmap(tmp_path / "td")
    _edit(tmp_path / "td/meta.json", note="old", extra=None, tags=["a", "b"])
    store = open_store(tmp_path / "td")
    assert set(store[0].keys()) == {"points", "note", "tags"}
    assert store[:]["note"] == "old"
    assert store[1]["tags"] == ["a", "b"]


def test_the_digest_tells_directories_apart(tmp_path: Path) -> None:
    for name, n in (("a", 2), ("b", 2), ("c", 3)):
        TensorDict({"x": numbers(n)}, [n]).memmap(tmp_path / name)
    stores = {name: open_store(tmp_path / name) for name in "abc"}
    digests = {name: store._backing.digest for name, store in stores.items()}
    assert digests["a"] == digests["b"] != digests["c"]
    again = pickle.loads(pickle.dumps(stores["c"].subset([2, 0])))
    assert isinstance(again, Store)
    assert again[:]["x"].tolist() == [2, 0]


def test_the_root_may_be_named_by_a_link(tmp_path: Path) -> None:
    TensorDict({"x": numbers(2)}, [2]).memmap(tmp_path / "td")
    (tmp_path / "link").symlink_to(tmp_path / "td")
    assert len(open_store(tmp_path / "link")) == 2


# --- directories kept from releases of tensordict, written by fixtures/make_tensordict.py

SAVED_ROWS = [
    {
        "image": [[0, 1], [2, 3]],
        "a b": 0.5,
        "none": [],
        "deep": {"er": {"flag": True}},
        "boxes": {"corners": [0.0, 1.0], "source": "hand"},
        "split": "train",
        "settings": {"size": [2, 2], "crop": None},
        "word": "a",
        "pieces": {"ids": [10], "scale": 0.25, "caption": "row 1"},
    },
    {
        "image": [[4, 5], [6, 7]],
        "a b": -1.0,
        "none": [],
        "deep": {"er": {"flag": False}},
        "boxes": {"corners": [2.0, 3.0], "source": "hand"},
        "split": "train",
        "settings": {"size": [2, 2], "crop": None},
        "word": "b\u20ac",
        "pieces": {"ids": [20, 21], "scale": 0.5, "caption": "row 2"},
    },
    {
        "image": [[8, 9], [10, 11]],
        "a b": 2.0,
        "none": [],
        "deep": {"er": {"flag": True}},
        "boxes": {"corners": [4.0, 5.0], "source": "hand"},
        "split": "train",
        "settings": {"size": [2, 2], "crop": None},
        "word": "",
        "pieces": {"ids": [30, 31, 32], "scale": 0.75, "caption": "row 3"},
    },
]


@tensorclass
class Boxes:
    corners: torch.Tensor
    source: str


def _literal(value: Any) -> Any:
    if _is_container(value):
        return {key: _literal(_value(value, key)) for key in _keys(value)}
    return value.tolist() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("release", ["0.8.0", "0.15.3"])
def test_what_a_release_of_tensordict_wrote(release: str) -> None:
    store = open_store(Path(__file__).parents[1] / f"fixtures/tensordict-{release}", types=(Boxes,))
    assert {field.name: field.describe() for field in store.schema} == {
        "image": "uint8 [2, 2]",
        "a b": "bfloat16 []",
        "none": "float32 [0]",
        "deep.er.flag": "bool []",
        "boxes.corners": "float32 [2]",
        "word": "str",
        "pieces.ids": "jagged int64 [*]",
        "pieces.scale": "float32 []",
        "pieces.caption": "str",
    }
    assert [_literal(sample) for sample in store] == SAVED_ROWS
    assert type(store[0]["boxes"]) is Boxes
    batch = store[[2, 0]]
    assert batch.batch_size == batch["pieces"].batch_size == batch["boxes"].batch_size == (2,)
    assert batch["image"].tolist() == [[[8, 9], [10, 11]], [[0, 1], [2, 3]]]
    assert batch["a b"].tolist() == [2.0, 0.5]
    assert batch["none"].shape == (2, 0)
    assert batch["deep", "er", "flag"].tolist() == [True, True]
    assert type(batch["boxes"]) is Boxes
    assert batch["boxes"].corners.tolist() == [[4.0, 5.0], [0.0, 1.0]]
    assert batch["boxes"].source == "hand"
    assert batch["split"] == "train"
    assert batch["settings"] == {"size": [2, 2], "crop": None}
    assert batch["word"] == ["", "a"]
    assert [ids.tolist() for ids in batch["pieces", "ids"].unbind()] == [[30, 31, 32], [10]]
    assert batch["pieces", "scale"].tolist() == [0.75, 0.25]
    assert batch["pieces", "caption"] == ["row 3", "row 1"]
    assert store.nbytes == 12 + 6 + 3 + 24 + 48 + 12


# --- what is refused


def _cut(path: Path, by: int) -> None:
    os.truncate(path, path.stat().st_size - by)


def _edit(path: Path, **entries: Any) -> None:
    meta = json.loads(path.read_bytes()) | entries
    path.write_text(json.dumps(meta))


def _refused(path: Path, match: str, error: type[Exception] = StoreError) -> None:
    with pytest.raises(error, match=match):
        open_store(path)


@pytest.fixture
def td(tmp_path: Path) -> Path:
    tree = {"x": numbers(4, 3), "b": TensorDict({"y": numbers(4, dtype=torch.int64)}, [4])}
    TensorDict(tree, [4]).memmap(tmp_path / "td")
    return tmp_path / "td"


@pytest.mark.parametrize("by", [1, 48])
def test_a_file_of_another_size(td: Path, by: int) -> None:
    _cut(td / "x.memmap", by)
    _refused(td, rf"x\.memmap: found {48 - by:,} bytes; expected 48 for float32 \[4, 3\]", CorruptStoreError)


def test_a_piece_of_another_size(tmp_path: Path) -> None:
    _lazy().memmap(tmp_path / "td")
    _cut(tmp_path / "td/10/deep/er/x.memmap", 4)
    _refused(tmp_path / "td", r"10/deep/er/x\.memmap: found 84 bytes; expected 88", CorruptStoreError)


def test_a_piece_cut_after_opening(tmp_path: Path) -> None:
    _lazy().memmap(tmp_path / "td")
    store = open_store(tmp_path / "td")
    _cut(tmp_path / "td/3/ids.memmap", 4)
    with pytest.raises(CorruptStoreError, match=r"3/ids\.memmap: found 28 bytes; expected 32: the file was cut"):
        store[[0, 3]]


@pytest.mark.parametrize("name", ["x.memmap", "meta.json", "b", "b/y.memmap", "b/meta.json"])
def test_links_are_not_followed(td: Path, name: str) -> None:
    (td / name).rename(td.parent / "elsewhere")
    (td / name).symlink_to(td.parent / "elsewhere")
    _refused(td, rf"{name}: found a symbolic link", CorruptStoreError)


@pytest.mark.parametrize("name", ["x.memmap", "b", "b/y.memmap"])
def test_a_file_that_is_missing(td: Path, name: str) -> None:
    (td / name).rename(td.parent / "elsewhere")
    _refused(td, f"{name}: found no", CorruptStoreError) if name == "b" else _refused(td, f"{name}: found nothing")


def test_a_directory_or_a_pipe_where_a_file_should_be(td: Path) -> None:
    (td / "x.memmap").unlink()
    os.mkfifo(td / "x.memmap")
    _refused(td, r"x\.memmap: found no plain file", CorruptStoreError)


def test_pickles_are_left_out(tmp_path: Path) -> None:
    evil = pickle.dumps(_Evil())
    for name, value, file in (
        ("data", NonTensorData(1j, batch_size=[2]), "s/other.pickle"),
        ("stack", NonTensorStack(1j, 2j), "s/pickle.pkl"),
    ):
        TensorDict({"x": numbers(2), "deep": TensorDict({"s": value, "y": numbers(2)}, [2])}, [2]).memmap(
            tmp_path / name
        )
        assert (tmp_path / name / "deep" / file).exists()
        (tmp_path / name / "deep" / file).write_bytes(evil)
        with pytest.warns(UserWarning, match=r"left out what is not read \(deep\.s: a pickle\)"):
            store = open_store(tmp_path / name)
        assert _literal(store[1]) == {"x": 1.0, "deep": {"y": 1.0}}
        assert _literal(store[:]) == {"x": [0.0, 1.0], "deep": {"y": [0.0, 1.0]}}
        again = pickle.loads(pickle.dumps(store))  # says nothing a second time
        assert _literal(again[1]) == _literal(store[1])
    _sample(2).memmap(tmp_path / "class")
    (tmp_path / "class/other.pickle").write_bytes(evil)
    with pytest.warns(UserWarning, match=r"other\.pickle: a pickle"):
        store = open_store(tmp_path / "class", types=(Sample, Inner))
    assert type(store[0]) is Sample
    TensorDict({"s": NonTensorData(1j, batch_size=[2])}, [2]).memmap(tmp_path / "only")
    (tmp_path / "only/s/other.pickle").write_bytes(evil)
    _refused(tmp_path / "only", r"found no tensor in it besides what cannot be read \(s: a pickle\)")
    lazy_stack([TensorDict({"x": numbers(2), "s": NonTensorData(1j if i else "a")}) for i in range(2)]).memmap(
        tmp_path / "lazy"
    )
    with pytest.warns(UserWarning, match=r"\(s: a pickle\)"):
        store = open_store(tmp_path / "lazy")
    assert set(store[0].keys()) == {"x"}
    assert not _ran


def test_a_pickle_beside_a_value_in_json_is_not_needed(tmp_path: Path) -> None:
    """With threads, some versions of tensordict write a pickle of other facts beside the value."""
    _non_tensors().memmap(tmp_path / "td")
    lazy_stack([TensorDict({"x": numbers(2), "t": f"k{i}"}) for i in range(3)]).memmap(tmp_path / "st")
    for name, directory in (("td", "text"), ("st", "1/t")):
        (tmp_path / name / directory / "other.pickle").write_bytes(pickle.dumps(_Evil()))
    assert open_store(tmp_path / "td")[1]["text"] == "shared"
    assert open_store(tmp_path / "st")[:]["t"] == ["k0", "k1", "k2"]
    assert not _ran


def test_files_that_are_longer_than_their_metadata(tmp_path: Path) -> None:
    """tensordict leaves them so where a directory is saved again with fewer rows, and reads them."""
    values = {"x": numbers(9, 2), "deep": TensorDict({"y": numbers(9, dtype=torch.int64)}, [9])}
    TensorDict(values, [9]).memmap(tmp_path / "td")
    sizes = {path: path.stat().st_size for path in (tmp_path / "td").rglob("*.memmap")}
    TensorDict(values, [9])[:4].clone().memmap(tmp_path / "td")
    for path, size in sizes.items():
        os.truncate(path, size)  # newer versions cut the files
    store = open_store(tmp_path / "td")
    assert len(store) == 4
    assert torch.equal(store[:]["x"], numbers(9, 2)[:4])
    assert store[[3, 1]]["deep", "y"].tolist() == [3, 1]


_ran: list[int] = []


class _Evil:
    def __reduce__(self) -> Any:
        return _ran.append, (1,)


@pytest.mark.parametrize("name", ["x.meta.pt", "meta.pt"])
def test_the_layout_of_before_meta_json(tmp_path: Path, name: str) -> None:
    (tmp_path / "td").mkdir()
    (tmp_path / "td" / name).write_bytes(pickle.dumps(_Evil()))
    _refused(tmp_path / "td", rf"{name}: found the layout older than meta\.json.* save it again with a newer")
    assert not _ran


def test_a_stack_along_another_dim(tmp_path: Path) -> None:
    lazy_stack([TensorDict({"x": numbers(3, i)}, [3]) for i in (1, 2)], 1).memmap(tmp_path / "td")
    _refused(tmp_path / "td", r"found a lazy stack along dim 1; expected dim 0.*\.contiguous\(\).*\.densify\(\)")


def test_a_stack_in_a_stack(tmp_path: Path) -> None:
    pieces = [TensorDict({"l": lazy_stack([_piece(1), _piece(2)])}, []) for _ in range(2)]
    lazy_stack(pieces).memmap(tmp_path / "td")
    _refused(tmp_path / "td", r"found a lazy stack at l\.\w+ inside a lazy stack.*\.densify\(\)")


def test_pieces_that_differ(tmp_path: Path) -> None:
    for name, other, message in (
        ("keys", {"x": numbers(2), "y": numbers(1)}, "found the key 'y' more, at its top"),
        ("dtype", {"x": numbers(2, dtype=torch.int64)}, r"found int64 \[2\], not float32 \[2\], at x"),
        ("rank", {"x": numbers(2, 1)}, r"found float32 \[2, 1\], not float32 \[2\], at x"),
        ("kind", {"x": "text"}, r"found a value that is no tensor \(NonTensorData\), not a tensor, at x"),
    ):
        lazy_stack([TensorDict({"x": numbers(2)}, []), TensorDict(other, [])]).memmap(tmp_path / name)
        _refused(tmp_path / name, rf"{name}/1: {message}.*expected the same keys")


def test_a_stack_with_a_hole(tmp_path: Path) -> None:
    _lazy().memmap(tmp_path / "td")
    (tmp_path / "td/4").rename(tmp_path / "four")
    _refused(tmp_path / "td", "td/4: found no such piece", CorruptStoreError)
    for i in range(12):
        if i != 4:
            (tmp_path / f"td/{i}").rename(tmp_path / f"away{i}")
    _refused(tmp_path / "td", "td/0: found no such piece", CorruptStoreError)


@pytest.mark.parametrize("dtype", ["torch.complex32", "torch.qint8", "float33", "os.system", 7, None])
def test_an_unknown_dtype(td: Path, dtype: Any) -> None:
    _edit(td / "meta.json", x={"device": "cpu", "shape": [4, 3], "dtype": dtype, "is_nested": False})
    _refused(td, r"entry 'x': found dtype .*; expected one of bool, uint8")


HUGE = 1 << 40


@pytest.mark.parametrize(
    "shape",
    ["NaN", "[4, NaN]", "[4, -3]", "[4, 3.0]", "[true, 3]", '"43"', '[4, "3"]', "{}", "null", "[4, 1e400]"]
    + [f"[4, {HUGE}, {HUGE}]", f"[4, 0, {HUGE}, {HUGE}]", f"[{2**64}]", f"{[1] * 100}", f"[4, {'9' * 5000}]"],
)
def test_absurd_shapes(td: Path, shape: str) -> None:
    entry = f'{{"shape": {shape}, "dtype": "torch.float32", "is_nested": false}}'
    meta = json.loads((td / "meta.json").read_bytes()) | {"x": "HERE"}
    (td / "meta.json").write_text(json.dumps(meta).replace('"HERE"', entry))
    _refused(td, r"meta\.json.*damaged")


def test_a_shape_that_wants_more_than_is_there(td: Path) -> None:
    _edit(td / "meta.json", x={"shape": [4, HUGE], "dtype": "torch.float32"})
    _refused(td, r"x\.memmap: found 48 bytes; expected 17,592,186,044,416", CorruptStoreError)


@pytest.mark.parametrize("batch", [[5], [4, 2], [-4], [4.0], [None], 4])
def test_a_batch_size_that_does_not_fit(td: Path, batch: Any) -> None:
    _edit(td / "meta.json", shape=batch)
    _refused(td, r"expected (it to begin with the batch_size|a list of sizes|a TensorDict)")


def test_a_nested_batch_size_that_does_not_fit(td: Path) -> None:
    _edit(td / "b/meta.json", shape=[])
    _refused(td, r"entry 'b': found a TensorDict or tensorclass of shape \[\]; expected it to begin .* \[4\]")


def test_a_stack_of_values_of_another_length(tmp_path: Path) -> None:
    TensorDict({"x": numbers(3), "s": NonTensorStack("a", "b", "c")}, [3]).memmap(tmp_path / "td")
    _edit(tmp_path / "td/s/meta.json", data=["a", "b"])
    _refused(tmp_path / "td", r"entry 's': found values that are no tensors .* of shape \[2\]")


@pytest.mark.parametrize("key", ["../x", "..", ".", "/etc/passwd", "a\\b", "..\\x", "x\0", "\ud800", "n" * 5000])
def test_keys_reach_no_other_directory(td: Path, key: str) -> None:
    os.link(td / "x.memmap", td.parent / "x.memmap")
    _edit(td / "meta.json", **{key: {"shape": [4, 3], "dtype": "torch.float32", "is_nested": False}})
    _refused(td, "found nothing there", CorruptStoreError)
    _edit(td / "meta.json", **{key: {"type": "TensorDict"}})
    _refused(td, "found no such directory", CorruptStoreError)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", '{"x": ' * 100_000, "\xff", '{"_type": "' + "x" * 1000 + '"}', "{}"]
)
def test_metadata_that_is_none(td: Path, text: str) -> None:
    (td / "meta.json").write_bytes(text.encode("latin-1"))
    _refused(td, r"meta\.json: found .*damaged")


def test_metadata_that_is_huge(td: Path) -> None:
    os.truncate(td / "b/meta.json", LARGEST_JSON + (1 << 20))  # sparse
    _refused(
        td, r"b/meta\.json: found 68,[\d,]+ bytes of metadata up to here; expected at most 67,[\d,]+ beside so few"
    )


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_sizes_of_nested_rows_are_bounded_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensordict_dir, "MOST_SIZE_BYTES", 10)
    rows = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    TensorDict({"x": rows}, [2]).memmap(tmp_path / "nested")
    _refused(tmp_path / "nested", "found 16 bytes of sizes up to here; expected at most 10")


def test_many_files_justify_much_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    TensorDict({f"k{i}": torch.zeros(2) for i in range(20)}, [2]).memmap(tmp_path / "many")
    monkeypatch.setattr(format, "LARGEST_JSON", 1)
    monkeypatch.setattr(tensordict_dir, "LARGEST_JSON", 1)
    assert len(open_store(tmp_path / "many").schema) == 20
    monkeypatch.setattr(format, "JSON_A_FILE", 1)
    _refused(tmp_path / "many", "expected at most 22 beside so few files")


def test_entries_without_end(td: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensordict_dir, "MOST_ENTRIES", 2)
    _refused(td, "found more than 2 entries")


def test_nesting_without_end(tmp_path: Path) -> None:
    deep = TensorDict({"x": numbers(2)}, [2])
    for _ in range(70):
        deep = TensorDict({"d": deep}, [2])
    deep.memmap(tmp_path / "td")
    _refused(tmp_path / "td", "found TensorDicts nested deeper than 64")


def test_other_classes_and_newer_formats(td: Path) -> None:
    _edit(td / "meta.json", _format_version=2)
    _refused(td, "found tensordict's format version 2; expected at most 1: upgrade")
    _edit(td / "meta.json", _format_version=1, _type="<class 'os.system'>", shape=None)
    _refused(td, r"found a os\.system; expected a TensorDict")


def test_no_class_is_imported_by_name(td: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trap.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    _edit(td / "meta.json", _type="<class 'trap.Anything'>", _class="trap:Anything")
    assert len(open_store(td)) == 4  # a subclass of TensorDict: its entries are what counts


def test_what_is_no_directory_of_tensors(tmp_path: Path) -> None:
    (tmp_path / "a.tdz").write_bytes(b"PK")
    _refused(tmp_path / "a.tdz", "found a file that is no store")
    NonTensorStack("a", "b").memmap(tmp_path / "values")
    _refused(tmp_path / "values", r"found values that are no tensors \(NonTensorStack\); expected a TensorDict")
    TensorDict({}, [3]).memmap(tmp_path / "empty")
    _refused(tmp_path / "empty", "found no tensor in it")
