"""A collate_fn beside a cut pipeline: it gets the samples that the dataset itself returns, random part included.

The first part compares with DataLoader for collate functions as users have them. There the random part draws, but does
the same each time, so that both must give the same values.
"""

import dataclasses
import pickle
import threading
from collections import namedtuple
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, default_collate
from torchvision import tv_tensors
from torchvision.transforms import v2

import memfeed
from memfeed import Blocks, Loader
from memfeed import transforms as T
from memfeed.errors import LoaderError, TransformError
from memfeed.loading.epoch import PrefetchPolicy
from memfeed.schema.infer import infer
from memfeed.store.store import with_parts
from memfeed.transforms import Transform
from short_form import short_form
from support import Made, equal

N, SIDE, CLASSES, BATCH = 11, 12, 4, 4
TO_FLOATS = [v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.4] * 3, [0.2] * 3)]
FIXED = v2.Compose([v2.RandomHorizontalFlip(p=1), v2.RandomVerticalFlip(p=0), v2.RandomCrop(SIDE), *TO_FLOATS])
FIXED_BYTES = v2.Compose([v2.RandomHorizontalFlip(p=1), v2.RandomVerticalFlip(p=0)])
RANDOM = v2.Compose([v2.RandomHorizontalFlip(), v2.RandomCrop(SIDE - 4), *TO_FLOATS, v2.RandomErasing(p=0.5)])
Record = namedtuple("Record", "image label")


@dataclasses.dataclass
class Item:
    image: torch.Tensor
    label: int
    name: str


class Photos(Dataset):
    """Samples of the form that ``make(image, index)`` gives, after a pipeline of torchvision."""

    def __init__(self, make, transform):
        self.make, self.transform = make, transform

    def __len__(self):
        return N

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        image = torch.randint(0, 256, (3, SIDE, SIDE), generator=generator, dtype=torch.uint8)
        return self.make(self.transform(image), index)


def pair(image, index):
    return image, index % CLASSES


def labelled(image, index):
    return {"pixel_values": image, "label": index % CLASSES, "caption": f"no. {index}", "score": index / 7}


def detected(image, index):
    boxes = torch.arange(4.0 * (index % 3)).view(-1, 4) + index
    return image, {"boxes": boxes, "labels": torch.arange(len(boxes)), "image_id": index}


def worded(image, index):
    return {"pixel_values": image, "input_ids": list(range(2, index % 4 + 4)), "label": index % CLASSES}


def captioned(image, index):
    return image, torch.arange(index % 4 + 1), index % CLASSES


def named(image, index):
    return image, index % CLASSES, f"photos/{index}.jpg"


def partly(image, index):
    return {"image": image, "depth": None if index % 3 == 1 else torch.full((2, 2), float(index))}


def graph(image, index):
    data = pytest.importorskip("torch_geometric.data")
    edges = torch.stack([torch.arange(index), torch.arange(index) + 1])
    return image, data.Data(x=torch.full((index + 1, 2), float(index)), edge_index=edges, y=index)


# --- collate functions


def mixup(samples):
    torch.manual_seed(0)
    return v2.MixUp(num_classes=CLASSES)(*default_collate(samples))


def cutmix(samples):
    torch.manual_seed(0)
    return v2.CutMix(num_classes=CLASSES)(*default_collate(samples))


def detection(samples):
    return tuple(zip(*samples))  # noqa: B905


def default_data_collator(samples):
    return pytest.importorskip("transformers").default_data_collator(samples)


def padding_collator(samples):
    """Take the pixels out, as for models that read both, and pad the rest by DataCollatorWithPadding."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    pixels = torch.stack([sample.pop("pixel_values") for sample in samples])
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[PAD]": 0, "[UNK]": 1, "a": 2}, unk_token="[UNK]"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]")
    return {**transformers.DataCollatorWithPadding(tokenizer)(samples), "pixel_values": pixels}


def fast_collate(samples):
    """As timm's: one tensor of uint8 or float images, filled row by row, and int64 labels."""
    images = torch.empty((len(samples), *samples[0][0].shape), dtype=samples[0][0].dtype)
    for row, (image, _) in zip(images, samples, strict=True):
        row.copy_(image)
    return images, torch.tensor([label for _, label in samples], dtype=torch.int64)


