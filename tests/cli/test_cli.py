"""The command line: what it prints, how it ends, and that errors are one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tensordict import TensorDict

import memfeed
from html_pages import require_harmless
from memfeed.cli import main

MODULE = """
import collections
import torch

Square = collections.namedtuple("Square", "image area")

class Squares:
    def __len__(self):
        return 12
    def __getitem__(self, i):
        return torch.full((3, 4, 5), i, dtype=torch.int64), i * i

class Broken(Squares):
    def __getitem__(self, i):
        if i == 5:
            raise ValueError("a bad sample")
        return super().__getitem__(i)

class Noise(Squares):
    def __getitem__(self, i):
        return torch.rand(3)

squares = Squares()

def make():
    return Squares()

def other():
    return torch.arange(12)

def endless():
    i = 0
    while True:
        yield torch.tensor([i])
        i += 1

def leave():
    raise SystemExit(3)


class Stop(BaseException):
    pass


def stop():
    raise Stop("enough")


def interrupt():
    raise KeyboardInterrupt


class Leaving(Squares):
    def __getitem__(self, i):
        raise Stop("of a sample") if i == 5 else SystemExit(4)


def fail():
    raise RuntimeError("no disk")
"""


@pytest.fixture(autouse=True)
def _in_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cli_sets.py").write_text(MODULE)
    (tmp_path / "cli_broken.py").write_text("import no_such_package_at_all\n")
    (tmp_path / "cli_leaving.py").write_text("class Stop(BaseException): pass\nraise Stop('at import')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("cli_sets", "cli_broken", "cli_leaving"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Six PNG images of two sizes in two classes."""
    rng = np.random.default_rng(0)
    for number in range(6):
        path = tmp_path / "tree" / ("wasps" if number % 2 else "moths") / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        shape = (30, 40, 3) if number < 3 else (60, 48, 3)
        Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)).save(path)
    return tmp_path / "tree"


def cached(out: str = "out.mf", *more: str) -> None:
    assert main(["cache", "cli_sets:make", out, "--no-progress", *more]) == 0


def test_types_name_a_class_of_the_user() -> None:
    cached("out.mf", "--types", "cli_sets:Square")
    assert [field.name for field in memfeed.open("out.mf").schema] == ["image", "area"]
    assert memfeed.open("out.mf")[3].area == 9


def test_inspect_shows_what_is_kept(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "--images", str(tree), "out.mf", "--no-progress"]) == 0
    memfeed.cache(torch.arange(4), "meta.mf", metadata={"made": "\x1b[31mred", "n": list(range(99))}, progress=False)
    capsys.readouterr()
    assert main(["inspect", "out.mf"]) == 0
    assert main(["inspect", "meta.mf"]) == 0
    out = capsys.readouterr().out
    assert "classes: 2: moths, wasps\n" in out
    assert "targets: 6: 0, 0, 0, 1, 1, 1\n" in out
    assert "metadata n: [0, 1, 2" in out
    assert "\x1b[31m" not in out
    assert max(map(len, out.splitlines())) < 250


def decoded(path: str | Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image)


# --- the program


def test_help_of_recode_names_its_forms_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recode", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "jpeg:95" in shown
    assert not {"dtype", "--budget", "float=float16", "encoded"} & set(shown.replace(",", " ").split())


def test_alone_it_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert all(word in out for word in ("cache", "inspect", "verify", "demo", "--debug"))


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"memfeed {memfeed.__version__}\n"


def test_the_package_runs_as_a_module() -> None:
    ran = subprocess.run([sys.executable, "-m", "memfeed", "--version"], capture_output=True, text=True)
    assert ran.returncode == 0
    assert ran.stdout == f"memfeed {memfeed.__version__}\n"


