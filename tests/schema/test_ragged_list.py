"""A list that is one field of a batch, and the plain list that users get of it."""

import optree
import torch

from memfeed.schema.jagged import RaggedList


def test_it_is_a_leaf():
    rows = RaggedList([torch.ones(1), None])
    assert optree.tree_leaves({"a": rows, "b": [1, 2]}) == [rows, 1, 2]


def test_users_get_a_plain_list():
    rows = [torch.ones(1), torch.ones(2)]
    owned = RaggedList(rows).owned()
    assert type(owned) is list
    assert all(one is other for one, other in zip(owned, rows, strict=True))


def test_views_are_copied_by_their_owner():
    rows = torch.arange(3)
    listed = RaggedList([rows[:1], rows[1:]], lambda: [row.clone() for row in (rows[:1], rows[1:])])
    listed.owned()[0].fill_(9)
    assert rows.tolist() == [0, 1, 2]
