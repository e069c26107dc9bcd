"""The kernels that resize and warp, without a GPU: interpreted, and compiled for three architectures but not run."""

from test_kernel import HERE, check_compiles, needs_triton, python

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from memfeed.transforms.backends.sampling_kernels import resize, warp

BYTES = {"integer": True, "low": 0, "high": 255}
FLOATS = {"integer": False, "low": 0, "high": 0}
USUAL = {"cast": True, "rounded": False, "scaled": True, "last": True}
ALONE = {"cast": False, "rounded": False, "scaled": False, "last": False}
BILINEAR = {"picks": False, "cubic": False, "antialias": True, "half": 0.0, "listed": False}
CASES = [
    (resize, "u8", "bf16", 3, {**BYTES, **USUAL, **BILINEAR}),
    (resize, "u8", "bf16", 3, {**BYTES, **USUAL, **BILINEAR, "listed": True}),
    (resize, "fp16", "fp16", 1, {**FLOATS, **ALONE, **BILINEAR, "cubic": True, "antialias": False}),
    (resize, "i64", "i64", 1, {**FLOATS, **ALONE, **BILINEAR, "picks": True, "half": 0.5}),
    (warp, "u8", "fp32", 3, {**BYTES, **USUAL, "picks": False}),
    (warp, "fp64", "fp16", 4, {**FLOATS, **USUAL, "rounded": True, "picks": True}),
]
CASES = [
    (kernel, source, target,
     {"c": c, "channels": triton.next_power_of_2(c), "rows": 16, "columns": 32, "column_stride": 1, **options})
    for kernel, source, target, c, options in CASES
]
"""


@needs_triton
def test_interpreted():
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "interpreted_sampling.py"))
    assert done.returncode == 0, done.stdout + done.stderr


@needs_triton
def test_they_compile_for_three_architectures(tmp_path):
    check_compiles(COMPILE, tmp_path)
