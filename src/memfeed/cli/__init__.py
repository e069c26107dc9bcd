"""The command line, the program ``memfeed``. Its exit status is 0, 2 after an error, 130 after Ctrl-C."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Annotated

import typer

import memfeed
from memfeed.cli import commands as more
from memfeed.cli.cache_command import cache
from memfeed.cli.error_lines import print_error, print_warning

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Decode a PyTorch dataset once into a memory-mapped store, then train from it at the speed of memory.",
)
for _command in (
    *(cache, more.append, more.concat, more.recode, more.inspect, more.verify, more.push, more.pull),
    *(more.bench, more.doctor, more.demo),
):
    app.command()(_command)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"memfeed {memfeed.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Print the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    context.obj.debug = debug
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status. None takes the arguments of the process."""
    options = SimpleNamespace(debug=False)  # the global ones; click keeps them in its context
    words = sys.argv[1:] if arguments is None else list(arguments)
    with warnings.catch_warnings():
        warnings.showwarning = print_warning
        try:
            # not standalone: typer would print its usage errors in a box and end the process
            status = app(words, prog_name="memfeed", standalone_mode=False, obj=options)
        except (KeyboardInterrupt, typer.Abort):
            status = 130
        except BaseException as error:  # a dataset may raise SystemExit, or a class of its own
            if isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError):
                return 1  # from rich: who reads the output, such as head, has seen enough
            print_error(error, debug=options.debug)
            status = 2
    if status == 130:
        typer.echo("memfeed: interrupted", err=True)
    return status if isinstance(status, int) else 0
