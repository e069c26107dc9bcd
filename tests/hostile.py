"""Hostile stores: golden ones changed at random, and what may come of using one: what is asked, or an error of ours.

``mutations(seconds, rng)`` runs cases in a process of their own, so that a crash of the interpreter is seen too. A case
is kept whole as JSON (``Case``), so that one that was found stays one when this file changes: see fixtures/hostile.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import faulthandler
import importlib
import io
import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import xxhash

import memfeed
from html_pages import require_harmless
from memfeed.cli.store_summary import _fields_table, _values_table, summarise
from memfeed.errors import MemfeedError, StoreError
from memfeed.schema.fields import DTYPES, NodeKind
from memfeed.system.openmp import can_limit

FIXTURES = Path(__file__).parent / "fixtures"
CORPUS = FIXTURES / "hostile"
OURS = sorted(path.name for path in (FIXTURES / "stores").iterdir() if path.is_dir())
THEIRS = sorted(path.name for path in FIXTURES.glob("tensordict-*"))
CASE_SECONDS = 30  # most take milliseconds; a watchdog ends the process
BATCH_SECONDS = 120
CASE_BYTES = 256 << 20  # by which one case may raise what the process holds at most
ROOM = 8 << 30  # of addresses, so that what asks for far too much is refused before it is filled

Node = bytes | tuple[str, Any]
"""A file's content, or what stands there: ("link", target), ("fifo", None), ("directory", None), ("sparse", size)."""
Tree = dict[str, Node]


class Case(NamedTuple):
    """A store's name among the fixtures, and the files that differ from it (None: it is not there)."""

    base: str
    changes: dict[str, Node | None]

    def to_json(self) -> str:
        def plain(node: Node | None) -> Any:
            if isinstance(node, bytes):
                try:
                    return {"text": node.decode("ascii")}
                except UnicodeDecodeError:
                    return {"base64": base64.b64encode(node).decode()}
            return node

        return (
            json.dumps({"base": self.base, "changes": {k: plain(v) for k, v in self.changes.items()}}, indent=1) + "\n"
        )

    @staticmethod
    def from_json(text: str) -> Case:
        def node(value: Any) -> Node | None:
            if isinstance(value, dict):
                return value["text"].encode() if "text" in value else base64.b64decode(value["base64"])
            return None if value is None else (value[0], value[1])

        found = json.loads(text)
        return Case(found["base"], {name: node(value) for name, value in found["changes"].items()})

    @property
    def damages_columns(self) -> bool:
        """Whether a column file differs and neither the manifest nor the checksums know: verify must see it."""
        if self.base not in OURS or "memfeed.json" in self.changes:
            return False
        before = tree_of(self.base)
        return any(
            name.endswith((".memmap", "heap.bin")) and not (node == ("sparse", 0) and before.get(name) == b"")
            for name, node in self.changes.items()
        )


_loaded: dict[str, dict[str, bytes]] = {}


def tree_of(base: str) -> Tree:
    """The files of a fixture."""
    if base not in _loaded:
        root = FIXTURES / ("stores" if base in OURS else "") / base
        _loaded[base] = {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}
    return dict(_loaded[base])


def write_case(case: Case, root: Path) -> None:
    """The store of a case at ``root``."""
    tree: dict[str, Node | None] = {**tree_of(case.base), **case.changes}
    made = {root}
    root.mkdir()
    for name, node in tree.items():
        path = root / name
        if node is None:
            continue
        if path.parent not in made:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except (FileExistsError, NotADirectoryError):  # something else stands there in this case
                continue
            made.add(path.parent)
        if path.is_dir() and not path.is_symlink():
            continue
        if isinstance(node, bytes):
            path.write_bytes(node)
        elif node[0] == "link":
            path.symlink_to(node[1])
        elif node[0] == "fifo":
            os.mkfifo(path)
        elif node[0] == "directory":
            path.mkdir()
        else:
            path.touch()
            os.truncate(path, node[1])


# --- how stores are changed

