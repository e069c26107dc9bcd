"""How many samples of an iterable are stored: all of them, as its len says, or as many as length= asks for."""

import itertools

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

import memfeed
from memfeed.errors import BuildError, SampleError, StaleStoreError
from support import Made, cache, equal


class Sized(IterableDataset):
    """Says that it has `said` samples, and yields `given`; each worker yields its share."""

    def __init__(self, said, given):
        self.said, self.given = said, given

    def __len__(self):
        return self.said

    def __iter__(self):
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        numbers = itertools.count(first, step) if self.given is None else range(first, self.given, step)
        return (torch.tensor([number]) for number in numbers)


class Endless(Sized):
    """Has no end and no length."""

    def __init__(self):
        super().__init__(None, None)

    def __len__(self):
        raise TypeError


def numbers(store):
    return sorted(int(row) for row in store)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("given", [3, 40, 60, 200])
def test_the_rows_are_as_many_as_its_len_says(path, workers, given):
    if given == 60:
        assert numbers(cache(Sized(60, given), path, workers=workers)) == list(range(60))
        return
    with pytest.raises(
        BuildError, match=rf"found {given} samples in the iterable; expected 60, its len\(\): .*"
    ) as error:
        cache(Sized(60, given), path, workers=workers)
    assert f"cache(dataset, path, length={given}{', workers=0' if workers else ''})" in str(error.value)
    assert numbers(cache(Sized(60, given), path, workers=0, length=given)) == list(range(given))
    with pytest.raises(StaleStoreError, match=f"found length=60, expected the {given} samples of the store"):
        cache(Sized(60, given), path, workers=workers)


@pytest.mark.parametrize("length", [1, 5, 16, 17, 1000, 3000])
@pytest.mark.parametrize("workers", [None, 0, 1])
def test_an_iterable_without_an_end_needs_a_length(path, length, workers):
    for _ in range(2):  # the second call opens the store
        assert numbers(cache(Endless(), path, length=length, workers=workers)) == list(range(length))
    with pytest.raises(StaleStoreError, match="found length=7, expected the .* samples of the store"):
        cache(Endless(), path, length=7)
    with pytest.raises(ValueError, match=r"found length=.* with workers=2, .*expected workers=0"):
        cache(Endless(), path, length=length, workers=2)


def test_no_sample_after_them_is_asked_for(path):
    def stream():
        for number in range(21):
            assert number < 20
            yield {"x": number}

    assert len(cache(stream(), path, length=20)) == 20
    assert len(cache(stream(), path, overwrite=True, length=3)) == 3


def test_an_iterable_that_ends_too_early(path):
    with pytest.raises(BuildError, match="found 40 samples in the iterable; expected length=50: correct it, or store"):
        cache((torch.tensor(i) for i in range(40)), path, length=50)
    assert len(cache((torch.tensor(i) for i in range(40)), path, length=40)) == 40


@pytest.mark.parametrize("first_length", [None, 100, 70])
def test_a_resume_takes_as_many(path, first_length):
    class Cut(Sized):
        def __iter__(self):
            for index, sample in enumerate(super().__iter__()):
                if index == 50 and not path.with_name("cut").exists():
                    path.with_name("cut").touch()
                    raise OSError
                yield sample

    with pytest.raises(SampleError, match="sample 50"):
        cache(Cut(100, 100), path, length=first_length)
    store = cache(Cut(100, 100), path, length=first_length)
    assert numbers(store) == list(range(first_length or 100))


def test_a_resume_with_less_than_was_written_is_loud(path):
    with pytest.raises(BuildError, match="found 200 samples"):
        cache(Sized(60, 200), path)
    with pytest.raises(BuildError, match="ended after 60 samples; expected at least 200, which an earlier run wrote"):
        cache(Sized(60, 200), path, length=60)


@pytest.mark.parametrize("dataset", [Made([1, 2, 3]), torch.zeros(3, 2), [1, 2, 3]])
def test_other_datasets_have_their_own_length(path, dataset):
    with pytest.raises(ValueError, match=r"found length=2 for a dataset of 3 .*Subset\(dataset, range\(2\)\)"):
        cache(dataset, path, length=2)


@pytest.mark.parametrize("length", [0, -1, 2.5, "3"])
def test_a_length_is_a_number_of_rows(path, length):
    with pytest.raises(ValueError, match="found length=.*expected 1 row or more"):
        cache(iter([1]), path, length=length)


def test_it_says_what_an_endless_iterable_needs(path, capsys):
    memfeed.cache(iter(range(30)), path)
    assert "an iterable without an end needs length=" in capsys.readouterr().err


def test_an_iterable_that_changes_is_stored_as_its_first_pass(path):
    class Changing:
        passes = 0

        def __iter__(self):
            self.passes += 1
            return iter([torch.tensor([self.passes, i]) for i in range(40)])

    assert equal(cache(Changing(), path)[:], torch.tensor([[1, i] for i in range(40)]))
