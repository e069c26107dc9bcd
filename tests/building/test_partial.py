"""The units of a partial store against a model: any mix of suppliers, readers, kills, lost syncs and power losses."""

import contextlib
import os
import pickle
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from memfeed.building.partial import ABSENT, DURABLE, HELD, SKIPPED, WRITTEN, Units
from memfeed.errors import BuildError
from memfeed.system import files, machine

COUNT, SIZE, PROCESSES = 6, 16, 3
GARBAGE = b"\xee" * SIZE  # what a file has where nothing was written, or where the disk lost it
UNIT, PROCESS = st.integers(0, COUNT - 1), st.integers(0, PROCESSES - 1)


class Disk:
    """The model: the bytes of each unit in memory and on the disk, those a reader may see, and who holds a unit.

    A process is an object of its own here: locks belong to open files, and each object opens its own.
    """

    def __init__(self):
        self.memory = [GARBAGE] * COUNT
        self.disk = [GARBAGE] * COUNT
        self.dirty = set()  # units whose bytes in memory the disk does not have yet
        self.brought = [None] * COUNT  # the bytes that were brought last, unless the unit was dropped or lost
        self.durable = set()
        self.holders = {}  # unit -> process

    def write(self, unit, data):
        self.memory[unit] = data
        self.dirty.add(unit)

    def sync(self):
        for unit in self.dirty:
            self.disk[unit] = self.memory[unit]
        self.dirty.clear()
        self.durable = {unit for unit in range(COUNT) if self.brought[unit] is not None}

    def lose_sync(self, *, lost):
        """The pages of ``lost`` are clean though the disk does not have them; the system tells of it once."""
        self.dirty -= lost
        for unit in range(COUNT):
            if unit not in self.durable:
                self.brought[unit] = None

    def lose_power(self, *, reached):
        """Of what was not synced, some bytes have reached the disk all the same."""
        for unit in self.dirty & reached:
            self.disk[unit] = self.memory[unit]
        self.memory, self.dirty, self.holders = list(self.disk), set(), {}


class FunctionSupplier:
    """Brings units by a function of their numbers. It knows nothing of readers, syncs, kills or other processes."""

    def __init__(self, units, values_of, write):
        self.units, self.values_of, self.write = units, values_of, write

    def bring(self, wanted):
        """Bring those of ``wanted`` that are absent and that nobody has; return them."""
        with self.units.hold(wanted) as held:
            values = self.values_of(held)
            with self.units.writing():
                for unit, value in zip(held, values, strict=True):
                    self.write(unit, value)
                    self.units.mark(unit, 1, WRITTEN)
        return held