def test_the_program_ends_with_its_status_and_imports_no_extra(tmp_path: Path) -> None:
    code = (
        "import sys; from memfeed.cli import main; status = main(); "
        "print([m for m in ('torchvision', 'PIL', 'matplotlib') if m in sys.modules]); sys.exit(status)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, "inspect", "nowhere.mf"], capture_output=True, text=True, cwd=tmp_path
    )
    assert ran.returncode == 2
    assert ran.stdout == "[]\n"
    assert ran.stderr.startswith("memfeed: error: nowhere.mf: found nothing there; expected a store")
    assert ran.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bake"], "bake"),
        (["cache"], "OUT"),
        (["cache", "out.mf"], "expected `memfeed cache module:factory OUT`"),
        (["cache", "cli_sets:make", "out.mf", "--workers", "-1"], "--workers"),
        (["cache", "cli_sets", "out.mf"], "expected module:name"),
        (["cache", "cli_sets:", "out.mf"], "expected module:name"),
        (["cache", "cli-sets:make", "out.mf"], "expected module:name"),
        (["cache", "no_module_of_this_name:make", "out.mf"], "found no module 'no_module_of_this_name'"),
        (["cache", "cli_sets:absent", "out.mf"], "found no 'absent' in cli_sets"),
        (["cache", "cli_broken:make", "out.mf"], "importing cli_broken raised ModuleNotFoundError"),
        (["cache", "cli_sets:fail", "out.mf"], "calling cli_sets:fail raised RuntimeError: no disk"),
        (["cache", "cli_sets:leave", "out.mf"], "calling cli_sets:leave raised SystemExit: 3"),
        (["cache", "cli_sets:stop", "out.mf"], "calling cli_sets:stop raised Stop: enough"),
        (["cache", "cli_leaving:make", "out.mf"], "importing cli_leaving raised Stop: at import"),
        (["cache", "cli_sets:Leaving", "out.mf", "--workers", "0"], "SystemExit: 4"),
        (["cache", "sub/cli_sets.py:make", "out.mf"], "for example sub.cli_sets:make for sub/cli_sets.py"),
        (["cache", "cli_sets:Noise", "out.mf"], "or pass --allow random"),
        (["cache", "cli_sets:Broken", "out.mf", "--workers", "0"], "with --on-error skip"),
        (["cache", "cli_sets:make", "out.mf", "--form", "0=uint9"], "a dtype, a codec as"),
        (
            ["cache", "cli_sets:make", "out.mf", "--form", "mask=uint8"],
            "--form: found no field 'mask'; expected one of: 0, 1",
        ),
        (["cache", "cli_sets:make", "out.mf", "--fields", "a,b,c"], "3"),
        (["cache", "cli_sets:make", "out.mf", "--types", "cli_sets:make"], "expected a class"),
        (["cache", "cli_sets:make", "out.mf", "--types", "cli_sets:Squares"], "found --types"),
        (["cache", "cli_sets:make", "out.mf", "--resize", "8"], "--resize without --images"),
        (["cache", "cli_sets:make", "cli_sets.py"], "cli_sets.py: found a file that is no store"),
        (["cache", "--images", "nowhere", "out.mf"], "nowhere"),
        (["cache", "--images", "nowhere", "out.mf", "--resize", "8x"], "expected the short side in pixels"),
        (["inspect", "cli_sets.py"], "found a file that is no store"),
        (["verify", "nowhere.mf"], "found nothing there"),
        (["demo", "--count", "0"], "--count"),
    ],
)
def test_an_error_is_one_line_and_status_2(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    quiet = ["--no-progress"] if arguments[0] == "cache" else []
    assert main([*arguments, *quiet]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("memfeed: error: ")
    assert err.count("\n") == 1
    assert said in err
    assert "Traceback" not in err


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--debug", "cache", "cli_sets:fail", "out.mf"]) == 2
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err
    assert "RuntimeError: no disk" in err
    assert err.splitlines()[-1].startswith("memfeed: error: ")


def test_what_nobody_foresaw_is_one_line_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError("by\nzero")

    monkeypatch.setattr(memfeed, "open", fail)
    assert main(["inspect", "x"]) == 2
    said = "memfeed: error: ZeroDivisionError: by zero (run memfeed --debug COMMAND to see the traceback)\n"
    assert capsys.readouterr().err == said


def test_control_c_is_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(memfeed, "open", interrupt)
    assert main(["verify", "x"]) == 130
    assert capsys.readouterr().err == "memfeed: interrupted\n"


# --- cache


def test_cache_writes_what_the_factory_made(capsys: pytest.CaptureFixture[str]) -> None:
    cached("out.mf", "--fields", "square,number", "--form", "square=uint8", "--workers", "2")
    out = capsys.readouterr().out
    assert "12 rows" in out
    assert "square: uint8 [3, 4, 5]" in out
    store = memfeed.open("out.mf")
    assert torch.equal(store[:][0], torch.arange(12, dtype=torch.uint8)[:, None, None, None].expand(12, 3, 4, 5))
    assert store[:][1].tolist() == [i * i for i in range(12)]


def test_cache_takes_an_object_and_a_store_that_is_there() -> None:
    cached()
    assert main(["cache", "cli_sets:squares", "out.mf", "--no-progress"]) == 0


def test_cache_names_its_own_options_for_a_stale_store(capsys: pytest.CaptureFixture[str]) -> None:
    cached()
    assert main(["cache", "cli_sets:other", "out.mf", "--no-progress"]) == 2
    err = capsys.readouterr().err
    assert "pass --overwrite" in err
    assert "or take it as it is: memfeed.open(path)" in err
    assert len(memfeed.open("out.mf").schema) == 2
    assert main(["cache", "cli_sets:other", "out.mf", "--no-progress", "--overwrite"]) == 0
    assert len(memfeed.open("out.mf").schema) == 1


def test_cache_takes_some_samples_of_an_iterable() -> None:
    assert main(["cache", "cli_sets:endless", "out.mf", "--no-progress", "--length", "25"]) == 0
    assert memfeed.open("out.mf")[:][:, 0].tolist() == list(range(25))


def test_cache_leaves_out_what_raises(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "cli_sets:Broken", "out.mf", "--no-progress", "--on-error", "skip"]) == 0
    assert "samples skipped: 1" in capsys.readouterr().out
    assert memfeed.open("out.mf").skipped == (5,)
    assert main(["inspect", "out.mf"]) == 0
    assert "samples skipped: 1, dataset indices 5" in capsys.readouterr().out


def test_images_keep_their_aspect(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "--images", str(tree), "out.mf", "--resize", "24", "--no-progress"]) == 0
    out = capsys.readouterr().out
    assert "image: list uint8 [*, *, *]" in out
    assert "classes: 0 moths, 1 wasps" in out
    store = memfeed.open("out.mf")
    assert [tuple(image.shape) for image, _ in store] == [(3, 24, 32)] * 2 + [(3, 30, 24), (3, 24, 32)] + [
        (3, 30, 24)
    ] * 2
    assert [label for _, label in store] == [0, 0, 0, 1, 1, 1]


