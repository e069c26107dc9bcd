"""Batches come apart into the samples that they were made of."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import memfeed
from memfeed.errors import TransformError
from memfeed.schema.samples import SampleMaker
from support import Labelled, Made, Pair, Point, equal, rich_sample

N = 7


def stored(samples, **options):
    return memfeed.cache(Made(samples), progress=False, **options)


def taken_apart(store, batch=None):
    return list(store._view.sample_maker.samples_of(store[:] if batch is None else batch, {}))


@pytest.mark.parametrize(
    "sample",
    [
        rich_sample,
        lambda i: (torch.full((2,), i), i),
        lambda i: Point(i, [float(i), f"{i}"]),
        lambda i: Labelled(torch.full((2, 2), i), i),
        lambda i: TensorDict({"a": torch.full((3,), i), "in": TensorDict({"note": f"n{i}", "k": i % 2}, [])}, []),
        lambda i: Pair(images=torch.full((2,), i), targets=torch.tensor(i), batch_size=[]),
        lambda i: None if i % 2 else i,
        lambda i: [True, i, i / 3],
        lambda i: {"x": (i, {"y": torch.arange(i + 1)}), 7: "seven"},
    ],
    ids=["rich", "tuple", "namedtuple", "dataclass", "tensordict", "tensorclass", "optional", "list", "nested"],
)
def test_a_batch_comes_apart_into_what_the_dataset_returned(sample):
    store = stored([sample(i) for i in range(N)])
    found, expected = taken_apart(store), [store[i] for i in range(N)]
    assert equal(found, expected)
    assert [type(one) for one in found] == [type(one) for one in expected]


def test_tensors_are_views_of_the_batch():
    store = stored([(torch.full((2, 3), i), torch.arange(i + 1)) for i in range(N)])
    images, tokens = batch = store[:]
    samples = taken_apart(store, batch)
    images += 5
    tokens.values().add_(1)
    assert [int(image[0, 0]) for image, _ in samples] == [i + 5 for i in range(N)]
    assert [one.tolist() for _, one in samples] == [list(range(1, i + 2)) for i in range(N)]


def test_values_may_have_another_dtype_and_shape():
    store = stored([(torch.full((3, 4, 4), i, dtype=torch.uint8), i, [i, 2]) for i in range(N)])
    images, labels, numbers = store[:]
    shares = torch.nn.functional.one_hot(labels, N).float()
    image, label, number = taken_apart(store, [images[..., :2] / 2, shares, numbers * 0.5])[3]
    assert (image.dtype, tuple(image.shape), number) == (torch.float32, (3, 4, 2), [1.5, 1.0])
    assert torch.equal(label, shares[3])  # no list: the label is no number any more
    image, label, number = taken_apart(store, (list(images), labels / 2, numbers[:, None]))[3]
    assert (label, type(label), tuple(number.shape)) == (1.5, float, (1, 2))
    image, label, _ = taken_apart(store, [images.numpy(), labels.numpy(), numbers])[2]
    assert (int(image.sum()), type(label)) == (2 * 48, int)


@pytest.mark.parametrize(
    ("batch", "error"),
    [
        ({"a": 1}, "found dict in a transformed batch; expected a tuple, as in the samples of the store: a transform"),
        ((torch.zeros(3), torch.zeros(3), 1), "found a tuple of 3 in a transformed batch; expected one of 2"),
        ((torch.zeros(3), {"a": 1}), r"found a dict as field 1 of a batch; expected a tensor or a list with one value"),
        ((torch.zeros(3), torch.tensor(1.0)), "found a Tensor as field 1 of a batch"),
        ((torch.zeros(3), torch.zeros(2)), "found fields of {'0': 3, '1': 2} rows; expected as many rows of each"),
    ],
)
def test_a_batch_of_another_structure_is_an_error(batch, error):
    with pytest.raises(TransformError, match=error):
        taken_apart(stored([(torch.zeros(2), i) for i in range(N)]), batch)


def test_a_key_that_the_samples_do_not_have_is_an_error():
    store = stored([{"x": torch.zeros(2)} for _ in range(N)])
    with pytest.raises(TransformError, match=r"found the keys \['x', 'more'\].*expected \['x'\].*attribute `schema`"):
        taken_apart(store, {"x": torch.zeros(3, 2), "more": torch.zeros(3)})


# --- classes of torchvision and PyTorch Geometric


def test_tensors_of_torchvision():
    tv = pytest.importorskip("torchvision.tv_tensors")

    def sample(i):
        boxes = tv.BoundingBoxes(torch.full((i, 4), float(i)), format="XYXY", canvas_size=(8 + i, 9))
        return {"image": tv.Image(torch.full((3, 8, 8), i, dtype=torch.uint8)), "target": {"boxes": boxes, "id": i}}

    store = stored([sample(i) for i in range(N)])
    maker, batch = store._view.sample_maker, store[:]
    known = maker.canvases(store._view.gather(np.arange(N)))
    found = list(maker.samples_of(batch, known))
    assert equal(found, [store[i] for i in range(N)])
    assert type(found[2]["image"]) is tv.Image
    assert found[2]["target"]["boxes"].canvas_size == (10, 9)
    with pytest.raises(TransformError, match="found target.boxes without the size of its image"):
        maker.samples_of(batch, {})
    batch["target"]["boxes"] = [tv.BoundingBoxes(torch.ones(1, 4), format="XYXY", canvas_size=(1, i)) for i in range(N)]
    assert [one["target"]["boxes"].canvas_size for one in maker.samples_of(batch, {})] == [(1, i) for i in range(N)]
    image, canvas = (store.schema.field_indices(name)[-1] for name in ("image", ("target", "boxes")))
    batch = {**store[:], "image": torch.zeros(N, 3, 5, 6)}
    moved = SampleMaker(store.schema, store._view.types, {canvas: image})
    assert {one["target"]["boxes"].canvas_size for one in moved.samples_of(batch, known)} == {(5, 6)}


def test_graphs():
    data = pytest.importorskip("torch_geometric.data")

    def sample(i):
        edges = torch.stack([torch.arange(i), torch.arange(i)])
        more = {"weight": i / 2, "v": torch.tensor(i), "one": torch.tensor([i]), "name": f"n{i}", "ids": [i, 1, 2]}
        graph = data.Data(x=torch.full((i + 1, 3), float(i)), edge_index=edges, y=i, pair=(torch.ones(2), i), **more)
        return torch.full((2,), i), graph

    samples = [sample(i) for i in range(N)]
    store = stored(samples)
    found = taken_apart(store)
    assert [type(graph) for _, graph in found] == [data.Data] * N
    for (_, graph), (_, expected) in zip(found, samples, strict=True):
        assert list(graph.to_dict()) == list(expected.to_dict())
        assert equal(graph.to_dict(), expected.to_dict())
        assert (type(graph.y), type(graph.weight), graph.v.shape, graph.one.shape) == (int, float, (), (1,))
    with pytest.raises(TransformError, match="found list at 1 in a transformed batch; expected a Batch of graphs"):
        taken_apart(store, [store[:][0], []])
