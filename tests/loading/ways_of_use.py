"""Ways to use a DataLoader: each takes a `Feed` and returns what a program would see.

With shuffling the two loaders draw other orders, so such a way returns `InAnyOrder`: the batches of a loader beside
those that DataLoader makes of the same rows.
"""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
    random_split,
)

from differences import InAnyOrder, Raised, attempt
from sample_kinds import Rows


class Numbered(Dataset):
    """The samples of a dataset, each with its row number."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: int) -> tuple[Any, int]:
        return self.dataset[i], i


class Whole(Rows):
    """A dataset that also takes the row numbers of a batch."""

    def __getitem__(self, i: Any) -> Any:
        return default_collate([self[j] for j in i]) if isinstance(i, list) else super().__getitem__(i)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[i] for i in indices]


class Noisy(Rows):
    """A dataset that draws random numbers."""

    def __getitem__(self, i: int) -> Any:
        return super().__getitem__(i), torch.rand(2)


class Broken(Rows):
    """A dataset with a sample that cannot be read."""

    def __getitem__(self, i: int) -> Any:
        if i == 4:
            raise OSError("no such file")
        return super().__getitem__(i)


class Gaps(Rows):
    """A dataset that returns None for a sample that cannot be read."""

    def __getitem__(self, i: int) -> Any:
        return None if i == 4 else super().__getitem__(i)


class Stream(IterableDataset):
    """The samples of a dataset as an iterable."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return (self.dataset[i] for i in range(len(self.dataset)))


class Feed:
    """A kind of samples, and how its loaders are made.

    ``source`` is what a program passes to ``loader``; ``numbered`` is the same with the row number of each sample.
    """

    def __init__(self, kind: str, loader: Callable[..., Any], prepare: Callable[[Dataset], Any]) -> None:
        self.kind, self.loader, self._prepare = kind, loader, prepare

    @property
    def source(self) -> Any:
        return self._prepare(Rows(self.kind))

    @property
    def numbered(self) -> Any:
        return self._prepare(Numbered(Rows(self.kind)))

    def prepare(self, dataset: Any) -> Any:
        return self._prepare(dataset)

    def batches(self, *args: Any, **options: Any) -> list[Any]:
        return list(self.loader(self.source, *args, **options))

    def drawn(self, *args: Any, **options: Any) -> InAnyOrder:
        """Return the batches of a loader that draws rows."""
        return self.as_drawn(list(self.loader(self.numbered, *args, **options)))

    def as_drawn(self, batches: list[Any]) -> InAnyOrder:
        rows = [batch[1].tolist() for batch in batches]
        expected = attempt(lambda: list(DataLoader(Numbered(Rows(self.kind)), batch_sampler=rows)))
        return InAnyOrder(sorted(itertools.chain(*rows)), batches, expected)


def orders(batches: list[Any]) -> list[list[int]]:
    return [batch[1].tolist() for batch in batches]


def two_epochs(feed: Feed) -> Any:
    loader = feed.loader(feed.source, 3)
    return [list(loader), list(loader)]


def two_shuffled_epochs(feed: Feed) -> Any:
    loader = feed.loader(feed.numbered, 3, shuffle=True)
    first, second = list(loader), list(loader)
    return [feed.as_drawn(first), feed.as_drawn(second), orders(first) == orders(second)]


def reseeded(feed: Feed) -> Any:
    loader, found = feed.loader(feed.numbered, 3, shuffle=True), []
    for _ in range(2):
        torch.manual_seed(5)
        found.append(orders(list(loader)))
    return found[0] == found[1]


def loader_for_each_epoch(feed: Feed) -> Any:
    torch.manual_seed(5)
    found = [orders(list(feed.loader(feed.numbered, 3, shuffle=True))) for _ in range(2)]
    torch.manual_seed(5)
    again = [orders(list(feed.loader(feed.numbered, 3, shuffle=True))) for _ in range(2)]
    return [found[0] == found[1], found == again]


def two_iterators(feed: Feed) -> Any:
    loader = feed.loader(feed.source, 3)
    return list(zip(loader, loader, strict=True))


def nested_loops(feed: Feed) -> Any:
    loader = feed.loader(feed.source, 3)
    return [(one, [*loader]) for one in loader]


