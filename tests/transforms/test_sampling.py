"""The kernels that resize and warp, without a GPU: interpreted, and compiled for three architectures but not run."""

import pytest
from test_kernel import HERE, needs_triton, python

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
for kernel, source, target, c, options in CASES:
    values = {"c": c, "channels": triton.next_power_of_2(c), "rows": 16, "columns": 32, "column_stride": 1, **options}
    types = {name: "constexpr" if name in values else "i32" for name in kernel.arg_names}
    types |= {"image": f"*{source}", "output": f"*{target}", "parameters": "*i32", "sample_stride": "i64"}
    made = triton.compile(
        ASTSource(kernel, types, values),
        target=GPUTarget("cuda", ARCHITECTURE, 32),
        options={"enable_fp_fusion": True},
    )
    assert "st.global" in made.asm["ptx"]
print("compiled")
"""


@needs_triton
def test_interpreted():
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "interpreted_sampling.py"))
    assert done.returncode == 0, done.stdout + done.stderr


@needs_triton
@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_they_compile_for_a_gpu(architecture, tmp_path):
    source = COMPILE.replace("ARCHITECTURE", str(architecture))
    done = python("-c", source, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    if "is not defined for option 'gpu-name'" in done.stderr:
        pytest.skip(f"this Triton does not know sm_{architecture}")
    assert done.stdout == "compiled\n", done.stderr
