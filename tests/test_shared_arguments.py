"""One meaning for `progress=`, `pad=`, `fields=` and `select=`, wherever they are taken, found by their signatures."""

import inspect
import math
import re
import sys

import pytest
import torch
from torch.utils.data import DataLoader

import memfeed
import memfeed.testing
import memfeed.transforms
from memfeed.cli import app, main
from memfeed.errors import FieldError
from support import Made, equal

LENGTHS = [3, 1, 4]
BAR = re.compile(r"100%[| ]")  # of a terminal, of a pipe


def public():
    """Yield the names and signatures of all public functions, classes and methods."""
    for module in (memfeed, memfeed.transforms, memfeed.testing):
        for name in module.__all__:
            one = getattr(module, name)
            found = [(f"{module.__name__}.{name}", one)] if callable(one) else []
            if inspect.isclass(one):
                members = inspect.getmembers(one, callable)
                found += [(f"{module.__name__}.{name}.{key}", member) for key, member in members if key[0] != "_"]
            for label, function in found:
                try:
                    yield label.removeprefix("memfeed."), inspect.signature(function)
                except (TypeError, ValueError):  # of a class or method of Python's own
                    continue


def taking(argument):
    return {label: signature.parameters[argument] for label, signature in public() if argument in signature.parameters}


def sample(i):
    n = LENGTHS[i]
    return {"a": torch.arange(n) + 10 * i, "b": torch.full((n, 2), i + 0.5), "c": i}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return memfeed.cache(Made(sample, 3), tmp_path_factory.mktemp("shared") / "a.mf", progress=False)


def message(error, use, *arguments):
    with pytest.raises(error) as caught:
        use(*arguments)
    return str(caught.value)


# --- progress=


DATA = [1, 2, 3, 4]
PROGRESS = {
    "cache": lambda room, p: memfeed.cache(DATA, room / "new.mf", workers=0, progress=p),
    "repair": lambda room, p: memfeed.repair(DATA, room / "a.mf", progress=p),
    "append": lambda room, p: memfeed.append(room / "a.mf", DATA, workers=0, progress=p),
    "concat": lambda room, p: memfeed.concat([room / "a.mf"], room / "new.mf", progress=p),
    "recode": lambda room, p: memfeed.recode(room / "a.mf", room / "new.mf", {"value": "zstd"}, progress=p),
    "push": lambda room, p: memfeed.push(room / "a.mf", f"file://{room}/new.mf", progress=p),
    "pull": lambda room, p: memfeed.pull(f"file://{room}/there.mf", room / "new.mf", progress=p),
    "Store.to": lambda room, p: memfeed.open(room / "a.mf").to("cpu", progress=p),
    "Store.verify": lambda room, p: memfeed.open(room / "a.mf").verify(progress=p),
}
COMMANDS = {
    "cache": ["cache", "shared_data:DATA", "new.mf", "--workers", "0"],
    "append": ["append", "a.mf", "shared_data:DATA", "--workers", "0"],
    "concat": ["concat", "a.mf", "new.mf"],
    "recode": ["recode", "a.mf", "new.mf", "--form", "value=zstd"],
    "verify": ["verify", "a.mf"],
    "push": ["push", "a.mf", "file://{room}/new.mf"],
    "pull": ["pull", "file://{room}/there.mf", "new.mf"],
    "demo": ["demo", "--count", "4", "--workers", "0"],
}
FLAGS = {True: ["--progress"], False: ["--no-progress"], None: []}


def run(words, room, progress):
    assert main([word.format(room=room) for word in words] + FLAGS[progress]) == 0


USES = {**PROGRESS, **{f"memfeed {key}": lambda room, p, key=key: run(COMMANDS[key], room, p) for key in COMMANDS}}


