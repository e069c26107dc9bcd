"""Parts of pages: what they escape, and what a notebook's own rules may not change."""

import re

import pytest

from html_pages import HOSTILE, require_harmless
from memfeed.system.html_parts import _STYLE, SHADES, Html, bar_row, element, fragment, joined, key, page, table, text


@pytest.mark.parametrize("hostile", HOSTILE)
def test_all_text_is_escaped(hostile):
    parts = [
        element("h1", hostile), bar_row(hostile, [("s0", 0.5)], hostile), key("s1", hostile),
        table((hostile, hostile), [(hostile, hostile)]),
    ]  # fmt: skip
    shown = require_harmless(page(hostile, parts))
    assert shown.count(hostile) == 9
    require_harmless(fragment(parts))


def test_text_is_one_line_without_control_codes():
    assert text("a\nb\x1b[0m") == "a\\nb\\x1b[0m"
    assert text("é µ") == "é µ"
    assert text(3) == "3"


def test_html_stays_as_it_is():
    made = joined([element("span", "<"), Html("<i></i>")])
    assert element("p", made) == "<p><span>&lt;</span><i></i></p>"
    assert text(made) is made


def test_a_bar_has_its_parts():
    made = bar_row("a", [("s0", 0.25), ("s1", 0.0), ("s2", 0.5)], "3 B")
    assert re.findall(r"width:([\d.]+)%;background:var\(--(s\d)\)", made) == [("25.00", "s0"), ("50.00", "s2")]


def test_a_cell_says_its_heading_on_a_narrow_screen():
    assert 'data-name="rows"><div>7</div>' in table(("field", "rows"), [("a", 7)])
    with pytest.raises(ValueError, match="zip"):
        table(("field",), [("a", 7)])


def test_a_fragment_is_no_page():
    made = fragment([element("p", "x")])
    assert made.startswith("<style>")
    assert "<html" not in made
    assert 'class="mf"' in made
    assert 'class="mf page"' in page("x", [element("p", "x")])


def test_the_style_is_for_light_and_dark_screens_and_notebooks():
    for part in (
        "prefers-color-scheme:dark",
        'body[data-jp-theme-light="false"] .mf',
        'body[data-jp-theme-light="true"] .mf',
        "body.vscode-dark .mf",
        'html[theme="dark"] .mf',
    ):
        assert part in _STYLE
    colours = {f"--s{number}:" for number in range(SHADES)} | {"--ink:", "--ground:", "--track:"}
    assert all(_STYLE.count(colour) == 4 for colour in colours)  # light and dark, by the screen and by the notebook


def test_no_rule_is_weaker_than_those_of_a_notebook():
    """JupyterLab has rules such as ``.jp-RenderedHTMLCommon tbody tr:nth-child(odd)``."""
    rules = re.sub(r"@media[^{]*\{", "", _STYLE[_STYLE.index("\n.mf") :])
    selectors = [one.strip() for rule in re.findall(r"([^{}]+)\{", rules) for one in rule.split(",")]
    assert len(selectors) > 30
    assert [one for one in selectors if not one.startswith(".mf.mf.mf")] == []
