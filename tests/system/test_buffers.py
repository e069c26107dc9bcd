import _thread
import gc
import operator
import os
import queue
import signal
import threading
import weakref
from collections import deque

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memfeed.system.buffers import MOST_IDLE, Fresh, Pool


def lease(pool, size=1000):
    return pool.allocate((size,), torch.uint8)


@pytest.mark.parametrize(
    "hold",
    [
        lambda t: t,
        lambda t: t[3:5],
        lambda t: t.view(10, 100).t(),
        lambda t: t.numpy(),
        lambda t: t.numpy()[::7],
        lambda t: t.view(torch.int64)[1:],
        lambda t: list(t.split(300))[1],
        lambda t: torch.nested.nested_tensor_from_jagged(t, torch.tensor([0, 400, 1000])),
        lambda t: memoryview(t.numpy()),
    ],
    ids=["tensor", "slice", "view", "numpy", "numpy slice", "dtype view", "split", "nested", "memoryview"],
)
def test_lent_memory_is_not_lent_again_while_anything_shares_it(hold):
    pool = Pool()
    tensor = lease(pool)
    tensor.fill_(7)
    held = hold(tensor)
    address = tensor.data_ptr()
    del tensor
    others = [lease(pool) for _ in range(5)]
    assert all(other.data_ptr() != address for other in others)
    del others, held
    assert lease(pool).data_ptr() == address


def test_memory_is_used_again():
    pool = Pool()
    seen = set()
    for _ in range(1000):
        seen.add(lease(pool).data_ptr())
    assert len(seen) <= 2


def test_idle_memory_is_bounded_and_lent_memory_is_not():
    pool = Pool()
    held = [lease(pool) for _ in range(50)]
    assert len({t.data_ptr() for t in held}) == 50
    del held
    assert len(pool._idle) == MOST_IDLE


def test_a_pool_that_is_dropped_frees_its_memory_at_once():
    pool = Pool()
    lease(pool)
    memory = weakref.ref(pool._idle[0])
    gc.disable()
    try:
        del pool
        assert memory() is None
    finally:
        gc.enable()


def test_another_thread_may_hold_and_free():
    pool, passed = Pool(), queue.Queue()
    sums = []

    def consume():
        while (tensor := passed.get()) is not None:
            sums.append(int(tensor.sum()))

    thread = threading.Thread(target=consume)
    thread.start()
    for i in range(300):
        tensor = lease(pool, 256)
        tensor.fill_(i % 5)
        passed.put(tensor)
        del tensor
    passed.put(None)
    thread.join()
    assert sums == [(i % 5) * 256 for i in range(300)]


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(0, 50), st.sampled_from([torch.float32, torch.bfloat16, torch.bool])), max_size=20)
)
def test_any_shape_and_dtype(wanted):
    pool = Pool()
    for size, dtype in wanted:
        tensor = pool.allocate((size, 3), dtype)
        assert (tuple(tensor.shape), tensor.dtype) == ((size, 3), dtype)
        tensor.zero_()


def test_a_forked_child_has_its_own():
    pool = Pool()
    lease(pool)
    parents = pool._idle
    pid = os.fork()
    if pid == 0:
        lease(pool)
        os._exit(int(pool._idle is parents))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize("shape", [(0, 3), (2, 3), (3, 1 << 20)], ids=["nothing", "small", "huge pages"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bfloat16, torch.complex128])
def test_fresh_memory_belongs_to_the_caller(shape, dtype):
    one, other = Fresh().allocate(shape, dtype), Fresh().allocate(shape, dtype)
    assert (one.shape, one.dtype) == (shape, dtype)
    assert one.is_contiguous()
    one.zero_()
    other.fill_(1)
    assert not one.any()


def test_ctrl_c_as_memory_comes_back_is_not_lost():
    """Python prints an exception of a weak reference's callback, and goes on."""
    pool = Pool()
    held = [pool.allocate((100,), torch.int64)]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    call = operator.methodcaller("__call__")
    try:
        with pytest.raises(KeyboardInterrupt):
            # all in C: the interrupt is raised where Python code runs next, a callback of the tensor that is dropped
            deque(map(call, (_thread.interrupt_main, held.clear)), maxlen=0)
            sum(range(100))
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(pool._idle) == 1
