"""``forms=``: in which form each field is stored."""

import numpy as np
import pytest
import torch
from torchvision.tv_tensors import Mask

import memfeed
from memfeed.codecs import Jpeg, Zstd
from memfeed.convert.forms import Forms, coded_schema, forms_of, losses_of, observed_shapes
from memfeed.errors import FieldError, SchemaError, StaleStoreError
from memfeed.schema.compare import equal
from memfeed.schema.infer import infer


class Images:
    """Smooth images, which JPEG makes small, beside masks and labels."""

    def __init__(self, count=20, channels_last=False, changes=0, drifts_from=None):
        self.count, self.channels_last, self.changes, self.drifts_from = count, channels_last, changes, drifts_from

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        height, width = 40 + self.changes * (index % 3), 56 + self.changes * (index % 4)
        if self.drifts_from is not None and index >= self.drifts_from:
            height += 8
        ramp = np.add.outer(np.arange(height) * 2, np.arange(width)) + 5 * index
        image = np.stack([ramp % 256, (ramp // 2) % 256, 255 - ramp % 256]).astype(np.uint8)
        image = np.ascontiguousarray(image.transpose(1, 2, 0)) if self.channels_last else image
        return {"image": torch.from_numpy(image), "mask": torch.from_numpy(ramp > 100), "label": index}


def cached(dataset, path, **options):
    return memfeed.cache(dataset, path, **{"workers": 0, "progress": False, **options})


def stored(store):
    return {field.name: field for field in store._view.manifest.schema}


@pytest.mark.parametrize("changes", [0, 1])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_images_are_kept_as_jpeg_near_to_the_original(tmp_path, changes, channels_last, workers):
    dataset = Images(channels_last=channels_last, changes=changes)
    forms = {"image": Jpeg(quality=95), "mask": "zstd"}
    store = cached(dataset, tmp_path / "s.mf", forms=forms, workers=workers)
    raw = cached(dataset, tmp_path / "raw.mf")
    assert store.schema == raw.schema
    assert stored(store)["image"].coding.parameters["layout"] == ("hwc" if channels_last else "chw")
    assert store.nbytes < raw.nbytes / 3
    for index in range(len(dataset)):
        found, expected = store[index], dataset[index]
        assert equal({**found, "image": 0}, {**expected, "image": 0})
        assert (found["image"].int() - expected["image"].int()).abs().float().mean() < 2
    (loss,) = store._view.manifest.attributes.losses
    assert 0 < loss.mean < 2
    assert loss.mean < loss.largest < 60
    assert 35 < loss.psnr < 60
    assert loss.samples >= 16


def test_a_dim_that_changes_later_promotes_the_column_and_no_blob_is_written_again(tmp_path):
    dataset = Images(count=60, drifts_from=45)
    store = cached(dataset, tmp_path / "s.mf", forms={"image": "zstd", "mask": "lz4"}, workers=2)
    assert store.schema == cached(dataset, tmp_path / "raw.mf", workers=2).schema
    assert all(equal(store[index], dataset[index]) for index in range(60))


@pytest.mark.parametrize("lazily", [False, True])
def test_the_same_call_opens_the_store_and_another_form_is_stale(tmp_path, lazily):
    path = tmp_path / "s.mf"
    first = cached(Images(), path, forms={"image": "jpeg:90"})
    assert cached(Images(), path, forms={"image": "jpeg:90"}, lazily=lazily) == first
    assert cached(Images(), path, lazily=lazily) == first
    for forms, said in (
        ({"image": "jpeg:95"}, "quality=90.*quality=95"),
        ("zstd", "jpeg.*zstd"),
        ({"mask": "zstd"}, "raw.*zstd"),
    ):
        with pytest.raises(StaleStoreError, match=said):
            cached(Images(), path, forms=forms, lazily=lazily)
    assert "zstd" in stored(cached(Images(), path, forms="zstd", overwrite=True))["mask"].describe()


def test_an_interrupted_conversion_goes_on_in_its_form(tmp_path):
    class Fails(Images):
        broken = True

        def __getitem__(self, index):
            if self.broken and index == 17:
                raise OSError("the disk is away")
            return super().__getitem__(index)

    dataset, path = Fails(count=60), tmp_path / "s.mf"
    with pytest.raises(memfeed.errors.SampleError):
        cached(dataset, path, forms={"image": "zstd"})
    dataset.broken = False
    with pytest.raises(StaleStoreError, match="zstd"):
        cached(dataset, path, forms={"image": "lz4"})
    store = cached(dataset, path)
    assert stored(store)["image"].kind == "coded"
    assert equal(store[17], dataset[17])


def test_appended_and_joined_rows_have_the_form_of_the_store(tmp_path):
    path = tmp_path / "s.mf"
    cached(Images(), path, forms={"image": "jpeg:95", "mask": "zstd"})
    store = memfeed.append(path, Images(count=7), workers=0, progress=False)
    assert len(store) == 27
    assert equal(store[20], store[0])
    assert equal(memfeed.concat([path, path], tmp_path / "t.mf", progress=False)[47], store[0])
    cached(Images(), tmp_path / "raw.mf")
    with pytest.raises(SchemaError):
        memfeed.concat([path, tmp_path / "raw.mf"], tmp_path / "u.mf", progress=False)


def test_damaged_blobs_are_made_again(tmp_path):
    path, dataset = tmp_path / "s.mf", Images()
    before = cached(dataset, path, forms={"image": "jpeg:95", "mask": "zstd"})
    expected = [before[index] for index in range(len(dataset))]
    heap = path / "image" / "heap.bin"
    heap.chmod(0o644)
    data = bytearray(heap.read_bytes())
    data[1000:1200] = bytes(200)
    heap.write_bytes(bytes(data))
    store = memfeed.repair(dataset, path, progress=False)
    assert equal([store[index] for index in range(len(dataset))], expected)


def test_a_filled_store_is_the_one_that_cache_writes(tmp_path):
    dataset, forms = Images(), {"image": "jpeg:90", "mask": "zstd"}
    loader = memfeed.Loader(dataset, 4, shuffle=True, seed=1, cache=tmp_path / "filled.mf", forms=forms)
    expected = memfeed.Loader(cached(dataset, tmp_path / "s.mf", forms=forms), 4, shuffle=True, seed=1)
    assert equal(list(loader), list(expected))
    loader.store.finish()
    filled = memfeed.open(tmp_path / "filled.mf")
    assert stored(filled) == stored(memfeed.open(tmp_path / "s.mf"))
    assert filled._view.manifest.attributes.losses
    again = memfeed.Loader(filled, 4, forms=forms)  # as a trainer makes it of the attributes of another loader
    assert len(list(again)) == 5
    assert len(list(memfeed.Loader(filled, 4, forms={"mask": torch.bool}, budget="1MB"))) == 5
    others = [{"forms": "zstd"}, {"forms": {"mask": torch.uint8}}, {"forms": 256}, {"budget": 1000}]
    for given in others:
        with pytest.raises(memfeed.errors.LoaderError, match=f"found {next(iter(given))}=.* beside Store"):
            memfeed.Loader(filled, 4, **given)
    with pytest.raises(memfeed.errors.LoaderError, match="budget='1GB' beside Tensor"):
        memfeed.Loader(torch.zeros(4, 3), 2, budget="1GB")


def test_a_store_at_an_address_is_decoded_here(tmp_path):
    store = cached(Images(count=60), tmp_path / "s.mf", forms={"image": "jpeg:90", "mask": "zstd"})
    memfeed.push(store, f"file://{tmp_path}/there", progress=False)
    opened = memfeed.open(f"file://{tmp_path}/there", cache_dir=tmp_path / "cache")
    options = {"batch_size": 8, "shuffle": True, "seed": 2}
    assert equal(list(memfeed.Loader(opened, **options)), list(memfeed.Loader(store, **options)))
    pulled = memfeed.pull(f"file://{tmp_path}/there", tmp_path / "pulled.mf", progress=False)
    assert equal(memfeed.open(pulled)[59] if not hasattr(pulled, "schema") else pulled[59], store[59])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, Forms()),
        ("zstd:3", Forms(codec=Zstd(level=3))),
        (256, Forms(keep=256)),
        ("encoded", Forms(keep="encoded")),
        ((256, "jpeg:90"), Forms(keep=256, codec=Jpeg(quality=90))),
        ("lossy", Forms(lossy=True)),
        ({float: torch.float16, "mask": torch.uint8}, Forms(floats=torch.float16, dtypes={"mask": torch.uint8})),
        (
            {"image": (64, "jpeg"), "mask": "raw"},
            Forms(keep=64, keep_name="image", codecs={"image": Jpeg(), "mask": None}),
        ),
        ({"image": "lossy"}, Forms(lossy=frozenset({"image"}))),
    ],
    ids=str,
)
def test_what_forms_says(given, expected):
    assert forms_of(given) == expected


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("zip", "expected for each field"),
        (7, "8 or more"),
        (True, "expected for each field"),
        (torch.float16, r"forms=\{float: torch.float16\}"),
        (("zstd", "lz4"), "expected for each field"),
        (("raw", "zstd"), "expected for each field"),
        (("encoded", "zstd"), "compressed already"),
        ({float: "zstd"}, "a dtype for float"),
        ({"a": 64, "b": 96}, "several sizes"),
        ({float: torch.float16, "x": torch.float32}, "leave one of them out"),
    ],
    ids=str,
)
def test_forms_without_a_meaning(given, said):
    with pytest.raises(ValueError, match=said):
        forms_of(given)


