import errno
import time

import pytest
import torch
from tensordict import TensorDict

import memfeed
from disk import Faults
from memfeed import Writer
from memfeed.building.partial import DURABLE
from memfeed.errors import BuildError, MemfeedError, RowError, SchemaError, SpaceError, StoreError
from support import Made, Pair, Point, equal, rich_sample


def build_of(path):
    return path.with_name(path.name + ".build")


def test_append(path):
    with Writer(path) as w:
        for i in range(50):
            w.append(rich_sample(i))
            assert len(w) == i + 1
    store = memfeed.open(path, types=(Point, Pair, type(rich_sample(0)["record"])))
    assert all(equal(store[i], rich_sample(i)) for i in range(50))
    store.verify()
    assert not build_of(path).exists()


def test_a_few_rows_are_enough(path):
    with Writer(path) as w:
        w.append(torch.ones(2))
    assert len(memfeed.open(path)) == 1


def test_append_promotes_a_column_that_drifts(path):
    with Writer(path) as w:
        for i in range(40):
            w.append({"x": torch.full((2 if i < 30 else 3,), i)})
    store = memfeed.open(path)
    assert store.schema.fields[0].kind == "jagged"
    assert all(equal(store[i]["x"], torch.full((2 if i < 30 else 3,), i)) for i in range(40))


@pytest.mark.parametrize("kind", ["tuple", "list", "dict", "td", "tc"])
def test_extend_takes_batches(path, kind):
    x, y = torch.arange(60).view(20, 3), torch.arange(20)
    make = {
        "tuple": lambda a, b: (x[a:b], y[a:b]),
        "list": lambda a, b: [x[a:b], y[a:b]],
        "dict": lambda a, b: {"x": x[a:b], "y": y[a:b]},
        "td": lambda a, b: TensorDict({"x": x[a:b], "y": y[a:b]}, [b - a]),
        "tc": lambda a, b: Pair(images=x[a:b], targets=y[a:b], batch_size=[b - a]),
    }[kind]
    with Writer(path) as w:
        for a, b in ((0, 5), (5, 6), (6, 20)):
            w.extend(make(a, b))
        assert len(w) == 20
    store = memfeed.open(path, types=(Pair,))
    assert torch.equal(store.column(0 if kind in ("tuple", "list") else store.schema.fields[0].name), x)
    assert torch.equal(store.column(store.schema.fields[1].path), y)


def test_batches_of_a_loader_can_be_written_again(path):
    source = memfeed.cache(Made(rich_sample, 20), progress=False)
    part = source.select("image", "label", "boxes", "text", "picture")
    with Writer(path) as w:
        for batch in memfeed.Loader(part, 7):
            w.extend(batch)
    copy = memfeed.open(path)
    for i in range(20):
        assert equal({**copy[i], "label": int(copy[i]["label"])}, part[i])


def test_preallocated_rows_in_any_order(path):
    datum = TensorDict({"image": torch.zeros(3, 4, dtype=torch.uint8), "label": 0}, [])
    data = datum.expand(100)
    with Writer(path, like=data) as w:
        assert w.length == 100
        for first in (50, 0, 90, 75):
            last = {50: 75, 0: 50, 90: 100, 75: 90}[first]
            rows = torch.arange(first, last)
            image = rows.to(torch.uint8)[:, None, None].expand(-1, 3, 4)
            w[first:last] = TensorDict({"image": image, "label": rows}, [last - first])
            assert len(w) > 0
        w[-1] = TensorDict({"image": torch.full((3, 4), 7, dtype=torch.uint8), "label": 1000}, [])
    store = memfeed.open(path)
    assert store.column("label").tolist() == [*range(99), 1000]
    assert int(store[98]["image"][0, 0]) == 98
    assert int(store[99]["image"][0, 0]) == 7


