"""Compiles the rotary kernels for GPUs that need not be here, and prints as JSON what came of it.

Run by aot_facts.py in a process without Triton's interpreter: ``python aot_compile.py "table integer
half"``, ``"store: plain"`` for the kernel that stores, ``"rerotate: plain"`` for the one that turns stored keys.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mmpos.rotary import reference
from mmpos.rotary.kernel.backward import backward_kernel
from mmpos.rotary.kernel.float8 import Formats, format_of
from mmpos.rotary.kernel.rerotate import rerotate_kernel
from mmpos.rotary.kernel.rotate import rotary_kernel, store_kernel
from mmpos.rotary.kernel.tiling import Angles, Heads, channels_of, pieces_of

ARCHITECTURES = (80, 90, 100)
AMD = "gfx942"
CACHE_ROWS = 131072
HEADS = (
    "q", "k", "v", "q_grad", "k_grad", "q_out", "k_out", "key_cache", "value_cache",
    "pages", "scales", "q_scales", "k_scales", "v_scales",
)  # fmt: skip
TYPES = {
    **dict.fromkeys(("positions", "from_positions", "frequencies", "slots"), "*i64"),
    **dict.fromkeys(("q_weight", "k_weight"), "*bf16"),
    **dict.fromkeys(("q_sums", "k_sums"), "*fp32"),
    **dict.fromkeys(("attention_factor", "eps", "offset"), "fp32"),
    "pair_axis": "*i32",
}
"""Types of arguments as launches have them; all others are i32."""

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"

CASES: dict[str, dict[str, Any]] = {
    "table integer half": {},
    "table fractional half": {"mode": reference.TABLE_FRACTIONAL},
    "dense fixed half": {"mode": reference.DENSE_FIXED},
    "dense integer adjacent": {"mode": reference.DENSE_INTEGER, "adjacent": True},
    "head_dim 80 adjacent": {"pairs": 40, "adjacent": True},
    "partial half": {"pairs": 32, "rest": 64, "block": 32},
    "partial adjacent": {"pairs": 16, "rest": 96, "block": 64, "adjacent": True},
    "norm half": {"weights": "qk"},
    "norm fractional half": {"mode": reference.TABLE_FRACTIONAL, "weights": "qk"},
    "norm half, few tokens": {"block": 4, "warps": 1, "weights": "qk"},
    "norm of q half": {"weights": "q"},
    "norm partial adjacent": {"pairs": 16, "rest": 96, "adjacent": True, "weights": "qk"},
    "backward half": {"weights": "qk", "backward": True},
    "backward fractional half": {"mode": reference.TABLE_FRACTIONAL, "weights": "qk", "backward": True},
    "backward half, few tokens": {"block": 4, "warps": 1, "weights": "qk", "backward": True},
    "backward of q half": {"weights": "q", "backward": True},
    "backward head_dim 80 half": {"pairs": 40, "weights": "qk", "backward": True},
    "backward partial half": {"pairs": 32, "rest": 64, "weights": "qk", "backward": True},
    "norm after half": {"weights": "qk", "after": True},
    "norm after adjacent": {"adjacent": True, "weights": "qk", "after": True},
    "norm after head_dim 80 half": {"pairs": 40, "weights": "qk", "after": True},
    "norm after cached float32 half": {"cache": "*fp32", "weights": "qk", "after": True},
    "backward after half": {"weights": "qk", "backward": True, "after": True},
    "backward after adjacent": {"adjacent": True, "weights": "qk", "backward": True, "after": True},
    "cached float32 half": {"cache": "*fp32"},
    "cached bfloat16 adjacent": {"cache": "*bf16", "adjacent": True},
    "cached bfloat16 half, dense": {"mode": reference.DENSE_INTEGER, "cache": "*bf16"},
    "cached float16 half, few tokens": {"cache": "*fp16", "block": 4, "warps": 1},
    "by head half": {"groups": 8},
    "by head fractional adjacent": {"mode": reference.TABLE_FRACTIONAL, "adjacent": True, "groups": 8},
    "by head head_dim 80 half": {"groups": 8, "pairs": 40},
    "backward by head half": {"groups": 8, "weights": "qk", "backward": True},
    "table integer half, few tokens": {"block": 4, "warps": 1},
    "table integer half, fused": {"fusion": True},
    "table fractional half, one token": {"mode": reference.TABLE_FRACTIONAL, "ones": ("tokens", "seq", "segments")},
    "dense fixed half, one head": {
        "mode": reference.DENSE_FIXED,
        "ones": ("q_heads", "k_heads", "q.head", "row_stride"),
    },
    "store: plain": {"store": True},
    "store: fractional": {"store": True, "mode": reference.TABLE_FRACTIONAL},
    "store: norm": {"store": True, "weights": "qk"},
    "store: norm adjacent": {"store": True, "adjacent": True, "weights": "qk"},
    "store: head_dim 80": {"store": True, "pairs": 40, "values": 80},
    "store: partial": {"store": True, "pairs": 32, "rest": 64, "block": 32},
    "store: norm partial": {"store": True, "pairs": 32, "rest": 64, "weights": "qk"},
    "store: few tokens": {"store": True, "block": 4, "warps": 1, "weights": "qk"},
    "store: norm, return k": {"store": True, "return_k": True, "weights": "qk"},
    "store: by head": {"store": True, "groups": 8},
    "store: other values": {"store": True, "values": 64},
    "store: e4m3": {"store": True, "eight_bits": "kv"},
    "store: e4m3 adjacent": {"store": True, "eight_bits": "kv", "adjacent": True},
    "store: e4m3, norm, computed": {"store": True, "eight_bits": "kv", "computed": True, "weights": "qk"},
    "store: e4m3, q too, computed": {"store": True, "eight_bits": "qkv", "computed": True},
    "store: e4m3 partial, q too, norm, computed": {
        "store": True,
        "eight_bits": "qkv",
        "computed": True,
        "pairs": 32,
        "rest": 64,
        "weights": "qk",
    },
    "store: norm after": {"store": True, "weights": "qk", "after": True},
    "store: cached bfloat16": {"store": True, "cache": "*bf16"},
    "store: one of each": {
        "store": True,
        "ones": ("tokens", "seq", "segments", "q_heads", "k_heads", "stored", "block_size", "k.head"),
    },
    "rerotate: plain": {"start": reference.TABLE_INTEGER},
    "rerotate: adjacent": {"start": reference.TABLE_INTEGER, "adjacent": True},
    "rerotate: fractional": {"start": reference.TABLE_FRACTIONAL, "mode": reference.TABLE_FRACTIONAL},
    "rerotate: ids to a table": {"start": reference.DENSE_INTEGER},
    "rerotate: partial": {"start": reference.TABLE_INTEGER, "pairs": 32, "rest": 64},
    "rerotate: by head": {"start": reference.TABLE_INTEGER, "groups": 8},
    "rerotate: few tokens": {"start": reference.TABLE_INTEGER, "block": 4, "warps": 1},
    "rerotate: e4m3": {"start": reference.TABLE_INTEGER, "eight_bits": "k"},
    "rerotate: e4m3, scales of slots": {"start": reference.TABLE_INTEGER, "eight_bits": "k", "computed": True},
    "rerotate: e4m3 adjacent, scales of slots": {
        "start": reference.TABLE_INTEGER,
        "adjacent": True,
        "eight_bits": "k",
        "computed": True,
    },
    "rerotate: e5m2 partial, scales of slots": {
        "start": reference.TABLE_INTEGER,
        "pairs": 32,
        "rest": 64,
        "eight_bits": "k",
        "computed": True,
        "dtype": torch.float8_e5m2,
    },
}


def compiled(
    arch: int | str,
    *,
    mode: int = reference.TABLE_INTEGER,
    adjacent: bool = False,
    pairs: int = 64,
    rest: int = 0,
    fusion: bool = False,
    block: int = 16,
    warps: int = 4,
    ones: tuple[str, ...] = (),
    weights: str = "",
    backward: bool = False,
    store: bool = False,
    values: int = 128,
    return_k: bool = False,
    eight_bits: str = "",
    computed: bool = False,
    dtype: torch.dtype = torch.float8_e4m3fn,
    start: int | None = None,
    after: bool = False,
    cache: str = "",
    groups: int = 0,
) -> Any:
    """The kernel for bfloat16, strides that are multiples of 16, and tokens per program and warps as launched."""
    whole = channels_of(2 * pairs + rest, pairs, adjacent)
    channels = whole if weights or store or start is not None else pieces_of(2 * pairs + rest, pairs, adjacent)
    rows = block * whole.pairs_padded // channels.pairs_padded
    constants = {"CHANNELS": channels, "BLOCK": rows}
    constants |= {"ANGLES": angles(mode)._replace(cache_rows=CACHE_ROWS if cache else 0, head_groups=groups)}
    q, k, v = (format_of(dtype, computed) if x in eight_bits else None for x in "qkv")
    outputs = {"q": "q_out", "k": "key_cache", "v": "value_cache"}
    types = TYPES | {name: "*fp32" for name in HEADS if "scales" in name} | {outputs[x]: "*u8" for x in eight_bits}
    types |= {"frequencies": cache} if cache else {}
    if start is not None:
        constants |= {"FROM": angles(start)._replace(head_groups=groups), "FORMAT": k}
        constants |= {} if computed else {"scales": None}
        types["pages"] = "*u8" if eight_bits else "*bf16"
        return compiled_for(arch, rerotate_kernel, constants, ones, warps, fusion, types)
    constants["NORM_AFTER"] = after
    if store:
        constants |= {"VALUE_CHANNELS": channels_of(values, 0), "COPY_Q_REST": True, "COPY_K_REST": True}
        constants |= {"FORMATS": Formats(q, k, v)}
    else:
        constants |= {"COPY_REST": True}
    # Without weights the arguments of the norm are no parameters, and without 8 bits those of scales.
    missing = [f"{x}_{what}" for x in "qk" if x not in weights for what in ("weight", "sums")]
    missing += ([] if weights else ["eps", "offset"]) + (["k_out"] if store and not return_k else [])
    missing += [f"{x}_scales" for x in "qkv" if x not in eight_bits]
    kernel = store_kernel if store else backward_kernel if backward else rotary_kernel
    return compiled_for(arch, kernel, constants | dict.fromkeys(missing), ones, warps, fusion, types)


def angles(mode: int) -> Angles:
    """Make the angles of two axes, exact and forward."""
    from_table = mode in (reference.TABLE_INTEGER, reference.TABLE_FRACTIONAL)
    fractional = mode in (reference.TABLE_FRACTIONAL, reference.DENSE_FIXED)
    return Angles(axes=2, from_table=from_table, fractional=fractional, as_hf=False, conjugate=False, scaled=False)


def compiled_for(
    arch: int | str,
    kernel: Any,
    constants: dict[str, Any],
    ones: tuple[str, ...],
    warps: int,
    fusion: bool,
    types: dict[str, str],
) -> Any:
    """A kernel with these constants, and with 1 for the arguments in ones, which Triton makes a constant of.

    Heads are bfloat16 but for those that types names, and an arch that is a word is one of AMD's.
    """
    signature: dict[str, Any] = {}
    fixed: dict[tuple[int, ...], Any] = {}
    multiples: dict[tuple[int, ...], Any] = {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants or name in ones:
            signature[name] = "constexpr"
            fixed[(index,)] = constants.get(name, 1)
        elif name in HEADS:
            parts = [(field, 1 if field == "channel" or f"{name}.{field}" in ones else None) for field in Heads._fields]
            kind = types.get(name, "*bf16")
            fields = [kind if field == "data" else "constexpr" if value else "i32" for field, value in parts]
            signature[name] = Heads(*fields)
            fixed |= {(index, i): value for i, (_, value) in enumerate(parts) if value}
            multiples |= {(index, i): [["tt.divisibility", 16]] for i, (_, value) in enumerate(parts) if not value}
        else:
            signature[name] = types.get(name, "i32")
            if signature[name].startswith("*"):
                multiples[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=fixed, attrs=multiples)
    target = GPUTarget("hip", arch, 64) if isinstance(arch, str) else GPUTarget("cuda", arch, 32)
    return triton.compile(source, target, {"num_warps": warps, "enable_fp_fusion": fusion})


def loops(ptx: str) -> list[str]:
    """The instructions of every loop, from its label to the branch back there."""
    bodies = []
    for at in re.finditer(r"^(\$L__BB\w+):", ptx, re.M):
        back = list(re.finditer(rf"\bbra\S*\s+{re.escape(at[1])};", ptx[at.end() :]))
        if back:
            bodies.append(ptx[at.end() : at.end() + back[-1].end()])
    return bodies


def facts(kernel: Any) -> dict[str, int]:
    """Counts of instructions, and the resources of the machine code; for AMD the spills alone."""
    if "amdgcn" in kernel.asm:
        spills = re.findall(r"^\s*\.[sv]gpr_spill_count:\s*(\d+)", kernel.asm["amdgcn"], re.M)
        if len(spills) != 2:
            raise ValueError(spills)
        return {"spills": sum(map(int, spills))}
    ptx = kernel.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _output("cuobjdump", "--dump-resource-usage", file.name)
        machine = _output("nvdisasm", "-c", file.name)
    resources = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    if resources is None:
        raise ValueError(usage)
    registers, stack, local = map(int, resources.groups())
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


def all_facts(names: list[str]) -> dict[str, dict[str, int]]:
    """Facts by case and architecture: all of NVIDIA's, unless a name ends with one, as in "norm half, sm_90"."""
    by_case = {}
    for name in names:
        if name.endswith(AMD):
            by_case[name] = facts(compiled(AMD, **CASES[name.removesuffix(f", {AMD}")]))
            continue
        case, _, arch = name.partition(", sm_")
        for each in (int(arch),) if arch else ARCHITECTURES:
            by_case[f"{case}, sm_{each}"] = facts(compiled(each, **CASES[case]))
    return by_case


if __name__ == "__main__":
    print(json.dumps(all_facts(sys.argv[1:])))
