import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.stateful import Stateful

import memfeed
import rank_worker
from forked_programs import SCRIPT, Program
from memfeed import Blocks, Loader
from memfeed.errors import LoaderError
from rank_worker import GLOBAL_BATCH, KILLED, KILLED_EPOCH, ORDERS, rows_of
from support import Made, wait_until

N = 1003  # the last 7 rows make no global batch, and are dealt to 2 or 4 ranks unevenly


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    samples = [(torch.full((3,), i), i) for i in range(N)]
    return memfeed.cache(Made(samples), tmp_path_factory.mktemp("ranks") / "a.mf", progress=False)


# --- in processes of torchrun, which are killed in the middle of an epoch


@dataclass
class Killed:
    """What the ranks found out, where the state is that rank 0 saved last, and the rows of the steps until then."""

    found: list[dict[str, Any]]
    state: Path
    steps: list[list[int]]


def torchrun(ranks: int, store: memfeed.Store, out: Path, *resume: Path) -> Killed:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), rank_worker.__file__]
    arguments = [*command, str(store.path), str(out), *map(str, resume)]
    with open(out / "output", "w") as output:
        run = subprocess.Popen([sys.executable, *arguments], stdout=output, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: run.poll() is not None or is_far(out), 120)
        assert run.poll() is None, (out / "output").read_text()
    finally:
        for pid in out.glob("pid-?"):  # torchrun gives each a session of its own
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid.read_text()), signal.SIGKILL)
        run.terminate()
        run.wait(60)
    return killed(ranks, out)


