import pytest
import torch

import memfeed
from memfeed.errors import CorruptStoreError


def test_verify_names_what_is_damaged(path):
    big = memfeed.cache((torch.arange(1_000_000), torch.zeros(1_000_000)), path, progress=False)
    seen = []
    big.verify(lambda done, total: seen.append((done, total)))
    assert seen[-1] == (12_000_000, 12_000_000)
    file = path / "0.memmap"
    file.chmod(0o644)
    with open(file, "r+b") as handle:
        handle.seek(5_000_000)
        handle.write(b"\xff")
    with pytest.raises(CorruptStoreError, match=r"0\.memmap: found other bytes .* \(field 0, rows 524288 to 999999\)"):
        memfeed.open(path).verify()
