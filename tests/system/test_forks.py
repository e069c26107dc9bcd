"""A child that the user forks may read a store, whatever its parent did before."""

import os
import signal

import numpy as np
import pytest
import torch

import memfeed

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


def in_child(call):
    """Return the exit status of a forked child that calls `call`; -SIGALRM if it takes 30 seconds."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.alarm(30)
            call()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_forked_child_reads_many_rows(tmp_path):
    images = torch.arange(256 * 3 * 64 * 64).view(256, 3, 64, 64)
    store = memfeed.cache({"image": images}, tmp_path / "s.mf", progress=False)
    rows = torch.randperm(256)
    expected = store[rows]["image"].numpy()  # OpenMP starts its threads here
    torch.ones(1 << 22).add_(1)

    def read():
        # compared by NumPy, because torch may wait for threads that only the parent has
        assert np.array_equal(store[rows]["image"].numpy(), expected)
        assert np.array_equal(store.subset(rows).column("image").numpy(), expected)
        assert len(store.__getitems__(rows.tolist())) == 256
        assert np.array_equal(store.to("cpu")["image"].numpy(), images.numpy())

    assert in_child(read) == 0


def test_a_forked_child_neither_writes_nor_commits(tmp_path):
    def leave_the_block():
        try:
            with pytest.raises(memfeed.errors.BuildError, match="forked from its own"):
                writer.append(5)
        finally:
            writer.__exit__(None, None, None)

    with memfeed.Writer(tmp_path / "s.mf") as writer:
        writer.append(0)
        assert in_child(leave_the_block) == 0
        assert not (tmp_path / "s.mf").exists()
        writer.append(1)
    assert list(memfeed.open(tmp_path / "s.mf")) == [0, 1]


class Opened(torch.utils.data.Dataset):
    """Opens its file when the first sample is read, for all objects of the class."""

    files: dict = {}  # noqa: RUF012

    def __init__(self, path, *, random=False):
        self.path, self.random = path, random

    def __len__(self):
        return self.path.stat().st_size // 8

    def __getitem__(self, index):
        if self.path not in self.files:
            self.files[self.path] = self.path.open("rb")
        self.files[self.path].seek(index * 8)
        value = int.from_bytes(self.files[self.path].read(8), "little")
        return torch.tensor([value, index + np.random.randint(2) * 1000 if self.random else index])


@pytest.mark.parametrize("how", ["cache", "filled", "decoded", "as it is"])
def test_a_forked_child_has_positions_of_its_own_in_files_that_the_dataset_opened(tmp_path, how):
    (tmp_path / "values").write_bytes(np.arange(4096).tobytes())
    dataset = Opened(tmp_path / "values", random=how in ("decoded", "as it is"))
    if how == "cache":
        memfeed.cache(dataset, tmp_path / "s.mf", workers=0, progress=False)
    else:
        loader = memfeed.Loader(dataset, 8, cache=None if how == "as it is" else tmp_path / "s.mf")
        next(iter(loader))
        if how == "filled":
            loader.store.finish()
    file = dataset.files.pop(dataset.path)
    file.seek(80)
    assert file.read(8) == (10).to_bytes(8, "little")  # and it reads ahead

    def read():
        for index in (11, 4000, 3):
            file.seek(index * 8)
            assert file.read(8) == index.to_bytes(8, "little")
        file.seek(88)
        assert file.read() == np.arange(11, 4096).tobytes()

    before = os.lseek(file.fileno(), 0, os.SEEK_CUR)
    assert in_child(read) == 0
    assert os.lseek(file.fileno(), 0, os.SEEK_CUR) == before
    assert file.read(8) == (11).to_bytes(8, "little")
    file.close()
