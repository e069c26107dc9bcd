"""A store into memory elsewhere: chunks, views, structures, state_dicts, and what does not fit."""

import sys

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import memfeed
from memfeed.errors import CorruptStoreError, FieldError, LoaderError, StoreError
from memfeed.store import bulk
from support import Made, equal, rich_sample

N = 23


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.mf"


@pytest.fixture(params=[1, 700, 1 << 26], ids=["a row a chunk", "a few rows", "all rows"])
def chunk(request, monkeypatch):
    monkeypatch.setattr(bulk, "CHUNK_BYTES", request.param)


def pair(n=N):
    images = torch.randint(0, 256, (n, 3, 5, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return images, torch.arange(n)


# --- to


@pytest.mark.usefixtures("chunk")
def test_all_rows_of_every_kind_of_field(path):
    store = memfeed.cache(Made(rich_sample, N), path, progress=False)
    assert equal(store.to("cpu", progress=False), store[:])
    rows = [3, 1, 20, 21, 22, 3]
    assert equal(store.subset(rows).to("cpu", progress=False), store[rows])
    assert equal(store.subset([]).to("cpu", progress=False), store[[]])


@pytest.mark.usefixtures("chunk")
def test_jagged_fields_of_equal_lengths_share_their_offsets(path):
    samples = [{"a": torch.arange(i % 4), "b": torch.arange(i % 4) * 2.0, "c": torch.arange(i % 3)} for i in range(N)]
    batch = memfeed.cache(samples, path, progress=False).to("cpu", progress=False)
    assert batch["a"].offsets() is batch["b"].offsets()
    (batch["a"] + batch["b"]).sum()
    assert all(torch.equal(batch["c"][i], samples[i]["c"]) for i in range(N))


def test_the_memory_is_the_callers(path):
    store = memfeed.cache(pair(), path, progress=False)
    images, _ = store.to("cpu", progress=False)
    images.zero_()
    assert torch.equal(store[:][0], pair()[0])


def test_weights_come_as_they_are(path):
    weights = TensorDict({"w": torch.rand(3, 4), "deep": {"b": torch.rand(5)}})
    weights.memmap(path)
    loaded = memfeed.open(path).to("cpu", progress=False)
    assert loaded.batch_size == torch.Size([])
    assert torch.equal(loaded["deep", "b"], weights["deep", "b"])


def test_a_bar_is_shown_for_a_copy_that_takes_long(path, capsys, monkeypatch):
    monkeypatch.setattr("memfeed.store.bulk.SLOW_SECONDS", -1.0)
    store = memfeed.cache(pair(), path, progress=False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    store.to("cpu")
    assert "a.mf to cpu: 100%" in capsys.readouterr().err
    store.to("cpu", progress=False)
    assert not capsys.readouterr().err


def test_what_was_loaded_can_be_trained_from(path):
    memfeed.cache(pair(), path, progress=False)
    seen = torch.cat(
        [y for _, y in memfeed.Loader(tuple(memfeed.open(path).to("cpu", progress=False)), 4, shuffle=True, seed=0)]
    )
    assert seen.sort().values.tolist() == list(range(N))


def test_a_tensordict_says_on_which_device_it_is(path):
    inner = TensorDict({"x": torch.arange(4)}, [4])
    for data in (inner, TensorDict({"inner": inner}, [4]), {"inner": inner, "y": torch.arange(4)}):
        loaded = memfeed.cache(data, path, progress=False, overwrite=True).to("cpu", progress=False)
        found = loaded if isinstance(loaded, TensorDict) else loaded["inner"]
        assert found.device == torch.device("cpu")
        assert equal(loaded, memfeed.open(path)[:])


def test_devices_that_are_not_there(path, monkeypatch):
    store = memfeed.cache(pair(), path, progress=False)
    with pytest.raises(LoaderError, match="found device 'gpu'"):
        store.to("gpu")
    monkeypatch.setattr(bulk, "check_device", lambda device: torch.device(device))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 2000))
    with pytest.raises(StoreError, match="a.mf: found 1.0 KB free on cuda; expected 1.6 KB for all rows"):
        store.to("cuda", progress=False)


# --- into


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("rows", [None, [4, 2, 2, 9], range(5, 15)])
def test_tensors_that_are_there_are_filled(path, rows):
    store = memfeed.cache(pair(), path, progress=False)
    store = store if rows is None else store.subset(list(rows))
    n = len(store)
    dest = [torch.zeros(n, 3, 5, 4, dtype=torch.uint8), torch.zeros(n, dtype=torch.int64)]
    assert store.into(dest) == ([], [])
    assert torch.equal(dest[0], store[:][0])
    assert torch.equal(dest[1], store[:][1])


def test_tensordicts_and_strided_tensors(path):
    td = TensorDict({"x": torch.rand(N, 4), "deep": {"y": torch.arange(N)}}, [N])
    store = memfeed.cache(td, path, progress=False)
    room = torch.zeros(4, N).T
    dest = TensorDict({"x": room, "deep": {"y": torch.zeros(N, dtype=torch.int64)}}, [N])
    store.into(dest)
    assert torch.equal(room, td["x"])
    assert (dest == td).all()


@pytest.mark.parametrize("nested", [False, True], ids=["by dotted names", "by modules"])
def test_a_models_weights(path, nested):
    torch.manual_seed(0)
    model, other = (torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)) for _ in range(2))
    weights = TensorDict.from_module(model).data if nested else TensorDict(dict(model.state_dict()))
    weights.memmap(path)
    memfeed.open(path).into(other.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))


