"""Labels that MixUp and CutMix take are checked on the CPU before the device has them, on a simulated device."""

from collections import namedtuple

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import memfeed.transforms as T
from memfeed import Loader
from memfeed.errors import TransformError
from memfeed.loading import host_labels
from simulated_cuda import simulated

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there: the simulation would replace it"),
    pytest.mark.skipif(
        not hasattr(torch._C, "_ensureCUDADeviceGuardSet"), reason="this torch cannot have tensors on a simulated GPU"
    ),
]
N, CLASSES, BAD_ROW = 40, 5, 17
Pair = namedtuple("Pair", "image label")
PLACEMENTS = ["mapped", "pinned", "device"]


@pytest.fixture(autouse=True)
def _without_compilers(monkeypatch):
    monkeypatch.setattr("memfeed.transforms.backends.passes.gpu_kernel", lambda device: None)


def data(bad=None, dtype=torch.int64):
    labels = torch.arange(N).remainder(CLASSES).to(dtype)
    if bad is not None:
        labels[BAD_ROW] = bad
    return {"image": torch.rand(N, 3, 6, 5), "label": labels}


def mixed(given, *, first=(), device="cuda", **options):
    """Return the batches of a loader that mixes, and what the device did."""
    transform = T.Compose([*first, T.CutMix(num_classes=CLASSES)])
    with simulated() as machine:
        loader = Loader(given, 8, transform=transform, device=device, **options)
        batches = [TensorDict(dict(batch)).cpu() for batch in loader]
        launches, syncs = machine.devices[0].launches.copy(), machine.syncs.copy()
        del loader
    return batches, launches, syncs


def asserted(launches):
    return sum(count for name, count in launches.items() if "_assert_async" in name)


@pytest.mark.parametrize("copied", ["one by one", "together"])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("bad", [CLASSES, -1, 2**40])
def test_a_label_that_is_no_class_is_an_error_with_its_row(placement, bad, copied, monkeypatch):
    if copied == "one by one":
        for most in ("COPY_BYTES", "PICK_BYTES"):
            monkeypatch.setattr(f"memfeed.loading.plan.{most}", 1)
    expected = rf"field 'label' .* has class {bad} in row {BAD_ROW}; expected classes from 0 to 4, as num_classes=5"
    for shuffle in (False, True):
        with pytest.raises(TransformError, match=expected):
            mixed(data(bad), placement=placement, shuffle=shuffle, seed=0)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_right_labels_are_not_checked_on_the_device(placement, dtype):
    batches, launches, _ = mixed(data(dtype=dtype), placement=placement)
    assert len(batches) == N // 8
    assert all(torch.allclose(batch["label"].sum(1), torch.ones(8)) for batch in batches)
    assert not asserted(launches)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_rows_that_are_never_drawn_may_have_any_label(placement):
    rows = [row for row in range(N) if row != BAD_ROW]
    batches, *_ = mixed(data(-1), placement=placement, sampler=rows[:32])
    assert len(batches) == 4
    with pytest.raises(TransformError, match=f"has class -1 in row {BAD_ROW}"):
        mixed(data(-1), placement=placement, sampler=[*rows[:20], BAD_ROW, *rows[20:31]])


def test_the_column_on_the_device_is_read_once(monkeypatch):
    monkeypatch.setattr(host_labels, "ROWS_AT_ONCE", 7)
    read = []
    gather = host_labels.Gather

    def counted(columns, allocators):
        made = gather(columns, allocators)
        return lambda rows: read.append(len(rows)) or made(rows)

    monkeypatch.setattr(host_labels, "Gather", counted)
    transform = T.CutMix(num_classes=CLASSES)
    with simulated():
        loader = Loader(data(), 8, transform=transform, device="cuda", placement="device")
        assert len([*loader, *loader]) == 10
        del loader
    assert read == [7, 7, 7, 7, 7, 5]


@pytest.mark.parametrize("placement", ["mapped", "device"])
@pytest.mark.parametrize(
    "make",
    [
        lambda image, label: (image, label),
        lambda image, label: Pair(image, label),
        lambda image, label: {"deep": {"image": image, "label": label}},
        lambda image, label: TensorDict({"image": image, "label": label}, [N]),
    ],
    ids=["tuple", "namedtuple", "nested dict", "TensorDict"],
)
def test_every_structure(make, placement):
    good, bad = (make(*given.values()) for given in (data(), data(CLASSES)))
    with simulated() as machine:
        transform = T.CutMix(num_classes=CLASSES)
        loader = Loader(good, 8, transform=transform, device="cuda", placement=placement)
        assert len(list(loader)) == N // 8
        assert not asserted(machine.devices[0].launches)
        loader = Loader(bad, 8, transform=transform, device="cuda", placement=placement)
        with pytest.raises(TransformError, match=f"has class 5 in row {BAD_ROW}"):
            list(loader)
        del loader


def relabelled(batch):
    return {**batch, "label": batch["label"] - CLASSES}


def test_labels_that_a_function_made_on_the_device_are_checked_there():
    given = data()
    given["label"] += CLASSES
    batches, launches, _ = mixed(given, first=[relabelled])
    assert len(batches) == N // 8
    assert asserted(launches) == N // 8
    with pytest.raises(RuntimeError, match="'label' .* has other classes; expected 0 to 4"):
        mixed(data(), first=[relabelled])


def test_rows_of_a_view_have_the_numbers_of_the_view(tmp_path):
    import memfeed

    store = memfeed.cache(data(-7), tmp_path / "a.mf", progress=False).subset(range(10, 30))
    for placement in PLACEMENTS:
        with pytest.raises(TransformError, match=f"has class -7 in row {BAD_ROW - 10};"):
            mixed(store, placement=placement)


def test_a_device_without_streams(monkeypatch):
    monkeypatch.setattr("memfeed.transfer.transfer.to_device", lambda tree, device, *, non_blocking: tree)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    transform = T.CutMix(num_classes=CLASSES)
    with pytest.raises(TransformError, match=f"has class 9 in row {BAD_ROW}"):
        list(Loader(data(9), 8, transform=transform, device="xpu"))
    kept = next(iter(Loader(data(), 8, transform=transform, device="xpu")))
    assert torch.allclose(kept["label"].sum(1), torch.ones(8))


def test_by_hand_on_a_device_nothing_waits():
    given = data()
    with simulated() as machine:
        there = {name: value.to("cuda") for name, value in given.items()}
        torch.cuda.synchronize()
        machine.syncs.clear()
        T.CutMix(num_classes=CLASSES)(there["image"], there["label"])
        assert not machine.syncs
        assert asserted(machine.devices[0].launches) == 1


def test_loaders_that_mix_nothing_keep_no_labels():
    schema = Loader(data(), 8).store.schema
    assert host_labels.host_labels(T.RandomHorizontalFlip(), schema, None) is None
    assert host_labels.host_labels(lambda batch: batch, schema, None) is None
    found = host_labels.host_labels(T.MixUp(num_classes=2), schema, None)
    assert found.fields == {("label",): 1}


def test_positions_in_the_batch_without_rows():
    labels = torch.tensor([0, 1, 9])
    with pytest.raises(TransformError, match="has class 9 at position 2 of the batch; expected classes from 0 to 4"):
        T.MixUp(num_classes=CLASSES)(torch.rand(3, 3, 4, 4), labels)
    assert np.array_equal(T.MixUp(num_classes=10)(torch.rand(3, 3, 4, 4), labels)[1].shape, (3, 10))
