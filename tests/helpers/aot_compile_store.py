"""Compiles the kernel that stores for GPUs that need not be here, and prints as JSON what came of it.

Run by test_rotary_store_aot.py in a process without Triton's interpreter: ``python aot_compile_store.py "plain"``.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import triton
from aot_compile import all_facts
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mmpos.rotary import phases
from mmpos.rotary.kernel.store import store_kernel

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "fractional": {"mode": phases.TABLE_FRACTIONAL},
    "norm": {"weights": "qk"},
    "norm adjacent": {"adjacent": True, "weights": "qk"},
    "head_dim 80": {"pairs": 40, "values": 80},
    "partial": {"pairs": 32, "rest": 64, "block": 32},
    "norm partial": {"pairs": 32, "rest": 64, "weights": "qk"},
    "few tokens": {"block": 4, "warps": 1, "weights": "qk"},
    "norm, return k": {"return_k": True, "weights": "qk"},
    "other values": {"values": 64},
    "one of each": {"ones": ("tokens", "seq", "segments", "q_heads", "k_heads", "stored", "block_size", "k_head")},
}


def compiled(
    arch: int,
    *,
    mode: int = phases.TABLE_INTEGER,
    adjacent: bool = False,
    pairs: int = 64,
    rest: int = 0,
    values: int = 128,
    block: int = 16,
    warps: int = 4,
    weights: str = "",
    return_k: bool = False,
    ones: tuple[str, ...] = (),
) -> Any:
    """The kernel for bfloat16, strides that are multiples of 16, and tokens per program and warps as launched."""
    constants: dict[str, Any] = {
        "PAIRS": pairs,
        "PAIRS_PADDED": triton.next_power_of_2(pairs),
        "REST": rest,
        "REST_PADDED": triton.next_power_of_2(max(rest, 1)),
        "VALUES": values,
        "VALUES_PADDED": triton.next_power_of_2(values),
        "AXES": 2,
        "MODE": mode,
        "AS_HF": False,
        "ADJACENT": adjacent,
        "SCALED": False,
        "COPY_Q_REST": True,
        "COPY_K_REST": True,
        "BLOCK": block,
    }
    constants |= {f"{x}_weight": None for x in "qk" if x not in weights}
    constants |= {} if weights else {"eps": None, "offset": None}
    constants |= {} if return_k else {"k_out": None}
    tensors = ("q", "k", "v", "q_out", "k_out", "key_cache", "value_cache", "q_weight", "k_weight")
    types = dict.fromkeys(tensors, "*bf16") | dict.fromkeys(("positions", "frequencies", "slots"), "*i64")
    types |= {"pair_axis": "*i32", "attention_factor": "fp32", "eps": "fp32", "offset": "fp32"}
    signature, multiples = {}, {}
    for index, name in enumerate(store_kernel.arg_names):
        if name.endswith("_dim") or name in ones:
            constants[name] = 1  # as Triton treats every argument that is 1
        signature[name] = "constexpr" if name in constants else types.get(name, "i32")
        if signature[name].startswith("*") or name.endswith(("_batch", "_token", "_head", "_block", "_place")):
            multiples[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(store_kernel, signature, constexprs=constants, attrs=multiples)
    return triton.compile(source, GPUTarget("cuda", arch, 32), {"num_warps": warps, "enable_fp_fusion": False})


if __name__ == "__main__":
    print(json.dumps(all_facts(sys.argv[1:], compiled, CASES)))
