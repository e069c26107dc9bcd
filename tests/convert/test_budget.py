"""What a store will take, in one line, and an error before a disk is full."""

import numpy as np
import pytest

from memfeed.convert.budget import describe_budget, mean_row_bytes
from memfeed.errors import SpaceError
from memfeed.schema.codec import Packed
from memfeed.system import files


@pytest.fixture
def free(monkeypatch):
    def set_to(size):
        monkeypatch.setattr(files, "free_bytes", lambda path: size)

    return set_to


def test_bytes_of_rows_count_starts_and_dims():
    fixed, ragged = Packed([b"12", b"3456"], None), Packed([b"12"], np.zeros((1, 2), np.int64))
    assert mean_row_bytes([[fixed]]) == 6
    assert mean_row_bytes([[fixed, ragged], [fixed, ragged]]) == 6 + 2 + 8 + 16
    assert mean_row_bytes([[fixed], [Packed([], None)]]) == 3


def test_a_line(tmp_path, free):
    free(10_000_000_000)
    assert describe_budget(tmp_path, 1000, 1000.0, 0.001) == "1,000 rows, 1.0 MB, about 1.0 s; 10.0 GB free"
    free(None)
    assert describe_budget(tmp_path, 1000, 1000.0, 0.001).endswith("; free space unknown")
    assert describe_budget(tmp_path, None, 1000.0, 0.001).startswith("an unknown number of rows")
    assert describe_budget(tmp_path, 0, 1000.0, 0.001).startswith("0 rows, 0 B")


def test_smaller_forms_are_proposed_for_a_store_of_more_than_half_of_the_room(tmp_path, free):
    free(1_000_000)
    assert "smaller forms" not in describe_budget(tmp_path, 500, 1000.0, 0.001)
    assert "smaller forms" in describe_budget(tmp_path, 501, 1000.0, 0.001)


def test_overlap_is_told(tmp_path):
    assert "overlap" not in describe_budget(tmp_path, 1, 1.0, 0.001, 1.0)
    assert "each byte about 8 times" in describe_budget(tmp_path, 1, 1.0, 0.001, 8.0)


def test_too_little_room(tmp_path, free):
    free(1_000_000)
    with pytest.raises(SpaceError, match="1,001 rows of"):
        describe_budget(tmp_path, 1001, 1000.0, 0.001)
