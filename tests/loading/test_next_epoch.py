"""The first batches of the next epoch are made before this one ends, where they are the right ones."""

import gc
import os
import time

import pytest
import torch

import memfeed
from memfeed.loading import background, next_epoch
from memfeed.loading.prefetch_policy import MEASURED_BATCHES, PrefetchPolicy
from memfeed.transforms import RandomHorizontalFlip

ROWS, SIZE = 40, 8
EPOCH_BYTES = ROWS * (3 * 4 * 4 + 8)


@pytest.fixture
def store(tmp_path):
    images = torch.arange(ROWS * 48).remainder(251).to(torch.uint8).view(ROWS, 3, 4, 4)
    return memfeed.cache((images, torch.arange(ROWS)), tmp_path / "s.mf", progress=False)


def threaded(store, **options):
    loader = memfeed.Loader(store, SIZE, shuffle=True, **{"seed": 3, **options})
    loader._epochs.policy = PrefetchPolicy(allowed=True, always=True)
    return loader


def gathered(loader):
    return loader._epochs.reader.plan.maker.gather.bytes


def wait_until(true, seconds=20):
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.002)
    assert true()


def expected(store, epoch, **options):
    loader = memfeed.Loader(store, SIZE, shuffle=True, prefetch_factor=0, **{"seed": 3, **options})
    loader.set_epoch(epoch)
    return list(loader)


def same(found, wanted):
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def one_epoch(loader):
    """Run an epoch, and wait until the thread has made what it makes of the next."""
    batches, before = list(loader), loader.stats()
    wait_until(
        lambda: gathered(loader) >= loader._epochs.gathered_before + EPOCH_BYTES + 2 * SIZE * EPOCH_BYTES // ROWS
    )
    assert before["bytes"] == loader.stats()["bytes"] == EPOCH_BYTES
    return batches


def test_batches_are_made_before_the_epoch_begins_and_are_the_right_ones(store):
    loader = threaded(store)
    threads = set()
    for epoch in range(4):
        same(one_epoch(loader), expected(store, epoch))
        threads.add(loader._epochs.handover._held[0].thread._thread)
        assert loader.state_dict()["epoch"] == epoch + 1
    assert len(threads) == 1  # it goes on from epoch to epoch


def test_the_caller_does_not_wait_for_the_first_batch(store):
    loader = threaded(store)
    one_epoch(loader)
    with loader.paused():  # nothing is made now
        iterator = iter(loader)
        found = [next(iterator), next(iterator)]
    same(found + list(iterator), expected(store, 1))


@pytest.mark.parametrize("groups", [0, 1, 3])
def test_the_thread_is_given_back_in_the_midst_of_an_epoch_that_it_began(tmp_path, groups):
    """The measurement finds that it is worth nothing: the caller makes the rest of this epoch, and the next one."""
    store = memfeed.cache(torch.arange(5000), tmp_path / "many.mf", progress=False)
    loader = threaded(store)
    list(loader)
    wait_until(lambda: loader._epochs.handover._held[0].thread.ready)
    policy, left = loader._epochs.policy, iter([False] * groups + [True])

    def note(wait, busy):
        policy.settled = next(left)
        policy.threaded = not policy.settled
        return policy.settled

    policy.settled, policy.note = False, note
    for epoch in (1, 2):
        assert torch.equal(torch.cat(list(loader)), torch.cat(expected(store, epoch)))
        assert policy.settled


@pytest.mark.parametrize(
    ("change", "epoch", "options"),
    [
        (lambda loader: loader.set_epoch(7), 7, {}),
        (lambda loader: loader.set_epoch(1), 1, {}),
        (lambda loader: loader.load_state_dict(loader.state_dict() | {"epoch": 5}), 5, {}),
    ],
)
def test_another_epoch_than_the_next(store, change, epoch, options):
    loader = threaded(store)
    one_epoch(loader)
    change(loader)
    same(list(loader), expected(store, epoch, **options))


def test_a_position_in_the_next_epoch(store):
    loader = threaded(store)
    one_epoch(loader)
    loader.skip(2)
    same(list(loader), expected(store, 1)[2:])


