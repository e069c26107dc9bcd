import pytest

from memfeed.system.units import format_bytes, format_seconds


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 KB"), (2e6, "2.0 MB"), (3e15, "3000.0 TB")]
)
def test_bytes(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.25, "0.2 s"), (59, "59 s"), (75, "1 min 15 s"), (7260, "2 h 1 min"), (59.9, "60 s")]
)
def test_seconds(seconds, text):
    assert format_seconds(seconds) == text