def test_exact_casts_are_made_and_lossy_ones_refused(path):
    like = {"mask": torch.zeros(2, dtype=torch.uint8), "score": torch.zeros((), dtype=torch.float32)}
    with Writer(path, like=like, length=4, missing="zero") as w:
        w[0] = {"mask": torch.tensor([1, 255]), "score": 0.5}
        w[1:3] = {"mask": torch.ones(2, 2, dtype=torch.int64), "score": torch.tensor([1.0, 2.0], dtype=torch.float64)}
        with pytest.raises(SchemaError, match=r"sample 3, field mask: found the value 256, which uint8 would change"):
            w[3] = {"mask": torch.tensor([1, 256]), "score": 0.5}
        with pytest.raises(SchemaError, match=r"field mask: found the value -1"):
            w[1:3] = {"mask": torch.full((2, 2), -1), "score": torch.zeros(2)}
    assert memfeed.open(path).column("mask").tolist() == [[1, 255], [1, 1], [1, 1], [0, 0]]


def test_dims_are_fixed_under_like(path):
    with (
        pytest.raises(
            SchemaError, match=r"sample 0, field value: found dims \[3\]; expected float32 \[2\], as like= or"
        ),
        Writer(path, like=torch.zeros(2), length=3) as w,
    ):
        w[0] = torch.zeros(3)


def test_rows_never_written_are_named_and_the_build_goes_on(path):
    with (
        pytest.raises(
            BuildError, match=r"found rows 0:1, 3:5, 8:10 never written, of 10; expected all of them.*build is kept"
        ),
        Writer(path, like=torch.zeros(2), length=10) as w,
    ):
        w[1:3] = torch.ones(2, 2)
        w[5:8] = torch.ones(3, 2) * 2
    assert not path.exists()
    with Writer(path, like=torch.zeros(2), length=10) as w:
        assert len(w) == 5
        assert w.absent == [(0, 1), (3, 5), (8, 10)]
        for a, b in w.absent:
            w[a:b] = torch.full((b - a, 2), 9.0)
    assert memfeed.open(path).column(())[:, 0].tolist() == [9, 1, 1, 9, 9, 2, 2, 2, 9, 9]


def test_missing_rows_may_be_zeros(path):
    like = {"x": torch.ones(2), "ids": torch.arange(3), "s": "text", "j": {"a": [1]}}
    with Writer(path, like=like, length=5, missing="zero") as w:
        w[3] = like
    store = memfeed.open(path)
    assert equal(store[3], like)
    assert equal(store[0]["x"], torch.zeros(2))
    assert store[0]["s"] == ""
    store.verify()


def test_an_exception_keeps_what_was_written(path):
    with pytest.raises(KeyError, match="mine"), Writer(path, like=0, length=10) as w:
        w[2] = 5
        raise KeyError("mine")
    assert build_of(path).exists()
    with Writer(path, like=0, length=10, missing="zero") as w:
        assert len(w) == 1
    assert memfeed.open(path)[2] == 5


def test_append_goes_on_where_it_stopped(path):
    def write(upto, fail):
        with Writer(path, like=torch.zeros(2)) as w:
            for i in range(len(w), upto):
                w.append(torch.full((2,), float(i)))
            w._flush()
            if fail:
                raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write(30, True)
    write(50, False)
    assert memfeed.open(path).column(())[:, 0].tolist() == list(range(50))


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (lambda w: w.__setitem__(10, 1), RowError, "found row 10; expected -10 to 9"),
        (
            lambda w: w.__setitem__(slice(0, 3), torch.arange(4)),
            SchemaError,
            "found a batch with rows value: 4; expected 3",
        ),
        (lambda w: w.__setitem__(slice(0, 4, 2), torch.arange(2)), RowError, "found a slice with step 2"),
        (lambda w: [w.append(i) for i in range(11)], RowError, "found one row more than length=10"),
        (lambda w: w.extend(torch.arange(11)), RowError, "found rows 0 to 10; expected at most row 9"),
        (lambda w: w.append("x"), SchemaError, "sample 0, field value: found"),
        (lambda w: w.append(object()), SchemaError, "sample 0"),
    ],
)
def test_wrong_use(path, use, error, message):
    with pytest.raises(error, match=message), Writer(path, like=0, length=10) as w:
        use(w)
        w._flush()


