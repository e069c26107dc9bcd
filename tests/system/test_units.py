import pytest

from memfeed.system.messages import format_bytes, format_seconds, format_short, parse_bytes


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


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("200GB", 200 * 10**9),
        ("1.5 TB", 15 * 10**11),
        ("64MiB", 64 << 20),
        ("7", 7),
        (12, 12),
        ("3kb", 3000),
        (None, None),
    ],
)
def test_sizes_are_read(text, size):
    assert parse_bytes("size", text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1", "0", "0.4", "many", "1iB", True, 1.5e300])
def test_what_is_no_size_is_refused(text):
    with pytest.raises((ValueError, OverflowError), match="size="):
        parse_bytes("size", text)


@pytest.mark.parametrize(
    ("seconds", "text"), [(2.5, "2.5 s"), (90, "1 min 30 s"), (0.0123, "12.3 ms"), (0.0000123, "12 µs"), (0, "0 µs")]
)
def test_short_times(seconds, text):
    assert format_short(seconds) == text
