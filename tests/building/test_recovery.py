import shutil

import pytest
import torch
from small_build import SCHEMA, is_right, packed

import memfeed
from memfeed.building import commit
from memfeed.building.build import Build
from memfeed.building.claim import claim, is_claimed
from memfeed.errors import BuildError
from memfeed.system import files


@pytest.mark.parametrize("step", ["manifest", "exchange", "gap"])
def test_a_commit_that_was_cut_short_is_finished(path, step, monkeypatch):
    old = memfeed.cache(torch.arange(3), path, progress=False) if step != "manifest" else None
    with claim(path) as root:
        build = Build.begin(root, SCHEMA, 4, None)
        build.writer().write(0, 4, packed(0, 4))
        with monkeypatch.context() as m:
            if step == "manifest":
                m.setattr("memfeed.building.commit.publish", lambda *a, **k: None)
            elif step == "exchange":  # swapped, but the old store is still there
                kept = (root, path / ".build", path.with_name("a.mf.old"))
                m.setattr(files, "remove_tree", lambda p: None if p in kept else _remove(p))
            else:  # no exchange here, and dead between the two renames
                m.setattr(files, "exchange", lambda a, b: False)
                real = files.rename
                m.setattr(
                    files,
                    "rename",
                    lambda one, to: (_ for _ in ()).throw(OSError("dead")) if one == root else real(one, to),
                )
            if step == "gap":
                with pytest.raises(OSError, match="dead"):
                    build.commit(path, overwrite=True)
            else:
                build.commit(path, overwrite=old is not None)
        if step != "exchange":
            assert not path.exists()
        commit.finish_interrupted(path)
    assert is_right(memfeed.open(path), range(4))
    assert sorted(p.name for p in path.parent.iterdir()) == ["a.mf"]


def _remove(path):
    if path.exists():
        shutil.rmtree(path)


def _interrupt_commit(path, monkeypatch):
    """Leave a build whose manifest is written, and which has not yet its store's name."""
    with claim(path) as root, monkeypatch.context() as m:
        m.setattr("memfeed.building.commit.publish", lambda *a, **k: None)
        build = Build.begin(root, SCHEMA, 4, None)
        build.writer().write(0, 4, packed(0, 4))
        build.commit(path)


def test_the_lock_counts_after_a_recovery_that_moved_its_file(path, monkeypatch):
    _interrupt_commit(path, monkeypatch)
    with commit.claim_recovered(path) as root:
        assert is_right(memfeed.open(path), range(4))
        assert is_claimed(root)
        assert (root / ".build" / "lock").exists()
    assert [p.name for p in path.parent.iterdir()] == ["a.mf"]


def test_the_plain_lock_does_not_count_after_it(path, monkeypatch):
    _interrupt_commit(path, monkeypatch)
    with claim(path) as root:
        assert is_claimed(root)
        commit.finish_interrupted(path)
        assert not is_claimed(root)


def test_remains_are_removed_unless_another_process_is_at_work(path):
    memfeed.cache(torch.arange(5), path, progress=False)
    (path / ".build").mkdir()
    path.with_name("a.mf.build.old").mkdir()
    with claim(path):
        commit.claim_and_remove_remains(path)
        assert (path / ".build").exists()
    commit.claim_and_remove_remains(path)
    assert [p.name for p in path.parent.iterdir()] == ["a.mf"]


def test_an_error_while_the_claim_is_held_releases_it(path):
    with pytest.raises(BuildError, match="mine"), commit.claim_recovered(path):
        raise BuildError("mine")
    with commit.claim_recovered(path, wait=False) as root:
        assert is_claimed(root)
    assert not is_claimed(root)
