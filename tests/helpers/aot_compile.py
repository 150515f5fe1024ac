"""Compiles the rotary kernels for GPUs that need not be here, and prints as JSON what came of it.

Run by test_rotary_aot.py in a process without Triton's interpreter: ``python aot_compile.py "table integer half"``.
With ``--record`` it keeps which instructions plain rotations are compiled to, as they are now, in aot_digests.json.
"""

from __future__ import annotations

import hashlib
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
from mmpos.rotary.kernel.backward import backward_kernel
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
    "backward half": {"mode": phases.TABLE_INTEGER, "weights": "qk", "backward": True},
    "backward adjacent": {"mode": phases.TABLE_INTEGER, "adjacent": True, "weights": "qk", "backward": True},
    "backward fractional half": {"mode": phases.TABLE_FRACTIONAL, "weights": "qk", "backward": True},
    "backward half, few tokens": {
        "mode": phases.TABLE_INTEGER,
        "block": 4,
        "warps": 1,
        "weights": "qk",
        "backward": True,
    },
    "backward of q half": {"mode": phases.TABLE_INTEGER, "weights": "q", "backward": True},
    "backward head_dim 80 half": {"mode": phases.TABLE_INTEGER, "pairs": 40, "weights": "qk", "backward": True},
    "backward partial half": {
        "mode": phases.TABLE_INTEGER,
        "pairs": 32,
        "rest": 64,
        "weights": "qk",
        "backward": True,
    },
    "backward partial adjacent": {
        "mode": phases.TABLE_INTEGER,
        "pairs": 16,
        "rest": 96,
        "adjacent": True,
        "weights": "qk",
        "backward": True,
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
    backward: bool = False,
) -> Any:
    """The kernel for bfloat16, strides that are multiples of 16, and tokens per program and warps as launched."""
    constants: dict[Any, Any] = {
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
    constants |= {f"{x}_{what}": None for x in "qk" if x not in weights for what in ("weight", "sums")}
    if not weights:
        constants |= {"eps": None, "offset": None}
    kernel = backward_kernel if backward else rotary_kernel
    signature: dict[str, Any] = {}
    multiples: dict[tuple[int, ...], Any] = {}
    for index, name in enumerate(kernel.arg_names):
        if name.endswith("_dim") or name in ones:
            constants[name] = 1  # as Triton treats every argument that is 1
        signature[name] = "constexpr" if name in constants else type_of(name)
        if signature[name][0] == "*" or name.endswith(("_batch", "_token", "_head")):
            multiples[(index,)] = [["tt.divisibility", 16]]
        if name.endswith("_strides"):
            constants[(index, 3)] = 1
            multiples |= {(index, dimension): [["tt.divisibility", 16]] for dimension in range(3)}
    constants = {key: value for key, value in constants.items() if not isinstance(key, str) or key in signature}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=multiples)
    return triton.compile(source, GPUTarget("cuda", arch, 32), {"num_warps": warps, "enable_fp_fusion": fusion})


def type_of(name: str) -> str | tuple[str, ...]:
    """The type of an argument, as launches have it."""
    if name.endswith("_strides"):
        return "i32", "i32", "i32", "constexpr"
    types = dict.fromkeys(("positions", "frequencies"), "*i64") | {"pair_axis": "*i32"}
    types |= dict.fromkeys(("q", "k", "q_grad", "k_grad", "q_out", "k_out", "q_weight", "k_weight"), "*bf16")
    types |= dict.fromkeys(("q_sums", "k_sums"), "*fp32") | dict.fromkeys(("attention_factor", "eps", "offset"), "fp32")
    return types.get(name, "i32")


def loops(ptx: str) -> list[str]:
    """The instructions of every loop, from its label to the branch back there."""
    found = []
    for at in re.finditer(r"^(\$L__BB\w+):", ptx, re.M):
        back = list(re.finditer(rf"\bbra\S*\s+{re.escape(at[1])};", ptx[at.end() :]))
        if back:
            found.append(ptx[at.end() : at.end() + back[-1].end()])
    return found


def digest(ptx: str) -> int:
    """A number that stands for the instructions alone: neither lines of source nor names of files and functions."""
    code = re.sub(r"//.*", "", ptx.split(".section")[0])
    lines = [line.strip() for line in code.splitlines()]
    kept = [line for line in lines if line and not re.match(r"\.(loc|file)\b|\$L__(tmp|func)", line)]
    return int(hashlib.sha256("\n".join(kept).encode()).hexdigest()[:12], 16)


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
        "digest": digest(ptx),
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
    if sys.argv[1:] == ["--record"]:
        plain = all_facts([name for name in CASES if not name.startswith(("norm", "backward"))])
        digests = {case: found["digest"] for case, found in plain.items()}
        record = json.dumps({"triton": triton.__version__, "digests": digests}, indent=1)
        Path(__file__).with_name("aot_digests.json").write_text(record + "\n")
    else:
        print(json.dumps(all_facts(sys.argv[1:])))
