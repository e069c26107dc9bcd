"""What a store keeps beside its columns: classes, class_to_idx and targets of the dataset, metadata of the user."""

import json
import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, random_split

import memfeed
from memfeed.errors import CorruptStoreError, SchemaError, StaleStoreError, StoreError
from support import cache

N = 40
CLASSES = ["ants", "bees", "cats"]


class Labelled(Dataset):
    """A dataset with torchvision's attributes; `shift` changes the labels of samples, not the targets."""

    def __init__(self, n=N, shift=0, targets=list, classes=CLASSES, bad=(), class_to_idx=None):
        self.n, self.shift = n, shift
        self.classes = classes
        self.class_to_idx = class_to_idx or {str(name): index for index, name in enumerate(classes)}
        self.targets = targets([i % 3 for i in range(n)])
        self.bad = bad

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        if i in self.bad:
            raise OSError(f"sample {i} is broken")
        return torch.full((4,), i), i % 3 + self.shift


def manifest(path):
    return json.loads((path / "memfeed.json").read_text())


def test_torchvision_attributes_come_back(path):
    store = cache(Labelled(), path)
    again = memfeed.open(path)
    for one in (store, again, pickle.loads(pickle.dumps(again))):
        assert one.classes == CLASSES
        assert one.class_to_idx == {"ants": 0, "bees": 1, "cats": 2}
        assert one.targets == [i % 3 for i in range(N)]
        assert one.targets is one.targets, "made once"
    assert manifest(path)["attributes"]["targets"] == {"form": "list", "field": 1}, "a column has them already"
    assert not (path / "targets.bin").exists()
    store.verify()


@pytest.mark.parametrize("form", [torch.tensor, np.array])
def test_tensors_and_arrays_come_back_as_a_tensor(path, form):
    targets = cache(Labelled(targets=form), path).targets
    assert isinstance(targets, torch.Tensor)
    assert targets.dtype is torch.int64
    assert targets.tolist() == [i % 3 for i in range(N)]
    targets[0] = 7
    assert memfeed.open(path).targets[0] == 0


@pytest.mark.parametrize("shift", [0, 1], ids=["column", "file"])
def test_views_have_the_targets_of_their_rows(path, shift):
    store = cache(Labelled(shift=shift), path)
    assert (path / "targets.bin").exists() == bool(shift)
    assert store.targets == [i % 3 for i in range(N)], "the dataset's own, not those that samples have"
    assert store.subset([5, 3, 3]).targets == [2, 0, 0]
    for part in store.split([0.5, 0.5]):
        assert part.targets == [int(label) - shift for _, label in part]
    assert store.select(0).targets == store.targets
    assert store.subset([5]).select(0).classes == CLASSES
    assert memfeed.Loader(store, 4).dataset.classes == CLASSES
    store.verify()


@pytest.mark.parametrize("shift", [0, 1], ids=["column", "file"])
def test_skipped_samples_have_no_targets(path, shift):
    store = cache(Labelled(shift=shift, bad=(3, 17)), path, on_error="skip")
    assert store.targets == [i % 3 for i in range(N) if i not in (3, 17)]


def test_subsets_and_concatenations(path):
    base = Labelled()
    part = cache(Subset(base, [7, 4, 5]), path)
    assert part.targets == [1, 1, 2]
    assert part.classes == CLASSES
    split = random_split(base, [10, 30], torch.Generator().manual_seed(0))[0]
    assert cache(split, path.with_name("b.mf")).targets == [i % 3 for i in split.indices]
    both = cache(ConcatDataset([base, Subset(base, [2])]), path.with_name("c.mf"))
    assert both.targets == [*(i % 3 for i in range(N)), 2]
    assert both.classes == CLASSES
    other = cache(ConcatDataset([base, Labelled(classes=["a", "b", "c"])]), path.with_name("d.mf"))
    assert len(other.targets) == 2 * N
    assert not hasattr(other, "classes"), "they are not the same"


def test_classes_of_several_names(path):
    classes = [("tench", "Tinca tinca"), ("goldfish",), ("great white shark", "white shark")]
    assert cache(Labelled(classes=classes), path).classes == classes


def test_torchvision_itself(path, tmp_path):
    torchvision = pytest.importorskip("torchvision")
    from PIL import Image

    for number in range(6):
        file = tmp_path / "tree" / ("wasps" if number % 2 else "moths") / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4), (number, 0, 0)).save(file)
    to_tensor = torchvision.transforms.PILToTensor()
    for name, transform in (("a.mf", None), ("b.mf", lambda label: label + 10)):
        folder = torchvision.datasets.ImageFolder(tmp_path / "tree", to_tensor, target_transform=transform)
        store = cache(folder, tmp_path / name, workers=0)
        assert (store.classes, store.class_to_idx) == (folder.classes, folder.class_to_idx)
        assert store.targets == folder.targets
        assert (tmp_path / name / "targets.bin").exists() == (transform is not None)


