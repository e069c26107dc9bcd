"""Which rows the workers of a store that is being filled get next."""

import numpy as np

from memfeed.convert.row_queue import RowQueue


def test_the_last_rows_of_an_epoch_go_into_small_lists():
    queue = RowQueue(np.zeros(1000, np.uint8), seconds=1e-3)
    rows = np.random.default_rng(0).permutation(1000)
    for first in range(0, 1000, 100):
        queue.want("reader", rows[first : first + 100])
    lists = [queue.take(4) for _ in range(2000)]
    lists = [taken for taken in lists if taken]
    assert [row for taken in lists for row in taken] == rows.tolist()
    sizes = [len(taken) for taken in lists]
    assert max(sizes[:10]) == 30, "about 30 ms of work while there is much left"
    assert all(size <= max((1000 - sum(sizes[:i])) // 4, 1) for i, size in enumerate(sizes)), "no worker gets the rest"


def test_rows_that_nobody_wants_go_in_order_and_after_those_that_readers_wait_for():
    presence = np.zeros(10_000, np.uint8)
    presence[5_000] = 2
    queue = RowQueue(presence, seconds=1e-6)
    assert queue.take() == range(4096)
    queue.want("reader", np.array([9, 9_999, 6_000]))
    assert queue.take() == [9_999, 6_000], "row 9 was sent"
    assert list(queue.take()) == [*range(4096, 5_000), *range(5_001, 6_000), *range(6_001, 8_194)]
    assert queue.take() == range(8_194, 9_999)
    assert not len(queue.take())


def test_the_processes_of_a_shared_store_begin_elsewhere():
    rows = [row for queue in [RowQueue(np.zeros(99, np.uint8), 1e-3, is_shared=True)] for row in taken_from(queue)]
    assert rows != sorted(rows)
    assert sorted(rows) == list(range(99))


def taken_from(queue):
    while len(rows := queue.take()):
        yield from rows


def test_rows_that_were_not_written_are_sent_again_but_not_those_that_failed():
    queue = RowQueue(np.zeros(4, np.uint8), 1.0)
    rows = list(taken_from(queue))
    queue.give_back(rows, {2: "failed"})
    queue.retry_lost()
    assert not len(queue.take()), "another process may be writing them"
    queue.take_back_all()
    assert sorted(taken_from(queue)) == [0, 1, 3]
