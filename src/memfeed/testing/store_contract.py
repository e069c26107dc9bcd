"""What every store keeps, whoever wrote it: see docs/format.md."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tensordict import TensorDict

import memfeed
from memfeed.errors import CorruptStoreError, MemfeedError
from memfeed.testing.equality import equal


class StoreContract:
    """Derive, and give the fixtures ``path`` (a store that your program wrote) and ``samples`` (what it is to hold).

    Example::

        class TestMyWriter(memfeed.testing.StoreContract):
            @pytest.fixture
            def samples(self):
                return [{"x": torch.tensor([1.0, 2.0]), "n": 3}] * 7

            @pytest.fixture
            def path(self, tmp_path, samples):
                my_writer(tmp_path / "mine.mf", samples)
                return tmp_path / "mine.mf"
    """

    types: Sequence[type] = ()  # the record classes of the samples

    @pytest.fixture
    def samples(self) -> Sequence[Any]:
        """What the store is to hold."""
        raise NotImplementedError("found no fixture samples; expected the derived class to define one")

    @pytest.fixture
    def path(self) -> Path:
        """The store."""
        raise NotImplementedError("found no fixture path; expected the derived class to define one")

    @pytest.fixture
    def store(self, path: Path) -> memfeed.Store:
        """It, opened."""
        return memfeed.open(path, types=self.types)

    def test_it_holds_the_samples(self, store: memfeed.Store, samples: Sequence[Any]) -> None:
        """Row by row."""
        assert len(store) == len(samples)
        assert all(equal(store[row], sample) for row, sample in enumerate(samples))

    def test_batches_are_what_the_rows_are(self, store: memfeed.Store) -> None:
        """A batch of all rows, and of single ones, whichever way they are gathered."""
        whole = list(memfeed.Loader(store, len(store)))
        assert len(whole) == 1
        assert equal(store[:], whole[0])
        assert equal(store[list(range(len(store)))], whole[0])
        singles = list(memfeed.Loader(store, 1, shuffle=True, seed=3))
        again = memfeed.Loader(store, 1, shuffle=True, seed=3)
        assert all(equal(one, other) for one, other in zip(singles, again, strict=True))

    def test_it_verifies_and_comes_back_from_a_pickle(self, store: memfeed.Store) -> None:
        """Every byte against its checksum."""
        store.verify()
        assert equal(pickle.loads(pickle.dumps(store))[0], store[0])

    def test_tensordict_reads_it(self, path: Path, store: memfeed.Store) -> None:
        """With tensordict's own reader."""
        assert TensorDict.load_memmap(path).batch_size[0] == len(store)

    def test_no_byte_can_be_changed_unseen(self, path: Path, tmp_path: Path) -> None:
        """One bit in the middle of each file of the columns."""
        names = [file.relative_to(path) for file in path.rglob("*") if file.suffix in (".memmap", ".bin")]
        for number, name in enumerate(names):
            copy = tmp_path / f"damaged{number}.mf"
            shutil.copytree(path, copy)
            damaged = copy / name
            content = bytearray(damaged.read_bytes())
            if not content:
                continue
            content[len(content) // 2] ^= 1
            damaged.chmod(0o644)
            damaged.write_bytes(content)
            with pytest.raises(MemfeedError):
                memfeed.open(copy, types=self.types).verify()

    def test_no_file_can_be_cut_unseen(self, path: Path, tmp_path: Path) -> None:
        """Found when it is opened."""
        for number, file in enumerate(file for file in path.rglob("*.memmap") if file.stat().st_size):
            copy = tmp_path / f"cut{number}.mf"
            shutil.copytree(path, copy)
            cut = copy / file.relative_to(path)
            cut.chmod(0o644)
            cut.write_bytes(cut.read_bytes()[:-1])
            with pytest.raises(CorruptStoreError):
                memfeed.open(copy, types=self.types)
