"""Count the instructions of the GPU kernel of the augmentation for a value, in its compiled code: no GPU needed.

It makes of uint8 [n, 3, 256, 256] bfloat16 [n, 3, 224, 224], cropped, flipped and normalised. It is compiled for
each architecture, and its machine code is disassembled with the tools that Triton brings. A static count is not a time.

    python benchmarks/kernels.py
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from measure import Check, parser, show, table, write
from memfeed.transforms.backends import kernel

ARCHITECTURES = (80, 90, 100)
WARPS = 4
# of the kernel with tiles of 2048 values, counted in the same way: channels_last, contiguous
BEFORE = {80: (32.9, 25.5), 90: (33.5, 25.6), 100: (33.5, 25.6)}


def compiled(sm: int, *, last: bool) -> Any:
    """Return the kernel for uint8 images and bfloat16 outputs, 3 channels, normalised, compiled for an architecture."""
    columns, tile_values = kernel.TILES[last]
    values = {"c": 3, "rows": tile_values // columns, "columns": columns, "last": last}
    values |= {"cast": True, "scaled": True, "rounded": False, "padded": False, "erased": "no", "column_stride": 1}
    names = kernel._kernel.arg_names
    types = {name: "constexpr" if name in values else "i32" for name in names}
    types |= {"image": "*u8", "output": "*bf16", "parameters": "*i32", "sample_stride": "i64"}
    aligned = ("image", "output", "parameters", "width")  # as those of 224 pixels are
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    options = {"enable_fp_fusion": True, "num_warps": WARPS}
    source = ASTSource(kernel._kernel, types, values, attributes)
    return triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)


def machine_code(made: Any) -> list[str]:
    """Return the instructions of compiled code, without those that pad it."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout
    found = [line.split("*/")[1].strip() for line in text.splitlines() if re.match(r"\s+/\*[0-9a-f]{4,}\*/\s", line)]
    return [instruction for instruction in found if not instruction.startswith("NOP")]


def main() -> None:
    options = parser("kernels", __doc__).parse_args()
    found: dict[str, Any] = {}
    checks = []
    for sm in ARCHITECTURES[1:2] if options.quick else ARCHITECTURES:
        for last, before in zip((True, False), BEFORE[sm], strict=True):
            made = compiled(sm, last=last)
            code = machine_code(made)
            names = Counter(re.sub(r"^@!?\w+ ", "", one).split()[0].rstrip(";") for one in code)
            name = f"sm_{sm}, {'channels last' if last else 'contiguous'}"
            found[name] = {
                "instructions": len(code),
                "instructions_a_value": round(len(code) / (kernel.TILES[last][1] / (WARPS * 32)), 1),
                "instructions_a_value_before": before,
                "stores": {one: count for one, count in names.items() if one.startswith("STG")},
                "stores_of_ptx": dict(Counter(re.findall(r"st\.global[\w.:]*", made.asm["ptx"]))),
            }
            part = found[name]["instructions_a_value"] / before
            checks.append(Check(f"{name}: instructions a value, of those before", part, 0.67, False))
            wide = found[name]["stores"].get("STG.E.128", 0) / max(sum(found[name]["stores"].values()), 1)
            checks.append(Check(f"{name}: stores of 16 bytes, of all stores", wide, 1.0, True))
    columns = ("instructions_a_value_before", "instructions_a_value", "stores")
    rows = [[name, *(str(one[column]) for column in columns)] for name, one in found.items()]
    table("instructions a value", ["", "before", "now", "stores"], rows)
    show("the compiled kernel", checks)
    about = {
        "tiles": {"contiguous": kernel.TILES[False], "channels last": kernel.TILES[True]},
        "warps": WARPS,
        "triton": triton.__version__,
    }
    write(options, about, {"code": found}, checks)


if __name__ == "__main__":
    main()
