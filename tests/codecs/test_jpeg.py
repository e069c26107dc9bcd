"""JPEG: the pixels are libjpeg-turbo's in every layout, and a blob of anything else is refused.

The error of decoded images: mean, largest and PSNR, against a formula in floats.
"""

import io
import math

import numpy as np
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from skimage.metrics import peak_signal_noise_ratio

from memfeed.codecs import jpeg
from memfeed.codecs.jpeg import LARGEST_SIDE, ErrorSum, Jpeg
from memfeed.errors import CorruptStoreError, SchemaError
from memfeed.system.compiled import Loops

LOOPS = Loops("memfeed.codecs.pixel_loops")
LOOPS.wait()


def an_image(height, width, channels=3):
    """Return an image with smooth colors and some noise, [h, w, c]."""
    y, x, c = np.mgrid[:height, :width, :channels]
    noise = np.random.default_rng(0).integers(0, 20, (height, width, channels))
    return ((np.sin(x / 9 + c) + np.cos(y / 7 - c) + 2) * 58 + noise).astype(np.uint8)


def blob_of(codec, row):
    return np.frombuffer(codec.encode(row), np.uint8)


def in_layout(image, layout):
    row = {"chw": image.transpose(2, 0, 1), "hwc": image, "hw": image[..., 0]}[layout]
    return np.ascontiguousarray(row)


@given(
    height=st.integers(1, 40),
    width=st.integers(1, 40),
    quality=st.integers(1, 100),
    layout=st.sampled_from([("chw", 3), ("chw", 1), ("hwc", 3), ("hwc", 1), ("hw", 1)]),
    subsampling=st.sampled_from(["4:4:4", "4:2:2", "4:2:0"]),
)
@settings(max_examples=200)
def test_every_layout_has_the_pixels_of_the_library(height, width, quality, layout, subsampling):
    name, channels = layout
    codec = Jpeg(quality, subsampling, name)
    row = in_layout(an_image(height, width, channels), name)
    blob = blob_of(codec, row)
    assert codec.shape(blob) == row.shape
    expected = in_layout(simplejpeg.decode_jpeg(blob, colorspace="RGB" if channels == 3 else "GRAY"), name)
    out = np.empty_like(row)
    codec.decode(blob, out)
    np.testing.assert_array_equal(out, expected)
    strided = np.empty((*row.shape, 2), np.uint8)[..., 1]
    codec.decode(blob, strided)
    np.testing.assert_array_equal(strided, expected)


@given(height=st.integers(1, 40), width=st.integers(1, 40))
@settings(max_examples=50)
def test_the_compiled_loop_writes_the_same_planes(height, width):
    codec = Jpeg(90)
    row = in_layout(an_image(height, width), "chw")
    blob = blob_of(codec, row)
    with pytest.MonkeyPatch.context() as patch:
        found = []
        for loops in (LOOPS, Loops("none", after=1 << 60)):
            patch.setattr(jpeg, "LOOPS", loops)
            found.append(np.zeros_like(row))
            codec.decode(blob, found[-1])
    np.testing.assert_array_equal(*found)


def test_the_loop_is_compiled():
    assert LOOPS.get() is not None


@pytest.mark.parametrize(("subsampling", "factors"), [("4:4:4", (1, 1)), ("4:2:2", (2, 1)), ("4:2:0", (2, 2))])
def test_pillow_reads_the_same_pixels_and_the_parameters(subsampling, factors):
    image = an_image(50, 70)
    data = Jpeg(90, subsampling, "hwc").encode(image)
    opened = Image.open(io.BytesIO(data))
    assert opened.layer[0][1:3] == factors
    out = np.empty_like(image)
    Jpeg(90, subsampling, "hwc").decode(np.frombuffer(data, np.uint8), out)
    np.testing.assert_array_equal(out, np.asarray(opened))


def test_a_higher_quality_is_nearer_to_the_image():
    image = an_image(64, 64)
    errors, sizes = [], []
    for quality in (50, 90, 95, 100):
        blob, out = blob_of(Jpeg(quality, layout="hwc"), image), np.empty_like(image)
        Jpeg(layout="hwc").decode(blob, out)
        errors.append(np.abs(out.astype(int) - image).mean())
        sizes.append(len(blob))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1
    assert sizes == sorted(sizes)


