"""Which arguments of a loader fit together, and what is said of those that do not."""

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler

import memfeed
from memfeed import Blocks, Loader
from memfeed.errors import LoaderError

ROWS = torch.arange(12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "found batch_size=0; expected an int of at least 1"),
        ({"batch_size": 2.5}, r"found batch_size=2\.5"),
        ({"batch_size": 2**40}, "for all rows use batch_size=len"),
        ({"drop_last": "yes"}, "found drop_last='yes'; expected True or False"),
        ({"last": "all"}, 'expected "repeat", "pad", "uneven" or "drop"'),
        ({"drop_last": True, "last": "pad"}, "found drop_last=True and last='pad'"),
        ({"shuffle": "yes"}, "found shuffle='yes'"),
        ({"shuffle": Blocks(0)}, r"Blocks\.rows=0"),
        ({"batch_sampler": [[0]], "batch_size": 4}, "expected no batch_size, shuffle, sampler, drop_last"),
        ({"batch_sampler": [[0]], "sampler": [0]}, "expected no batch_size, shuffle, sampler, drop_last"),
        ({"batch_size": None, "last": "pad"}, "found batch_size=None, which gives single samples"),
        ({"sampler": [0], "shuffle": True}, "found a sampler and shuffle=True"),
        ({"sampler": [0], "bucket_by": "x"}, "and bucket_by; expected batches in the loader's own order"),
        ({"sampler": [0], "ranks": (0, 2)}, "found a sampler and ranks"),
        ({"ranks": 3}, "found ranks=3; expected"),
        ({"ranks": (2, 2)}, r"found ranks=\(2, 2\); expected a rank of 0 to 1"),
        ({"bucket_by": "x", "batch_size": None}, "and batch_size=None, which gives single samples"),
        ({"bucket_by": memfeed.Tokens(0)}, r"Tokens\.per_batch=0"),
        ({"bucket_by": memfeed.Tokens(9), "batch_size": 3}, "expected one of them: leave batch_size out"),
        ({"as_": "list"}, 'found as_=\'list\'; expected "torch", "numpy" or "jax"'),
        ({"num_workers": -1}, "each option should be non-negative"),
        ({"timeout": -1}, "each option should be non-negative"),
        ({"timeout": "3"}, "found timeout='3'; expected a number of seconds"),
        ({"persistent_workers": True}, "found persistent_workers without num_workers"),
        ({"prefetch_factor": -1}, "found prefetch_factor=-1"),
        ({"seed": "a"}, "found seed='a'; expected an int"),
        ({"collate_fn": 3}, "found collate_fn=3; expected a function"),
        ({"worker_init_fn": 3}, "found worker_init_fn=3; expected a function"),
        ({"sampler": 3}, "found sampler=3; expected row numbers"),
        ({"batch_sampler": 3}, "found batch_sampler=3; expected row numbers"),
        ({"sampler": torch.utils.data.RandomSampler}, "found sampler=<class .*RandomSampler'>; expected row numbers"),
        ({"generator": 3}, r"found generator=3; expected a torch\.Generator"),
        ({"return_rows": "x"}, "found return_rows='x'; expected True or False"),
        ({"forms": "full"}, "found forms='full' beside Tensor"),
        ({"placement": "sharded", "sampler": [0]}, 'found placement="sharded" and a sampler'),
        ({"placement": "sharded", "bucket_by": memfeed.Tokens(9)}, "sharded"),
    ],
)
def test_what_does_not_fit(options, message):
    with pytest.raises(LoaderError, match=message):
        Loader(ROWS, **options)


@pytest.mark.parametrize(
    ("options", "batches"),
    [
        ({}, 12),
        ({"batch_size": 5}, 3),
        ({"batch_size": 5, "drop_last": True}, 2),
        ({"batch_size": 5, "last": "drop"}, 2),
        ({"batch_size": None}, 12),
        ({"batch_size": None, "sampler": BatchSampler(RandomSampler(ROWS), 5, False)}, 3),
        ({"sampler": range(4), "batch_size": 3}, 2),
        ({"batch_sampler": [[0, 1], [2]]}, 2),
        ({"batch_size": 2, "ranks": (1, 3)}, 2),
        ({"batch_size": 2, "sampler": DistributedSampler(ROWS, 3, 0)}, 2),
        ({"batch_size": 4, "shuffle": Blocks(2), "seed": 1}, 3),
    ],
)
def test_what_fits(options, batches):
    loader = Loader(ROWS, **options)
    assert len(loader) == len(list(loader)) == batches


def test_arguments_without_effect_are_named_once(capfd):
    Loader(ROWS, num_workers=2, pin_memory=True, in_order=False)
    assert "without effect: num_workers, pin_memory, in_order" in capfd.readouterr().err


def test_a_field_that_would_have_two_meanings(tmp_path):
    for options, name in (({"last": "pad"}, "valid"), ({"return_rows": True}, "rows")):
        with pytest.raises(LoaderError, match=f'found a field "{name}" and .*, which adds one'):
            Loader({name: ROWS, "x": ROWS}, 4, **options)
