"""The fields of a schema as HTML."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memfeed.schema.coding import coding_text
from memfeed.schema.fields import Field, Schema
from memfeed.system.html_parts import Html, element, fragment, joined, table, text

MOST_FIELDS = 40
NAME_WIDTH = 120


def fragment_of(schema: Schema) -> Html:
    """Return the schema for a notebook."""
    return fragment(_parts(schema))


def _parts(schema: Schema) -> Iterator[Html]:
    yield element("h1", f"Schema: {count_text(len(schema), 'field')}")
    fields = schema.fields[:MOST_FIELDS]
    rows = [(field_name(one), one.decoded.describe(), form_text(one)) for one in fields]
    yield table(("field", "values", "form"), rows, "text")
    yield from more_fields(schema.fields)


def more_fields(fields: Sequence[Field]) -> Iterator[Html]:
    """Yield how many fields are not shown, if there are any."""
    if len(fields) > MOST_FIELDS:
        yield element("p", f"and {len(fields) - MOST_FIELDS:,} more fields", "pale")


def field_name(field: Field) -> str:
    """Return the name of a field, cut to a width that a page has room for."""
    return field.name if len(field.name) <= NAME_WIDTH else f"{field.name[: NAME_WIDTH - 3]}..."


def form_text(stored: Field) -> str:
    """Return how the rows of a field are stored."""
    return coding_text(stored.coding)


def labelled(stored: Field) -> Html:
    """Return the name of a field, and below it what its values are and how they are stored."""
    form = "" if stored.coding is None else f", {form_text(stored)}"
    below = element("span", f"{stored.decoded.describe()}{form}", "pale small")
    return joined([text(field_name(stored)), below])


def count_text(count: int, what: str) -> str:
    """Return a number of things: ``1 field``, ``2 fields``."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"