def test_colors_have_half_the_resolution_below_93():
    assert Jpeg().parameters() == {"quality": 95, "subsampling": "4:4:4", "layout": "chw"}
    assert Jpeg(93).subsampling == "4:4:4"
    assert Jpeg(92).subsampling == "4:2:0"
    assert Jpeg(92, "4:4:4").subsampling == "4:4:4"


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        *(((3, None, None), "chw"), ((1, 8, 8), "chw"), ((3, 8, 3), "chw"), ((None, None, 3), "hwc")),
        *(
            ((8, 8, 1), "hwc"),
            ((8, 8), "hw"),
            ((None, None), "hw"),
            ((None, None, None), "chw"),
            ((None, None, 3), "hwc"),
        ),
    ],
)
def test_the_shape_of_a_column_says_the_layout(shape, layout):
    assert Jpeg().accepts(np.dtype(np.uint8), shape) == ""
    assert Jpeg(90).fitted(np.dtype(np.uint8), shape) == Jpeg(90, layout=layout)
    if shape == (3, 8, 3):
        assert Jpeg(layout="hwc").fitted(np.dtype(np.uint8), shape).layout == "hwc"


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        *(("float32", (3, 8, 8)), ("int8", (3, 8, 8)), ("uint8", (4, 8, 8)), ("uint8", (8,)), ("uint8", (2, 3, 8, 8))),
        *(("uint8", (2, None, 8)), ("uint8", (3, 0, 8)), ("uint8", (3, 8, LARGEST_SIDE + 1)), ("uint8", ())),
    ],
)
def test_rows_that_are_no_images_are_refused(dtype, shape):
    assert "jpeg has uint8 images" in Jpeg().accepts(np.dtype(dtype), shape)
    if None not in shape and LARGEST_SIDE + 1 not in shape:
        with pytest.raises(SchemaError, match="jpeg has uint8 images"):
            Jpeg().encode(np.zeros(shape, dtype))


def test_a_row_in_another_layout_is_refused():
    with pytest.raises(SchemaError, match=r"found \[8, 8, 3\]; expected chw"):
        Jpeg().encode(np.zeros((8, 8, 3), np.uint8))
    blob = blob_of(Jpeg(), np.zeros((3, 8, 8), np.uint8))
    for out in (np.empty((8, 8, 3), np.uint8), np.empty((3, 8, 9), np.uint8), np.empty((3, 8, 8), np.int8)):
        with pytest.raises(CorruptStoreError, match=r"found uint8 \[3, 8, 8\]; expected"):
            Jpeg().decode(blob, out)
    with pytest.raises(CorruptStoreError, match="found 3 components; expected 1"):
        Jpeg(layout="hw").decode(blob, np.empty((8, 8), np.uint8))


@pytest.mark.parametrize("quality", [90, 95])
def test_a_header_that_differs_from_a_known_one_is_read_by_itself(monkeypatch, quality):
    """Headers that are equal but for height and width are not parsed again. Any other byte may mean anything."""
    monkeypatch.setattr(jpeg, "_known", ())
    codec = Jpeg(quality)
    blob = blob_of(codec, in_layout(an_image(8, 24, 3), "chw"))
    parsed, parse = [], jpeg._parse_header
    monkeypatch.setattr(jpeg, "_parse_header", lambda data: parsed.append(1) or parse(data))
    assert codec.shape(blob) == (3, 8, 24)
    assert codec.shape(blob_of(codec, in_layout(an_image(300, 17, 3), "chw"))) == (3, 300, 17)
    assert len(parsed) == 1
    header, kept = jpeg._read_header(blob), jpeg._known
    for at in range(header.data_begin):
        changed = blob.copy()
        changed[at] ^= 0xFF
        outcomes = []
        for known in ((), kept):
            monkeypatch.setattr(jpeg, "_known", known)
            try:
                outcomes.append(codec.shape(changed))
            except CorruptStoreError as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]


