"""Windows over rows: each view equals a slow reference that looks at one row after another."""

import pickle
from collections import namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch.utils.data import DataLoader, Subset, default_collate

import memfeed
from memfeed.errors import FieldError, RowError, StoreError
from support import Made, equal

LENGTHS = [5, 1, 12, 3, 30, 2]
IDS = [7, 3, 4, 0, 9, 1]  # of the episodes, in no order
Named = namedtuple("Named", "image action")


def sample(row, episode):
    return {
        "image": torch.full((2, 3), row % 256, dtype=torch.uint8),
        "action": float(row),
        "episode": episode,
        "tokens": torch.arange(row % 4),
        "text": f"row {row}",
    }


def samples():
    ids = np.repeat(IDS, LENGTHS)
    return [sample(row, int(episode)) for row, episode in enumerate(ids)]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return memfeed.cache(Made(samples()), tmp_path_factory.mktemp("windows") / "a.mf", progress=False)


def reference(rows, at, offsets, within):
    """Return the sample at position ``at`` of some samples, and the masks, step by step."""
    episode = [row for row in range(len(rows)) if within is None or rows[row][within] == rows[at][within]]
    found = dict(rows[at])
    for name, steps in offsets.items():
        seen = [min(max(at + step, episode[0]), episode[-1]) for step in steps]
        found[name] = torch.stack([torch.as_tensor(rows[row][name]) for row in seen])
        if name == "action":
            found[name] = found[name].to(torch.float64)
        found[f"{name}_mask"] = torch.tensor([at + step in episode for step in steps])
    return found


OFFSETS = st.lists(st.integers(-15, 15), min_size=1, max_size=6)
ASKED = st.dictionaries(st.sampled_from(["image", "action"]), OFFSETS, min_size=1)


@settings(max_examples=40)
@given(ASKED, st.sampled_from(["episode", None]), st.data())
def test_a_view_equals_the_slow_reference(store, asked, within, data):
    rows = samples()
    view = store.windows(asked, within=within)
    assert len(view) == len(rows)
    at = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=5))
    expected = [reference(rows, row, asked, within) for row in at]
    assert all(equal(view[row], one) for row, one in zip(at, expected, strict=True))
    batch = view[at]
    for key in expected[0]:
        if key not in ("tokens", "text"):
            assert equal(batch[key], default_collate([one[key] for one in expected])), key
    assert batch["text"] == [one["text"] for one in expected]
    assert equal(list(batch["tokens"].unbind()), [one["tokens"] for one in expected])


@settings(max_examples=40)
@given(ASKED, st.lists(st.integers(0, len(LENGTHS) - 1), min_size=1, unique=True), st.integers(0, 3), st.booleans())
def test_windows_of_a_subset_see_only_its_rows(store, asked, episodes, left_out, within):
    """The episodes come in any order, and their first rows are left out."""
    begins = np.cumsum([0, *LENGTHS])
    chosen = [row for one in episodes for row in range(begins[one], begins[one + 1])[left_out:]]
    rows = [samples()[row] for row in chosen]
    view = store.subset(chosen).windows(asked, within="episode" if within else None)
    assert len(view) == len(rows)
    for at in range(len(rows)):
        assert equal(view[at], reference(rows, at, asked, "episode" if within else None))


@settings(max_examples=30)
@given(ASKED, st.sampled_from(["episode", None]))
def test_complete_gives_the_rows_whose_masks_are_all_true(store, asked, within):
    rows = samples()
    padded = [reference(rows, at, asked, within) for at in range(len(rows))]
    kept = [at for at, one in enumerate(padded) if all(one[f"{name}_mask"].all() for name in asked)]
    view = store.windows(asked, within=within, complete=True)
    assert len(view) == len(kept)
    assert view[:]["text"] == [f"row {at}" for at in kept] if kept else True
    for at, row in enumerate(kept):
        expected = {key: value for key, value in padded[row].items() if not key.endswith("_mask")}
        assert equal(view[at], expected)


def test_a_subset_of_a_view_sees_the_rows_around(store):
    view = store.windows({"action": [-1, 0, 1]}, within="episode")
    part = view.subset([7, 40])
    assert part[:]["action"].tolist() == [[6.0, 7.0, 8.0], [39.0, 40.0, 41.0]]
    assert part[0]["action_mask"].tolist() == [True, True, True]
    assert equal(part[:], view[[7, 40]])
    fields = view.select("action", "action_mask")
    assert equal(fields[40], {"action": view[40]["action"], "action_mask": view[40]["action_mask"]})


def test_row_numbers_in_a_reused_array(store):
    view, ids = store.windows({"action": [-1, 0]}, within="episode"), np.array([5, 9])
    assert view._batch(ids)["action"].tolist() == [[5.0, 5.0], [8.0, 9.0]]
    ids[:] = [6, 7]
    assert view._batch(ids)["action"].tolist() == [[6.0, 6.0], [6.0, 7.0]]


