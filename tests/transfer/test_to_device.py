import collections
import copy
import dataclasses
from collections import OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from types import MappingProxyType

import optree
import pytest
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from tensordict import TensorDict
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

import memfeed
from memfeed import Loader, to_device
from memfeed.transfer.packing import MAX_PACKED_BYTES
from memfeed.transfer.to_device import move
from support import Labelled, Made, Pair, equal

Two = namedtuple("Two", "a b")
ELSEWHERE = torch.device("cpu:0")  # to tensors another device than cpu: what is moved there can be looked at


def host(nbytes: int) -> torch.Tensor:
    return torch.full((nbytes,), 0xA5, dtype=torch.uint8)


def together(tree, **options):
    """``to_device`` as it is on CUDA, small tensors in one buffer; shows that there was one copy."""
    buffers = []

    def allocate(nbytes):
        buffers.append(host(nbytes))
        return buffers[-1]

    moved = move(tree, ELSEWHERE, **{"non_blocking": True, "strict": False, "allocate": allocate, **options})
    assert len(buffers) <= 1
    return moved, buffers


def apart(tree, device=ELSEWHERE):
    return move(tree, device, non_blocking=False, strict=False, allocate=None)


@pytest.fixture(params=[apart, lambda tree: together(tree)[0]], ids=["each", "together"])
def moving(request):
    return request.param


# --- what a tree may be


def test_any_nesting():
    tree = {
        "im": {"label": torch.rand(1, 2), "image": [torch.rand(2), (torch.rand(3),)]},
        "two": Two(torch.ones(1), "text"),
        "record": Labelled(torch.ones(2), 3),
        "td": TensorDict({"x": torch.ones(2)}, [2]),
        "pair": Pair(images=torch.ones(2, 1), targets=torch.ones(2), batch_size=[2]),
        "jagged": torch.nested.nested_tensor_from_jagged(torch.arange(5), torch.tensor([0, 2, 5])),
        "none": None,
        "n": 3,
    }
    meta = to_device(tree, "meta")
    assert meta["im"]["image"][1][0].device.type == "meta"
    assert isinstance(meta["two"], Two)
    assert (meta["two"].a.device.type, meta["two"].b) == ("meta", "text")
    assert (type(meta["record"]), meta["record"].image.device.type) == (Labelled, "meta")
    assert meta["td"]["x"].device.type == meta["pair"].images.device.type == "meta"
    assert isinstance(meta["pair"], Pair)
    assert (meta["none"], meta["n"]) == (None, 3)
    assert tree["im"]["label"].device.type == "cpu"
    same = to_device(tree, "cpu")
    assert same["im"]["label"] is tree["im"]["label"], "what is there is not copied"
    assert same["jagged"].is_nested


def numbers(*shape):
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


class Registered:
    def __init__(self, x, name):
        self.x, self.name = x, name


class KnownToTorch(Registered):
    pass


optree.register_pytree_node(
    Registered,
    lambda r: ((r.x,), r.name),
    lambda name, held: Registered(*held, name),
    namespace=optree.registry.__GLOBAL_NAMESPACE,
)
pytree.register_pytree_node(KnownToTorch, lambda r: ([r.x], r.name), lambda held, name: KnownToTorch(*held, name))


class Attributes(dict):
    """A dict subclass with something besides its items, and with them as attributes."""

    def __init__(self, items, note):
        super().__init__(items)
        self.__dict__["note"] = note

    def __getattr__(self, name):
        if name in self:
            return self[name]
        raise AttributeError(name)


class Named(list):
    name = ""


class Stack(tuple):
    __slots__ = ()


class Odd(tuple):
    __slots__ = ()

    def __new__(cls, a, b):
        return super().__new__(cls, (a, b))


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    double: torch.Tensor = dataclasses.field(init=False)
    unset: int = dataclasses.field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "double", self.x * 2)
        object.__setattr__(self, "besides", "kept")


def arrived(value):
    """That every tensor in a list was moved: it is another one, with equal values."""
    return [new is not old and equal(new, old) for new, old in value]


