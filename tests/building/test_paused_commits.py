"""A commit that stops for seconds before its last step is finished by a process that waited for it."""

import os

import pytest

import memfeed
from memfeed.building import commit
from memfeed.store.format import WORK_DIRECTORY
from memfeed.system import files


@pytest.mark.parametrize("begins_anew", [False, True])
def test_the_store_that_another_process_has_published_is_taken(begins_anew, tmp_path, monkeypatch):
    path, rename = tmp_path / "s.mf", files.rename

    def late(root, to):
        if to == path:
            os.rename(root, to)
            if begins_anew:
                (root / WORK_DIRECTORY).mkdir(parents=True)
        rename(root, to)

    monkeypatch.setattr(commit.files, "rename", late)
    store = memfeed.cache(list(range(40)), path, progress=False)
    assert [store[i] for i in range(40)] == list(range(40))


def test_other_files_at_the_path_are_no_store(tmp_path, monkeypatch):
    path, rename = tmp_path / "s.mf", files.rename

    def late(root, to):
        if to == path:
            to.mkdir()
            (to / "notes.txt").touch()
        rename(root, to)

    monkeypatch.setattr(commit.files, "rename", late)
    with pytest.raises(memfeed.errors.BuildError, match="not empty"):
        memfeed.cache(list(range(40)), path, progress=False)
    assert os.listdir(path) == ["notes.txt"]