def test_interleaved_episodes_are_ordered_by_a_subset(path):
    """Vector environments write one row of each in turn."""
    made = memfeed.cache({"env": torch.arange(12) % 3, "x": torch.arange(12)}, path, progress=False)
    with pytest.raises(RowError, match=r"found row 3 of env 0 after rows of others \(it began at row 0\).*argsort"):
        made.windows({"x": [0, 1]}, within="env")
    ordered = made.subset(made.column("env").argsort(stable=True)).windows({"x": [0, 1]}, within="env")
    assert ordered[:]["x"][:4].tolist() == [[0, 3], [3, 6], [6, 9], [9, 9]]
    assert ordered[:]["x_mask"][:4, 1].tolist() == [True, True, True, False]


@pytest.mark.parametrize("kind", ["dict", "nested", "tensordict", "names", "namedtuple", "tuple", "value"])
def test_samples_of_every_nesting(kind, path):
    x, y = torch.arange(10), torch.rand(10, 2)
    data = {
        "dict": {"x": x, "y": y},
        "nested": {"obs": {"x": x, "y": y}, "z": x},
        "tensordict": TensorDict({"x": x, "y": y}, batch_size=[10]),
        "names": (x, y),
        "namedtuple": Named(x, y),
        "tuple": (x, y),
        "value": x,
    }[kind]
    made = memfeed.cache(data, path, progress=False, **({"fields": ("x", "y")} if kind == "names" else {}))
    name = {"nested": ("obs", "x"), "namedtuple": "image", "tuple": 0, "value": "value"}.get(kind, "x")
    whole = made.windows({name: [0, 1]}, within=None, complete=True)
    assert len(whole) == 9
    assert [type(whole[0]), type(whole[:])] == [type(made[0]), type(made[:])], "nothing is added"
    if kind in ("tuple", "value"):
        with pytest.raises(FieldError, match="expected .*dicts.*complete=True gives"):
            made.windows({name: [0, 1]}, within=None)
        return
    batch = made.windows({name: [0, 1]}, within=None)[8:]
    inner = batch["obs"] if kind == "nested" else batch
    name = "image" if kind == "namedtuple" else "x"
    assert inner[name].tolist() == [[8, 9], [9, 9]]
    assert inner[f"{name}_mask"].tolist() == [[True, True], [True, False]]
    if kind == "tensordict":
        assert batch.batch_size == (2,)
    if kind == "nested":
        assert batch["z"].tolist() == [8, 9]
        both = made.windows({"obs": [0, 1]}, within=None)[8:]["obs_mask"]
        assert both.tolist() == inner["x_mask"].tolist(), "one mask for a container"


@pytest.mark.parametrize("name", ["robot.arm", ("robot", "arm")])
def test_the_name_of_a_container(name, path):
    data = {"robot": {"arm": {"x": torch.arange(5), "y": torch.arange(5)}, "z": torch.arange(5)}}
    batch = memfeed.cache(data, path, progress=False).windows({name: [0, 1]}, within=None)[3:]
    assert batch["robot"]["arm"]["y"].tolist() == [[3, 4], [4, 4]]
    assert batch["robot"]["arm_mask"].tolist() == [[True, True], [True, False]]
    assert batch["robot"]["z"].tolist() == [3, 4]


def test_jagged_fields_beside_windows_still_share_their_offsets(path):
    rows = [{"a": {"x": i, "t": torch.arange(i % 3)}, "b": torch.arange(i % 3), "y": i} for i in range(9)]
    view = memfeed.cache(Made(rows), path, progress=False).windows({("a", "x"): [0], "y": [0, 1]}, within=None)
    batch = view[2:7]
    assert batch["a"]["t"].offsets() is batch["b"].offsets()


def test_the_view_pickles_and_compares(store):
    view = store.windows({"action": range(-3, 5)}, within="episode").subset(range(3, 20)).select("action", "episode")
    again = pickle.loads(pickle.dumps(view))
    assert again == view
    assert again.digest == view.digest
    assert equal(again[:], view[:])
    assert len(pickle.dumps(view)) < 2000
    others = [
        store.subset(range(3, 20)).select("action", "episode"),
        store.windows({"action": range(-2, 6)}, within="episode"),
        store.windows({"action": range(-3, 5)}, within=None),
        store.windows({"action": range(-3, 5)}, within="episode", complete=True),
        store.subset(range(6)).windows({"action": range(-3, 5)}, within="episode"),
    ]
    assert len({one.digest for one in [view, *others]}) == 6
    assert all(one != view for one in others)


def test_what_it_says_of_itself(store):
    view = store.windows({"image": [-1, 0], "action": range(16)}, within="episode", complete=True)
    assert (
        repr(view).splitlines()[-1] == "  (windows: image [-1, 0], action [0, 1, 2, ..., 15], within episode, complete)"
    )
    assert "image: uint8 [2, 2, 3]" in repr(view)
    padded = store.windows({"image": [-1, 0]}, within="episode")
    assert padded.nbytes == store.nbytes, "each row is kept once"
    assert padded.path == store.path
    assert [len(part) for part in padded.split([0.5, 0.5])] == [27, 26]
    assert torch.equal(padded.column("episode"), store.column("episode"))
    assert equal(padded.column("image")[5], padded[5]["image"])
    padded.verify()