@pytest.mark.parametrize(
    ("forms", "error", "said"),
    [
        ({"picture": "zstd"}, FieldError, "no field 'picture'"),
        ({"picture": 256}, ValueError, "split"),
        ({"mask": "jpeg"}, SchemaError, "field mask: found that jpeg has uint8 images"),
        ("lossy", ValueError, "without budget"),
    ],
)
def test_forms_that_do_not_suit_the_samples(tmp_path, forms, error, said):
    with pytest.raises(error, match=said):
        cached(Images(), tmp_path / "s.mf", forms=forms)
    assert not (tmp_path / "s.mf").exists()


def test_a_codec_for_all_fields_that_suits_none(tmp_path):
    with pytest.raises(SchemaError, match="found no field that zstd suits"):
        cached([torch.zeros(2)] * 5, tmp_path / "s.mf", forms="zstd")


@pytest.mark.parametrize("form", ["encoded", "full", 256])
def test_the_size_of_images_is_not_that_of_a_number(form):
    schema = infer([{"image": torch.zeros(3, 40, 40), "label": 3, "file": b"x", "name": "a"}] * 4).schema
    for name in "label", "name":
        with pytest.raises(SchemaError, match=f"field {name}: found forms=.*; expected the field of the images"):
            coded_schema(schema, forms_of({name: form}))
    for name in "image", "file":
        assert coded_schema(schema, forms_of({name: form})) == schema


