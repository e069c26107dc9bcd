"""Operations on the results of a pipeline: of whole batches where that gives the same bits."""

import numpy as np
import pytest
import torch
from idiom import Tensors
from torchvision.transforms import v2

from memfeed.random import Keys
from memfeed.splitting.leaves import kind_of, take_apart
from memfeed.splitting.proof import prove
from memfeed.splitting.recording import Entry
from memfeed.splitting.remake import Tail
from memfeed.splitting.rest import rest_of

N = 5
KEYS = Keys(0, 0, torch.arange(N))
SOURCE = (0, 0)  # the result of the call that makes the field "x"


def entry(function, link, *others, place=0):
    """Return the operation function(link, *others)."""
    arguments = [*others[:place], link, *others[place:]]
    links = [link if i == place else None for i in range(len(arguments))]
    values = [None if i == place else one for i, one in enumerate(arguments)]
    return Entry(function, take_apart((tuple(range(len(arguments))), {}))[1], links, values)


def tail(entries, results, leaves):
    probes = [{SOURCE: leaf} for leaf in leaves[:3]]
    return Tail(entries, {SOURCE: ("x", kind_of(leaves[0]))}, results, probes)


def numbers():
    return torch.randn(N, 3, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "function", [lambda x, y: x * y, lambda x, y: x.mul_(y), lambda x, y: x.sort(-1).values, lambda x, y: x.cumsum(0)]
)
def test_a_batch_at_once_equals_sample_by_sample(function):
    entries = {1: entry(function, SOURCE, 1.7), 2: entry(torch.add, (1, 0), 3)}
    made = tail(entries, {SOURCE: "x", (2, 0): "y"}, numbers())
    assert made.is_batched
    at_once = made.apply({"x": numbers(), "z": 1}, KEYS)
    made.is_batched = False
    one_by_one = made.apply({"x": numbers(), "z": 1}, KEYS)
    assert sorted(at_once) == ["x", "y", "z"]
    for name in "xy":
        assert torch.equal(at_once[name], one_by_one[name])


def test_an_operation_that_writes_reaches_the_field_and_not_the_batch_that_was_given():
    given = numbers()
    made = tail({1: entry(torch.Tensor.__setitem__, SOURCE, (..., 0), 9.0)}, {SOURCE: "x"}, numbers())
    changed = made.apply({"x": given}, KEYS)["x"]
    assert (changed[..., 0] == 9).all()
    assert torch.equal(changed[..., 1:], given[..., 1:])
    assert torch.equal(given, numbers())


def test_what_no_batch_can_do_is_made_sample_by_sample():
    found = tail({1: entry(torch.nonzero, SOURCE)}, {(1, 0): "y"}, (numbers() > 1).float())
    assert not found.is_batched
    made = found.apply({"x": (numbers() > 1).float()}, KEYS)["y"]
    assert [len(one) for one in made] == (numbers() > 1).flatten(1).sum(1).tolist()
    arrays = list(numbers().numpy())
    found = tail({1: entry(np.flip, SOURCE)}, {(1, 0): "y"}, arrays)
    assert not found.is_batched
    assert torch.equal(found.apply({"x": numbers()}, KEYS)["y"], numbers().flip(1, 2))


class WrittenThenAgain(Tensors):
    """A leaf is written to before the pipeline is called a second time."""

    def __getitem__(self, index):
        image = self.load(index)
        one = self.transform(image)
        one[..., :3] = 0
        return one, self.transform(image), self.labels[index]


def test_a_write_between_two_calls_reaches_its_own_leaf():
    dataset = WrittenThenAgain(v2.Compose([v2.RandomCrop(24), v2.ToDtype(torch.float32)]))
    rest = rest_of(prove(dataset, range(4)))
    assert "RandomCrop" in rest.batched
    names = rest.layout.names[0]
    images = torch.from_numpy(dataset.images[:N]).permute(0, 3, 1, 2).contiguous()
    one, two, labels = rest.transform.apply(dict(zip(names, (images, torch.arange(N)), strict=True)), KEYS)
    assert (one[..., :3] == 0).all()
    assert (one[..., 3:].flatten(1).amax(1) > 0).all()
    assert (two[:, 1, :, 0].amax(1) > 0).all()
    assert labels.tolist() == list(range(N))
