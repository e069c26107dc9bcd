"""How Sphinx builds the site: ``make docs``. The pages are those that GitHub shows, and their links work in both."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

from sphinx.application import Sphinx

DOCS = Path(__file__).parent
ROOT = DOCS.parent

project = "memfeed"
author = copyright = "The memfeed authors"
release = version = metadata.version("memfeed")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"memfeed {release}"

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")


def put_readme(app: Sphinx, name: str, content: list[str]) -> None:
    """Put the README into the first page. Its links begin at the root of the repository."""
    if name == "index":
        readme = (ROOT / "README.md").read_text()
        readme = re.sub(r"\]\((?![a-z]+:|#)(?!docs/)", "](../", readme).replace("](docs/", "](")
        content[0] = content[0].replace("[README](../README.md)", readme)


def name_files(app: Sphinx, name: str, content: list[str]) -> None:
    """Show the path of a file in place of a link to it, if it is in the repository but not in the site."""
    folder = (DOCS / name).parent

    def shown(match: re.Match[str]) -> str:
        text, target = match.groups()
        path = target.partition("#")[0]
        if re.match(r"[a-z]+:", target) or not path or (folder / path).resolve().is_relative_to(DOCS):
            return match[0]
        place = str((folder / path).resolve().relative_to(ROOT))
        return f"`{place}`" if text.strip("`") in (place, path) else f"{text} (`{place}`)"

    content[0] = LINK.sub(shown, content[0])


def escape_stars(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Escape the stars of shapes such as ``[1, *shape]``. Of the package only the first line is shown."""
    if name == "memfeed":
        del lines[1:]
    indent_before_code = None
    for at, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if indent_before_code is not None and line.strip() and indent <= indent_before_code:
            indent_before_code = None
        if indent_before_code is None:
            parts = re.split(r"(``.*?``)", line)
            parts[::2] = [re.sub(r"(?<!\\)\*(?=\w)", r"\\*", part) for part in parts[::2]]
            lines[at] = "".join(parts)
            indent_before_code = indent if line.endswith("::") else None


def described(page: Path) -> tuple[str, str]:
    """Return the title of a page and its first sentence."""
    title, _, text = page.read_text().removeprefix("# ").partition("\n")
    first = LINK.sub(r"\1", " ".join(text.strip().split("\n\n")[0].split()))
    return title, "" if first.startswith(("```", "|", "#", "-")) else re.split(r"(?<=\.) ", first)[0]


def write_llms(app: Sphinx, error: Exception | None) -> None:
    """Write ``llms.txt``: what memfeed is, and each page as Markdown with its first sentence."""
    if error is not None or app.builder.name != "html":
        return
    sources = Path(app.outdir) / "_sources"
    (sources / "index.md.txt").write_text((ROOT / "README.md").read_text())
    lines = ["# memfeed", "", f"> {metadata.metadata('memfeed')['Summary']}.", "", "## Pages", ""]
    lines.append("- [First page](_sources/index.md.txt)")
    for name in sorted({*app.env.found_docs} - {"index"}, key=lambda name: ("/" in name, name)):
        title, sentence = described(DOCS / f"{name}.md")
        lines.append(f"- [{title}](_sources/{name}.md.txt)" + (f": {sentence}" if sentence else ""))
    (Path(app.outdir) / "llms.txt").write_text("\n".join(lines) + "\n")


def setup(app: Sphinx) -> None:
    """Connect the functions above."""
    app.connect("source-read", put_readme, priority=400)
    app.connect("source-read", name_files)
    app.connect("autodoc-process-docstring", escape_stars, priority=900)
    app.connect("build-finished", write_llms)
