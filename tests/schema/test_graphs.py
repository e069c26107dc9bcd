"""Graphs of PyTorch Geometric: Data in, equal Data and its own Batch out."""

import pickle
import subprocess
import sys
import warnings

import pytest
import torch
from torch.utils.data import DataLoader

import memfeed
from memfeed.errors import SchemaError, StaleStoreError
from support import cache, equal

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it warns of what torch has deprecated
    geometric = pytest.importorskip("torch_geometric.data")
    GraphLoader = pytest.importorskip("torch_geometric.loader").DataLoader
Data, HeteroData, Batch = geometric.Data, geometric.HeteroData, geometric.Batch
EdgeIndex = pytest.importorskip("torch_geometric.edge_index").EdgeIndex
Index = pytest.importorskip("torch_geometric.index").Index


class PairData(Data):
    """Two graphs in one sample; the nodes that an index of the second one names are counted by themselves."""

    def __inc__(self, key, value, *args, **kwargs):
        return self.x_t.size(0) if key == "edge_index_t" else super().__inc__(key, value, *args, **kwargs)


def graph(i):
    g = torch.Generator().manual_seed(i)
    n, edges = 2 + i % 5, i % 7
    return Data(
        x=torch.rand(n, 3, generator=g),
        edge_index=torch.randint(0, n, (2, edges), generator=g),
        y=i / 2,
        count=i,
        name=f"graph {i}",
        meta={"ids": [i, 2]},
        num_nodes=n,
    )


def hetero(i, **more):
    g = torch.Generator().manual_seed(i)
    users, films, ratings = 2 + i % 3, 3 + i % 5, i % 4
    data = HeteroData(y=i / 2, name=f"graph {i}")
    data["user"].x = torch.rand(users, 3, generator=g)
    data["film"].x = torch.rand(films, 1, generator=g)
    data["film"].num_nodes = films
    data["user", "rates", "film"].edge_index = torch.randint(0, 2, (2, ratings), generator=g)
    data["user", "rates", "film"].edge_attr = torch.rand(ratings, 2, generator=g)
    for key, value in more.items():
        if key == "meta":
            data.meta = value
        else:
            data[key].update(value)
    return data


def test_samples_are_equal_and_batches_are_those_of_geometric(path):
    graphs = [graph(i) for i in range(40)]
    assert all(equal(sample, data) for sample, data in zip(cache(graphs, path), graphs, strict=True))
    store = memfeed.open(path)
    assert all(type(sample) is Data and equal(sample, data) for sample, data in zip(store, graphs, strict=True))
    for k, batch in enumerate(memfeed.Loader(store, 8)):
        want = Batch.from_data_list(graphs[8 * k : 8 * k + 8])
        assert equal(batch, want)
        assert equal(batch.to_data_list()[3], want.to_data_list()[3])
    assert equal(next(iter(DataLoader(store, 8, collate_fn=memfeed.Collate()))), Batch.from_data_list(graphs[:8]))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # PyTorch Geometric makes matrices
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_a_sparse_matrix_of_a_graph(path, layout):
    """``adj_t``, as ToSparseTensor makes it: a batch has it along the diagonal."""
    matrices = [(torch.rand(3 + i % 3, 3 + i % 3) > 0.5).float().to_sparse(layout=layout) for i in range(12)]
    graphs = [Data(x=torch.full((len(one), 2), float(i)), adj_t=one) for i, one in enumerate(matrices)]
    store = cache(graphs, path)
    assert all(equal(sample.adj_t, data.adj_t) for sample, data in zip(store, graphs, strict=True))
    filled = path.with_name("filled.mf")
    for loader in (memfeed.Loader(store, 4), memfeed.Loader(graphs, 4, cache=filled, num_workers=2)):
        for k, batch in enumerate(loader):
            want = Batch.from_data_list(graphs[4 * k : 4 * k + 4])
            assert equal(batch.x, want.x)
            assert equal(batch.adj_t, want.adj_t)
            assert torch.equal(
                batch.adj_t.to_dense(), torch.block_diag(*(one.to_dense() for one in matrices[4 * k : 4 * k + 4]))
            )


def test_not_the_same_for_another_graph():
    assert not equal(graph(3), graph(4))
    assert not equal(graph(3), Batch.from_data_list([graph(3)]))