def test_containers_of_the_standard_library(moving):
    x = [torch.arange(i + 1) for i in range(9)]
    tree = {
        "z": OrderedDict(b=x[0], a=x[1]),
        "a": defaultdict(list, {"k": [x[2], (x[3],)]}),
        3: deque([x[4]], maxlen=5),
        "two": Two(x[5], {"deep": [x[6]]}),
        "user": UserDict({"u": x[7]}),
        "ul": UserList([x[8], "text"]),
    }
    kept = copy.copy(tree["a"]["k"])
    new = moving(tree)
    assert list(new) == list(tree), "in the order of the keys"
    assert list(new["z"]) == ["b", "a"]
    assert list(map(type, new.values())) == list(map(type, tree.values()))
    assert new["a"].default_factory is list
    assert new[3].maxlen == 5
    assert new["ul"][1] == "text"
    pairs = [
        (new["z"]["b"], x[0]),
        (new["z"]["a"], x[1]),
        (new["a"]["k"][0], x[2]),
        (new["a"]["k"][1][0], x[3]),
        (new[3][0], x[4]),
        (new["two"].a, x[5]),
        (new["two"].b["deep"][0], x[6]),
        (new["user"]["u"], x[7]),
        (new["ul"][0], x[8]),
    ]
    assert all(arrived(pairs))
    assert tree["a"]["k"] == kept
    assert tree["user"]["u"] is x[7], "the tree given is left as it was"
    assert tree["ul"][0] is x[8]


def test_subclasses_that_nobody_registered_keep_what_they_have_besides(moving):
    x = torch.ones(3)
    named = Named([x, "b"])
    named.name = "n"
    tree = [Attributes({"to": len, "x": x}, "note"), named, Stack([x]), MappingProxyType({"x": x}), Odd(x, 2)]
    new = moving(tree)
    assert [type(part) for part in new] == [Attributes, Named, Stack, MappingProxyType, tuple]
    assert new[0].note == "note"
    assert new[1].name == "n"
    moved = new[0]["x"]
    assert moved is not x
    assert all(part is moved for part in (new[1][0], new[2][0], new[3]["x"], new[4][0])), "one tensor stays one"
    assert tree[0]["x"] is named[0] is x


def test_containers_of_other_things_pass_as_they_are(moving):
    for value in (
        collections.Counter("aab"),
        torch.Size([2, 3]),
        range(10**12),
        MappingProxyType({"a": 1}),
        Odd(1, 2),
        Labelled,
        b"bytes",
        bytearray(b"b"),
        {1, 2},
    ):
        assert moving([value, torch.ones(1)])[0] is value
    counted = collections.Counter({"a": torch.tensor(3)})
    assert moving(counted)["a"].item() == 3, "Counter.update would have added"


def test_registered_classes(moving):
    x, y = torch.ones(2), torch.zeros(3)
    one, two = moving([Registered({"a": x}, "one"), {"k": KnownToTorch([y], "two")}])
    assert (type(one), one.name, type(two["k"]), two["k"].name) == (Registered, "one", KnownToTorch, "two")
    assert all(arrived([(one.x["a"], x), (two["k"].x[0], y)]))


def test_dataclasses_are_not_made_anew(moving):
    record = Frozen(torch.ones(2))
    object.__setattr__(record, "double", torch.full((2,), 9.0))
    new = moving({"r": record})["r"]
    assert all(arrived([(new.x, record.x), (new.double, record.double)]))
    assert new.besides == "kept"
    assert not hasattr(new, "unset")


def test_tensors_in_a_list_in_a_dict_are_moved():
    tree = {"boxes": [torch.ones(1), torch.ones(2)]}
    assert [t.device.type for t in to_device(tree, "meta")["boxes"]] == ["meta", "meta"]


def test_packed_sequences_keep_their_batch_sizes(moving):
    packed = pack_sequence([torch.ones(2, 3), torch.zeros(4, 3)], enforce_sorted=False)
    plain = pack_sequence([torch.ones(4), torch.zeros(2)])
    new = moving([packed, plain])
    assert all(type(one) is PackedSequence for one in new)
    assert new[0].batch_sizes is packed.batch_sizes, "torch reads them on the CPU"
    names = ("data", "sorted_indices", "unsorted_indices")
    assert all(arrived([(getattr(new[0], name), getattr(packed, name)) for name in names]))
    assert new[1].sorted_indices is None
    assert equal(pad_packed_sequence(new[0])[0], pad_packed_sequence(packed)[0])
    assert to_device(packed, "meta").data.device.type == "meta"
    assert to_device(packed, "meta").batch_sizes.device.type == "cpu"