def broken_off(feed: Feed) -> Any:
    loader = feed.loader(feed.source, 3)
    found = []
    for batch in loader:
        found.append(batch)
        break
    return [found, list(loader)]


def lengths(feed: Feed) -> Any:
    source, make = feed.source, feed.loader
    loader = make(source, 3)
    return [
        *(len(loader), len(make(source, 3, drop_last=True)), len(make(source)), len(make(source, None))),
        *(len(make(source, batch_sampler=[[0], [1, 2]])), len(make(source, 2, sampler=[0, 1, 2])), len(iter(loader))),
    ]


def attributes(feed: Feed, **options: Any) -> Any:
    loader = feed.loader(feed.source, 3, drop_last=True, **options)
    names = ["batch_size", "drop_last", "num_workers", "pin_memory", "timeout", "prefetch_factor", "persistent_workers"]
    names += ["worker_init_fn", "multiprocessing_context", "generator", "pin_memory_device", "in_order"]
    kinds = [type(loader.sampler), type(loader.batch_sampler), isinstance(loader, DataLoader)]
    return [{name: getattr(loader, name) for name in names}, kinds, [list(rows) for rows in loader.batch_sampler]]


def first_batch(feed: Feed) -> Any:
    loader = feed.loader(feed.source, 3)
    return [next(iter(loader)), next(iter(loader))]


def beyond_the_end(feed: Feed) -> Any:
    iterator = iter(feed.loader(feed.source, 4))
    return [next(iterator), next(iterator), next(iterator, "end"), next(iterator, "end")]


def iterator_for_many_epochs(feed: Feed) -> Any:
    loader = feed.loader(feed.source, 3)
    iterator, found = iter(loader), []
    for _ in range(8):
        try:
            found.append(next(iterator))
        except StopIteration:
            iterator = iter(loader)
            found.append(next(iterator))
    return found


def resumed(feed: Feed) -> Any:
    loader = feed.loader(feed.source, 2)
    if not hasattr(loader, "state_dict"):
        return list(loader)[1:]
    iterator = iter(loader)
    next(iterator)
    other = feed.loader(feed.source, 2)
    other.load_state_dict(loader.state_dict())
    return list(other)


def parts(feed: Feed) -> Any:
    source = feed.source
    first, second = random_split(source, [3, 4], torch.Generator().manual_seed(0))
    subsets = [first, second, Subset(source, [5, 1, 1]), Subset(Subset(source, [6, 5, 4, 3]), [3, 0])]
    return [list(feed.loader(subset, 2)) for subset in subsets]


def joined(feed: Feed) -> Any:
    return list(feed.loader(ConcatDataset([feed.source, feed.source]), 4))


def distributed(feed: Feed) -> Any:
    found = []
    for rank in range(2):
        sampler = DistributedSampler(range(7), num_replicas=2, rank=rank, shuffle=True, seed=3)
        loader = feed.loader(feed.source, 2, sampler=sampler)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            found.append(list(loader))
    return found


def pickled(feed: Feed) -> Any:
    loader = feed.loader(feed.source, 3)  # kept: its temporary store is removed with it
    return list(pickle.loads(pickle.dumps(loader)))


def copied(feed: Feed) -> Any:
    loader = feed.loader(feed.source, 3)
    return [list(copy.copy(loader)), list(copy.deepcopy(loader))]


def pickled_iterator(feed: Feed) -> Any:
    return isinstance(pickle.dumps(iter(feed.loader(feed.source, 3))), bytes)


def pickled_batches(feed: Feed) -> Any:
    return [pickle.loads(pickle.dumps(batch)) for batch in feed.loader(feed.source, 3)]


def written_into(feed: Feed) -> Any:
    loader = feed.loader(feed.source, 3)
    for batch in loader:
        _zero(batch)
    return list(loader)


