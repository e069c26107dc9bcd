"""docs/inputs.md is drawn from real objects; the errors that it shows are short and end with the line to write."""

import importlib.util
import runpy
from pathlib import Path

import pytest

for _name in ("datasets", "h5py", "pandas", "polars", "pyarrow", "scipy", "torch_geometric"):
    if importlib.util.find_spec(_name) is None:
        pytest.skip(f"needs {_name}", allow_module_level=True)
PAGE = runpy.run_path(str(Path(__file__).parents[1] / "docs" / "draw_inputs.py"))


def test_the_page_is_up_to_date():
    page = PAGE["PAGE"].read_text()
    assert PAGE["draw"](page) == page, "run python docs/draw_inputs.py"


@pytest.mark.parametrize("kind", PAGE["REFUSED"])
def test_errors_are_short_and_end_with_the_line_to_write(kind):
    with PAGE["examples"]():
        message = PAGE["refusal"](PAGE["REFUSED"][kind])
    assert len(message) < 400
    assert PAGE["line_of"](message), message


def test_a_message_without_code_has_no_line():
    assert PAGE["line_of"]("found x: convert it in the dataset") == ""
    assert PAGE["line_of"]("found x: df = df.cast({'x': pl.Int64})") == "df = df.cast({'x': pl.Int64})"
