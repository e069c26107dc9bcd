"""Each feature that needs an extra: in an environment without any, and in one with this extra alone."""

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import numpy as np
import pytest
import torch

import memfeed
from test_release import ROOT, dist, run  # noqa: F401 - dist is a fixture

FEATURES = {  # a program in a folder with the files of `inputs`, and the extra that it needs
    "cache --images": ("vision", "cli('cache', '--images', 'photos', 'out.mf')"),
    "inspect --pictures": ("vision", "cli('inspect', 'images.mf', '--pictures', 'out')"),
    "inspect --augment": ("vision", "cli('inspect', 'images.mf', '--augment', 'program:augment')"),
    "transforms.Decode": ("vision", "T.Decode().apply({'image': [open('photos/a/0.png', 'rb').read()]}, KEYS)"),
    "a store of encoded images": ("vision", "batch_of('encoded.mf')"),
    "a memoized image": ("vision", "memfeed.memoize(picture, 'memo.mf', version=1)(f'{here}/photos/a/0.png')"),
    "bench --png": ("plots", "cli('bench', 'program:dataset', '--seconds', '1', '--png', 'v.png')"),
    "open an address": ("remote", "memfeed.open(f'file://{here}/bucket/images.mf', cache_dir='cache')[0]"),
    "push": ("remote", "memfeed.push('images.mf', f'file://{here}/bucket/pushed.mf', progress=False)"),
    "pull": ("remote", "memfeed.pull(f'file://{here}/bucket/images.mf', 'pulled.mf', progress=False)"),
    "cache at an address": ("remote", "memfeed.cache([1, 2, 3], f'file://{here}/bucket/made.mf', progress=False)"),
    "forms=lz4": ("codecs", "memfeed.cache(dataset, 'lz4.mf', forms='lz4', progress=False)"),
    "forms=zstd": ("codecs", "memfeed.cache(dataset, 'zstd.mf', forms='zstd', progress=False)"),
    "forms=jpeg": ("codecs", "memfeed.cache(dataset, 'jpeg.mf', forms={'0': 'jpeg:95'}, progress=False)"),
    "recode": ("codecs", "memfeed.recode('images.mf', 'recoded.mf', forms='zstd', progress=False)"),
    "a store of coded rows": ("codecs", "batch_of('coded.mf')"),
    'workers="ray"': ("ray", "memfeed.cache(dataset, 'ray.mf', workers='ray:1', progress=False)"),
    'as_="jax"': ("jax", "next(iter(memfeed.Loader(torch.rand(9, 3), 3, as_='jax')))"),
    "compiled loops": ("numba", "assert Loops('memfeed.transforms.backends.loops').wait() is not None"),
}
WITHOUT_AN_ERROR = {"numba"}  # what it does is done without it, slower
NEEDS_TORCHVISION = {"cache --images"}
NO_FEATURES = {"docs", "trainers", "peers", "dev"}  # tools and tests of this repository
PROGRAM = """
import os, sys, torch, memfeed, memfeed.cli
import memfeed.transforms as T
from memfeed.system.compiled import Loops

here = os.getcwd()
augment = T.RandomCrop(16)
KEYS = memfeed.Keys(0, 0, torch.arange(1))


class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, row):
        return torch.full((3, 32, 32), row, dtype=torch.uint8), row


dataset = Images()


def cli(*words):
    status = memfeed.cli.main([*words])
    if status:
        sys.exit(status)


def picture(path):
    from PIL import Image

    return Image.open(path).convert("RGB")


def batch_of(path):
    return next(iter(memfeed.Loader(memfeed.open(path), 2)))
"""

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif("MEMFEED_TEST_EXTRAS" not in os.environ, reason="make test-extras: it installs 2 GB"),
]