def _zero(batch: Any) -> None:
    """Set all tensors of a batch to zero, in place."""
    if isinstance(batch, torch.Tensor):
        with torch.no_grad():
            (batch.values() if batch.is_nested else batch).zero_()
    elif hasattr(batch, "values"):
        for value in batch.values():
            _zero(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            _zero(value)


def kept_alive(feed: Feed) -> Any:
    loader = feed.loader(feed.source, 1)
    return [batch for _ in range(3) for batch in loader]


def parts_kept_alive(feed: Feed) -> Any:
    """Keep one tensor of each batch, as a list of losses or of features does."""
    return [(batch[1], batch[1][:1]) for _ in range(3) for batch in feed.loader(feed.numbered, 2)]


def same_dataset(feed: Feed) -> Any:
    source = feed.source
    loader = feed.loader(source, 3)
    return [loader.dataset is source, len(loader.dataset)]


def samples_of_dataset(feed: Feed) -> Any:
    loader = feed.loader(feed.source, 3)
    return [loader.dataset[0], loader.dataset[6], attempt(lambda: loader.dataset[7])]


def set_attributes(feed: Feed) -> Any:
    loader = feed.loader(feed.source, 3)
    names = ("batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers")
    found = [attempt(lambda name=name: setattr(loader, name, None)) for name in names]
    loader.collate_fn = len
    return [found, list(loader)]


def changed_sampler(feed: Feed) -> Any:
    loader = feed.loader(feed.numbered, 3, shuffle=True)
    loader.sampler.replacement = True
    return len(orders(list(loader)))


def generator_of_sampler(feed: Feed) -> Any:
    loader, found = feed.loader(feed.numbered, 3, shuffle=True), []
    for _ in range(2):
        loader.sampler.generator = torch.Generator().manual_seed(9)
        found.append(orders(list(loader)))
    return found[0] == found[1]


def wrong_arguments(feed: Feed) -> Any:
    source, make = feed.source, feed.loader
    wrong = [
        *({"batch_size": 0}, {"batch_size": -1}, {"batch_size": 2.5}, {"batch_size": "2"}, {"num_workers": -1}),
        *({"shuffle": True, "sampler": [0]}, {"batch_size": 2, "batch_sampler": [[0]]}, {"timeout": -1}),
        *({"batch_size": None, "drop_last": True}, {"drop_last": True, "batch_sampler": [[0]]}),
        *({"batch_size": None, "shuffle": True}, {"prefetch_factor": 2}, {"persistent_workers": True}),
        *({"worker_init_fn": 3}, {"multiprocessing_context": "swim"}, {"nonsense": 1}, {"shuffle": "yes"}),
        *({"collate_fn": 3}, {"generator": 3}, {"sampler": 3}, {"batch_sampler": 3}),
    ]
    return {str(one): attempt(lambda one=one: type(make(source, **one)) is type) for one in wrong}


def rows_out_of_range(feed: Feed) -> Any:
    return [
        attempt(lambda rows=rows: list(feed.loader(feed.source, 2, sampler=rows)))
        for rows in ([0, 7], [-8], [1.5], ["a"], [None], [2**70])
    ]


def kinds_of_numbers(feed: Feed) -> Any:
    source = feed.source
    return [
        attempt(lambda: list(feed.loader(source, np.int64(3)))),
        list(feed.loader(source, 2, sampler=np.array([3, 1, 1]))),
        list(feed.loader(source, 2, sampler=torch.tensor([3, 1, 1]))),
        list(feed.loader(source, 2, sampler=range(0, 7, 3))),
        list(feed.loader(source, batch_sampler=[np.array([2, 0]), torch.tensor([1])])),
    ]


def any_batch_sampler(feed: Feed) -> Any:
    source = feed.source
    lists = [[0, 1], [2], [6, 6, 0, 3], []]
    return [
        list(feed.loader(source, batch_sampler=lists[:3])),
        attempt(lambda: list(feed.loader(source, batch_sampler=lists))),
        list(feed.loader(source, batch_sampler=BatchSampler(SequentialSampler(range(7)), 3, False))),
    ]


def sampler_of_lists(feed: Feed) -> Any:
    source = feed.prepare(Whole(feed.kind))
    return list(feed.loader(source, sampler=BatchSampler(SequentialSampler(range(7)), 3, False), batch_size=None))


def drawing_samplers(feed: Feed) -> Any:
    draw = torch.Generator
    samplers = [
        RandomSampler(range(7), generator=draw().manual_seed(1)),
        RandomSampler(range(7), replacement=True, num_samples=9, generator=draw().manual_seed(1)),
        SubsetRandomSampler([1, 3, 5], generator=draw().manual_seed(1)),
        WeightedRandomSampler([1.0] * 6 + [9.0], 8, generator=draw().manual_seed(1)),
    ]
    return [[list(loader), list(loader)] for loader in (feed.loader(feed.source, 3, sampler=one) for one in samplers)]


def shuffled_with_generator(feed: Feed) -> Any:
    seeds, found = (1, 1, 2), []
    for seed in seeds:
        batches = list(feed.loader(feed.numbered, 3, shuffle=True, generator=torch.Generator().manual_seed(seed)))
        found.append((orders(batches), feed.as_drawn(batches)))
    return [found[0][0] == found[1][0], found[0][0] == found[2][0], found[0][1]]


def zipped(feed: Feed) -> Any:
    one, other = feed.loader(feed.source, 3), feed.loader(feed.source, 2)
    return [list(zip(one, other, strict=False)), list(zip(one, itertools.cycle(other), strict=False))]


def cycled(feed: Feed) -> Any:
    return list(itertools.islice(itertools.cycle(feed.loader(feed.source, 3)), 7))


def changed_samples(feed: Feed) -> Any:
    dataset = Rows(feed.kind)
    loader = feed.loader(feed.prepare(dataset), 3)
    list(loader)
    dataset.kind = "str"
    return attempt(lambda: list(loader))


def changed_subset(feed: Feed) -> Any:
    subset = Subset(feed.source, [0, 1, 2])
    loader = feed.loader(subset, 2)
    first = list(loader)
    subset.indices = [4, 5]
    return [first, attempt(lambda: list(loader))]


def unset_epoch(feed: Feed) -> Any:
    loader = feed.loader(feed.numbered, 2, sampler=DistributedSampler(range(7), num_replicas=1, rank=0, seed=3))
    return orders(list(loader)) == orders(list(loader))


def own_collate(feed: Feed) -> Any:
    return feed.loader(feed.source, 3, collate_fn=as_it_is).collate_fn is as_it_is


def with_other_numbers(feed: Feed) -> Any:
    """Draw random numbers after passes of a loader, as a model does."""
    found = []
    for shuffle in (False, True):
        loader = feed.loader(feed.source, 3, shuffle=shuffle)
        for _ in range(2):
            torch.manual_seed(3)
            list(loader)
            found.append(torch.rand(()).item())
    return found


def random_samples(feed: Feed) -> Any:
    return len(list(feed.loader(feed.prepare(Noisy(feed.kind)), 3)))


def broken_samples(feed: Feed) -> Any:
    dataset = feed.prepare(Broken(feed.kind))
    return [
        attempt(lambda: len(list(feed.loader(dataset, 3)))),
        attempt(lambda: len(list(feed.loader(dataset, 3, sampler=[0, 1])))),
    ]


def dropped_samples(feed: Feed) -> Any:
    return len(list(feed.loader(feed.prepare(Gaps(feed.kind)), 3, collate_fn=without_gaps)))


def no_samples(feed: Feed) -> Any:
    empty = attempt(lambda: feed.prepare(Rows(feed.kind, 0)))
    if isinstance(empty, Raised):
        return empty
    return [attempt(lambda shuffle=shuffle: list(feed.loader(empty, 3, shuffle=shuffle))) for shuffle in (False, True)]


def without_gaps(samples: list[Any]) -> Any:
    return default_collate([sample for sample in samples if sample is not None])


def lists_of_lists(feed: Feed) -> Any:
    return attempt(lambda: len(list(feed.loader(feed.prepare(Whole(feed.kind)), batch_sampler=[[[0, 1], [2, 3]]]))))


def iterable_of_lists(feed: Feed) -> Any:
    """Draw lists of rows with a sampler that is no BatchSampler."""
    return list(feed.loader(feed.prepare(Whole(feed.kind)), None, sampler=[[0, 1], [2]]))


def with_workers(feed: Feed, **options: Any) -> Any:
    loader = feed.loader(feed.source, 3, num_workers=2, **options)
    return [list(loader), list(loader)]


def as_it_is(samples: Any) -> Any:
    return samples


def worker_began(_: int) -> None:
    """Do nothing: a worker_init_fn."""


WAYS: dict[str, Callable[[Feed], Any]] = {
    "batches": lambda feed: feed.batches(3),
    "batch_size=1": lambda feed: feed.batches(),
    "batch_size=None": lambda feed: feed.batches(None),
    "one batch": lambda feed: feed.batches(100),
    "drop_last": lambda feed: feed.batches(3, drop_last=True),
    "shuffle": lambda feed: feed.drawn(3, shuffle=True),
    "shuffle, generator": shuffled_with_generator,
    "shuffle, two epochs": two_shuffled_epochs,
    "torch's seed set again between epochs": reseeded,
    "a loader for each epoch": loader_for_each_epoch,
    "a generator assigned to the sampler": generator_of_sampler,
    "sampler": lambda feed: feed.batches(3, sampler=[5, 1, 1, 0]),
    "samplers that draw": drawing_samplers,
    "sampler, negative rows": lambda feed: feed.batches(2, sampler=[-1, 0]),
    "rows out of range": rows_out_of_range,
    "numbers of NumPy and torch": kinds_of_numbers,
    "batch_sampler": any_batch_sampler,
    "sampler of lists, batch_size=None": sampler_of_lists,
    "DistributedSampler": distributed,
    "collate_fn": lambda feed: feed.batches(3, collate_fn=as_it_is),
    "collate_fn=default_collate": lambda feed: feed.batches(3, collate_fn=default_collate),
    "collate_fn, batch_size=None": lambda feed: feed.batches(None, collate_fn=as_it_is),
    "two epochs": two_epochs,
    "two iterators at once": two_iterators,
    "a loop in a loop": nested_loops,
    "break": broken_off,
    "next(iter(loader))": first_batch,
    "next after the end": beyond_the_end,
    "an iterator for many epochs": iterator_for_many_epochs,
    "enumerate": lambda feed: list(enumerate(feed.loader(feed.source, 3), 1)),
    "zip": zipped,
    "itertools.cycle": cycled,
    "state_dict": resumed,
    "Subset, random_split": parts,
    "ConcatDataset": joined,
    "IterableDataset": lambda feed: list(feed.loader(feed.prepare(Stream(Rows(feed.kind))), 3)),
    "__getitems__": lambda feed: list(feed.loader(feed.prepare(Whole(feed.kind)), 3)),
    "pin_memory": lambda feed: feed.batches(3, pin_memory=True),
    "a pickled loader": pickled,
    "a copied loader": copied,
    "a pickled iterator": pickled_iterator,
    "pickled batches": pickled_batches,
    "batches written into": written_into,
    "batches kept": kept_alive,
    "parts of batches kept": parts_kept_alive,
    "len": lengths,
    "attributes": attributes,
    "attributes of the iterator": lambda feed: attempt(lambda: iter(feed.loader(feed.source, 3))._num_yielded),
    "loader.dataset is dataset": same_dataset,
    "loader.dataset[i]": samples_of_dataset,
    "attributes assigned": set_attributes,
    "a sampler that is changed": changed_sampler,
    "a Subset that changes": changed_subset,
    "set_epoch is not called": unset_epoch,
    "loader.collate_fn": own_collate,
    "random numbers of the loop": with_other_numbers,
    "a random dataset": random_samples,
    "a dataset that raises": broken_samples,
    "samples that are dropped": dropped_samples,
    "no samples": no_samples,
    "a batch_sampler of lists of lists": lists_of_lists,
    "a list as the sampler, batch_size=None": iterable_of_lists,
    "wrong arguments": wrong_arguments,
    "a dataset that changes": changed_samples,
    "attributes, num_workers": lambda feed: attributes(
        feed, num_workers=2, persistent_workers=True, prefetch_factor=3, pin_memory=True, timeout=9
    ),
    "num_workers": with_workers,
    "persistent_workers": lambda feed: with_workers(feed, persistent_workers=True),
    "prefetch_factor, timeout, worker_init_fn": lambda feed: with_workers(
        feed, prefetch_factor=1, timeout=60, worker_init_fn=worker_began
    ),
    "spawn": lambda feed: with_workers(feed, multiprocessing_context="spawn"),
}
"""The ways, by name. The last four start processes."""

STARTING_PROCESSES = list(WAYS)[-4:]
