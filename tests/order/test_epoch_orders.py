import time

import numpy as np
import pytest

from memfeed.order import orders
from memfeed.order.orders import LEAST_ROWS, MEASURED_EPOCHS, EpochOrders, Shuffled


class Slow:
    """Makes orders; says which, and in what thread."""

    n = 10

    def __init__(self, epoch):
        self.epoch = epoch


def test_the_order_is_that_of_the_epoch_however_it_was_drawn():
    made = EpochOrders(lambda epoch: Shuffled(LEAST_ROWS, 3, epoch), LEAST_ROWS)
    for epoch in (0, 1, 2, 7, 8, 3):
        order = made(epoch)
        made.draw_ahead(epoch + 1)
        want = Shuffled(LEAST_ROWS, 3, epoch)
        assert np.array_equal(order(0, order.n), want(0, want.n))


def test_an_order_is_drawn_while_the_epoch_before_runs():
    calls = []
    made = EpochOrders(lambda epoch: calls.append(epoch) or Slow(epoch), LEAST_ROWS)
    assert made(0).epoch == 0
    assert calls == [0]
    made.draw_ahead(1)
    made._next[1].join()
    assert calls == [0, 1]
    assert made(1).epoch == 1
    assert calls == [0, 1]


def test_short_orders_start_no_thread():
    made = EpochOrders(Slow, LEAST_ROWS - 1)
    made(0)
    made.draw_ahead(1)
    assert made._next is None


def test_what_fails_in_the_thread_is_raised_where_the_order_is_asked_for():
    def fails(epoch):
        if epoch == 1:
            raise MemoryError("mine")
        return Slow(epoch)

    made = EpochOrders(fails, LEAST_ROWS)
    made(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(orders.threading, "excepthook", lambda args: None)
        made.draw_ahead(1)
        made._next[1].join()
    with pytest.raises(MemoryError, match="mine"):
        made(1)


@pytest.mark.parametrize("slower", [True, False], ids=["drawing ahead is slower", "drawing when asked is slower"])
def test_of_short_epochs_the_faster_way_is_kept(slower):
    made = EpochOrders(Slow, LEAST_ROWS)
    for epoch in range(3 * MEASURED_EPOCHS):
        ahead = made._ahead
        made(epoch)
        made.draw_ahead(epoch + 1)
        time.sleep(0.006 if ahead == slower else 0.001)
    assert made._ahead is not slower
    assert not made._measuring