class Graph:
    """As PyTorch Geometric's Data."""

    def __init__(self, x):
        self.x = x

    def to(self, device, *args, non_blocking=False):
        self.x, self.non_blocking = self.x.to(device), non_blocking
        return self


class Encoding(UserDict):
    """As an older BatchEncoding of Hugging Face: its ``to`` takes a device alone."""

    def to(self, device):
        made = Encoding({key: value.to(device) for key, value in self.items()})
        made.by_itself = True
        return made


class Nothing:
    def to(self, device):
        self.device = device


def test_objects_that_move_themselves():
    graph, encoding, nothing = Graph(torch.ones(1)), Encoding(ids=torch.ones(2)), Nothing()
    tree = [graph, encoding, nothing, {"again": graph}]
    new = move(tree, torch.device("meta"), non_blocking=True, strict=True, allocate=None)
    assert new[0] is graph
    assert new[3]["again"] is graph
    assert (graph.x.device.type, graph.non_blocking) == ("meta", True)
    assert (type(new[1]), new[1]["ids"].device.type) == (Encoding, "meta")
    assert new[1].by_itself
    assert new[2] is nothing, "a method that returns nothing has changed the object"
    assert nothing.device.type == "meta"
    assert encoding["ids"].device.type == "cpu"
    to_device([Graph(torch.ones(1))], "cpu")


def test_a_copy_to_the_cpu_is_waited_for():
    graph = to_device(Graph(torch.ones(1)), "cpu", non_blocking=True)
    assert graph.non_blocking is False
    assert to_device(Graph(torch.ones(1)), "meta").non_blocking is True
    assert to_device(Graph(torch.ones(1)), "meta", non_blocking=False).non_blocking is False


def test_one_tensor_stays_one_and_what_is_there_stays(moving):
    x, y, td = torch.ones(2), torch.zeros(2), TensorDict({"x": torch.ones(2)}, [2])
    new = moving([x, {"x": x}, y, (x,), td, td])
    assert new[0] is new[1]["x"] is new[3][0]
    assert new[0] is not x
    assert new[4] is new[5]
    p = torch.nn.Parameter(torch.ones(2))
    there = [x, torch.ones(2, requires_grad=True), p, torch.ones(2, 2).to_sparse(), torch.ones(2, 2).T]
    assert all(a is b for a, b in zip(to_device(there, "cpu"), there, strict=True))
    assert all(a is b for a, b in zip(to_device(there, torch.device("cpu:0")), there, strict=True))
    assert to_device(x, "cpu") is x
    assert to_device(3, "cpu") == 3
    assert to_device((), "cpu") == ()


@pytest.mark.filterwarnings("ignore::UserWarning")  # of quantized and of strided nested tensors
def test_tensors_of_every_kind(moving):
    grad = torch.ones(3, requires_grad=True)
    parameter = torch.nn.Parameter(torch.ones(2))
    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(3)])
    offsets = torch.tensor([0, 2, 5])
    jagged = [torch.nested.nested_tensor_from_jagged(v, offsets) for v in (torch.arange(5), torch.ones(5, 2))]
    tree = {
        "grad": grad,
        "graph": grad * 2,
        "parameter": parameter,
        "sparse": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "nested": nested,
        "jagged": jagged,
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.qint8),
        "conj": torch.complex(torch.ones(2), torch.ones(2)).conj(),
        "neg": torch.complex(torch.ones(1), torch.ones(1)).conj().imag,
        "transposed": torch.arange(6).reshape(2, 3).T,
        "channels_last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "large": torch.ones(MAX_PACKED_BYTES + 1, dtype=torch.uint8),
        "small": torch.ones(3),
        "empty": torch.ones(0, 3),
        "number": torch.tensor(7),
    }
    new = moving(tree)
    assert new["sparse"].layout is torch.sparse_coo
    assert new["csr"].layout is torch.sparse_csr
    for name in ("sparse", "csr", "quantized"):
        dense = [side[name].dequantize() if name == "quantized" else side[name].to_dense() for side in (new, tree)]
        assert torch.equal(*dense)
    assert new["quantized"].is_quantized
    assert equal(list(new["nested"].unbind()), list(nested.unbind()))
    for name in ("conj", "neg", "transposed", "channels_last", "large", "small", "empty", "number", "graph"):
        assert torch.equal(new[name], tree[name]), name
        assert new[name].stride() == tree[name].stride(), name
        assert new[name] is not tree[name]
    (new["grad"].sum() + new["graph"].sum() + new["parameter"].sum()).backward()
    assert grad.grad.tolist() == [3.0] * 3, "autograd goes through the move"
    assert parameter.grad.tolist() == [1.0] * 2
    assert all(equal(a, b) for a, b in zip(new["jagged"], jagged, strict=True))
    assert new["jagged"][0].shape[1] == new["jagged"][1].shape[1], "jagged tensors of equal lengths still fit"


