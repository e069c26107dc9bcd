"""RandomHorizontalFlip(alternate=True): each image is mirrored every other epoch."""

import numpy as np
import pytest
import torch
from image_batches import keys, photos

import memfeed
from memfeed import Loader
from memfeed import transforms as T
from memfeed.errors import TransformError
from memfeed.random import Keys

N = 24
FLIP = T.RandomHorizontalFlip(alternate=True)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    column = torch.arange(8, dtype=torch.uint8).expand(N, 1, 4, 8).clone()
    return memfeed.cache(
        {"image": column, "row": torch.arange(N)}, tmp_path_factory.mktemp("a") / "a.mf", progress=False
    )


def flips(batches):
    """By row: True if the image was mirrored."""
    return {
        row: bool(image[0, 0, 0] == 7)
        for b in batches
        for row, image in zip(b["row"].tolist(), b["image"], strict=True)
    }


def epochs(store, count, size=5, **options):
    loader = Loader(store, size, shuffle=True, seed=3, transform=FLIP, **options)
    return [flips(loader) for _ in range(count)]


def drawn(epoch, seed=0, transform=FLIP):
    return transform.params(range(200), epoch, seed=seed, shape=(3, 8, 8))["RandomHorizontalFlip.0"].hflip


def test_first_epoch_is_drawn_and_then_alternates():
    first = drawn(0)
    assert (first == drawn(0, transform=T.RandomHorizontalFlip())).all(), "the numbers of epoch 0 are those without it"
    assert 60 < first.sum() < 140
    for epoch in (-1, 1, 2, 3, 10, 10**12 + 1):
        assert (drawn(epoch) == first ^ bool(epoch % 2)).all()
    assert (drawn(0, seed=1) != first).any()
    assert drawn(3, transform=T.RandomHorizontalFlip(0.0, alternate=True)).all()


def test_by_hand_with_an_epoch():
    images = photos(N)
    even, odd, third = (FLIP.apply(images, keys(N, epoch=epoch)) for epoch in (0, 1, 2))
    assert torch.equal(even, third)
    assert torch.equal(even, odd.flip(-1))
    assert torch.equal(FLIP.reference(images, keys(N, epoch=1)), odd)
    listed = [image[:, :, : 6 + at % 3] for at, image in enumerate(images)]
    found = FLIP.apply(listed, keys(N, epoch=1))
    mirrored = drawn(1)[:N]
    assert all(torch.equal(f, i.flip(-1) if m else i) for f, i, m in zip(found, listed, mirrored, strict=True))


def test_a_repeated_row_is_mirrored_alike():
    rows = torch.tensor([4, 9, 4, 4, 9])
    transform = T.Compose([T.RandomCrop(5), FLIP])
    for epoch in (0, 1):
        by_position = Keys(0, epoch, rows, torch.arange(5) + 7 * epoch)
        draws = {}
        original = T.RandomHorizontalFlip.make_params

        def make(self, *args, draws=draws, original=original):
            draws["made"] = original(self, *args)
            return draws["made"]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(T.RandomHorizontalFlip, "make_params", make)
            transform.apply(photos(5), by_position)
        assert (draws["made"].hflip == drawn(epoch)[rows.numpy()]).all()


def test_in_a_loader_with_other_batches_ranks_and_after_resume(store):
    one, two, three = epochs(store, 3)
    assert len(one) == N
    assert one == three
    assert all(one[row] != two[row] for row in one)
    assert epochs(store, 2, size=7) == [one, two]
    ranks = [epochs(store, 2, size=3, ranks=(rank, 2)) for rank in (0, 1)]
    assert [{**a, **b} for a, b in zip(*ranks, strict=True)] == [one, two]

    loader = Loader(store, 5, shuffle=True, seed=3, transform=FLIP)
    list(loader)
    batches = iter(loader)
    seen = [next(batches), next(batches)]
    restored = Loader(store, 5, shuffle=True, seed=3, transform=FLIP)
    restored.load_state_dict(loader.state_dict())
    assert flips(seen) | flips(restored) == two
    assert flips(restored) == three


def test_without_keys_is_an_error():
    for transform in (FLIP, T.Compose([T.RandomCrop(5), FLIP])):
        with pytest.raises(TransformError, match=r"without keys.*apply\(batch, Keys\(seed, epoch, rows\)\)"):
            transform(photos(4))
    with pytest.raises(TransformError, match="without an epoch"):
        FLIP.make_params(torch.Size((2, 3, 4, 4)), torch.uint8, lambda draws, samples=None: np.zeros((2, draws)))
