"""The number of threads is chosen from rates that a simulated machine gives."""

import itertools

import pytest

from memfeed.system.thread_choice import ThreadChoice


class Machine:
    """Work that takes as long as the number of free cores says, on a clock of its own."""

    def __init__(self, most, gain):
        self.now, self.gain, self.waits = 0.0, gain, 0.0
        self.choice = ThreadChoice(most, lambda: self.now)
        self.used = []

    def run(self, seconds, a_piece=0.001):
        self.used.clear()
        until = self.now + seconds
        while self.now < until:
            threads = self.choice.next()
            took = a_piece / self.gain(threads)
            self.now += took
            self.used.append(threads)
            self.choice.note(threads, 1.0, took, took * (1 - self.waits))

    def share_of(self, threads):
        return self.used.count(threads) / len(self.used)


@pytest.mark.parametrize(
    ("gain", "most", "best"),
    [
        (lambda threads: threads, 2, 2),
        (lambda threads: threads, 16, 16),
        (lambda threads: threads, 6, 6),
        (lambda threads: min(threads, 4), 16, 4),
        (lambda threads: 1.0, 16, 1),
        (lambda threads: 1.0 if threads == 1 else 1.15, 2, 1),
        (lambda threads: 1.0 if threads == 1 else 1.3, 2, 2),
        (lambda threads: 1 / threads, 8, 1),
        (lambda threads: threads, 1, 1),
    ],
)
def test_the_fewest_threads_that_are_worth_it(gain, most, best):
    machine = Machine(most, gain)
    machine.run(1.0)
    assert machine.choice.threads == best
    machine.run(30.0)
    assert machine.choice.threads == best
    assert machine.share_of(best) > 0.9  # what is left goes into comparing


def test_a_core_that_is_taken_is_given_back_and_taken_again():
    machine = Machine(2, lambda threads: threads)
    machine.run(30.0)
    assert machine.choice.threads == 2
    machine.gain, machine.waits = lambda threads: 0.5 / threads, 0.6
    machine.run(0.5)  # far less than the rest between comparisons: the time it waits for its core tells
    assert machine.choice.threads == 1
    machine.run(20.0)
    machine.gain, machine.waits = lambda threads: threads, 0.0
    machine.run(0.5)
    assert machine.choice.threads == 2


def test_a_change_that_no_waiting_shows_is_found_after_a_while():
    machine = Machine(4, lambda threads: 1.0)
    machine.run(5.0)
    assert machine.choice.threads == 1
    machine.gain = lambda threads: threads
    machine.run(40.0)
    assert machine.choice.threads == 4


def test_a_core_that_comes_and_goes_costs_few_comparisons():
    used = []
    machine = Machine(2, lambda threads: 1 / threads)
    for number in range(200):
        machine.waits = 0.6 * (number % 2)
        machine.run(0.1)
        if number >= 10:
            used.append(machine.share_of(1))
    assert sum(used) / len(used) > 0.97


def test_a_pause_in_a_comparison_does_not_put_off_the_next():
    machine = Machine(2, lambda threads: 1.0)
    machine.run(0.02)
    assert machine.choice._compared
    machine.now += 60.0  # a validation, say
    machine.run(0.1)
    assert not machine.choice._compared
    machine.gain = lambda threads: threads
    machine.run(5.0)
    assert machine.choice.threads == 2


def test_another_limit_holds_at_once():
    machine = Machine(8, lambda threads: threads)
    machine.run(2.0)
    machine.choice.set_most(3)
    assert machine.choice.threads <= 3
    machine.run(2.0)
    assert machine.choice.threads == 3
    assert max(machine.used) == 3
    machine.choice.set_most(1)
    machine.run(1.0)
    assert set(machine.used) == {1}


def test_one_slow_turn_decides_nothing():
    machine = Machine(2, lambda threads: threads)
    disturbed = itertools.cycle([1, 1, 1, 1, 1, 1, 30])
    machine.gain = lambda threads: threads / next(disturbed)
    machine.run(3.0, a_piece=0.004)
    assert machine.choice.threads == 2