def test_small_rows_are_not_compressed_unless_they_are_named():
    found = infer([{"id": 3, "x": torch.zeros(99)}] * 4)
    assert [field.kind for field in coded_schema(found.schema, forms_of("zstd"))] == ["fixed", "coded"]
    assert [field.kind for field in coded_schema(found.schema, forms_of({"id": "zstd"}))] == ["coded", "fixed"]


def test_the_dims_that_rows_have_in_common():
    schema = infer([{"image": torch.zeros(4, 5, 3)}, {"image": torch.zeros(6, 7, 3)}, {"image": None}]).schema
    dims = np.array([[4, 5, 3], [-1, -1, -1], [6, 5, 3]])
    assert observed_shapes(schema, [dims]) == [(None, 5, 3)]
    assert observed_shapes(schema, [None]) == [(None, None, None)]
    assert observed_shapes(schema, [dims[1:2]]) == [(None, None, None)]


def test_a_lossless_codec_loses_nothing_and_equal_images_have_no_psnr():
    schema = infer([torch.zeros(3, 16, 16, dtype=torch.uint8)] * 2).schema
    rows = [np.full((3, 16, 16), 128, np.uint8)]
    assert losses_of(coded_schema(schema, forms_of("zstd")), lambda index: rows) == ()
    (loss,) = losses_of(coded_schema(schema, forms_of("jpeg")), lambda index: rows)
    assert (loss.mean, loss.largest, loss.psnr) == (0, 0, None)


class Masks(Images):
    """Color images beside masks of one channel, and of several."""

    def __getitem__(self, index):
        image = super().__getitem__(index)["image"]
        plane = (image[0] // 28).contiguous()
        of_objects = Mask(torch.stack([plane == one for one in range(3)]).to(torch.uint8))
        return {"image": image, "plane": plane, "channel": plane[None], "objects": of_objects}


@pytest.mark.parametrize("changes", [0, 1])
@pytest.mark.parametrize("lazily", [False, True])
def test_a_lossy_codec_for_all_leaves_masks_as_they_are(tmp_path, changes, lazily):
    dataset, path = Masks(changes=changes), tmp_path / "s.mf"
    store = cached(dataset, path, forms="jpeg:90", lazily=lazily, split="auto" if lazily else None)
    for index in range(len(dataset)):
        found, expected = store[index], dataset[index]
        assert all(torch.equal(found[name], expected[name]) for name in ("plane", "channel", "objects"))
    if lazily:
        store.finish()
    assert {name for name, field in stored(memfeed.open(path)).items() if field.coding} == {"image"}
    cached(dataset, path, forms="jpeg:90")
    with pytest.raises(StaleStoreError, match="quality=90.*quality=80"):
        cached(dataset, path, forms="jpeg:80")
    raw = cached(dataset, tmp_path / "raw.mf")
    with pytest.raises(StaleStoreError, match="field image is raw"):
        cached(dataset, raw.path, forms="jpeg:90")
    again = memfeed.recode(raw, tmp_path / "again.mf", "jpeg:90", progress=False)
    assert stored(again)["plane"].coding is None


def test_gray_images_are_named_for_a_lossy_codec(tmp_path):
    gray = [(torch.full((1, 40, 40), i, dtype=torch.uint8), i) for i in range(8)]
    with pytest.raises(SchemaError, match="with three channels, for one channel may be a mask.*name the field"):
        cached(gray, tmp_path / "s.mf", forms="jpeg:90")
    assert stored(cached(gray, tmp_path / "s.mf", forms={"0": "jpeg:90"}))["0"].coding.codec == "jpeg"