def test_wrong_arguments(path, monkeypatch):
    with pytest.raises(ValueError, match="found length=0; expected at least 1 row"):
        Writer(path, length=0)
    with pytest.raises(ValueError, match="found missing='skip'"):
        Writer(path, missing="skip")
    with pytest.raises(BuildError, match="found no row written"), Writer(path):
        pass
    assert not build_of(path).exists()
    path.write_text("mine")
    with pytest.raises(StoreError, match="found something there; expected a new path"), Writer(path):
        pass
    path.unlink()
    with pytest.raises(RowError, match="expected length= "), Writer(path) as w:
        w[3] = 1
    monkeypatch.setattr("memfeed.system.files.free_bytes", lambda path: 1000)
    with pytest.raises(SpaceError, match="expected at least 8,000,000"), Writer(path, like=0, length=10**6):
        pass


def test_the_builds_of_others_are_left_alone(path):
    with pytest.raises(MemfeedError), Writer(path, like=0, length=10) as w:
        w[0] = 1
        raise MemfeedError
    for other in ({"like": 0, "length": 11}, {"like": {"x": 0}, "length": 10}):
        with pytest.raises(BuildError, match="remove that directory to start over"), Writer(path, **other):
            pass
    assert (build_of(path) / ".build" / "presence").read_bytes() == bytes([DURABLE]) + bytes(9)


@pytest.mark.parametrize(
    "options", [{}, {"like": {"a": torch.zeros(2)}}, {"like": {"a": torch.zeros(2)}, "length": 50}]
)
def test_a_buffer_may_be_used_again_after_append(path, options):
    buffer = torch.zeros(2)
    with Writer(path, **options) as w:
        for i in range(50):
            buffer.fill_(i)
            w.append({"a": buffer})
    assert memfeed.open(path).column("a")[:, 0].tolist() == list(range(50))


def test_append_does_not_overwrite_rows_assigned_by_number(path):
    with Writer(path, like=0, length=4, missing="zero") as w:
        w[0:2] = torch.tensor([10, 11])
        for use in (lambda: w.append(99), lambda: w.extend(torch.tensor([99]))):
            with pytest.raises(RowError, match="found append or extend after rows were assigned by number"):
                use()
    assert memfeed.open(path).column(()).tolist() == [10, 11, 0, 0]


def test_pending_rows_survive_an_exception(path):
    with pytest.raises(KeyError), Writer(path) as w:
        for i in range(100):
            w.append({"x": i})
        raise KeyError
    with Writer(path) as w:
        assert len(w) == 100
        w.append({"x": 100})
    assert memfeed.open(path).column("x").tolist() == list(range(101))


def test_a_writer_that_is_not_open(path):
    w = Writer(path)
    with pytest.raises(BuildError, match="found a Writer that is not open"):
        w.append(1)
    with w:
        w.append(1)
    with pytest.raises(BuildError, match="found a Writer that is not open"):
        w.append(2)


def test_a_row_is_absent_while_it_is_written_again(path):
    """Not half of each: whoever goes on knows which rows to write."""
    sample = {"x": torch.zeros(4), "words": "one two"}
    with Writer(path, length=6) as w:
        for i in range(6):
            w[i] = sample
        w._build.sync()
        with Faults(lambda one: one.path.endswith("dims.memmap"), errno.EIO), pytest.raises(BuildError, match="dims"):
            w[2] = sample
        assert w.absent == [(2, 3)]
        with pytest.raises(SchemaError):
            w[4] = {"x": "not this", "words": ""}
        assert w.absent == [(2, 3)]
        w[2] = {"x": torch.ones(4), "words": "three"}
    assert memfeed.open(path)[2]["words"] == "three"


