from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import memfeed
from forked_programs import Program
from memfeed.cli import main
from memfeed.errors import (
    CorruptStoreError,
    MemfeedError,
    ObjectNotFoundError,
    ObjectReplacedError,
    RemoteError,
    SpaceError,
    StaleStoreError,
    StoreError,
    StoreNotFoundError,
)
from memfeed.remote import fetching
from memfeed.remote import push_pull as push_module
from memfeed.remote.layout import read_manifest, verify
from memfeed.remote.objects import Objects
from memfeed.store import format
from support import wait_until


def make_store(path: Path, rows: int = 50, first: int = 0) -> memfeed.Store:
    dataset = [{"x": torch.full((4,), k), "text": "a" * (k % 7)} for k in range(first, first + rows)]
    return memfeed.cache(dataset, path, workers=0, progress=False)


@pytest.fixture
def store(tmp_path: Path) -> memfeed.Store:
    return make_store(tmp_path / "local.mf")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> memfeed.Store:
    """A store of several chunks."""
    data = np.random.default_rng(0).integers(0, 255, (24, 1 << 20), np.uint8)
    labels = np.arange(24)
    return memfeed.cache((data, labels), tmp_path_factory.mktemp("wide") / "wide.mf", progress=False)


def content(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def test_what_was_pushed_is_pulled_byte_for_byte(store, address, tmp_path):
    sent = memfeed.push(store, address)
    assert sent == sum(map(len, content(store.path).values()))
    pulled = memfeed.pull(address, tmp_path / "pulled.mf")
    assert content(pulled.path) == content(store.path)
    assert pulled.digest == store.digest
    assert [pulled[k]["text"] for k in range(50)] == ["a" * (k % 7) for k in range(50)]
    assert not format.build_path(pulled.path).exists()
    assert verify(address).digest[:16] == store.digest
    assert memfeed.push(store.path, address) == 0
    assert memfeed.pull(address, pulled.path).digest == store.digest  # it is there already


def test_a_push_over_an_older_store_is_seen_at_once_and_the_old_one_stays(store, address, tmp_path):
    memfeed.push(store, address)
    old = read_manifest(address)
    newer = make_store(tmp_path / "newer.mf", 60, 7)
    memfeed.push(newer, address)
    assert read_manifest(address).digest[:16] == newer.digest
    assert bytes(old.read("x.memmap", 0, 32)) == (store.path / "x.memmap").read_bytes()[:32]
    assert memfeed.push(newer, address, remove_old=True) == 0
    with pytest.raises(ObjectNotFoundError):
        old.read("x.memmap", 0, 32)
    assert {name.split("/")[1][:16] for name in Objects(address).list("pushes")} == {newer.digest}
    assert memfeed.pull(address, tmp_path / "pulled.mf").digest == newer.digest


def test_a_push_replaces_a_store_that_was_copied_file_by_file(store, bucket, tmp_path):
    address = f"{bucket}/ants.mf"
    objects = Objects(address)
    for name, data in content(store.path).items():
        objects.put(name, data)
    objects.put("notes.txt", b"of the user")
    assert memfeed.pull(address, tmp_path / "copied.mf").digest == store.digest
    newer = make_store(tmp_path / "newer.mf", 60, 7)
    memfeed.push(newer, address, remove_old=True)
    assert read_manifest(address).digest[:16] == newer.digest
    kept = {name for name in objects.list() if not name.startswith("pushes/")}
    assert kept == {"manifest.json", "notes.txt"}


def test_an_interrupted_push_shows_nothing_and_goes_on(wide, bucket, proxy):
    address = f"{bucket}/wide.mf"
    proxy.inject("expired", 1, method="PUT", path="checksums.bin")
    with pytest.raises(RemoteError, match="expired"):
        memfeed.push(wide, address)
    with pytest.raises(StoreNotFoundError, match="not complete"):
        read_manifest(address)
    rest = memfeed.push(wide, address)
    assert 0 < rest < 1 << 20  # not the column that is there
    assert verify(address).digest[:16] == wide.digest


def test_an_interrupted_pull_asks_only_for_what_is_missing(wide, bucket, proxy, tmp_path, monkeypatch):
    address, target = f"{bucket}/wide.mf", tmp_path / "pulled.mf"
    memfeed.push(wide, address)
    real, count = Objects.read, 0

    def stop_after_three(self, name, *args, **options):
        nonlocal count
        count += name.endswith(".memmap")
        if count > 3:
            raise RemoteError("the network is gone")
        return real(self, name, *args, **options)

    seen = len(proxy.requests)
    with monkeypatch.context() as patch:
        for name in ("LEAST_IN_FLIGHT", "MOST_IN_FLIGHT", "MOST_CHUNKS"):
            patch.setattr(fetching, name, 1)
        patch.setattr(Objects, "read", stop_after_three)
        with pytest.raises(RemoteError, match="the network is gone"):
            memfeed.pull(address, target)
    assert not target.exists()
    assert format.build_path(target).exists()
    assert sum(".memmap" in request.path for request in proxy.requests[seen:]) == 3
    seen = len(proxy.requests)
    pulled = memfeed.pull(address, target)
    assert sum(".memmap" in request.path for request in proxy.requests[seen:]) == 7 - 3
    assert content(pulled.path) == content(wide.path)


_PULL = "import sys, memfeed; memfeed.pull(sys.argv[1], sys.argv[2])"
_PUSH = "import sys, memfeed; memfeed.push(sys.argv[2], sys.argv[1])"


@pytest.mark.parametrize("code", [_PULL, _PUSH], ids=["pull", "push"])
def test_after_a_kill_the_same_call_finishes(wide, bucket, proxy, tmp_path, code):
    address, target = f"{bucket}/wide.mf", tmp_path / "pulled.mf"
    if code == _PULL:
        memfeed.push(wide, address)
    proxy.inject(
        "stall", method="PUT" if code == _PUSH else "GET", path="memfeed.json" if code == _PUSH else "1.memmap"
    )
    place = target if code == _PULL else wide.path
    child = Program(code, address, place, at=tmp_path)
    wait_until(lambda: proxy.injected["stall"] or child.process.exitcode is not None)
    assert child.process.exitcode is None, child.err.read_text()
    child.process.kill()
    assert child.wait() == -signal.SIGKILL
    proxy.clear()
    assert not target.exists()
    if code == _PUSH:
        with pytest.raises(StoreNotFoundError):
            read_manifest(address)
        memfeed.push(wide, address)
    assert content(memfeed.pull(address, target).path) == content(wide.path)


@pytest.mark.skipif("MEMFEED_S3RVER" in os.environ, reason="s3rver has no conditional writes")
def test_two_pushes_at_once_are_not_mixed(store, address, tmp_path, monkeypatch):
    newer = make_store(tmp_path / "newer.mf", 60, 7)
    real = push_module._send

    def other_push_first(*args):
        monkeypatch.setattr(push_module, "_send", real)
        memfeed.push(newer, address)
        real(*args)

    monkeypatch.setattr(push_module, "_send", other_push_first)
    with pytest.raises(ObjectReplacedError, match="replaced meanwhile"):
        memfeed.push(store, address)
    assert verify(address).digest[:16] == newer.digest


def test_damage_on_this_machine_is_not_pushed(wide, address, tmp_path):
    damaged = memfeed.cache((np.zeros((24, 1 << 20), np.uint8),), tmp_path / "damaged.mf", progress=False)
    name = next(name for name in damaged._view.manifest.files if name.endswith(".memmap"))
    os.chmod(damaged.path / name, 0o644)
    with open(damaged.path / name, "r+b") as file:
        file.seek(22 << 20)
        file.write(b"x")
    with pytest.raises(CorruptStoreError, match=r"rows 20 to 23.*nothing was pushed"):
        memfeed.push(damaged.path, address)
    with pytest.raises(StoreNotFoundError):
        read_manifest(address)


def test_damage_at_the_address_names_field_and_rows(wide, address, tmp_path):
    memfeed.push(wide, address)
    name = next(name for name in Objects(address).list() if name.endswith("0.memmap"))
    data = bytearray(Objects(address).read_whole(name, most_bytes=1 << 30)[0])
    data[21 << 20] ^= 1
    Objects(address).put(name, bytes(data))
    for use in (verify, lambda address: memfeed.pull(address, tmp_path / "pulled.mf")):
        with pytest.raises(CorruptStoreError, match="rows 20 to 23"):
            use(address)
    assert not (tmp_path / "pulled.mf").exists()


def test_a_store_that_is_replaced_while_it_is_pulled_is_not_mixed(wide, bucket, tmp_path, monkeypatch):
    address = f"{bucket}/wide.mf"
    memfeed.push(wide, address)
    remote = read_manifest(address)
    Objects(address).put(f"{remote.directory}0.memmap", bytes(remote.files["0.memmap"].size))
    with pytest.raises(ObjectReplacedError, match="replaced meanwhile"):
        remote.read("0.memmap", 0, 8)


def test_what_is_no_finished_store_is_not_pushed(store, address, tmp_path):
    with pytest.raises(StoreError, match="found no store of memfeed"):
        memfeed.push(tmp_path / "missing", address)
    with pytest.raises(StoreError, match="a view"):
        memfeed.push(store.subset([1, 2]), address)
    with pytest.raises(StoreError, match="a view"):
        memfeed.push(store.select("x"), address)
    (tmp_path / "half.mf.build").mkdir()
    with pytest.raises(StoreError, match="still being filled"):
        memfeed.push(tmp_path / "half.mf", address)
    with pytest.raises(StoreError, match="only reads"):
        memfeed.push(store, "https://host/ants.mf")
    with pytest.raises(StoreError, match="unknown scheme"):
        memfeed.push(store, "ftp://host/ants.mf")


def test_a_pull_does_not_replace_what_is_there(store, address, tmp_path):
    memfeed.push(store, address)
    other = make_store(tmp_path / "other.mf", 5)
    with pytest.raises(StoreError, match="overwrite=True"):
        memfeed.pull(address, other.path)
    assert len(memfeed.open(other.path)) == 5
    assert memfeed.pull(address, other.path, overwrite=True).digest == store.digest
    (tmp_path / "folder").mkdir()
    with pytest.raises(StoreError, match="no store"):
        memfeed.pull(address, tmp_path / "folder")
    build = tmp_path / "begun.mf.build" / ".build"
    build.mkdir(parents=True)
    (build / "settings.json").write_text("{}")
    with pytest.raises(StoreError, match="unfinished store of a dataset"):
        memfeed.pull(address, tmp_path / "begun.mf")
    assert (build / "settings.json").exists()


def test_a_dataset_is_cached_to_an_address(address, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    dataset = [{"x": torch.full((4,), k)} for k in range(20)]
    store = memfeed.cache(dataset, address, workers=0, progress=False)
    assert store.path.is_relative_to(tmp_path / "home" / "memfeed")
    assert read_manifest(address).digest[:16] == store.digest
    assert torch.equal(store[3]["x"], dataset[3]["x"])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))  # as on another machine: it is pulled
    assert memfeed.cache(dataset, address, workers=0, progress=False).digest == store.digest
    other = [{"x": torch.full((4,), k + 1)} for k in range(20)]
    with pytest.raises(StaleStoreError):
        memfeed.cache(other, address, workers=0, progress=False)
    replaced = memfeed.cache(other, address, workers=0, progress=False, overwrite=True)
    assert read_manifest(address).digest[:16] == replaced.digest != store.digest
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    with pytest.raises(StaleStoreError, match="another store than that of this dataset"):
        memfeed.cache(dataset, address, workers=0, progress=False)
    with pytest.raises(ValueError, match="lazily"):
        memfeed.cache(dataset, address, lazily=True)


