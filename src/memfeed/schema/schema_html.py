"""The fields of a schema as HTML."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memfeed.system.html_parts import Html, element, fragment, table

MOST_FIELDS = 40
NAME_WIDTH = 120


def fragment_of(fields: Sequence[tuple[str, str, str]]) -> Html:
    """Return a schema for a notebook.

    Args:
        fields: the name of each, what its values are, and how they are stored.
    """
    return fragment(_parts(fields))


def _parts(fields: Sequence[tuple[str, str, str]]) -> Iterator[Html]:
    yield element("h1", f"Schema: {count_text(len(fields), 'field')}")
    rows = [(short_name(name), values, form) for name, values, form in fields[:MOST_FIELDS]]
    yield table(("field", "values", "form"), rows, "text")
    yield from more_fields(len(fields))


def more_fields(count: int) -> Iterator[Html]:
    """Yield how many of ``count`` fields are not shown, if there are any."""
    if count > MOST_FIELDS:
        yield element("p", f"and {count - MOST_FIELDS:,} more fields", "pale")


def short_name(name: str) -> str:
    """Return the name of a field, cut to a width that a page has room for."""
    return name if len(name) <= NAME_WIDTH else f"{name[: NAME_WIDTH - 3]}..."


def count_text(count: int, what: str) -> str:
    """Return a number of things: ``1 field``, ``2 fields``."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"
