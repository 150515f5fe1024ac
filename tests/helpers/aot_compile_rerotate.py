"""Compiles the kernel that turns stored keys for GPUs that need not be here, and prints as JSON what came of it.

Run by test_rerotate_aot.py in a process without Triton's interpreter: ``python aot_compile_rerotate.py "plain"``.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from aot_compile import all_facts, angles, compiled_for

from mmpos.rotary import reference
from mmpos.rotary.kernel.quantised import format_of
from mmpos.rotary.kernel.rerotate import rerotate_kernel
from mmpos.rotary.kernel.tiling import channels_of

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "adjacent": {"adjacent": True},
    "fractional": {"mode": reference.TABLE_FRACTIONAL},
    "ids to a table": {"start": reference.DENSE_INTEGER},
    "partial": {"pairs": 32, "rest": 64},
    "few tokens": {"block": 4, "warps": 1},
    "e4m3": {"dtype": torch.float8_e4m3fn},
    "e4m3, scales of slots": {"dtype": torch.float8_e4m3fn, "scales": True},
    "e4m3 adjacent, scales of slots": {"dtype": torch.float8_e4m3fn, "scales": True, "adjacent": True},
    "e5m2 partial, scales of slots": {"dtype": torch.float8_e5m2, "scales": True, "pairs": 32, "rest": 64},
}


def compiled(
    arch: int | str,
    *,
    mode: int = reference.TABLE_INTEGER,
    start: int | None = None,
    adjacent: bool = False,
    pairs: int = 64,
    rest: int = 0,
    block: int = 16,
    warps: int = 4,
    dtype: torch.dtype | None = None,
    scales: bool = False,
) -> Any:
    """The kernel for strides that are multiples of 16, and tokens per program and warps as launched."""
    constants = {
        "CHANNELS": channels_of(2 * pairs + rest, pairs, adjacent),
        "FROM": angles(mode if start is None else start),
        "ANGLES": angles(mode),
        "FORMAT": None if dtype is None else format_of(dtype, scales),
        "BLOCK": block,
    }
    constants |= {} if scales else {"scales": None}
    data = {"pages": "*bf16" if dtype is None else "*u8", "scales": "*fp32"}
    return compiled_for(arch, rerotate_kernel, constants, (), warps, data=data)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        if name.endswith(", gfx942"):
            compiled("gfx942", **CASES[name.removesuffix(", gfx942")])
    print(json.dumps(all_facts([name for name in sys.argv[1:] if "gfx" not in name], compiled, CASES)))
