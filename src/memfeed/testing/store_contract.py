"""The contract of a store, whichever program wrote it: see docs/format.md."""

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
from memfeed.schema import compare


def equal(a: Any, b: Any) -> bool:
    """Return True if structure, types, dtypes and values are equal, bit by bit. The keys of a dict may be in any order.

    An array or image equals the tensor that a store returns for it. Tensors may be on different devices. The rule in
    full is that of `memfeed.schema.compare`, with ``as_stored``.
    """
    return compare.equal(a, b, as_stored=True)


class StoreContract:
    """Tests of a store. Derive, and define the fixtures ``path`` (your program's store) and ``samples`` (its samples).

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
        """Return the samples that the store has to hold."""
        raise NotImplementedError("found no fixture samples; expected the derived class to define one")

    @pytest.fixture
    def path(self) -> Path:
        """Return the path of the store."""
        raise NotImplementedError("found no fixture path; expected the derived class to define one")

    @pytest.fixture
    def store(self, path: Path) -> memfeed.Store:
        """Return the open store."""
        return memfeed.open(path, types=self.types)

    def test_it_holds_the_samples(self, store: memfeed.Store, samples: Sequence[Any]) -> None:
        """Compare row by row."""
        assert len(store) == len(samples)
        assert all(equal(store[row], sample) for row, sample in enumerate(samples))

    def test_batches_equal_their_rows(self, store: memfeed.Store) -> None:
        """Compare batches of all rows, and of single rows, that are gathered in different ways."""
        whole = list(memfeed.Loader(store, len(store)))
        assert len(whole) == 1
        assert equal(store[:], whole[0])
        assert equal(store[list(range(len(store)))], whole[0])
        singles = list(memfeed.Loader(store, 1, shuffle=True, seed=3))
        again = memfeed.Loader(store, 1, shuffle=True, seed=3)
        assert all(equal(one, other) for one, other in zip(singles, again, strict=True))

    def test_it_verifies_and_can_be_pickled(self, store: memfeed.Store) -> None:
        """Compare every byte with its checksum, and a row with that of the unpickled store."""
        store.verify()
        assert equal(pickle.loads(pickle.dumps(store))[0], store[0])

    def test_tensordict_reads_it(self, path: Path, store: memfeed.Store) -> None:
        """Open it with tensordict's own reader."""
        assert TensorDict.load_memmap(path).batch_size[0] == len(store)

    def test_a_changed_byte_is_found(self, path: Path, tmp_path: Path) -> None:
        """Flip one bit in the middle of each column file."""
        names = [file.relative_to(path) for file in path.rglob("*") if file.suffix in (".memmap", ".bin")]
        for i, name in enumerate(names):
            copy = tmp_path / f"damaged{i}.mf"
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

    def test_a_shortened_file_is_found(self, path: Path, tmp_path: Path) -> None:
        """Remove the last byte of each column file; opening the store has to fail."""
        for i, file in enumerate(file for file in path.rglob("*.memmap") if file.stat().st_size):
            copy = tmp_path / f"shortened{i}.mf"
            shutil.copytree(path, copy)
            shortened = copy / file.relative_to(path)
            shortened.chmod(0o644)
            shortened.write_bytes(shortened.read_bytes()[:-1])
            with pytest.raises(CorruptStoreError):
                memfeed.open(copy, types=self.types)