def test_graphs_of_several_types(path):
    graphs = [hetero(i) for i in range(20)]
    assert all(equal(sample, data) for sample, data in zip(cache(graphs, path), graphs, strict=True))
    store = memfeed.open(path)
    assert [field.name for field in store.schema][:3] == ["y", "name", "user.x"]
    assert "user__rates__film.edge_index" in [field.name for field in store.schema]
    assert all(type(one) is HeteroData and equal(one, data) for one, data in zip(store, graphs, strict=True))
    for k, batch in enumerate(memfeed.Loader(store, 8)):
        want = Batch.from_data_list(graphs[8 * k : 8 * k + 8])
        assert type(batch) is type(want)
        assert equal(batch, want)
        assert batch.metadata() == want.metadata()
        assert equal(batch.to_data_list()[3], want.to_data_list()[3])
    assert not equal(graphs[0], graphs[1])


def test_random_steps_of_graphs_of_several_types(path):
    class Jitter:
        def __call__(self, data):
            data["user"].x = data["user"].x + torch.rand(1)
            return data

    class Jittered(torch.utils.data.Dataset):
        def __init__(self):
            self.transform = Jitter()

        def __len__(self):
            return 12

        def __getitem__(self, i):
            return self.transform(hetero(i))

    first, second = (next(iter(memfeed.Loader(Jittered(), 4, cache=path))) for _ in range(2))
    want = Batch.from_data_list([hetero(i) for i in range(4)])
    assert not equal(first["user"].x, second["user"].x)
    assert equal(first["film"].x, want["film"].x)


@pytest.mark.parametrize("make", [graph, hetero])
@pytest.mark.parametrize("options", [{"follow_batch": ["x"]}, {"exclude_keys": ["x", "y"]}])
def test_follow_batch_and_exclude_keys_as_in_the_loader_of_geometric(path, make, options):
    graphs = [make(i) for i in range(10)]
    loader = memfeed.Loader(cache(graphs, path), 4, **options)
    for got, want in zip(loader, GraphLoader(graphs, 4, **options), strict=True):
        assert equal(got, want)
    for got, want in zip(pickle.loads(pickle.dumps(loader)), GraphLoader(graphs, 4, **options), strict=True):
        assert equal(got, want)


def test_follow_batch_beside_a_collate_fn(path):
    with pytest.raises(memfeed.errors.LoaderError, match="follow_batch= or exclude_keys= beside a collate_fn"):
        memfeed.Loader(cache([graph(0)], path), collate_fn=list, follow_batch=["x"])


@pytest.mark.parametrize("options", [{"follow_batch": ["x"]}, {"exclude_keys": []}])
def test_options_of_graphs_without_graphs(path, options):
    with pytest.raises(memfeed.errors.LoaderError, match="for samples without graphs.*expected.*leave them out"):
        memfeed.Loader(cache([{"x": 1}, {"x": 2}], path), **options)


def test_options_of_graphs_that_are_inside_of_samples(path):
    graphs = [{"graph": graph(i), "label": i} for i in range(4)]
    (got,) = memfeed.Loader(cache(graphs, path), 4, follow_batch=["x"])
    (want,) = GraphLoader(graphs, 4, follow_batch=["x"])
    assert equal(got, want)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_the_adjacency_of_a_batch_is_made_by_a_transform(path):
    transforms = pytest.importorskip("torch_geometric.transforms")
    graphs = [graph(i) for i in range(8)]
    batch = next(iter(memfeed.Loader(cache(graphs, path), 8, transform=transforms.ToSparseTensor())))
    want = transforms.ToSparseTensor()(Batch.from_data_list(graphs))
    assert equal(batch.adj_t.to_dense(), want.adj_t.to_dense())


def test_graphs_within_other_samples(path):
    samples = [(graph(i), i) for i in range(20)]
    store = cache(samples, path, workers=2)
    assert equal(store[7], samples[7])
    batch, labels = store[[4, 1]]
    assert equal(batch, Batch.from_data_list([graph(4), graph(1)]))
    assert labels.tolist() == [4, 1]


def test_a_reused_graph_is_copied(path):
    one = Data(x=torch.zeros(2, 3))

    def samples():
        for i in range(50):
            one.x.fill_(i)
            yield one

    assert [int(sample.x[0, 0]) for sample in cache(samples(), path)] == list(range(50))


