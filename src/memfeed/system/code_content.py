"""The content of the code of a function, to be hashed, the names that it uses, and the values that it holds."""

from __future__ import annotations

import ast
import contextlib
import linecache
import os
import types
from collections.abc import Iterator, Sequence
from typing import Any


def content_of(code: types.CodeType) -> tuple[Any, ...]:
    """Return what a function does, without its file and lines, as values whose repr is the same in every process."""
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    table = getattr(code, "co_exceptiontable", b"")  # Python 3.11 and later
    return code.co_code, table, [_constant(one) for one in code.co_consts], names, counts


def _constant(value: Any) -> Any:
    if isinstance(value, types.CodeType):
        return content_of(value)
    if isinstance(value, tuple):
        return tuple(map(_constant, value))
    if isinstance(value, frozenset):  # its order differs from process to process
        return "frozenset", sorted(repr(_constant(one)) for one in value)
    return value


def names_used(code: types.CodeType) -> Iterator[str]:
    """Yield the names that code uses, with those of the functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_used(constant)


def held_by(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield what a function closes over, by the name of the variable, and its default arguments: "read(table=)"."""
    code, values = function.__code__, function.__defaults__ or ()
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # it is empty
            yield name, cell.cell_contents
    arguments = code.co_varnames[code.co_argcount - len(values) : code.co_argcount]
    for name, value in [*zip(arguments, values, strict=False), *(function.__kwdefaults__ or {}).items()]:
        yield f"{function.__name__}({name}=)", value


def texts_used(code: types.CodeType) -> Iterator[str]:
    """Yield the text that is written in code, with that of the functions inside it."""
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from texts_used(constant)
        elif isinstance(constant, str):
            yield constant


def values_written(file: str) -> dict[str, str]:
    """Return the source of the values of variables in a file of Python: of the module "K", of a class "Step.K".

    Without paths, which may differ from machine to machine.
    """
    found: dict[str, str] = {}
    with contextlib.suppress(Exception):  # the file was changed to what is no Python, or is nested too deep
        _add_values(found, ast.parse("".join(linecache.getlines(file))).body, "")
    return found


def _add_values(found: dict[str, str], body: Sequence[ast.stmt], before: str) -> None:
    for node in body:
        if isinstance(node, ast.ClassDef):
            _add_values(found, node.body, f"{before}{node.name}.")
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and node.value is not None:
            written = node.value.value if isinstance(node.value, ast.Constant) else None
            is_path = isinstance(written, str) and os.sep in written
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name) and not is_path:
                    name = before + target.id
                    found[name] = f"{found.get(name, '')}{ast.unparse(node.value)};"