def test_an_unknown_scheme_is_refused_before_anything_is_built(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(StoreError, match="unknown scheme"):
        memfeed.cache([1, 2], "ftp://host/x", progress=False)
    assert not list(tmp_path.iterdir())


def test_the_commands(store, bucket, tmp_path, capsys, monkeypatch):
    address, target = f"{bucket}/ants.mf", tmp_path / "pulled.mf"
    assert main(["push", str(store.path), address, "--no-progress"]) == 0
    assert f"{address}: ok, sent " in capsys.readouterr().out
    assert main(["inspect", address]) == 0
    shown = capsys.readouterr().out
    assert f"{address}: 50 rows, 2 fields" in shown
    assert "int64" in shown
    assert main(["verify", address, "--no-progress"]) == 0
    assert f"{address}: ok" in capsys.readouterr().out
    assert main(["pull", address, str(target), "--no-progress"]) == 0
    assert memfeed.open(target).digest == store.digest
    capsys.readouterr()
    assert main(["inspect", address, "--pictures", str(tmp_path)]) == 2
    assert main(["inspect", "ftp://user:PASSWORD@host/x"]) == 2
    assert main(["verify", f"{bucket}/nothing"]) == 2
    said = capsys.readouterr().err
    assert "found nothing; expected a store" in said
    assert "PASSWORD" not in said


def test_errors_never_show_credentials(store, bucket, proxy, tmp_path):
    address = f"{bucket}/ants.mf"
    memfeed.push(store, address)
    for kind in ("reset", "slow_down", "expired", "truncate", "wrong_bytes"):
        proxy.inject(kind)
        with pytest.raises(MemfeedError) as raised:
            memfeed.pull(address, tmp_path / "pulled.mf")
        proxy.clear()
        text = str(raised.value)
        assert address in text or "manifest" in text
        assert not [secret for secret in ("SECRET", "test-key-id", "127.0.0.1") if secret in text]
        assert len(text) < 400


def test_a_directory_of_tensordict_is_no_store_to_push_or_recode(tmp_path):
    TensorDict({"x": torch.arange(4)}, [4]).memmap(str(tmp_path / "td"))
    said = r"td: found .*no store of memfeed's own; .*memfeed.cache\(data, path, allow='copy'\)"
    with pytest.raises(StoreError, match=said):
        memfeed.push(tmp_path / "td", f"file://{tmp_path}/at/x.mf")
    with pytest.raises(StoreError, match=said):
        memfeed.recode(tmp_path / "td", tmp_path / "b.mf", "zstd")


def test_commands_in_errors_quote_paths(tmp_path):
    with pytest.raises(StoreError, match=r"memfeed cache MODULE:FACTORY '.*/my store\.mf'$"):
        memfeed.push(tmp_path / "my store.mf", f"file://{tmp_path}/at/x.mf")
    with pytest.raises(StoreError, match=r"memfeed push STORE 'file://.*/at the/x\.mf'$"):
        memfeed.pull(f"file://{tmp_path}/at the/x.mf", tmp_path / "a.mf")


def test_damaged_results_of_a_function_are_not_pushed(tmp_path):
    load = memfeed.memoize(np.full, tmp_path / "r.mf", version=1)
    assert load(5000, 3)[0] == 3
    with open(tmp_path / "r.mf" / "blob" / "heap.bin", "r+b") as file:
        file.seek(2000)
        file.write(b"\xff\xff")
    with pytest.raises(CorruptStoreError):
        memfeed.push(tmp_path / "r.mf", f"file://{tmp_path}/at/x.mf")
    assert not (tmp_path / "at").exists()


def test_the_advice_about_room_fits_a_pull(store, tmp_path, monkeypatch):
    memfeed.push(store, at := f"file://{tmp_path}/at/x.mf")
    monkeypatch.setattr("memfeed.system.files.free_bytes", lambda path: 10)
    with pytest.raises(SpaceError, match=r"expected at least .* for all rows of file://") as raised:
        memfeed.pull(at, tmp_path / "b.mf")
    assert str(raised.value).endswith(f"a smaller cache: memfeed.open({at!r}, cache_dir=..., size=...)")
    assert "forms=" not in str(raised.value)


@pytest.mark.parametrize("wrong", [None, 5, [1], {}, torch.nn.Linear(1, 1), memfeed.Store, b"a.mf"])
def test_arguments_that_are_no_store_and_address_are_named(store, tmp_path, wrong):
    at = f"file://{tmp_path}/at/x.mf"
    with pytest.raises(TypeError, match=r"found .*; expected a store, or its path"):
        memfeed.push(wrong, at)
    with pytest.raises(TypeError, match=r"found .*; expected an address, as 's3://"):
        memfeed.push(store, wrong)
    with pytest.raises(TypeError, match=r"found .*; expected an address, as 's3://"):
        memfeed.pull(wrong, tmp_path / "b.mf")


def test_a_push_and_a_pull_with_swapped_arguments(store, tmp_path):
    at = f"file://{tmp_path}/at/x.mf"
    with pytest.raises(StoreError, match=r"an address, as what to push; .*memfeed\.push\(store, address\)"):
        memfeed.push(at, store)
    with pytest.raises(StoreError, match=r"of a directory of this machine: 'file:///.*local\.mf'$"):
        memfeed.push(store, store.path)
