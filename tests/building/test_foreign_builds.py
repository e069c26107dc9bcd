"""Builds that another user may have put there: nothing outside them is written, and nothing of theirs is obeyed."""

import errno
import gc
import os
import shutil
import stat
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest
import torch
from small_build import SCHEMA, is_right, packed

import memfeed
from forked_programs import run_program
from memfeed.building.build import Build
from memfeed.building.claim import claim
from memfeed.errors import BuildError, MemfeedError, StoreError
from memfeed.system import files, trust

DATA = {"x": torch.arange(3)}
FILES = ["x.memmap", "r/heap.bin", "r/start.memmap", "r/dims.memmap"]
WORK = ["settings.json", "settings.json.tmp", "generation", "generation.tmp", "presence", "extents", "writers"]


@pytest.fixture
def root(path):
    """A build that can be resumed."""
    with claim(path) as root:
        Build.begin(root, SCHEMA, 4, None).writer().write(0, 2, packed(0, 2))
    return root


@pytest.fixture
def precious(tmp_path):
    """A private file outside, which must stay as it is."""
    found = tmp_path / "precious"
    found.write_bytes(b"precious")
    found.chmod(0o600)
    yield found
    assert found.read_bytes() == b"precious"
    assert stat.S_IMODE(found.stat().st_mode) == 0o600


def resume(path):
    with claim(path) as root:
        build = Build.resume(root)
        build.writer().write(2, 2, packed(2, 2))
        build.commit(path)


@pytest.mark.parametrize("name", [*FILES, *(f".build/{name}" for name in WORK), ".build/lock", ".build/owner", "odd"])
@pytest.mark.parametrize("put", [os.symlink, os.link])
def test_a_link_in_a_build_leads_nowhere(path, root, precious, name, put):
    (root / name).unlink(missing_ok=True)
    put(precious, root / name)
    if name == ".build/owner":
        resume(path)  # it is replaced, never followed
        return
    with pytest.raises(MemfeedError, match="link"):
        resume(path)


@pytest.mark.parametrize("name", ["", ".build", "r"])
def test_a_directory_that_is_a_link_is_refused(path, root, tmp_path, name):
    outside = tmp_path / "outside"
    (root / name).rename(outside)
    (root / name).symlink_to(outside)
    before = {file: file.read_bytes() for file in outside.rglob("*") if file.is_file()}
    with pytest.raises(StoreError, match="found a symbolic link"):
        resume(path)
    assert before == {file: file.read_bytes() for file in outside.rglob("*") if file.is_file()}


def test_a_pipe_in_a_build_is_refused(path, root):
    (root / "pipe").touch()
    (root / ".build" / "settings.json.tmp").unlink(missing_ok=True)
    os.mkfifo(root / ".build" / "settings.json.tmp")
    with pytest.raises(StoreError, match="found neither a file nor a directory"):
        resume(path)


@pytest.mark.parametrize("where", ["", ".build"])
def test_a_build_into_which_all_may_write_is_refused(path, root, where):
    (root / where).chmod(0o777)
    with pytest.raises(StoreError, match="a directory that all users may write into; expected one that only you"):
        resume(path)
    (root / where).chmod(0o775)
    resume(path)
    assert is_right(memfeed.open(path), range(4))