@pytest.fixture
def room(tmp_path, monkeypatch):
    """Return a directory with a store, and the same store at an address; copies need not be slow to show a bar."""
    memfeed.push(memfeed.cache(DATA, tmp_path / "a.mf", workers=0), f"file://{tmp_path}/there.mf", progress=False)
    (tmp_path / "shared_data.py").write_text(f"DATA = {DATA}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "shared_data", raising=False)
    for module in ("store.bulk", "store.store", "convert.append"):
        monkeypatch.setattr(f"memfeed.{module}.SLOW_SECONDS", -1.0)
    return tmp_path


def test_no_use_of_progress_is_forgotten():
    assert {label: one.default for label, one in taking("progress").items()} == dict.fromkeys(PROGRESS)
    commands = {one.callback.__name__: inspect.signature(one.callback).parameters for one in app.registered_commands}
    found = {name: parameters["progress"].default for name, parameters in commands.items() if "progress" in parameters}
    assert found == dict.fromkeys(COMMANDS)


@pytest.mark.parametrize("use", sorted(set(USES) - {"memfeed demo"}))
@pytest.mark.parametrize(
    ("progress", "terminal", "is_shown"),
    [(None, False, False), (None, True, True), (True, False, True), (False, True, False)],
)
def test_progress_shows_a_bar_as_it_says(room, capsys, monkeypatch, use, progress, terminal, is_shown):
    capsys.readouterr()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    USES[use](room, progress)
    shown = capsys.readouterr().err
    assert bool(BAR.search(shown)) == is_shown, shown
    if progress is False:
        assert not shown


@pytest.mark.parametrize("value", ["yes", 1, print], ids=["text", "number", "function"])
def test_other_values_of_progress_are_refused(room, value):
    for use in PROGRESS.values():
        said = message(ValueError, use, room, value)
        assert said.startswith(f"found progress={value!r}; expected True (show a bar), False (show none), or None")


@pytest.mark.parametrize("use", [name for name in PROGRESS if not name.startswith("Store.")])
def test_progress_is_checked_before_anything_is_done(tmp_path, use):
    assert message(ValueError, PROGRESS[use], tmp_path, "yes").startswith("found progress='yes'")
    assert not list(tmp_path.iterdir())


# --- pad=, and eos= of the same rule


NOT_A = "found pad={} for field a, which is jagged int64 [*]; expected a number that int64 holds exactly: pad=0"


def packed(store, **options):
    names = ["a", "b"] if "b" in [field.name for field in store.schema] else None
    return store.packed(names, 5, **options)[:]


PADS = {
    "Loader": lambda store, pad: next(iter(memfeed.Loader(store, 3, pad=pad))),
    "Collate": lambda store, pad: next(iter(DataLoader(store, 3, collate_fn=memfeed.Collate(pad=pad)))),
    "Store.packed": lambda store, pad: packed(store, pad=pad),
}
FILLS = {**PADS, "Store.packed(eos=)": lambda store, eos: packed(store, eos=eos)}


def test_no_use_of_pad_is_forgotten():
    assert {label: one.default for label, one in taking("pad").items()} == dict.fromkeys(PADS)
    assert set(taking("eos")) == {"Store.packed"}


@pytest.mark.parametrize("use", FILLS)
def test_a_number_is_that_of_all_fields(store, use):
    fill = FILLS[use]
    assert equal(fill(store, 7), fill(store, {"a": 7, "b": 7}))
    assert equal(fill(store, 7), fill(store, {("b",): 7.0, "a": 7}))
    assert not equal(fill(store, 7), fill(store, {"a": 7, "b": 8}))
    assert (fill(store, 7)["b"] == 7).any()
    assert not any(isinstance(part, torch.Tensor) and (part == 7).any() for part in fill(store, None).values())


@pytest.mark.parametrize(
    ("pad", "expected"),
    [
        *((value, NOT_A.format(value)) for value in (True, 0.5, math.nan, 1 << 70)),
        *(({"a": value}, NOT_A.format(value)) for value in (None, [0], 0.5)),
        ({"a": 0, "b": False}, "found pad=False for field b, which is jagged float32 [*, 2]; expected a number that "
         "float32 holds exactly: pad=0"),
        ("0", "found pad='0'; expected a number for all fields of varying length (a, b), or one for each field: "
         'pad={"a": 0}'),
        ([0, 0], "found pad=[0, 0]; expected a number for all fields of varying length (a, b), or one for each field: "
         'pad={"a": 0}'),
        ({}, "found pad={}; expected a number for all fields of varying length (a, b), or one for each field: "
         'pad={"a": 0}'),
        ({"c": 0}, "found pad= for field c, which is int64 []; expected one of the fields of varying length that are "
         "filled up (a, b): leave c out of pad="),
        ({"z": 0}, "found no field 'z'; expected one of: a, b, c"),
        ({"a": 0, ("a",): 1}, "found two values for field a in pad={'a': 0, ('a',): 1}; expected one: leave one out"),
    ],
)  # fmt: skip
def test_what_fills_up_nothing_is_refused_alike(store, pad, expected):
    for name, use in FILLS.items():
        said = message(FieldError, use, store, pad)
        assert said == (expected.replace("pad=", "eos=") if "eos" in name else expected)


def test_pad_where_no_field_varies(store):
    for name, use in FILLS.items():
        said = message(FieldError, use, store.select("c"), 0)
        if name in ("Loader", "Collate"):
            assert said == "found pad=0; expected a field of varying length: leave pad= out"
        else:  # it needs such a field without pad= too
            assert said.startswith("found 0 fields of varying length (none); expected one")


def test_packed_fields_are_all_filled_up_or_none(store):
    for option in ("pad", "eos"):
        said = message(FieldError, lambda: packed(store, **{option: {"a": 0}}))  # noqa: B023
        assert said.startswith(f"found {option}={{'a': 0}} without field b; expected a number for each packed field")
    said = message(FieldError, lambda: store.packed("a", 5, pad={"b": 0}))
    assert said.startswith("found pad= for field b, which is jagged float32 [*, 2]; expected one of the fields")


# --- select=, and other arguments that name fields of a store


SEVERAL = {
    "open(select)": lambda store, which: memfeed.open(store.path, select=which),
    "Store.select(which)": lambda store, which: store.select(which),
}
ONE = {
    "Store.column(which)": lambda store, which: store.column(which),
    "Store.lengths(which)": lambda store, which: store.lengths(which),
    "Store.packed(which)": lambda store, which: store.packed(which, 2),
    "Store.windows(within)": lambda store, which: store.windows({"c": [0]}, within=which),
    "Loader(bucket_by)": lambda store, which: memfeed.Loader(store, 2, bucket_by=which),
    "Tokens(field)": lambda store, which: memfeed.Loader(store, bucket_by=memfeed.Tokens(9, which)),
}


def test_no_argument_that_names_fields_is_forgotten():
    found = {
        f"{label}({name})" for name in ("select", "which", "within", "bucket_by", "field") for label in taking(name)
    }
    assert found == {*SEVERAL, *ONE}
    assert set(taking("fields")) == {"cache", "repair"}


def test_select_is_one_word_with_one_meaning(store):
    for which in ("a", "c", ("b",), ["c", ("a",)]):
        opened, selected = (use(store, which) for use in SEVERAL.values())
        assert opened.schema == selected.schema
        assert opened == selected
    with pytest.raises(TypeError, match="fields"):
        memfeed.open(store.path, fields="a")


@pytest.mark.parametrize(
    ("which", "expected"),
    [
        ("aa", "found no field 'aa'; expected one of: a, b, c: write 'a'"),
        (-1, "found no field -1; expected one of: a, b, c"),
        (("a", "b"), "found no field ('a', 'b'); expected one of: a, b, c. A tuple is one path; for several fields "
         "write ['a', 'b']"),
        (1.5, "found 1.5 as the name of a field; expected a str or int, a tuple for one path, or a list for several "
         "fields, of: a, b, c"),
    ],
)  # fmt: skip
def test_a_name_of_no_field_is_refused_alike(store, which, expected):
    for use in (*SEVERAL.values(), *ONE.values()):
        assert message(FieldError, use, store, which) == expected


# --- fields=


PAIRS = [(1, 2.0), (3, 4.0)]
FIELDS = {
    "cache": lambda path, data, fields: memfeed.cache(data, path / "new.mf", fields=fields, progress=False),
    "repair": lambda path, data, fields: memfeed.repair(
        data, memfeed.cache(data, path / "a.mf", progress=False).path, fields=fields, progress=False
    ),
}


@pytest.mark.parametrize("use", FIELDS)
@pytest.mark.parametrize("data", [PAIRS, [1, 2]], ids=["pairs", "numbers"])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        *(
            (value, f"found fields={value!r}; expected a name for each leaf of a sample, in order, as "
             'fields=["image"], or kinds by name, as fields={"boxes": "jagged"}')
            for value in (3, b"ab", {"a"}, "", [1, 2], ("a", ""), iter("ab"))
        ),
        ({"z": "fixed"}, "fields=: found no field 'z'; expected one of: "),
        ({0.5: "fixed"}, "fields=: found 0.5 as the name of a field; expected a str or int"),
        ({"z": "round"}, "found kind 'round' for 'z' in fields=; expected one of fixed, jagged"),
    ],
)  # fmt: skip
def test_fields_of_no_meaning_are_refused_alike(tmp_path, use, data, fields, expected):
    assert message(FieldError, FIELDS[use], tmp_path, data, fields).startswith(expected)


def test_fields_take_one_name_a_list_or_a_tuple(tmp_path):
    assert [field.name for field in FIELDS["cache"](tmp_path, [1, 2], "n").schema] == ["n"]
    again = memfeed.cache([1, 2], tmp_path / "new.mf", fields=("n",), progress=False)
    assert again.digest == memfeed.repair([1, 2], again.path, fields="n", progress=False).digest
    as_list, as_tuple = (
        memfeed.cache(PAIRS, tmp_path / f"{kind.__name__}.mf", fields=kind("xy"), progress=False)
        for kind in (list, tuple)
    )
    assert [field.name for field in as_list.schema] == ["x", "y"]
    assert as_list.digest == as_tuple.digest
    said = message(FieldError, FIELDS["cache"], tmp_path / "no", PAIRS, "xy")
    assert said.startswith("found 1 names in fields= (xy); expected 2 different ones, one for each leaf of a sample")
