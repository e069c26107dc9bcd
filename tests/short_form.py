"""The short form of a test with many values: some of them in `make test`, the others in `make test-long`."""

from collections.abc import Iterable
from typing import Any

import pytest


def short_form(values: Iterable[Any], short: int = 1) -> list[Any]:
    """Return the values of a parameter of a test, with the mark ``long`` on all but the first ``short`` of them."""
    return [value if at < short else pytest.param(value, marks=pytest.mark.long) for at, value in enumerate(values)]
