"""Decoders of libraries answer from the disk as the libraries do, in the thread that reads samples alone."""

from __future__ import annotations

import io
import threading

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile, PngImagePlugin

from memfeed.errors import RandomDataError
from memfeed.memoizing import decoders, kept
from memfeed.memoizing.decoders import Reading


@pytest.fixture(autouse=True)
def as_found():
    """Leave the libraries, and what this process knows of results, as they were."""
    yield
    decoders.restore()
    kept._memos.clear()


@pytest.fixture
def reading(tmp_path):
    return Reading(tmp_path / "r.mf")


def hits(reading):
    return sum(one.report().hits for one in reading.used())


def noise(mode, size=(37, 23)):
    source = Image.effect_noise(size, 90).convert("I" if mode == "I;16" else "RGB")
    return source.quantize(200) if mode == "P" else source.convert(mode)


def state(image):
    """Return all that a program can see of a loaded image."""
    return {
        "pixels": image.tobytes(), "mode": image.mode, "size": image.size, "palette": image.getpalette(),
        "info": dict(image.info), "exif": dict(image.getexif()), "format": image.format,
        "tile": getattr(image, "tile", []),
        "closed": getattr(image, "fp", None) is None, "readonly": image.readonly, "text": getattr(image, "text", None),
        "alpha": image.convert("RGBA").tobytes(),
    }  # fmt: skip


def make(path, mode, **options):
    exif = Image.Exif()
    exif[0x0112] = 6  # turned
    if path.suffix == ".png":
        text = PngImagePlugin.PngInfo()
        text.add_text("before", "pixels")
        text.add(b"tEXt", b"after\0pixels", after_idat=True)
        options["pnginfo"] = text
    noise(mode).save(path, exif=exif, dpi=(72, 72), **options)
    return path


CASES = [("jpg", mode) for mode in ("L", "RGB", "CMYK")]
CASES += [("png", mode) for mode in ("1", "L", "P", "LA", "RGB", "RGBA", "I;16")]


@pytest.mark.parametrize("way", ["path", "file", "bytes"])
@pytest.mark.parametrize(("suffix", "mode"), CASES)
def test_an_image_is_as_pillow_loads_it(tmp_path, reading, suffix, mode, way):
    path = make(tmp_path / f"a.{suffix}", mode)

    def load():
        if way == "path":
            image = Image.open(path)
            image.load()
            return state(image)
        if way == "bytes":
            return state(Image.open(io.BytesIO(path.read_bytes())))
        with path.open("rb") as file:  # as torchvision's pil_loader does
            image = Image.open(file)
            image.load()
            return state(image) | {"file": file.closed}

    expected = load()
    for _ in range(3):
        with reading.active():
            assert load() == expected
    assert hits(reading) == 2


@pytest.mark.parametrize(
    "options", [{"interlace": True}, {"transparency": 3}, {"bits": 4}, {"optimize": True}], ids=str
)
def test_a_png_of_every_form(tmp_path, reading, options):
    mode = "P" if {"transparency", "bits"} & options.keys() else "RGB"
    image = noise(mode)
    if "bits" in options:
        image = noise("RGB").quantize(16)
    image.save(tmp_path / "a.png", **options)
    expected = state(Image.open(tmp_path / "a.png"))
    for _ in range(2):
        with reading.active():
            assert state(Image.open(tmp_path / "a.png")) == expected
    assert hits(reading) == 1


def test_a_png_of_many_chunks(tmp_path, reading):
    noise("RGB", (400, 300)).save(tmp_path / "a.png", compress_level=0)
    expected = state(Image.open(tmp_path / "a.png"))
    for _ in range(2):
        with reading.active():
            assert state(Image.open(tmp_path / "a.png")) == expected


def test_draft_thumbnail_and_copies_are_pillows_own(tmp_path, reading):
    path = make(tmp_path / "a.jpg", "RGB")
    noise("RGB", (400, 300)).save(path)

    def shrink():
        image = Image.open(path)
        image.draft("L", (50, 40))
        return state(image)

    def thumbnail():
        image = Image.open(path)
        image.thumbnail((40, 40))
        return state(image)

    def twice():
        image = Image.open(path)
        return state(image), state(image.copy()), image.resize((9, 9)).tobytes(), state(image)

    for load in (shrink, thumbnail, twice, thumbnail, shrink):
        expected = load()
        for _ in range(2):
            with reading.active():
                assert load() == expected


