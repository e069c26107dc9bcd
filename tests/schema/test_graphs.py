"""Graphs of PyTorch Geometric: Data in, equal Data and its own Batch out."""

import subprocess
import sys
import warnings

import pytest
import torch
from torch.utils.data import DataLoader

import memfeed
from memfeed.errors import SchemaError
from support import cache, equal

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it warns of what torch has deprecated
    geometric = pytest.importorskip("torch_geometric.data")
Data, Batch = geometric.Data, geometric.Batch


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


def test_not_the_same_for_another_graph():
    assert not equal(graph(3), graph(4))
    assert not equal(graph(3), Batch.from_data_list([graph(3)]))


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
        ([geometric.HeteroData()], r"found a HeteroData; .*data = data\.to_homogeneous\(\)"),
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
