"""Compiles the rotary kernels for GPUs that need not be here, and prints as JSON what came of it.

Run by test_kernels_compiled.py in a process without the interpreter: ``python aot_compile.py "norm after, sm_90"``.
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

WORDS: dict[str, dict[str, Any]] = {
    "rotate": {},
    "norm": {"weights": "qk"},
    "backward": {"weights": "qk", "backward": True},
    "store": {"store": True},
    "rerotate": {"start": reference.TABLE_INTEGER},
    "adjacent": {"adjacent": True},
    "after": {"after": True},
    "by head": {"groups": 8},
    "cached bfloat16": {"cache": "*bf16"},
    "computed": {"computed": True},
    "scales": {"computed": True},
    "dense": {"mode": reference.DENSE_INTEGER},
    "dense fixed": {"mode": reference.DENSE_FIXED},
    "e4m3": {"eight_bits": "kv"},
    "e5m2": {"eight_bits": "k", "dtype": torch.float8_e5m2},
    "few tokens": {"block": 4, "warps": 1},
    "fractional": {"mode": reference.TABLE_FRACTIONAL},
    "from ids": {"start": reference.DENSE_INTEGER},
    "fused": {"fusion": True},
    "head_dim 80": {"pairs": 40},
    "of q": {"weights": "q"},
    "one token": {"mode": reference.TABLE_FRACTIONAL, "ones": ("tokens", "seq", "segments", "q_heads", "q.head")},
    "other values": {"values": 64},
    "partial": {"pairs": 32, "rest": 64},
    "q too": {"eight_bits": "qkv"},
    "return k": {"return_k": True},
}
"""Options by the words in the name of a case."""


def options_of(case: str) -> dict[str, Any]:
    """Read the options of a case by its words, one behind the other, the longest first."""
    options: dict[str, Any] = {}
    rest = case.replace(",", "").strip()
    while rest:
        word = max((word for word in WORDS if f"{rest} ".startswith(f"{word} ")), key=len)
        options |= WORDS[word]
        rest = rest[len(word) :].strip()
    return options


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
    block = 32 if rest and block == 16 and not weights else block
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
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", machine)),
        "loads_128": len(re.findall(r"\bLDG\.E[.\w]*\.128\b", machine)),
        "stores_128": len(re.findall(r"\bSTG\.E[.\w]*\.128\b", machine)),
        "narrow_stores": len(re.findall(r"\bSTG\.E\b(?![.\w]*\.128)", machine)),
        "float64": len(re.findall(r"\.f64\b", ptx)) + len(re.findall(r"\b(?:DADD|DMUL|DFMA|F2F\.F64)", machine)),
        "fma": len(re.findall(r"\bfma\.", ptx)) + len(re.findall(r"\bFFMA", machine)),
        "heads_shared": sum(len(re.findall(r"shared|bar\.", loop)) for loop in loops(ptx)),
        "divisions_64": len(re.findall(r"\b(?:div|rem)\.[su]64", ptx)),
    }


def _output(tool: str, *arguments: str) -> str:
    return subprocess.run([TOOLS / tool, *arguments], capture_output=True, text=True, check=True).stdout


def main(names: list[str]) -> dict[str, dict[str, int]]:
    """Compile every case, "norm after, sm_90", and count."""
    by_case = {}
    for name in names:
        case, arch = name.rsplit(", ", 1)
        made = compiled(int(arch.removeprefix("sm_")) if arch.startswith("sm_") else arch, **options_of(case))
        by_case[name] = facts(made)
    return by_case


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