@pytest.mark.parametrize("name", ["a.gif", "a.webp", "a.tif", "a.bmp", "moving.png"])
def test_other_formats_and_several_frames_are_pillows_own(tmp_path, reading, name):
    images = [noise("RGB") for _ in range(3)]
    frames = {} if name in ("a.bmp",) else {"save_all": True, "append_images": images[1:]}
    images[0].save(tmp_path / name, **frames)

    def load():
        with Image.open(tmp_path / name) as image:
            found = []
            for frame in range(getattr(image, "n_frames", 1)):
                image.seek(frame)
                found.append(image.convert("RGB").tobytes())
            return found

    expected = load()
    for _ in range(2):
        with reading.active():
            assert load() == expected
    assert hits(reading) == 0


@pytest.mark.parametrize("suffix", ["jpg", "png"])
def test_a_truncated_file_raises_the_same_error(tmp_path, reading, suffix):
    path = tmp_path / f"a.{suffix}"
    noise("RGB", (400, 300)).save(path)
    path.write_bytes(path.read_bytes()[:-600])
    for _ in range(3):
        with pytest.raises(OSError, match="[Tt]runcated") as expected, Image.open(path) as image:
            image.load()
        with reading.active(), pytest.raises(OSError, match="[Tt]runcated") as found, Image.open(path) as image:
            image.load()
        assert str(found.value) == str(expected.value)


def test_truncated_files_that_are_allowed_are_pillows_own(tmp_path, reading, monkeypatch):
    path = tmp_path / "a.jpg"
    noise("RGB", (400, 300)).save(path)
    path.write_bytes(path.read_bytes()[:-600])
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    expected = Image.open(path).tobytes()
    for _ in range(2):
        with reading.active():
            assert Image.open(path).tobytes() == expected
    assert hits(reading) == 0


def test_a_changed_image_is_decoded_again(tmp_path, reading):
    path = make(tmp_path / "a.png", "RGB")
    with reading.active():
        state(Image.open(path))
        make(path, "RGB")
        expected = path.read_bytes()
        assert state(Image.open(path)) == state(Image.open(io.BytesIO(expected)))


def test_an_image_that_is_written_to_does_not_change_what_is_kept(tmp_path, reading):
    path = make(tmp_path / "a.jpg", "RGB")
    expected = state(Image.open(path))
    for _ in range(3):
        with reading.active():
            image = Image.open(path)
            assert image.tobytes() == expected["pixels"]
            image.putpixel((0, 0), (1, 2, 3))
            image.paste((0, 0, 0), (3, 3, 9, 9))


def test_other_threads_see_the_library(tmp_path, reading):
    path = make(tmp_path / "a.jpg", "RGB")
    own = ImageFile.ImageFile.load
    with reading.active():
        state(Image.open(path))
        counted = hits(reading)
        thread = threading.Thread(target=lambda: state(Image.open(path)))
        thread.start()
        thread.join()
        assert hits(reading) == counted
        assert ImageFile.ImageFile.load is not own
    state(Image.open(path))
    assert hits(reading) == counted
    decoders.restore()
    assert ImageFile.ImageFile.load is own


def test_opencv(tmp_path, reading):
    cv2 = pytest.importorskip("cv2")
    path = str(make(tmp_path / "a.png", "RGB"))
    data = np.fromfile(path, np.uint8)
    calls = [
        lambda: cv2.imread(path), lambda: cv2.imread(path, cv2.IMREAD_GRAYSCALE),
        lambda: cv2.imread(path, flags=cv2.IMREAD_UNCHANGED), lambda: cv2.imdecode(data, cv2.IMREAD_COLOR),
    ]  # fmt: skip
    expected = [call() for call in calls]
    for _ in range(3):
        with reading.active():
            for call, value in zip(calls, expected, strict=True):
                assert np.array_equal(call(), value)
    assert hits(reading) == 8
    with reading.active():
        assert cv2.imread(str(tmp_path / "missing.png")) is None
        assert cv2.imread(str(tmp_path / "missing.png")) is None
        noise("RGB").save(tmp_path / "missing.png")
        assert cv2.imread(str(tmp_path / "missing.png")) is not None


