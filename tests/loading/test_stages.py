"""The stages of a batch as data: which there are, in which order, and which of them run in the caller's thread."""

import itertools
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

from memfeed.errors import LoaderError
from memfeed.loading.stages import Arrival, Draft, UserStages, build_stages, holds, with_extras
from memfeed.schema.infer import infer

DICT = infer([{"a": 1}]).structure
TD = infer([TensorDict({"a": torch.ones(1)}, [])]).structure
CPU = torch.device("cpu")


def transfer(device=None, *, staged=False, ahead=True):
    log = []
    return SimpleNamespace(
        device=device, is_staged=staged, can_transform_ahead=ahead, log=log,
        receive_batch=lambda value, event: log.append(("receive", event)) or value,
        record_event=lambda: log.append("record") or "event", current_stream=lambda: 1, on_side_stream=nullcontext,
    )  # fmt: skip


def keyed(batch, keys):
    return ["keyed", batch]


def plain(batch, keys):
    return ["plain", batch]


def names(user, way, structure=DICT):
    stages = build_stages(lambda leaves: ["batch", *leaves], user, way, structure)
    return [one.name for one in stages.ahead], [one.name for one in stages.in_caller], stages


USERS = {
    "nothing": UserStages(),
    "keyed": UserStages(transform=keyed),
    "here": UserStages(transform=keyed, runs_anywhere=False),
    "plain": UserStages(transform=plain, is_keyed=False, runs_anywhere=False),
    "collate": UserStages(collate=lambda value, canvases: value),
    "finished": UserStages(transform=keyed, finishes_samples=True, collate=lambda value, canvases: value),
    "mask": UserStages(pads=True),
    "rows": UserStages(returns_rows=True),
    "convert": UserStages(convert=list),
}


@pytest.mark.parametrize(
    ("user", "way", "ahead", "in_caller"),
    [
        ("nothing", transfer(), ["assemble"], []),
        ("keyed", transfer(), ["assemble", "transform"], []),
        ("here", transfer(), ["assemble"], ["transform"]),
        ("plain", transfer(), ["assemble"], ["the user's transform"]),
        ("collate", transfer(), [], ["the user's collate_fn"]),
        ("finished", transfer(), ["assemble", "transform"], ["the user's collate_fn"]),
        ("mask", transfer(), ["assemble", "add mask and rows"], []),
        ("convert", transfer(), ["assemble"], ["convert"]),
        ("nothing", transfer(CPU), ["assemble"], ["move"]),
        ("keyed", transfer(CPU, ahead=False), ["assemble"], ["move", "transform"]),
        ("nothing", transfer(CPU, staged=True), ["assemble"], ["wait for the transfer"]),
        ("keyed", transfer(CPU, staged=True), ["assemble", "transform", "record an event"], ["wait for the transfer"]),
        (
            "mask",
            transfer(CPU, staged=True),
            ["assemble", "place on the device", "record an event"],
            ["wait for the transfer", "add mask and rows"],
        ),
    ],
)
def test_order(user, way, ahead, in_caller):
    assert names(USERS[user], way)[:2] == (ahead, in_caller)


@pytest.mark.parametrize(
    ("staged", "ahead", "structure"), [*itertools.product([False, True], [False, True], [DICT, TD])]
)
@pytest.mark.parametrize("user", USERS)
def test_no_stage_of_the_caller_comes_before_one_ahead(user, staged, ahead, structure):
    for device in (None, CPU):
        if staged and device is None:
            continue
        _, _, stages = names(USERS[user], transfer(device, staged=staged, ahead=ahead), structure)
        assert not any(one.in_caller for one in stages.ahead)
        assert not stages.in_caller or stages.in_caller[0].in_caller
        assert len({one.name for one in (*stages.ahead, *stages.in_caller)}) == len(stages.ahead + stages.in_caller)


def test_plain_stages_need_nothing():
    kinds = {name: names(user, transfer())[2] for name, user in USERS.items()}
    assert {name for name, one in kinds.items() if one.is_plain} == {"nothing", "collate", "convert"}
    assert {name for name, one in kinds.items() if one.needs_keys} == {"keyed", "here", "finished"}
    assert {name for name, one in kinds.items() if one.needs_rows} == {"rows"}


def test_a_draft_runs_through_all():
    user = UserStages(transform=plain, is_keyed=False, runs_anywhere=False, pads=True, returns_rows=True, convert=list)
    stages = build_stages(lambda leaves: list(leaves), user, transfer(), DICT)
    draft = Draft([1], None, *EXTRA.values())
    stages.run_ahead(draft)
    assert draft.value == [1]
    (batch,) = stages.finish([draft])
    assert batch == [["plain", [1]], *EXTRA.values()]


def test_a_transfer_is_waited_for_once_on_each_stream():
    stream, received = [1], []
    arrival = Arrival("tensors", "event")
    for now in (1, 1, 2, 2, None, None):
        stream[0] = now
        arrival.wait(lambda value, event: received.append((value, event)), lambda: stream[0])
    assert received == [("tensors", "event")] * 3


EXTRA = {"valid": torch.tensor([True]), "rows": torch.tensor([3])}


def test_extras():
    assert with_extras({"a": 1}, EXTRA) == {"a": 1, **EXTRA}
    assert with_extras([1], EXTRA) == ([1], *EXTRA.values())
    assert with_extras([1], {}) == [1]
    batch = with_extras(TensorDict({"a": torch.ones(1)}, [1]), EXTRA)
    assert {*batch.keys()} == {"a", "valid", "rows"}


@pytest.mark.parametrize("make", [dict, lambda items: TensorDict(items, [1])])
@pytest.mark.parametrize("key", ["valid", "rows"])
def test_a_key_that_is_taken(make, key):
    with pytest.raises(LoaderError, match=f'found a batch with the key "{key}"'):
        with_extras(make({key: torch.zeros(1)}), EXTRA)


def test_containers_inside():
    assert holds(TD, "tensordict")
    assert holds(infer([(1, {"x": TensorDict({"a": torch.ones(1)}, [])})]).structure, "graph", "tensordict")
    assert not holds(DICT, "tensordict")
    assert not holds(DICT)
