"""The Python of the README and of the guide runs as it stands, block after block, the way a reader would paste it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def blocks(text: str) -> list[str]:
    found = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return [block for block in found if "\n    ..." not in block]  # these show lines, not a program


PAGES = {  # page -> the stores that its program leaves
    "README.md": ["squares.mf", "photos.mf"],
    "docs/guide.md": ["squares.mf", "images.mf", "replay", "steps.mf", "filled.mf"],
}


@pytest.mark.parametrize("page", PAGES)
def test_the_page_runs(page, tmp_path):
    image = pytest.importorskip("PIL.Image")
    for row in range(8):
        folder = tmp_path / "photos" / "ab"[row % 2]
        folder.mkdir(parents=True, exist_ok=True)
        image.new("RGB", (240 + row, 230), (20 * row, 90, 40)).save(folder / f"{row}.jpg")
    found = blocks((ROOT / page).read_text())
    assert page == "README.md" or len(found) >= 5
    script = tmp_path / "page.py"
    script.write_text("\n".join(found))
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "row 3" in done.stdout
    assert page == "README.md" or "NestedTensor" in done.stdout
    for name in PAGES[page]:
        assert (tmp_path / name).is_dir()


@pytest.mark.parametrize(("page", "most"), [("README.md", 900), ("CHANGELOG.md", 999)])
def test_a_page_that_many_read_is_short(page, most):
    assert len((ROOT / page).read_text().split()) <= most


def anchors(page: Path) -> set[str]:
    """Return the names that links to the headings of a page have, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    titles = (re.sub(r"[^\w\- ]", "", title.lower()) for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE))
    return {title.strip().replace(" ", "-") for title in titles}


def test_every_place_the_documents_point_to_is_there():
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text()):
            path, _, anchor = target.partition("#")
            linked = page.parent / path if path else page
            assert linked.exists(), f"{page.name} points to {target}"
            assert not anchor or anchor in anchors(linked), f"{page.name} points to {target}"


@pytest.mark.parametrize(("page", "least"), [("reliability", 40), ("design", 30)])
def test_every_test_that_a_promise_names_is_there(page, least):
    """As ``test_build::test_x[name]``, or ``::test_y`` for one more of the same file."""
    files = {path.stem: path for path in (ROOT / "tests").rglob("test_*.py")}
    module, count = "", 0
    for name in re.findall(r"`((?:test_\w+)?(?:::\w+)?)[^`]*`", (ROOT / "docs" / f"{page}.md").read_text()):
        if not name:
            continue
        module, _, function = (name if name.startswith("test_") else module + name).partition("::")
        source = files[module].read_text()
        assert not function or re.search(rf"^(def|class) {function}\b", source, re.MULTILINE), name
        count += 1
    assert count > least


def test_every_file_that_contributing_names_is_there():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    names = set(re.findall(r"`([\w./]+(?:\.py|\.md|/))`", text))
    assert len(names) > 25
    bases = (ROOT, ROOT / "src" / "memfeed", ROOT / "tests", ROOT / "tests" / "transforms")
    missing = sorted(name for name in names if not any((base / name).exists() for base in bases))
    assert not missing, f"CONTRIBUTING.md names {missing}"
