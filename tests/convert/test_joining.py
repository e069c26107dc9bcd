"""A process that joins others who fill a store, while they commit it."""

import pytest

from memfeed.convert import lazily
from memfeed.convert.inputs import ConvertOptions, classify_input
from memfeed.errors import StoreError
from support import Made, cache


def test_a_store_that_is_committed_while_a_process_joins_is_opened(tmp_path, monkeypatch):
    """The work directory goes first, a moment before the store has its name."""
    path, data = tmp_path / "a.mf", Made(lambda i: {"x": float(i)}, 8)
    begun, unshared = [True, True, False], []

    def join(root):
        raise StoreError(f"{root}: found a build that cannot be read (No such file or directory)")

    monkeypatch.setattr(lazily, "is_shared", lambda root: True)
    monkeypatch.setattr(lazily, "share", lambda root: "shared")
    monkeypatch.setattr(lazily, "unshare", unshared.append)
    monkeypatch.setattr(lazily.Build, "join", join)
    monkeypatch.setattr(lazily.Build, "is_begun", lambda root: begun.pop(0))
    options = ConvertOptions(None, None, None, (), 0, False, False, True, False, False, None)
    assert lazily._join(path, classify_input(data), options) is None
    assert unshared == ["shared"]
    begun += [True] * 9
    monkeypatch.setattr(lazily, "JOIN_SECONDS", 0.1)
    monkeypatch.setattr(lazily, "WAIT_SECONDS", 0.15)
    with pytest.raises(StoreError, match="cannot be read"):
        lazily._join(path, classify_input(data), options)
    monkeypatch.undo()
    assert len(cache(data, path)) == 8
