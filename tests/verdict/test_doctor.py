"""What a machine gives, and what to do about low figures."""

import resource
from pathlib import Path

import pytest
import torch

from memfeed.cli import main
from memfeed.errors import LoaderError
from memfeed.verdict import doctor


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(doctor, "BYTES", 4 << 20)


def found(path):
    return {one.name: one for one in doctor.examine(path)}


def test_everything_is_looked_at_and_nothing_is_left(tmp_path):
    one = found(tmp_path)
    expected = {"cores", "memory available", "memory copy", "file system", "disk, written and synced", "disk, warm"}
    expected |= {"page-locked memory, copy to the GPU", "/dev/shm", "open files", "locked memory"}
    assert expected <= set(one)
    assert one["memory copy"].value.endswith("/s")
    if not torch.cuda.is_available():
        assert "no CUDA device" in one["page-locked memory, copy to the GPU"].value
    assert list(tmp_path.iterdir()) == []


def test_a_low_figure_says_what_to_do(tmp_path, monkeypatch):
    for name in ("LEAST_MEMORY", "LEAST_COLD", "LEAST_WARM"):
        monkeypatch.setattr(doctor, name, 1e15)
    monkeypatch.setattr(doctor, "LEAST_SHM", 1 << 60)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 1 << 20))
    one = found(tmp_path)
    assert "smaller dtypes" in one["memory copy"].advice
    assert "NVMe" in one["disk, cold"].advice
    assert "page cache" in one["disk, warm"].advice
    assert "--shm-size" in one["/dev/shm"].advice
    assert one["open files"].advice == "workers may meet it: ulimit -n 65536"
    monkeypatch.setattr(doctor, "LEAST_MEMORY", 1.0)
    assert not found(tmp_path)["memory copy"].advice


MOUNTS = """21 1 0:20 / / rw - overlay overlay rw
22 21 0:21 / /data\\040sets rw,relatime shared:1 - nfs4 host:/x rw
23 22 0:22 / /data\\040sets/scratch rw - ext4 /dev/sda rw
"""


@pytest.mark.parametrize(
    ("place", "kind"),
    [("/home", "overlay"), ("/data sets", "nfs4"), ("/data sets/a/b", "nfs4"), ("/data sets/scratch/x", "ext4")],
)
def test_the_file_system_is_that_of_the_nearest_mount(place, kind, monkeypatch):
    own = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda self: MOUNTS if str(self) == "/proc/self/mountinfo" else own(self))
    assert doctor.file_system(Path(place)) == kind
    words = next((text for name, text in doctor.WEAKNESSES.items() if kind.startswith(name)), "")
    assert bool(words) == (kind != "ext4")


def test_a_directory_that_is_missing_is_an_error(tmp_path, capsys):
    with pytest.raises(LoaderError, match="found no such directory"):
        list(doctor.examine(tmp_path / "gone"))
    assert main(["doctor", str(tmp_path / "gone")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_command_prints_a_line_for_each(tmp_path, capsys):
    assert main(["doctor", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "memory copy" in out
    assert all(line[0] in "! " for line in out.splitlines())
