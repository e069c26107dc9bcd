"""Rows compared with the dataset before a store is finished."""

import numpy as np
import pytest

from memfeed.building.build import Build
from memfeed.building.claim import claim
from memfeed.convert.fingerprint import hash_samples, indices_between, require_probed, require_reread
from memfeed.convert.write_run import WritePlan
from memfeed.errors import BuildError
from memfeed.schema import codec
from memfeed.schema.infer import infer
from memfeed.schema.tree import Flattener
from memfeed.store.manifest import Fingerprint
from support import Made

N = 12
FOUND = infer([{"x": 1.5, "s": "a"}])


def sample(i):
    return {"x": float(i), "s": f"n{i}"}


@pytest.mark.parametrize(
    ("probed", "between"), [([], []), ([3], []), ([0, 1], []), ([0, 2], [1]), ([0, 5, 6, 10], [2, 8])]
)
def test_indices_between(probed, between):
    assert indices_between(probed) == between


def plan():
    return WritePlan(Flattener(FOUND.structure), FOUND.casts, frozenset(), 8)


def packed(i):
    return codec.pack_sample(FOUND.schema, Flattener(FOUND.structure)(sample(i)), FOUND.casts, i)


@pytest.fixture
def build(tmp_path):
    probes = [0, 4, 8]
    hashes = hash_samples(FOUND.schema, probes, [packed(i) for i in probes])
    fingerprint = Fingerprint(kind="map", length=N, source="", source_name="", probes=hashes)
    with claim(tmp_path / "s.mf") as root:
        yield Build.begin(root, FOUND.schema, N, fingerprint)


def write(build, *rows, change=lambda i: i):
    writer = build.writer()
    for row in rows:
        writer.write(row, 1, packed(change(row)))
    writer.close()


def test_rows_that_are_right(build):
    write(build, *range(N))
    require_probed(build)
    require_reread(build, Made(sample, N), plan())


def test_a_probed_row_that_differs(build):
    write(build, *range(N), change=lambda i: 5 if i == 4 else i)
    with pytest.raises(BuildError, match="found in row 4, field x, another value than the dataset gives"):
        require_probed(build)


def test_a_row_between_that_differs(build):
    write(build, *range(N), change=lambda i: 5 if i == 6 else i)
    require_probed(build)
    with pytest.raises(BuildError, match="found in row 6, field x"):
        require_reread(build, Made(sample, N), plan())


def test_absent_rows_are_not_compared(build):
    write(build, 0, 2)
    require_probed(build)
    read = []
    require_reread(build, Made(lambda i: read.append(i) or sample(i), N), plan())
    assert read == [2]


def test_rounding_of_floats_is_no_difference(build):
    write(build, *range(N))
    require_reread(build, Made(lambda i: {**sample(i), "x": i * (1 + 1e-6)}, N), plan())
    with pytest.raises(BuildError, match="field x"):
        require_reread(build, Made(lambda i: {**sample(i), "x": i * 1.01}, N), plan())
    with pytest.raises(BuildError, match="field s"):
        require_reread(build, Made(lambda i: {**sample(i), "s": f"m{i}"}, N), plan())


def test_a_sample_that_raises_now_and_then_is_left_out(build):
    write(build, *range(N))

    def raising(i):
        raise OSError("busy")

    require_reread(build, Made(raising, N), plan())


def test_global_generators_stay_as_they_are(build):
    write(build, *range(N))
    before = np.random.get_state()[1].tolist()
    require_reread(build, Made(lambda i: np.random.rand() and sample(i), N), plan())
    assert np.random.get_state()[1].tolist() == before
