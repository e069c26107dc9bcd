"""Places of callables: what is found where, and copies of a dataset with other callables there."""

import collections.abc
import functools
import operator
from types import SimpleNamespace

import h5py
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

import memfeed
from memfeed.errors import SplitError
from memfeed.splitting import places
from memfeed.splitting.places import find_places, replaced, steps_in

double, negate = functools.partial(operator.mul, 2), operator.neg
BY_NAME = {"first": double, "second": [double, Subset([1], [0])]}


class Numbers(Dataset):
    def __init__(self, **parts):
        self.__dict__.update(parts)

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.transform(index)


class WithMethod(Numbers):
    def __getitem__(self, index):
        return self.augment(index + 1)

    def augment(self, value):
        return value


class Guarded(Numbers):
    @property
    def transform(self):
        return self.__dict__["transform"]

    @transform.setter
    def transform(self, value):
        raise RuntimeError("fixed")


class Compose(Numbers):
    def __call__(self, value):
        return functools.reduce(lambda made, step: step(made), self.transforms, value)


def found(dataset):
    return {str(place): place for place in find_places(dataset)}


def put(dataset, text, value):
    return replaced(dataset, {found(dataset)[text].path: value})


def test_callables_of_attributes_lists_and_dicts_are_found():
    places = found(Numbers(transform=double, more=[double, {"a": negate}], text="x", kind=int, tensor=torch.ones(2)))
    assert set(places) == {"dataset.transform", "dataset.more[0]", "dataset.more[1]['a']"}
    assert places["dataset.more[1]['a']"].value is negate


@pytest.mark.parametrize("make", [list, tuple, lambda steps: dict(enumerate(steps))])
def test_a_replaced_item_leaves_the_original_alone(make):
    dataset = Numbers(transform=double, more=make([double, negate]))
    changed = put(dataset, "dataset.more[1]", abs)
    assert changed.more[0] is double
    assert changed.more[1] is abs
    assert dataset.more[1] is negate


def test_datasets_inside_datasets_are_searched_and_copied():
    inner = Numbers(transform=double)
    dataset = Subset(ConcatDataset([Numbers(transform=negate), inner]), [0, 5])
    changed = put(dataset, "dataset.dataset.datasets[1].transform", negate)
    assert [dataset[0], dataset[1]] == [0, 2]
    assert [changed[0], changed[1]] == [0, -1]
    assert inner.transform is double


def test_a_method_is_bound_to_the_copy():
    dataset = WithMethod()
    bound = SimpleNamespace(bound_to=lambda owner: lambda value: (owner, value))
    changed = put(dataset, "dataset.augment", bound)
    assert changed[1] == (changed, 2)
    assert dataset[1] == 2


def test_static_and_class_methods_are_found():
    class Own(Numbers):
        augment = staticmethod(lambda value: value)
        read = classmethod(lambda cls, value: value)
        add = staticmethod(operator.add)

    assert set(found(Own())) == {"dataset.augment", "dataset.read"}


def test_methods_of_the_standard_library_are_no_steps():
    class Volumes(Numbers, collections.abc.MutableMapping):  # as h5py.File is
        __setitem__ = __delitem__ = __iter__ = None

        def augment(self, value):
            return value

    assert set(found(Volumes())) == {"dataset.augment"}


def test_an_open_hdf5_file_is_not_copied(tmp_path):
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["x"] = torch.arange(40).reshape(20, 2)

    class Rows(Numbers):
        def __getitem__(self, index):
            return self.transform(torch.from_numpy(self.file["x"][index]))

    with h5py.File(tmp_path / "data.h5") as file:
        dataset = Rows(file=file, transform=lambda x: x + torch.randint(0, 1000, (1,)))
        store = memfeed.cache(dataset, None, split=True, progress=False)
    assert torch.equal(store.column("input"), torch.arange(8).reshape(4, 2))


def test_what_copies_to_itself_stays_as_it_is():
    inner = Numbers(transform=double)
    cached = functools.lru_cache(inner.__getitem__)
    assert set(found(Numbers(load=cached))) == {"dataset.load"}
    inner.__class__ = type("Single", (Numbers,), {"__copy__": lambda self: self})
    with pytest.raises(SplitError, match="returns the same object"):
        put(inner, "dataset.transform", negate)
    assert inner.transform is double


def test_properties_that_raise_when_set_are_passed():
    dataset = Guarded(transform=double)
    assert put(dataset, "dataset.transform", negate)[3] == -3
    assert dataset[3] == 6


def test_several_changes_share_one_copy_of_their_owner():
    dataset = Numbers(transform=Compose(transforms=[double, double]), other=double)
    path = find_places(dataset, "transform")[0].path
    steps = [(*path, *way) for way, _ in steps_in(dataset.transform)]
    assert replaced(dataset, dict.fromkeys(steps, negate))[3] == 3
    assert dataset[3] == 12
    assert [steps_in(one) for one in (double, [], [double, 1], Compose(transforms=[]))] == [[]] * 4


def test_steps_of_a_sequential_are_replaced():
    pipeline = torch.nn.Sequential(torch.nn.Identity(), torch.nn.ReLU())
    dataset = Numbers(transform=pipeline)
    changed = replaced(dataset, {(("attribute", "transform"), *steps_in(pipeline)[1][0]): negate})
    assert changed[2] == -2
    assert next(iter(changed.transform)) is pipeline[0]
    assert isinstance(pipeline[1], torch.nn.ReLU)


