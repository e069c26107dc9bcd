from collections import namedtuple

import pytest
import torch
from tensordict import TensorDict

from memfeed import to_device
from support import Labelled, Pair

Two = namedtuple("Two", "a b")


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


def test_strict_refuses_what_is_no_tensor():
    with pytest.raises(TypeError, match="found str, which is no tensor"):
        to_device([torch.ones(1), "x"], "cpu", strict=True)
