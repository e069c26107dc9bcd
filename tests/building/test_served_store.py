"""A partial store that services fill for their readers, against the model of `test_partial`: any mix of processes.

Beside the suppliers, kills, failed syncs and power losses of that test, readers want, wait and forget here, and what
they wait for may fail, or be held by another process that dies meanwhile.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from building.test_partial import COUNT, PROCESS, SIZE, UNIT, PartialStores
from memfeed.building.partial import DURABLE, WRITTEN
from memfeed.building.service import Service
from memfeed.building.unit_queue import UnitQueue
from memfeed.errors import BuildError
from memfeed.store.row_supply import ReadRequest

MOST_LOOKS = 200  # of a reader at its units, before it counts as one that waits for ever


class Served(Service):
    """The service of one process. It has no thread: `_feed` brings the units, so that each step is whole."""

    finish_units, retries = 2, True

    def __init__(self, stores, units):
        self.stores, self.units, self.clock, self.looks = stores, units, 0.0, 0
        self.failing, self.brought = set(), []
        queue = UnitQueue(COUNT, lambda chosen: ~self.units.are_present(chosen))
        super().__init__(stores.work, queue, threading.Condition(), lambda backing: None)

    def start(self):
        pass

    def absent(self, units):
        self.looks += 1
        assert self.looks < MOST_LOOKS, "a reader waits for ever"
        if self.looks > 3:
            self.stores.end_holders()
        return super().absent(units)

    def _feed(self):
        self.clock += 1
        while len(units := self.queue.next_units(self.clock, 2)):
            errors = {}
            with self.units.hold(units.tolist()) as held:
                for unit in held:
                    if unit in self.failing:
                        errors[unit] = BuildError(f"unit {unit} failed")
                    else:
                        self.stores.write(self.units, unit)
                        self.brought.append(unit)
            self.queue.give_back(units, self.clock + 1, errors)

    def _stop_supplier(self):
        pass

    _serve = _will_commit = _end = _stop_supplier

    def _await_commit(self):
        self.units.sync(lambda written: self.stores.model.sync())
        return bool(self.units.are_present().all())


class ServedStores(PartialStores):
    """Several processes, each with a service."""

    def __init__(self):
        super().__init__()
        self.services = {}

    def service(self, process):
        found = self.services.get(process)
        if found is None or found.units is not self.processes[process]:  # it was killed
            found = self.services[process] = Served(self, self.processes[process])
        found.looks, found.brought = 0, []
        return found

    def write(self, units, unit):
        self.number += 1
        written = bytes([self.number % 200 + 1]) * SIZE
        with units.writing():
            self.model.write(unit, written)
            units.mark(unit, 1, WRITTEN)
        self.model.brought[unit] = written

    def end_holders(self):
        """Let whoever holds units die without having written them."""
        for (process, unit), block in list(self.held.items()):
            block.close()
            del self.held[process, unit], self.model.holders[unit]

    @rule(
        process=PROCESS,
        asked=st.lists(st.lists(UNIT, min_size=1, max_size=3), min_size=1, max_size=3),
        failing=st.sets(UNIT, max_size=2),
        forgets=st.booleans(),
    )
    def read_through_service(self, process, asked, failing, forgets):
        """A reader asks ahead, and waits for part after part. It gets the bytes, or the error of a unit."""
        service, reader = self.service(process), ReadRequest()
        parts, service.failing = [np.array(part) for part in asked], failing
        held, failed = set(self.model.holders), set(service.queue.failed)
        for part in parts:
            service.want(reader, part)
        for part in parts:
            before = {unit for unit in part.tolist() if self.model.brought[unit] is None}
            service.note_wait(reader, part)
            service.looks = 0
            if before & failing:
                with pytest.raises(BuildError, match=r"unit \d failed"):
                    service.bring(part)
            else:
                service.bring(part)
                assert all(self.model.brought[unit] is not None for unit in part.tolist())
            if forgets:
                service.forget(reader)
                break
        service.forget(reader)
        order = [unit for part in asked for unit in part]
        assert set(service.brought) <= set(order), "nobody asked for others"
        if not held and not failing and not failed & set(order):  # those are brought again when they are waited for
            first_uses = [unit for unit in dict.fromkeys(order) if unit in service.brought]
            assert service.brought == first_uses, "in the order of the reader"

    @rule(process=PROCESS)
    def finish(self, process):
        service = self.service(process)
        service.failing = set()
        service.finish()
        assert (self.processes[process].states == DURABLE).all()
        assert self.model.disk == self.model.brought


TestServedStores = ServedStores.TestCase
TestServedStores.settings = settings(max_examples=60, stateful_step_count=30)
