"""The programs that the project's idea comes from: each runs to its end, where it asserts its ratios."""

import pytest
from test_examples import EXAMPLES, run

PROGRAMS = sorted(path.stem for path in (EXAMPLES / "seeds").glob("*.py"))


def test_there_are_six():
    assert len(PROGRAMS) == 6


@pytest.mark.long
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_runs(program, tmp_path):
    assert run(EXAMPLES / "seeds" / f"{program}.py", cwd=tmp_path)