def names_of_extras() -> set[str]:
    part = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n\n")[0]
    return set(re.findall(r"^(\w+) = \[", part, re.MULTILINE))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """A folder with the program, photographs, and stores that were written where all extras are installed."""
    image, datasets, transforms = (
        pytest.importorskip(name) for name in ("PIL.Image", "torchvision.datasets", "torchvision.transforms")
    )
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "program.py").write_text(PROGRAM)
    images = torch.randint(0, 256, (9, 3, 32, 32), dtype=torch.uint8)
    for row, each in enumerate(images):
        path = folder / "photos" / "ab"[row % 2] / f"{row}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.fromarray(each.permute(1, 2, 0).numpy()).save(path)
    memfeed.cache((images, torch.arange(9)), folder / "images.mf", progress=False)
    memfeed.push(folder / "images.mf", f"file://{folder}/bucket/images.mf", progress=False)
    memfeed.cache([(np.arange(9), 1)] * 9, folder / "coded.mf", forms="zstd", progress=False)
    recipe = transforms.Compose([transforms.RandomResizedCrop(16), transforms.ToTensor()])
    photos = datasets.ImageFolder(str(folder / "photos"), recipe)
    memfeed.cache(photos, folder / "encoded.mf", split=True, forms="encoded", progress=False)
    code = f"from program import *; {FEATURES['a memoized image'][1]}"
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, timeout=120)
    return folder


@pytest.fixture(scope="module")
def bare(dist, tmp_path_factory) -> Path:  # noqa: F811
    """The python of an environment that has the wheel and what it requires."""
    root = tmp_path_factory.mktemp("bare")
    venv.create(root, with_pip=True)
    (wheel,) = dist.glob("*.whl")
    python = root / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", wheel, "torch==2.13.0", cwd=root)  # it comes without CUDA
    return python


@pytest.fixture(scope="module", params=sorted(names_of_extras() - NO_FEATURES))
def alone(request, bare, tmp_path_factory) -> tuple[str, Path]:
    """An extra, and the python of an environment that has it beside the bare one."""
    root = tmp_path_factory.mktemp(request.param)
    venv.create(root, with_pip=False)
    (packages,) = root.glob("lib/python*/site-packages")
    (first,) = bare.parents[1].glob("lib/python*/site-packages")
    (packages / "bare.pth").write_text(str(first))
    python = root / "bin" / "python"
    pip = (bare, "-m", "pip", "--python", python, "install", "--quiet")
    run(*pip, f"memfeed[{request.param}]", "torch==2.13.0", cwd=root)  # the line of the errors
    return request.param, python


def use(python: Path, code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["XDG_CACHE_HOME"] = str(folder / "xdg")
    command = [str(python), "-c", f"from program import *\nif __name__ == '__main__':\n    {code}"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def test_every_extra_has_features():
    assert {extra for extra, _ in FEATURES.values()} | NO_FEATURES == names_of_extras()


@pytest.mark.parametrize("feature", FEATURES)
def test_without_the_extra_the_error_is_the_line_to_run(bare, inputs, feature):
    extra, code = FEATURES[feature]
    done = use(bare, code, inputs)
    said = done.stdout + done.stderr
    assert done.returncode != 0, said
    if extra in WITHOUT_AN_ERROR:
        assert said.splitlines()[-1] == "AssertionError"
    else:
        assert f"pip install 'memfeed[{extra}]'" in said.splitlines()[-1], said


def test_with_the_extra_alone_its_features_work(alone, inputs):
    extra, python = alone
    mine = {feature: code for feature, (name, code) in FEATURES.items() if name == extra}
    found = use(python, "import torchvision", inputs) if NEEDS_TORCHVISION & mine.keys() else None
    skipped = sorted(NEEDS_TORCHVISION & mine.keys()) if found is not None and found.returncode else []
    for feature in mine.keys() - {*skipped}:
        done = use(python, mine[feature], inputs)
        assert done.returncode == 0, f"{feature}: {done.stdout}{done.stderr}"
    if skipped:
        reason = found.stderr.strip().splitlines()[-1]
        pytest.skip(f"{', '.join(skipped)}: torchvision cannot be imported beside this torch ({reason}); others work")


def test_the_extras_are_not_in_the_bare_environment(bare, tmp_path):
    modules = ["torchvision", "PIL", "matplotlib", "obstore", "lz4", "simplejpeg", "zstandard", "numba", "ray", "jax"]
    code = f"from importlib.util import find_spec; print([name for name in {modules} if find_spec(name)])"
    assert run(bare, "-c", code, cwd=tmp_path).strip() == "[]"
