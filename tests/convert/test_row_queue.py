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
    assert sum(lists, []) == rows.tolist()
    sizes = [len(taken) for taken in lists]
    assert max(sizes[:10]) == 30, "about 30 ms of work while there is much left"
    assert all(size <= max((1000 - sum(sizes[:i])) // 4, 1) for i, size in enumerate(sizes)), "no worker gets the rest"