def test_all_rows_at_once(store):
    view = store.select("image", "action", "episode").windows({"image": [-1, 0], "action": [2]}, within="episode")
    whole = view.to("cpu", progress=False)
    assert equal(whole, view[:])
    dest = {key: torch.empty_like(value) for key, value in whole.items()}
    view.into(dest)
    assert equal(dest, whole)
    with pytest.raises(StoreError, match=r"made when they are read \(windows: .*store\[:\] reads them all"):
        view.tensordict()


@pytest.mark.parametrize("workers", [0, 2])
def test_torchs_dataloader_reads_it(store, workers):
    view = store.windows({"image": [-1, 0]}, within="episode").select("image", "image_mask")
    found = list(DataLoader(view, 7, num_workers=workers, collate_fn=memfeed.Collate()))
    assert equal(torch.cat([one["image"] for one in found]), view[:]["image"])
    plain = list(DataLoader(Subset(view, range(9)), 3))  # default_collate
    assert equal(torch.cat([one["image_mask"] for one in plain]), view[:9]["image_mask"])


def test_windows_of_a_directory_that_tensordict_wrote(tmp_path):
    data = TensorDict({"obs": torch.rand(20, 4), "done": torch.arange(20) // 5}, batch_size=[20])
    data.memmap(str(tmp_path / "td"))
    store = memfeed.open(tmp_path / "td")
    view = store.windows({"obs": [0, 1]}, within="done")
    assert view.nbytes == store.nbytes
    assert torch.equal(view[:]["obs"][:, 0], data["obs"])
    assert torch.equal(view[:]["obs"][4], data["obs"][[4, 4]])


def test_rows_in_files_of_their_own(tmp_path):
    rows = [TensorDict({"obs": torch.full((3,), float(i))}, []) for i in range(6)]
    TensorDict.lazy_stack(rows).memmap(str(tmp_path / "lazy"))
    view = memfeed.open(tmp_path / "lazy").windows({"obs": [-1, 0]}, within=None)
    assert view[:]["obs"][:, :, 0].tolist() == [[max(i - 1, 0), i] for i in range(6)]


class TestErrors:
    def test_offsets(self, store):
        for wrong in ([], 3, [0.5], "ab", [None], [1 << 70]):
            with pytest.raises(RowError, match="expected a list or range of ints, counted in rows: "):
                store.windows({"image": wrong}, within=None)
        for wrong in ({}, [("image", [0])], None):
            with pytest.raises(FieldError, match="expected the offsets of one or more fields"):
                store.windows(wrong, within=None)
        with pytest.raises(FieldError, match="found two windows of field image"):
            store.windows({"image": [0], ("image",): [1]}, within=None)
        with pytest.raises(FieldError, match="found no field 'nope'"):
            store.windows({"nope": [0]}, within=None)
        far = store.windows({"action": [1 << 61, -(1 << 61)]}, within="episode")
        assert far[1]["action"].tolist() == [4.0, 0.0]
        assert not far[:]["action_mask"].any()

    def test_ragged_fields(self, store):
        with pytest.raises(
            FieldError, match=r"found windows of field tokens, which is jagged int64 \[\*\]; .*leave it out"
        ):
            store.windows({"tokens": [0]}, within="episode")
        with pytest.raises(FieldError, match="found windows of field text, which is str"):
            store.windows({"text": [0]}, within="episode")

    def test_within(self, store):
        for wrong in ("text", "action", "image", "tokens"):
            with pytest.raises(FieldError, match=f"found within='{wrong}'.*one int for each row"):
                store.windows({"image": [0]}, within=wrong)
        with pytest.raises(TypeError, match="within"):
            store.windows({"image": [0]})

    def test_a_random_split_comes_after_the_windows(self, store):
        train, _ = store.split([0.9, 0.1])
        with pytest.raises(
            RowError, match=r"found row \d+ of episode \d+ after rows of others.*before subset or split"
        ):
            train.windows({"image": [0]}, within="episode")

    def test_a_row_twice(self, store):
        with pytest.raises(RowError, match="found row 2 of the base store twice in this subset"):
            store.subset([0, 2, 2]).windows({"image": [0]}, within=None)

    def test_windows_of_windows(self, store):
        with pytest.raises(StoreError, match=r"found windows\(...\) of a view .* \(windows: .*expected one call"):
            store.windows({"image": [0]}, within=None).windows({"action": [0]}, within=None)

    def test_a_key_in_use(self, path):
        made = memfeed.cache({"x": torch.arange(3), "x_mask": torch.arange(3)}, path, progress=False)
        with pytest.raises(FieldError, match="found a field 'x_mask' beside 'x', whose mask needs that key"):
            made.windows({"x": [0]}, within=None)
        assert len(made.windows({"x": [0]}, within=None, complete=True)) == 3
