import os
import threading

import pytest
from small_build import SCHEMA

import memfeed
from memfeed.building import claim as claims
from memfeed.building.build import Build
from memfeed.building.claim import claim, clear, is_claimed
from memfeed.errors import BuildError, StoreError


def test_a_claim_that_began_nothing_leaves_nothing(path):
    with claim(path):
        pass
    assert list(path.parent.iterdir()) == []


def test_the_lock_counts_only_for_its_thread_and_while_its_file_is_there(path):
    seen = []
    with claim(path) as root:
        assert is_claimed(root)
        thread = threading.Thread(target=lambda: seen.append(is_claimed(root)))
        thread.start()
        thread.join()
        (root / ".build" / "lock").unlink()
        assert not is_claimed(root)
    assert seen == [False]


def test_others_do_not_get_the_lock_meanwhile(path):
    errors = []

    def build():
        try:
            with claim(path, wait=False):
                pass
        except BuildError as error:
            errors.append(str(error))

    with claim(path):
        thread = threading.Thread(target=build)
        thread.start()
        thread.join()
    assert errors == [f"{path}: found another process that builds it; expected none"]
    build()
    assert len(errors) == 1


def test_a_thread_may_not_claim_twice(path):
    with claim(path), pytest.raises(BuildError, match="this very thread is building it already"), claim(path):
        pass


@pytest.mark.parametrize("name", ["b.mf.build", "b.mf.build.old"])
def test_names_of_builds_are_refused(path, name):
    with pytest.raises(StoreError, match="found a name that only unfinished stores have"), claim(path.with_name(name)):
        pass


def test_what_is_cleared_is_no_build_and_the_lock_stays(path):
    with claim(path) as root:
        Build.begin(root, SCHEMA, 4, None)
        clear(root)
        assert is_claimed(root)
        assert Build.resume(root) is None
        assert sorted(p.name for p in (root / ".build").iterdir()) == ["lock", "owner"]


@pytest.mark.parametrize("length", [252, 249, 244])
@pytest.mark.parametrize("lazily", [False, True])
def test_a_name_that_is_too_long_is_told(tmp_path, lazily, length):
    with pytest.raises(StoreError, match=r"(?s)File name too long.*choose a shorter name"):
        memfeed.cache([1, 2, 3], tmp_path / ("n" * length), lazily=lazily, progress=False)
    assert not os.listdir(tmp_path)


def test_a_store_that_was_moved_to_a_long_name_is_opened(tmp_path):
    store = memfeed.cache([1, 2, 3], tmp_path / "a.mf", progress=False)
    store.path.rename(tmp_path / ("n" * 250))
    assert list(memfeed.open(tmp_path / ("n" * 250))) == [1, 2, 3]


def test_results_under_a_long_name_are_refused_with_its_path(tmp_path):
    with pytest.raises(BuildError, match=r"(?s)n: found that the disk refused .*File name too long|making a directory"):
        memfeed.memoize(abs, tmp_path / ("n" * 244), version=1)(3)


def test_another_thread_claims_a_build_meanwhile(monkeypatch, tmp_path):
    class Root:
        """The root of a build: while it is compared, another thread claims its own build."""

        def __eq__(self, other):
            claims._held[tmp_path / str(len(claims._held)), 1] = 0
            return False

        __hash__ = object.__hash__

    monkeypatch.setattr(claims, "_held", {(Root(), 1): 0, (tmp_path, 2): 0, (Root(), 3): 0})
    claims.ends_by_itself(tmp_path)
    assert (tmp_path, 2) not in claims._held
    assert len(claims._held) == 4
