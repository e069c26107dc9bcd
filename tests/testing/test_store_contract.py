"""The contract holds for stores of memfeed, and fails for a store of other samples."""

import pytest

import memfeed
from memfeed.testing import StoreContract
from support import Labelled, Made, Pair, Point, rich_sample


class TestStore(StoreContract):
    types = (Point, Labelled, Pair)

    @pytest.fixture
    def samples(self):
        return [rich_sample(row) for row in range(9)]

    @pytest.fixture
    def path(self, tmp_path, samples):
        memfeed.cache(Made(samples), tmp_path / "a.mf", progress=False)
        return tmp_path / "a.mf"


def test_a_store_of_other_samples_breaks_the_contract(tmp_path):
    samples = [rich_sample(row) for row in range(4)]
    store = memfeed.cache(Made(samples), tmp_path / "a.mf", progress=False)
    with pytest.raises(AssertionError):
        StoreContract().test_it_holds_the_samples(store, samples[:3])
    with pytest.raises(AssertionError):
        StoreContract().test_it_holds_the_samples(store, samples[::-1])
