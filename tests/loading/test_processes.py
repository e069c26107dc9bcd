import gc
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import traceback
import zlib

import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

import memfeed
from memfeed import Loader
from memfeed.loading.readahead import SUPPORTED
from memfeed.transforms import Transform
from short_form import short_form
from support import equal, wait_until

# since Python 3.12 a fork beside a thread is warned of; that it works all the same is what is tested here

N, SIZE, SECONDS = 600, 64, 60


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Batches large enough that OpenMP copies them with several threads."""
    data = torch.arange(N * 2048, dtype=torch.float32).view(N, 2048)
    dataset = TensorDataset(data, torch.arange(N))
    return memfeed.cache(dataset, tmp_path_factory.mktemp("processes") / "a.mf", progress=False)


@pytest.fixture(autouse=True)
def _no_hang():
    def fail(*_):
        raise TimeoutError(f"took more than {2 * SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(2 * SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def before_placing(loader):
    """What a loader says of itself, without where its columns are, which is decided at its first epoch."""
    return repr(loader).split(", placement=")[0]


def sums(batches):
    return [zlib.crc32(batch[0].numpy(), int(batch[1][0])) for batch in batches]


def asked_for(loader):
    """The loader, its batches made when they are asked for, whether a thread would be faster or not."""
    loader._epochs.policy.threaded, loader._epochs.policy.settled = False, True
    return loader


def ahead(loader):
    """The loader, its batches made ahead in a thread."""
    loader._epochs.policy.threaded = loader._epochs.policy.settled = True
    return loader


def cold(loader):
    """The loader, its rows announced to the disk by a thread."""
    loader._epochs.reader.prepare().reader.begin = lambda ids: True
    return asked_for(loader)


made_in_ways = pytest.mark.parametrize(
    "made", [asked_for, ahead, pytest.param(cold, marks=pytest.mark.skipif(not SUPPORTED, reason="no read-ahead"))]
)


# --- pickles


def midway(source, steps=4, **options):
    """A loader some steps into its second epoch, and the iterator there."""
    loader = Loader(source, SIZE, shuffle=True, seed=5, **options)
    loader.set_epoch(1)
    batches = iter(loader)
    for _ in range(steps):
        next(batches)
    return loader, batches


def two_epochs(loader, path):
    with open(path, "w") as file:
        json.dump([sums(loader), sums(loader)], file)


def two_epochs_of_rank(rank, loader, path):
    two_epochs(loader, f"{path}-{rank}")


def test_pickles_are_small(store):
    assert len(pickle.dumps(store)) < 20_000
    assert len(pickle.dumps(Loader(store))) < 20_000
    assert len(pickle.dumps(midway(store)[0])) < 20_000


@pytest.mark.parametrize(
    "options",
    [{}, {"ranks": (1, 3)}, {"drop_last": True}, {"last": "pad", "prefetch_factor": 0}, {"device": "cpu"}],
    ids=str,
)
def test_a_pickle_goes_on_at_the_same_place(store, options):
    loader, batches = midway(store, steps=2, **options)
    other = pickle.loads(pickle.dumps(loader))
    assert before_placing(other) == before_placing(loader)
    assert equal(list(other) + list(other), list(batches) + list(loader))


@pytest.mark.parametrize("method", short_form(["forkserver", "spawn"]))
def test_a_loader_goes_on_in_another_process(store, method, tmp_path):
    loader, batches = midway(store)
    process = multiprocessing.get_context(method).Process(
        target=two_epochs, args=(loader, tmp_path / "sums"), daemon=True
    )
    process.start()
    process.join(SECONDS)
    assert process.exitcode == 0
    assert json.loads((tmp_path / "sums").read_text()) == [sums(batches), sums(loader)]


@pytest.mark.long
def test_a_loader_goes_on_in_processes_of_torch(store, tmp_path):
    loader, batches = midway(store)
    torch.multiprocessing.spawn(two_epochs_of_rank, (loader, tmp_path / "sums"), nprocs=2, daemon=True)
    want = [sums(batches), sums(loader)]
    assert [json.loads((tmp_path / f"sums-{rank}").read_text()) for rank in range(2)] == [want, want]


def test_stores_with_weights_pickle(store):
    loader, batches = midway([(store.subset(range(100)), 0.25), (store.subset(range(50, N)), 0.75)])
    other = pickle.loads(pickle.dumps(loader))
    assert before_placing(other) == before_placing(loader)
    assert sums(other) == sums(batches)
    assert sums(other) == sums(loader)


@pytest.mark.parametrize(
    "source",
    [torch.arange(9), (torch.arange(9),), TensorDataset(torch.arange(9)), Subset(TensorDataset(torch.arange(9)), [3])],
    ids=["tensor", "tuple", "TensorDataset", "Subset"],
)
def test_columns_in_memory_do_not_pickle(source):
    with pytest.raises(TypeError, match=r"found columns in memory, which a pickle would copy; .* cache\(\) them"):
        pickle.dumps(Loader(source, 2))


# --- forks


def in_child(work):
    """Forks; gives what waits for the result of ``work`` there. A child that takes too long dies."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(SECONDS)
        try:
            with open(write, "w") as pipe:
                json.dump(work(), pipe)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(write)

    def result():
        with open(read) as pipe:
            found = pipe.read()
        assert os.waitpid(child, 0)[1] == 0, "the child hung, or failed"
        return json.loads(found)

    return result