def test_hugging_face_class_labels(path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"x": datasets.Value("int64"), "label": datasets.ClassLabel(names=["neg", "pos"])})
    given = datasets.Dataset.from_dict({"x": list(range(20)), "label": [0, 1] * 10}, features=features)
    store = cache(given.with_format("torch"), path)
    assert store.classes == ["neg", "pos"]
    assert store.class_to_idx == {"neg": 0, "pos": 1}
    assert store.targets == [0, 1] * 10
    assert not (path / "targets.bin").exists()


@pytest.mark.parametrize(
    "attributes",
    [
        {"targets": ["a.xml"] * N},
        {"targets": [0.5] * N},
        {"targets": [1] * (N - 1)},
        {"targets": [[1, 2]] * N},
        {"targets": [1, "a"] * (N // 2)},
        {"targets": torch.zeros(N, 2, dtype=torch.int64)},
        {"targets": np.full(N, 2**64 - 1, np.uint64)},
        {"targets": None, "classes": 3, "class_to_idx": [1]},
        {"targets": 3, "classes": [object()], "class_to_idx": {"a": "b"}},
        {"classes": [], "targets": {}, "class_to_idx": {1: 1}},
    ],
)
def test_what_is_no_such_attribute_is_not_kept(path, attributes):
    given = Labelled()
    given.__dict__.update(attributes)
    store = cache(given, path)
    for name in attributes:
        with pytest.raises(AttributeError, match=rf"found no {name} in .*: write the store again with overwrite=True$"):
            getattr(store, name)


def test_a_property_that_raises_is_not_kept(path):
    class Raises(Labelled):
        @property
        def classes(self):
            raise RuntimeError("not downloaded")

        @classes.setter
        def classes(self, value):
            pass

    assert not hasattr(cache(Raises(), path), "classes")


def test_a_store_without_any_says_so(path):
    store = cache((torch.arange(4), torch.arange(4)), path)
    assert [hasattr(store, name) for name in ("classes", "class_to_idx", "targets")] == [False] * 3
    assert store.metadata == {}
    assert {"attributes", "metadata"}.isdisjoint(manifest(path)), "readers from before these keys read it"
    joined = memfeed.Loader([store, store]).dataset
    assert not hasattr(joined, "targets")


def test_a_store_of_a_store_keeps_them(path):
    store = cache(Labelled(shift=1), path)
    copied = cache(store.subset([4, 5]), path.with_name("b.mf"), allow="copy")
    assert copied.targets == [1, 2]
    assert copied.classes == CLASSES


def test_other_classes_are_stale(path):
    cache(Labelled(), path)
    with pytest.raises(StaleStoreError, match=r"found classes of 4 entries, expected the 3 .* \('dogs' is new\)"):
        cache(Labelled(classes=[*CLASSES, "dogs"]), path)
    with pytest.raises(StaleStoreError, match="found classes of 3 entries, expected the 3 that were kept, in their"):
        cache(Labelled(classes=CLASSES[::-1]), path)
    with pytest.raises(StaleStoreError, match="found class_to_idx of 3 entries"):
        cache(Labelled(class_to_idx={"ants": 1, "bees": 0, "cats": 2}), path)
    assert cache(Labelled(classes=CLASSES[::-1]), path, overwrite=True).classes == CLASSES[::-1]


# --- metadata of the user


def test_metadata_comes_back_and_belongs_to_the_caller(path):
    given = {"made": "2026", "mean": [0.4, 0.5], "split": {"seed": 3, "ids": []}, "none": None}
    store = cache(Labelled(), path, metadata=given)
    given["mean"].append(1)
    for one in (store, memfeed.open(path), store.subset([1]), pickle.loads(pickle.dumps(store))):
        assert one.metadata == {"made": "2026", "mean": [0.4, 0.5], "split": {"seed": 3, "ids": []}, "none": None}
    store.metadata["made"] = "never"
    assert store.metadata["made"] == "2026"


@pytest.mark.parametrize("repair", [False, True])
def test_metadata_survives_overwrite_and_repair(path, repair):
    store = cache(Labelled(shift=1), path, metadata={"a": 1})
    if repair:
        for name in ("0.memmap", "targets.bin"):
            damage(path / name)
            with pytest.raises(CorruptStoreError, match="the targets of the dataset" if "bin" in name else "field 0"):
                memfeed.open(path).verify()
            store = memfeed.repair(Labelled(shift=1), path)
            store.verify()
    else:
        store = cache(Labelled(shift=1), path, overwrite=True)
    assert store.metadata == {"a": 1}
    assert store.classes == CLASSES
    assert store.targets == [i % 3 for i in range(N)]
    assert cache(Labelled(), path, overwrite=True, metadata={}).metadata == {}


def damage(file):
    file.chmod(0o644)
    content = bytearray(file.read_bytes())
    content[9] ^= 1
    file.write_bytes(content)


def test_targets_that_changed_are_not_repaired(path):
    cache(Labelled(shift=1), path)
    damage(path / "targets.bin")
    with pytest.raises(
        StaleStoreError,
        match=r"other values in dataset\.targets: 40 of 40 targets, the first of sample 0: found 9, expected 0",
    ):
        memfeed.repair(Labelled(shift=1, targets=lambda numbers: [9 - one for one in numbers]), path)


def test_other_metadata_is_an_error(path):
    cache(Labelled(), path, metadata={"a": 1, "b": 2})
    assert cache(Labelled(), path).metadata == {"a": 1, "b": 2}
    assert cache(Labelled(), path, metadata={"b": 2, "a": 1}).metadata == {"a": 1, "b": 2}
    with pytest.raises(StaleStoreError, match="found metadata= that differs from that of the store in a, c; .*leave"):
        cache(Labelled(), path, metadata={"a": 2, "b": 2, "c": None})


def test_a_build_that_was_interrupted_takes_the_metadata_of_the_call_that_ends_it(path):
    with pytest.raises(memfeed.errors.SampleError):
        cache(Labelled(bad=(30,)), path, metadata={"call": 1}, workers=0)
    assert cache(Labelled(), path, metadata={"call": 2}, workers=0).metadata == {"call": 2}


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ([1], r"found metadata=\[1\]; expected a dict of JSON values"),
        (
            {"a": {"b": [0, torch.zeros(1)]}},
            r"found metadata\['a'\]\['b'\]\[1\] = tensor\(\[0\.\]\); expected None, bool",
        ),
        ({"a": {1: 2}}, r"found metadata\['a'\] with the key 1 = 2; expected"),
        ({"x": float("nan")}, r"found metadata\['x'\] = nan; expected"),
        ({"x": (1, 2)}, r"found metadata\['x'\] = \(1, 2\); expected"),
        ({"x": "y" * (1 << 20)}, "found metadata of 1,048,584 bytes, above 1,048,576; expected less"),
    ],
)
def test_metadata_that_is_no_json_is_refused(path, metadata, message):
    for write in (lambda: cache(Labelled(), path, metadata=metadata), lambda: memfeed.Writer(path, metadata=metadata)):
        with pytest.raises(SchemaError, match=message) as caught:
            write()
        assert len(str(caught.value)) < 400
    assert not path.exists()


