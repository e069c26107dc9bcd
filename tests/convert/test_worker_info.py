"""What samples ask of `get_worker_info`."""

import pytest
from torch.utils.data import get_worker_info
from torch.utils.data._utils import worker as torch_worker

from memfeed.convert.randomness import as_another_worker, set_worker_info, times_asked
from memfeed.errors import RandomDataError
from support import Made, cache


@pytest.fixture
def worker(monkeypatch):
    monkeypatch.setattr(torch_worker, "_worker_info", None)
    set_worker_info(1, 2, 70, "a dataset")


def test_the_number_and_the_seed_are_counted(worker):
    before, info = times_asked(), get_worker_info()
    assert (info.num_workers, info.dataset) == (2, "a dataset")
    assert times_asked() == before
    assert (info.id, info.seed) == (1, 70)
    assert times_asked() == before + 2


def test_another_worker_has_another_number_and_another_seed(worker):
    info = get_worker_info()
    with as_another_worker():
        other = get_worker_info()
        assert (other.id, other.num_workers, other.dataset) == (0, 2, "a dataset")
        assert other.seed != 70
    assert get_worker_info() is info


def test_a_process_that_is_no_worker_stays_none():
    with as_another_worker():
        assert get_worker_info() is None


class OfWorker(Made):
    """Seeded by the worker, in some samples: another number in each epoch of a DataLoader."""

    def __init__(self, name, is_used=True):
        super().__init__(None, 200)
        self.name, self.is_used = name, is_used

    def __getitem__(self, index):
        info = get_worker_info()
        asked = 0 if info is None else getattr(info, self.name)
        return {"x": index + (asked % 1000 if self.is_used and index % 20 == 7 else 0)}


@pytest.mark.parametrize("name", ["seed", "id"])
def test_samples_that_depend_on_their_worker_are_caught(path, name):
    with pytest.raises(RandomDataError, match=r"field x, as it depends on torch.utils.data.get_worker_info\(\)"):
        cache(OfWorker(name), path, workers=2)
    assert len(cache(OfWorker(name), path, workers=0)) == 200
    assert len(cache(OfWorker(name, is_used=False), path.with_name("b.mf"), workers=2)) == 200