def test_subclasses_of_tensor(moving):
    tv = pytest.importorskip("torchvision.tv_tensors", reason="needs torchvision")
    boxes = tv.BoundingBoxes(torch.ones(2, 4), format="XYXY", canvas_size=(5, 5))
    new = moving([boxes, torch.ones(1), torch.ones(2)])[0]
    assert type(new) is tv.BoundingBoxes
    assert new.canvas_size == (5, 5)
    assert to_device(boxes, "cpu") is boxes


@pytest.mark.parametrize(
    ("tree", "where"),
    [
        (
            {"x": torch.ones(1), "labels": ["a", "b"]},
            "found str at labels[0], which is no tensor; expected only tensors",
        ),
        ([torch.ones(1), (None,)], "found NoneType at [1][0], which"),
        ({"a": {"b": Labelled(torch.ones(1), 3)}}, "found int at a.b.label, which"),
        (Attributes({"k": Stack([torch.ones(1), 2.5])}, ""), "found float at k[1], which"),
        ({"t": KnownToTorch([torch.ones(1), b""], "n")}, "found bytes at t[0][1], which"),
        ("text", "found str, which is no tensor"),
    ],
)
def test_strict_names_the_place_of_what_is_no_tensor(tree, where):
    with pytest.raises(TypeError) as error:
        to_device(tree, "cpu", strict=True)
    assert str(error.value).startswith(where)
    assert str(error.value).endswith("remove it, convert it to a tensor, or pass strict=False to keep it where it is")
    to_device(tree, "cpu")


def test_strict_takes_tensors_of_all_kinds():
    tree = [
        torch.ones(1),
        pack_sequence([torch.ones(2)]),
        TensorDict({"x": torch.ones(2)}, [2]),
        Pair(images=torch.ones(2, 1), targets=torch.ones(2), batch_size=[2]),
        {"none": []},
        torch.nn.Parameter(torch.ones(1)),
    ]
    assert equal(to_device(tree, "cpu", strict=True)[2], tree[2])


# --- batches through DataParallel and DistributedDataParallel


def sample(kind, i):
    x, boxes = torch.full((4,), float(i)), torch.full((1 + i % 3, 4), float(i))
    if kind == "dict":
        return {"x": x, "label": i, "name": f"n{i}"}
    if kind == "tensordict":
        return TensorDict({"x": x}, [])
    if kind == "tensorclass":
        return Pair(images=x, targets=torch.tensor(i), batch_size=[])
    return {"boxes": boxes, "x": x}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 2)
        self.seen = []

    def forward(self, batch):
        self.seen.append(type(batch).__name__)
        if isinstance(batch, Pair):
            return self.linear(batch.images)
        if "boxes" in batch.keys():  # noqa: SIM118 - of a TensorDict, too
            return self.linear(batch["boxes"].values())
        return self.linear(batch["x"])


@pytest.fixture(params=["dict", "tensordict", "tensorclass", "jagged"])
def batches(request, path):
    store = memfeed.cache(Made(lambda i: sample(request.param, i), 10), path, progress=False)
    return Loader(store, 4, shuffle=True, seed=0)


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def train(model, batches):
    steps = 0
    for batch in batches:
        moved = to_device(batch, "cpu")
        assert type(moved) is type(batch)
        model.zero_grad()
        model(moved).sum().backward()
        assert all(p.grad is not None for p in model.parameters())
        steps += 1
    assert steps == 3
    assert len({*model.module.seen}) == 1


@pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed: this torch was built without it")
def test_batches_pass_through_distributed_data_parallel(batches, group):
    train(torch.nn.parallel.DistributedDataParallel(Model()), batches)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, DataParallel uses it: see tests/cuda")
def test_batches_pass_through_data_parallel(batches):
    model = torch.nn.DataParallel(Model())
    batch = next(iter(batches))
    seen = []
    model.module.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(batch)
    assert seen[0] is batch, "without a GPU it calls the module and no more"
    train(model, batches)
