"""The rows of the table in docs/trainers.md: where a Loader gives something else than DataLoader, and why."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection

from sample_kinds import KINDS
from ways_of_use import WAYS

STORE, CACHE, DATASET = "Loader(store)", "Loader(dataset, cache=path)", "Loader(dataset)"
"""The three ways to make a Loader of a dataset."""


@dataclasses.dataclass(frozen=True)
class Known:
    """A difference that is by design.

    Args:
        dataloader, loader, why: its row: what DataLoader gives, what a Loader gives, why and what to write.
        change: a pattern for what is found in place of what, ``path: theirs -> ours``.
        kinds: the kinds of samples that show it; empty for any.
        ways: the ways of use that show it; empty for any.
        forms: the ways to make a Loader that show it; empty for any.
    """

    dataloader: str
    loader: str
    why: str
    change: str
    kinds: Collection[str] = ()
    ways: Collection[str] = ()
    forms: Collection[str] = ()

    def __post_init__(self) -> None:
        assert set(self.kinds) <= set(KINDS), set(self.kinds) - set(KINDS)
        assert set(self.ways) <= set(WAYS), set(self.ways) - set(WAYS)

    def covers(self, kind: str, way: str, form: str, change: str) -> bool:
        """Return True if this row is about the difference that a cell shows."""
        return (
            all(not among or one in among for one, among in ((kind, self.kinds), (way, self.ways), (form, self.forms)))
            and re.search(self.change, change) is not None
        )

    @property
    def row(self) -> str:
        """The row of the table, in Markdown."""
        return f"| {self.dataloader} | {self.loader} | {self.why} |"


VARYING = (
    *("tensors of varying length", "tensors of varying shape", "arrays of varying length", "lists of varying length"),
    *("lists of str of varying length", "detection target"),
)
UNSTORED = (
    *("tensor, nested", "tensor, quantized", "array of text", "array of bytes", "array of objects"),
    *("array, structured", "np.datetime64", "int, beyond int64", "Decimal", "Fraction", "datetime", "enum", "Path"),
    *("slice", "function", "object", "SimpleNamespace", "set", "range", "deque", "dict with tuple keys"),
)
GIVES_A_VALUE = r"raises \w+ -> (?!raises|memfeed's)"

SAMPLES = (
    Known(
        "samples of varying shape: RuntimeError, unless those of a batch happen to be equal",
        "a nested tensor, or a list of tensors, for every batch of several rows",
        "these batches have one form. A batch of one row is [1, *shape], as in DataLoader, except with `bucket_by`; "
        "`pad=` gives plain tensors",
        rf"{GIVES_A_VALUE}|tensor \w+ \[.*\] -> (nested tensor|list of tensor)|list of .* -> (nested tensor|list of)",
        kinds=VARYING,
    ),
    Known(
        "lists of numbers of varying length, `batch_size=1`: a list of tensors [1]",
        "a tensor [1, length]",
        "a list of numbers is one field",
        r"list of tensor int64 \[1\] -> tensor int64 \[1, ",
        kinds=["lists of varying length"],
    ),
    Known(
        "a list of numbers inside of a sample (`{'ids': [1, 2, 3]}`): a list of tensors [n], one for each entry",
        "one tensor [n, entries]",
        "a list of numbers is one field, as a line says for a dataset. `batch['ids'].unbind(1)` gives DataLoader's "
        "list, and so does `collate_fn=torch.utils.data.default_collate`; a tuple of numbers is taken apart, as in "
        "DataLoader",
        r"list of tensor \w+ \[\d+\] -> tensor \w+ \[\d+, \d+\]",
    ),
    Known(
        "text in a tuple, list or namedtuple: a tuple of str or bytes",
        "a list, as everywhere else",
        "write `tuple(names)` where a tuple is needed",
        r"tuple of .* -> list of ",
    ),
    Known(
        "numbers, or text, with None among them: an error, unless a batch has no None",
        "a list of tensors and None, also for batches without None",
        "all batches of a loader have one form",
        rf"{GIVES_A_VALUE}|tensor int64 \[\d+\] -> list of tensor int64 \[\]|raises TypeError -> NoneType",
        kinds=["number or None", "str or None"],
    ),
    Known(
        "PIL images, complex numbers, dataclasses, None in a tuple, arrays with negative strides: an error",
        "uint8 [n, c, h, w], complex128 [n], a dataclass of batches, None, the array's values",
        "a store keeps them, so they have batches",
        GIVES_A_VALUE,
        kinds=["PIL image", "complex", "dataclass", "tuple with None", "None", "array, negative strides"],
    ),
    Known(
        "any other value: what the `collate_fn` makes of it; TypeError for most with the default one",
        "SchemaError when it is stored: nested and quantized tensors, arrays of text, objects or records, "
        "times, ints beyond int64, Decimal, enums, paths, sets, ranges, objects, dicts with tuples as keys, only None",
        "a store keeps numbers, text, bytes and JSON values: convert them in the dataset, as the error says",
        "-> memfeed's SchemaError",
        kinds=(*UNSTORED, "None"),
    ),
    Known(
        "samples without any value (`()`, `[]`, `{}`)",
        "SchemaError",
        "there is nothing to store",
        "-> memfeed's SchemaError",
        kinds=["tuple, empty", "list, empty", "dict, empty"],
    ),
    Known(
        "tensors of derived classes, masked arrays: a batch, of the class or without the mask",
        "SchemaError",
        "a store would lose what they hold beside their numbers: return it as a field of its own",
        "-> memfeed's SchemaError",
        kinds=["tensor, derived class", "array, masked"],
    ),
    Known(
        "numbers that are ints in some samples and floats in others: the first of a batch decides, or float",
        "SchemaError",
        "a column has one dtype: return `float(x)`",
        "-> memfeed's SchemaError",
        kinds=["int or float", "int, then float"],
    ),
    Known(
        "tuples, or lists of tensors, of varying length: an error, except with `batch_size=1`",
        "SchemaError",
        "samples have one structure: stack the tensors of a list, and return tuples of numbers as lists",
        "-> memfeed's SchemaError",
        kinds=["tuples of varying length", "lists of tensors of varying length"],
    ),
    Known(
        "dicts with other keys in each sample: KeyError, or the keys of the first sample of a batch",
        "a list of dicts, if their values are JSON values; else SchemaError",
        "return all keys in each sample",
        rf"{GIVES_A_VALUE}|dict -> list of dict",
        kinds=["dicts with more keys"],
    ),
    Known(
        "keys of a dict in the order of the first sample of a batch",
        "in the order of the first sample of the store",
        "it shows only if samples have different orders",
        r"keys \['[xy]', '[xy]'\] -> ",
        kinds=["dicts with other orders"],
    ),
    Known(
        "an OrderedDict, a defaultdict, a UserDict, a mapping proxy, another subclass of dict: batches of that class",
        "plain dicts",
        "a store keeps the keys, in their order. The numbers of a `Counter` are its own, where DataLoader's batch has "
        "them twice as large",
        r"(OrderedDict|defaultdict|UserDict|mappingproxy) -> dict|raises TypeError -> ",
        kinds=["OrderedDict", "defaultdict", "UserDict", "mapping proxy"],
    ),
    Known(
        "`np.str_`, `np.bytes_`, members of an IntEnum or StrEnum, `torch.Size`, other subclasses of str, int, float, "
        "list and tuple come as such",
        "str, bytes, int, float, list, tuple",
        "they are equal to them. The `collate_fn` of a loader that was made of the dataset gets the members of an enum",
        r"str_ -> str|bytes_ -> bytes|Level -> int|raises TypeError -> (list of )*bytes",
        kinds=["np.str_", "np.bytes_", "IntEnum"],
    ),
    Known(
        "a bytearray is a list of ints: a list of tensors [n]",
        "bytes",
        "write `list(x)` in the dataset for numbers",
        "entries -> |bytearray -> |-> .*bytes",
        kinds=["bytearray"],
    ),
    Known(
        "tensors that require grad: a batch that does",
        "a batch that does not",
        "a store keeps values",
        "requires_grad True -> False",
        kinds=["tensor, requires grad"],
    ),
    Known(
        "`collate_fn`, and `dataset[i]`, get NumPy arrays, NumPy scalars and PIL images, if the samples have them",
        "tensors of the same values; the `collate_fn` of a loader that was made of the dataset gets them as they were, "
        "but for PIL images of the mode PA, or with palettes that differ or have a transparent colour, as a line says",
        "a store keeps numbers. `std()`, `/` and `repeat` differ between NumPy and torch: write `np.asarray(x)` in the "
        "`collate_fn`",
        r"(ndarray|Image|float32|int64|int8|bool) -> tensor ",
        ways=["collate_fn", "collate_fn, batch_size=None", "loader.dataset[i]", "batch_size=None"],
    ),
)

USE = (
    Known(
        "each epoch draws a new permutation from the generator",
        "one seed is drawn in the first pass, and the order is a function of (seed, epoch): torch's seed, or the "
        "sampler's generator, set again between two epochs of one loader, does not repeat the order",
        "resume on any number of ranks, without reading. `loader.set_epoch(e)` repeats an epoch. ignite's "
        "DeterministicEngine resumes by torch's seed alone: the rest of its epoch comes in another order",
        "value True -> False",
        ways=["torch's seed set again between epochs", "a generator assigned to the sampler"],
    ),
    Known(
        "`iter()` draws a number from torch's generator, for the seeds of workers",
        "only the first pass of a loader draws one",
        "the seed is drawn once. So after the same `manual_seed` a model, and from the second epoch a sampler or "
        "`collate_fn` without a generator of its own, draws other numbers than beside DataLoader",
        "value 0",
        ways=["random numbers of the loop"],
    ),
    Known(
        "`loader.sampler.replacement = True`, and other attributes that say what a sampler draws",
        "LoaderError: pass a sampler",
        "the order is the loader's own; `generator` can be assigned",
        "int -> memfeed's LoaderError",
        ways=["a sampler that is changed"],
    ),
    Known(
        "`type(loader.sampler)` is SequentialSampler or RandomSampler",
        "a class of memfeed",
        "`isinstance(loader.sampler, RandomSampler)` is True for a shuffled loader",
        "torch.utils.data.sampler.SequentialSampler'> -> <class 'memfeed",
        ways=["attributes", "attributes, num_workers"],
    ),
    Known(
        "the iterator has `_num_yielded` and `_sampler_iter`, which speechbrain's SaveableDataLoader reads and changes",
        "AttributeError: save `loader.state_dict()`",
        "a position is one of the rows of all ranks",
        "int -> raises AttributeError",
        ways=["attributes of the iterator"],
    ),
    Known(
        "a framework's `sampler.set_epoch` is the only call",
        "the loader calls `set_epoch` too, until other code has called it once (the method of the sampler's class "
        "records that); it continues from the epoch that the sampler, or one inside of it, shows. After "
        "`loader.set_epoch` and `load_state_dict` it sets the sampler to that epoch",
        "without these calls a sampler would repeat one order",
        "value True -> False",
        ways=["set_epoch is not called"],
    ),
    Known(
        "`num_workers`, `persistent_workers`, `timeout`, `worker_init_fn`, `multiprocessing_context`, `in_order`, "
        "`pin_memory`",
        "accepted, without effect, and shown as 0, False, None; one message. While a dataset is read for the first "
        "time, `num_workers` processes read it, each after `worker_init_fn`",
        "batches are made by a thread, or faster without one; memory is page-locked if the device is a GPU, see "
        "`placement=`",
        r"\.(num_workers|persistent_workers|prefetch_factor|pin_memory|timeout): (value |int -> NoneType)",
        ways=["attributes, num_workers"],
    ),
    Known(
        "`prefetch_factor` without `num_workers`, an unknown `multiprocessing_context`: ValueError",
        "the number of batches made ahead, 2 by default (the attribute reads None); accepted",
        "no worker processes are needed",
        "'(prefetch_factor|multiprocessing_context|persistent_workers)': .*: raises ValueError -> bool",
        ways=["wrong arguments"],
    ),
    Known(
        '`shuffle="yes"`, a `worker_init_fn`, `collate_fn`, `sampler`, `batch_sampler` or `generator` of a wrong type: '
        "accepted, or an error in a worker or at the first batch",
        "LoaderError",
        "arguments are checked when the loader is made",
        "'(shuffle|worker_init_fn|collate_fn|(batch_)?sampler|generator)': .*: bool -> memfeed's LoaderError",
        ways=["wrong arguments"],
    ),
    Known(
        "`batch_size=np.int64(3)`: ValueError; an empty list of rows from a batch sampler: an error",
        "accepted; a batch without rows",
        "numbers of NumPy and torch are numbers",
        r"raises \w+ -> list of ",
        ways=["numbers of NumPy and torch", "batch_sampler"],
    ),
    Known(
        "`sampler` draws lists, `batch_size=None`",
        "the same for a `BatchSampler`, also of TensorDicts, where DataLoader raises; another sampler that draws lists "
        "is a RowError: pass it as `batch_sampler`. A dataset whose `dataset[[...]]` is not the batch of its samples "
        "is read by a DataLoader, as a line says",
        "a list of rows is read as one batch",
        "-> memfeed's RowError|raises TypeError -> list of TensorDict",
        ways=["a list as the sampler, batch_size=None", "sampler of lists, batch_size=None"],
    ),
    Known(
        "a batch sampler of lists of lists",
        "the batch of `store[[...]]` for each list, of a store or of columns in memory; RowError of a dataset, and "
        "beside a `collate_fn`",
        "a dataset may return anything for a list",
        "-> memfeed's RowError",
        ways=["a batch_sampler of lists of lists"],
    ),
    Known(
        "`loader.dataset is dataset`",
        "`loader.dataset` is the store; it also has the attributes of the dataset, if the loader was made of that",
        "the loader reads its rows",
        "value True -> False",
        ways=["loader.dataset is dataset"],
    ),
    Known(
        "`loader.collate_fn is f`",
        "`loader.collate_fn` calls `f`, after the store's own transform",
        "a DataLoader of the loader's parts must give the same",
        "value True -> False",
        ways=["loader.collate_fn"],
    ),
    Known(
        "a dataset that changes between epochs (`dataset.set_epoch(e)`, new labels, another transform)",
        "refused when the next epoch begins, if the loader was made of the dataset ([what is compared]"
        "(inputs.md#when-the-dataset-changes)); a store that was written before gives what was written",
        "a store is fixed; give the changed dataset a new path, or move the changing part to `transform=`",
        ".",
        ways=["a dataset that changes"],
    ),
    Known(
        "a Subset whose indices change, tensors in memory that are replaced (`dataset.tensors = ...`, `d['x'] = ...`)",
        "StaleStoreError when the next epoch begins; values that change in place are read, "
        "those of tensors on a GPU are a StaleStoreError too",
        "the loader reads the memory that it was given: make a new Loader",
        "-> memfeed's StaleStoreError",
        ways=["a Subset that changes"],
    ),
    Known(
        "a dataset that draws random numbers",
        "refused by `memfeed.cache`; `Loader(dataset)` cuts off the random steps of a pipeline; where it cannot, it is "
        "a DataLoader over the dataset, as a line says, with `cache=path` one that keeps [decoded "
        "files](memoize.md#datasets-that-no-store-can-hold)",
        'a store is fixed; move the random part to `transform=`. `require="samples"` refuses such a dataset',
        "-> memfeed's (RandomDataError|SplitError)",
        ways=["a random dataset"],
    ),
    Known(
        "a dataset that raises for a sample: the error comes with the batch that has it",
        "refused by `memfeed.cache`; with `Loader(dataset)` a SampleError, with the original error as its cause",
        '`memfeed.cache(..., on_error="skip")` leaves such samples out',
        "-> memfeed's SampleError",
        ways=["a dataset that raises"],
    ),
    Known(
        "samples that are None, which a `collate_fn` drops",
        "`Loader(dataset, collate_fn=...)` gives the same, as a DataLoader, if one of the first samples is None; "
        "`memfeed.cache` raises SampleError",
        'a store has a row for each sample; `memfeed.cache(..., on_error="skip")` leaves them out',
        "-> memfeed's (NoSampleError|SampleError|SchemaError)",
        ways=["samples that are dropped"],
    ),
    Known(
        "a dataset without samples: no batches; an error with `shuffle=True`",
        "no batches, one message; `memfeed.cache` refuses it",
        "a sample shows the columns",
        "-> memfeed's SchemaError|raises ValueError -> list of nothing",
        ways=["no samples"],
    ),
)
