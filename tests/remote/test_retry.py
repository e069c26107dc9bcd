from __future__ import annotations

import pytest

from memfeed.remote.connections import Retry


@pytest.mark.parametrize(("failures", "longest"), [(1, 0.2), (2, 0.4), (5, 3.2), (7, 8.0), (60, 8.0)])
def test_waits_double_up_to_the_longest_and_half_of_each_is_random(failures, longest):
    found = [Retry().wait_seconds(failures) for _ in range(200)]
    assert longest / 2 <= min(found) < max(found) <= longest
