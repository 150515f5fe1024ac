"""Compiles the rotary kernels for GPUs that need not be here, and prints as JSON what came of it.

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

from mmpos.rotary import reference
from mmpos.rotary.kernel.backward import backward_kernel
from mmpos.rotary.kernel.rotate import rotary_kernel
from mmpos.rotary.kernel.tiling import Angles, Heads, channels_of, pieces_of

ARCHITECTURES = (80, 90, 100)
HEADS = ("q", "k", "v", "q_grad", "k_grad", "q_out", "k_out", "key_cache", "value_cache")
TYPES = {
    **dict.fromkeys(("positions", "frequencies", "slots"), "*i64"),
    **dict.fromkeys(("q_weight", "k_weight"), "*bf16"),
    **dict.fromkeys(("q_sums", "k_sums"), "*fp32"),
    **dict.fromkeys(("attention_factor", "eps", "offset"), "fp32"),
    "pair_axis": "*i32",
}
"""Types of arguments as launches have them; all others are i32."""

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"

CASES: dict[str, dict[str, Any]] = {
    "table integer half": {"mode": reference.TABLE_INTEGER},
    "table fractional half": {"mode": reference.TABLE_FRACTIONAL},
    "dense integer half": {"mode": reference.DENSE_INTEGER},
    "dense fixed half": {"mode": reference.DENSE_FIXED},
    "table integer adjacent": {"mode": reference.TABLE_INTEGER, "adjacent": True},
    "table fractional adjacent": {"mode": reference.TABLE_FRACTIONAL, "adjacent": True},
    "dense integer adjacent": {"mode": reference.DENSE_INTEGER, "adjacent": True},
    "head_dim 80 half": {"mode": reference.TABLE_INTEGER, "pairs": 40, "block": 128, "pieces": True},
    "head_dim 80 adjacent": {
        "mode": reference.TABLE_INTEGER,
        "pairs": 40,
        "block": 128,
        "adjacent": True,
        "pieces": True,
    },
    "partial half": {"mode": reference.TABLE_INTEGER, "pairs": 32, "rest": 64, "block": 32},
    "partial adjacent": {"mode": reference.TABLE_INTEGER, "pairs": 16, "rest": 96, "block": 64, "adjacent": True},
    "norm half": {"mode": reference.TABLE_INTEGER, "weights": "qk"},
    "norm adjacent": {"mode": reference.TABLE_INTEGER, "adjacent": True, "weights": "qk"},
    "norm fractional half": {"mode": reference.TABLE_FRACTIONAL, "weights": "qk"},
    "norm half, few tokens": {"mode": reference.TABLE_INTEGER, "block": 4, "warps": 1, "weights": "qk"},
    "norm of q half": {"mode": reference.TABLE_INTEGER, "weights": "q"},
    "norm head_dim 80 half": {"mode": reference.TABLE_INTEGER, "pairs": 40, "weights": "qk"},
    "norm partial half": {"mode": reference.TABLE_INTEGER, "pairs": 32, "rest": 64, "weights": "qk"},
    "norm partial adjacent": {
        "mode": reference.TABLE_INTEGER,
        "pairs": 16,
        "rest": 96,
        "adjacent": True,
        "weights": "qk",
    },
    "backward half": {"mode": reference.TABLE_INTEGER, "weights": "qk", "backward": True},
    "backward adjacent": {"mode": reference.TABLE_INTEGER, "adjacent": True, "weights": "qk", "backward": True},
    "backward fractional half": {"mode": reference.TABLE_FRACTIONAL, "weights": "qk", "backward": True},
    "backward half, few tokens": {
        "mode": reference.TABLE_INTEGER,
        "block": 4,
        "warps": 1,
        "weights": "qk",
        "backward": True,
    },
    "backward of q half": {"mode": reference.TABLE_INTEGER, "weights": "q", "backward": True},
    "backward head_dim 80 half": {"mode": reference.TABLE_INTEGER, "pairs": 40, "weights": "qk", "backward": True},
    "backward partial half": {
        "mode": reference.TABLE_INTEGER,
        "pairs": 32,
        "rest": 64,
        "weights": "qk",
        "backward": True,
    },
    "backward partial adjacent": {
        "mode": reference.TABLE_INTEGER,
        "pairs": 16,
        "rest": 96,
        "adjacent": True,
        "weights": "qk",
        "backward": True,
    },
    "table integer half, few tokens": {"mode": reference.TABLE_INTEGER, "block": 4, "warps": 1},
    "table fractional adjacent, few tokens": {
        "mode": reference.TABLE_FRACTIONAL,
        "adjacent": True,
        "block": 4,
        "warps": 1,
    },
    "table integer half, fused": {"mode": reference.TABLE_INTEGER, "fusion": True},
    "table integer half, one token": {
        "mode": reference.TABLE_INTEGER,
        "ones": ("tokens", "seq", "segments", "row_stride"),
    },
    "table fractional half, one token": {"mode": reference.TABLE_FRACTIONAL, "ones": ("tokens", "seq", "segments")},
    "dense fixed half, one head": {
        "mode": reference.DENSE_FIXED,
        "ones": ("q_heads", "k_heads", "q.head", "row_stride"),
    },
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
    backward: bool = False,
    pieces: bool = False,
) -> Any:
    """The kernel for bfloat16, strides that are multiples of 16, and tokens per program and warps as launched."""
    constants = {
        "CHANNELS": (pieces_of if pieces else channels_of)(2 * pairs + rest, pairs, adjacent),
        "ANGLES": angles(mode),
        "COPY_REST": True,
        "BLOCK": block,
    }
    # Without weights the arguments of the norm are no parameters.
    missing = [f"{x}_{what}" for x in "qk" if x not in weights for what in ("weight", "sums")]
    missing += [] if weights else ["eps", "offset"]
    kernel = backward_kernel if backward else rotary_kernel
    return compiled_for(arch, kernel, constants | dict.fromkeys(missing), ones, warps, fusion)


def angles(mode: int) -> Angles:
    """How two axes are turned, exactly and forward."""
    from_table = mode in (reference.TABLE_INTEGER, reference.TABLE_FRACTIONAL)
    fractional = mode in (reference.TABLE_FRACTIONAL, reference.DENSE_FIXED)
    return Angles(axes=2, from_table=from_table, fractional=fractional, as_hf=False, conjugate=False, scaled=False)


def compiled_for(
    arch: int, kernel: Any, constants: dict[str, Any], ones: tuple[str, ...], warps: int, fusion: bool = False
) -> Any:
    """A kernel with these constants, and with 1 for the arguments in ones, which Triton makes a constant of."""
    signature: dict[str, Any] = {}
    fixed: dict[tuple[int, ...], Any] = {}
    multiples: dict[tuple[int, ...], Any] = {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants or name in ones:
            signature[name] = "constexpr"
            fixed[(index,)] = constants.get(name, 1)
        elif name in HEADS:
            parts = [(field, 1 if field == "channel" or f"{name}.{field}" in ones else None) for field in Heads._fields]
            types = ["*bf16" if field == "data" else "constexpr" if value else "i32" for field, value in parts]
            signature[name] = Heads(*types)
            fixed |= {(index, i): value for i, (_, value) in enumerate(parts) if value}
            multiples |= {(index, i): [["tt.divisibility", 16]] for i, (_, value) in enumerate(parts) if not value}
        else:
            signature[name] = TYPES.get(name, "i32")
            if signature[name].startswith("*"):
                multiples[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=fixed, attrs=multiples)
    return triton.compile(source, GPUTarget("cuda", arch, 32), {"num_warps": warps, "enable_fp_fusion": fusion})


def loops(ptx: str) -> list[str]:
    """The instructions of every loop, from its label to the branch back there."""
    found = []
    for at in re.finditer(r"^(\$L__BB\w+):", ptx, re.M):
        back = list(re.finditer(rf"\bbra\S*\s+{re.escape(at[1])};", ptx[at.end() :]))
        if back:
            found.append(ptx[at.end() : at.end() + back[-1].end()])
    return found


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
        "heads_shared": sum(len(re.findall(r"shared|bar\.", loop)) for loop in loops(ptx)),
        "divisions_64": len(re.findall(r"\b(?:div|rem)\.[su]64", ptx)),
    }


def _output(tool: str, *arguments: str) -> str:
    return subprocess.run([TOOLS / tool, *arguments], capture_output=True, text=True, check=True).stdout


def all_facts(names: list[str], compiled: Any = compiled, cases: dict[str, Any] = CASES) -> dict[str, dict[str, int]]:
    """Facts by case and architecture: all of them, unless a name ends with one, as in "norm half, sm_90"."""
    found = {}
    for name in names:
        case, _, arch = name.partition(", sm_")
        for each in (int(arch),) if arch else ARCHITECTURES:
            found[f"{case}, sm_{each}"] = facts(compiled(each, **cases[case]))
    return found


if __name__ == "__main__":
    print(json.dumps(all_facts(sys.argv[1:])))
