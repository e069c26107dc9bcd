"""Results of a function: equal to its own, computed once, for the caller alone, and kept where they may be."""

from __future__ import annotations

import concurrent.futures
import gc
import os
import pickle
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import memfeed
from memfeed.errors import CorruptStoreError, RandomDataError, SchemaError, StoreError
from memfeed.memoizing import kept
from memfeed.memoizing import memo as memos
from memfeed.memoizing import memoize as module
from memfeed.schema.compare import describe_difference, difference


@pytest.fixture(autouse=True)
def fresh_process():
    """Each test has directories of its own: forget those of the tests before."""
    kept._memos.clear()
    yield
    kept._memos.clear()


def forget(function):
    """Return a function that is memoized as in another process: it knows nothing."""
    kept._memos.clear()
    return module.Memoized(function._function, function._path, function._size, function._mapped, function._version)


def assert_equal(found, expected):
    problem = difference(found, expected)
    assert problem is None, describe_difference(found, expected)
    assert type(found) is type(expected)


CALLS: list[object] = []


def counted(value):
    CALLS.append(value)
    return np.full((3, 2), value)


def kind(value):
    """Return the name of a test: no address, which would differ between processes."""
    return value if isinstance(value, str) else type(value).__name__


RESULTS = {
    "a tensor": torch.arange(6).view(2, 3),
    "float16": torch.randn(3).half(),
    "bfloat16": torch.randn(3, 2).bfloat16(),
    "a tensor without dims": torch.tensor(3.5),
    "an empty tensor": torch.empty(0, 4),
    "an array": np.arange(6, dtype=np.uint16).reshape(3, 2),
    "an array of Fortran": np.asfortranarray(np.arange(6.0).reshape(3, 2)),
    "an array without dims": np.array(2),
    "channels last": torch.randn(3, 4, 5, 2).to(memory_format=torch.channels_last),
    "a permuted tensor": torch.arange(24).view(2, 3, 4).permute(2, 0, 1),
    "a part of a tensor": torch.arange(24).view(4, 6)[1:3, ::2],
    "reversed": np.arange(6.0)[::-1],
    "one row for all": torch.ones(1, 3).expand(4, 3),
    "complex numbers": np.array([1 + 2j]),
    "a bool array": np.array([True, False]),
    "a number of numpy": np.float32(1.25),
    "an int": 1 << 70,
    "a bool": True,
    "None": None,
    "text": "grün \ud800 \0",
    "bytes": b"\0\1\2",
    "no bytes": b"",
    "floats": [1.5, -0.0, 1e300],
    "a dict": {"a": torch.ones(2), 3: (b"x", None, "y"), "c": {}},
    "a tuple": (np.zeros(2), [np.ones(1), "a"], ()),
}


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("name", RESULTS)
def test_a_result_is_the_same_when_it_is_read(tmp_path, name, mapped):
    def make(name):
        return RESULTS[name]

    load = memfeed.memoize(make, tmp_path / "r.mf", mapped=mapped, version=1)
    assert_equal(load(name), RESULTS[name])
    assert_equal(load(name), RESULTS[name])
    assert_equal(forget(load)(name), RESULTS[name])
    assert load.report().hits == 2


@pytest.mark.parametrize("name", ["an array of Fortran", "channels last", "a permuted tensor"])
def test_dims_lie_in_memory_as_before(tmp_path, name):
    load = memfeed.memoize(lambda: RESULTS[name], tmp_path / "r.mf", version=1)
    for found in load(), load():
        strides = (
            (found.strides, RESULTS[name].strides) if "array" in name else (found.stride(), RESULTS[name].stride())
        )
        assert strides[0] == strides[1]
    store = memfeed.open(tmp_path / "r.mf")
    value = store[0]["result"]
    assert np.array_equal(value.numpy(), np.asarray(RESULTS[name]))
    assert torch.equal(next(iter(memfeed.Loader(store)))["result"][0], value)
    copied = memfeed.cache(store, tmp_path / "c.mf", allow="copy", progress=False)
    assert torch.equal(copied[0]["result"], value)


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("megabytes", [3, 17])
def test_a_large_result_is_the_same_and_begins_at_a_multiple_of_64(tmp_path, megabytes, mapped):
    expected = np.random.default_rng(0).standard_normal((megabytes, 125_000), np.float64)
    load = memfeed.memoize(lambda: (expected, torch.from_numpy(expected)), tmp_path / "r.mf", mapped=mapped, version=1)
    load()
    array, tensor = load()
    assert_equal((array, tensor), (expected, torch.from_numpy(expected)))
    assert array.ctypes.data % 64 == tensor.data_ptr() % 64 == 0
    assert array.flags.writeable is not mapped
    tensor += 1
    assert_equal(load()[1], torch.from_numpy(expected))


