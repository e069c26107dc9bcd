"""Checks of HTML pages: which elements they have, and that a browser shows all of them on a screen of some width."""

import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTHS = (360, 800, 1400)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")

ELEMENTS = {
    "html", "head", "meta", "title", "body", "style", "main", "h1", "h2", "p", "div", "span", "i", "img",
    "table", "thead", "tbody", "tr", "th", "td",
}  # fmt: skip
HOSTILE = (
    "<script>alert(1)</script>",
    '" onmouseover="alert(1)',
    "'><img src=x onerror=alert(1)>",
    "</style><b>",
    "&lt;i&gt;",
)
"""Text that would be an element, or an attribute of one, if it were not escaped."""


class Tags(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.opened, self.attributes, self.texts, self._open = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.opened.append(tag)
        self.attributes += attributes
        if tag not in ("img", "meta"):
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if "style" not in self._open:
            self.texts.append(data)


def require_harmless(html):
    """Assert that a page is whole, and has no element or attribute that runs or fetches anything. Return its text."""
    tags = Tags(html)
    assert not tags._open
    assert set(tags.opened) <= ELEMENTS
    for name, value in tags.attributes:
        assert not name.startswith("on")
        assert name not in ("href", "srcset", "action")
        assert name != "src" or re.fullmatch(r"data:image/png;base64,[A-Za-z0-9+/=]+", value)
    assert "url(" not in html
    assert "@import" not in html
    return "\n".join(tags.texts)


def widest_part(page, width, scratch):
    """Return the right edge of the widest part of a page in a frame of so many pixels, in Chromium."""
    (scratch / "frame.html").write_text(
        f'<iframe id="f" src="{page}" style="width:{width}px;height:900px;border:0"></iframe><p id="out"></p><script>'
        'document.getElementById("f").onload = () => { const d = document.getElementById("f").contentDocument;'
        "const widest = Math.max(d.documentElement.scrollWidth,"
        '...[...d.querySelectorAll("*")].map(e => e.getBoundingClientRect().right));'
        'document.getElementById("out").textContent = "widest=" + Math.ceil(widest) + " ink=" '
        '+ getComputedStyle(d.querySelector(".mf")).color; };</script>'
    )
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files",
         f"--user-data-dir={scratch}/profile", "--virtual-time-budget=5000", "--window-size=1600,1200", "--dump-dom",
         str(scratch / "frame.html")],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    found = re.search(r"widest=(\d+) ink=rgb", done.stdout)
    assert found, done.stdout[-500:] + done.stderr[-500:]
    return int(found[1])