def fast_mixup(samples):
    """As timm's: mixes the bytes of each image with those of the one at the other end of the batch."""
    share, mixed = 0.3, torch.empty((len(samples), 3, SIDE, SIDE), dtype=torch.uint8)
    for row, ((image, _), (other, _)) in zip(mixed, zip(samples, samples[::-1], strict=True), strict=True):
        row.copy_((image.float() * share + other.float() * (1 - share)).round())
    one_hot = torch.eye(CLASSES)[[label for _, label in samples]]
    return mixed, one_hot * share + one_hot.flip(0) * (1 - share)


def diffusion(samples):
    pixels = torch.stack([sample["pixel_values"] for sample in samples])
    pixels = pixels.to(memory_format=torch.contiguous_format).float()
    return {"pixel_values": pixels, "captions": [sample["caption"] for sample in samples]}


def drop_none(samples):
    samples = [sample for sample in samples if sample is not None and sample["depth"] is not None]
    return default_collate(samples) if samples else None


def pad_tokens(samples):
    images, tokens, labels = zip(*samples, strict=True)
    padded = pad_sequence(list(tokens), batch_first=True, padding_value=-1)
    return torch.stack(images), padded, torch.tensor([len(one) for one in tokens]), torch.tensor(labels)


def graphs(samples):
    batch = pytest.importorskip("torch_geometric.data").Batch.from_data_list([one for _, one in samples])
    return torch.stack([image for image, _ in samples]), batch.to_dict()


def dict_of_lists(samples):
    return {key: [sample[key] for sample in samples] for key in samples[0]}


def numpy_collate(samples):
    if isinstance(samples[0], np.ndarray | torch.Tensor):
        return np.stack([np.asarray(sample) for sample in samples])
    if isinstance(samples[0], tuple | list):
        return [numpy_collate(part) for part in zip(*samples, strict=True)]
    return np.array(samples)


def views_and_names(samples):
    images = torch.stack([image for image, *_ in samples])
    return (
        (images, images.flip(-1)),
        torch.LongTensor([label for _, label, _ in samples]),
        [name for *_, name in samples],
    )


class Collator:
    def __init__(self, key):
        self.key = key

    def __call__(self, samples):
        return torch.stack([sample[self.key] for sample in samples]), [sample["score"] for sample in samples]


COLLATES = {
    "MixUp of torchvision": (pair, FIXED, mixup),
    "CutMix of torchvision": (pair, FIXED, cutmix),
    "detection reference": (detected, FIXED, detection),
    "default_data_collator": (labelled, FIXED, default_data_collator),
    "DataCollatorWithPadding": (worded, FIXED, padding_collator),
    "timm": (pair, FIXED_BYTES, fast_collate),
    "timm, floats": (pair, FIXED, fast_collate),
    "timm with mixup": (pair, FIXED_BYTES, fast_mixup),
    "diffusers": (labelled, FIXED, diffusion),
    "without None": (partly, FIXED, drop_none),
    "pad_sequence": (captioned, FIXED, pad_tokens),
    "graphs": (graph, FIXED, graphs),
    "dict of lists": (labelled, FIXED, dict_of_lists),
    "numpy": (pair, FIXED, numpy_collate),
    "views and names": (named, FIXED, views_and_names),
    "a class": (labelled, FIXED, Collator("pixel_values")),
    "a lambda": (pair, FIXED, lambda samples: [image.sum() * label for image, label in samples]),
}


