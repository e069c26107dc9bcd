"""Messages on stderr, and warnings that name the line of the user's."""

import pytest

from memfeed.system.messages import say_once, warn


def test_a_line_is_printed_once(capsys):
    for _ in range(2):
        say_once("a line that is printed once")
    found = capsys.readouterr()
    assert (found.out, found.err) == ("", "a line that is printed once\n")


def test_a_warning_names_the_first_line_outside_of_the_package():
    inside = compile("def call(warn):\n    warn('text', RuntimeWarning)\n", warn.__code__.co_filename, "exec")
    names = {}
    exec(inside, names)
    with pytest.warns(RuntimeWarning, match="text") as caught:
        names["call"](warn)
    assert caught[0].filename == __file__
