"""Packed q, k and v, with and without a gate: their views are rotated like separate tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rotary_oracle import heads, packed
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mmpos import Grid, InvalidInputError, SegmentTable, Text, place
from mmpos.rotary import Cache, DevicePositions, Norm, Rotary, apply_rotary, rotate_and_store, split_qkv

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WAYS = ("reference", "auto", "triton")
ROTARY = Rotary(12, rotary_dim=8)
TABLE = packed("rope-tie").slice(0, 13)
EQUAL = place(SegmentTable.from_documents([[Text(5), Grid(2, 3), Text(2)]] * 2))
HEADS: Any = {"num_heads": 3, "num_kv_heads": 2, "head_dim": 12}

pytestmark = pytest.mark.usefixtures("few_programs", "poison")


def packed_qkv(gate: bool, *rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return heads(rows or 13, 1, ((6 if gate else 3) + 4) * 12, dtype).squeeze(-2).to(DEVICE)


def separate(qkv: Tensor, gate: bool) -> tuple[Tensor, ...]:
    """Split qkv into contiguous q, k, v and gate as Qwen3NextAttention does: each q head precedes its gate."""
    rows = qkv.shape[:-1]
    q, k, v = qkv.split([36 * (2 if gate else 1), 24, 24], dim=-1)
    parts = torch.chunk(q.reshape(*rows, -1, 24), 2, dim=-1) if gate else (q.reshape(*rows, -1, 12),)
    q, *gates = (x.clone(memory_format=torch.contiguous_format) for x in parts)
    return q, k.reshape(*rows, -1, 12).clone(), v.reshape(*rows, -1, 12).clone(), *gates


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("rows", [(13,), (2, 13)])
def test_parts_are_views_in_the_order_q_with_gates_k_v(rows: Any, gate: bool) -> None:
    qkv = packed_qkv(gate, *rows)
    parts = split_qkv(qkv, gate=gate, **HEADS)
    assert (parts.gate is not None) == gate
    for part, want in zip((x for x in parts if x is not None), separate(qkv, gate), strict=True):
        assert torch.equal(part, want)
        assert part.untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_parts_are_rotated_like_separate_tensors_and_nothing_else_changes(inplace: bool, gate: bool, way: Any) -> None:
    qkv = packed_qkv(gate, 2, 13)
    before, positions = separate(qkv, gate), DevicePositions.from_table(EQUAL, DEVICE)
    options: Any = {"norm": Norm(torch.rand(12, device=DEVICE)), "implementation": way}
    want = apply_rotary(before[0], before[1], positions, ROTARY, **options)
    q, k, v, gates = split_qkv(qkv, gate=gate, **HEADS)
    out = apply_rotary(q, k, positions, ROTARY, inplace=inplace, **options)
    for got, expected in zip(out, want, strict=True):
        assert got is not None
        assert expected is not None
        assert torch.equal(got, expected)
    packed_after = (*(want if inplace else before[:2]), *before[2:])
    for part, expected in zip((x for x in (q, k, v, gates) if x is not None), packed_after, strict=True):
        assert expected is not None
        assert torch.equal(part, expected)


class Operations(TorchDispatchMode):
    """A mode that records the names of the operations that a block of code runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self.views: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        self.views.append(func.is_view)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("gate", [False, True])
def test_a_rotation_runs_one_operator_besides_views_and_copies_nothing(gate: bool) -> None:
    qkv, positions = packed_qkv(gate), DevicePositions.from_table(TABLE, DEVICE)
    q, k, v, _ = split_qkv(qkv, gate=gate, **HEADS)
    keys, values = torch.zeros(2, 16, 2, 12, device=DEVICE)
    cache = Cache(keys, values, torch.arange(13, device=DEVICE))
    calls: dict[str, Callable[[], Any]] = {
        "rotate": lambda: apply_rotary(q, k, positions, ROTARY),
        "rotate_": lambda: apply_rotary(q, k, positions, ROTARY, inplace=True),
        "rotate_and_store_": lambda: rotate_and_store(q, k, v, positions, ROTARY, cache, inplace=True),
    }
    for name, call in calls.items():
        with Operations() as seen:
            split_qkv(qkv, gate=gate, **HEADS)
            call()
        assert [n for n, view in zip(seen.names, seen.views, strict=True) if not view] == [f"mmpos::{name}"]


def test_gradients_reach_the_packed_tensor() -> None:
    qkv = packed_qkv(True).requires_grad_()
    q, k, v, gate = split_qkv(qkv, gate=True, **HEADS)
    assert gate is not None
    out = apply_rotary(q, k, TABLE, ROTARY)
    assert out[1] is not None
    grads = [torch.randn_like(x) for x in (out[0], out[1], v, gate)]
    (gradient,) = torch.autograd.grad([out[0], out[1], v, gate], qkv, grads)
    back = apply_rotary(grads[0], grads[1], TABLE, ROTARY, conjugate=True)
    for got, want in zip(separate(gradient, True), (*back, grads[2], grads[3]), strict=True):
        assert want is not None
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("qkv", "options", "message"),
    [
        (
            torch.zeros(13, 84), {"num_heads": 4},
            "qkv: got width 84, want 96 = (4 num_heads + 2·2 num_kv_heads)·12 head_dim",
        ),
        (
            torch.zeros(13, 84), {"num_kv_heads": 4},
            "qkv: got width 84, want 132 = (3 num_heads + 2·4 num_kv_heads)·12 head_dim",
        ),
        (
            torch.zeros(13, 84), {"gate": True},
            "qkv: got width 84, want 120 = (2·3 num_heads + 2·2 num_kv_heads)·12 head_dim; "
            "this width matches gate=False",
        ),
        (
            torch.zeros(2, 13, 120), {},
            "qkv: got width 120, want 84 = (3 num_heads + 2·2 num_kv_heads)·12 head_dim; this width matches gate=True",
        ),
        (torch.zeros(84), {}, "qkv: got shape (84,), want (tokens, width) or (batch, seq, width)"),
        (torch.zeros(1, 13, 7, 12), {}, "qkv: got shape (1, 13, 7, 12), want (tokens, width) or (batch, seq, width)"),
        ([[1.0]], {}, "qkv: got list, want a tensor"),
        (torch.zeros(13, 84), {"num_heads": 0}, "num_heads: got 0, want >= 1"),
        (torch.zeros(13, 84), {"num_kv_heads": -1}, "num_kv_heads: got -1, want >= 1"),
        (torch.zeros(13, 84), {"gate": "no"}, "gate: got 'no', want True or False"),
        (torch.zeros(13, 84), {"head_dim": 0}, "head_dim: got 0, want >= 1"),
    ],
)  # fmt: skip
def test_widths_shapes_and_sizes_that_do_not_match_are_refused(qkv: Any, options: Any, message: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        split_qkv(qkv, **(HEADS | options))
    assert str(refused.value) == message
