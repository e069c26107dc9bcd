import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset, default_collate, random_split

import memfeed
from forked_programs import run_program
from memfeed.errors import FieldError, RowError, StoreError
from support import Made, equal, rich_sample

N = 40


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return memfeed.cache(Made(rich_sample, N), tmp_path_factory.mktemp("s") / "a.mf", progress=False)


@pytest.fixture
def pairs(path):
    return memfeed.cache((torch.arange(30).view(10, 3), torch.arange(10) * 10), path, progress=False)


def test_one_row(store):
    for which in (3, -1, np.int64(5), torch.tensor(7), True):
        assert equal(store[which], rich_sample(int(which) % N))


@pytest.mark.parametrize(
    "which",
    [
        slice(2, 9),
        slice(None, None, 7),
        slice(9, 2, -2),
        slice(5, 5),
        [4, 1, 1],
        [-1],
        np.array([3, 0]),
        torch.tensor([2]),
        range(3),
        (),
    ],
)
def test_many_rows_are_a_batch(pairs, which):
    rows = list(range(10))[which] if isinstance(which, slice) else [int(i) % 10 for i in which]
    x, y = pairs[which]
    assert x.tolist() == [[3 * i, 3 * i + 1, 3 * i + 2] for i in rows]
    assert y.tolist() == [10 * i for i in rows]


def test_a_mask_selects_rows(pairs):
    assert pairs[torch.arange(10) % 4 == 1][1].tolist() == [10, 50, 90]
    with pytest.raises(RowError, match=r"found a mask of shape \(3,\); expected \(10,\)"):
        pairs[[True, False, True]]


@pytest.mark.parametrize(
    ("which", "error", "message"),
    [
        (10, RowError, r"found row 10; expected -10 to 9 \(the store has 10 rows\)"),
        (-11, RowError, "found row -11"),
        ([0, 10], RowError, r"found row 10; expected 0 to 9"),
        ([0, -11], RowError, r"found row -11; expected -10 to 9"),
        ("x", FieldError, r"found the index 'x'; rows have numbers: for a field use column\('x'\)"),
        (1.5, RowError, "found float as an index"),
        ([1.5], RowError, "found indices float64"),
        ([[1], [2]], RowError, r"found indices int64 \[2, 1\]"),
        (None, RowError, "found NoneType as an index"),
    ],
)
def test_indices_that_are_none(pairs, which, error, message):
    with pytest.raises(error, match=message):
        pairs[which]


def test_what_is_handed_out_is_a_copy(pairs):
    pairs[3][0].fill_(-1)
    pairs[2:5][0].fill_(-1)
    assert pairs[3][0].tolist() == [9, 10, 11]


def test_edits_through_a_column_stay_in_this_process(pairs):
    pairs.column(0)[3] = -1
    assert pairs[3][0].tolist() == [-1, -1, -1]
    assert memfeed.open(pairs.path)[3][0].tolist() == [9, 10, 11]


def test_columns_share_the_map(store):
    image = store.column("image")
    assert image.shape == (N, 3, 4, 5)
    assert image.data_ptr() == store.column("image").data_ptr()
    assert torch.equal(store.column(("point", "x"))[5], rich_sample(5)["point"].x)
    boxes = store.column("boxes")
    assert len(boxes) == N
    assert torch.equal(boxes[7], rich_sample(7)["boxes"])
    assert boxes[7].data_ptr() == boxes[7].data_ptr()
    assert [store.column("text")[i] for i in range(3)] == [rich_sample(i)["text"] for i in range(3)]
    assert store.column("maybe")[3] is None
    with pytest.raises(FieldError, match="found no field 'nope'; expected one of: image, label"):
        store.column("nope")


def test_tensordict_has_the_keys_of_load_memmap(store):
    from tensordict import TensorDict

    ours, theirs = store.tensordict(), TensorDict.load_memmap(str(store.path))
    assert ours.batch_size == theirs.batch_size
    assert set(ours.keys(True, True)) == set(theirs.keys(True, True))
    assert (ours == theirs).all()
    assert store.subset([3, 1]).tensordict()["label"].tolist() == [3, 1]


def test_select(store):
    part = store.select("image", ("point", "y"), "td.a")
    sample = part[4]
    assert list(sample) == ["image", "point", "td"]
    assert equal(sample["point"], {"y": rich_sample(4)["point"].y})
    assert list(part.select("td")[3]) == ["td"]
    assert part.nbytes < store.nbytes
    with pytest.raises(FieldError, match="found no field 'label'"):
        part.select("label")
    with pytest.raises(FieldError, match=r"found select\(\) without a field; expected at least one of"):
        store.select()
    assert list(memfeed.open(store.path, select=["image"])[0]) == ["image"]


def test_subsets_of_subsets(pairs):
    part = pairs.subset([8, 6, 4]).subset([2, 0])
    assert [y for _, y in part] == [40, 80]
    assert part.column(1).tolist() == [40, 80]
    assert pairs.subset(range(3, 6)).column(1).data_ptr() == pairs.column(1)[3:].data_ptr(), "one run is a view"
    with pytest.raises(RowError, match="found row 10"):
        pairs.subset([10])


def test_pickles_are_small_and_reopen(store, tmp_path):
    view = store.select("image", "label").subset([5, 3])
    data = pickle.dumps(view)
    assert len(data) < 1000
    assert equal(pickle.loads(data)[:], view[:])
    (tmp_path / "pickle").write_bytes(data)
    code = "import pickle, sys; s = pickle.load(open(sys.argv[1], 'rb')); print([int(r['label']) for r in s])"
    assert run_program(code, tmp_path / "pickle", at=tmp_path) == "[5, 3]\n"


def test_a_pickle_of_a_store_that_was_replaced_is_an_error(path):
    data = pickle.dumps(memfeed.cache(torch.arange(5), path, progress=False))
    memfeed.cache(torch.arange(6), path, overwrite=True, progress=False)
    with pytest.raises(StoreError, match="found another store than the one that was sent here"):
        pickle.loads(data)


# --- torch's own DataLoader, with nothing of ours


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "wrap", [lambda s: s, lambda s: Subset(s, [5, 2, 9, 7]), lambda s: random_split(s, [4, N - 4])[0]]
)
def test_a_plain_dataloader_gives_what_default_collate_gives(store, workers, wrap):
    simple = store.select("image", "label", "weight", "flag", "point", "text")
    data = wrap(simple)
    for batch, rows in zip(DataLoader(data, 4, num_workers=workers), batches_of(data), strict=True):
        assert equal(batch, default_collate([simple[i] for i in rows]))


def batches_of(data):
    rows = list(data.indices) if isinstance(data, Subset) else list(range(len(data)))
    return [rows[i : i + 4] for i in range(0, len(rows), 4)]


def test_getitems_gives_a_list_of_samples_with_their_rows(store):
    samples = store.subset([7, 5, 3]).__getitems__([2, 0])
    assert isinstance(samples, list)
    assert samples.ids.tolist() == [3, 7]
    assert equal(samples[0], rich_sample(3))
    assert equal(samples[1], rich_sample(7))


def test_an_attribute_that_a_program_sets_is_said_to_change_nothing(tmp_path, capsys):
    made = memfeed.cache({"x": torch.arange(4)}, tmp_path / "a.mf", progress=False)
    loader = memfeed.Loader([made, made], 2)
    capsys.readouterr()
    loader.dataset.is_training = False
    assert (
        "the attribute 'is_training', which the program sets on a store, changes no sample" in capsys.readouterr().err
    )
    assert loader.dataset.is_training is False
    with pytest.raises(AttributeError):
        made.transform = None
