"""The verdict as one HTML page: no scripts, no other files, light and dark, for screens of any width."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from memfeed.system.units import format_bytes
from memfeed.verdict.judge import format_short
from memfeed.verdict.results import Form, Loop, SampleCost
from memfeed.verdict.verdict import Verdict

PARTS = (("waiting", "waiting for data"), ("transfer", "transfer"), ("computing", "computing"))
_SHADES = ("own", "file", "decode", "a", "b", "c")
_STYLE = """
.mf{--ink:#1c2230;--pale:#5b647a;--line:#d9dee7;--ground:#fff;--waiting:#d1495b;--transfer:#8a6fc9;--computing:#3d7ea6;
--yes:#1b7a43;--no:#9a3b12;--open:#6a5a00;--s0:#3d7ea6;--s1:#d1495b;--s2:#c98a1b;--s3:#3f8f5f;--s4:#8a6fc9;--s5:#7d8597;
color:var(--ink);background:var(--ground);font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:0 auto;padding:1rem}
@media(prefers-color-scheme:dark){.mf{--ink:#e8ebf2;--pale:#a3abbd;--line:#3a4256;--ground:#151923;--waiting:#e8707f;
--transfer:#ab94e6;--computing:#6caed6;--yes:#6fd39a;--no:#f0a17c;--open:#e2cf6a;--s0:#6caed6;--s1:#e8707f;--s2:#e5b04c;
--s3:#74c496;--s4:#ab94e6;--s5:#a3abbd}}
.mf.page{background:none}.mf *{overflow-wrap:anywhere}
.mf h1{font-size:1.5rem;line-height:1.25;margin:.2rem 0}.mf h2{font-size:1.1rem;margin:2rem 0 .5rem}
.mf p{margin:.3rem 0}.mf .pale{color:var(--pale)}
.mf .helps{color:var(--yes)}.mf .does-not-help{color:var(--no)}.mf .cannot-tell{color:var(--open)}
.mf .row{display:grid;grid-template-columns:11rem 1fr 6rem;gap:.2rem .8rem;align-items:center;margin:.35rem 0}
.mf .row .n{text-align:right;font-variant-numeric:tabular-nums}.mf .bar{display:flex;height:1.3rem;gap:1px}
.mf .bar i{display:block}.mf .key{display:inline-flex;align-items:center;margin-right:1rem}
.mf .key i{width:.8rem;height:.8rem;margin-right:.35rem}
.mf table{border-collapse:collapse;width:100%}
.mf th,.mf td{border-bottom:1px solid var(--line);padding:.3rem .6rem .3rem 0;
text-align:right;font-variant-numeric:tabular-nums}.mf th{color:var(--pale);font-weight:normal}
.mf th:first-child,.mf td:first-child{text-align:left}
@media(max-width:40rem){.mf .row{grid-template-columns:1fr auto}.mf .row .bar{grid-column:1/3;grid-row:2}
.mf thead{display:none}.mf tr{display:block;border-bottom:1px solid var(--line);padding:.3rem 0}
.mf td{display:flex;justify-content:space-between;border:0;padding:.1rem 0}
.mf td::before{content:attr(data-name);color:var(--pale)}.mf td:first-child{font-weight:bold}}
"""


def page(verdict: Verdict, *, is_whole: bool = True) -> str:
    """Return the page; with ``is_whole=False`` only what belongs into another one, such as a notebook."""
    kind = verdict.kind.replace(" ", "-")
    body = [f'<h1 class="{kind}">{escape(verdict.headline())}</h1>']
    body += [f"<p>Next: {escape(verdict.instead)}.</p>"] if verdict.instead else []
    if verdict.loops:
        body += ["<h2>A batch, in four loops</h2>", *_loops(verdict)]
    if verdict.sample is not None:
        body += ["<h2>A sample, in one process</h2>", *_sample(verdict.sample)]
    if verdict.forms:
        body += ["<h2>What a store takes</h2>", _forms(verdict.forms)]
    body += ["<h2>How it was measured</h2>", *(f"<p>{escape(note)}.</p>" for note in verdict.notes)]
    body.append(
        f'<p class="pale">{verdict.rows_measured:,} of {verdict.row_count:,} rows, batches of {verdict.batch_size}, '
        f"{len(verdict.loops[0].turns) if verdict.loops else 0} turns of each loop, {verdict.seconds:.0f} s. "
        f"{escape(verdict.machine)}.</p>"
    )
    main = f'<style>{_STYLE}</style><main class="mf">{"".join(body)}</main>'
    if not is_whole:
        return main
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>memfeed: {escape(verdict.kind)}</title></head>"
        f'<body style="margin:0;background:Canvas">{main}</body></html>\n'.replace('class="mf"', 'class="mf page"')
    )


def _loops(verdict: Verdict) -> Iterable[str]:
    size = verdict.batch_size
    longest = max(loop.middle("seconds_a_row") for loop in verdict.loops)
    yield "<p>" + "".join(_key(f"var(--{part})", text) for part, text in PARTS) + "</p>"
    for loop in verdict.loops:
        parts = [(f"var(--{part})", loop.middle(part) / longest) for part, _ in PARTS]
        yield _bar_row(loop.name, parts, format_short(size * loop.middle("seconds_a_row")))
    yield _table(
        ("loop", "lowest", "highest", "first batch of an epoch", "rows/s"),
        [
            (
                loop.name,
                format_short(size * min(turn.seconds_a_row for turn in loop.turns)),
                format_short(size * max(turn.seconds_a_row for turn in loop.turns)),
                format_short(loop.middle("first_seconds")),
                f"{1 / loop.middle('seconds_a_row'):,.0f}",
            )
            for loop in verdict.loops
        ],
    )
    if verdict.gain is not None:
        yield f"<p>memfeed against torch's loader at its best: {verdict.gain} as fast.</p>"
    if verdict.ceiling is not None:
        yield f"<p>Any loader, against torch's at its best: at most {verdict.ceiling} as fast.</p>"


def _sample(sample: SampleCost) -> Iterable[str]:
    steps = [one for one in sample.steps if one.share >= 0.005]
    for number, one in enumerate(steps):
        colour = f"var(--s{min(number, len(_SHADES) - 1)})"
        yield _bar_row(one.name, [(colour, one.share)], f"{format_short(one.seconds)}")
    rows = ", ".join(map(str, sample.slowest_rows))
    yield (
        f"<p>{format_short(sample.seconds)} in all; the median is {format_short(sample.median_seconds)}. "
        f"The slowest 1 % take {format_short(sample.slowest_seconds)} (rows {rows}), and hold up their batches.</p>"
    )


def _forms(forms: Sequence[Form]) -> str:
    return _table(
        ("form", "on disk", "rows/s a core", "cores for this step", "from epoch"),
        [
            (
                one.name,
                format_bytes(one.total_bytes),
                f"{one.rows_a_second:,.0f}",
                "" if one.cores is None else f"{one.cores:.2g}",
                "-" if one.break_even is None else str(one.break_even),
            )
            for one in forms
        ],
    )


def _bar_row(name: str, parts: Sequence[tuple[str, float]], value: str) -> str:
    bars = "".join(f'<i style="width:{100 * share:.2f}%;background:{colour}"></i>' for colour, share in parts if share)
    start = f'<div class="row"><span>{escape(name)}</span>'
    return f'{start}<span class="bar">{bars}</span><span class="n">{value}</span></div>'


def _key(colour: str, text: str) -> str:
    return f'<span class="key"><i style="background:{colour}"></i>{escape(text)}</span>'


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(one)}</th>" for one in headings)
    lines = (
        "".join(f'<td data-name="{escape(name)}">{escape(cell)}</td>' for name, cell in zip(headings, row, strict=True))
        for row in rows
    )
    return (
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(f'<tr>{line}</tr>' for line in lines)}</tbody></table>"
    )


def seconds_of(loop: Loop) -> list[float]:
    """Return the seconds a row of each part of a loop, in the order of `PARTS`."""
    return [loop.middle(part) for part, _ in PARTS]
