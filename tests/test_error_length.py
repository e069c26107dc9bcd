"""Errors that name fields stay under 400 characters, for stores with many fields of long names too."""

import collections

import pytest
import torch

import memfeed
from memfeed.errors import MemfeedError
from memfeed.transforms import MixUp, PerSample, RandomCrop, ToDtype

COUNT, MOST = 500, 400
NAMES = [f"a_field_whose_name_is_quite_long_{index:04d}_and_says_little" for index in range(COUNT)]
OTHER = [f"another_{name}" for name in NAMES]
FEW = NAMES[: COUNT - 1]
Wide = collections.namedtuple("Wide", OTHER)


def sample(names=NAMES):
    return {name: index for index, name in enumerate(names)}


def images(names, *, n=2):
    return {name: torch.zeros(n, 3, 4, 4) for name in names}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return memfeed.cache([sample()] * 4, tmp_path_factory.mktemp("wide") / "s.mf", progress=False)


def cache(path, given, **options):
    return memfeed.cache(given, path, progress=False, workers=0, **options)


def write(path, *batches, **options):
    with memfeed.Writer(path, **options) as w:
        for batch in batches:
            w.extend(batch)


def append(path, *samples):
    with memfeed.Writer(path) as w:
        for one in samples:
            w.append(one)


def apply(transform, batch):
    from memfeed.random import Keys

    return transform.apply(batch, Keys(0, 0, torch.arange(2)))


ERRORS = {
    "column": lambda store, path: store.column("missing"),
    "column of a list": lambda store, path: store.column(NAMES),
    "select": lambda store, path: store.select("a_field_whose_name_is_quite_lon_0007_and_says_little"),
    "select a path": lambda store, path: store.select(tuple(NAMES)),
    "select a long name": lambda store, path: store.select("x" * 1000),
    "select nothing": lambda store, path: store.select(),
    "select an empty list": lambda store, path: store.select([]),
    "open": lambda store, path: memfeed.open(store.path, select=["missing"]),
    "placement": lambda store, path: memfeed.Loader(store, placement={"missing": "mapped"}),
    "transform": lambda store, path: memfeed.Loader(store, transform={"missing": lambda x: x}),
    "on": lambda store, path: next(iter(memfeed.Loader(store, 2, transform=ToDtype(torch.float32, on="missing")))),
    "no on": lambda store, path: next(iter(memfeed.Loader(store, 2, transform=ToDtype(torch.float32)))),
    "many images": lambda store, path: apply(ToDtype(torch.float32), images(NAMES)),
    "left behind": lambda store, path: apply(
        RandomCrop(2), {"image": torch.zeros(2, 3, 4, 4), **{name: torch.zeros(2, 4, 4) for name in NAMES}}
    ),
    "several fields of a call": lambda store, path: memfeed.transforms.Compose(
        [ToDtype(torch.float32, on=name) for name in NAMES]
    )(torch.zeros(1, 3, 4, 4)),
    "labels": lambda store, path: apply(
        MixUp(num_classes=3), {"image": torch.zeros(2, 3, 4, 4), **{name: torch.arange(2) for name in NAMES}}
    ),
    "images and labels": lambda store, path: apply(MixUp(num_classes=3, on=NAMES), images(NAMES)),
    "per sample": lambda store, path: apply(PerSample(lambda *x: (), on=NAMES), images(NAMES)),
    "dtypes": lambda store, path: cache(path, [sample()] * 4, forms={"missing": torch.uint8}),
    "kinds": lambda store, path: cache(path, [sample()] * 4, fields={"missing": "json"}),
    "too few names": lambda store, path: cache(path, [sample()] * 4, fields=OTHER[:-1]),
    "one name twice": lambda store, path: cache(path, [sample()] * 4, fields=[*OTHER[:-1], OTHER[0]]),
    "names that are none": lambda store, path: cache(path, [sample()] * 4, fields=[3, *NAMES]),
    "types": lambda store, path: cache(path, [sample()] * 4, types=Wide),
    "types of another order": lambda store, path: cache(
        path, [sample(OTHER)] * 4, types=collections.namedtuple("Wide", OTHER[::-1])
    ),
    "types with other fields": lambda store, path: (
        cache(path, [Wide(*range(COUNT))] * 4),
        memfeed.open(path, types=collections.namedtuple("Wide", NAMES))._view.sample_maker,
    ),
    "other keys": lambda store, path: append(path, *[sample()] * 20, sample(FEW)),
    "stale": lambda store, path: cache(store.path, [sample(OTHER)] * 4),
    "stale, one less": lambda store, path: cache(store.path, [sample(FEW)] * 4),
    "stale names": lambda store, path: cache(store.path, [sample()] * 4, fields=OTHER),
    "columns of several lengths": lambda store, path: cache(
        path, {name: torch.zeros(3 + (name == NAMES[-1])) for name in NAMES}
    ),
    "batch with other parts": lambda store, path: write(path, images(NAMES[:40]), images(OTHER[:40])),
    "batch with lengths": lambda store, path: write(
        path, images(NAMES[:40]), images(NAMES[:39]) | images(NAMES[39:40], n=3)
    ),
    "into": lambda store, path: store.into({name: torch.zeros(4, dtype=torch.int64) for name in OTHER}),
    "into other dtypes": lambda store, path: store.into({name: torch.zeros(4, 7) for name in NAMES}),
    "stores that differ": lambda store, path: memfeed.Loader([store, cache(path, [sample(OTHER)] * 4)]),
    "metadata": lambda store, path: cache(path, [sample()] * 4, metadata={"x" * 300: {"y" * 300: {3}}}),
    "other metadata": lambda store, path: cache(store.path, [sample()] * 4, metadata=sample()),
}


@pytest.mark.parametrize("case", ERRORS)
def test_an_error_of_a_wide_store_is_short(store, tmp_path, case):
    path = tmp_path / "s.mf"
    with pytest.raises(MemfeedError) as caught:
        ERRORS[case](store, path)
    text = str(caught.value)
    for own in (path, store.path):  # not ours to shorten
        text = text.replace(str(own), "s.mf")
    assert len(text) < MOST, text
    assert "expected" in text or "found" in text
