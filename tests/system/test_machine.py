import multiprocessing
import os
import time

import pytest

from memfeed.system import machine
from support import wait_until


def test_memory_limit_is_what_the_machine_has_or_less():
    assert 0 < machine.memory_limit() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_a_control_group_limits_memory(monkeypatch):
    found = {
        "/proc/meminfo": "MemTotal: 16 kB\nMemAvailable: 8 kB\n",
        "/proc/self/cgroup": "0::/a\n",
        "/sys/fs/cgroup/a/memory.max": "max\n",
        "/sys/fs/cgroup/memory.max": "4096\n",
    }
    monkeypatch.setattr(machine, "_read", lambda path: found.get(path, ""))
    assert machine.memory_limit() == 4096
    found["/sys/fs/cgroup/memory.max"] = "max\n"
    assert machine.memory_limit() == 8192


def test_a_program_that_is_imported_again_knows_for_whom(monkeypatch):
    assert not machine.imports_program_of(os.getppid())
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    assert machine.imports_program_of(os.getppid())
    assert not machine.imports_program_of(os.getpid())
    monkeypatch.setattr(machine, "_read", {f"/proc/{os.getppid()}/status": "Pid:\t7\nPPid:\t123\n"}.get)
    assert machine.imports_program_of(123)
    assert not machine.imports_program_of(12)


def test_to_ask_for_the_start_method_chooses_none(monkeypatch):
    monkeypatch.setattr(multiprocessing.context._default_context, "_actual_context", None)
    assert machine.start_method() == multiprocessing.get_all_start_methods()[0]
    assert multiprocessing.get_start_method(allow_none=True) is None


def test_a_boot_has_one_id():
    assert machine.boot_id() == machine.boot_id()
    assert machine.host_name()


def _outlive(pid):
    child = multiprocessing.get_context("fork").Process(target=_wait_for_parent)
    child.start()
    pid.value = child.pid
    os._exit(0)


def _wait_for_parent():
    machine.die_with_parent()
    time.sleep(60)


def test_a_child_ends_after_its_parent():
    context = multiprocessing.get_context("fork")
    pid = context.Value("i", 0)
    parent = context.Process(target=_outlive, args=(pid,))
    parent.start()
    parent.join()
    wait_until(lambda: not _is_alive(pid.value))


def _is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("context", ["spawn", multiprocessing.get_context("spawn")], ids=["text", "object"])
def test_the_context_of_a_dataloader_decides(context):
    assert machine.start_method(context) == "spawn"
