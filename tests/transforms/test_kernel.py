"""The GPU kernels without a GPU: interpreted, compiled but not run, and skipped if they do not work.

All are interpreted in one process, and compiled in another: torch takes seconds to import.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from memfeed.transforms.backends import passes

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton, which comes with torch for CUDA")
HERE = Path(__file__).parent

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from memfeed.transforms.backends.kernel import _kernel
from memfeed.transforms.backends.sampling_kernels import resize, warp

flags = [(False, False, False, False), (True, False, False, True), (True, False, True, False), (True, True, True, True)]
kinds = ("u8", "bf16", 3), ("fp16", "fp16", 1), ("fp64", "fp32", 4)
CASES = []
for number, (source, target, c) in enumerate(kinds):  # each row of flags, and all flags with each kind
    for cast, rounded, scaled, other in (flags[number], flags[-1]):
        values = {"c": c, "rows": 8, "columns": 32, "cast": cast}
        values["erased"] = "no" if not other else "noise" if number else "fill"
        values |= {"padded": other, "rounded": rounded, "scaled": scaled, "last": other, "column_stride": 1}
        CASES.append((_kernel, source, target if cast else source, values))

BYTES = {"integer": True, "low": 0, "high": 255}
FLOATS = {"integer": False, "low": 0, "high": 0}
USUAL = {"cast": True, "rounded": False, "scaled": True, "last": True}
ALONE = {"cast": False, "rounded": False, "scaled": False, "last": False}
BILINEAR = {"picks": False, "cubic": False, "antialias": True, "half": 0.0, "listed": False}
SAMPLING = [
    (resize, "u8", "bf16", 3, {**BYTES, **USUAL, **BILINEAR}),
    (resize, "u8", "bf16", 3, {**BYTES, **USUAL, **BILINEAR, "listed": True}),
    (resize, "fp16", "fp16", 1, {**FLOATS, **ALONE, **BILINEAR, "cubic": True, "antialias": False}),
    (resize, "i64", "i64", 1, {**FLOATS, **ALONE, **BILINEAR, "picks": True, "half": 0.5}),
    (warp, "u8", "fp32", 3, {**BYTES, **USUAL, "picks": False}),
    (warp, "fp64", "fp16", 4, {**FLOATS, **USUAL, "rounded": True, "picks": True}),
]
CASES += [
    (kernel, source, target,
     {"c": c, "channels": triton.next_power_of_2(c), "rows": 16, "columns": 32, "column_stride": 1, **options})
    for kernel, source, target, c, options in SAMPLING
]
"""

# Each case is for one architecture, in turn; with ALL, the first of each kernel is for all. A Triton that is older
# than an architecture has an assembler that does not know it.
COMPILE_ALL = """
if not ALL:
    CASES = CASES[::2]
ARCHITECTURES = (80, 90, 100)
FIRST = {kernel: number for number, (kernel, *_) in reversed([*enumerate(CASES)])}
for architecture in ARCHITECTURES:
    try:
        for number, (kernel, source, target, values) in enumerate(CASES):
            if architecture != ARCHITECTURES[number % 3] and not (ALL and number == FIRST[kernel]):
                continue
            types = {name: "constexpr" if name in values else "i32" for name in kernel.arg_names}
            types |= {"image": f"*{source}", "output": f"*{target}", "parameters": "*i32", "sample_stride": "i64"}
            made = triton.compile(
                ASTSource(kernel, types, values),
                target=GPUTarget("cuda", architecture, 32),
                options={"enable_fp_fusion": True},
            )
            assert "st.global" in made.asm["ptx"]
        print("compiled for", architecture)
    except Exception as error:
        if architecture < 100 or "is not defined for option 'gpu-name'" not in str(error):
            raise
        print("too old for", architecture)
"""


def python(*args, **env):
    return subprocess.run(
        [sys.executable, *args],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=HERE.parents[1],
        env={**os.environ, **env},
    )


@needs_triton
@pytest.mark.parametrize(
    ("examples", "which"), [(4, "not long"), pytest.param(60, "long or not long", marks=pytest.mark.long)]
)
def test_interpreted(examples, which):
    files = (str(HERE / f"interpreted_{name}.py") for name in ("kernel", "sampling"))
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", which, *files, EXAMPLES=str(examples))
    assert done.returncode == 0, done.stdout + done.stderr


@needs_triton
@pytest.mark.parametrize("all_cases", [False, pytest.param(True, marks=pytest.mark.long)])
def test_they_compile_for_three_architectures(tmp_path, all_cases):
    done = python(
        "-c", f"ALL = {all_cases}\n{COMPILE}{COMPILE_ALL}", TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0"
    )
    assert done.stdout.startswith("compiled for 80\ncompiled for 90\n"), done.stderr
    if "too old" in done.stdout:
        pytest.skip(done.stdout.splitlines()[-1].replace("too old", "this Triton is too old"))
    assert done.stdout.endswith("compiled for 100\n"), done.stderr


def test_without_triton(monkeypatch):
    monkeypatch.setattr(passes, "find_spec", lambda name: None)
    assert passes.gpu_kernel.__wrapped__(torch.device("cuda")) is None


@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine where Triton fails, and this one has a GPU")
def test_where_triton_does_not_work():
    with pytest.warns(UserWarning, match=r"Triton does not work on cuda \(.*one by one.*C compiler"):
        assert passes.gpu_kernel.__wrapped__(torch.device("cuda")) is None