def test_a_writer_that_lost_samples_commits_nothing(path):
    """A sample that is refused late takes those with it that waited to be written beside it."""
    with pytest.raises(BuildError, match="found a Writer after a write or a sync that failed"), Writer(path) as w:
        for i in range(600):
            w.append({"x": torch.tensor([i]) if i != 77 else "no tensor"})
            if i == 30:
                w._flush()
            if i == 200:
                with pytest.raises(SchemaError, match="sample 77"):
                    w._flush()
    assert not path.exists()
    with Writer(path) as w:
        assert 31 <= len(w) <= 77
        for i in range(len(w), 600):
            w.append({"x": torch.tensor([i])})
    assert [int(row["x"]) for row in memfeed.open(path)] == list(range(600))


def test_samples_do_not_wait_for_long(path, monkeypatch):
    monkeypatch.setattr("memfeed.building.build.SYNC_SECONDS", 0.05)
    with Writer(path) as w:
        for i in range(60):
            w.append(torch.tensor([i]))
            time.sleep(0.005)
        presence = (build_of(path) / ".build" / "presence").read_bytes()
        assert presence.count(DURABLE) > 20


def test_rows_behind_a_hole_that_a_power_loss_left_are_written_again(path, monkeypatch):
    with pytest.raises(MemfeedError), Writer(path) as w:
        for i in range(1000):
            w.append(torch.tensor([i]))
        raise MemfeedError
    presence = build_of(path) / ".build" / "presence"
    presence.write_bytes(bytes([DURABLE]) * 100 + bytes(412) + bytes([DURABLE]) * 488)
    monkeypatch.setattr("memfeed.system.machine.boot_id", lambda: "another")
    with Writer(path) as w:
        assert len(w) == 100
        for i in range(100, 1000):
            w.append(torch.tensor([i]))
    assert [int(row) for row in memfeed.open(path)] == list(range(1000))


def test_a_class_replaces_the_outermost_container_of_rows_and_batches(tmp_path):
    path = tmp_path / "w.mf"
    with memfeed.Writer(path, types=Pair) as w:
        w.append((torch.zeros(3), torch.tensor(0)))
        w.extend((torch.ones(4, 3), torch.arange(4)))
    store = memfeed.open(path, types=Pair)
    assert isinstance(store[1], Pair)
    assert store[:].targets.tolist() == [0, 0, 1, 2, 3]


@pytest.mark.parametrize("length", [None, 30])
def test_rows_are_compressed_as_forms_says(tmp_path, length):
    def made(i):
        return {
            "image": torch.full((20 + i % 3, 24, 3), 5 * i, dtype=torch.uint8),
            "tokens": torch.arange(i % 5),
            "i": i,
        }

    with Writer(tmp_path / "s.mf", length=length, forms={"image": "jpeg:95", "tokens": "zstd"}) as writer:
        if length is None:
            for i in range(30):
                writer.append(made(i))
        for i in range(30) if length else ():
            writer[i] = made(i)
    store = memfeed.open(tmp_path / "s.mf")
    image = store._view.manifest.schema.fields[store.schema.field_index("image")]
    assert (image.coding.codec, image.coding.parameters["layout"]) == ("jpeg", "hwc")
    assert all(equal(store[i], made(i)) for i in range(30))  # JPEG keeps images of one gray


def test_rows_that_are_missing_are_zeros_in_compressed_fields_too(tmp_path):
    like = {"x": torch.ones(40), "n": torch.arange(3)}
    with Writer(tmp_path / "s.mf", like=like, length=5, missing="zero", forms="zstd") as writer:
        writer[2] = like
    store = memfeed.open(tmp_path / "s.mf")
    assert [float(store[i]["x"].sum()) for i in range(5)] == [0, 0, 40, 0, 0]
    with pytest.raises(ValueError, match="need the dataset"):
        Writer(tmp_path / "t.mf", forms=256)