def test_a_wrong_name_tells_the_right_ones():
    assert [str(one) for one in find_places(Numbers(a=double, b=negate), "b")] == ["dataset.b"]
    with pytest.raises(SplitError, match=r"'transfrom'.*dataset\.transform"):
        find_places(Numbers(transform=double), "transfrom")


class Helper:
    def __init__(self, **parts):
        self.__dict__.update(parts)

    def augment(self, value):
        return value


def test_other_objects_are_searched_where_it_is_asked_for():
    helper = Helper(transform=double, again=Helper(more=[negate]))
    helper.owner = dataset = Numbers(reader=helper, both=[Helper(), Helper()], records=[Helper()] * 17)
    assert not found(dataset)
    places = {str(place): place for place in find_places(dataset, helpers=True)}
    assert set(places) == {
        "dataset.reader.transform",
        "dataset.reader.augment",
        "dataset.reader.again.more[0]",
        "dataset.reader.again.augment",
        "dataset.both[0].augment",
        "dataset.both[1].augment",
    }
    changed = replaced(dataset, {places["dataset.reader.again.more[0]"].path: abs})
    assert changed.reader.again.more == [abs]
    assert helper.again.more == [negate]
    assert [str(one) for one in find_places(dataset, "transform", helpers=True)] == ["dataset.reader.transform"]


@pytest.mark.parametrize("name", ["__copy__", "__del__", "__getstate__", "__reduce__"])
def test_objects_that_say_how_they_are_copied_or_end_are_not_searched(name):
    cls = type("Open", (Helper,), {name: lambda self: None})
    assert not find_places(Numbers(part=cls(transform=double)), helpers=True)


def test_objects_that_refer_to_one_another_are_searched_once():
    parts = [Helper() for _ in range(12)]
    for one in parts:
        one.others = [other for other in parts if other is not one]
    assert len(find_places(Numbers(parts=parts), helpers=True)) == len(parts)
    trees = [Helper(parts=[Helper(parts=[Helper() for _ in range(16)]) for _ in range(16)]) for _ in range(16)]
    assert 100 < len(find_places(Numbers(trees=trees), helpers=True)) <= 256


def test_records_that_refer_to_one_another_are_searched_once(monkeypatch):
    """A tree of dicts with parents raised RecursionError, and lists of lists of records took 256 * 256 looks."""
    dataset = Numbers()
    dataset.tree = {"children": []}
    dataset.tree["children"] = [{"parent": dataset.tree, "value": i} for i in range(200)]
    dataset.rows = [dataset.tree["children"]] * 200
    looked, is_pipeline = [], places.is_pipeline
    monkeypatch.setattr(places, "is_pipeline", lambda value: looked.append(value) or is_pipeline(value))
    assert not [place for place in find_places(dataset) if place.path[0][1] in ("tree", "rows")]
    assert len(looked) < 5000
    inner = Numbers()
    inner.tree = [[{"step": double}], [[]]]
    assert [str(place) for place in find_places(inner) if place.path[0][1] == "tree"]


def test_objects_of_other_packages_are_not_searched():
    assert not find_places(Numbers(part=SimpleNamespace(transform=double)), helpers=True)


def test_graphs_are_data_though_they_can_be_called():
    graph = pytest.importorskip("torch_geometric.data").Data(x=torch.ones(2, 3))
    assert callable(graph)
    assert set(found(Numbers(transform=double, _data=graph, graphs=[graph, graph]))) == {"dataset.transform"}


class ByName(Numbers):
    def __getitem__(self, index):
        return BY_NAME["first"](double(index)) + operator.add(self.augment(index), len(Subset([1], [0])))

    def augment(self, value):
        return double(value)


def test_pipelines_of_a_module_are_found_where_methods_name_them():
    dataset = Subset(ByName(), [1, 0])
    places = {str(place): place for place in find_places(dataset, names=True)}
    assert list(places) == ["dataset.dataset.augment", "BY_NAME['first']", "BY_NAME['second'][0]", "double"]
    assert list(found(dataset)) == ["dataset.dataset.augment"], "they are asked for"
    changes = {places[one].path: (lambda value: value + 100) for one in ("double", "BY_NAME['first']")}
    changed = replaced(dataset, changes)
    assert (changed[0], dataset[0]) == (1 + 200 + 101 + 1, 4 + 2 + 1)
    assert [str(one) for one in find_places(dataset, "BY_NAME", names=True)] == list(places)[1:3]


INNER = Numbers(transform=double)


def test_a_dataset_of_a_module_is_searched():
    class OfInner(Numbers):
        def __getitem__(self, index):
            return INNER[index]

    (place,) = find_places(OfInner(), names=True)
    assert str(place) == "INNER.transform"
    assert replaced(OfInner(), {place.path: lambda value: 70})[1] == 70
    assert find_places(OfInner()) == []


def test_what_a_table_refers_to_is_no_pipeline():
    frame = pytest.importorskip("pandas").DataFrame({"a": [1, 2]})
    frame.flags.allows_duplicate_labels = False  # an object with a weak reference, which can be called
    assert list(found(Numbers(frame=frame, transform=double))) == ["dataset.transform"]
