"""What went wrong, in one line on stderr."""

from __future__ import annotations

import sys
import traceback
from typing import TextIO

import typer

from memfeed.errors import MemfeedError
from memfeed.system.units import printable

OPTIONS = {
    'on_error="skip"': "--on-error skip",
    "overwrite=True": "--overwrite",
    "repair=True": "--repair",
    "allow_random=True": "--allow-random",
    "copy_existing=True": "--copy-existing",
    "check=False": "--no-check",
    "workers=": "--workers",
    "fields=": "--fields",
    "dtypes=": "--dtype",
}
"""Arguments that messages name, as this program spells them."""


class UsageError(MemfeedError, ValueError):
    """Something on the command line cannot be used as it stands."""


def report(error: Exception, *, debug: bool) -> None:
    """Prints the error; with ``debug`` its traceback first."""
    if debug:
        traceback.print_exception(error)
    line = printable(" ".join(_text(error).split()))
    typer.echo(f"memfeed: error: {line}", err=True)


def show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Takes the place of `warnings.showwarning`: one line, and no place in our own code."""
    print(f"memfeed: warning: {printable(' '.join(str(message).split()))}", file=file or sys.stderr)


def _text(error: Exception) -> str:
    usage = getattr(error, "format_message", None)  # typer's usage errors; their class is another in each version
    if usage is not None:
        return f"{usage()} (memfeed --help and memfeed COMMAND --help say what there is)"
    if isinstance(error, MemfeedError):
        text = str(error)
        for argument, option in OPTIONS.items():
            text = text.replace(argument, option)
        return text
    text = str(error)
    if "Traceback (most recent call last)" in text:  # a DataLoader worker's error carries its traceback as text
        text = text.strip().splitlines()[-1]
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, OSError | ImportError | ValueError) and text:
        return text
    return f"{type(error).__name__}: {text} (memfeed --debug COMMAND shows the traceback)"
