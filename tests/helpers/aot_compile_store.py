"""Compiles the kernel that stores for GPUs that need not be here, and prints as JSON what came of it.

Run by test_rotary_store_aot.py in a process without Triton's interpreter: ``python aot_compile_store.py "plain"``.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from aot_compile import CACHE_ROWS, all_facts, angles, compiled_for

from mmpos.rotary import reference
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
    "norm after": {"weights": "qk", "after": True},
    "cached bfloat16": {"cache": "*bf16"},
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
    after: bool = False,
    cache: str = "",
) -> Any:
    """The kernel for bfloat16, strides that are multiples of 16, and tokens per program and warps as launched."""
    constants = {
        "CHANNELS": channels_of(2 * pairs + rest, pairs, adjacent),
        "VALUE_CHANNELS": channels_of(values, 0),
        "ANGLES": angles(mode)._replace(cache_rows=CACHE_ROWS if cache else 0),
        "COPY_Q_REST": True,
        "COPY_K_REST": True,
        "BLOCK": block,
        "NORM_AFTER": after,
    }
    missing = [f"{x}_weight" for x in "qk" if x not in weights]
    missing += ([] if weights else ["eps", "offset"]) + ([] if return_k else ["k_out"])
    types = {"frequencies": cache} if cache else {}
    return compiled_for(arch, store_kernel, constants | dict.fromkeys(missing), ones, warps, types=types)


if __name__ == "__main__":
    print(json.dumps(all_facts(sys.argv[1:], compiled, CASES)))