def test_a_large_result_whose_file_was_cut_is_an_error(tmp_path):
    load = memfeed.memoize(lambda: np.ones((34, 125_000)), tmp_path / "r.mf", version=1)
    for _ in range(2):
        load()
    os.truncate(tmp_path / "r.mf" / "blob" / "heap.bin", 1000)
    with pytest.raises(CorruptStoreError, match="it was cut"):
        load()


def test_nan_is_nan(tmp_path):
    load = memfeed.memoize(lambda: (float("nan"), torch.tensor(float("nan"))), tmp_path / "r.mf")
    load()
    number, tensor = load()
    assert number != number
    assert tensor.isnan()


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "CMYK", "LA", "I;16", "I", "F", "YCbCr", "HSV"])
def test_an_image_of_pillow_is_the_same(tmp_path, mode):
    source = Image.effect_noise((7, 5), 90).convert("I" if mode == "I;16" else "RGB")
    image = source.quantize(9) if mode == "P" else source.convert(mode)
    image.info["dpi"] = (72, 72)

    load = memfeed.memoize(lambda: image.copy(), tmp_path / "r.mf", version=1)
    for found in load(), load():
        assert (found.mode, found.size, found.tobytes()) == (mode, (7, 5), image.tobytes())
        assert found.getpalette() == image.getpalette()
        assert found.info == image.info


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (object(), "found object"),
        (np.array(["a"]), "found an array of dtype <U1"),
        (np.array([1], ">i4"), "found an array of dtype >i4"),
        (np.array([None]), "found an array of dtype"),
        (torch.ones(1, requires_grad=True), "with a gradient"),
        (torch.eye(2).to_sparse(), "found a torch.sparse_coo tensor"),
        (torch.nn.Parameter(torch.ones(1)), "found a Parameter"),
        ({1.5: 2}, "found dict"),
        ({3}, "found set"),
        (bytearray(b"x"), "found bytearray"),
        ([({"a": object()},)], r"the result\[0\]\[0\]\['a'\]"),
    ],
    ids=kind,
)  # fmt: skip
def test_a_result_that_cannot_be_kept_is_refused(tmp_path, result, words):
    load = memfeed.memoize(lambda: result, tmp_path / "r.mf", version=1)
    with pytest.raises(SchemaError, match=words):
        load()


def test_each_key_is_computed_twice_for_the_first_16_and_then_once(tmp_path):
    CALLS.clear()
    load = memfeed.memoize(counted, tmp_path / "r.mf", version=1)
    for value in [*range(20), *range(20)]:
        assert_equal(load(value), np.full((3, 2), value))
    assert [value for value in range(20) for _ in range(1 + (value < 16))] == CALLS


def test_a_result_belongs_to_its_caller(tmp_path):
    shared = np.zeros(3)
    load = memfeed.memoize(lambda: shared, tmp_path / "r.mf", version=1)
    for _ in range(3):
        found = load()
        assert not found.any()
        found += 1
    assert not shared.any()


def test_a_mapped_result_is_not_written(tmp_path):
    load = memfeed.memoize(lambda: (np.zeros(3), torch.zeros(3)), tmp_path / "r.mf", mapped=True)
    for _ in range(3):
        array, tensor = load()
        assert not tensor.any()
        tensor += 1  # reaches neither the file nor the next result
        with pytest.raises(ValueError, match="read-only"):
            array += 1


