"""Compiles the rotary kernel for GPUs that need not be here, and prints as JSON what came of it.

Run by test_rotary_aot.py in a process without Triton's interpreter: ``python aot_compile.py "table integer half"``.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mmpos.rotary import phases
from mmpos.rotary.kernel.rotate import rotary_kernel

ARCHITECTURES = (80, 90, 100)
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"

CASES: dict[str, dict[str, Any]] = {
    "table integer half": {"mode": phases.TABLE_INTEGER},
    "table fractional half": {"mode": phases.TABLE_FRACTIONAL},
    "dense integer half": {"mode": phases.DENSE_INTEGER},
    "dense fixed half": {"mode": phases.DENSE_FIXED},
    "table integer adjacent": {"mode": phases.TABLE_INTEGER, "adjacent": True},
    "table fractional adjacent": {"mode": phases.TABLE_FRACTIONAL, "adjacent": True},
    "dense integer adjacent": {"mode": phases.DENSE_INTEGER, "adjacent": True},
    "head_dim 80 half": {"mode": phases.TABLE_INTEGER, "pairs": 40},
    "head_dim 80 adjacent": {"mode": phases.TABLE_INTEGER, "pairs": 40, "adjacent": True},
    "partial half": {"mode": phases.TABLE_INTEGER, "pairs": 32, "rest": 64, "block": 32},
    "partial adjacent": {"mode": phases.TABLE_INTEGER, "pairs": 16, "rest": 96, "block": 64, "adjacent": True},
    "norm half": {"mode": phases.TABLE_INTEGER, "weights": "qk"},
    "norm adjacent": {"mode": phases.TABLE_INTEGER, "adjacent": True, "weights": "qk"},
    "norm fractional half": {"mode": phases.TABLE_FRACTIONAL, "weights": "qk"},
    "norm half, few tokens": {"mode": phases.TABLE_INTEGER, "block": 4, "warps": 1, "weights": "qk"},
    "norm of q half": {"mode": phases.TABLE_INTEGER, "weights": "q"},
    "norm head_dim 80 half": {"mode": phases.TABLE_INTEGER, "pairs": 40, "weights": "qk"},
    "norm partial half": {"mode": phases.TABLE_INTEGER, "pairs": 32, "rest": 64, "weights": "qk"},
    "norm partial adjacent": {
        "mode": phases.TABLE_INTEGER,
        "pairs": 16,
        "rest": 96,
        "adjacent": True,
        "weights": "qk",
    },
    "table integer half, few tokens": {"mode": phases.TABLE_INTEGER, "block": 4, "warps": 1},
    "table fractional adjacent, few tokens": {
        "mode": phases.TABLE_FRACTIONAL,
        "adjacent": True,
        "block": 4,
        "warps": 1,
    },
    "table integer half, fused": {"mode": phases.TABLE_INTEGER, "fusion": True},
    "table integer half, one token": {
        "mode": phases.TABLE_INTEGER,
        "ones": ("tokens", "seq", "segments", "row_stride"),
    },
    "table fractional half, one token": {"mode": phases.TABLE_FRACTIONAL, "ones": ("tokens", "seq", "segments")},
    "dense fixed half, one head": {"mode": phases.DENSE_FIXED, "ones": ("q_heads", "k_heads", "q_head", "row_stride")},
}


def compiled(
    arch: int,
    *,
    mode: int,
    adjacent: bool = False,
    pairs: int = 64,
    rest: int = 0,
    fusion: bool = False,
    block: int = 16,
    warps: int = 4,
    ones: tuple[str, ...] = (),
    weights: str = "",
) -> Any:
    """The kernel for bfloat16, strides that are multiples of 16, and tokens per program and warps as launched."""
    constants: dict[str, Any] = {
        "PAIRS": pairs,
        "PAIRS_PADDED": triton.next_power_of_2(pairs),
        "REST": rest,
        "REST_PADDED": triton.next_power_of_2(max(rest, 1)),
        "AXES": 2,
        "MODE": mode,
        "AS_HF": False,
        "ADJACENT": adjacent,
        "CONJUGATE": False,
        "SCALED": False,
        "COPY_REST": True,
        "BLOCK": block,
    }
    # Without weights the arguments of the norm are no parameters, so that plain rotations are compiled as ever.
    constants |= {f"{x}_weight": None for x in "qk" if x not in weights}
    if not weights:
        constants |= {"eps": None, "offset": None}
    types = dict.fromkeys(("q", "k", "q_out", "k_out", "q_weight", "k_weight"), "*bf16")
    types |= {"positions": "*i64", "frequencies": "*i64", "pair_axis": "*i32", "attention_factor": "fp32"}
    types |= {"eps": "fp32", "offset": "fp32"}
    signature, multiples = {}, {}
    for index, name in enumerate(rotary_kernel.arg_names):
        if name.endswith("_dim") or name in ones:
            constants[name] = 1  # as Triton treats every argument that is 1
        signature[name] = "constexpr" if name in constants else types.get(name, "i32")
        if signature[name].startswith("*") or name.endswith(("_batch", "_token", "_head")):
            multiples[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(rotary_kernel, signature, constexprs=constants, attrs=multiples)
    return triton.compile(source, GPUTarget("cuda", arch, 32), {"num_warps": warps, "enable_fp_fusion": fusion})


def facts(kernel: Any) -> dict[str, int]:
    """Counts of instructions, and the resources of the machine code."""
    ptx = kernel.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _output("cuobjdump", "--dump-resource-usage", file.name)
        machine = _output("nvdisasm", "-c", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    if found is None:
        raise ValueError(usage)
    registers, stack, local = map(int, found.groups())
    return {
        "registers": registers,
        "stack": stack,
        "local": local,
        "shared": kernel.metadata.shared,
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", machine)),
        "loads_128": len(re.findall(r"ld\.global[^;]*\.v4\.b32", ptx)),
        "stores_128": len(re.findall(r"st\.global[^;]*\.v4\.b32", ptx)),
        "machine_loads_128": len(re.findall(r"\bLDG\.E[.\w]*\.128\b", machine)),
        "machine_stores_128": len(re.findall(r"\bSTG\.E[.\w]*\.128\b", machine)),
        "narrow_stores": len(re.findall(r"\bSTG\.E\b(?![.\w]*\.128)", machine)),
        "float64": len(re.findall(r"\.f64\b", ptx)) + len(re.findall(r"\b(?:DADD|DMUL|DFMA|F2F\.F64)", machine)),
        "fma": len(re.findall(r"\bfma\.", ptx)) + len(re.findall(r"\bFFMA", machine)),
        "divisions_64": len(re.findall(r"\b(?:div|rem)\.[su]64", ptx)),
    }


def _output(tool: str, *arguments: str) -> str:
    return subprocess.run([TOOLS / tool, *arguments], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    names = sys.argv[1:]
    print(
        json.dumps(
            {f"{name}, sm_{arch}": facts(compiled(arch, **CASES[name])) for name in names for arch in ARCHITECTURES}
        )
    )