def test_a_derived_class_collates_as_it_says(path):
    pairs = [PairData(x_t=torch.rand(3 + i, 1), edge_index_t=torch.tensor([[0, 1], [2, 0]])) for i in range(6)]
    store = cache(pairs, path)
    assert equal(store[:3], Batch.from_data_list(pairs[:3]))
    assert store[:3].edge_index_t.max() == 2 + 3 + 4
    with pytest.raises(SchemaError, match=r"of the class PairData.*memfeed\.open\(path, types=\[PairData\]\)"):
        memfeed.open(path)[0]
    assert type(memfeed.open(path, types=[PairData])[0]) is PairData


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([graph(0), Data(x=torch.zeros(2, 3))], r"sample 1.*without the attribute 'count', which sample 0 has"),
        ([hetero(1, film_={"x": torch.zeros(2)})], r"found 'film_' as a type of nodes.*without '__'"),
        (
            [hetero(1, meta={"x": 1})],
            r"found a dict as the attribute 'meta' .*json\.dumps\(data\.meta\)",
        ),
        ([Batch.from_data_list([graph(1)])], r"found a Batch of graphs; .*batch\.to_data_list\(\)"),
    ],
)
def test_refused_graphs(path, samples, message):
    with pytest.raises(SchemaError, match=message) as caught:
        cache(samples, path)
    assert len(str(caught.value)) < 400


def test_a_missing_attribute_that_the_probe_did_not_see(path):
    graphs = [graph(i) for i in range(300)]
    del graphs[7].y
    with pytest.raises(SchemaError, match=r"sample 7: found the keys .*expected .*'y'"):
        cache(graphs, path)


@pytest.mark.long
def test_the_order_of_the_fields_is_the_same_in_every_process(path):
    here, there = cache([graph(i) for i in range(3)], path), path.with_name("there.mf")
    code = (
        "import warnings; warnings.simplefilter('ignore')\n"
        "import memfeed, test_graphs as t\n"
        f"memfeed.cache([t.graph(i) for i in range(3)], {str(there)!r}, progress=False)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert [field.name for field in memfeed.open(there).schema] == [field.name for field in here.schema]


# --- tensors with settings


def edges(i, order="row"):
    given = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    return EdgeIndex(given, sparse_size=(3 + i, 3 + i), sort_order=order, is_undirected=True)


def index(i):
    return Index([0, 1, 1, 2][: 2 + i % 3], dim_size=3 + i, is_sorted=True)


SETTINGS = ("sparse_size", "sort_order", "is_undirected", "dim_size", "is_sorted")


def settings(value):
    found = (getattr(value, name, None) for name in SETTINGS)
    return [one() if callable(one) else one for one in found]


def same(one, other):
    return (
        type(one) is type(other)
        and one.dtype == other.dtype
        and one.tolist() == other.tolist()
        and (settings(one) == settings(other))
    )


@pytest.mark.parametrize("kind", [edges, index, lambda i: edges(i, None), lambda i: EdgeIndex([[i], [1]])])
@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"cache": True}])
def test_an_index_keeps_its_class_and_its_settings(path, kind, options):
    graphs = [Data(part=kind(i), num_nodes=3 + i) for i in range(20)]
    options = {name: path if name == "cache" else value for name, value in options.items()}
    loader = memfeed.Loader(graphs, 4, **options)
    for batch, expected in zip(loader, GraphLoader(graphs, 4), strict=True):
        assert same(batch.part, expected.part)
    assert all(same(sample.part, graph.part) for sample, graph in zip(loader.store, graphs, strict=True))
    assert all(map(equal, loader.store, graphs))


@pytest.mark.parametrize("kind", [edges, lambda i: Index([0, 1, 2], dim_size=3 + i)])
def test_an_index_that_is_a_sample(path, kind):
    samples = [kind(i).fill_cache_() if kind is edges else kind(i) for i in range(8)]
    for options in ({"collate_fn": list}, {}):
        found, expected = list(memfeed.Loader(samples, 4, **options)), list(DataLoader(samples, 4, **options))
        assert len(found) == len(expected) == 2
        assert all(map(same, sum(found, []), sum(expected, []))) if options else equal(found, expected)
    assert all(map(same, cache(samples, path), samples))


def test_settings_that_change_are_noticed(path):
    graphs = [Data(part=edges(0), num_nodes=9) for _ in range(20)]
    cache(graphs, path)
    with pytest.raises(StaleStoreError, match="part"):
        memfeed.cache([Data(part=edges(1), num_nodes=9) for _ in range(20)], path, progress=False)
    assert not equal(graphs[0], Data(part=edges(1), num_nodes=9))
