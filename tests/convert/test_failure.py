"""Exceptions cross to another process, whatever they are."""

import pickle
import threading

import pytest

from memfeed.convert.watchdog import failure_of
from memfeed.errors import SampleError


class TwoArguments(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


class WithLock(Exception):
    def __init__(self):
        super().__init__("locked")
        self.lock = threading.Lock()


class BecomesAnother(Exception):
    def __reduce__(self):
        return (ValueError, ("another",))


class Hostile(Exception):
    def __reduce__(self):
        raise SystemError("no")


def raised(error):
    try:
        raise error
    except type(error) as found:
        return found


@pytest.mark.parametrize("error", [ValueError("bad"), KeyError("k"), SampleError("sample 3"), OSError(2, "gone")])
def test_an_exception_is_sent_itself(error):
    failure = pickle.loads(pickle.dumps(failure_of(raised(error))))
    assert type(failure.error) is type(error)
    assert failure.error.args == error.args


@pytest.mark.parametrize("error", [TwoArguments(1, 2), WithLock(), BecomesAnother(), Hostile()])
def test_one_that_does_not_survive_becomes_its_traceback(error):
    failure = pickle.loads(pickle.dumps(failure_of(raised(error))))
    assert type(failure.error) is RuntimeError
    assert type(error).__name__ in str(failure.error)
    assert "Traceback" in str(failure.error)


def test_the_cause_is_the_traceback_of_users_code_and_the_cause_of_ours():
    failure = failure_of(raised(ValueError("bad")))
    assert "in raised" in str(failure.cause)
    own = SampleError("sample 3")
    assert failure_of(own).cause is None
    own.__cause__ = KeyboardInterrupt("stop")
    cause = failure_of(own).cause
    assert type(cause) is RuntimeError
    assert "KeyboardInterrupt: stop" in str(cause)


def test_the_cause_arrives_with_the_line_that_raised_it():
    own = SampleError("sample 3")
    own.__cause__ = raised(KeyError("k"))
    cause = pickle.loads(pickle.dumps(failure_of(own))).cause
    assert (type(cause), cause.args) == (KeyError, ("k",))
    assert "in raised" in str(cause.__cause__)
    own.__cause__ = raised(WithLock())
    assert pickle.loads(pickle.dumps(failure_of(own))).cause.__cause__ is None, "it is its traceback already"
