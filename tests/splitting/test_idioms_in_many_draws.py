"""The idioms in many draws: in a file of its own, because it takes the longest and all tests of a file run in turn."""

import pytest
from test_idioms import IDIOMS, check

DRAWS = 4096  # samples of each source


@pytest.mark.long
@pytest.mark.parametrize("idiom", IDIOMS, ids=str)
def test_an_idiom_is_right_or_refused_in_many_draws(idiom, path):
    check(idiom, path, DRAWS)
