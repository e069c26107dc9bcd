"""A store as HTML: its columns, its first rows and thumbnails; what it does not read, and what it does not hide."""

import re
import threading

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import memfeed
from html_pages import HOSTILE, WIDTHS, needs_chromium, require_harmless, widest_part
from memfeed.store import store_html
from memfeed.store.store_html import ROWS, parts
from memfeed.system.html_parts import page
from memfeed.system.threads import end_all
from support import Made, cache, rich_sample


def image(i, *shape):
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(i), dtype=torch.uint8)


def photo(i):
    return {
        "image": image(i, 3, 40, 30),
        "coded": image(i, 3, 16, 16),
        "hwc": image(i, 20 + i, 30, 3),
        "mask": image(i, 20, 30),
        "float": image(i, 3, 20, 30).float() / 255,
        "scores": image(i, 20, 30).float(),
        "label": i,
        "text": f"row {i}",
    }


@pytest.fixture
def store(tmp_path):
    return cache(
        Made(photo, 5), tmp_path / "photos.mf", workers=0, forms={"coded": "zstd"}, metadata={"source": "made"}
    )


def shown_by(store):
    return require_harmless(store._repr_html_())


def test_the_columns_and_the_first_rows(store):
    shown = shown_by(store)
    for part in (
        "Store: 5 rows, 8 fields",
        "metadata source: 'made'",
        "uint8 [3, 16, 16], zstd level=",
        "row 2",
        "'row 0'",
    ):
        assert part in shown
    assert "row 3" not in shown
    assert "error" not in shown.lower()


def test_images_of_all_layouts_have_thumbnails(store):
    pytest.importorskip("PIL")
    html = store._repr_html_()
    rows = dict(re.findall(r'<tr><td data-name="field"><div>(\w+)</div>(.*?)</tr>', html))
    assert {name: row.count("<img ") for name, row in rows.items()} == {
        "image": 3, "coded": 3, "hwc": 3, "mask": 3, "float": 3, "scores": 0, "label": 0, "text": 0,
    }  # fmt: skip


def test_without_pillow_there_are_no_thumbnails(store, monkeypatch):
    monkeypatch.setattr("memfeed.store.store_html.find_spec", lambda name: None)
    html = store._repr_html_()
    assert "<img" not in html
    assert "[3, 40, 30] 0 to 255" in require_harmless(html)


def test_a_bar_is_the_share_of_the_bytes(tmp_path):
    store = cache(Made(lambda i: {"a": torch.zeros(3, dtype=torch.uint8), "b": torch.zeros(1, dtype=torch.uint8)}, 4),
                  tmp_path / "s.mf", workers=0)  # fmt: skip
    html = store._repr_html_()
    assert re.findall(r"width:([\d.]+)%;background", html) == ["75.00", "25.00"]
    assert "12 B, 75.0%" in html
    assert "16 B in all" in html


@pytest.mark.parametrize(
    "make",
    [
        lambda store: store.subset([4, 1]),
        lambda store: store.select("text"),
        lambda store: store.split([0.5, 0.5])[0],
        lambda store: store.windows({"label": [-1, 0]}, within=None),
        lambda store: store.subset([]),
    ],
    ids=["subset", "select", "split", "windows", "empty"],
)
def test_views(store, make):
    view = make(store)
    shown = shown_by(view)
    assert f"Store: {len(view)} row" in shown
    assert ("a view of 5 rows" in shown) == (view._view.rows is not None)
    assert re.findall("'row .'", shown) == [repr(view[row]["text"]) for row in range(min(len(view), ROWS))]
    assert "Error" not in shown


def test_packed_documents(tmp_path):
    store = cache(Made(lambda i: {"t": torch.arange(3 + i)}, 9), tmp_path / "s.mf", workers=0)
    shown = shown_by(store.packed("t", 4))
    assert "[0, 1, 2, 0]" in shown


def test_every_kind_of_value(tmp_path):
    store = cache(Made(rich_sample, 5), tmp_path / "s.mf", workers=0)
    shown = shown_by(store)
    assert "Error" not in shown
    assert all(field.name in shown for field in store.schema)


def test_stores_without_a_manifest_and_without_rows(tmp_path):
    TensorDict({"x": torch.rand(4, 3)}, [4]).memmap(tmp_path / "rows")
    TensorDict({"w": torch.rand(20, 30)}, []).memmap(tmp_path / "weights")
    assert "Store: 4 rows, 1 field" in shown_by(memfeed.open(tmp_path / "rows"))
    shown = shown_by(memfeed.open(tmp_path / "weights"))
    assert "Store: no rows, 1 field" in shown
    assert "2.4 KB, 100.0%" in shown


def test_a_loader_of_columns_in_memory():
    shown = shown_by(memfeed.Loader({"x": torch.arange(4)}, 2).store)
    assert "(memory)" in shown


# --- what a store may say


def test_a_hostile_store_runs_nothing(tmp_path):
    class Lying(Made):
        classes = HOSTILE

    samples = [dict(zip(HOSTILE, [text, {text: text}, text.encode(), 1, [text]], strict=False)) for text in HOSTILE]
    path = tmp_path / "<b>&amp;'.mf"
    store = cache(Lying(samples), path, workers=0, metadata=dict.fromkeys(HOSTILE, "<u>"))
    shown = shown_by(store)
    assert all(shown.count(text) > 3 for text in HOSTILE)
    assert str(path) in shown