NUMBERS = [0, 1, -1, 2, 3, 4, 5, 7, 8, 63, 64, 65, 255, 4096, 2**16, 2**24 + 1, 2**31 - 1, 2**31, 2**32, 2**40, 2**48]
NUMBERS += [2**48 + 1, 2**53 + 1, 2**61, 2**62, 2**63 - 1, 2**63, 2**64, -2, -(2**31), -(2**63), -(2**63) - 1, 10**30]
WORDS = [
    "",
    "x",
    "0",
    "a",
    "..",
    "../x",
    "/etc/passwd",
    "a/../../b",
    ".",
    "a/b",
    "A",
    "x" * 101,
    "a" * 5000,
    "\0",
    "\n",
]
WORDS += [
    "\u202e",
    "\ud800",
    "\u00e9",
    "\ufb01",
    "fi",
    "\x1b[31m",
    "class",
    "_x",
    "__class__",
    "meta",
    "start",
    "con",
    "~",
]
WORDS += [
    "$HOME",
    "%2e%2e",
    "a%20b",
    "os.system",
    "torch.float32",
    "torch.qint8",
    "object",
    "pickle.pkl",
    "memfeed",
    "-",
]
WORDS += get_args(NodeKind)
WORDS += ["fixed", "jagged", "str", "bytes", "json", "tensor", "scalar", *DTYPES]
WORDS += [
    "<class 'tensordict._td.TensorDict'>",
    "<class 'os.system'>",
    "<class 'tensordict.tensorclass.NonTensorData'>",
]
WORDS += ["<class 'tensordict._lazy.LazyStackedTensorDict'>", "TensorDict", "NonTensorStack"]
RAW = [
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "1.0",
    "-0",
    "1e3",
    "9" * 5000,
    "[" * 2000 + "]" * 2000,
    "0x10",
    "{",
    "]",
]
RAW += [
    "[" * 900 + "]" * 900,
    '{"a":' * 700 + "1" + "}" * 700,
    '"\\ud800"',
    '"\\u0000"',
    '"\\',
    "\x00",
    "true",
    "1" * 400 + ".5",
]
KEYS = ["format", "version", "rows", "schema", "files", "checksums", "skipped", "fingerprint", "chunk_bytes", "fields"]
KEYS += [
    "structure",
    "path",
    "name",
    "stem",
    "kind",
    "dtype",
    "shape",
    "form",
    "optional",
    "lengths_of",
    "keys",
    "children",
]
KEYS += [
    "batch_dims",
    "value",
    "_type",
    "device",
    "is_nested",
    "data",
    "stack_dim",
    "type",
    "_format_version",
    "_names",
]
SAFE = re.compile(r"[A-Za-z0-9_-]{1,40}(/[A-Za-z0-9_-]{1,40}){,8}(\.memmap|\.bin)?")
MARK, TWICE = "@raw:", "@twice:"


def hostile_value(rng: random.Random) -> Any:
    """A JSON value that a reader may stumble over."""
    pick = rng.random()
    if pick < 0.4:
        return rng.choice(NUMBERS)
    if pick < 0.65:
        return rng.choice(WORDS)
    if pick < 0.75:
        return MARK + str(rng.randrange(len(RAW)))
    if pick < 0.85:
        return rng.choice([None, True, False, [], {}, 0.5, -0.0, [None], [[]], {"": {}}, [0], ["x"]])
    if pick < 0.95:
        return [rng.choice([*NUMBERS, None]) for _ in range(rng.randrange(6))]
    return {rng.choice(KEYS): hostile_value(rng) for _ in range(rng.randrange(3))}


