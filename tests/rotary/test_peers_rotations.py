"""Cases of peers' own tests of rotations, with their formulas of float32 angles and within their tolerances.

flash-attention at 0251105a, tests/test_rotary.py; TransformerEngine at d0067d0d, tests/pytorch/test_fused_rope.py;
FlashInfer at fb28d724, tests/attention/test_rope.py; vLLM 0.33, tests/kernels/core/test_pos_encoding.py, test_mrope.py,
test_xdrope.py, test_fused_qk_norm_rope.py and test_fused_qk_norm_mrope.py; SGLang 0.5.23, sgl-kernel/tests and
jit_kernel/tests/test_rope.py. Sizes that only repeat rows or heads are smaller here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from peer_cases import DEVICE, Tolerance, agree, drawn, float32_angles, normal, turned
from torch import Tensor

from mmpos import SegmentTable, Text, place
from mmpos.rotary import Norm, Rotary, apply_rotary

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
HALVES = (F16, BF16)


class Case(NamedTuple):
    """A rotation of one axis: documents of lengths from starts, heads of q and k, and what the peer allows."""

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
    """Twice what adding a number and taking it away again does to numbers below 4."""
    return Tolerance(1e-3, 2 * 4 * torch.finfo(dtype).eps)


ENGINE = {F32: Tolerance(1.3e-6, 1e-5), BF16: Tolerance(1.6e-2, 1e-5), F16: Tolerance(1e-3, 1e-5)}
VLLM = {F32: Tolerance(1.3e-6, 1e-5), BF16: Tolerance(1.6e-2, 1e-3)}
FLASHINFER, SGLANG = Tolerance(1e-3, 1e-3), Tolerance(1e-2, 1e-2)
CASES: dict[str, list[Case]] = {
    "flash-attention": [
        Case(128, width, adjacent, dtype, lengths, starts, (4, heads), flash(dtype))
        for dtype, adjacent in ((F16, False), (BF16, True))
        for width, lengths, starts, heads in (
            (128, (53,) * 4, 0, 4), (64, (53, 34, 39, 47), 23, 2), (128, (53, 34, 39, 47), (53, 0, 5, 31), 2),
            (64, (33,) * 4, (53, 0, 5, 31), 4),
        )
    ],
    "TransformerEngine": [
        Case(head_dim, int(head_dim * share), adjacent, dtype, lengths, starts, (1, 1), ENGINE[dtype])
        for dtype in (F32, BF16, F16)
        for head_dim, share, adjacent, lengths, starts in (
            (128, 0.5, False, (512, 512), 0), (256, 1.0, True, (16, 16), (3, 8)),
            (64, 1.0, False, (400, 142, 16, 518, 4), (0, 9, 2, 7, 5)),
        )
    ],
    "FlashInfer": [
        Case(head_dim, int(head_dim * share), adjacent, F16, lengths, start, (q_heads, 2), FLASHINFER)
        for head_dim, share, adjacent, lengths, start, q_heads in (
            (64, 0.25, True, (1,) * 19, 0, 2), (128, 0.5, False, (204,), 15, 4), (256, 0.75, True, (19,) * 3, 99, 2),
            (128, 1.0, False, (4,) * 3, 99, 4), (64, 1.0, True, (204, 19), 0, 4), (192, 2 / 3, True, (128,), 0, 2),
        )
    ],
    "vLLM": [
        Case(head_dim, width or head_dim, adjacent, dtype, (11, 64), (seq, 8000), (3, 3), VLLM[dtype])
        for dtype in (BF16, F32)
        for head_dim, width, adjacent, seq in (
            (64, None, False, 0), (80, 32, True, 1024), (120, None, True, 77), (256, 32, False, 4000),
        )
    ],
    "SGLang": [
        *(
            Case(head_dim, width, adjacent, BF16, (length,) * 2, 0, heads, SGLANG, theta)
            for head_dim, width, theta, adjacent, length, heads in (
                (64, 64, 8000.0, False, 32, (1, 1)), (256, 128, 1e4, False, 512, (4, 2)),
                (256, 128, 9231.0, True, 231, (4, 2)), (80, 64, 1e4, True, 64, (2, 2)),
                (112, 64, 12000.0, False, 77, (2, 1)), (160, 96, 1e4, True, 128, (6, 3)),
                (512, 128, 1e4, True, 39, (4, 2)), (128, 128, 1e4, True, 128, (32, 8)),
            )
        ),
        *(
            Case(dim, dim, dim > 128, dtype, (tokens,), 131_072 - tokens, (4, 1), SGLANG)
            for dim, dtype, tokens in ((64, BF16, 1), (128, F16, 17), (256, BF16, 129), (512, F16, 3))
        ),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("peer", "place_of_case"), [(peer, i) for peer, cases in CASES.items() for i in range(len(cases))]
)
def test_rotations_and_gradients_are_those_of_peers(peer: str, place_of_case: int) -> None:
    case = CASES[peer][place_of_case]
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
        theirs = turned(x.detach().float(), angles.cos(), sign * angles.sin(), case.adjacent).to(case.dtype)
        assert ours is not None
        agree(ours.detach(), theirs, x.detach(), case.rotary_dim // 2, case.adjacent, peer=case.peer)


MROPE: dict[str, Any] = {
    "GLM-4.1V-9B": (128, 0.5, 1e4, [8, 12, 12], False, 65536),
    "Qwen2-VL-7B": (128, 1.0, 1e6, [16, 24, 24], False, 32768),
    "Qwen2.5-VL-72B": (128, 1.0, 1e6, [16, 24, 24], False, 128000),
    "Qwen3-VL-4B": (128, 1.0, 5e6, [24, 20, 20], True, 262144),
    "four axes": (128, 1.0, 1e4, [16] * 4, False, 4096),
}
"""head_dim, share that turns, theta, mrope_section, whether axes alternate, max_position: those of vLLM."""


def section_axes(section: list[int], alternating: bool) -> Tensor:
    """(pairs,) which row of ids turns each pair."""
    axes = torch.repeat_interleave(torch.arange(len(section)), torch.tensor(section))
    if alternating:
        axes = torch.zeros_like(axes)
        for axis in (1, 2):
            axes[axis : 3 * section[axis] : 3] = axis
    return axes.to(DEVICE)


def of_sections(ids: Tensor, width: int, theta: float, axes: Tensor) -> Tensor:
    """(tokens, 1, pairs) float32 angles, each pair's by its own row of ids."""
    return float32_angles(ids, width, theta).gather(0, axes.expand(1, ids.shape[1], -1))[0][:, None]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("model", MROPE)