def test_the_key_is_all_arguments_however_they_are_written(tmp_path):
    CALLS.clear()

    def add(a, b=2, *, c=3):
        CALLS.append((a, b, c))
        return (a, b, c)

    load = memfeed.memoize(add, tmp_path / "r.mf", version=1)
    for call in (lambda: load(1), lambda: load(1, 2), lambda: load(a=1, c=3), lambda: load(1, b=2)):
        assert call() == (1, 2, 3)
    assert CALLS == [(1, 2, 3)] * 2
    different = [
        1,
        1.0,
        True,
        "1",
        b"1",
        Path("1"),
        (1,),
        [1],
        ((1,),),
        None,
        np.int64(1),
        np.int32(1),
        {"1": 1},
        {1: 1},
    ]
    key_of = load._keys.of
    assert len({key_of((value,), {}).text for value in different}) == len(different)


@pytest.mark.parametrize("value", [object(), np.ones(2), torch.ones(1), {1, 2}, 1j, print, {1.5: 2}], ids=kind)
def test_an_argument_that_no_key_can_hold_is_refused(tmp_path, value):
    load = memfeed.memoize(lambda x: 1, tmp_path / "r.mf")
    with pytest.raises(SchemaError, match="found argument x of class"):
        load(value)


def test_a_variable_that_is_assigned_again_counts(tmp_path, monkeypatch):
    """In a notebook the function is not made again."""
    monkeypatch.setitem(globals(), "FACTOR", 2)
    kept = memfeed.memoize(times_factor, tmp_path / "r.mf")
    assert [kept(3), kept(3)] == [6, 6]
    monkeypatch.setitem(globals(), "FACTOR", 5)
    assert kept(3) == 15
    monkeypatch.setitem(globals(), "FACTOR", 2)
    assert kept(3) == 6
    assert kept.report().hits == 2


FACTOR = 2


def times_factor(x):
    return x * FACTOR


def test_a_function_that_changes_its_arguments_is_refused(tmp_path):
    def put(values):
        values.append(1)
        return len(values)

    with pytest.raises(SchemaError, match=r"put: found that it changes its arguments, .*: copy them in the function"):
        memfeed.memoize(put, tmp_path / "r.mf")([1])


def test_a_changed_file_is_read_again(tmp_path):
    file = tmp_path / "a.txt"
    load = memfeed.memoize(lambda path: Path(path).read_text(), tmp_path / "r.mf")
    file.write_text("one")
    assert load(file) == load(file) == "one"
    file.write_text("two")
    os.utime(file, ns=(1, 1))
    assert load(file) == load(file) == "two"
    os.utime(file, ns=(1, 2))
    load(file)
    assert load.report()[2:4] == (2, 3)


