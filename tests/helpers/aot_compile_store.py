"""Compiles the kernel that stores for GPUs that need not be here, and prints as JSON what came of it.

Run by test_rotary_store_aot.py in a process without Triton's interpreter: ``python aot_compile_store.py "plain"``.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from aot_compile import all_facts, angles, compiled_for

from mmpos.rotary import reference
from mmpos.rotary.kernel.quantised import Formats, format_of
from mmpos.rotary.kernel.rotate import store_kernel
from mmpos.rotary.kernel.tiling import channels_of

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "fractional": {"mode": reference.TABLE_FRACTIONAL},
    "norm": {"weights": "qk"},
    "norm adjacent": {"adjacent": True, "weights": "qk"},
    "head_dim 80": {"pairs": 40, "values": 80},
    "partial": {"pairs": 32, "rest": 64, "block": 32},
    "norm partial": {"pairs": 32, "rest": 64, "weights": "qk"},
    "few tokens": {"block": 4, "warps": 1, "weights": "qk"},
    "norm, return k": {"return_k": True, "weights": "qk"},
    "other values": {"values": 64},
    "e4m3": {"eight_bits": "kv"},
    "e4m3 adjacent": {"eight_bits": "kv", "adjacent": True},
    "e4m3, norm, computed": {"eight_bits": "kv", "computed": True, "weights": "qk"},
    "e4m3, q too, computed": {"eight_bits": "qkv", "computed": True},
    "e4m3 partial, q too, norm, computed": {
        "eight_bits": "qkv",
        "computed": True,
        "pairs": 32,
        "rest": 64,
        "weights": "qk",
    },
    "one of each": {"ones": ("tokens", "seq", "segments", "q_heads", "k_heads", "stored", "block_size", "k.head")},
}


def compiled(
    arch: int | str,
    *,
    mode: int = reference.TABLE_INTEGER,
    adjacent: bool = False,
    pairs: int = 64,
    rest: int = 0,
    values: int = 128,
    block: int = 16,
    warps: int = 4,
    weights: str = "",
    return_k: bool = False,
    ones: tuple[str, ...] = (),
    eight_bits: str = "",
    computed: bool = False,
) -> Any:
    """The kernel for bfloat16, strides that are multiples of 16, and tokens per program and warps as launched."""
    constants = {
        "CHANNELS": channels_of(2 * pairs + rest, pairs, adjacent),
        "VALUE_CHANNELS": channels_of(values, 0),
        "ANGLES": angles(mode),
        "FORMATS": Formats(*(format_of(torch.float8_e4m3fn, computed) if x in eight_bits else None for x in "qkv")),
        "COPY_Q_REST": True,
        "COPY_K_REST": True,
        "BLOCK": block,
    }
    missing = [f"{x}_weight" for x in "qk" if x not in weights]
    missing += ([] if weights else ["eps", "offset"]) + ([] if return_k else ["k_out"])
    missing += [f"{x}_scales" for x in "qkv" if x not in eight_bits]
    outputs = {"q": "q_out", "k": "key_cache", "v": "value_cache"}
    data = dict.fromkeys((f"{x}_scales" for x in "qkv"), "*fp32")
    data |= {outputs[x]: "*u8" for x in eight_bits}
    return compiled_for(arch, store_kernel, constants | dict.fromkeys(missing), ones, warps, data=data)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        if name.endswith(", gfx942"):
            compiled("gfx942", **CASES[name.removesuffix(", gfx942")])
    print(json.dumps(all_facts([name for name in sys.argv[1:] if ", gfx" not in name], compiled, CASES)))