@made_in_ways
def test_a_forked_child_goes_on_with_the_same_iterator(store, made):
    loader = made(Loader(store, SIZE, shuffle=True, seed=0))
    batches = iter(loader)
    read, results = [], []
    for batch in batches:
        read += sums([batch])
        results.append(in_child(lambda: [sums(batches), sums(loader)]))
        assert sums([batch]) == read[-1:]
    after = sums(loader)
    for steps, result in enumerate(results, 1):
        assert result() == [read[steps:], after]
    whole = Loader(store, SIZE, shuffle=True, seed=0)
    assert [read, after] == [sums(whole), sums(whole)]


@made_in_ways
def test_a_forked_child_starts_an_epoch_of_its_own(store, made):
    loader = made(Loader(store, SIZE, shuffle=True, seed=0))
    sums(loader)
    result = in_child(lambda: [sums(loader), sums(Loader(store, SIZE))])
    assert result() == [sums(loader), sums(Loader(store, SIZE))]


def test_a_forked_child_draws_the_orders_that_threads_of_its_parent_were_drawing():
    loader = Loader((torch.arange(300_000), torch.arange(300_000)), 100_000, shuffle=True, seed=0)
    batches = iter(loader)
    next(batches)
    result = in_child(lambda: [sums(batches), sums(loader), sums(loader)])
    assert result() == [sums(batches), sums(loader), sums(loader)]


@made_in_ways
def test_a_dataloader_forks_workers_beside_a_loader(store, made):
    loader = made(Loader(store, SIZE))
    whole = sums(loader)
    workers = DataLoader(store, SIZE, num_workers=2, multiprocessing_context="fork", timeout=SECONDS)
    pairs = [(sums([mine]), sums([other])) for mine, other in zip(loader, workers, strict=True)]
    assert pairs == [([one], [one]) for one in whole]


# --- ends


EXIT = """
    import sys, torch
    from memfeed import Loader
    from memfeed.transforms import Transform

    class Busy(Transform):  # almost always within torch's code, where a thread must not be when Python ends
        def apply(self, batch, keys, **_):
            for _ in range(30):
                torch.rand(100_000).sort()
            return batch

    def running(loader):
        loader._epochs.policy.threaded = loader._epochs.policy.settled = True
        batches = iter(loader)
        next(batches)
        return batches

    transforms = running(Loader(torch.arange(1000), 2, transform=Busy(), prefetch_factor=500))
    draws = running(Loader(torch.zeros(3_000_000, dtype=torch.uint8), 10, shuffle=True, seed=0))
"""


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("", 0, ""),
        pytest.param("sys.exit(3)", 3, "", marks=pytest.mark.long),
        pytest.param("raise KeyError('mine')", 1, "KeyError: 'mine'", marks=pytest.mark.long),
    ],
    ids=["end", "exit", "exception"],
)
def test_the_interpreter_exits_while_threads_work(end, code, said):
    script = textwrap.dedent(EXIT) + end
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == code, done.stderr
    assert done.stderr.strip().split("\n")[-1] == said
    assert done.stderr.count("Traceback") == bool(said)


class Stuck(Transform):
    """Waits in its second batch until it is let go."""

    def __init__(self):
        super().__init__()
        self.calls, self.stuck, self.go = 0, threading.Event(), threading.Event()

    def apply(self, batch, keys, **_):
        self.calls += 1
        if self.calls == 2:
            self.stuck.set()
            self.go.wait(SECONDS)
        return batch


def left():
    return [thread for thread in threading.enumerate() if thread.name == "memfeed"]


def interrupt_in_loop(stuck):
    raise KeyboardInterrupt


def interrupt_while_waiting(stuck):
    caller = threading.get_ident()

    def is_waiting():
        frame = sys._current_frames()[caller]
        return frame.f_code.co_filename == threading.__file__

    def interrupt():
        stuck.wait(SECONDS)
        wait_until(is_waiting)  # the caller waits for the batch
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()


@pytest.fixture
def _interruptible():
    """A program that a shell has put into the background ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
@pytest.mark.parametrize("interrupt", [interrupt_in_loop, interrupt_while_waiting])
def test_an_interrupt_leaves_no_thread_and_a_loader_that_works(store, interrupt):
    transform = Stuck()
    loader = ahead(Loader(store.subset(range(300)), SIZE, shuffle=True, seed=0, transform=transform))
    try:
        for _ in loader:
            assert left()
            interrupt(transform.stuck)
        pytest.fail("was not interrupted")
    except KeyboardInterrupt:
        transform.go.set()
    want = Loader(store.subset(range(300)), SIZE, shuffle=True, seed=0)
    want.set_epoch(1)
    assert sums(loader) == sums(want)
    gc.collect()
    wait_until(lambda: not left())