def test_parameters_that_need_gradients(path):
    TensorDict({"w": torch.ones(3)}).memmap(path)
    weight = torch.nn.Parameter(torch.zeros(3))
    memfeed.open(path).into({"w": weight})
    assert weight.tolist() == [1, 1, 1]
    assert weight.requires_grad


def test_fields_on_one_side_only(path):
    store = memfeed.cache(pair(), path, progress=False, fields=("image", "label"))
    dest = {"image": torch.zeros(N, 3, 5, 4, dtype=torch.uint8), "more": torch.zeros(2)}
    with pytest.raises(
        FieldError, match=r"no tensor for the fields \['label'\], and no field for the tensors \['more'\]"
    ):
        store.into(dest)
    assert not dest["image"].any()
    with pytest.raises(FieldError, match=r"no tensor for the fields none, and no field for the tensors \['more'\]"):
        store.select("image").into(dest)
    with pytest.raises(FieldError, match=r"no tensor for the fields \['label'\], and no field for the tensors none"):
        store.into({"image": dest["image"]})
    keys = memfeed.open(path).into(dest, strict=False)
    assert keys.missing_keys == ["label"]
    assert keys.unexpected_keys == ["more"]
    assert torch.equal(dest["image"], store[:][0])


@pytest.mark.parametrize(
    ("dest", "words"),
    [
        (
            [torch.zeros(N, 3, 5, 4, dtype=torch.uint8), torch.zeros(N + 1, dtype=torch.int64)],
            r"\[24\] to fill; expected",
        ),
        (
            [torch.zeros(N, 3, 5, 4, dtype=torch.uint8), torch.zeros(N)],
            r"torch.float32 \[23\] to fill; expected torch.int64",
        ),
        ([torch.zeros(N, 3, 5, 4, dtype=torch.uint8), np.zeros(N)], "found ndarray at '1'"),
    ],
)
def test_nothing_is_written_where_something_does_not_fit(path, dest, words):
    store = memfeed.cache(pair(), path, progress=False)
    with pytest.raises(FieldError, match=words):
        store.into(dest)
    assert not dest[0].any()


def test_ragged_fields_have_no_place(path):
    store = memfeed.cache([{"t": torch.arange(i)} for i in range(4)], path, progress=False)
    with pytest.raises(FieldError, match="t: found .*; expected a field whose rows have one shape"):
        store.into({"t": torch.zeros(4, 3)})


def test_into_reads_the_files_and_maps_nothing(path):
    store = memfeed.cache({"x": torch.arange(60.0).view(20, 3), "y": torch.arange(20)}, path, progress=False)
    store = memfeed.open(path)
    dest = {"x": torch.zeros(20, 3), "y": torch.zeros(20, dtype=torch.int64)}
    before = dest["x"]._version
    store.into(dest)
    assert torch.equal(dest["x"], torch.arange(60.0).view(20, 3))
    assert dest["y"].tolist() == list(range(20))
    assert dest["x"]._version > before  # autograd sees the change
    assert not any("data" in column.__dict__ for column in store._view.columns)
    part = {"x": torch.zeros(5, 3), "y": torch.zeros(5, dtype=torch.int64)}
    store.subset(range(7, 12)).into(part)
    assert part["y"].tolist() == list(range(7, 12))
    assert torch.equal(part["x"], torch.arange(60.0).view(20, 3)[7:12])
    store.subset([3, 1, 2, 2, 0]).into(part)
    assert part["y"].tolist() == [3, 1, 2, 2, 0]
    strided = {"x": torch.zeros(3, 20).T, "y": torch.zeros(40, dtype=torch.int64)[::2]}
    store.into(strided)
    assert torch.equal(strided["x"], dest["x"])
    assert torch.equal(strided["y"], dest["y"])
    store.column("y").add_(1)  # an edit of this process
    store.into(dest)
    assert dest["y"].tolist() == list(range(1, 21))


def test_into_of_a_file_that_was_cut(path):
    memfeed.cache({"x": torch.arange(20)}, path, progress=False)
    store = memfeed.open(path)
    (path / "x.memmap").chmod(0o644)
    (path / "x.memmap").write_bytes(b"1234")
    with pytest.raises(CorruptStoreError, match="found 4 bytes; expected 160: the file was cut"):
        store.into({"x": torch.zeros(20, dtype=torch.int64)})