def test_a_file_that_all_may_write_is_refused(path, root):
    (root / "x.memmap").chmod(0o666)
    with pytest.raises(StoreError, match="a file that all users may write"):
        resume(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("where", ["", ".build", "x.memmap", ".build/settings.json"])
def test_what_belongs_to_another_user_is_refused(path, root, where):
    os.chown(root / where, 65534, -1)
    with pytest.raises(StoreError, match=r"found a (directory|file) of user 65534"):
        resume(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_an_empty_directory_of_another_user_is_refused(path):
    root = path.with_name("a.mf.build")
    root.mkdir()
    os.chown(root, 65534, -1)
    with pytest.raises(StoreError, match="found a directory of user 65534"):
        memfeed.cache(DATA, path, progress=False)
    assert list(root.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_store_of_another_user_is_not_replaced(path):
    memfeed.cache({"x": torch.arange(3)}, path, progress=False)
    os.chown(path, 65534, -1)
    with pytest.raises(StoreError, match=r"a\.mf: found a directory of user 65534"):
        memfeed.cache({"x": torch.arange(4)}, path, progress=False, overwrite=True)
    assert len(memfeed.open(path)) == 3
    assert len(memfeed.cache({"x": torch.arange(3)}, path, progress=False)) == 3, "it can be read"


def test_a_file_system_that_shows_the_same_for_all_files_is_no_reason_to_refuse(path, root, monkeypatch):
    """FAT, and shared folders of virtual machines: what a new directory looks like says nothing about this one."""
    monkeypatch.setattr(trust, "_seen_of_a_new_directory", lambda above: (os.geteuid(), True))
    for directory in (root, root / ".build", root / "r"):
        directory.chmod(0o777)
    resume(path)


def test_directories_are_never_made_writable_for_all(path):
    before = os.umask(0)
    try:
        with pytest.raises(MemfeedError), memfeed.Writer(path, like={"x": "text"}, length=3):
            raise BuildError("dead")
        root = path.with_name("a.mf.build")
        found = [os.stat(top).st_mode for top, _, _ in os.walk(root)]
        assert found
        assert not any(mode & stat.S_IWOTH for mode in found)
        with memfeed.Writer(path, like={"x": "text"}, length=3) as writer:
            writer[0:3] = {"x": ["text"] * 3}
    finally:
        os.umask(before)
    assert not os.stat(path).st_mode & stat.S_IWOTH


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give links away")
@pytest.mark.parametrize("kind", ["store", "nothing"])
def test_a_link_of_another_user_is_not_written_through(path, tmp_path, kind):
    """Who made the link would choose which store is replaced, or where a new one appears."""
    other = tmp_path / "other.mf"
    if kind == "store":
        memfeed.cache({"x": torch.arange(3)}, other, progress=False)
    path.symlink_to(other)
    os.chown(path, 65534, -1, follow_symlinks=False)
    with pytest.raises(StoreError, match=r"found a symbolic link of user 65534; .* pass '.*other\.mf'"):
        memfeed.cache({"x": torch.arange(4)}, path, progress=False, overwrite=kind == "store")
    if kind == "store":
        assert len(memfeed.cache({"x": torch.arange(3)}, path, progress=False)) == 3, "but it can be read through one"
    with pytest.raises(StoreError, match="found a symbolic link of user 65534"):
        memfeed.Writer(path)
    os.chown(path, 0, -1, follow_symlinks=False)
    assert len(memfeed.cache({"x": torch.arange(4)}, path, progress=False, overwrite=kind == "store")) == 4
    assert path.is_symlink()


def change(root, **changes):
    file = root / ".build" / "settings.json"
    settings = msgspec.json.decode(file.read_bytes())
    for name, value in changes.items():
        at = settings
        *above, last = name.split("__")
        for key in above:
            at = at[int(key) if key.isdigit() else key]
        at[last] = value
    file.write_bytes(msgspec.json.encode(settings))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema__fields__0__stem": "../../x"}, r"the file name '\.\./\.\./x'"),
        ({"schema__fields__1__stem": "/etc/x"}, "the file name '/etc/x'"),
        ({"schema__fields__0__dtype": "object"}, "the dtype 'object'"),
        ({"schema__fields__0__path": ["z"]}, "not the leaves of the structure"),
        ({"rows": -4}, "-4 rows"),
        ({"rows": 1 << 60}, "rows"),
        ({"shares": 0}, "0 shares"),
        ({"generation": -1}, "generation -1"),
    ],
)
def test_settings_are_checked_as_a_manifest_is(path, root, changes, message):
    change(root, **changes)
    with pytest.raises(StoreError, match=f"found a build that cannot be read .*{message}.*remove that directory"):
        resume(path)


@pytest.mark.parametrize("size", [65 << 20, 1 << 40])
def test_settings_without_end_are_not_read(path, root, size):
    os.truncate(root / ".build" / "settings.json", size)
    with pytest.raises(StoreError, match="bytes of settings"):
        resume(path)


def test_to_remove_a_tree_follows_no_link_that_is_put_there_meanwhile(tmp_path, monkeypatch):
    """The directory is exchanged for a link between its listing and the removal of what it has."""
    outside, tree = tmp_path / "outside", tmp_path / "tree"
    (tree / "below").mkdir(parents=True)
    outside.mkdir()
    (tree / "below" / "f").write_bytes(b"")
    (outside / "f").write_bytes(b"precious")
    unlink, done = os.unlink, []

    def late(name, **where):
        if not done:
            done.append(name)
            (tree / "below").rename(tmp_path / "moved")
            (tree / "below").symlink_to(outside)
        unlink(name, **where)

    monkeypatch.setattr(os, "unlink", late)
    files.remove_tree(tree)
    assert done
    assert (outside / "f").read_bytes() == b"precious"


def test_a_dangling_link_in_the_place_of_a_build_is_refused_at_once(path):
    path.with_name("a.mf.build").symlink_to(path.with_name("nowhere"))
    with pytest.raises(StoreError, match=r"a\.mf\.build: found a symbolic link"):
        memfeed.cache(DATA, path, progress=False)
    assert not path.with_name("nowhere").exists()


@pytest.mark.parametrize("name", ["nowhere/b", "circle/b"])
def test_a_directory_below_a_link_that_leads_nowhere_cannot_be_made(tmp_path, name):
    (tmp_path / "nowhere").symlink_to(tmp_path / "nothing")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    with pytest.raises(BuildError, match=r"found (a symbolic link that leads nowhere|that the disk refused)"):
        files.make_directory(tmp_path / name)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_directory_below_proc_cannot_be_made():
    with pytest.raises(BuildError, match=r"/proc/memfeed\S*: found that the disk refused while making a directory"):
        memfeed.cache(DATA, "/proc/memfeed/a.mf", progress=False)


def test_circles_of_links_and_endless_names_are_errors_of_ours(tmp_path):
    circle = tmp_path / "circle"
    circle.symlink_to(circle)
    for bad in (circle, circle / "a.mf", tmp_path / ("x" * 5000), "a\0b"):
        for use in (memfeed.open, memfeed.Writer, lambda path: memfeed.cache(DATA, path, progress=False)):
            with pytest.raises(MemfeedError):
                use(bad)


def test_a_path_that_is_no_text_is_refused_before_anything_is_written(tmp_path):
    path = tmp_path / os.fsdecode(b"a\xff.mf")
    for use in (memfeed.Writer, lambda path: memfeed.cache(DATA, path, progress=False)):
        with pytest.raises(StoreError, match=r"a\\udcff\.mf: found a path that is not UTF-8"):
            use(path)
    assert list(tmp_path.iterdir()) == []
    memfeed.cache(DATA, tmp_path / "a.mf", progress=False)
    (tmp_path / "a.mf").rename(path)
    assert len(memfeed.open(path)) == 3, "but it can be read there"


def test_the_root_directory_is_no_store():
    for use in (memfeed.open, lambda path: memfeed.cache(DATA, path, progress=False), memfeed.Writer):
        with pytest.raises(StoreError, match=r"^/: found "):
            use("/").__enter__()


AS_NOBODY = """
import os, sys
import memfeed, torch
data = {"x": torch.arange(3)}
memfeed.cache(data, progress=False)[0]  # imports all that is needed: another user may not read Python's own files
os.setgid(65534), os.setuid(65534)
for action in (lambda: memfeed.cache(data, sys.argv[1], progress=False), lambda: memfeed.open(sys.argv[2])[0],
               lambda: memfeed.open(sys.argv[2])):
    try:
        action()
    except memfeed.errors.MemfeedError as error:
        print(type(error).__name__, error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="root becomes another user, who has no permission")
def test_what_cannot_be_read_is_an_error_of_ours(request, tmp_path):
    home = Path(tempfile.mkdtemp())  # other users cannot enter pytest's own directories
    request.addfinalizer(lambda: shutil.rmtree(home))
    home.chmod(0o755)
    memfeed.cache({"x": torch.arange(3), "y": torch.arange(3)}, home / "b.mf", progress=False)
    (home / "b.mf" / "x.memmap").chmod(0)
    build = home / "a.mf.build"
    (build / ".build").mkdir(parents=True)
    for one in (home, build, build / ".build"):
        os.chown(one, 65534, 65534)
    build.chmod(0)
    lines = run_program(AS_NOBODY, home / "a.mf", home / "b.mf", at=tmp_path).splitlines()
    build.chmod(0o700)
    assert len(lines) == 2, lines
    assert lines[0].startswith("StoreError")
    assert "found a directory that cannot be read" in lines[0]
    assert "x.memmap: found a file that cannot be opened (Permission denied)" in lines[1]


def test_a_directory_that_others_make_and_remove_all_the_time_is_made(tmp_path, monkeypatch):
    """Other processes have made it when mkdir comes, and at every second look they have removed it again."""
    path, mkdir, look = tmp_path / "d", os.mkdir, os.stat
    made, looks = [], []

    def late(name, mode):
        made.append(name)
        if len(made) < 4:
            raise FileExistsError(errno.EEXIST, "File exists", str(name))
        mkdir(name, mode)

    def removed_again(name, **options):
        if Path(name) != path or path in made[3:] or not options.get("follow_symlinks", True):
            return look(name, **options)
        looks.append(name)
        if len(looks) % 2:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(name))
        return look(tmp_path, **options)

    monkeypatch.setattr(os, "mkdir", late)
    monkeypatch.setattr(os, "stat", removed_again)
    files.make_directory(path)
    assert looks


def test_a_directory_that_exists_leaves_no_cycle_of_references(tmp_path):
    """A frame that keeps its exception keeps the frames of its callers, and what these have, until a collection."""
    gc.collect()
    gc.disable()
    try:
        files.make_directory(tmp_path)
        assert gc.collect() == 0
    finally:
        gc.enable()
