import shutil
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_build import SCHEMA, packed

from memfeed.building.build import Build
from memfeed.building.claim import claim
from memfeed.building.partial import runs
from memfeed.building.space import Extents, Wanted
from memfeed.errors import BuildError
from memfeed.schema.codec import Packed
from memfeed.store.ragged import ragged_files, read_row
from support import equal


def test_a_writer_of_an_older_builder_is_turned_away(path):
    with claim(path) as root:
        old = Build.begin(root, SCHEMA, 10, None).writer()
        old.write(0, 2, packed(0, 2))
        Build.resume(root)
        with pytest.raises(BuildError, match=r"found builder 2 at work; expected to be it \(1\)"):
            old.write(2, 2, packed(2, 2))


def test_extents_of_several_processes_never_meet(path):
    with claim(path) as root:
        Build.begin(root, SCHEMA, 10, None)
        heap, sizes = ragged_files(root, SCHEMA.fields[1]).heap, {5: 100, 3: 1, 4: 70_000, 0: 5}
        granted = {row: Extents(root).place([Wanted(1, heap, row, row + 1, sizes[row])])[0] for row in sizes}
        taken = sorted((granted[row], granted[row] + size) for row, size in sizes.items())
        assert all(end <= start for (_, end), (start, _) in pairwise(taken))
        assert Extents(root).place([Wanted(0, heap, 0, 1, 10)]) == [0], "each heap has its own"


def test_a_build_that_was_removed_is_named(path):
    with claim(path) as root:
        writer = Build.begin(root, SCHEMA, 10, None).writer()
        used = Build.resume(root).writer()
        used.write(0, 2, packed(0, 2))
        shutil.rmtree(root)
        for one in (writer, used):
            with pytest.raises(BuildError, match="found that the build was removed while its rows were written"):
                one.write(2, 2, packed(2, 2))


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sets(st.integers(0, 9), min_size=1), st.booleans())
def test_runs_are_written_as_each_of_them_alone(tmp_path, rows, in_one_array):
    found = []
    for name, write in (("together", write_together), ("alone", write_alone)):
        with claim(tmp_path / name) as root:
            build = Build.begin(root, SCHEMA, 10, None)
            write(build.writer(), sorted(rows), in_one_array)
            assert np.flatnonzero(build.presence()).tolist() == sorted(rows)
            found.append([[read_row(root, field, row) for row in sorted(rows)] for field in SCHEMA])
    assert equal(*found)


def write_together(writer, rows, in_one_array):
    parts = [packed(row, 1) for row in rows]
    columns = [
        Packed([buffer for part in column for buffer in part.buffers], dims(column))
        for column in zip(*parts, strict=True)
    ]
    if in_one_array:
        columns = [
            Packed([np.concatenate([*column.buffers, np.empty(0, np.uint8)])], column.dims) for column in columns
        ]
    writer.write_runs(runs(rows), columns)


def dims(column):
    return None if column[0].dims is None else np.concatenate([part.dims for part in column])


def write_alone(writer, rows, _):
    for row in rows:
        writer.write(row, 1, packed(row, 1))