def test_a_transform_that_was_changed_between_epochs(store):
    loader = threaded(store, transform=RandomHorizontalFlip(0.0))
    one_epoch(loader)
    loader.transform.p = 1.0
    same(list(loader), expected(store, 1, transform=RandomHorizontalFlip(1.0)))
    same(list(loader), expected(store, 2, transform=RandomHorizontalFlip(1.0)))


def test_a_sampler_that_was_put_in_between_epochs(store):
    loader = threaded(store)
    one_epoch(loader)
    object.__setattr__(loader, "_own_parts", loader._own_parts)
    other = memfeed.Loader(store, SIZE, sampler=range(ROWS))
    loader.__dict__["batch_sampler"] = other.batch_sampler
    assert [row for batch in loader for row in batch[1].tolist()] == list(range(ROWS))


def test_another_number_of_ranks(store, monkeypatch):
    loader = threaded(store)
    one_epoch(loader)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.warns(UserWarning, match="found 2 ranks"):
        found = list(loader)
    same(found, expected(store, 1, ranks=(1, 2)))


def test_columns_in_memory_may_change_between_epochs():
    data = torch.zeros(ROWS, dtype=torch.int64)
    loader = threaded(data)
    assert sum(int(batch.sum()) for batch in loader) == 0
    time.sleep(0.05)
    data.fill_(1)
    assert sum(int(batch.sum()) for batch in loader) == ROWS


def test_an_epoch_that_is_broken_off_begins_nothing(store):
    loader = threaded(store)
    for _ in loader:
        break
    assert loader._epochs.handover._held is None
    same(list(loader), expected(store, 1))


def test_batches_that_nobody_takes_are_dropped_after_a_while(store, monkeypatch):
    monkeypatch.setattr(next_epoch, "KEPT_SECONDS", 0.05)
    loader = threaded(store)
    list(loader)
    source = loader._epochs.handover._held[0].thread
    wait_until(lambda: not source._thread.is_alive())
    assert source.ready == 0
    same(list(loader), expected(store, 1))


def test_batches_that_are_taken_are_not_dropped_later(store, monkeypatch):
    monkeypatch.setattr(next_epoch, "KEPT_SECONDS", 0.2)
    loader = threaded(store)
    list(loader)
    iterator = iter(loader)
    found = [next(iterator)]
    time.sleep(0.5)
    same(found + list(iterator), expected(store, 1))


def test_an_exception_in_a_batch_made_early_is_raised_by_its_epoch(store):
    loader = threaded(store)
    groups = loader._epochs.reader.groups

    def broken(epoch, *rest):
        if epoch == 1:
            raise ValueError("epoch 1")
        yield from groups(epoch, *rest)

    loader._epochs.reader.groups = broken
    same(list(loader), expected(store, 0))
    with pytest.raises(ValueError, match="epoch 1"):
        list(loader)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_makes_them_itself(store):
    loader = threaded(store)
    one_epoch(loader)
    wanted = expected(store, 1)
    pid = os.fork()
    if not pid:
        try:
            same(list(loader), wanted)
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    same(list(loader), wanted)


def test_the_thread_ends_with_the_loader_at_once(store, monkeypatch):
    monkeypatch.setattr(background, "PATIENCE_SECONDS", 1000)  # it is woken: it does not look from time to time
    loader = threaded(store)
    one_epoch(loader)
    thread = loader._epochs.handover._held[0].thread._thread
    del loader
    gc.collect()
    thread.join(20)
    assert not thread.is_alive()


def test_an_epoch_that_goes_on_keeps_its_thread_for_some_epochs():
    policy = PrefetchPolicy(allowed=True)
    for _ in range(3 * MEASURED_BATCHES):
        if not policy.settled:
            policy.note(0.0 if policy.threaded else 0.01, 0.01)
    assert policy.threaded
    kept = 0
    policy.begin(goes_on=True)
    while policy.threaded:
        kept += 1
        policy.begin(goes_on=True)
    assert 2 <= kept < 20
    assert not policy.settled


def test_short_epochs_are_measured_together():
    policy = PrefetchPolicy(allowed=True)
    for _ in range(3 * MEASURED_BATCHES):
        policy.begin()
        for _ in range(3):
            if not policy.settled:
                policy.note(0.0 if policy.threaded else 0.01, 0.01)
        if policy.settled:
            break
    assert policy.threaded
