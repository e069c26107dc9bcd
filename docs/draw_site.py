"""Take pictures of pages of the built site at three widths, in headless Chromium: to look at after ``make docs``.

python docs/draw_site.py build/site build/pictures
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PAGES = ("index", "guide", "bench", "choosing", "forms", "gallery", "benchmarks")
WIDTHS = (390, 768, 1280)  # a phone, a tablet, a laptop; in pixels
HEIGHT = 1600
NAMES = ("chromium", "chromium-browser", "google-chrome")


def browser() -> str | None:
    """Return the path of Chromium; None if it is not installed."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def draw(chromium: str, page: Path, width: int, picture: Path) -> None:
    """Write a picture of a page, as it is in a window of this width. Raise RuntimeError if there is none."""
    with tempfile.TemporaryDirectory() as scratch:
        frame = Path(scratch, "frame.html")  # a window has at least 500 pixels, a frame may have fewer
        frame.write_text(
            f'<body style="margin:0"><iframe src="{page.resolve().as_uri()}" '
            f'style="width:{width}px;height:{HEIGHT}px;border:0"></iframe></body>'
        )
        done = subprocess.run(
            [
                chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
                "--disable-background-networking", "--allow-file-access-from-files", "--virtual-time-budget=5000",
                f"--user-data-dir={scratch}/profile", f"--window-size={max(width, 500)},{HEIGHT}",
                f"--screenshot={picture.resolve()}", str(frame),
            ],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
    if not picture.is_file():
        raise RuntimeError(f"{page}: found no picture after Chromium ended ({done.stderr[-300:]}); expected {picture}")


def main(site: Path, pictures: Path) -> None:
    """Draw all pages at all widths; without Chromium say so."""
    chromium = browser()
    if chromium is None:
        print("docs: no pictures of the pages, because Chromium is not installed: apt-get install chromium")
        return
    pictures.mkdir(parents=True, exist_ok=True)
    for name in PAGES:
        for width in WIDTHS:
            draw(chromium, site / f"{name}.html", width, pictures / f"{name}-{width}.png")
    print(f"docs: {len(PAGES)} pages at {len(WIDTHS)} widths are in {pictures}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