class PartialStores(RuleBasedStateMachine):
    """Several processes that share the units; the map of states is on a disk of its own (`disk_map`)."""

    may_drop = False

    def __init__(self):
        super().__init__()
        self.stack = contextlib.ExitStack()
        self.work = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        self.boot, self.number = 0, 0
        self.stack.enter_context(mock.patch.object(machine, "boot_id", self.boot_id))
        self.stack.enter_context(mock.patch.object(files, "sync", self.sync_map))
        self.model = Disk()
        self.disk_map = bytes(COUNT)  # what the disk has of the map
        Units.create(self.work, COUNT)
        self.processes = [self.new_process() for _ in range(PROCESSES)]
        self.held = {}  # (process, unit) -> the block that holds it

    def new_process(self):
        return Units(self.work, COUNT, may_drop=self.may_drop)

    def boot_id(self):
        return f"boot {self.boot}"

    def sync_map(self, fd):
        self.disk_map = (self.work / "presence").read_bytes()

    def teardown(self):
        for units in self.processes:
            units.close()
        self.held.clear()
        self.stack.close()

    # --- suppliers

    @rule(process=PROCESS, unit=UNIT)
    def hold(self, process, unit):
        if (process, unit) in self.held:
            return
        block = contextlib.ExitStack()
        got = block.enter_context(self.processes[process].hold([unit]))
        state, holder = self.processes[0].states[unit], self.model.holders.get(unit)
        assert bool(got) == (state == ABSENT and holder is None), "no unit is held by two live holders"
        if got:
            self.model.holders[unit], self.held[process, unit] = process, block
        else:
            block.close()

    @precondition(lambda self: self.held)
    @rule(data=st.data(), whole=st.booleans())
    def bring(self, data, whole):
        """Write the bytes of a held unit, and release it; or only a part of the bytes, which an error ends."""
        process, unit = data.draw(st.sampled_from(sorted(self.held)))
        units = self.processes[process]
        self.number += 1
        written = bytes([self.number % 200 + 1]) * SIZE
        with contextlib.suppress(BuildError), self.held.pop((process, unit)), units.writing():
            self.model.write(unit, written if whole else written[: SIZE // 2] + GARBAGE[SIZE // 2 :])
            if not whole:
                raise BuildError("the disk is full")
            units.mark(unit, 1, WRITTEN)
            self.model.brought[unit] = written
        del self.model.holders[unit]

    @rule(process=PROCESS, wanted=st.lists(UNIT), is_raised=st.booleans())
    def bring_by_function(self, process, wanted, is_raised):
        """A function computes the units that are absent and free, or raises: then none of them is brought."""
        states = self.processes[0].states.tolist()
        free = {unit for unit in wanted if states[unit] == ABSENT and unit not in self.model.holders}

        def values_of(units):
            assert sorted(units) == sorted(free), "each unit that is absent and free, once"
            if is_raised:
                raise BuildError("the function failed")
            return [bytes([201 + unit]) * SIZE for unit in units]

        def write(unit, value):
            self.model.write(unit, value)
            self.model.brought[unit] = value

        supplier = FunctionSupplier(self.processes[process], values_of, write)
        with pytest.raises(BuildError, match="function failed") if is_raised else contextlib.nullcontext():
            assert set(supplier.bring(wanted)) == free

    @rule(process=PROCESS, unit=UNIT)
    def drop(self, process, unit):
        units = self.processes[process]
        if units.take(unit):
            assert unit not in self.model.holders
            units.drop(np.array([unit]))
            self.model.brought[unit] = None
            self.model.durable.discard(unit)
            self.model.write(unit, GARBAGE)
            units.release(unit)
        else:
            assert unit in self.model.holders

    # --- what goes wrong

    @rule(process=PROCESS)
    def sync(self, process):
        self.processes[process].sync(lambda written: self.model.sync())

    @rule(process=PROCESS, lost=st.sets(UNIT), is_killed=st.booleans())
    def fail_to_sync(self, process, lost, is_killed):
        """The process may be killed before it can note it: only the mark that it leaves tells the next one."""

        def fail(written):
            self.model.lose_sync(lost=lost)
            error = BuildError("waiting for the disk")
            error.unsynced = True
            raise error

        units = self.processes[process]
        with contextlib.ExitStack() as stack:
            if is_killed:
                stack.enter_context(mock.patch.object(Units, "_lose", side_effect=BuildError("killed")))
            with pytest.raises(BuildError, match="waiting for the disk"):
                units.sync(fail)
        if is_killed:
            self.kill(process)
            self.processes[process].lose_unsynced()

    @rule(process=PROCESS)
    def kill(self, process):
        self.processes[process].close()  # as the kernel closes its files
        for holder, unit in [key for key in self.held if key[0] == process]:
            del self.model.holders[unit], self.held[holder, unit]
        self.processes[process] = self.new_process()

    @rule(reached=st.sets(UNIT), is_map_new=st.booleans(), with_hashes=st.booleans())
    def lose_power(self, reached, is_map_new, with_hashes):
        """Every process ends. The disk has the map that was synced, or the newest one."""
        found = (self.work / "presence").read_bytes() if is_map_new else self.disk_map
        for process in range(PROCESSES):
            self.kill(process)
        self.model.lose_power(reached=reached)
        (self.work / "presence").write_bytes(found)
        self.boot += 1
        self.processes = [self.new_process() for _ in range(PROCESSES)]
        brought = self.model.brought

        def is_right(unit):
            return brought[unit] is not None and self.model.memory[unit] == brought[unit]

        self.processes[0].recover(is_right if with_hashes else None)
        for unit, state in enumerate(self.processes[0].states.tolist()):
            assert unit not in self.model.durable or state in (WRITTEN, DURABLE), "DURABLE survives a power loss"
            if state not in (WRITTEN, DURABLE):
                brought[unit] = None
        self.model.durable &= {unit for unit in range(COUNT) if brought[unit] is not None}

    # --- what must hold

    @invariant()
    def a_reader_sees_what_was_brought(self):
        for process in self.processes:
            for unit, state in enumerate(process.states.tolist()):
                is_present = state in (WRITTEN, DURABLE)
                assert is_present == process.is_present(unit) == process.are_present()[unit]
                assert is_present == (self.model.brought[unit] is not None), (unit, state)
                if is_present:
                    assert self.model.memory[unit] == self.model.brought[unit]
                if state == DURABLE:
                    assert self.model.disk[unit] == self.model.brought[unit]

    @rule(unit=UNIT, process=PROCESS)
    def read(self, unit, process):
        """Only a unit that is present can be kept, and nobody can drop it then."""
        units = self.processes[process]
        kept = units.keep(unit)
        assert kept == (units.is_present(unit) and unit not in self.model.holders)
        if kept:
            assert not any(other.take(unit) for other in self.processes)
            units.let_go(unit)


class BoundedStores(PartialStores):
    """Units that are lost keep their room: they are HELD until a process gives it back."""

    may_drop = True

    @rule()
    def give_back(self):
        states = self.processes[0].states
        self.processes[0].drop(np.flatnonzero(states == HELD))


TestPartialStores = PartialStores.TestCase
TestPartialStores.settings = settings(max_examples=80, stateful_step_count=40)
TestBoundedStores = BoundedStores.TestCase
TestBoundedStores.settings = settings(max_examples=50, stateful_step_count=40)


def in_child(action):
    """Run ``action`` in a forked child, which ends without any cleanup. Return its exit status."""
    pid = os.fork()
    if not pid:
        try:
            os._exit(action() or 0)
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.fixture
def units(tmp_path):
    Units.create(tmp_path, COUNT)
    return Units(tmp_path, COUNT)


def test_a_unit_whose_holder_was_killed_can_be_held_again(units):
    def hold_and_die():
        stack = contextlib.ExitStack()
        return 0 if stack.enter_context(units.hold([2, 3])) == [2, 3] else 1

    assert in_child(hold_and_die) == 0
    with units.hold([2, 2, 3]) as held:
        assert held == [2, 3]


def test_a_function_brings_the_units_that_nobody_else_brings(units, tmp_path):
    path, asked = tmp_path / "values", []
    path.write_bytes(bytes(COUNT))

    def squares(found):
        asked.append(found)
        return [bytes([unit * unit]) for unit in found]

    def write(unit, value):
        with files.opened(path, os.O_RDWR) as fd:
            files.write_at(fd, value, unit)

    supplier = FunctionSupplier(units, squares, write)
    again = pickle.loads(pickle.dumps(units))
    with again.hold([4]):
        assert supplier.bring(range(2, COUNT)) == [2, 3, 5]
    assert supplier.bring(range(COUNT)) == [0, 1, 4]
    assert supplier.bring(range(COUNT)) == []
    assert asked == [[2, 3, 5], [0, 1, 4], []]
    assert units.are_present().all()
    assert list(path.read_bytes()) == [0, 1, 4, 9, 16, 25]


def test_a_forked_child_neither_has_nor_releases_what_its_parent_holds(units):
    def leave_block_of_parent():
        block.close()
        with units.hold([1]) as held:
            return len(held)

    with contextlib.ExitStack() as block:
        assert block.enter_context(units.hold([1])) == [1]
        assert in_child(leave_block_of_parent) == 0
        assert in_child(lambda: units.take(1)) == 0
    assert in_child(lambda: units.take(1)) == 1


def test_units_are_pickled_as_a_few_small_values(units):
    units.mark(1, 2, SKIPPED)
    with units.hold([0]):
        again = pickle.loads(pickle.dumps(units))
        assert again.states.tolist() == [ABSENT, SKIPPED, SKIPPED, ABSENT, ABSENT, ABSENT]
        assert not again.take(0)


def test_a_map_without_a_known_length_grows(tmp_path):
    Units.create(tmp_path, 0)
    units = Units(tmp_path, None)
    assert units.states.tolist() == []
    units.mark(2, 1, WRITTEN)
    assert units.states.tolist() == [ABSENT, ABSENT, WRITTEN]
    units.drop(np.arange(1, 9))
    assert units.states.tolist() == [ABSENT] * 3
