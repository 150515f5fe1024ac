"""Compile the rotary kernels as calls launch them, for GPUs that may be absent, and print counts as JSON.

test_kernels_compiled.py runs it in a process without the interpreter: ``python aot_compile.py "norm after, sm_90"``.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from mmpos import PositionTable, SegmentTable, Text, place
from mmpos.rotary import Cache, Norm, Rotary, apply_rotary, rerotate, rotate_and_store
from mmpos.rotary.kernel import tiling

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"

ARCHS = ("sm_80", "sm_90", "sm_100", "gfx942")


def stand_in(arch: str) -> SimpleNamespace:
    """Return a Triton driver for an absent GPU, so that kernels can be compiled for that GPU."""
    target = GPUTarget("cuda", int(arch[3:]), 32) if arch.startswith("sm_") else GPUTarget("hip", arch, 64)
    return SimpleNamespace(
        utils=SimpleNamespace(get_device_properties=lambda _: {"max_shared_mem": 227 << 10}),
        get_current_target=lambda: target,
        get_current_device=lambda: ARCHS.index(arch),  # Triton caches one target per device
        get_current_stream=lambda device: 0,
    )


def compiled(case: str, arch: str) -> Any:
    """Return the last kernel launched by a bfloat16 call with 32 heads of q and 8 of k."""
    words, kernels = set(case.replace(",", "").split()), []

    def launch(kernel: Any, grid: tuple[int, int], warps: int, *arguments: Any, **constants: Any) -> None:
        options = {"num_warps": warps, "enable_fp_fusion": "fused" in words}
        kernels.append(kernel.warmup(*arguments, **constants, grid=grid, **options))

    tiling.launch = launch
    driver.set_active(stand_in(arch))
    call(words)
    return kernels[-1]


def call(words: set[str]) -> None:
    """Make the call described by the words."""
    tokens = 1 if "one-token" in words else 64 if "few-tokens" in words else 4096
    dim, values = 80 if "head_dim-80" in words else 128, 64 if "other-values" in words else 128
    scheme = "rope-tie-fractional" if words & {"fractional", "one-token"} else "rope-tie"
    table = place(SegmentTable.from_documents([[Text(tokens)]]), scheme)
    positions: PositionTable | Tensor = table
    if words & {"dense", "dense-fixed"}:
        positions = torch.zeros(2, tokens, dtype=torch.float64 if "dense-fixed" in words else torch.int64)
    by_head: Any = {"allocation": "heads", "head_axes": [0, 1] * 4} if "by-head" in words else {}
    if "own-frequencies" in words:
        by_head = {"kv_heads": 8, "allocation": [0, 1] * (dim * 2)}
    pairing: Any = "adjacent" if "adjacent" in words else "half"
    rotary = Rotary(dim, rotary_dim=64 if "partial" in words else dim, axes=2, pairing=pairing, **by_head)
    q, k, v = (heads(tokens, count, size) for count, size in ((32, dim), (8, dim), (8, values)))
    weight = torch.ones(dim, dtype=torch.bfloat16) if words & {"norm", "backward", "of-q"} else None
    norm = Norm(weight, None if "of-q" in words else weight, after="after" in words)
    options: Any = {"norm": norm, "implementation": "triton"}
    pages, slots = torch.zeros(256, 16, 8, dim, dtype=torch.bfloat16), torch.arange(tokens)
    if "rerotate" in words:
        start = torch.zeros(2, tokens, dtype=torch.int64) if "from-ids" in words else table
        rerotate(pages, slots, start, table, rotary, implementation="triton")
    elif "store" in words:
        cache = Cache(pages, torch.zeros(256, 16, 8, values, dtype=torch.bfloat16), slots)
        rotate_and_store(q, k, v, positions, rotary, cache, return_k="return-k" in words, **options)
    elif "backward" in words:
        out = apply_rotary(q.requires_grad_(), k.requires_grad_(), positions, rotary, **options)
        assert weight is not None
        torch.autograd.grad([x for x in out if x is not None], (q, k), [heads(tokens, n, dim) for n in (32, 8)])
    else:
        options["cos_sin"] = torch.ones(131072, dim, dtype=torch.bfloat16) if "cached-bfloat16" in words else None
        apply_rotary(q, k, positions, rotary, **options)


def heads(tokens: int, count: int, dim: int) -> Tensor:
    """Return bfloat16 heads filled with zeros."""
    return torch.zeros(tokens, count, dim, dtype=torch.bfloat16)


def loops(ptx: str) -> list[str]:
    """Return each loop's instructions, from its label to the last branch back to the label."""
    bodies = []
    for at in re.finditer(r"^(\$L__BB\w+):", ptx, re.M):
        back = list(re.finditer(rf"\bbra\S*\s+{re.escape(at[1])};", ptx[at.end() :]))
        if back:
            bodies.append(ptx[at.end() : at.end() + back[-1].end()])
    return bodies


def facts(kernel: Any) -> dict[str, int]:
    """Count the instructions and resources of a kernel's machine code; for AMD, count only the spills."""
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
    """Compile each case, such as "norm after, sm_90", and return its counts."""
    return {name: facts(compiled(*name.rsplit(", ", 1))) for name in names}


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # checked only on entry to the kernels, which are no longer interpreted
    print(json.dumps(main(sys.argv[1:])))
