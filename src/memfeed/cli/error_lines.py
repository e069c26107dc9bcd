"""Errors and warnings of the command line: one line each, on stderr."""

from __future__ import annotations

import sys
import traceback
from typing import TextIO

import typer

from memfeed.errors import MemfeedError
from memfeed.system.messages import printable

OPTIONS = {
    'on_error="skip"': "--on-error skip",
    "overwrite=True": "--overwrite",
    "memfeed.repair(dataset, path)": "memfeed cache MODULE:FACTORY STORE --repair",
    "allow='random'": "--allow random",
    "allow='copy'": "--allow copy",
    'workers="ray"': "--workers ray",
    "workers=": "--workers",
    "fields=": "--fields",
    "forms={float: torch.float16}": "--form float=float16",
    "forms={float: torch.bfloat16}": "--form float=bfloat16",
    "forms=: ": "--form: ",
    "forms=": "--form ",
    "budget=": "--budget ",
    "types=": "--types",
    "split=True": "--split",
}
"""Arguments of `memfeed.cache` that error messages name, and the options that set them."""


class UsageError(MemfeedError, ValueError):
    """The command line asks for something that cannot be done."""


def print_error(error: BaseException, *, debug: bool) -> None:
    """Print the error in one line; with ``debug`` print its traceback first."""
    if debug:
        traceback.print_exception(error)
    line = printable(" ".join(_text(error).split()))
    typer.echo(f"memfeed: error: {line}", err=True)


def print_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print the warning in one line. Replaces `warnings.showwarning`, which adds a line of our source code."""
    print(f"memfeed: warning: {printable(' '.join(str(message).split()))}", file=file or sys.stderr)


def _text(error: BaseException) -> str:
    usage = getattr(error, "format_message", None)  # typer's usage errors; their class differs between versions
    if usage is not None:
        return f"{usage()} (run memfeed --help, or memfeed COMMAND --help)"
    text = str(error)
    if isinstance(error, MemfeedError):
        for argument, option in OPTIONS.items():
            text = text.replace(argument, option)
        return text
    if "Traceback (most recent call last)" in text:  # an error of a DataLoader worker holds its traceback as text
        text = text.strip().splitlines()[-1]
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, OSError | ImportError | ValueError) and text:
        return text
    return f"{type(error).__name__}: {text} (run memfeed --debug COMMAND to see the traceback)"