def test_a_file_that_changes_while_it_is_read_is_not_kept(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("0")

    def read(path):
        text = path.read_text()
        path.write_text(text + "0")
        return len(path.name)

    load = memfeed.memoize(read, tmp_path / "r.mf")
    assert load(file) == load(file) == 5
    assert load.report()[2:4] == (0, 2)


def test_a_function_that_draws_is_named(tmp_path):
    def crop(x):
        return torch.rand(3)

    with pytest.raises(RandomDataError, match=r"crop: called twice .* differ in the values of leaf 0 of 1"):
        memfeed.memoize(crop, tmp_path / "r.mf")(1)

    def draw_and_drop(x):
        random.random()
        return x

    with pytest.raises(RandomDataError, match="that it draws random numbers"):
        memfeed.memoize(draw_and_drop, tmp_path / "r.mf")(1)
    counter = iter(range(100))
    with pytest.raises(RandomDataError, match="structure or plain values"):
        memfeed.memoize(lambda: next(counter), tmp_path / "r.mf", version=1)()


def test_generators_are_where_the_function_left_them(tmp_path):
    load = memfeed.memoize(lambda x: torch.ones(x), tmp_path / "r.mf")
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    load(4)
    assert torch.equal(torch.rand(2), expected)


def test_an_exception_of_the_function_is_the_same_and_nothing_is_kept(tmp_path):
    def fail(x):
        raise OSError(f"image file is truncated {x}")

    load = memfeed.memoize(fail, tmp_path / "r.mf")
    for _ in range(2):
        with pytest.raises(OSError, match="^image file is truncated 3$"):
            load(3)
    assert len(memfeed.open(tmp_path / "r.mf")) == 0


def test_a_decorated_function_is_pickled_by_its_name_and_can_be_a_method(tmp_path):
    load = memfeed.memoize(counted, tmp_path / "r.mf", version=3)
    assert load.__name__ == "counted"
    again = pickle.loads(pickle.dumps(load))
    assert_equal(again(5), load(5))

    class Data:
        @staticmethod
        @memfeed.memoize(tmp_path / "s.mf")
        def double(x):
            return 2 * x

        @memfeed.memoize(tmp_path / "s.mf")
        def triple(self, x):
            return 3 * x

    assert Data().double(4) == Data.double(4) == 8
    with pytest.raises(SchemaError, match="found argument self of class Data"):
        Data().triple(4)


def test_wrong_use_says_what_to_write(tmp_path):
    with pytest.raises(TypeError, match="expected a function and a path"):
        memfeed.memoize(counted)
    with pytest.raises(TypeError, match="expected a function, then a path"):
        memfeed.memoize("r.mf", counted)
    with pytest.raises(ValueError, match="found size='many'"):
        memfeed.memoize("r.mf", size="many")
    one, other = (memfeed.memoize(counted, tmp_path / "r.mf", size=size, version=1) for size in (None, "1GB"))
    one(1)
    with pytest.raises(StoreError, match="expected one size for all functions of a path"):
        other(1)


def test_results_are_a_store(tmp_path):
    @memfeed.memoize(tmp_path / "r.mf")
    def load(number):
        return {"image": np.full((4, 5, 3), number, np.uint8), "name": str(number), "size": number}

    for number in range(5):
        load(number)
    store = memfeed.open(tmp_path / "r.mf")
    assert [store[i]["result"]["size"] for i in range(5)] == list(range(5))
    assert [store[i]["key"]["arguments"] for i in range(5)] == [{"number": i} for i in range(5)]
    store.verify()
    batch = next(iter(memfeed.Loader(store, batch_size=5)))
    assert torch.equal(batch["result"]["image"][:, 0, 0, 0], torch.arange(5).to(torch.uint8))
    sent = pickle.dumps(store)
    load(7)  # a row more does not change the store that was sent
    assert pickle.loads(sent)[4]["result"]["name"] == "4"
    assert len(memfeed.open(tmp_path / "r.mf")) == 6
    copied = memfeed.cache(store, tmp_path / "c.mf", allow="copy", progress=False)
    assert_equal([copied[i] for i in range(5)], [store[i] for i in range(5)])


@pytest.mark.parametrize("rows", [0, 6])
def test_results_are_pushed_and_pulled(tmp_path, rows):
    pytest.importorskip("obstore")
    load = memfeed.memoize(lambda i: (np.full((2, 3), i), "x" * i, np.zeros(i % 3), i), tmp_path / "r.mf")
    for i in range(rows):
        load(i)
    if not rows:
        with pytest.raises(StoreError, match="found no"):
            memfeed.push(tmp_path / "r.mf", f"file://{tmp_path}/bucket/r.mf")
        return
    expected = memfeed.open(tmp_path / "r.mf")
    for source in (tmp_path / "r.mf", expected):
        memfeed.push(source, f"file://{tmp_path}/bucket/r.mf")
    with pytest.raises(StoreError, match="found a view of memoized results"):
        memfeed.push(expected.subset([1]), f"file://{tmp_path}/bucket/r.mf")
    memfeed.pull(f"file://{tmp_path}/bucket/r.mf", tmp_path / "p.mf", progress=False)
    pulled = memfeed.open(tmp_path / "p.mf")
    pulled.verify()
    assert_equal([pulled[i] for i in range(rows)], [expected[i] for i in range(rows)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bucket", "p.mf", "r.mf"]


def test_the_command_line_shows_and_verifies_results(tmp_path):
    load = memfeed.memoize(lambda i: {"image": np.full((2, 3), i), "name": str(i)}, tmp_path / "r.mf")
    for i in range(4):
        load(i)
    command = [sys.executable, "-m", "memfeed"]
    shown = subprocess.run([*command, "inspect", tmp_path / "r.mf"], capture_output=True, text=True, timeout=120)
    assert shown.returncode == 0, shown.stderr
    assert "4 rows, 3 fields" in shown.stdout
    assert "result.image" in shown.stdout
    done = subprocess.run([*command, "verify", tmp_path / "r.mf"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_results_of_several_kinds_are_fields_of_their_own(tmp_path):
    load = memfeed.memoize(lambda i: np.zeros((2,) * (i % 3 + 1)) if i < 5 else "text", tmp_path / "r.mf")
    expected = [load(i) for i in range(6)]
    store = memfeed.open(tmp_path / "r.mf")
    for i, value in enumerate(expected):
        row = store[i]
        found = [value for name, value in row.items() if name != "key" and value is not None]
        assert len(found) == 1
        assert found[0] == value if i == 5 else np.array_equal(found[0], value)
    store.verify()


def test_shapes_that_differ_are_read(tmp_path):
    load = memfeed.memoize(lambda i: torch.full((i, 2), i), tmp_path / "r.mf")
    for i in range(4):
        load(i)
    store = memfeed.open(tmp_path / "r.mf")
    assert [tuple(store[i]["result"].shape) for i in range(4)] == [(i, 2) for i in range(4)]


def test_the_least_recently_used_results_are_dropped(tmp_path, monkeypatch):
    now = [1_000_000]
    monkeypatch.setattr(time, "time", lambda: now[0])
    CALLS.clear()

    def make(i):
        CALLS.append(i)
        return np.full(100_000, i % 256, np.uint8)

    load = memfeed.memoize(make, tmp_path / "r.mf", size="1MB", version=1)
    kept = 0
    for i in range(60):
        now[0] += 1
        load(i)
        assert (load(0) == 0).all()  # used all the time
    CALLS.clear()
    for i in range(60):
        found = load._kept.memo.find(load_digest(load, i))
        kept += load._kept.memo.read(found, load_digest(load, i)) is not None
    assert 5 <= kept <= 10
    load(0)
    assert CALLS == []
    heap = os.stat(tmp_path / "r.mf" / "blob" / "heap.bin")
    assert heap.st_blocks * 512 < 2_000_000 < heap.st_size
    assert np.array_equal(load(3), np.full(100_000, 3, np.uint8))  # computed again
    assert CALLS == [3]
    store = memfeed.open(tmp_path / "r.mf")
    store.verify()
    assert len(store) == kept + 1 or len(store) <= 10


def load_digest(load, *arguments):
    import hashlib

    return hashlib.blake2b(load._keys.of(arguments, {}).text, digest_size=16).digest()


def test_a_mapped_result_is_not_dropped_while_it_is_used(tmp_path):
    load = memfeed.memoize(lambda i: np.full(200_000, i, np.uint8), tmp_path / "r.mf", size="1MB", mapped=True)
    held = load(1)
    for i in range(2, 30):
        load(i)
    assert (held == 1).all()


def test_threads_compute_a_key_once(tmp_path):
    calls = []

    def slow(x):
        calls.append(x)
        time.sleep(0.02)
        return x * 2

    load = memfeed.memoize(slow, tmp_path / "r.mf", version=1)
    for i in range(16):
        load(100 + i)
    calls.clear()
    found = []
    threads = [threading.Thread(target=lambda: found.extend(load(i) for i in range(5))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == sorted(2 * i for i in range(5) for _ in range(6))
    assert sorted(calls) == list(range(5))


def in_threads(*functions):
    """Return what the functions return, or raise, each in a thread of its own."""
    with concurrent.futures.ThreadPoolExecutor(len(functions)) as pool:
        futures = [pool.submit(one) for one in functions]
        return [one.exception() or one.result() for one in futures]


def test_threads_that_compute_new_keys_leave_the_generators_alone(tmp_path):
    def slow(x):
        time.sleep(0.01)
        return x * 2

    load = memfeed.memoize(slow, tmp_path / "r.mf", version=1)
    torch.manual_seed(0)
    random.seed(0)
    expected = torch.rand(3), random.random()
    torch.manual_seed(0)
    random.seed(0)
    assert in_threads(*(lambda i=i: load(i) for i in range(8))) == [2 * i for i in range(8)]
    assert torch.equal(torch.rand(3), expected[0])
    assert random.random() == expected[1]


def test_a_thread_that_draws_is_not_taken_for_the_function(tmp_path):
    begun, drawn = threading.Event(), threading.Event()

    def slow(x):
        begun.set()
        drawn.wait(10)
        return x

    def draw():
        begun.wait(10)
        random.random()
        drawn.set()

    load = memfeed.memoize(slow, tmp_path / "r.mf", version=1)
    thread = threading.Thread(target=draw)
    thread.start()
    assert load(1) == 1
    thread.join()


def test_a_thread_refuses_a_function_that_draws(tmp_path):
    load = memfeed.memoize(lambda x: x + random.random(), tmp_path / "r.mf", version=1)
    (error,) = in_threads(lambda: load(1))
    assert isinstance(error, RandomDataError)


class Files(torch.utils.data.Dataset):
    def __init__(self, load, rows):
        self.load, self.rows = load, rows

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        return self.load(index % 20), torch.randint(1000, ())


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_of_a_dataloader_share_results(tmp_path, context):
    load = memfeed.memoize(counted, tmp_path / "r.mf", version=1)
    seen = []
    for _ in range(2):
        torch.manual_seed(5)
        loader = torch.utils.data.DataLoader(
            Files(load, 40), batch_size=4, num_workers=2, multiprocessing_context=context
        )
        seen.append([(values.clone(), drawn.clone()) for values, drawn in loader])
    torch.manual_seed(5)
    plain = list(torch.utils.data.DataLoader(Files(counted, 40), batch_size=4, num_workers=2))
    for batches in seen:
        assert_equal(batches, [tuple(batch) for batch in plain])
    report = load.report()
    assert report.misses == 20
    assert report.hits == 60
    assert report.processes == 4


def test_a_line_is_printed_at_exit(tmp_path):
    code = f"""
import memfeed
@memfeed.memoize({str(tmp_path / "r.mf")!r})
def load(x):
    return x
for _ in range(3): load(4)
"""
    script = tmp_path / "s.py"
    script.write_text(code)
    environment = {
        name: value for name, value in os.environ.items() if name != "MEMFEED_RUN"
    }  # not a child of this run
    for expected in ("2 hits, 1 misses", "3 hits, 0 misses"):
        done = subprocess.run(
            [sys.executable, script], capture_output=True, text=True, check=True, timeout=60, env=environment
        )
        assert f"memfeed: load (r.mf): {expected}" in done.stderr
    assert not list((tmp_path / "r.mf" / ".build").glob("counts-*"))


@pytest.mark.long
def test_spawned_workers_of_a_program_share_its_results(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(
        f"""
import memfeed, torch
FACTOR = 3
@memfeed.memoize({str(tmp_path / "r.mf")!r})
def load(x):
    return torch.full((2,), x * FACTOR)
class Data(torch.utils.data.Dataset):
    def __len__(self): return 20
    def __getitem__(self, i): return load(i)
if __name__ == "__main__":
    for i in range(20): load(i)
    loader = torch.utils.data.DataLoader(Data(), 4, num_workers=2, multiprocessing_context="spawn")
    assert torch.equal(torch.cat(list(loader))[:, 0], torch.arange(20) * 3)
"""
    )
    environment = {name: value for name, value in os.environ.items() if name != "MEMFEED_RUN"}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert "20 hits, 20 misses" in done.stderr
    assert "in 3 processes" in done.stderr


def test_a_function_that_was_never_called_and_cannot_be_hashed_is_in_no_report(tmp_path):
    load = memfeed.memoize(counted, tmp_path / "r.mf", version=1)
    load(1)
    lock = threading.Lock()
    other = memfeed.memoize(lambda: lock, tmp_path / "r.mf")
    assert any(report.path == tmp_path / "r.mf" for report in memfeed.memoize.report())
    with pytest.raises(SchemaError, match="pass version=1"):
        other()


def test_counts_of_runs_that_were_killed_are_removed(tmp_path):
    load = memfeed.memoize(counted, tmp_path / "r.mf", version=1)
    load(1)
    work = tmp_path / "r.mf" / ".build"
    (work / "counts-abc-77-88-99").write_bytes(bytes(24))  # of another run
    del load._kept
    again = forget(load)
    gc.collect()
    memos.Memo(tmp_path / "r.mf")
    left = [path.name for path in work.glob("counts-*")]
    assert len(left) == 1
    assert "counts-abc" not in left[0]
    assert again.report().misses == 1


def test_a_disk_that_refuses_costs_a_warning_and_no_value(tmp_path, monkeypatch):
    load = memfeed.memoize(counted, tmp_path / "r.mf", version=1)
    load(1)
    CALLS.clear()

    def refuse(*arguments, **options):
        raise memfeed.errors.SpaceError("the disk is full")

    monkeypatch.setattr(memos.RowWriter, "write", refuse)
    kept._warned.clear()
    with pytest.warns(UserWarning, match="results of counted are computed and not kept: the disk is full") as warned:
        for value in (2, 3, 2):
            assert_equal(load(value), np.full((3, 2), value))
    assert len(warned) == 1
    assert len(CALLS) == 6
    monkeypatch.undo()
    assert_equal(load(2), np.full((3, 2), 2))


def test_a_disk_without_room_for_the_directory_costs_a_warning_and_no_value(tmp_path, monkeypatch):
    write, load = memos.files.write_file, memfeed.memoize(counted, tmp_path / "r.mf", version=1)

    def refuse(path, data):
        raise memfeed.errors.SpaceError("the disk is full")

    CALLS.clear()
    monkeypatch.setattr(kept, "_FULL_SECONDS", 0.0)  # the directory is tried again at each call
    monkeypatch.setattr(memos.files, "write_file", refuse)
    kept._warned.clear()
    with pytest.warns(UserWarning, match="results of counted are computed and not kept: the disk is full") as warned:
        for value in (2, 3, 2):
            assert_equal(load(value), np.full((3, 2), value))
    assert len(warned) == 1
    assert len(CALLS) == 3
    assert load.report().hits == load.report().misses == 0
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(memos.files, "write_file", write)
    for _ in range(2):
        assert_equal(load(2), np.full((3, 2), 2))
    assert load.report().hits == 1


class TestHostile:
    def test_something_else_at_the_path(self, tmp_path):
        (tmp_path / "r.mf").mkdir()
        (tmp_path / "r.mf" / "mine.txt").write_text("x")
        with pytest.raises(StoreError, match="expected a directory of memfeed.memoize, or nothing"):
            memfeed.memoize(counted, tmp_path / "r.mf")(1)
        assert (tmp_path / "r.mf" / "mine.txt").read_text() == "x"

    def test_a_store_at_the_path(self, tmp_path):
        memfeed.cache((torch.ones(3),), tmp_path / "r.mf", progress=False)
        with pytest.raises(StoreError, match="found something else than memoized results"):
            memfeed.memoize(counted, tmp_path / "r.mf")(1)

    @pytest.fixture
    def load(self, tmp_path):
        load = memfeed.memoize(counted, tmp_path / "r.mf", version=1)
        for value in range(3):
            load(value)
        return load

    def test_a_link(self, load, tmp_path):
        (tmp_path / "r.mf").rename(tmp_path / "other")
        (tmp_path / "r.mf").symlink_to(tmp_path / "other")
        with pytest.raises(StoreError, match="found a symbolic link"):
            forget(load)(1)

    def test_a_link_inside(self, load, tmp_path):
        heap = tmp_path / "r.mf" / "blob" / "heap.bin"
        heap.rename(tmp_path / "heap")
        heap.symlink_to(tmp_path / "heap")
        with pytest.raises(StoreError, match="found a symbolic link"):
            forget(load)(1)

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
    @pytest.mark.parametrize("name", ["", "blob/heap.bin", ".build/presence"])
    def test_of_another_user(self, load, tmp_path, name):
        os.chown(tmp_path / "r.mf" / name, 12345, 12345)
        with pytest.raises(StoreError, match="of user 12345"):
            forget(load)(1)

    def test_a_directory_that_all_may_write(self, load, tmp_path):
        (tmp_path / "r.mf").chmod(0o777)
        with pytest.raises(StoreError, match="all users may write into"):
            forget(load)(1)

    @pytest.mark.parametrize("number", [-1, 1 << 40, 1 << 62, 7, 0])
    @pytest.mark.parametrize("name", ["start.memmap", "dims.memmap"])
    def test_a_lying_place(self, load, tmp_path, name, number):
        if (name, number) == ("start.memmap", 0):
            return  # where the first row is
        path = tmp_path / "r.mf" / "blob" / name
        path.write_bytes(np.full(3, number).tobytes())
        for act in (lambda: forget(load)(1), lambda: memfeed.open(tmp_path / "r.mf").verify()):
            with pytest.raises(CorruptStoreError):
                act()

    @pytest.mark.parametrize("layout", [
        b"{}", b"[]", b"x" * 40, b'{"tree":["array",0],"leaves":[["int64",[1000000000000],0]]}',
        b'{"tree":["array",5],"leaves":[]}', b'{"tree":["array",0],"leaves":[["int64",[-1],0]]}',
        b'{"tree":["array",0],"leaves":[["object",[1],0]]}', b'{"tree":["array",0],"leaves":[["int64",[1],7]]}',
        b'{"tree":["os",0],"leaves":[]}', b'{"tree":7,"leaves":[]}', b"[" * 20_000,
    ])  # fmt: skip
    def test_a_lying_layout(self, load, tmp_path, layout):
        memo, digest = load._kept.memo, load_digest(load, 50)
        blob = np.concatenate([np.zeros(64, np.uint8), np.frombuffer(layout, np.uint8)])
        footer = np.frombuffer(memos.memo_format._FOOTER.pack(digest, 0.0, len(layout), 0), np.uint8)
        blob = np.concatenate([np.zeros(-(len(blob) + 32) % 64, np.uint8), blob, footer])
        with memo.taken(digest) as row:
            memo.write(row, b"{}", blob)
        with pytest.raises(CorruptStoreError, match="the directory is damaged"):
            load(50)

    def test_changed_bytes_are_found_by_verify(self, load, tmp_path):
        heap = tmp_path / "r.mf" / "blob" / "heap.bin"
        data = bytearray(heap.read_bytes())
        data[3] ^= 1
        heap.write_bytes(data)
        with pytest.raises(CorruptStoreError, match="found row 0 with other bytes than were written"):
            memfeed.open(tmp_path / "r.mf").verify()

    def test_a_newer_version(self, load, tmp_path):
        (tmp_path / "r.mf" / "memo.json").write_text('{"format": "memfeed memo", "version": 2}')
        with pytest.raises(StoreError, match="expected version 1"):
            forget(load)(1)


def test_rows_of_another_start_of_the_machine_are_hashed(tmp_path):
    load = memfeed.memoize(counted, tmp_path / "r.mf", version=1)
    for value in range(4):
        load(value)
    del load._kept
    kept._memos.clear()
    heap = tmp_path / "r.mf" / "blob" / "heap.bin"
    data = bytearray(heap.read_bytes())
    data[3] ^= 1  # of row 0: the power was lost before these bytes were on the disk
    heap.write_bytes(data)
    (tmp_path / "r.mf" / ".build" / "boot").write_bytes(b"another")
    CALLS.clear()
    again = forget(load)
    for value in range(4):
        assert_equal(again(value), np.full((3, 2), value))
    assert set(CALLS) == {0}


def test_results_whose_directory_was_removed_are_computed(tmp_path):
    path = tmp_path / "m.mf"
    function = memfeed.memoize(counted, path)
    kept._memos[path] = memos.Memo(path)  # as that of a worker process, which has read no row yet
    expected = [function(i) for i in range(3)]
    kept._memos[path]._units._map = None
    shutil.rmtree(path)
    with pytest.warns(UserWarning, match="results of counted are computed and not kept: .*No such file"):
        found = [function(i) for i in range(3)]
    assert_equal(found, expected)
    assert not path.exists()