def test_sections_turn_as_vllms_do(model: str, dtype: torch.dtype) -> None:
    head_dim, share, theta, section, alternating, most = MROPE[model]
    width, allocation = int(head_dim * share), "mrope-interleaved" if alternating else "sections"
    rotary = Rotary(head_dim, theta, rotary_dim=width, allocation=allocation, mrope_section=section, precision="hf")
    ids = drawn(most // 4, len(section), 11)
    angles = of_sections(ids, width, theta, section_axes(section, alternating))
    q, k = (normal(11, count, head_dim, dtype=dtype) for count in (8, 2))
    for ours, x in zip(apply_rotary(q, k, ids, rotary), (q, k), strict=True):
        theirs = turned(x.float(), angles.cos(), angles.sin(), False).to(dtype)
        agree(ours, theirs, x, width // 2, False, peer=Tolerance(1.6e-2, 1e-2))
        # The native formula rounds tables, products and sums.
        native = turned(x, angles.cos().to(dtype), angles.sin().to(dtype), False)
        agree(ours, native, x, width // 2, False, phase=3.1 * torch.finfo(dtype).eps)


NORMED = [
    *((128, 128, False, dtype, None, 1e-6, 0.1) for dtype in HALVES),
    *((128, 32, True, dtype, None, 1e-5, 0.1) for dtype in HALVES),
    *((128, 128, True, dtype, [16, 24, 24], 1e-6, 0.1) for dtype in HALVES),
    (64, 64, False, BF16, [8, 12, 12], 1e-5, 0.1),
    (64, 32, True, BF16, None, 1e-5, 5.0),
    (128, 128, False, BF16, None, 1e-5, 5.0),
]
"""head_dim, rotary_dim, pairing, dtype, mrope_section, eps, and how wide weights are: 0.1 of vLLM, 5 of SGLang."""


@pytest.mark.parametrize(("dim", "width", "adjacent", "dtype", "section", "eps", "wide"), NORMED)
def test_a_norm_and_a_rotation_are_those_of_engines(
    dim: int, width: int, adjacent: bool, dtype: torch.dtype, section: Any, eps: float, wide: float
) -> None:
    pairing: Any = "adjacent" if adjacent else "half"
    ids = drawn(1000, 3 if section else 1, 7)
    axes = section_axes(section, False) if section else torch.zeros(width // 2, dtype=torch.int64, device=DEVICE)
    allocation: Any = "sections" if section else "interleaved"
    options: Any = {"axes": len(ids), "allocation": allocation, "mrope_section": section, "precision": "hf"}
    rotary = Rotary(dim, rotary_dim=width, pairing=pairing, **options)
    angles, unit = of_sections(ids, width, 1e4, axes), torch.finfo(dtype).eps / 2
    weights = [1 + wide * normal(dim, seed=seed).to(dtype) for seed in (2, 3)]
    q, k = (normal(7, count, dim, dtype=dtype) for count in (16, 4))
    peer = Tolerance(5e-2, 1e-1) if wide > 1 else Tolerance(4e-2, 4e-2) if dtype == BF16 else Tolerance(2e-3, 2e-3)
    found = apply_rotary(q, k, ids, rotary, norm=Norm(weights[0], weights[1], eps))
    for ours, x, weight in zip(found, (q, k), weights, strict=True):
        root = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
        before = x.float() * root * weight.float()
        theirs = turned(before, angles.cos(), angles.sin(), adjacent).to(dtype)
        # The sum of a square per channel, a root, a quotient, two products.
        agree(ours, theirs, before, width // 2, adjacent, before=(dim + 8) * 2.0**-24, peer=peer)
        # Two roundings before, of the unit vector and of its product; then tables, products and sums.
        rounded = (x.float() * root).to(dtype) * weight
        native = turned(rounded, angles.cos().to(dtype), angles.sin().to(dtype), adjacent)
        agree(ours, native, before, width // 2, adjacent, before=2.1 * unit, phase=3.1 * unit)


@pytest.mark.parametrize("adjacent", [False, True])
def test_shards_turn_as_those_of_context_parallel_ranks(adjacent: bool) -> None:
    """TransformerEngine gives a rank one block from the front and one from the back of each sequence."""
    pairing: Any = "adjacent" if adjacent else "half"
    rotary, lengths, starts = Rotary(64, axes=1, pairing=pairing, precision="hf"), (40, 16), (3, 9)
    positions = place(SegmentTable.from_documents([[Text(n)] for n in lengths]), "flatten", start=starts)
    for rank in range(2):
        quarters = [(start, n // 4) for n, start in zip(lengths, starts, strict=True)]
        ids = torch.cat([torch.arange(s + i * n, s + (i + 1) * n) for s, n in quarters for i in (rank, 3 - rank)])
        angles, x = float32_angles(ids.to(DEVICE), 64, 1e4)[:, None], normal(28, 3, 64, dtype=F32)
        ours, _ = apply_rotary(x, None, positions.shard(rank, 2), rotary)
        agree(ours, turned(x, angles.cos(), angles.sin(), adjacent), x, 32, adjacent, peer=ENGINE[F32])
