"""Parts of HTML pages: no scripts, no other files, light and dark, for screens of any width, and inside of a notebook.

All text that a part gets is escaped. Only `Html`, which the functions here return, goes into a page as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from memfeed.system.messages import printable

MOST_FIELDS = 40
NAME_WIDTH = 120
"""Characters of a field's name that a page has room for."""
SHADES = 6
"""The colours s0 to s5 of the style."""
_LIGHT = """--ink:#1c2230;--pale:#5b647a;--line:#d9dee7;--ground:#fff;--track:#eef1f5;--waiting:#d1495b;
--transfer:#8a6fc9;--computing:#3d7ea6;--yes:#1b7a43;--no:#9a3b12;--open:#6a5a00;
--s0:#3d7ea6;--s1:#d1495b;--s2:#c98a1b;--s3:#3f8f5f;--s4:#8a6fc9;--s5:#7d8597;color-scheme:light"""
_DARK = """--ink:#e8ebf2;--pale:#a3abbd;--line:#3a4256;--ground:#151923;--track:#252b39;--waiting:#e8707f;
--transfer:#ab94e6;--computing:#6caed6;--yes:#6fd39a;--no:#f0a17c;--open:#e2cf6a;
--s0:#6caed6;--s1:#e8707f;--s2:#e5b04c;--s3:#74c496;--s4:#ab94e6;--s5:#a3abbd;color-scheme:dark"""
_LIGHT_HOSTS = 'body[data-jp-theme-light="true"] .mf,body.vscode-light .mf,html[theme="light"] .mf'
_DARK_HOSTS = 'body[data-jp-theme-light="false"] .mf,body.vscode-dark .mf,html[theme="dark"] .mf'
_RULES = """
.mf {color:var(--ink);background:var(--ground);font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:0 auto;
padding:1rem;box-sizing:border-box}
.mf.mf.mf.page {background:none}
.mf * {overflow-wrap:anywhere;box-sizing:border-box}
.mf h1 {font-size:1.5rem;line-height:1.25;margin:2rem 0 .2rem;font-weight:600}
.mf h1:first-child {margin-top:.2rem}
.mf h2 {font-size:1.1rem;margin:1.6rem 0 .5rem;font-weight:600}
.mf p {margin:.3rem 0}
.mf .pale {color:var(--pale)}
.mf .small {font-size:.85em}
.mf .error {color:var(--no)}
.mf .helps {color:var(--yes)}
.mf .does-not-help {color:var(--no)}
.mf .cannot-tell {color:var(--open)}
.mf .row {display:grid;grid-template-columns:11rem minmax(0,1fr) 8.5rem;gap:.2rem .8rem;align-items:center;
margin:.35rem 0}
.mf .row .n {text-align:right;font-variant-numeric:tabular-nums}
.mf .row .pale {display:block;line-height:1.25}
.mf .bar {display:flex;height:1.3rem;gap:1px;background:var(--track)}
.mf .bar i {display:block;height:100%}
.mf .key {display:inline-flex;align-items:center;margin-right:1rem}
.mf .key i {width:.8rem;height:.8rem;margin-right:.35rem}
.mf table {border-collapse:collapse;width:100%;margin:0;color:inherit;font-size:inherit;table-layout:auto;
border:0}
.mf tr,.mf thead {background:none;border:0}
.mf th,.mf td {border:0;border-bottom:1px solid var(--line);padding:.3rem .6rem .3rem 0;text-align:right;
vertical-align:top;max-width:none;line-height:1.4;font-variant-numeric:tabular-nums}
.mf th {color:var(--pale);font-weight:normal}
.mf th:first-child,.mf td:first-child,.mf .text th,.mf .text td {text-align:left}
.mf .text td:first-child {width:25%}
.mf img {display:block;max-width:100%;height:auto;margin:.15rem 0;background:var(--track)}
@media(max-width:40rem) {
.mf .row {grid-template-columns:minmax(0,1fr) auto}
.mf .row .bar {grid-column:1/3;grid-row:2}
.mf thead {display:none}
.mf tbody,.mf table {display:block}
.mf tr {display:block;border-bottom:1px solid var(--line);padding:.3rem 0}
.mf td,.mf .text td {display:flex;gap:.8rem;justify-content:space-between;border:0;padding:.1rem 0;text-align:right}
.mf td::before {content:attr(data-name);color:var(--pale);flex:none;max-width:50%}
.mf td:first-child,.mf .text td:first-child {font-weight:bold;text-align:left;width:auto}
.mf td:first-child::before {content:none}
}
"""
# thrice: a notebook has rules of its own for tables, which would be stronger than one class
_STYLE = (
    f".mf{{{_LIGHT}}}@media(prefers-color-scheme:dark){{.mf{{{_DARK}}}}}"
    f"{_LIGHT_HOSTS}{{{_LIGHT}}}{_DARK_HOSTS}{{{_DARK}}}{_RULES.replace('.mf ', '.mf.mf.mf ')}"
)


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def text(value: object) -> Html:
    """Return ``value`` as text of a page: in one line, and escaped, also within an attribute. `Html` stays."""
    return value if isinstance(value, Html) else Html(escape(printable(value)))


def joined(parts: Iterable[Html]) -> Html:
    """Return parts one after another."""
    return Html("".join(parts))


def fragment(parts: Iterable[Html]) -> Html:
    """Return what belongs into another page, such as a notebook: the parts with their style."""
    return Html(f'<style>{_STYLE}</style><main class="mf">{"".join(parts)}</main>')


def page(title: str, parts: Iterable[Html]) -> str:
    """Return a page of its own."""
    main = fragment(parts).replace('class="mf"', 'class="mf page"', 1)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{text(title)}</title></head>"
        f'<body style="margin:0;background:Canvas">{main}</body></html>\n'
    )


def element(name: str, value: object, kind: str = "") -> Html:
    """Return an element with text in it, of a class of the style."""
    return Html(f'<{name} class="{kind}">{text(value)}</{name}>' if kind else f"<{name}>{text(value)}</{name}>")


def bar_row(name: object, parts: Sequence[tuple[str, float]], value: object) -> Html:
    """Return a bar between its name and its value; its parts are a colour of the style and a share, 0 to 1, each."""
    bars = "".join(
        f'<i style="width:{100 * share:.2f}%;background:var(--{colour})"></i>' for colour, share in parts if share
    )
    return Html(
        f'<div class="row"><span>{text(name)}</span><span class="bar">{bars}</span>'
        f'<span class="n">{text(value)}</span></div>'
    )


def key(colour: str, what: str) -> Html:
    """Return an entry of the legend of bars."""
    return Html(f'<span class="key"><i style="background:var(--{colour})"></i>{text(what)}</span>')


def table(headings: Sequence[object], rows: Iterable[Sequence[object]], kind: str = "") -> Html:
    """Return a table, which is a list on a narrow screen. Of the class "text" its cells begin at the left."""
    names = [text(one) for one in headings]
    lines = (  # the content of a cell is one element: on a narrow screen its heading is beside it
        "".join(f'<td data-name="{name}"><div>{text(cell)}</div></td>' for name, cell in zip(names, row, strict=True))
        for row in rows
    )
    head = "".join(f"<th>{name}</th>" for name in names)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return Html(f'<table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>')


def count_text(count: int, what: str) -> str:
    """Return a number of things: ``1 field``, ``2 fields``."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def more_fields(count: int) -> Iterator[Html]:
    """Yield how many of ``count`` fields are not shown, if there are any."""
    if count > MOST_FIELDS:
        yield element("p", f"and {count - MOST_FIELDS:,} more fields", "pale")
