"""Columns whose rows are compressed: every way of reading gives what the raw column gives."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import memfeed
from memfeed.codecs import Zstd
from memfeed.errors import CorruptStoreError, StoreError
from memfeed.schema.compare import equal
from memfeed.schema.fields import DTYPES

ROWS = 90
CODED = {"x": "zstd", "tokens": "lz4", "types": "zstd", "image": "zstd", "number": "lz4", "perhaps": "lz4"}


class Samples:
    """Samples of every kind that a codec can hold."""

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        draw = np.random.default_rng(index)
        return {
            "x": torch.from_numpy(draw.integers(0, 9, (3, 16, 17), dtype=np.uint8)),
            "tokens": torch.arange(1 + index % 7),
            "types": torch.arange(1 + index % 7) * 2,
            "image": torch.from_numpy(draw.integers(0, 9, (3, 16 + index % 3, 17 + index % 5), dtype=np.uint8)),
            "label": index,
            "episode": index // 30,
            "number": torch.tensor(float(index)),
            "perhaps": None if index % 3 else torch.ones(2, 2),
        }


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("coded")
    coded = memfeed.cache(Samples(), folder / "coded.mf", forms=CODED, workers=0, progress=False)
    raw = memfeed.cache(Samples(), folder / "raw.mf", workers=0, progress=False)
    assert {f.name for f in coded._view.manifest.schema if f.kind == "coded"} == set(CODED)
    return coded, raw


READS = {
    "rows": lambda s: [s[row] for row in range(ROWS)],
    "slice": lambda s: s[5:30],
    "rows by numbers": lambda s: s[[80, 3, 3]],
    "to": lambda s: s.to("cpu"),
    "keys of the TensorDict": lambda s: sorted(s.tensordict().keys()),
    "column of one shape": lambda s: list(s.column("x")),
    "column of several shapes": lambda s: [row.clone() for row in s.column("image")],
    "column with None": lambda s: list(s.column("perhaps")),
    "windows": lambda s: s.select(["x", "number", "episode"]).windows(
        {"x": range(-1, 2), "number": [0]}, within="episode"
    )[3:9],
    "packed": lambda s: s.select("tokens").packed("tokens", size=8)[0:9],
    "lengths": lambda s: s.lengths("tokens"),
    "split": lambda s: [part[:] for part in s.split([0.5, 0.5])],
    "subset": lambda s: s.subset([4, 4, 80])[:],
    "pickle": lambda s: pickle.loads(pickle.dumps(s))[7],
    "__getitems__": lambda s: list(s.__getitems__([3, 1, 80])),
    "DataLoader": lambda s: list(DataLoader(s.select(["x", "label"]), 8)),
    "Collate": lambda s: list(DataLoader(s, 8, collate_fn=memfeed.Collate())),
    "concatenated": lambda s: list(memfeed.Loader([s, s], 8)),
}


@pytest.mark.parametrize("read", READS)
def test_a_read_gives_what_the_raw_store_gives(stores, read):
    coded, raw = (READS[read](store) for store in stores)
    assert equal(coded, raw)


@pytest.mark.parametrize(
    "options",
    [
        {}, {"batch_size": 1}, {"pad": {"tokens": 0, "types": 0}}, {"bucket_by": "tokens"}, {"placement": "pinned"},
        {"placement": {"x": "device"}, "device": "cpu"}, {"as_": "numpy"}, {"return_rows": True}, {"last": "pad"},
        {"ranks": (1, 2)}, {"shuffle": memfeed.Blocks(16)}, {"drop_last": True},
    ],
    ids=lambda options: "-".join(options) or "plain",
)  # fmt: skip
def test_batches_are_those_of_the_raw_store(stores, options):
    options = {"batch_size": 16, "shuffle": True, "seed": 3, **options}
    fields = ["x", "tokens", "types", "image", "label", "number"]
    coded, raw = (list(memfeed.Loader(store.select(fields), **options)) for store in stores)
    assert equal(coded, raw)
    assert len(raw) > 1


def test_rows_that_are_placed_elsewhere_are_decoded_once(stores, monkeypatch):
    loader = memfeed.Loader(stores[0].select(["x", "label"]), 16, placement={"x": "pinned"})
    next(iter(loader))
    assert loader.stats()["placement"]["x"] == "asked for"
    monkeypatch.setattr(Zstd, "decode", lambda *arguments: pytest.fail("decoded again"))
    assert equal(list(loader), list(memfeed.Loader(stores[1].select(["x", "label"]), 16)))


def test_a_loader_of_one_goes_on_from_the_state_of_the_other(stores):
    coded, raw = (memfeed.Loader(store, 8, shuffle=True, seed=5) for store in stores)
    batches, state = iter(raw), None
    for _ in range(4):
        next(batches)
    state = raw.state_dict()
    coded.load_state_dict(state)
    assert equal(list(coded), list(batches))


def test_jagged_fields_of_equal_lengths_share_their_offsets(stores):
    batch = next(iter(memfeed.Loader(stores[0].select(["tokens", "types"]), 8)))
    assert torch.equal((batch["tokens"] + batch["types"]).values(), batch["tokens"].values() * 3)


def test_a_coded_store_takes_fewer_bytes_and_says_how_it_is_stored(stores):
    coded, raw = stores
    assert coded.nbytes < 0.7 * raw.nbytes
    field = coded._view.manifest.schema.fields[coded.schema.field_index("x")]
    assert field.describe() == "uint8 [3, 16, 17] as zstd"
    assert field.coding.parameters == {"level": 1}
    assert coded._view.manifest.version == 3
    assert raw._view.manifest.version < 3
    coded.verify(progress=False)


def test_tensordict_reads_the_blobs_as_bytes(stores):
    from tensordict import TensorDict

    found = TensorDict.load_memmap(str(stores[0].path))
    assert found["x", "start"].shape == (ROWS,)
    assert torch.equal(found["x", "dims"], stores[0].tensordict()["x", "dims"])


numbers = st.sampled_from(sorted(set(DTYPES) - {"float8_e4m3fnuz", "float8_e5m2fnuz"}))


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    dtype=numbers,
    shapes=st.lists(st.lists(st.integers(0, 5), min_size=2, max_size=2), min_size=1, max_size=6),
    codec=st.sampled_from(["lz4", "zstd:3"]),
    seed=st.integers(0, 99),
)
def test_any_dtype_and_shape(tmp_path_factory, dtype, shapes, codec, seed):
    generator = torch.Generator().manual_seed(seed)
    torch_dtype = DTYPES[dtype]

    def row(shape):
        size = max(1, torch_dtype.itemsize)
        data = torch.randint(0, 2 if dtype == "bool" else 256, (*shape, size), dtype=torch.uint8, generator=generator)
        return data.view(torch_dtype).reshape(shape) if dtype != "bool" else data[..., 0].bool()

    rows = [row(shape) for shape in shapes]
    folder = tmp_path_factory.mktemp("any")
    raw = memfeed.cache(rows, folder / "raw.mf", fields=["value"], workers=0, progress=False)
    coded = memfeed.recode(raw, folder / "coded.mf", {"value": codec}, progress=False)
    for index, expected in enumerate(rows):
        found = coded[index]
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert torch.equal(found.view(torch.uint8), expected.contiguous().view(torch.uint8)) or not expected.numel()


def damaged(path, name, change):
    heap = path / name / "heap.bin"
    heap.chmod(0o644)
    data = bytearray(heap.read_bytes())
    change(data)
    heap.write_bytes(bytes(data))
    return memfeed.open(path)


@pytest.mark.parametrize("name", ["x", "image"])
def test_a_damaged_blob_names_row_and_field(tmp_path, name):
    path = tmp_path / "s.mf"
    memfeed.cache(Samples(), path, forms=CODED, workers=0, progress=False)

    def cut(data):
        data[4:40] = bytes(36)

    store = damaged(path, name, cut)
    with pytest.raises(CorruptStoreError, match=rf"row 0 of field {name}: .*verify"):
        store[0]
    with pytest.raises(CorruptStoreError, match=f"of field {name}"):
        list(memfeed.Loader(store, 16))
    assert equal(store[50], Samples()[50])
    with pytest.raises(CorruptStoreError):
        store.verify(progress=False)


def test_a_blob_that_claims_more_than_its_field_takes_no_memory(tmp_path):
    path = tmp_path / "s.mf"
    memfeed.cache(Samples(), path, forms={"image": "zstd"}, workers=0, progress=False)

    def grow(data):
        data[4:16] = np.array([3, 60_000, 60_000], "<u4").tobytes()

    with pytest.raises(CorruptStoreError, match="4 GiB"):
        damaged(path, "image", grow)[0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (('"codec": "zstd"', '"codec": "brotli"'), "codec 'brotli'"),
        (('"level": 1', '"level": 99'), "level"),
        (('"level": 1', '"level": "1"'), "level"),
        (('"kind": "coded"', '"kind": "bytes"'), "coding"),
        (('"dtype": "int16"', '"dtype": "int17"'), "int17"),
        (('"version": 3', '"version": 2'), "features of version 3"),
        (('"version": 3', '"version": 4'), "upgrade memfeed"),
    ],
)
def test_what_a_manifest_may_not_say_of_a_codec(tmp_path, change, said):
    path = tmp_path / "s.mf"
    memfeed.cache(torch.arange(2000, dtype=torch.int16).view(20, 100), path, forms="zstd", progress=False)
    manifest = path / "memfeed.json"
    text = manifest.read_text()
    assert change[0] in text
    manifest.chmod(0o644)
    manifest.write_text(text.replace(*change))
    with pytest.raises(StoreError, match=said):
        memfeed.open(path)
