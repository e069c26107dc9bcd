"""Draw docs/rooms.svg: the rooms of src/memfeed (folders, and the modules beside them) and the imports between them.

python docs/draw_rooms.py

The layers are those of the import contract in pyproject.toml. An arrow points from a room to one that it imports.
Fails on a circle of imports.
"""

from __future__ import annotations

import ast
import math
import re
import sys
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import product
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "memfeed"
PICTURE = ROOT / "docs" / "rooms.svg"
LEFT = {"cli", "convert", "building", "store", "transfer", "schema", "system"}
RIGHT = {"testing", "loading", "memoizing", "transforms", "tables", "random"}
"""The column of a room. Those in neither stand in the middle."""

BOX_WIDTH, BOX_HEIGHT, LANE_WIDTH, LAYER_HEIGHT, MARGIN = 308, 82, 384, 136, 30
DARK, PALE, INK, PALE_INK, PAPER = "#35629b", "#d3d8e2", "#22283a", "#5b647a", "#f2f5fa"

Arrows = Counter[tuple[str, str]]
Point = tuple[float, float]
Weights = tuple[float, float, float, float]

WEIGHTS: list[Weights] = [
    ((1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3) for t in (step / 24 for step in range(25))
]
"""Of the four points that make a curve, at the points of it that are compared with the boxes."""


def find_rooms() -> dict[str, str]:
    """Return the rooms, each with the first line of its docstring."""
    files = [path for path in PACKAGE.glob("*.py") if path.stem not in ("__init__", "__main__")] + [
        *PACKAGE.glob("*/__init__.py")
    ]
    texts = {_room_of(path): ast.get_docstring(ast.parse(path.read_text())) or "" for path in files}
    return {room: text.partition("\n")[0] for room, text in sorted(texts.items())}


def find_arrows(rooms: dict[str, str]) -> Arrows:
    """Count the import statements between rooms. A use of ``memfeed.X`` counts for the room that defines X."""
    public: dict[str, str] = {}
    for names in _imports(PACKAGE / "__init__.py", {}):
        public |= dict.fromkeys(names, names[0])
    paths = [path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py"]
    pairs = [(_room_of(path), names[0]) for path in paths for names in _imports(path, public)]
    return Counter(
        (source, target) for source, target in pairs if {source, target} <= rooms.keys() and source != target
    )


def _room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def _imports(path: Path, public: dict[str, str]) -> Iterator[list[str]]:
    """Yield the room of each import of memfeed, followed by the names that are imported from it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "memfeed":
            yield from ([public.get(alias.name, alias.name)] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("memfeed."):
            yield [str(node.module).split(".")[1], *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            yield from ([alias.name.split(".")[1]] for alias in node.names if alias.name.startswith("memfeed."))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "memfeed":
            yield [public.get(node.attr, node.attr)]


def sorted_rooms(arrows: Arrows) -> list[str]:
    """Return the rooms, each after those that it imports. Raises ValueError for a circle."""
    targets = defaultdict(set)
    for source, target in arrows:
        targets[source].add(target)
    try:
        return list(TopologicalSorter(targets).static_order())
    except CycleError as error:
        raise ValueError(f"found a circle of imports, {' -> '.join(error.args[1][::-1])}; expected none") from None


def direct_arrows(arrows: Arrows) -> set[tuple[str, str]]:
    """Return the arrows that no path over other rooms implies."""
    below: dict[str, set[str]] = {}
    for room in sorted_rooms(arrows):
        targets = {target for source, target in arrows if source == room}
        below[room] = targets.union(*(below[target] for target in targets))
    return {
        (source, target)
        for source, target in arrows
        if not any(target in below[other] for room, other in arrows if room == source)
    }


def layers() -> list[list[str]]:
    """Return the rooms of each layer of the import contract, from the top."""
    found = re.search(r"^layers = (\[.*?^\])", (ROOT / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE)
    assert found is not None
    return [layer.split(" | ") for layer in ast.literal_eval(found[1])]


def draw(rooms: dict[str, str], arrows: Arrows) -> str:
    """Return the picture as SVG. Its description lists the arrows."""
    corners = {
        room: (MARGIN + LANE_WIDTH * (0 if room in LEFT else 2 if room in RIGHT else 1), MARGIN + LAYER_HEIGHT * row)
        for row, layer in enumerate(layers())
        for room in layer
    }
    if set(corners) != set(rooms):
        raise ValueError(f"found rooms {sorted(rooms)}; expected those of the contract, {sorted(corners)}")
    if len(set(corners.values())) < len(corners):
        raise ValueError(f"found two rooms of one layer in one column: {corners}; expected others in LEFT and RIGHT")
    direct = direct_arrows(arrows)
    paths = [_arrow(arrow, corners, arrow in direct) for arrow in sorted(sorted(arrows), key=direct.__contains__)]
    width, height = 2 * MARGIN + 2 * LANE_WIDTH + BOX_WIDTH, MARGIN + LAYER_HEIGHT * len(layers()) + 30
    legend = f"{len(rooms)} rooms, {len(arrows)} arrows to what a room imports. Grey: dark arrows lead there too."
    listed = "\n".join(f"{source} imports {target}" for source, target in sorted(arrows))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'font-family="Helvetica, Arial, sans-serif">',
            f"<desc>\n{listed}\n</desc>",
            '<rect width="100%" height="100%" fill="white"/>',
            *paths,
            *(_box(room, text, corners[room]) for room, text in rooms.items()),
            f'<text x="{MARGIN}" y="{height - 20}" font-size="14" fill="{PALE_INK}">{legend}</text>',
            "</svg>\n",
        ]
    )


def _box(room: str, text: str, corner: Point) -> str:
    x, y = corner
    lines = textwrap.wrap(text.replace("``", "").replace("`", ""), 46, max_lines=3, placeholder=" ...")
    parts = [
        f'<rect x="{x}" y="{y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="7" fill="{PAPER}" stroke="{DARK}"/>',
        f'<text x="{x + 12}" y="{y + 22}" font-size="17" font-weight="bold" fill="{INK}">{room}</text>',
    ]
    for index, line in enumerate(lines):
        parts.append(
            f'<text x="{x + 12}" y="{y + 40 + 16 * index}" font-size="12.5" fill="{PALE_INK}">{escape(line)}</text>'
        )
    return "".join(parts)


def _arrow(arrow: tuple[str, str], corners: dict[str, Point], is_direct: bool) -> str:
    """Return the curve from one box to another that runs under the fewest boxes and is short."""
    (x0, y0), (x1, y1) = corners[arrow[0]], corners[arrow[1]]
    y0 += BOX_HEIGHT
    low, high = min(y0, y1) - 8, max(y0, y1) + 8  # a curve stays between its ends
    others = [at for room, at in corners.items() if room not in arrow and low < at[1] + BOX_HEIGHT and at[1] < high]
    ends = (0.15, 0.3, 0.5, 0.7, 0.85)
    curves = []
    for start, end, bend in product(ends, ends, range(-400, 401, 50)):
        a, d = (x0 + start * BOX_WIDTH, y0), (x1 + end * BOX_WIDTH, y1)
        height = (y1 - y0) / 3
        b, c = (a[0] * 0.75 + d[0] * 0.25 + bend, y0 + height), (a[0] * 0.25 + d[0] * 0.75 + bend, y1 - height)
        curves.append((abs(bend) + abs(a[0] - d[0]) + 30 * abs(start - 0.5), [a, b, c, d]))
    best: tuple[float, list[Point]] = (float("inf"), [])
    for length, curve in sorted(curves):
        if length > best[0]:
            break  # those that are left cost more, though no box is in their way
        points = [_on_curve(curve, weights) for weights in WEIGHTS]
        hits = sum(
            x - 8 < px < x + BOX_WIDTH + 8 and y - 8 < py < y + BOX_HEIGHT + 8 for px, py in points for x, y in others
        )
        outside = sum(not 4 < px < 2 * MARGIN + 2 * LANE_WIDTH + BOX_WIDTH - 4 for px, _ in points)
        best = min(best, (1000 * (hits + outside) + length, curve))
    a, b, (cx, cy), (dx, dy) = best[1]
    colour, weight = (DARK, 2) if is_direct else (PALE, 1.3)
    slope = math.hypot(dx - cx, dy - cy)
    ux, uy = 9 * (dx - cx) / slope, 9 * (dy - cy) / slope  # along the arrow's head
    head = ((dx, dy), (dx - ux - uy / 2, dy - uy + ux / 2), (dx - ux + uy / 2, dy - uy - ux / 2))
    path = "M{} C{} {} {}".format(*map(_text, (a, b, (cx, cy), (dx - ux / 2, dy - uy / 2))))
    return (
        f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{weight}"/>'
        f'<polygon points="{" ".join(map(_text, head))}" fill="{colour}"/>'
    )


def _text(point: Point) -> str:
    return f"{point[0]:.1f},{point[1]:.1f}"


def _on_curve(points: list[Point], weights: Weights) -> Point:
    (ax, ay), (bx, by), (cx, cy), (dx, dy) = points
    a, b, c, d = weights
    return a * ax + b * bx + c * cx + d * dx, a * ay + b * by + c * cy + d * dy


def main() -> None:
    """Write the picture, and print the number of rooms and arrows and the arrows that stand for a single import."""
    rooms = find_rooms()
    arrows = find_arrows(rooms)
    PICTURE.write_text(draw(rooms, arrows))
    print(f"{len(rooms)} rooms, {len(arrows)} arrows between them: {PICTURE.relative_to(ROOT)}")
    for (source, target), count in sorted(arrows.items()):
        if count == 1:
            print(f"  one import only: {source} -> {target}")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"draw_rooms: {error}")
