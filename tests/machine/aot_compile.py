"""Compile the rotary kernels as calls launch them, for GPUs that may be absent, and print counts as JSON.

test_compiled_kernels.py runs it in a process without the interpreter: ``python aot_compile.py one``.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import launches
import triton
from launches import BF16, KINDS, Launch, Scene
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from mmpos.rotary.kernel import tiling

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"

ARCHS = ("sm_80", "sm_90", "sm_100", "gfx942")


def full(kind: str = "rotate", turning: str = "interleaved", **options: Any) -> Launch:
    """Describe a launch of 4096 tokens or the given number, with 32 heads of q and 8 of k."""
    layer = "by head" if turning in ("by head", "own frequencies") else "7B"
    return Launch(kind, **{"tokens": 4096, "turning": turning, "layer": layer, **options})


ADJACENT, OWN = {"turning": "adjacent"}, {"turning": "own frequencies"}
FRACTIONS, PARTIAL = {"form": "fractions"}, {"turning": "half of a head"}
NORM: dict[str, Any] = {"norm": "qk"}
SETS: Mapping[str, list[tuple[str, Launch]]] = {
    "one": [("sm_90", full(**NORM))],
    # 16-bit heads are loaded and stored exclusively in pieces of 16 bytes.
    "wide": [
        ("sm_90", full()), ("sm_100", full(**FRACTIONS)), ("sm_80", full(form="int64", **ADJACENT)),
        ("sm_90", full(form="float64")), ("sm_100", full(layer="vision", **ADJACENT)), ("sm_80", full(tokens=64)),
        ("sm_90", full(turning="by head", **FRACTIONS)), ("sm_90", full(**OWN)),
        ("sm_100", full("cached", weights=BF16, **ADJACENT)),
        ("sm_80", full(**NORM, **FRACTIONS)), ("sm_90", full(**NORM, after=True, layer="vision")),
        ("sm_100", full(norm="q", tokens=64)), ("sm_80", full(**NORM, **OWN)),
        ("sm_80", full("backward", **NORM)), ("sm_90", full("backward", **NORM, after=True, **ADJACENT)),
        ("sm_100", full("backward", "by head", **NORM, **FRACTIONS)), ("sm_100", full("backward", **NORM, **OWN)),
        ("sm_80", full("store")), ("sm_90", full("store", **NORM, **ADJACENT, return_k=True)),
        ("sm_100", full("store", value_dim=64, tokens=64)),
        ("sm_90", full("rerotate")), ("sm_80", full("rerotate", **FRACTIONS)), ("sm_90", full("rerotate", **OWN)),
    ],
    "narrow": [
        ("sm_90", full(tokens=1, **PARTIAL, **FRACTIONS)), ("sm_80", full(**NORM, **PARTIAL)),
        ("sm_100", full("backward", **NORM, **PARTIAL)), ("sm_90", full("store", **PARTIAL)),
        ("sm_100", full("rerotate", **PARTIAL)),
    ],
    "fused": [("sm_80", full())],
    "amd": [("gfx942", full("backward", **NORM, after=True)), ("gfx942", full("store", **NORM)),
            ("gfx942", full("rerotate"))],
}  # fmt: skip
"""Architectures and launches."""


def stand_in(arch: str) -> SimpleNamespace:
    """Return a Triton driver for an absent GPU, so that kernels can be compiled for that GPU."""
    target = GPUTarget("cuda", int(arch[3:]), 32) if arch.startswith("sm_") else GPUTarget("hip", arch, 64)
    return SimpleNamespace(
        utils=SimpleNamespace(get_device_properties=lambda _: {"max_shared_mem": 227 << 10}),
        get_current_target=lambda: target,
        get_current_device=lambda: ARCHS.index(arch),  # Triton caches one target per device
        get_current_stream=lambda device: 0,
    )


def compiled(arch: str, launch: Launch, fused: bool) -> Any:
    """Return the last kernel that a launch compiles, with products and sums fused or not."""
    kernels = []

    def compile_only(kernel: Any, grid: tuple[int, int], warps: int, *arguments: Any, **constants: Any) -> None:
        options = {"num_warps": warps, "enable_fp_fusion": fused}
        kernels.append(kernel.warmup(*arguments, **constants, grid=grid, **options))

    tiling.launch = compile_only
    driver.set_active(stand_in(arch))
    KINDS[launch.kind](Scene(launch))
    return kernels[-1]


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


def main(names: list[str]) -> dict[str, list[dict[str, Any]]]:
    """Compile sets of launches, and return what identifies each and its counts."""
    launches.LAYERS |= {"7B": (32, 8, 128), "by head": (32, 8, 128), "vision": (32, 8, 80)}
    launches.BY_HEAD[:] = [0, 1] * 4
    return {
        name: [
            {"case": f"{launch}, {arch}", "kernel": "norm" if launch.kind == "rotate" and launch.norm else launch.kind}
            | facts(compiled(arch, launch, name == "fused"))
            for arch, launch in SETS[name]
        ]
        for name in names
    }


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # checked only on entry to the kernels, which are no longer interpreted
    print(json.dumps(main(sys.argv[1:])))