def _places(document: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in items:
        yield (*at, key)
        yield from _places(value, (*at, key))


def _holder(document: Any, place: tuple[Any, ...]) -> Any:
    for key in place[:-1]:
        document = document[key]
    return document


def mutate_json(document: Any, rng: random.Random) -> None:
    """One change of a JSON document, in place."""
    places = list(_places(document))
    if not places:
        return
    # the upper parts are few among many leaves: half of the time a level is chosen first
    if rng.random() < 0.5:
        level = rng.randint(1, max(map(len, places)))
        places = [place for place in places if len(place) == level]
    place = rng.choice(places)
    holder, key = _holder(document, place), place[-1]
    value = holder[key]
    pick = rng.random()
    if pick < 0.15:
        del holder[key]
    elif pick < 0.4:
        holder[key] = hostile_value(rng)
    elif pick < 0.6:  # a neighbour of what it was: nearly right is what gets furthest
        if isinstance(value, bool):
            holder[key] = not value
        elif isinstance(value, int):
            holder[key] = rng.choice(
                [value + 1, value - 1, -value, value * 2, value // 2, value * 2**32, str(value), value + 0.5]
            )
        elif isinstance(value, str):
            holder[key] = rng.choice(
                [value + "x", value[:-1], value.upper(), value + "/x", "../" + value, value * 30, [value]]
            )
        elif isinstance(value, list):
            if value:
                rng.choice([value.pop, value.reverse, lambda: value.append(value[0]), lambda: rng.shuffle(value)])()
            else:
                value.append(hostile_value(rng))
        elif isinstance(value, dict):
            value[rng.choice([*KEYS, *WORDS])] = hostile_value(rng)
        else:
            holder[key] = hostile_value(rng)
    elif pick < 0.8:  # what stands elsewhere, most of all under the same name
        same = [p for p in _places(document) if p[-1] == key and p != place] or list(_places(document))
        other = rng.choice(same)
        holder[key] = json.loads(json.dumps(_holder(document, other)[other[-1]]))
    elif pick < 0.88 and isinstance(holder, list):
        holder.insert(rng.randrange(len(holder) + 1), rng.choice([value, hostile_value(rng)]))
    elif pick < 0.94:
        for _ in range(rng.choice([1, 2, 70, 300])):
            value = rng.choice([[value], {"kind": "list", "children": [value]}])
        holder[key] = value
    elif isinstance(holder, dict):
        holder[TWICE + str(key)] = hostile_value(rng)


def render(document: Any, rng: random.Random) -> bytes:
    """The text of a document, what is no JSON in it too."""
    try:
        text = json.dumps(document, indent=rng.choice([None, 1]), ensure_ascii=rng.random() < 0.7)
    except (ValueError, RecursionError):
        return b"{"
    text = text.replace(f'"{TWICE}', '"')
    for number in range(len(RAW)):
        text = text.replace(f'"{MARK}{number}"', RAW[number])
    return text.encode("utf-8", rng.choice(["surrogatepass", "replace"]))


def mutate_bytes(data: bytes, rng: random.Random, other: bytes = b"") -> bytes:
    """One change of some bytes."""
    at = rng.randrange(len(data) + 1)
    end = min(len(data), at + rng.choice([1, 1, 2, 8, 64]))
    pick = rng.randrange(7)
    if pick == 0 and data:
        at = min(at, len(data) - 1)
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    if pick == 1:
        return data[:at]
    if pick == 2:
        return data[:at] + rng.randbytes(rng.choice([1, 7, 8, 4096])) + data[at:]
    if pick == 3:
        return data[:at] + data[end:]
    if pick == 4:
        return data[:at] + bytes(end - at) + data[end:]
    if pick == 5:
        return data[:at] + data[at:end] * 2 + data[end:]
    return data[:at] + other[at:end] + data[end:]


def _text(tree: Tree, name: str) -> Any:
    node = tree.get(name)
    try:
        return json.loads(node) if isinstance(node, bytes) else None
    except (ValueError, RecursionError):
        return None


def manifest(tree: Tree, rng: random.Random) -> None:
    """Changes the structure of the manifest, or of a metadata file."""
    names = [name for name in tree if name.endswith(".json")]
    name = "memfeed.json" if "memfeed.json" in names else rng.choice(names)
    document = _text(tree, name)
    if document is not None:
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            with contextlib.suppress(LookupError, TypeError):
                mutate_json(document, rng)
        tree[name] = render(document, rng)


def consistent(tree: Tree, rng: random.Random) -> None:
    """Another manifest, and files that are as it says: what gets past the look at sizes."""
    manifest(tree, rng)
    (agree if "memfeed.json" in tree else agree_theirs)(tree)


def text(tree: Tree, rng: random.Random) -> None:
    """Changes bytes of the manifest or of a metadata file."""
    names = [name for name in tree if name.endswith(".json")]
    name = "memfeed.json" if "memfeed.json" in names and rng.random() < 0.9 else rng.choice(names)
    other = tree_of(rng.choice(OURS))["memfeed.json"]
    if isinstance(tree[name], bytes):
        tree[name] = mutate_bytes(tree[name], rng, other)  # type: ignore[arg-type]


def _columns(tree: Tree) -> list[str]:
    return [name for name in tree if name.endswith((".memmap", ".bin")) and isinstance(tree[name], bytes)]


def columns(tree: Tree, rng: random.Random) -> None:
    """Changes bytes of a column file, or puts another one's in its place."""
    names = _columns(tree)
    name, other = rng.choice(names), rng.choice(names)
    data: bytes = tree[name]  # type: ignore[assignment]
    if rng.random() < 0.2:
        tree[name], tree[other] = tree[other], data
    elif rng.random() < 0.5:
        tree[name] = mutate_bytes(data, rng, tree[other])  # type: ignore[arg-type]
    elif data:
        at = rng.randrange(len(data))
        tree[name] = data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def extents(tree: Tree, rng: random.Random) -> None:
    """Sets a start or a dim to a number that leads astray, with and without checksums that agree."""
    names = [name for name in _columns(tree) if name.endswith(("start.memmap", "dims.memmap", "shape.memmap"))]
    if not names:
        return columns(tree, rng)
    for _ in range(rng.choice([1, 1, 2, 4])):
        name = rng.choice(names)
        data = bytearray(tree[name])  # type: ignore[arg-type]
        if len(data) >= 8:
            at = rng.randrange(len(data) // 8) * 8
            old = int.from_bytes(data[at : at + 8], "little", signed=True)
            new = rng.choice([*NUMBERS, old + 1, old - 1, old * 2, -old])
            data[at : at + 8] = (new % 2**64).to_bytes(8, "little")
            tree[name] = bytes(data)
    if rng.random() < 0.6 and "memfeed.json" in tree:
        agree(tree)
    return None


def places(tree: Tree, rng: random.Random) -> None:
    """Puts something else than a file where one should be."""
    name = rng.choice([*tree, "memfeed.json" if "memfeed.json" in tree else "meta.json"])
    above = name.rpartition("/")[0]
    if above and rng.random() < 0.3:  # a whole directory
        for other in [other for other in tree if other.startswith(above + "/")]:
            del tree[other]
        name = above
    tree[name] = rng.choice(
        [
            ("link", "/etc/passwd"),
            ("link", "/dev/zero"),
            ("link", "/proc/self/environ"),
            ("link", "/"),
            ("link", "."),
            ("link", name.rpartition("/")[2]),
            ("link", rng.choice(list(tree))),
            ("fifo", None),
            ("directory", None),
            ("sparse", rng.choice([0, 1, 2**20, 2**31, 2**40])),
        ]
    )
    if rng.random() < 0.3:
        del tree[name]


def _leaves(node: Any, at: tuple[Any, ...] = ()) -> Iterator[list[Any]]:
    if node["kind"] == "leaf":
        yield list(at)
    children = node.get("children", [])
    for key, child in zip(node.get("keys") or range(len(children)), children, strict=True):
        yield from _leaves(child, (*at, key))


def agree(tree: Tree) -> None:
    """Makes files, sizes and checksums what the manifest says, as far as that is possible."""
    document = _text(tree, "memfeed.json")
    with contextlib.suppress(Exception):
        sizes = {}
        leaves = list(_leaves(document["schema"]["structure"]))
        for field, path in zip(document["schema"]["fields"], leaves, strict=True):
            field["path"] = path
            if field["kind"] == "fixed":
                size = document["rows"] * DTYPES[field["dtype"]].itemsize
                for dim in field.get("shape", []):
                    size *= dim
                sizes[field["stem"] + ".memmap"] = size
            else:
                rank = 1 if field["kind"] in ("str", "bytes", "json") else len(field.get("shape", []))
                sizes[field["stem"] + "/start.memmap"] = document["rows"] * 8
                sizes[field["stem"] + "/dims.memmap"] = document["rows"] * 8 * max(rank, 1)
                heap = tree.get(field["stem"] + "/heap.bin", b"")
                sizes[field["stem"] + "/heap.bin"] = len(heap) if isinstance(heap, bytes) else 0
        if sum(sizes.values()) > 1 << 20:
            return
        spare = next((data for data in tree.values() if isinstance(data, bytes) and data), b"x")
        for name, size in sizes.items():
            data = tree.get(name)
            data = data if isinstance(data, bytes) else spare
            tree[name] = (data + bytes(max(size - len(data), 0)))[:size]
        document["files"] = sizes
        sums = np.array([xxhash.xxh3_64_intdigest(tree[name]) for name, size in sizes.items() if size], "<u8").tobytes()
        tree["checksums.bin"] = sums
        document["checksums"] = xxhash.xxh3_128_hexdigest(sums)
        tree["memfeed.json"] = json.dumps(document).encode()


def agree_theirs(tree: Tree) -> None:
    """Makes tensordict's files as long as its metadata says."""
    for name in [name for name in tree if name.endswith("meta.json")]:
        document = _text(tree, name)
        for key, entry in document.items() if isinstance(document, dict) else ():
            with contextlib.suppress(Exception):
                size = DTYPES[entry["dtype"].removeprefix("torch.")].itemsize
                for dim in entry["shape"]:
                    size *= dim
                path = f"{name[: -len('meta.json')]}{key}.memmap"
                if size <= 1 << 20 and isinstance(tree.get(path), bytes):
                    tree[path] = (tree[path] + bytes(size))[:size]  # type: ignore[operator]


MUTATIONS: dict[str, tuple[Callable[[Tree, random.Random], None], int]] = {
    "manifest": (manifest, 6),
    "consistent": (consistent, 8),
    "text": (text, 3),
    "columns": (columns, 4),
    "extents": (extents, 5),
    "places": (places, 2),
}


def make_case(rng: random.Random) -> tuple[str, Case]:
    """A case, and what kind of change it is."""
    kind = rng.choices(list(MUTATIONS), [weight for _, weight in MUTATIONS.values()])[0]
    base = rng.choice(OURS if rng.random() < 0.7 else THEIRS)
    before = tree_of(base)
    tree = dict(before)
    MUTATIONS[kind][0](tree, rng)
    changes: dict[str, Node | None] = {
        name: node
        for name, node in tree.items()
        if before.get(name) != node and (name in before or SAFE.fullmatch(name))
    }
    changes |= dict.fromkeys(name for name in before if name not in tree)
    return kind, Case(base, changes)


# --- what is done with them


class Escape(BaseException):
    """A file outside the store was opened, or code was run; no except clause of ours may catch it."""


_inside: list[str] = []
_FORBIDDEN = ("pickle.find_class", "os.system", "subprocess.Popen", "socket.connect", "ctypes.dlopen")
_SYSTEM = ("/proc/", "/sys/", "/dev/null", sys.prefix, sys.base_prefix, str(Path(memfeed.__file__).parent))


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if not _inside:
        return
    if event in _FORBIDDEN:
        raise Escape(f"{event} {args}")
    if event == "open" and isinstance(args[0], str | bytes):
        path = os.path.abspath(os.fsdecode(args[0]))
        follows = not (isinstance(args[2], int) and args[2] & os.O_NOFOLLOW)
        path = os.path.realpath(path) if follows else os.path.join(os.path.realpath(os.path.dirname(path)), "x")
        if not path.startswith((*_inside, *_SYSTEM)) or path == "/proc/self/environ":
            raise Escape(f"opened {path}")


def uses(root: Path, shown: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What people do with a store: each may raise an error of ours, and nothing else."""
    opened: list[memfeed.Store] = []
    yield "open", lambda: opened.append(memfeed.open(root))
    if not opened:
        return
    store = opened[0]
    yield "repr", lambda: (repr(store), store.nbytes, store.skipped)
    yield "rows", lambda: [store[row] for row in (0, 1, -1)]
    yield "slice", lambda: store[:3]
    yield "samples", lambda: list(store.__getitems__([0, 1]))

    def epoch() -> None:
        for number, _ in enumerate(memfeed.Loader(store, 2, shuffle=True, seed=0)):
            if number == 20:
                break

    yield "loader", epoch
    yield "large batch", lambda: next(iter(memfeed.Loader(store, 64)), None)
    yield "tensordict", store.tensordict
    yield "to", lambda: store.to("cpu", progress=False)
    yield "split", lambda: [part[:2] for part in store.split([0.5, 0.5])]
    for field in store.schema:
        yield "column", lambda path=field.path: list(store.column(path)[:1]) if len(store) else None  # type: ignore[misc]
    yield "select", lambda: store.select(store.schema.fields[-1].path)[0]

    def tables() -> None:
        with contextlib.suppress(StoreError):  # a model's weights have no rows
            len(store)
            _values_table(store, range(min(2, len(store))))
        _fields_table(store.schema, store._view.field_bytes())

    yield "tables", tables

    def notebook() -> None:
        try:
            html = store._repr_html_()
        except MemfeedError as error:  # it shows what is damaged
            raise AssertionError(str(error)) from error
        require_harmless(html)

    yield "notebook", notebook
    if not shown:
        return

    def show() -> None:
        with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), "utf-8")) as out:
            summarise(root, rows=2, pictures=None, augment=None, epochs=1)
            out.flush()
            shown = out.buffer.getvalue().decode().replace("\n", "")  # type: ignore[attr-defined]
        assert shown.isprintable(), f"control characters in {shown!r}"

    yield "inspect", show


def exercise(case: Case, root: Path, *, shown: bool = True) -> tuple[bool, list[str]]:
    """Whether the store of a case opened, and what was wrong with what came of using it.

    ``shown``: also as `memfeed inspect` prints it, which takes as long as all the rest.
    """
    found: list[str] = []
    opened = verified = False

    def attempt(name: str, action: Callable[[], Any]) -> bool:
        try:
            action()
        except MemfeedError:
            return False
        except (Exception, Escape) as error:
            found.append(f"{name}: {_where(error)}")
        return True

    write_case(case, root)
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _inside.append(str(root))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name, action in uses(root, shown):
                fine = attempt(name, action)
                opened |= fine and name == "open"
            if opened:
                verified = attempt("verify", lambda: memfeed.open(root).verify())
    finally:
        _inside.clear()
        shutil.rmtree(root)
    if case.damages_columns and verified:
        found.append("verify: accepts columns that were changed")
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held) << 10
    if grown > CASE_BYTES:
        found.append(f"memory: {grown >> 20} MiB more")
    return opened, found


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/memfeed/" in frame.filename] or frames[-1:]
    place = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}"
    return f"{type(error).__name__} at {place}: {str(error)[:200]}"


def run(seed: str, seconds: float, cases: int, out: Path) -> dict[str, int]:
    """Cases until the time is over, in this process; those that fail are saved in ``out``, with what was wrong."""
    out.mkdir(parents=True, exist_ok=True)
    for name in ("tensordict", "torchvision.tv_tensors", "torch_geometric.data"):  # what they open is no store's doing
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    can_limit()  # opens torch's library
    sys.addaudithook(_audit)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, size + ROOM))
    rng, counts, seen, end = random.Random(seed), Counter[str](), set[str](), time.monotonic() + seconds
    with tempfile.TemporaryDirectory(dir=out) as room:
        while time.monotonic() < end and counts["cases"] < cases:
            kind, case = make_case(rng)
            (out / "current.json").write_text(case.to_json())
            faulthandler.dump_traceback_later(CASE_SECONDS, exit=True)
            opened, found = exercise(case, Path(room) / "s", shown=counts["cases"] % 8 == 0)
            faulthandler.cancel_dump_traceback_later()
            counts.update({"cases": 1, kind: 1, "opened": opened, "refused": not opened, "failed": bool(found)})
            for one in found:
                if (what := one.split(": ")[0] + one.partition(" at ")[2][:20]) not in seen:
                    seen.add(what)
                    print(f"{case.base} {kind}: {one}", file=sys.stderr)
                    (out / f"{seed.replace(':', '-')}-{counts['cases']}.json").write_text(case.to_json())
    (out / "current.json").unlink(missing_ok=True)
    return dict(counts)


def mutations(seconds: float, rng: random.Random, *, cases: int = 1 << 60, out: Path | None = None) -> dict[str, int]:
    """Hostile stores for so long (or so many of them): how many of each kind there were.

    Raises AssertionError where one did what it must not do; those are saved in ``out`` (a temporary directory where
    it is left out), each to be put into fixtures/hostile once it is understood.
    """
    out = Path(tempfile.mkdtemp(prefix="memfeed-hostile-")) if out is None else out
    counts, end, wrong = Counter[str](), time.monotonic() + seconds, list[str]()
    while (left := end - time.monotonic()) > 1 and counts["cases"] < cases and len(wrong) < 5:
        seed, now = str(rng.getrandbits(48)), min(left, BATCH_SECONDS)
        arguments = ["--seed", seed, "--seconds", str(now), "--cases", str(cases - counts["cases"]), "--out", str(out)]
        done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, timeout=now + 300)
        if done.returncode:
            if (out / "current.json").exists():
                (out / "current.json").replace(out / f"crash-{seed}.json")
            wrong.append(f"exit status {done.returncode} with the seed {seed}: {done.stderr[-3000:]}")
            continue
        batch = json.loads(done.stdout.splitlines()[-1])
        counts.update(batch)
        if batch.get("failed"):
            wrong.append(done.stderr[-3000:])
    if wrong:
        raise AssertionError(
            f"found {len(wrong)} batches of hostile stores that went wrong ({out}):\n" + "\n".join(wrong)
        )
    shutil.rmtree(out)
    return dict(counts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", default="0")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--cases", type=int, default=1 << 60)
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "memfeed-hostile")
    given = parser.parse_args()
    print(json.dumps(run(given.seed, given.seconds, given.cases, given.out)))
