"""Paths that another user may have put where this one is about to write."""

import os

import pytest

from memfeed.errors import StoreError
from memfeed.system import trust

NOBODY = 65534
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def test_a_directory_of_this_user_or_nothing_is_right(tmp_path):
    trust.require_own_directory(tmp_path)
    trust.require_own_directory(tmp_path / "not there")


def test_a_link_a_file_and_a_path_through_a_file_are_no_directory(tmp_path):
    file, link = tmp_path / "file", tmp_path / "link"
    file.touch()
    link.symlink_to(tmp_path)
    for path, message in ((link, "found a symbolic link"), (file, "found no directory")):
        with pytest.raises(StoreError, match=message):
            trust.require_own_directory(path)
    with pytest.raises(StoreError, match="leads nowhere"):
        trust.require_own_directory(file / "below")


def test_a_directory_may_be_the_groups_and_not_everybodys(tmp_path):
    made = tmp_path / "made"
    made.mkdir()
    made.chmod(0o775)
    trust.require_own_directory(made)
    made.chmod(0o777)
    with pytest.raises(StoreError, match="that all users may write into"):
        trust.require_own_directory(made)


@only_root
def test_what_another_user_made_is_refused(tmp_path):
    made, link = tmp_path / "made", tmp_path / "link"
    made.mkdir()
    link.symlink_to(made)
    trust.require_own_link(link, made)
    for path in (made, link):
        os.chown(path, NOBODY, -1, follow_symlinks=False)
    with pytest.raises(StoreError, match=f"a directory of user {NOBODY}"):
        trust.require_own_directory(made)
    with pytest.raises(StoreError, match=f"a symbolic link of user {NOBODY}"):
        trust.require_own_link(link, made)


def test_where_a_new_directory_looks_the_same_nothing_is_refused(tmp_path, monkeypatch):
    made = tmp_path / "made"
    made.mkdir()
    made.chmod(0o777)
    monkeypatch.setattr(trust, "_seen_of_a_new_directory", lambda above: (os.geteuid(), True))
    trust.require_own_directory(made)


def test_a_tree_of_plain_files_is_right_and_else_the_path_is_named(tmp_path):
    root = tmp_path / "root"
    (root / "inner").mkdir(parents=True)
    file = root / "inner" / "file"
    file.touch()
    trust.require_own_files(root)
    bad = root / "inner" / "bad"

    def refused(make, message):
        make()
        with pytest.raises(StoreError, match=message) as caught:
            trust.require_own_files(root)
        assert str(bad) in str(caught.value) or str(file) in str(caught.value)
        bad.unlink()

    refused(lambda: bad.symlink_to(file), "a symbolic link")
    refused(lambda: os.mkfifo(bad), "neither a file nor a directory")
    refused(lambda: os.link(file, bad), "second name|hard link|more than one name")
    trust.require_own_files(root)


def test_a_directory_that_another_process_removes_meanwhile_is_passed_over(tmp_path, monkeypatch):
    root, lstat = tmp_path / "build", os.lstat
    (root / "meta" / "n").mkdir(parents=True)

    def remove(path):
        found = lstat(path)
        if os.path.basename(path) == "n":
            os.rmdir(path)
        return found

    monkeypatch.setattr(trust.os, "lstat", remove)
    trust.require_own_files(root)
    assert not (root / "meta" / "n").exists()
