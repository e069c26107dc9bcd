"""What `Loader.stats` returns is plain data."""

import json
import pickle

import torch

import memfeed


def test_it_is_a_dict_that_json_and_pickle_keep():
    loader = memfeed.Loader({"x": torch.arange(8)}, 2, seed=0)
    list(loader)
    stats = loader.stats()
    assert isinstance(stats, dict)
    assert json.loads(json.dumps(stats)) == stats
    assert pickle.loads(pickle.dumps(stats)) == stats
    assert "Epoch 0" in pickle.loads(pickle.dumps(stats))._repr_html_()
