"""Messages between ranks through a store of keys, without a process group."""

import json

import pytest

from memfeed.loading import ranks
from memfeed.loading.ranks import missing_keys, verdict_of_ranks


class Keys(dict):
    """A store of one process; a test may let a key come later."""

    def __init__(self):
        super().__init__()
        self.looks, self.later = 0, {}

    def set(self, key, value):
        self[key] = value

    def get(self, key, default=None):
        return self[key]

    def check(self, keys):
        self.looks += 1
        for key, at in self.later.items():
            if self.looks >= at:
                self[key] = "1"
        return all(key in self for key in keys)


@pytest.fixture
def store(monkeypatch):
    keys, now = Keys(), [0.0]
    monkeypatch.setattr(ranks, "default_store", lambda: keys)
    monkeypatch.setattr(ranks.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(ranks.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(ranks.torch.distributed, "get_world_size", lambda: 3)
    keys.now = now
    return keys


def as_rank(monkeypatch, rank):
    monkeypatch.setattr(ranks.torch.distributed, "get_rank", lambda: rank)


def test_keys_that_come_later_are_waited_for(store):
    store.later = {"a": 1, "b": 20}
    assert missing_keys(store, ["a", "b"], 10.0) == []
    assert store.now[0] < 10


def test_keys_that_never_come_are_named_after_the_time(store):
    store.set("b", "1")
    assert missing_keys(store, ["a", "b", "c"], 5.0) == [0, 2]
    assert 5.0 < store.now[0] < 5.0 + 2 * ranks.LONGEST_PAUSE
    assert missing_keys(store, [], 5.0) == []
    assert missing_keys(store, ["a"], 0.0) == [0]


def test_rank_0_judges_all_answers(store, monkeypatch):
    as_rank(monkeypatch, 0)
    store.set("q/1", json.dumps([1]))
    store.set("q/2", json.dumps(None))
    assert verdict_of_ranks("q", {"n": 0}, lambda answers: len(answers) and answers, 1.0, 1.0) == [{"n": 0}, [1], None]
    for rank in (1, 2):
        as_rank(monkeypatch, rank)
        assert verdict_of_ranks("q", rank, pytest.fail, 1.0, 1.0) == [{"n": 0}, [1], None]


def test_a_rank_that_does_not_answer_is_none(store, monkeypatch):
    as_rank(monkeypatch, 0)
    store.set("q/2", json.dumps("here"))
    assert verdict_of_ranks("q", "mine", list, 1.0, 1.0) == ["mine", None, "here"]


def test_without_rank_0_there_is_no_verdict(store, monkeypatch):
    as_rank(monkeypatch, 2)
    assert verdict_of_ranks("q", "mine", pytest.fail, 1.0, 2.0) is None
    assert store.now[0] > 2.0
    assert store["q/2"] == '"mine"'