def same(found, expected):
    """Return True if types, keys and values are equal; floats within the rounding of a normalisation."""
    if type(found) is not type(expected):
        return False
    if isinstance(found, torch.Tensor | np.ndarray):
        one, other = torch.as_tensor(found), torch.as_tensor(expected)
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return False
        return torch.allclose(one, other, atol=2e-6) if one.is_floating_point() else torch.equal(one, other)
    if isinstance(found, Mapping):
        return list(found) == list(expected) and all(same(found[key], expected[key]) for key in found)
    if isinstance(found, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    if dataclasses.is_dataclass(found):
        return same(vars(found), vars(expected))
    return found == expected


def of_parts(loader, **options):
    """Return a DataLoader of the parts of a loader, as Accelerate and the Trainer of transformers make one."""
    return DataLoader(loader.dataset, batch_sampler=loader.batch_sampler, collate_fn=loader.collate_fn, **options)


@pytest.mark.parametrize("name", short_form(COLLATES, 8))
def test_batches_are_those_of_a_dataloader(name, tmp_path):
    make, transform, collate = COLLATES[name]
    dataset = Photos(make, transform)
    theirs = list(DataLoader(dataset, BATCH, collate_fn=collate))
    loader = Loader(dataset, BATCH, cache=tmp_path / "s.mf", collate_fn=collate)
    for state in ("while it is filled", "from the finished store"):
        assert same(list(loader), theirs), state
        loader.store.finish()
        loader = Loader(dataset, BATCH, cache=tmp_path / "s.mf", collate_fn=collate)
    assert loader.store.transform is not None  # else nothing was cut, and nothing shown
    assert loader.store.column(loader.store.schema.fields[0].path).dtype == torch.uint8
    opened = memfeed.open(tmp_path / "s.mf", types=())
    assert same(list(Loader(opened, BATCH, collate_fn=collate)), theirs)
    assert same(list(of_parts(loader)), theirs)


@pytest.mark.parametrize(
    "make",
    [
        pair, labelled, detected, worded, partly, lambda image, i: image, lambda image, i: [image, i],
        lambda image, i: Record(image, i), lambda image, i: Item(image, i, f"{i}"),
        lambda image, i: {"in": {"image": image, "flag": i % 2 == 0}, "raw": bytes(i), "meta": {"i": [i, None]}},
        lambda image, i: {"image": tv_tensors.Image(image), "boxes": tv_tensors.BoundingBoxes(
            torch.ones(i % 3, 4), format="XYXY", canvas_size=(SIDE, SIDE + i)
        )},
    ],
)  # fmt: skip
def test_samples_have_the_form_of_the_dataset(make, tmp_path):
    dataset = Photos(make, FIXED)
    store = cut(dataset, tmp_path / "s.mf")
    found = [sample for samples in Loader(store, BATCH, collate_fn=list) for sample in samples]
    assert same(found, [dataset[i] for i in range(N)])


# --- random pipelines: the samples of a collate_fn are those of the loader's own batches


def cut(dataset, path=None, **options):
    return memfeed.cache(dataset, path, **{"split": True, "workers": 0, "progress": False, **options})


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return cut(Photos(pair, RANDOM), tmp_path_factory.mktemp("s") / "s.mf")


def check_rows(batches, samples):
    """Check that lists of samples are these batches (images, labels), row by row."""
    for (images, labels), row in zip(batches, samples, strict=True):
        assert [label for _, label in row] == labels.tolist()
        assert {type(one) for one in row} == {tuple}
        assert all(torch.equal(image, given) for given, (image, _) in zip(images, row, strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {}, {"shuffle": True}, {"shuffle": Blocks(2)}, {"sampler": [3, 1, 3, 3, 9, 0]},
        {"batch_sampler": [[3, 1], [4], [7, 7, 0]], "batch_size": 1}, {"drop_last": True}, {"ranks": (1, 2)},
        {"last": "uneven", "ranks": (1, 2)}, {"prefetch_factor": 0}, {"device": "cpu"}, {"placement": "pinned"},
    ],
    ids=repr,
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:found 11 rows for 2 ranks")
def test_a_collate_fn_gets_the_rows_of_the_batch(store, options):
    options = {"batch_size": BATCH, "seed": 5, **options}
    for epoch in (0, 3):
        plain, collated = Loader(store, **options), Loader(store, collate_fn=list, **options)
        plain.set_epoch(epoch)
        collated.set_epoch(epoch)
        check_rows(list(plain), list(collated))


def test_epochs_differ_and_come_again(store):
    loader = Loader(store, N, seed=1, collate_fn=default_collate)
    first, second = next(iter(loader)), next(iter(loader))
    assert not torch.equal(first[0], second[0])
    loader.set_epoch(0)
    assert equal(next(iter(loader)), first)


def test_images_are_views_of_one_batch(store):
    (samples,) = Loader(store, N, seed=1, collate_fn=list)
    assert len({image.untyped_storage().data_ptr() for image, _ in samples}) == 1
    before = [image.clone() for image, _ in samples]
    later, *_ = Loader(store, N, seed=1, collate_fn=lambda samples: [image.zero_() for image, _ in samples])
    assert all(image.max() == 0 for image in later)
    assert all(torch.equal(image, was) for (image, _), was in zip(samples, before, strict=True))
    (again,) = Loader(store, N, seed=1, collate_fn=list)
    assert all(torch.equal(image, was) for (image, _), was in zip(again, before, strict=True))


def test_a_prefetching_thread_transforms_and_the_caller_collates():
    transformed, collated = set(), set()

    class Traced(T.CenterCrop):
        def apply(self, batch, keys, **options):
            transformed.add(threading.current_thread())
            return super().apply(batch, keys, **options)

    def collate(samples):
        collated.add(threading.current_thread())
        return len(samples)

    plain = memfeed.cache(torch.zeros(N, 3, 8, 8), progress=False)
    loader = Loader(with_parts(plain, transform=Traced(4)), 2, collate_fn=collate)
    loader._epochs.reader.use(loader._effective_settings())
    loader._epochs.policy = PrefetchPolicy(allowed=True, always=True)
    assert list(loader) == [2] * 5 + [1]
    assert collated == {threading.current_thread()}
    assert transformed
    assert not transformed & collated


def test_several_sizes(tmp_path):
    class Sizes(Photos):
        def __getitem__(self, index):
            image = torch.full((3, SIDE + index % 3, SIDE + 2), index, dtype=torch.uint8)
            return self.make(self.transform(image), index)

    random_crop = v2.Compose([v2.RandomHorizontalFlip(), v2.RandomCrop(8), *TO_FLOATS])
    crops = cut(Sizes(pair, random_crop), tmp_path / "a.mf", forms="full")
    check_rows(list(Loader(crops, BATCH, seed=2)), list(Loader(crops, BATCH, seed=2, collate_fn=list)))
    sizes = cut(Sizes(pair, v2.Compose([v2.RandomHorizontalFlip(), *TO_FLOATS])), tmp_path / "b.mf")
    check_rows(list(Loader(sizes, BATCH, seed=2)), list(Loader(sizes, BATCH, seed=2, collate_fn=list)))
    found = list(Loader(sizes, BATCH, seed=2, collate_fn=detection))
    assert [tuple(image.shape) for image in found[0][0]] == [(3, SIDE + i % 3, SIDE + 2) for i in range(4)]


def test_functions_of_the_users_run_for_each_sample(tmp_path):
    def noisy(image):
        return image + torch.rand(())

    dataset = Photos(pair, v2.Compose([v2.RandomHorizontalFlip(), *TO_FLOATS, noisy]))
    slow = cut(dataset, tmp_path / "s.mf")
    assert not slow.transform.runs_anywhere
    check_rows(list(Loader(slow, BATCH, seed=2)), list(Loader(slow, BATCH, seed=2, collate_fn=list)))


def test_windows(tmp_path):
    store = cut(Photos(lambda image, i: {"image": image, "step": i}, RANDOM), tmp_path / "s.mf")
    view = store.windows({"image": [-1, 0], "step": [0, 1, 2]}, within=None)
    batches = list(Loader(view, BATCH, seed=2))
    for batch, samples in zip(batches, Loader(view, BATCH, seed=2, collate_fn=list), strict=True):
        assert samples[0]["image"].shape == (2, 3, SIDE - 4, SIDE - 4)
        assert equal(default_collate(samples), batch)
        assert list(samples[0]) == list(batch)


def test_tensordicts(tmp_path):
    store = cut(Photos(lambda image, i: TensorDict({"image": image, "n": torch.tensor(i)}), RANDOM), tmp_path / "s.mf")
    for batch, moved in zip(
        *(Loader(store, BATCH, seed=2, collate_fn=f) for f in (None, lambda s: s.to("cpu"))), strict=True
    ):
        assert equal(moved, batch)
    for batch, samples in zip(*(Loader(store, BATCH, seed=2, collate_fn=f) for f in (None, list)), strict=True):
        assert isinstance(samples[0], TensorDict)
        assert equal(torch.stack(samples), batch)


def test_single_samples(store):
    plain = Loader(store, 1, seed=4)
    for options in ({}, {"collate_fn": tuple}):
        for (images, labels), (image, label) in zip(plain, Loader(store, None, seed=4, **options), strict=True):
            assert torch.equal(image, images[0])
            assert (label, type(label)) == (int(labels), int)
        plain.set_epoch(0)


def test_masks_and_rows_stand_beside_what_a_collate_fn_makes(store):
    options = {"last": "pad", "return_rows": True, "shuffle": True, "seed": 3}
    plain, collated = list(Loader(store, BATCH, **options)), list(Loader(store, BATCH, collate_fn=list, **options))
    assert [len(batch) for batch in collated] == [3] * 3
    check_rows([batch for batch, _, _ in plain], [batch for batch, _, _ in collated])
    assert equal([batch[1:] for batch in plain], [batch[1:] for batch in collated])
    keyed = next(iter(Loader(store, BATCH, collate_fn=lambda s: {"n": len(s)}, **options)))
    assert list(keyed) == ["n", "valid", "rows"]
    with pytest.raises(LoaderError, match='found a batch with the key "rows".*expected another name'):
        next(iter(Loader(store, BATCH, collate_fn=lambda s: {"rows": len(s)}, return_rows=True)))


def test_arrays(store):
    images, labels = next(iter(Loader(store, BATCH, collate_fn=default_collate, as_="numpy")))
    assert (type(images), images.dtype, labels.tolist()) == (np.ndarray, np.float32, [0, 1, 2, 3])


def test_padding_is_an_error_before_the_first_batch(tmp_path):
    store = cut(Photos(worded, RANDOM), tmp_path / "s.mf")
    error = "found pad= and a collate_fn, or batch_size=None; expected batches of the loader's own: leave pad= out"
    with pytest.raises(LoaderError, match=error):
        Loader(store, BATCH, pad={"input_ids": 0}, collate_fn=list)
    with pytest.raises(LoaderError, match=error):
        memfeed.Collate(pad={"input_ids": 0}, collate_fn=list)
    loader = Loader(store, BATCH, pad={"input_ids": 0})
    with pytest.raises(LoaderError, match=error):
        loader.collate_fn = list


def test_a_state_resumes(store):
    loader = Loader(store, BATCH, shuffle=True, seed=7, collate_fn=default_collate)
    running = iter(loader)
    next(running)
    state, rest = loader.state_dict(), list(running)
    other = Loader(store, BATCH, shuffle=True, seed=7, collate_fn=default_collate)
    other.load_state_dict(state)
    assert equal(list(other), rest)


# --- a transform of the user's own


def test_a_transform_that_is_given_takes_what_the_collate_fn_returns(store):
    seen = []

    def collate(samples):
        seen.extend(samples)
        return default_collate(samples)

    (images, _), *_ = Loader(store, BATCH, collate_fn=collate, transform=T.CenterCrop(4))
    assert seen[0][0].dtype == images.dtype == torch.uint8
    assert (tuple(seen[0][0].shape), tuple(images.shape)) == ((3, SIDE, SIDE), (BATCH, 3, 4, 4))
    assert next(iter(Loader(store, BATCH, collate_fn=list, transform={})))[0][0].dtype == torch.uint8
    both = Loader(store, BATCH, collate_fn=default_collate, transform=T.CenterCrop(4))
    assert equal(list(of_parts(both)), list(both))


class TwoViews(Transform):
    """Of (image, label): ((image, the image upside down), label, the height)."""

    of_whole_batches = True

    def __init__(self, schema):
        super().__init__()
        self.schema = schema

    def apply(self, batch, keys, **options):
        images, labels = batch
        turned = torch.rand(len(images), generator=torch.Generator().manual_seed(keys.seed + keys.epoch)) < 0.5
        shown = torch.where(turned[:, None, None, None], images.flip(-2), images)
        return ((shown, images.flip(-1)), labels, [f"{images.shape[-2]} high"] * len(labels))


VIEWS = infer([((torch.zeros(3, SIDE, SIDE), torch.zeros(3, SIDE, SIDE)), 1, "t")] * 2).schema


def test_a_transform_says_which_samples_it_returns():
    images = torch.randint(0, 256, (N, 3, SIDE, SIDE), dtype=torch.uint8)
    plain = memfeed.cache(Made([*zip(images, range(N), strict=True)]), progress=False)
    store = with_parts(plain, transform=TwoViews(VIEWS))
    loader = Loader(store, N, seed=1, collate_fn=list)
    for epoch, samples in enumerate(next(iter(loader)) for _ in range(2)):
        one, other, labels = zip(*[(*views, label) for views, label, _ in samples], strict=True)
        assert labels == tuple(range(N))
        assert {type(label) for label in labels} == {int}
        assert [text for *_, text in samples] == [f"{SIDE} high"] * N
        turned = torch.rand(N, generator=torch.Generator().manual_seed(1 + epoch)) < 0.5
        assert torch.equal(torch.stack(other), images.flip(-1))
        assert all(
            torch.equal(image, given.flip(-2) if is_turned else given)
            for image, given, is_turned in zip(one, images, turned.tolist(), strict=True)
        )
    expected = list(Loader(store, BATCH, seed=1, collate_fn=list))
    loader = Loader(store, BATCH, seed=1, collate_fn=list)
    assert equal(list(DataLoader(store, BATCH, collate_fn=memfeed.Collate(seed=1, collate_fn=list))), expected)
    assert equal(list(of_parts(loader)), expected)


def test_a_transform_that_says_nothing_must_keep_the_structure():
    plain = memfeed.cache(Made([(torch.zeros(3, 4, 4), i) for i in range(N)]), progress=False)
    loader = Loader(with_parts(plain, transform=TwoViews(None)), BATCH, collate_fn=list)
    with pytest.raises(TransformError, match="found a tuple of 3 in a transformed batch.*its attribute `schema`"):
        next(iter(loader))
    wrong = Loader(with_parts(plain, transform=TwoViews({"image": 0})), BATCH, collate_fn=list)
    with pytest.raises(TransformError, match=r"found a dict as TwoViews.schema; expected a memfeed.schema.*or None"):
        next(iter(wrong))


def test_boxes_have_the_size_of_the_image_that_they_moved_with(tmp_path):
    def boxed(image, index):
        boxes = tv_tensors.BoundingBoxes(torch.ones(1, 4), format="XYXY", canvas_size=(SIDE, SIDE))
        return {"image": image, "boxes": boxes}

    store = memfeed.cache(Photos(boxed, v2.Identity()), tmp_path / "s.mf", progress=False)
    moved = with_parts(store, transform=T.Compose([T.CenterCrop(6)], on=["image", "boxes"]))
    for samples in (next(iter(Loader(moved, BATCH, collate_fn=list))), moved_by_torch(moved)):
        assert [sample["boxes"].canvas_size for sample in samples] == [(6, 6)] * BATCH
        assert samples[0]["boxes"].tolist() == [[0, 0, 0, 0]]


def moved_by_torch(store):
    return next(iter(DataLoader(store, BATCH, collate_fn=memfeed.Collate(collate_fn=list))))


def test_labels_that_were_mixed_are_tensors(tmp_path):
    store = cut(Photos(pair, RANDOM), tmp_path / "s.mf")
    mixing = with_parts(store, transform=T.Compose([store.transform, T.MixUp(num_classes=CLASSES)]))
    (images, labels), *_ = Loader(mixing, BATCH, seed=1)
    samples, *_ = Loader(mixing, BATCH, seed=1, collate_fn=list)
    assert torch.equal(torch.stack([label for _, label in samples]), labels)
    assert torch.equal(torch.stack([image for image, _ in samples]), images)


# --- where another component makes the batches, or another process


def test_a_collate_fn_that_is_put_in_later(store):
    expected = list(Loader(store, BATCH, seed=2, shuffle=True, collate_fn=detection))
    loader = Loader(store, BATCH, seed=2, shuffle=True)
    loader.collate_fn = detection
    assert equal(list(of_parts(loader)), expected)
    loader.set_epoch(0)
    assert equal(list(loader), expected)
    loader.set_epoch(0)
    sent = pickle.loads(pickle.dumps((store, loader.collate_fn)))  # as to spawned workers
    assert equal(list(DataLoader(sent[0], batch_sampler=loader.batch_sampler, collate_fn=sent[1])), expected)
    again = pickle.loads(pickle.dumps(loader))
    again.set_epoch(0)
    assert equal(list(again), expected)
    anew = Loader(store, BATCH, seed=2, shuffle=True, collate_fn=loader.collate_fn)  # as Lightning does
    anew.set_epoch(0)
    assert equal(list(anew), expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_of_a_dataloader(store, workers):
    loader = Loader(store, BATCH, seed=2, shuffle=True, collate_fn=default_collate, return_rows=True)
    theirs = of_parts(loader, num_workers=workers, multiprocessing_context="fork" if workers else None)
    for epoch in range(2):
        found = list(theirs)
        loader.set_epoch(epoch)
        assert equal(found, list(Loader.__iter__(loader)))


def test_accelerate(store):
    accelerate = pytest.importorskip("accelerate")
    options = {"batch_size": BATCH, "seed": 2, "shuffle": True, "collate_fn": lambda samples: default_collate(samples)}
    prepared = accelerate.Accelerator(cpu=True).prepare(Loader(store, **options))
    assert equal(list(prepared), list(Loader(store, **options)))


def test_collate_takes_a_collate_fn(store):
    expected = list(Loader(store, BATCH, seed=2, collate_fn=default_collate))
    assert equal(
        list(DataLoader(store, BATCH, collate_fn=memfeed.Collate(seed=2, collate_fn=default_collate))), expected
    )
    with pytest.raises(LoaderError, match=r"found a Collate as the collate_fn of a Loader; expected its arguments"):
        Loader(store, BATCH, collate_fn=memfeed.Collate())


def test_a_view_without_the_fields_of_the_transform_has_none(tmp_path):
    store = cut(Photos(labelled, RANDOM), tmp_path / "s.mf").select("label", "caption")
    expected = [{"label": 0, "caption": "no. 0"}, {"label": 1, "caption": "no. 1"}]
    assert next(iter(Loader(store, 2, collate_fn=list))) == expected
    assert next(iter(DataLoader(store, 2, collate_fn=memfeed.Collate(collate_fn=list)))) == expected
