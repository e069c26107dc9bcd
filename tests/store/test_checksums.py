import numpy as np
import pytest
import torch

import memfeed
from memfeed.errors import CorruptStoreError
from memfeed.store.checksums import ChunkHasher, chunk_count, chunk_hash, compute_checksums, read_checksums
from memfeed.store.manifest import CHUNK_BYTES

DATA = np.random.default_rng(0).integers(0, 256, 2 * CHUNK_BYTES + 17, dtype=np.uint8)


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, len(DATA)])
def test_bytes_hashed_as_they_are_written_have_the_hashes_of_the_file(tmp_path, size):
    (tmp_path / "f").write_bytes(DATA[:size].tobytes())
    hasher = ChunkHasher()
    for part in np.array_split(DATA[:size], 3):
        hasher.update(part)
    read = np.frombuffer(compute_checksums(tmp_path, {"f": size}, {}), "<u8").tolist()
    assert hasher.hashes() == read
    assert len(read) == chunk_count(size)
    assert compute_checksums(tmp_path, {"f": size}, {"f": read}) == np.array(read, "<u8").tobytes()


def test_a_file_that_ends_early_is_an_error(tmp_path):
    (tmp_path / "f").write_bytes(b"abc")
    with pytest.raises(OSError, match="ended at byte 3"):
        chunk_hash(tmp_path / "f", 0, 4)


def test_damaged_checksums_are_refused(path):
    store = memfeed.cache((torch.arange(9), torch.rand(9)), path, progress=False)
    assert [len(hashes) for hashes in read_checksums(path, store._view.manifest).values()] == [1, 1]
    sums = path / "checksums.bin"
    sums.chmod(0o644)
    sums.write_bytes(bytes(16))
    with pytest.raises(CorruptStoreError, match=r"checksums\.bin: found other bytes than were written"):
        read_checksums(path, store._view.manifest)


def test_verify_names_what_is_damaged(path, capsys):
    big = memfeed.cache((torch.arange(1_000_000), torch.zeros(1_000_000)), path, progress=False)
    big.verify(progress=True)
    assert "12.0M/12.0M" in capsys.readouterr().err
    file = path / "0.memmap"
    file.chmod(0o644)
    with open(file, "r+b") as handle:
        handle.seek(5_000_000)
        handle.write(b"\xff")
    with pytest.raises(CorruptStoreError, match=r"0\.memmap: found other bytes .* \(field 0, rows 524288 to 999999\)"):
        memfeed.open(path).verify()