@pytest.mark.filterwarnings("ignore:The image decoding")
def test_torchvision(tmp_path, reading):
    tio = pytest.importorskip("torchvision.io")
    path = str(make(tmp_path / "a.jpg", "RGB"))
    data = tio.read_file(path)
    calls = [
        lambda: tio.read_image(path), lambda: tio.read_image(path, tio.ImageReadMode.GRAY),
        lambda: tio.decode_image(path, mode="RGB"), lambda: tio.decode_image(data),
    ]  # fmt: skip
    expected = [call() for call in calls]
    for _ in range(3):
        with reading.active():
            for call, value in zip(calls, expected, strict=True):
                assert torch.equal(call(), value)
                one, other = ([s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1] for x in (call(), value))
                assert one == other
    assert hits(reading) == 20
    with reading.active(), pytest.raises(RuntimeError):
        tio.read_image(str(tmp_path / "missing.jpg"))


class Codec:
    calls = 0

    @staticmethod
    def decode(path, gain=1):
        Codec.calls += 1
        return np.fromfile(path, np.uint8) * gain

    @staticmethod
    def jitter(path):
        return np.random.rand(3)


def test_torchcodec(tmp_path, reading):
    module = pytest.importorskip("torchcodec.decoders")
    path = make(tmp_path / "a.jpg", "RGB")
    data = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    calls = [
        lambda: module.decode_image(path), lambda: module.decode_image(str(path), mode="GRAY"),
        lambda: module.decode_jpeg(path.read_bytes()), lambda: module.decode_image(data, mode=module.ImageReadMode.RGB),
    ]  # fmt: skip
    expected = [call() for call in calls]
    for _ in range(3):
        with reading.active():
            for call, value in zip(calls, expected, strict=True):
                assert torch.equal(call(), value)
    assert hits(reading) == 8


def test_what_cannot_be_kept_of_a_library_is_returned(tmp_path, reading, monkeypatch):
    cv2 = pytest.importorskip("cv2")
    path = str(make(tmp_path / "a.png", "RGB"))
    monkeypatch.setattr(cv2, "imread", lambda name: {1, 2})
    with reading.active():
        assert cv2.imread(path) == {1, 2}
    decoders.restore()


def test_a_function_of_the_user(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"abc")
    reading = Reading(tmp_path / "r.mf", [(__name__, "Codec.decode"), (__name__, "Codec.jitter")])
    with reading.active():
        for _ in range(4):
            assert Codec.decode(str(tmp_path / "a.bin"), gain=2).tolist() == [194, 196, 198]
        with pytest.raises(RandomDataError, match="depends on the arguments alone"):
            Codec.jitter(str(tmp_path / "a.bin"))
    assert Codec.calls == 2  # the first keys are computed twice


def test_a_version_that_is_not_known_is_left_alone(reading, monkeypatch):
    own = ImageFile.ImageFile.load
    monkeypatch.setattr("PIL.__version__", "99.0.0")
    with reading.active():
        assert ImageFile.ImageFile.load is own


def test_nibabel(tmp_path, reading):
    nibabel = pytest.importorskip("nibabel")
    paths = [tmp_path / "a.nii.gz", tmp_path / "b.nii"]
    for path in paths:
        nibabel.save(nibabel.Nifti1Image(np.random.default_rng(0).normal(size=(5, 6, 7)), np.eye(4)), path)

    def load(path):
        image = nibabel.load(path)
        found = image.get_fdata()
        assert image.get_fdata() is found
        again = nibabel.load(path)
        return found, image.get_fdata(dtype=np.float32), np.asanyarray(again.dataobj, order="C"), again.affine

    for path in paths:
        expected = load(path)
        for _ in range(3):
            with reading.active():
                found = load(path)
            for one, other in zip(found, expected, strict=True):
                assert np.array_equal(one, other)
                assert one.strides == other.strides
    assert hits(reading) >= 4  # of the compressed file alone


def test_soundfile(tmp_path, reading):
    soundfile = pytest.importorskip("soundfile")
    path = str(tmp_path / "a.flac")
    soundfile.write(path, np.random.default_rng(0).uniform(-1, 1, (800, 2)), 8000)
    expected = soundfile.read(path), soundfile.read(path, start=100, frames=50, dtype="float32")
    for _ in range(3):
        with reading.active():
            found = soundfile.read(path), soundfile.read(path, start=100, frames=50, dtype="float32")
        for one, other in zip(found, expected, strict=True):
            assert np.array_equal(one[0], other[0])
            assert one[1] == other[1]
    assert hits(reading) == 4