def test_metadata_too_deep_or_circular_is_refused(path):
    deep: dict = {}
    for _ in range(70):
        deep = {"x": deep}
    with pytest.raises(SchemaError, match="found metadata nested more than 64 deep"):
        cache(Labelled(), path, metadata=deep)
    circular: dict = {}
    circular["self"] = circular
    with pytest.raises(SchemaError, match="expected None, bool"):
        cache(Labelled(), path, metadata=circular)


def test_a_writer_keeps_metadata(path):
    with memfeed.Writer(path, metadata={"run": 7}) as w:
        w.append({"x": 1})
    assert memfeed.open(path).metadata == {"run": 7}


# --- hostile manifests


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (("metadata",), [1], "breaks the format"),
        (("metadata",), {"x": "y" * (1 << 20)}, "found metadata of 1,048,584 bytes"),
        (("metadata",), {"x": json.loads("[" * 70 + "]" * 70)}, "found metadata nested more than 64 deep"),
        (("attributes",), {"classes": "ants"}, "breaks the format"),
        (("attributes",), {"classes": [None]}, "breaks the format"),
        (("attributes",), {"classes": [["a", 1]]}, "breaks the format"),
        (("attributes",), {"class_to_idx": {"a": "0"}}, "breaks the format"),
        (("attributes",), {"class_to_idx": {"a": 1 << 63}}, "found a class number beyond 64 bits"),
        (("attributes",), {"other": 1}, "breaks the format"),
        (("attributes", "targets"), {"form": "array", "field": 1}, "breaks the format"),
        (("attributes", "targets"), {"form": "list", "field": 2}, "found targets in field 2, which is not there"),
        (("attributes", "targets"), {"form": "list", "field": -1}, "found targets in field -1, which is not there"),
        (("attributes", "targets"), {"form": "list", "field": 0}, "found targets in field '0', which holds no class"),
        (("attributes", "targets"), {"form": "list"}, "found a list of files that is not that of its fields"),
        (("files", "targets.bin"), 320, "found a list of files that is not that of its fields"),
    ],
)
def test_a_manifest_that_lies_is_refused(path, keys, value, message):
    cache(Labelled(), path, metadata={"a": 1})
    document = manifest(path)
    at = document
    for key in keys[:-1]:
        at = at[key]
    at[keys[-1]] = value
    (path / "memfeed.json").chmod(0o644)
    (path / "memfeed.json").write_text(json.dumps(document))
    with pytest.raises(StoreError, match=message):
        memfeed.open(path)


def test_a_targets_file_of_another_size_is_refused(path):
    cache(Labelled(shift=1), path)
    (path / "targets.bin").chmod(0o644)
    (path / "targets.bin").write_bytes(b"\0" * 8)
    with pytest.raises(CorruptStoreError, match=r"targets\.bin: found 8 bytes; expected 320"):
        memfeed.open(path)
