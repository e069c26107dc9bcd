"""A schema as HTML."""

import torch

from html_pages import HOSTILE, require_harmless
from memfeed.schema.fields import Field, Schema
from memfeed.schema.infer import infer
from memfeed.system.html_parts import MOST_FIELDS, count_text


def test_the_fields_of_a_schema():
    schema = infer([{"image": torch.zeros(3, 4, 5, dtype=torch.uint8), "text": "a"}]).schema
    shown = require_harmless(schema._repr_html_())
    for part in ("Schema: 2 fields", "image", "uint8 [3, 4, 5]", "text", "str", "raw"):
        assert part in shown


def test_names_run_nothing():
    schema = infer([dict.fromkeys(HOSTILE, 1)]).schema
    shown = require_harmless(schema._repr_html_())
    assert all(name in shown for name in HOSTILE)


def test_of_many_fields_the_first_are_shown():
    schema = infer([{f"x{i}": i for i in range(MOST_FIELDS + 2)}]).schema
    shown = require_harmless(schema._repr_html_())
    assert f"x{MOST_FIELDS - 1}" in shown
    assert f"x{MOST_FIELDS}\n" not in shown
    assert "and 2 more fields" in shown


def test_a_coded_field_says_how():
    field = Field(path=("x",), name="x" * 500, stem="x", kind="fixed", dtype="uint8", shape=(3, 4, 5))
    coded = field.coded("jpeg", {"quality": 95, "layout": "chw"})
    schema = infer([{"x": torch.zeros(3, 4, 5, dtype=torch.uint8)}]).schema
    shown = require_harmless(Schema(fields=(coded,), structure=schema.structure)._repr_html_())
    assert "uint8 [3, 4, 5]" in shown
    assert "jpeg quality=95" in shown
    assert f"{'x' * 117}..." in shown
    assert "x" * 118 not in shown


def test_counts():
    assert [count_text(count, "row") for count in (0, 1, 2000)] == ["0 rows", "1 row", "2,000 rows"]
