"""docs/rooms.svg shows the imports as they are, and a circle of imports is an error."""

import ast
import runpy
from collections import Counter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
MODULES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(SOURCE.rglob("*.py"))
}
"""The name of each module -> its file."""
ROOMS = runpy.run_path(str(Path(__file__).parents[1] / "docs" / "draw_rooms.py"))


@pytest.fixture(scope="module")
def found():
    rooms = ROOMS["find_rooms"]()
    return rooms, ROOMS["find_arrows"](rooms)


def test_the_picture_is_up_to_date(found):
    assert ROOMS["PICTURE"].read_text() == ROOMS["draw"](*found), "run `make rooms`"


def test_a_use_of_a_public_name_is_an_arrow_to_its_room(found):
    _, arrows = found
    assert arrows["testing", "loading"] > 1  # memfeed.Loader
    assert arrows["convert", "building"] > 1


def test_a_circle_is_an_error():
    with pytest.raises(ValueError, match="found a circle of imports, a -> b -> a|b -> a -> b"):
        ROOMS["sorted_rooms"](Counter({("a", "b"): 1, ("b", "a"): 2, ("b", "c"): 1}))


def test_an_arrow_is_direct_if_no_other_path_leads_there():
    arrows = Counter({("a", "b"): 1, ("b", "c"): 1, ("a", "c"): 1, ("a", "d"): 1})
    assert ROOMS["direct_arrows"](arrows) == {("a", "b"), ("b", "c"), ("a", "d")}


def test_two_rooms_in_one_place_are_an_error(found, monkeypatch):
    monkeypatch.setitem(ROOMS["draw"].__globals__, "RIGHT", set())
    with pytest.raises(ValueError, match="found two rooms of one layer in one column"):
        ROOMS["draw"](*found)


def test_no_files_import_each_other():
    """Imports inside functions count too: a reader has to understand both files at once."""
    imports = {module: imported_modules(path, module) for module, path in MODULES.items()}
    remaining = dict(imports)
    while remaining:  # take away what imports nothing that is left
        free = [module for module, found in remaining.items() if not (found & remaining.keys()) - {module}]
        if not free:
            break
        for module in free:
            del remaining[module]
    assert not remaining, f"these files import each other: {sorted(remaining)}"


def imported_modules(path, module):
    """Return the modules of memfeed that a file imports anywhere."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            parts = {name.name: f"{node.module}.{name.name}" for name in node.names}
            found |= {part if part in MODULES else node.module for part in parts.values()}
    return (found & MODULES.keys()) - {module, "memfeed"}