def test_few_headers_are_kept(monkeypatch):
    monkeypatch.setattr(jpeg, "_known", ())
    for quality in range(60, 60 + 2 * jpeg._MOST_KNOWN):
        blob = blob_of(Jpeg(quality), in_layout(an_image(8, 8, 3), "chw"))
        assert Jpeg(quality).shape(blob) == (3, 8, 8)
    assert len(jpeg._known) == jpeg._MOST_KNOWN


def test_missing_and_additional_bytes_are_refused():
    data, out = (
        Jpeg().encode(np.ascontiguousarray(an_image(24, 24).transpose(2, 0, 1))),
        np.empty((3, 24, 24), np.uint8),
    )
    Jpeg().decode(np.frombuffer(data, np.uint8), out)
    for size in range(len(data)):
        with pytest.raises(CorruptStoreError, match="the store is damaged"):
            Jpeg().decode(np.frombuffer(data[:size], np.uint8), out)
    for end in (b"\0", b"\xff\xd9", data):
        with pytest.raises(CorruptStoreError, match="behind the end"):
            Jpeg().decode(np.frombuffer(data + end, np.uint8), out)
    with pytest.raises(CorruptStoreError, match="libjpeg-turbo refuses"):  # the end comes before all blocks are there
        Jpeg().decode(np.frombuffer(data[: len(data) // 2 + 200] + b"\xff\xd9", np.uint8), out)


@pytest.mark.parametrize("option", [{"progressive": True}, {"qtables": "web_low", "progressive": True}])
def test_a_progressive_image_is_refused(option):
    file = io.BytesIO()
    Image.fromarray(an_image(24, 24)).save(file, "JPEG", **option)
    with pytest.raises(CorruptStoreError, match="of kind 0xc2; expected 0xc0, baseline"):
        Jpeg().decode(np.frombuffer(file.getvalue(), np.uint8), np.empty((3, 24, 24), np.uint8))


def test_an_image_of_four_colors_is_refused():
    file = io.BytesIO()
    Image.new("CMYK", (8, 8)).save(file, "JPEG")
    with pytest.raises(CorruptStoreError, match="without a valid header"):
        Jpeg().shape(np.frombuffer(file.getvalue(), np.uint8))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(
            ({"quality": 0}, "from 1 to 100"),
            ({"quality": 95.0}, "from 1 to 100"),
            ({"quality": True}, "from 1 to 100"),
        ),
        *(({"subsampling": "4:1:1"}, "one of 4:4:4"), ({"layout": "nchw"}, "one of chw")),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Jpeg(**arguments)


def measure_error(original, decoded):
    errors = ErrorSum()
    errors.add(original, decoded)
    return errors.error()


def test_the_error_is_that_of_the_formula():
    rng = np.random.default_rng(0)
    original, decoded = rng.integers(0, 256, (2, 5, 3, 8, 8), dtype=np.uint8)
    mean, largest, psnr = measure_error(original, decoded)
    difference = np.abs(original.astype(float) - decoded)
    assert mean == pytest.approx(difference.mean())
    assert largest == difference.max()
    assert psnr == pytest.approx(peak_signal_noise_ratio(original, decoded, data_range=255))
    one_by_one = ErrorSum()
    for pair in zip(original, decoded, strict=True):
        one_by_one.add(*pair)
    assert one_by_one.error() == (mean, largest, psnr)


def test_equal_images_have_no_error():
    image = np.full((3, 4, 4), 7, np.uint8)
    assert measure_error(image, image.copy()) == (0, 0, math.inf)
    assert measure_error(image[:0], image[:0]) == (0, 0, math.inf)
    assert measure_error(image, image + 255) == pytest.approx((1, 1, 48.1308), rel=1e-4)
    assert measure_error(np.zeros(4, np.uint8), np.full(4, 255, np.uint8)) == (255, 255, 0)


def test_other_arrays_are_refused():
    for other in (np.zeros((3, 4)), np.zeros((4, 3), np.uint8)):
        with pytest.raises(ValueError, match="expected uint8 of one shape"):
            measure_error(np.zeros((3, 4), np.uint8), other)
