import shutil

import pytest
from small_build import SCHEMA, packed

from memfeed.building.build import Build
from memfeed.building.claim import claim
from memfeed.building.space import Extents
from memfeed.errors import BuildError


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
        granted = [Extents(root).grant(1, size)[0] for size in (100, 1, 70_000, 5)]
        ends = [start + size for start, size in zip(granted, (100, 1, 70_000, 5), strict=True)]
        assert all(end <= start for end, start in zip(ends, granted[1:], strict=False))
        assert Extents(root).grant(0, 10) == (0, 10), "each heap has its own"


def test_a_build_that_was_removed_is_named(path):
    with claim(path) as root:
        writer = Build.begin(root, SCHEMA, 10, None).writer()
        used = Build.resume(root).writer()
        used.write(0, 2, packed(0, 2))
        shutil.rmtree(root)
        for one in (writer, used):
            with pytest.raises(BuildError, match="found that the build was removed while its rows were written"):
                one.write(2, 2, packed(2, 2))
