"""The commands put together, and how the program ends: 0, 2 after an error said in one line, 130 after Ctrl-C."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

import memfeed
from memfeed.cli import cache, demo, inspect, verify
from memfeed.cli.errors import report, show_warning


@dataclass
class _Options:
    """The global options; click keeps it in the context."""

    debug: bool = False


app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Decode a PyTorch dataset once into a memory-mapped store, then train from it at the speed of memory.",
)
app.command("cache")(cache.cache)
app.command("inspect")(inspect.inspect)
app.command("verify")(verify.verify)
app.command("demo")(demo.demo)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"memfeed {memfeed.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    context.obj.debug = debug
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and gives its exit status; ``arguments`` are the process's own if left out."""
    options = _Options()
    given = sys.argv[1:] if arguments is None else list(arguments)
    with warnings.catch_warnings():
        warnings.showwarning = show_warning
        try:
            # not standalone: typer would print its usage errors in a box, and end the process itself
            status = app(given, prog_name="memfeed", standalone_mode=False, obj=options)
        except (KeyboardInterrupt, typer.Abort):
            status = 130
        except Exception as error:
            report(error, debug=options.debug)
            status = 2
    if status == 130:
        typer.echo("memfeed: interrupted", err=True)
    return status if isinstance(status, int) else 0