def forked(ranks: int, store: memfeed.Store, out: Path) -> Killed:
    """As torchrun, whose variables each rank gets. Nothing imports torch here, which takes most of torchrun's time."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    programs = [
        Program(SCRIPT, rank_worker.__file__, store.path, out, at=out, RANK=str(rank), LOCAL_RANK=str(rank), **shared)
        for rank in range(ranks)
    ]
    try:
        wait_until(lambda: is_far(out) or any(one.process.exitcode is not None for one in programs), 120)
        assert [one.process.exitcode for one in programs] == [None] * ranks, [one.err.read_text() for one in programs]
    finally:
        for one in programs:
            one.process.kill()
            one.wait()
    return killed(ranks, out)


def is_far(out: Path) -> bool:
    """Whether rank 0 has saved a state in the middle of the epoch."""
    return (out / "state").exists() and json.loads((out / "state").read_text())["row"] >= 10 * GLOBAL_BATCH


def killed(ranks: int, out: Path) -> Killed:
    state = out / "state"
    found = [json.loads((out / f"found-{rank}").read_text()) for rank in range(ranks)]
    done = json.loads(state.read_text())["row"] // GLOBAL_BATCH
    logs = [(out / f"rows-{rank}").read_text().splitlines()[:done] for rank in range(ranks)]
    return Killed(found, state, together([[json.loads(line) for line in log] for log in logs]))


@pytest.fixture(scope="module")
def two(store, tmp_path_factory):
    return forked(2, store, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(store, two, tmp_path_factory):
    """Goes on where two were killed, before it is killed in its turn."""
    return torchrun(4, store, tmp_path_factory.mktemp("four"), two.state)


@pytest.fixture(params=["two", pytest.param("four", marks=pytest.mark.long)])
def run(request):
    return request.getfixturevalue(request.param)


def together(ranks):
    """The rows of each step, of all ranks in their order."""
    return [sum(step, []) for step in zip_longest(*ranks, fillvalue=[])]


@pytest.mark.parametrize("most", [2**31, 2**63, 2**70, 10**400])
def test_numbers_beyond_all_measure_are_refused(most):
    columns = torch.arange(12)
    with pytest.raises(LoaderError, match=r"found Blocks.rows=\d+.*; expected at most 16,777,216"):
        memfeed.Loader(columns, 4, shuffle=Blocks(most))
    with pytest.raises(LoaderError, match=r"found ranks\[1\]=\d+.*; expected at most 2,147,483,647"):
        memfeed.Loader(columns, 4, ranks=(0, most))
    with pytest.raises(LoaderError, match=r"found epoch \d+.*; expected 0 to 2\*\*63 - 1"):
        memfeed.Loader(columns, 4).set_epoch(most**3)
    largest = memfeed.Loader(columns, 4, shuffle=Blocks(1 << 24))
    assert sorted(torch.cat(list(largest)).tolist()) == list(range(12))


@pytest.mark.parametrize("name", ORDERS)
def test_ranks_of_torch_distributed_read_what_one_would(store, run, name):
    steps = together([found[name] for found in run.found])
    assert steps == rows_of(Loader(store, GLOBAL_BATCH, **ORDERS[name]))
    assert sorted(sum(steps, [])) == list(range(N))
    assert all(len(found[name][0]) == GLOBAL_BATCH // len(run.found) for found in run.found)


def test_given_ranks_win_over_torch_distributed(store, run):
    assert all(found["given"] == rows_of(Loader(store, 5, ranks=(1, 3), last="uneven")) for found in run.found)


def test_padded_ranks_stay_in_step(run):
    padded = [found["padded"] for found in run.found]
    assert all(one["shapes"] == [[[5], [5]]] for one in padded)
    assert all(one["counts"] == padded[0]["counts"] for one in padded)
    assert sum(padded[0]["counts"]) == N
    assert sorted(sum(together([one["rows"] for one in padded]), [])) == list(range(N))


def test_a_distributed_checkpoint_goes_on_at_the_same_place(store, run):
    for one in (found["checkpointed"] for found in run.found):
        assert one["loaded"] == one["saved"]
        assert one["epochs"] == [2, 2]
        assert len(one["saved"]) == len(Loader(store, GLOBAL_BATCH)) - 7


def whole_killed_epoch(store):
    loader = Loader(store, GLOBAL_BATCH, **KILLED)
    loader.set_epoch(KILLED_EPOCH)
    return rows_of(loader)


@pytest.mark.long
def test_two_killed_ranks_go_on_as_four(store, two, four):
    assert 10 <= len(two.steps) < N // GLOBAL_BATCH
    steps = two.steps + together([found["resumed"] for found in four.found])
    assert steps == whole_killed_epoch(store)
    assert sorted(sum(steps, [])) == list(range(N))


@pytest.mark.long
def test_four_killed_ranks_go_on_as_one(store, four):
    loader = Loader(store, GLOBAL_BATCH, **KILLED)
    loader.load_state_dict(json.loads(four.state.read_text()))
    assert 10 <= len(four.steps) < N // GLOBAL_BATCH
    assert four.steps + rows_of(loader) == whole_killed_epoch(store)


# --- in one process


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.filterwarnings("ignore:torch.distributed is .*uninitialized:UserWarning")
def test_a_checkpoint_of_one_process_goes_on_at_the_same_place(store, tmp_path):
    loader, other = (Loader(store, 100, shuffle=True, seed=0) for _ in range(2))
    batches = iter(loader)
    rows_of(next(batches) for _ in range(3))
    dcp.save({"loader": loader}, checkpoint_id=tmp_path)
    dcp.load({"loader": other}, checkpoint_id=tmp_path)
    assert isinstance(loader, Stateful)
    assert rows_of(other) == rows_of(batches)
    assert (other.epoch, other.state_dict()["epoch"]) == (0, 1)


dealt = st.tuples(st.integers(1, 120), st.integers(1, 9), st.integers(1, 6), st.sampled_from([False, True, Blocks()]))


def ranks(n, batch_size, world_size, shuffle, **options):
    each = [{"ranks": (rank, world_size), "seed": 0} for rank in range(world_size)]
    return [Loader(torch.arange(n), batch_size, shuffle=shuffle, **one, **options) for one in each]


@settings(max_examples=100)
@given(dealt)
def test_ranks_share_each_step_of_one_rank(drawn):
    n, batch_size, world_size, shuffle = drawn
    n = max(n, world_size)
    loaders = ranks(n, batch_size, world_size, shuffle, last="uneven")
    read = [[batch.tolist() for batch in loader] for loader in loaders]
    alone = [batch.tolist() for batch in Loader(torch.arange(n), batch_size * world_size, shuffle=shuffle, seed=0)]
    assert together(read) == alone
    assert [len(loader) for loader in loaders] == list(map(len, read))
    assert sorted(sum(alone, [])) == list(range(n))
    for step in zip_longest(*read, fillvalue=[]):
        assert max(map(len, step)) - min(map(len, step)) <= 1


@pytest.mark.filterwarnings("ignore:found .* rows for .* ranks with drop_last=True")
@settings(max_examples=100)
@given(dealt)
def test_dropping_the_last_leaves_out_less_than_a_global_batch(drawn):
    n, batch_size, world_size, shuffle = drawn
    n = max(n, world_size)
    read = [[batch.tolist() for batch in one] for one in ranks(n, batch_size, world_size, shuffle, drop_last=True)]
    rows = sum(together(read), [])
    assert n - batch_size * world_size < len(rows) == len(set(rows))
    assert {len(batch) for batches in read for batch in batches} <= {batch_size}
    assert len(set(map(len, read))) == 1


@settings(max_examples=100)
@given(dealt)
def test_padding_the_last_gives_every_rank_as_much(drawn):
    n, batch_size, world_size, shuffle = drawn
    loaders = ranks(n, batch_size, world_size, shuffle, last="pad")
    read = [list(loader) for loader in loaders]
    assert {len(batches) for batches in read} == {len(loaders[0])} == {-(-n // (batch_size * world_size))}
    assert {len(part) for batches in read for batch in batches for part in batch} == {batch_size}
    assert sorted(row for batches in read for rows, valid in batches for row in rows[valid].tolist()) == list(range(n))


def test_zipped_ranks_are_one(store):
    loaders = [Loader(store, 5, shuffle=True, seed=0, ranks=(rank, 3), last="uneven") for rank in range(3)]
    alone = Loader(store, 15, shuffle=True, seed=0)
    for parts, whole in zip(zip(*loaders, strict=True), alone, strict=True):
        assert torch.equal(torch.cat([images for images, _ in parts]), whole[0])
        assert torch.equal(torch.cat([labels for _, labels in parts]), whole[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 1}, r"found ranks=1; expected \(rank, world_size\), for example ranks=\(0, 2\)"),
        ({"ranks": (1, 2, 3)}, r"found ranks=\(1, 2, 3\); expected \(rank, world_size\)"),
        ({"ranks": (2, 2)}, r"found ranks=\(2, 2\); expected a rank of 0 to 1 for this world size"),
        ({"ranks": (-1, 2)}, r"found ranks=\(-1, 2\); expected a rank of 0 to 1 for this world size"),
        ({"ranks": (0, 0)}, r"found ranks\[1\]=0; expected an int of at least 1"),
        ({"ranks": ("a", 2)}, r"found ranks\[0\]='a'; expected an int"),
        ({"ranks": (0, 2), "sampler": [1]}, "found a sampler and ranks; .* leave ranks out"),
        ({"ranks": (0, 2), "batch_sampler": [[1]]}, "found a sampler and ranks; .* leave ranks out"),
    ],
)
def test_ranks_that_do_not_fit(options, message):
    with pytest.raises(LoaderError, match=message):
        Loader(torch.arange(5), **options)
