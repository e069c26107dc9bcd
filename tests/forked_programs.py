"""Programs of tests, each in a process of its own that has imported torch and memfeed already.

A new Python imports torch for two seconds. These processes are forked from one that did nothing else, as those of
torture.victims are. Where it matters how Python starts or ends, a test starts ``sys.executable`` instead.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from torture.victims import HANG_SECONDS, start


def _run(code: str, arguments: list[str], environment: dict[str, str], out: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(os.open(out, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644), 1)
    sys.argv = ["-c", *arguments]
    exec(compile(code, "<program>", "exec"), {"__name__": "__main__"})


class Program:
    """A program that runs: in a session of its own, its output and its errors in files of a directory."""

    def __init__(self, code: str, *arguments: object, at: Path, **environment: str) -> None:
        number = len(list(at.glob("program-*.err")))
        self.out, self.err = at / f"program-{number}.out", at / f"program-{number}.err"
        self.out.touch()
        self.err.touch()
        self.process: Any = start(self.err, _run, code, [*map(str, arguments)], os.environ | environment, self.out)

    def wait(self, seconds: float = HANG_SECONDS) -> int:
        """Return the exit code; one that is still running then is killed."""
        self.process.join(seconds)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
            raise TimeoutError(f"a program took more than {seconds:g} s: {self.err.read_text()}")
        return int(self.process.exitcode)


SCRIPT = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
"""The program that runs the script of its first argument."""


def run_program(code: str, *arguments: object, at: Path) -> str:
    """Run a program to its end and return what it printed."""
    program = Program(code, *arguments, at=at)
    assert program.wait() == 0, program.err.read_text()
    return program.out.read_text()
