"""What code says is alike in every process, wherever it stands, and differs with what it does."""

import os
import subprocess
import sys
import types

import pytest

from memfeed.system.code_content import content_of, held_by, names_used, values_written


def said(text, file="<one>", lines=0):
    return repr(content_of(compile("\n" * lines + text, file, "exec")))


def test_its_file_and_its_lines_do_not_count():
    text = "def f(x):\n    return [y for y in x if y in {1, 2}]"
    assert said(text) == said(text, "<other>", lines=3)


@pytest.mark.parametrize("other", ["x + 2", "x - 1", "y + 1", "(lambda x: x + 1)(x)", "x in {1, 2}", "x in {1, 3}"])
def test_another_expression_is_another_code(other):
    assert said(f"def f(x):\n    return {other}") != said("def f(x):\n    return x + 1")


def test_the_order_of_a_set_does_not_count():
    """Which differs with the seed of hashes, and so from process to process; also of a set in a tuple."""
    code = "from memfeed.system.code_content import content_of; "
    code += "print(content_of(compile('x in {\"a\", \"b\", \"c\"}, (1, (2, 3))', 'a', 'eval')), end='')"
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            check=True,
        ).stdout
        for seed in range(4)
    }
    assert len(found) == 1
    assert b"frozenset" in found.pop()


def test_the_names_of_functions_inside_count():
    def outer(x):
        return sorted(x, key=lambda y: os.fspath(y.path))

    assert {"sorted", "os", "fspath", "path"} <= set(names_used(outer.__code__))
    assert "y" not in set(names_used(outer.__code__))  # a variable of its own


def test_what_a_function_holds():
    table = [1]

    def read(index, /, first, size=3, *, key="a", other):
        return table

    assert dict(held_by(read)) == {"table": [1], "read(size=)": 3, "read(key=)": "a"}
    assert not list(held_by(types.FunctionType(read.__code__, {}, closure=(types.CellType(),))))  # its cell is empty
    read.__defaults__ = (1, 2, 3, 4)  # more than there are arguments, as Python allows
    assert dict(held_by(read))["table"] == [1]


def test_values_of_variables_of_a_module_and_of_its_classes_are_found_as_they_are_written(tmp_path):
    file = tmp_path / "written.py"
    file.write_text(
        "K: int = 1\na = b = f( 2 )\nK += 3\nx: int\nROOT = '/a/b'\nclass C:\n    k = K\n    def m(self): q = 1\n"
    )
    assert values_written(str(file)) == {"K": "1;3;", "a": "f(2);", "b": "f(2);", "C.k": "K;"}
    (tmp_path / "other.py").write_text("def f(:")
    assert values_written(str(tmp_path / "other.py")) == values_written("<none>") == {}
