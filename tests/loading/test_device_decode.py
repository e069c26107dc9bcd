"""placement="nvjpeg": the device decodes the rows of JPEG fields. Here it is simulated, and decodes as the CPU does."""

import warnings
from contextlib import contextmanager

import numpy as np
import pytest
import torch

import memfeed
import memfeed.transforms as T
from memfeed.errors import CorruptStoreError, LoaderError
from memfeed.loading.placement import DeviceDecoder
from memfeed.transfer import nvjpeg
from simulated_cuda import simulated
from support import Made, cache, equal

pytest.importorskip("simplejpeg")

if not (torch.cuda.is_available() or hasattr(torch._C, "_ensureCUDADeviceGuardSet")):
    pytest.skip("this torch cannot have tensors on a simulated GPU", allow_module_level=True)


def photo(i, height=24, width=32, channels=3):
    drawn = np.random.default_rng(i).integers(0, 256, (channels, height // 8, width // 8), np.uint8)
    return torch.from_numpy(drawn.repeat(8, 1).repeat(8, 2))


SAMPLES = {
    "one size": lambda i: {"image": photo(i), "label": i},
    "several sizes": lambda i: {"image": photo(i, 16 + 8 * (i % 3), 8 + 8 * (i % 2)), "label": i},
    "height, width, channels": lambda i: {"image": photo(i).permute(1, 2, 0).contiguous(), "label": i},
    "gray": lambda i: {"image": photo(i, channels=1), "label": i},
    "gray, without channels": lambda i: {"image": photo(i, channels=1)[0], "label": i},
}


def stored(path, kind="one size"):
    return cache(Made(SAMPLES[kind], 40), path, forms={"image": "jpeg:95"})


@pytest.fixture
def device(monkeypatch):
    """Return a context, within which a GPU is simulated. It decodes as the CPU does, and counts the images."""
    decoded = []

    def decode(files, device):
        from torchvision.io import ImageReadMode, decode_jpeg

        assert all(one.device.type == "cpu" and one.dtype == torch.uint8 and one.ndim == 1 for one in files)
        decoded.append(len(files))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torchvision's decoders are deprecated
            return [image.to(device) for image in decode_jpeg(files, ImageReadMode.UNCHANGED)]

    @contextmanager
    def device():
        with simulated():
            yield decoded

    monkeypatch.setattr(nvjpeg, "decoder", lambda: decode)
    monkeypatch.setattr(
        "memfeed.transforms.backends.passes.gpu_kernel", lambda device: None
    )  # Triton needs a real device
    return device


OPTIONS = [{}, {"shuffle": True, "seed": 3}, {"batch_sampler": [[3, 3], [39, 0, 7], []]}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", SAMPLES)
def test_batches_are_those_of_the_cpu(path, device, kind, options):
    pytest.importorskip("torchvision")
    options = options if "batch_sampler" in options else {"batch_size": 8, **options}
    store = stored(path, kind)
    expected = list(memfeed.Loader(store, **options))
    with device() as decoded:
        loader = memfeed.Loader(store, **options, device="cuda", placement={"image": "nvjpeg"})
        for batch, want in zip(loader, expected, strict=True):
            images = batch["image"] if isinstance(batch["image"], list) else [batch["image"]]
            assert {one.device.type for one in images} <= {"cuda"}
            images = [one.cpu() for one in images]
            found = images if isinstance(batch["image"], list) else images[0]
            assert equal({"image": found, "label": batch["label"].cpu()}, want)
        assert loader.stats()["columns"]["image"] == "nvjpeg"
    assert sum(decoded) == (5 if "batch_sampler" in options else 40)


def test_a_transform_and_a_resumed_epoch(path, device):
    pytest.importorskip("torchvision")
    options = {"batch_size": 8, "shuffle": True, "seed": 1, "transform": T.RandomCrop(16)}
    store = stored(path)
    expected = list(memfeed.Loader(store, **options))
    with device():
        loader = memfeed.Loader(store, **options, device="cuda", placement={"image": "nvjpeg"})
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
        placement = {"image": "nvjpeg", "label": "device"}
        other = memfeed.Loader(store, **options, device="cuda", placement=placement)
        other.load_state_dict(state)
        for rest in (list(batches), list(other)):
            for batch, want in zip(rest, expected[1:], strict=True):
                assert equal({name: one.cpu() for name, one in batch.items()}, want)


WHOLE = "beside a collate_fn, or batch_size=None; expected whole batches"


@pytest.mark.parametrize(
    ("field", "options", "message"),
    [
        ("label", {"device": "cuda"}, "for field label, which is int64 .*; expected images that a store has as JPEG"),
        ("image", {}, 'found placement "nvjpeg" and device=None; expected device="cuda"'),
        ("image", {"device": "cpu"}, 'found placement "nvjpeg" and device=cpu; expected device="cuda"'),
        ("image", {"device": "cuda", "collate_fn": list}, WHOLE),
        ("image", {"device": "cuda", "batch_size": None}, WHOLE),
    ],
)
def test_what_cannot_be_decoded_there(path, device, field, options, message):
    store = stored(path)
    with device(), pytest.raises(LoaderError, match=message):
        memfeed.Loader(store, **{"batch_size": 4, **options}, placement={field: "nvjpeg"})


def test_windows_are_refused(path, device):
    store = stored(path).windows({"image": [-1, 0]}, within=None)
    with device(), pytest.raises(LoaderError, match="expected images that a store has as JPEG"):
        memfeed.Loader(store, 4, device="cuda", placement={"image": "nvjpeg"})


def test_without_a_library(path, device, monkeypatch):
    store = stored(path)
    monkeypatch.setattr(nvjpeg, "find_spec", lambda name: None)
    monkeypatch.setattr("memfeed.system.messages.find_spec", lambda name: None)
    with (
        device(),
        pytest.raises(ModuleNotFoundError, match=r"found no torchvision; .* pip install 'memfeed\[vision\]'"),
    ):
        memfeed.Loader(store, 4, device="cuda", placement={"image": "nvjpeg"})


def damaged(path, change):
    """Change the bytes of the first blob of a store."""
    heap = path / "image" / "heap.bin"
    column = memfeed.open(path)._view.columns[0]
    located = column.stored.locate(np.array([0]))
    start, length = int(located.starts[0]), int(located.lengths[0])
    contents = bytearray(heap.read_bytes())
    contents[start : start + length] = change(contents[start : start + length])
    heap.write_bytes(contents)


def test_a_damaged_blob_does_not_reach_the_device(path, device):
    stored(path)
    damaged(path, lambda blob: blob[:-2] + b"\0\0")
    store, message = memfeed.open(path), "row 0 of field image: .*bytes behind the end of the image, or no end"
    with device() as decoded, pytest.raises(CorruptStoreError, match=message):
        next(iter(memfeed.Loader(store, 4, device="cuda", placement={"image": "nvjpeg"})))
    assert decoded == []


def test_an_image_of_another_size_does_not_reach_the_device(path, device):
    stored(path)
    size = (24).to_bytes(2, "big") + (32).to_bytes(2, "big")
    damaged(path, lambda blob: blob.replace(size, b"\xff\0\xff\0", 1))
    store, message = memfeed.open(path), r"row 0 of field image: found a row of shape \[3, 65280, 65280\]"
    with device() as decoded, pytest.raises(CorruptStoreError, match=message):
        next(iter(memfeed.Loader(store, 4, device="cuda", placement={"image": "nvjpeg"})))
    assert decoded == []


def test_what_the_device_refuses_names_field_and_rows(path, monkeypatch):
    def refuse(files, device):
        raise RuntimeError("nvjpegDecode failed")

    monkeypatch.setattr(nvjpeg, "decoder", lambda: refuse)
    decoder = DeviceDecoder(stored(path)._view.columns[0], torch.device("cpu"))
    with pytest.raises(
        CorruptStoreError, match=r"field image: nvJPEG refuses the rows \[4, 2\] \(nvjpegDecode failed\)"
    ):
        decoder(np.array([4, 2]))


def test_memory_that_runs_out_is_no_damage(path, monkeypatch):
    """The loader then lets columns make room, as for any other batch."""

    def fail(files, device):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(nvjpeg, "decoder", lambda: fail)
    decoder = DeviceDecoder(stored(path)._view.columns[0], torch.device("cpu"))
    with pytest.raises(torch.OutOfMemoryError):
        decoder(np.array([4, 2]))


def test_a_store_that_is_filled_may_ask_for_it(path):
    """The CPU decodes while it is filled: the loader is made, and says so."""
    data = Made(SAMPLES["one size"], 40)
    options = {"cache": path, "forms": {"image": "jpeg:95"}, "placement": {"image": "nvjpeg"}}
    with pytest.raises(LoaderError, match='found placement "nvjpeg" and device=None'):
        memfeed.Loader(data, 8, **options)
