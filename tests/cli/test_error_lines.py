"""Errors and warnings in one line, with the options of the command line in place of Python's arguments."""

import warnings

import pytest

from memfeed.cli.error_lines import OPTIONS, UsageError, print_error, print_warning
from memfeed.errors import BuildError, FieldError


def line_of(error, capsys, *, debug=False):
    print_error(error, debug=debug)
    out, found = capsys.readouterr()
    assert out == ""
    return found


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (UsageError("found nothing;\n  expected more"), "found nothing; expected more"),
        (BuildError('stop; leave it out with on_error="skip"'), "stop; leave it out with --on-error skip"),
        (BuildError("use memfeed.repair(dataset, path)"), "use memfeed cache MODULE:FACTORY STORE --repair"),
        (FieldError("no field"), "no field"),
        (OSError(2, "No such file", "a.txt"), "a.txt: No such file"),
        (ValueError("bad value"), "bad value"),
        (ImportError("no module"), "no module"),
        (ValueError(), "ValueError:  (run memfeed --debug COMMAND to see the traceback)"),
        (KeyError("k"), "KeyError: 'k' (run memfeed --debug COMMAND to see the traceback)"),
        (ValueError("x\nTraceback (most recent call last):\n  File\nKeyError: 3\n"), "KeyError: 3"),
        (ValueError('on_error="skip" of a user'), 'on_error="skip" of a user'),
        (BuildError("a\x1b[31mb"), "a\\x1b[31mb"),
    ],
)
def test_one_line(error, line, capsys):
    assert line_of(error, capsys) == f"memfeed: error: {' '.join(line.split())}\n"


def test_debug_shows_the_traceback_first(capsys):
    found = line_of(ValueError("bad"), capsys, debug=True)
    assert found.startswith("ValueError: bad\n")
    assert found.endswith("memfeed: error: bad\n")


def test_no_option_hides_another():
    names = list(OPTIONS)
    for at, name in enumerate(names):
        assert not any(earlier in name for earlier in names[:at])  # the longer one comes first


def test_warnings(capsys, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", print_warning)
        warnings.warn("two\nlines \x1b", UserWarning, stacklevel=1)
    assert capsys.readouterr().err == "memfeed: warning: two lines \\x1b\n"