def test_images_squashed_are_those_of_pillow(tree: Path) -> None:
    assert main(["cache", "--images", str(tree), "out.mf", "--resize", "20x16", "--no-progress"]) == 0
    images = memfeed.open("out.mf").column("image")
    assert images.shape == (6, 3, 20, 16)
    with Image.open(tree / "moths" / "0.png") as image:
        expected = np.asarray(image.resize((16, 20), Image.Resampling.BILINEAR))
    assert np.array_equal(images[0].permute(1, 2, 0).numpy(), expected)


def test_images_as_they_are(tree: Path) -> None:
    assert main(["cache", "--images", str(tree), "out.mf", "--no-progress"]) == 0
    image, label = memfeed.open("out.mf")[5]
    assert np.array_equal(image.permute(1, 2, 0).numpy(), decoded(tree / "wasps" / "5.png"))
    assert label == 1


def test_a_broken_image_is_named_or_left_out(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = (tree / "moths" / "2.png").read_bytes()
    (tree / "moths" / "2.png").write_bytes(whole[: len(whole) // 2])
    command = ["cache", "--images", str(tree), "out.mf", "--resize", "16", "--no-progress"]
    assert main(command) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert str(tree / "moths" / "2.png") in err
    assert "sample 1:" in err
    assert main([*command, "--on-error", "skip"]) == 0
    assert memfeed.open("out.mf").skipped == (1,)


def test_images_without_the_extra(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    assert main(["cache", "--images", str(tree), "out.mf"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "found no torchvision" in err
    assert "pip install 'memfeed[vision]'" in err


# --- inspect


def test_inspect_shows_fields_bytes_and_rows(capsys: pytest.CaptureFixture[str]) -> None:
    cached()
    capsys.readouterr()
    assert main(["inspect", "out.mf", "--rows", "2"]) == 0
    out = capsys.readouterr().out
    assert "out.mf: 12 rows, 2 fields, 5.9 KB" in out
    assert "[3, 4, 5]" in out
    assert "5.8 KB" in out
    assert "96 B" in out
    assert "row 1" in out
    assert "row 2" not in out
    assert "1 to 1, mean 1" in out


def test_inspect_shows_every_kind_of_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples = [
        {"text": "[red]é" * n, "raw": b"\x00" * n, "ids": torch.arange(n), "mask": torch.ones(9, dtype=torch.bool)}
        for n in range(1, 5)
    ]
    memfeed.cache(samples, tmp_path / "kinds.mf", progress=False)
    assert main(["inspect", "kinds.mf", "--rows", "9"]) == 0
    out = capsys.readouterr().out
    for shown in ("'[red]é'", "(4 B)", "[0, 1, 2]", "[9] 9 true", "jagged", "row 3"):
        assert shown in out


def test_inspect_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cached()
    assert main(["inspect", "out.mf", "--rows", "2", "--html", "page.html"]) == 0
    assert "page.html\n" in capsys.readouterr().out
    shown = require_harmless((tmp_path / "page.html").read_text())
    for part in ("memfeed: out.mf", "Store: 12 rows, 2 fields", "row 1"):
        assert part in shown
    assert "row 2" not in shown
    for other in ("out.mf/memfeed.json", "link"):
        assert main(["inspect", "out.mf", "--html", other]) == 2
        assert f"found --html '{other}'; expected a name that ends in .html" in capsys.readouterr().err
    assert main(["verify", "out.mf"]) == 0
    capsys.readouterr()
    assert main(["inspect", "out.mf", "--html", "nowhere/page.html"]) == 2
    assert "nowhere/page.html: found that the disk refused" in capsys.readouterr().err


def test_the_page_of_a_damaged_store_is_written_before_the_error(tmp_path: Path) -> None:
    memfeed.cache([{"x": torch.zeros(9), "t": "text"}] * 3, tmp_path / "a.mf", forms={"x": "zstd"}, progress=False)
    heap = tmp_path / "a.mf" / "x" / "heap.bin"
    heap.chmod(0o644)
    heap.write_bytes(bytes(heap.stat().st_size))
    assert main(["inspect", "a.mf", "--html", "page.html"]) == 2
    shown = require_harmless((tmp_path / "page.html").read_text())
    assert "CorruptStoreError" in shown
    assert "'text'" in shown


def test_inspect_writes_a_page_of_a_store_at_an_address(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("obstore")
    cached()
    memfeed.push(tmp_path / "out.mf", f"file://{tmp_path}/far.mf")
    capsys.readouterr()
    assert main(["inspect", f"file://{tmp_path}/far.mf", "--html", "page.html"]) == 0
    assert "page.html\n" in capsys.readouterr().out
    shown = require_harmless((tmp_path / "page.html").read_text())
    for part in ("Store: 12 rows, 2 fields", "5.8 KB, 98.4%", "Its rows are not read from here"):
        assert part in shown


def test_inspect_opens_what_tensordict_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    TensorDict({"a": torch.arange(6), "in": {"b": torch.ones(6, 2)}}, [6]).memmap(tmp_path / "rows")
    assert main(["inspect", "rows"]) == 0
    out = capsys.readouterr().out
    assert "rows: 6 rows, 2 fields, 96 B" in out
    assert "in.b" in out
    TensorDict({"weight": torch.full((3, 4), 0.5), "bias": torch.zeros(3)}, []).memmap(tmp_path / "weights")
    assert main(["inspect", "weights"]) == 0
    out = capsys.readouterr().out
    assert "weights: no rows (a TensorDict of batch_size [])" in out
    assert "[3, 4] 0.5 to 0.5, mean 0.5" in out


def test_inspect_writes_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pixels = torch.randint(0, 256, (4, 3, 10, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    samples = [
        {"a/b": pixels[i], "mask": pixels[i, 0], "big": torch.zeros(1, 600, 300, dtype=torch.uint8), "n": i}
        for i in range(4)
    ]
    memfeed.cache(samples, tmp_path / "pixels.mf", progress=False)
    assert main(["inspect", "pixels.mf", "--rows", "2", "--pictures", "deep/pics"]) == 0
    paths = [Path(line) for line in capsys.readouterr().out.splitlines() if line.endswith(".png")]
    assert sorted(path.name for path in paths) == sorted(
        f"{n}-{i}.png" for i in range(2) for n in ("a_b", "mask", "big")
    )
    assert np.array_equal(decoded("deep/pics/a_b-1.png"), pixels[1].permute(1, 2, 0).numpy())
    assert np.array_equal(decoded("deep/pics/mask-1.png"), pixels[1, 0].numpy())
    assert decoded("deep/pics/big-0.png").shape == (256, 128)


def test_inspect_writes_no_pictures_into_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    memfeed.cache([(torch.zeros(2), i) for i in range(50)], "many.mf", progress=False)
    Path("a_file").write_text("")
    assert main(["inspect", "many.mf", "--pictures", "a_file"]) == 2
    assert "found --pictures 'a_file', which is a file; expected a directory" in capsys.readouterr().err


def test_inspect_shows_a_few_of_many_rows(capsys: pytest.CaptureFixture[str]) -> None:
    memfeed.cache(list(range(50)), "many.mf", progress=False)
    assert main(["inspect", "many.mf", "--rows", "99999999"]) == 0
    shown = capsys.readouterr().out
    assert "The first 20 of these 50 rows" in shown
    assert "row 19" in shown
    assert "row 20" not in shown


def test_inspect_says_where_there_are_no_pictures(capsys: pytest.CaptureFixture[str]) -> None:
    cached()
    assert main(["inspect", "out.mf", "--pictures", "pics"]) == 2
    assert "found no image-like field among 0, 1" in capsys.readouterr().err
    assert not Path("pics").exists()


AUGMENT = """
from memfeed.transforms import Compose, Normalize, RandomCrop, RandomHorizontalFlip

augment = Compose([RandomCrop(8), RandomHorizontalFlip(), Normalize([0.5] * 3, [0.25] * 3)])

def make():
    return augment

def plain(batch):
    return [batch[0].flip(-1), batch[1]]

class Bad:
    pass

bad = Bad()
"""


@pytest.fixture
def augmented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cli_augment.py").write_text(AUGMENT)
    monkeypatch.delitem(sys.modules, "cli_augment", raising=False)
    images = torch.randint(0, 256, (6, 3, 16, 12), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    memfeed.cache((images, torch.arange(6)), tmp_path / "pixels.mf", progress=False)


@pytest.mark.usefixtures("augmented")
@pytest.mark.parametrize("name", ["augment", "make", "plain"])
def test_inspect_draws_what_a_transform_makes(capsys: pytest.CaptureFixture[str], name: str) -> None:
    options = ["--augment", f"cli_augment:{name}", "--rows", "4", "--epochs", "3", "--pictures", "deep"]
    assert main(["inspect", "pixels.mf", *options]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(Path("deep") / "pixels-augmented.png")
    sheet = decoded("deep/pixels-augmented.png")
    assert sheet.shape == (22 + 4 * 176, 64 + 4 * 176, 3)
    first = memfeed.open("pixels.mf")[0][0].permute(1, 2, 0).numpy()
    assert np.array_equal(sheet[22:182:10, 64:184:10], first), "the original, ten times as large"
    versions = [sheet[22:, 64 + 176 * k : 232 + 176 * k].tobytes() for k in range(1, 4)]
    assert len(set(versions)) == (1 if name == "plain" else 3)


@pytest.mark.usefixtures("augmented")
def test_inspect_draws_images_of_several_sizes(tmp_path: Path) -> None:
    rows = [(torch.full((3, 16, 12 + row), 50 * row, dtype=torch.uint8), row) for row in range(5)]
    memfeed.cache(rows, tmp_path / "sizes.mf", progress=False)
    options = ["--augment", "cli_augment:augment", "--rows", "4", "--epochs", "2", "--pictures", "deep"]
    assert main(["inspect", "sizes.mf", *options]) == 0
    assert decoded("deep/sizes-augmented.png").shape == (22 + 4 * 176, 64 + 3 * 176, 3)


@pytest.mark.usefixtures("augmented")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--augment", "cli_augment"], "expected module:name"),
        (["--augment", "cli_augment:nothing"], "found no 'nothing'"),
        (["--augment", "cli_augment:bad"], "found Bad as transform=; expected a memfeed.transforms transform"),
        (["--augment", "cli_augment:augment", "--rows", "0"], "found --augment and no rows to show"),
    ],
)
def test_inspect_says_what_is_wrong_with_a_transform(
    capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    assert main(["inspect", "pixels.mf", *options]) == 2
    assert words in capsys.readouterr().err


# --- verify


def test_verify_says_ok_and_how_fast(capsys: pytest.CaptureFixture[str]) -> None:
    cached()
    capsys.readouterr()
    assert main(["verify", "out.mf", "--progress"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("out.mf: ok, 5.9 KB at ")
    assert "100%" in err


def test_verify_finds_damage(capsys: pytest.CaptureFixture[str]) -> None:
    cached()
    file = Path("out.mf/0.memmap")
    file.chmod(0o644)
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    capsys.readouterr()
    assert main(["verify", "out.mf", "--no-progress"]) == 2
    out, err = capsys.readouterr()
    assert "ok" not in out
    assert err.count("\n") == 1
    assert "0.memmap: found other bytes than were written" in err


def test_verify_needs_checksums(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    TensorDict({"a": torch.arange(6)}, [6]).memmap(tmp_path / "rows")
    assert main(["verify", "rows"]) == 2
    assert "which has no checksums" in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    """As head, which ends while the command still writes."""
    memfeed.cache(torch.arange(1000), tmp_path / "s.mf", progress=False)
    command = [sys.executable, "-m", "memfeed", "inspect", str(tmp_path / "s.mf")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1
