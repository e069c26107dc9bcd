"""The site is built from the pages without a warning, and all that its pages link to is there."""

import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

import memfeed
from html_pages import needs_chromium
from test_readme import ROOT

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The directory of the built site."""
    for module in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(module, reason="it comes with the extra 'docs': make docs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", folder / "doctrees"]
    done = subprocess.run(
        [*map(str, command), str(ROOT / "docs"), str(folder / "html")], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "html"


def test_all_that_a_page_links_to_is_there(site):
    texts = {page: page.read_text() for page in site.rglob("*.html")}
    names = {page: set(re.findall(r'\bid="([^"]+)"', text)) for page, text in texts.items()}
    assert len(texts) > 35
    for page, text in texts.items():
        for target in re.findall(r'\b(?:href|src)="(?![a-z]+:|//)([^"]+)"', text):
            path, _, anchor = unquote(target).partition("#")
            linked = (page.parent / path.partition("?")[0]).resolve() if path else page
            assert linked.exists(), f"{page.name} links to {target}"
            assert not anchor or linked not in names or anchor in names[linked], f"{page.name} links to {target}"


def test_every_public_name_is_in_the_api(site):
    text = (site / "api.html").read_text()
    modules = {"__version__", "errors", "transforms"}
    missing = [name for name in memfeed.__all__ if name not in modules and f'id="memfeed.{name}"' not in text]
    assert not missing
    assert 'id="memfeed.transforms.RandomCrop"' in (site / "api_transforms.html").read_text()
    assert 'id="memfeed.errors.StoreError"' in (site / "api_errors.html").read_text()


def test_llms_txt_names_every_page(site):
    text = (site / "llms.txt").read_text()
    assert text.startswith("# memfeed\n\n> Decode a PyTorch dataset once")
    linked = re.findall(r"^- \[[^\]]+\]\(([^)]+)\)", text, re.MULTILINE)
    assert all((site / path).stat().st_size > 100 for path in linked)
    assert len(linked) == len([*(ROOT / "docs").rglob("*.md")])


def test_the_first_page_is_the_readme(site):
    text = (site / "index.html").read_text()
    assert "Wrong tool if" in text
    assert "README</a>" not in text


@needs_chromium
def test_pictures_of_the_site_show_the_pages(site, tmp_path):
    """Each picture has the width that was asked for, and more than one color; pages of other widths look different."""
    Image = pytest.importorskip("PIL.Image")
    script = [sys.executable, str(ROOT / "docs" / "draw_site.py"), str(site), str(tmp_path)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    pictures = sorted(tmp_path.glob("*.png"))
    assert len(pictures) == 21
    assert f"docs: 7 pages at 3 widths are in {tmp_path}" in done.stdout
    for picture in pictures:
        width = int(picture.stem.rpartition("-")[2])
        with Image.open(picture) as image:
            assert image.size == (max(width, 500), 1600)
            assert len(set(image.convert("L").resize((width // 8, 200)).tobytes())) > 16