def test_an_error_runs_nothing(tmp_path):
    store = cache(Made(lambda i: {HOSTILE[0]: f"{i}"}, 3), tmp_path / "s.mf", workers=0)
    (heap,) = tmp_path.glob("s.mf/**/heap.bin")
    heap.chmod(0o644)
    heap.write_bytes(b"\xff" * heap.stat().st_size)
    assert HOSTILE[0] in shown_by(memfeed.open(store.path))


# --- what is damaged, large, or not there


def test_a_damaged_column_is_an_error_in_the_table(store):
    heap = store.path / "coded" / "heap.bin"
    heap.chmod(0o644)
    heap.write_bytes(bytes(heap.stat().st_size))
    shown = shown_by(memfeed.open(store.path))
    assert shown.count("CorruptStoreError") == ROWS
    assert "row 1 of field coded" in shown
    assert "'row 0'" in shown


def test_a_column_whose_file_is_gone_is_an_error_in_the_table(store):
    opened = memfeed.open(store.path)
    (store.path / "label.memmap").unlink()
    shown = shown_by(opened)
    assert shown.count("label.memmap") == ROWS
    assert "'row 0'" in shown


def test_bytes_that_are_not_known_are_an_error_beside_the_rows(store, monkeypatch):
    monkeypatch.setattr("memfeed.store.view.View.field_bytes", lambda view: 1 / 0)
    shown = shown_by(store)
    assert "ZeroDivisionError" in shown
    assert "'row 0'" in shown


def test_rows_that_cannot_be_found_are_an_error_below_the_columns(store, monkeypatch):
    monkeypatch.setattr("memfeed.store.view.View.present_now", lambda view, rows: 1 / 0)
    shown = shown_by(store)
    assert "ZeroDivisionError" in shown
    assert "Bytes on disk" in shown


def test_large_rows_are_not_read(tmp_path, monkeypatch):
    store = cache(Made(lambda i: {"small": i, "large": torch.zeros(900), "long": "x" * 900}, 3), tmp_path / "s.mf",
                  workers=0)  # fmt: skip
    monkeypatch.setattr(store_html, "MOST_ROW_BYTES", 800)
    columns, read = store._view.columns, []
    for column in columns:
        monkeypatch.setattr(column, "view_row", lambda row, column=column: read.append(column) or column.read_row(row))
    shown = shown_by(store)
    assert read == [columns[0]] * ROWS
    assert shown.count("float32 [900]: 3.6 KB, not read here") == ROWS
    assert shown.count("str: 900 B, not read here") == ROWS


def test_a_few_rows_are_read_and_a_few_thumbnails_are_made(tmp_path, monkeypatch):
    fields = 12
    store = cache(Made(lambda i: {f"x{k}": image(i, 8, 8) for k in range(fields)}, 50), tmp_path / "s.mf", workers=0)
    monkeypatch.setattr(store_html, "MOST_THUMBNAILS", 5)
    read = []
    reads = type(store._view.columns[0]).view_row
    monkeypatch.setattr(
        "memfeed.store.columns.FixedColumn.view_row", lambda column, row: read.append(row) or reads(column, row)
    )
    html = store._repr_html_()
    assert sorted(read) == sorted([*range(ROWS)] * fields)
    assert html.count("<img ") <= 5
    read.clear()
    require_harmless(page("x", parts(store._view, 7)))
    assert {*read} == {*range(7)}


def test_a_store_that_is_filled_is_not_waited_for(tmp_path):
    gate, asked = threading.Event(), []

    def sample(i):
        if i == 1 and asked:
            asked.append(i)
            gate.wait(60)
        return {"x": i, "t": f"text {i}"}

    store = cache(Made(sample, 300), tmp_path / "s.mf", workers=0, lazily=True)
    try:
        view = store.subset([150, 151, 0])
        asked.append(0)
        there = [store._view.supply.ready(store._view.reader(), np.array([row]))[0] for row in (150, 151, 0)]
        assert not all(there)
        assert any(there)
        shown = shown_by(view)
        assert shown.count("not there yet") == 2 * there.count(False)
        assert "'text 0'" in shown
        assert "rows are there" in shown
        assert asked == [0]
    finally:
        gate.set()
        end_all()


def test_a_row_that_was_left_out_says_so(tmp_path):
    def sample(i):
        if i == 2:
            raise ValueError("no")
        return {"x": i}

    store = cache(Made(sample, 300), tmp_path / "s.mf", workers=0, lazily=True, on_error="skip")
    try:
        list(memfeed.Loader(store.subset(range(5)), 5))
        shown = shown_by(store)
        assert "left out: the dataset raised" in shown
        assert "1 row left out" in shown
    finally:
        end_all()


@needs_chromium
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_fits_a_screen(tmp_path, width):
    samples = [{**photo(i), "n" * 200: i, "words": "w" * 300} for i in range(3)]
    store = cache(Made(samples), tmp_path / "s.mf", workers=0, metadata={"k" * 100: "v" * 300})
    (tmp_path / "a.html").write_text(page("x", parts(store._view)))
    assert width / 2 < widest_part(tmp_path / "a.html", width, tmp_path) <= width


def test_a_fragment_is_for_a_notebook(store):
    assert "<html" not in store._repr_html_()
