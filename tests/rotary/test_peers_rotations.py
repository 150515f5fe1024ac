"""Test cases from the rotary tests of other projects, with their float32 angle formulas and tolerances.

flash-attention at 0251105a, tests/test_rotary.py; TransformerEngine at d0067d0d, tests/pytorch/test_fused_rope.py;
FlashInfer at fb28d724, tests/attention/test_rope.py; vLLM 0.33, tests/kernels/core/test_pos_encoding.py; SGLang 0.5.23,
sgl-kernel/tests and jit_kernel/tests/test_rope.py. Two cases from each, with fewer rows and heads where they repeat.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from peer_cases import DEVICE, Tolerance, assert_rotations_agree, float32_angles, normal, rotate_pairs

from mmpos import SegmentTable, Text, place
from mmpos.rotary import Rotary, apply_rotary

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


class Case(NamedTuple):
    """A rotation with one axis: document lengths and start ids, numbers of q and k heads, and the peer's tolerance."""

    head_dim: int
    rotary_dim: int
    adjacent: bool
    dtype: torch.dtype
    lengths: tuple[int, ...]
    starts: tuple[int, ...] | int
    heads: tuple[int, int]
    peer: Tolerance
    theta: float = 1e4


def flash(dtype: torch.dtype) -> Tolerance:
    """Return twice the rounding error of adding and subtracting a constant, for numbers below 4."""
    return Tolerance(1e-3, 2 * 4 * torch.finfo(dtype).eps)


FLASHINFER, SGLANG = Tolerance(1e-3, 1e-3), Tolerance(1e-2, 1e-2)
CASES: dict[str, Case] = {
    "flash-attention, half": Case(128, 128, False, F16, (53, 34, 39, 47), (53, 0, 5, 31), (4, 2), flash(F16)),
    "flash-attention, adjacent": Case(128, 64, True, BF16, (53, 34, 39, 47), 23, (4, 2), flash(BF16)),
    "TransformerEngine, half": Case(128, 64, False, F32, (512, 512), 0, (1, 1), Tolerance(1.3e-6, 1e-5)),
    "TransformerEngine, adjacent": Case(256, 256, True, BF16, (16, 16), (3, 8), (1, 1), Tolerance(1.6e-2, 1e-5)),
    "FlashInfer, a quarter": Case(64, 16, True, F16, (1,) * 19, 0, (2, 2), FLASHINFER),
    "FlashInfer, two thirds": Case(192, 128, False, F16, (128,), 0, (2, 2), FLASHINFER),
    "vLLM, half": Case(120, 120, False, F32, (11, 64), (77, 8000), (3, 3), Tolerance(1.3e-6, 1e-5)),
    "vLLM, adjacent": Case(80, 32, True, BF16, (11, 64), (1024, 8000), (3, 3), Tolerance(1.6e-2, 1e-3)),
    "SGLang, another theta": Case(256, 128, True, BF16, (231,) * 2, 0, (4, 2), SGLANG, 9231.0),
    "SGLang, far away": Case(512, 512, True, F16, (3,), 131_069, (4, 1), SGLANG),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_rotations_and_gradients_agree_with_peers(case: Case) -> None:
    positions = place(SegmentTable.from_documents([[Text(n)] for n in case.lengths]), "flatten", start=case.starts)
    pairing: Any = "adjacent" if case.adjacent else "half"
    options: Any = {"axes": 1, "rotary_dim": case.rotary_dim, "pairing": pairing, "precision": "hf"}
    rotary = Rotary(case.head_dim, case.theta, **options)
    angles = float32_angles(torch.from_numpy(positions.dense()[0]).to(DEVICE), case.rotary_dim, case.theta)[:, None]
    q, k, *grads = (
        normal(positions.num_tokens, heads, case.head_dim, dtype=case.dtype, seed=seed)
        for seed, heads in enumerate(2 * case.heads)
    )
    outs = apply_rotary(q.requires_grad_(), k.requires_grad_(), positions, rotary)
    back = torch.autograd.grad([x for x in outs if x is not None], (q, k), grads)
    for ours, x, sign in (*zip(outs, (q, k), (1, 1), strict=True), *zip(back, grads, (-1, -1), strict=True)):
        theirs = rotate_pairs(x.detach().float(), angles.cos(), sign * angles.sin(), case.adjacent).to(case.dtype)
        assert ours is not None
        assert_rotations_agree(ours.detach(), theirs, x.detach(), case.rotary_dim // 2, case.adjacent, peer=case.peer)
