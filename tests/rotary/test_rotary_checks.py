"""Argument checks of rotations: every invalid call raises an mmpos error that names the argument."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rotary_oracle import heads
from torch import Tensor
from torch.autograd import forward_ad

from mmpos import Grid, InvalidInputError, LimitExceededError, SegmentTable, Text, UnsupportedError, place
from mmpos.rotary import (
    Cache,
    DevicePositions,
    Norm,
    Rotary,
    angles,
    apply_rotary,
    memory,
    rerotate,
    rotate_and_store,
    split_qkv,
)
from mmpos.rotary import cos_sin as tables_of

ROTARY = Rotary(head_dim=16)
FOUR_HEADS = Rotary(16, allocation="heads", head_axes=[1, 0, 1, 0])
POSITIONS = place(SegmentTable.from_documents([[Text(3), Grid(2, 3), Text(2)], [Text(5)]]))
EQUAL = place(SegmentTable.from_documents([[Text(2), Grid(2, 3)], [Text(8)]]))
FOUR = place(SegmentTable.from_documents([[Text(4)]] * 4))
DEVICE = DevicePositions.from_table(POSITIONS)
IDS = torch.from_numpy(POSITIONS.dense())


def zeros(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    return torch.zeros(shape, dtype=dtype, device=device)


def packed(heads: int = 2, head_dim: int = 16, **options: Any) -> Any:
    return zeros(16, heads, head_dim, **options)


def calls(q: Any, k: Any = None, positions: Any = DEVICE, rotary: Any = ROTARY, **options: Any) -> Callable[[], Any]:
    return lambda: apply_rotary(q, k, positions, rotary, **options)


def ids(*values: float, dtype: torch.dtype) -> Tensor:
    """Return the ids of sixteen tokens on two axes; the last axis ends with these values."""
    x = torch.zeros(2, 16, dtype=dtype)
    x[1, 16 - len(values) :] = torch.tensor(values, dtype=dtype)
    return x


def fused(q_from: int, k_from: int) -> tuple[Tensor, Tensor]:
    """Return q with four heads and k with two heads as views of one eight-head buffer."""
    buffer = zeros(16, 8, 16)
    return buffer[:, q_from : q_from + 4], buffer[:, k_from : k_from + 2]


def normed(**norm: Any) -> Callable[[], Any]:
    return lambda: apply_rotary(packed(), packed(), DEVICE, ROTARY, norm=Norm(**norm))


THIRTEEN = place(SegmentTable.from_documents([[Text(3), Grid(2, 3), Text(2)], [Text(2)]]), "mrope")
SECTIONS = Rotary(20, rotary_dim=12, axes=3, allocation="sections", mrope_section=[2, 3, 1])


def by_cache(cos_sin: Any, positions: Any = THIRTEEN, rotary: Rotary = SECTIONS) -> Callable[[], Any]:
    return calls(zeros(13, 2, 20), zeros(13, 1, 20), positions, rotary, cos_sin=cos_sin)


THREE_AXES, ZEROS = Rotary(12, axes=3), torch.zeros(13, 84)
FIELDS = {"cache_layout": "layout"} | {name: name for name in Cache._fields}


def stores(**changed: Any) -> Callable[[], Any]:
    """Return a call to rotate_and_store whose arguments and cache fields are valid, except for the changed ones."""
    q, k, v = (heads(13, n, 12, seed=n) for n in (3, 2, 2))
    arguments: dict[str, Any] = {"q": q, "k": k, "v": v, "positions": THIRTEEN, "rotary": THREE_AXES}
    arguments |= {"slot_mapping": torch.arange(13)}
    arguments |= {name: zeros(4, 16, 2, 12) for name in ("key_cache", "value_cache")}
    arguments |= changed
    cache = {field: arguments.pop(name) for name, field in FIELDS.items() if name in arguments and name != "layout"}
    return lambda: rotate_and_store(cache=Cache(**cache), **arguments)


def moves(**changed: Any) -> Callable[[], None]:
    """Return a call to rerotate whose arguments are valid, except for the changed ones."""
    arguments: dict[str, Any] = {"k_cache": zeros(4, 16, 2, 12), "slots": torch.arange(13), "rotary": THREE_AXES}
    arguments |= {"from_positions": THIRTEEN, "to_positions": THIRTEEN}
    return lambda: rerotate(**(arguments | changed))


def splits(qkv: Any = ZEROS, **changed: Any) -> Callable[[], Any]:
    return lambda: split_qkv(qkv, **({"num_heads": 3, "num_kv_heads": 2, "head_dim": 12} | changed))


BY_SLOT, BY_HEAD, BOTH, SAME = zeros(4, 16, 2, 12), zeros(4, 2, 16, 12), zeros(4, 16, 2, 24), zeros(13, 2, 12)
ROW, QKV, POOL = zeros(2000), zeros(13, 7, 12), zeros(64, 7, 12)
WANT_NHD = "want (blocks, block_size, 2, 12) or (slots, 2, 12) in layout NHD"
WANT_PAGES = "want (blocks, block_size, heads, 12) or (slots, heads, 12) in layout NHD"
WANT_V = "want torch.float32 on cpu with 3 as for k"
WANT_ROWS = "want (max_position, 12), cos of all pairs of rotary, then sin"
WANT_Q = "want a tensor of float32, bfloat16 or float16"

BAD_EPS: list[Any] = [0.0, 1e-39, float("nan"), float("inf"), 1e39, 10**400, "1e-6"]
NESTED = torch.nested.nested_tensor([zeros(2, 8), zeros(3, 8)], layout=torch.jagged)
BAD_OFFSETS: list[Any] = [float("inf"), -1e39, "1"]

# Error messages, and the calls that raise them.
REFUSALS: dict[str, list[Callable[[], Any]]] = {
    "q: got head_dim 32, want 16 as in rotary": [calls(packed(head_dim=32))],
    "k: got shape (16, 2, 32), want (16, 2, 16) as for q, except for the heads": [calls(packed(), packed(head_dim=32))],
    f"q: got NoneType, {WANT_Q}": [calls(None, packed())],
    f"q: got torch.float64, {WANT_Q}": [calls(packed(dtype=torch.float64))],
    f"q: got TensorWithoutStrides, {WANT_Q}":
        [calls(packed().to_sparse()), calls(packed().to_sparse(), inplace=True), calls(NESTED)],
    "positions: got TensorWithoutStrides, want DevicePositions, a PositionTable or a tensor of ids":
        [calls(packed(), positions=IDS.to_sparse())],
    "qkv: got TensorWithoutStrides, want a tensor": [splits(ZEROS.to_sparse())],
    "slots: got TensorWithoutStrides, want a tensor of int32 or int64": [moves(slots=torch.arange(13).to_sparse())],
    "k: got torch.bfloat16 on cpu with 3 dimensions, want torch.float32 on cpu with 3 as for q":
        [calls(packed(), packed(dtype=torch.bfloat16))],
    "k: got torch.float32 on meta with 3 dimensions, want torch.float32 on cpu with 3 as for q":
        [calls(packed(), packed(device="meta"))],
    "k: got torch.float32 on cpu with 3 dimensions, want torch.float32 on cpu with 4 as for q":
        [calls(zeros(1, 16, 2, 16), packed())],
    "k: got shape (15, 2, 16), want (16, 2, 16) as for q, except for the heads": [calls(packed(), zeros(15, 2, 16))],
    "q: got shape (16, 16), want (tokens, heads, head_dim) or (batch, seq, heads, head_dim)": [calls(zeros(16, 16))],
    "q: got shape (1, 16, 2, 16), want (tokens, heads, head_dim)": [calls(zeros(1, 16, 2, 16), layout="thd")],
    "q: got shape (16, 2, 16), want (batch, seq, heads, head_dim)": [calls(packed(), layout="bshd")],
    "q: got shape (16, 2, 16), want (batch, heads, seq, head_dim)": [calls(packed(), layout="bhsd")],
    "layout: got 'sbhd', want one of 'thd', 'bshd', 'bhsd'": [calls(packed(), layout="sbhd")],
    "positions: got NoneType, want DevicePositions, a PositionTable or a tensor of ids":
        [calls(packed(), positions=None)],
    "positions: got 2 axes, want 3 as in rotary": [
        calls(packed(), rotary=Rotary(16, axes=3)),
        *(partial(table, Rotary(16, axes=3), POSITIONS) for table in (tables_of, angles)),
    ],
    "layout: got 'llama', want one of 'pairs', 'transformers', 'torchtitan'": [
        lambda: tables_of(ROTARY, DEVICE, layout="llama")  # type: ignore[arg-type]
    ],
    "positions: got ndarray, want a PositionTable": [
        lambda: DevicePositions.from_table(POSITIONS.dense()),  # type: ignore[arg-type]
        lambda: DEVICE.refresh(POSITIONS.dense()),  # type: ignore[arg-type]
    ],
    "positions: got 1 axis, want 2 as in rotary": [calls(packed(), positions=IDS[:1])],
    "positions: got 16 tokens, want 15 as in q": [calls(zeros(15, 2, 16))],
    "positions: got 15 tokens, want 16 as in q": [calls(packed(), positions=IDS[:, 1:])],
    (
        "k: got shape (2, 2, 8, 16), want (2, 4, 8, 16) as for q, except for the heads; "
        'if heads come before seq, pass layout="bhsd"'
    ): [calls(zeros(2, 4, 8, 16), zeros(2, 2, 8, 16))],
    "positions: got 34 tokens, want 8 as in q; heads and seq may be swapped: see layout":
        [calls(zeros(2, 4, 17, 16), positions=torch.zeros(2, 2, 17, dtype=torch.int32))],
    "positions: got 16 tokens, want 8 as in q; heads and seq may be swapped: see layout":
        [calls(zeros(2, 8, 4, 16), positions=torch.zeros(2, 2, 8, dtype=torch.int32), layout="bhsd")],
    "positions: got shape (16,), want (axes, tokens) or (axes, batch, seq)": [calls(packed(), positions=IDS[0])],
    "positions: got shape (0, 16), want (axes, tokens) or (axes, batch, seq)": [calls(packed(), positions=IDS[:0])],
    "positions: got documents of unequal tokens, want 8, the seq of q; pad the table, or use layout thd": [
        calls(zeros(2, 8, 2, 16)),
        calls(zeros(2, 8, 2, 16), positions=POSITIONS),
    ],
    "positions: got documents of 4 tokens, want 8, the seq of q; pad the table, or use layout thd": [
        calls(zeros(2, 8, 2, 16), positions=FOUR),
        calls(zeros(2, 2, 8, 16), positions=IDS.reshape(2, 4, 4), layout="bhsd"),
    ],
    "positions: got a tensor on meta, want cpu as for q": [calls(packed(), positions=DEVICE.to("meta"))],
    "positions: got ids from 0 to 2147483648, want finite ids within int32":
        [calls(packed(), positions=ids(2**31, dtype=torch.int64))],
    "positions: got ids from -inf to 0, want finite ids within int32":
        [calls(packed(), positions=ids(-float("inf"), dtype=torch.float64))],
    "positions: got ids from nan to nan, want finite ids within int32":
        [calls(packed(), positions=ids(float("nan"), dtype=torch.float64))],
    "q: got a tensor whose elements share memory, want inplace=False":
        [calls(zeros(16, 1, 16).expand(16, 2, 16), inplace=True)],
    "k: got a tensor whose elements share memory, want inplace=False":
        [calls(packed(), zeros(1000).as_strided((16, 2, 16), (24, 16, 1)), inplace=True)],
    "k: got the memory of q, want inplace=False": [
        calls(x := packed(), x, inplace=True),
        *(
            calls(*fused(q_from, k_from), inplace=True)
            for q_from, k_from in ((0, 0), (0, 2), (0, 3), (1, 0), (4, 3), (4, 6))
        ),
        calls(ROW.as_strided((16, 1, 16), (64, 16, 1)), ROW.as_strided((16, 2, 16), (64, 16, 1), 48), inplace=True),
    ],
    "implementation: got 'cuda', want one of 'auto', 'reference', 'triton'": [calls(packed(), implementation="cuda")],
    "inplace: got 'no', want True or False": [calls(packed(), inplace="no")],
    "conjugate: got [], want True or False": [calls(packed(), conjugate=[])],
    "rotary: got NoneType, want a Rotary, as returned by mmpos.rotary.Rotary": [
        calls(packed(), rotary=None),
        *(partial(table, None, DEVICE) for table in (tables_of, angles)),  # type: ignore[arg-type]
    ],
    "norm.q_weight: got shape (12,), want (16,)": [normed(q_weight=torch.ones(12))],
    "norm.k_weight: got shape (1, 16), want (16,)": [normed(k_weight=torch.ones(1, 16))],
    f"norm.q_weight: got torch.float64, {WANT_Q}": [normed(q_weight=torch.ones(16).double())],
    "norm.k_weight: got a tensor on meta, want cpu as for k": [normed(k_weight=torch.ones(16).to("meta"))],
    "norm.after: got 'after', want True or False": [normed(q_weight=torch.ones(16), after="after")],
    "norm.k_weight: got a weight without k, want None": [calls(packed(), norm=Norm(k_weight=torch.ones(16)))],
    "norm: got Tensor, want a Norm, as returned by mmpos.rotary.Norm": [calls(packed(), norm=torch.ones(16))],
    "cos_sin: got 7 rows, want > 7, the largest id": [
        by_cache(zeros(7, 12)),
        by_cache(zeros(7, 12), DevicePositions.from_table(THIRTEEN)),
    ],
    "positions: got id -1, want >= 0, because the rows of cos_sin begin at id 0":
        [by_cache(zeros(9, 12), torch.from_numpy(THIRTEEN.dense()) - 1)],
    "positions: got fractional ids, want integers, the only ids with rows in cos_sin":
        [by_cache(zeros(9, 12), torch.from_numpy(THIRTEEN.dense()).double())],
    f"cos_sin: got shape (9, 20), {WANT_ROWS}": [by_cache(zeros(9, 20))],
    f"cos_sin: got shape (0, 12), {WANT_ROWS}": [by_cache(zeros(0, 12))],
    f"cos_sin: got torch.float64, {WANT_Q}": [by_cache(zeros(9, 12).double())],
    "cos_sin: got a tensor on meta, want cpu as for q": [by_cache(zeros(9, 12, device="meta"))],
    "cos_sin: got strides (1, 9), want a contiguous tensor": [by_cache(zeros(12, 9).T)],
    "cos_sin requires a rotary whose pair j has the j-th frequency, got allocation 'axial', whose axes have their own "
    "frequencies": [by_cache(zeros(9, 12), rotary=Rotary(20, rotary_dim=12, axes=3, allocation="axial"))],
    "qkv: got width 84, want 96 = (4 num_heads + 2·2 num_kv_heads)·12 head_dim": [splits(num_heads=4)],
    "qkv: got width 84, want 120 = (2·3 num_heads + 2·2 num_kv_heads)·12 head_dim; this width matches gate=False":
        [splits(gate=True)],
    "qkv: got width 120, want 84 = (3 num_heads + 2·2 num_kv_heads)·12 head_dim; this width matches gate=True":
        [splits(zeros(2, 13, 120))],
    "qkv: got shape (84,), want (tokens, width) or (batch, seq, width)": [splits(zeros(84))],
    "qkv: got shape (1, 13, 7, 12), want (tokens, width) or (batch, seq, width)": [splits(zeros(1, 13, 7, 12))],
    "qkv: got list, want a tensor": [splits([[1.0]])],
    "num_heads: got 0, want >= 1": [splits(num_heads=0)],
    "num_kv_heads: got -1, want >= 1": [splits(num_kv_heads=-1)],
    "head_dim: got 0, want >= 1": [splits(head_dim=0)],
    "gate: got 'no', want True or False": [splits(gate="no")],
    "k: got None, want a tensor; use apply_rotary to rotate q alone": [stores(k=None)],
    "return_k: got 'yes', want True or False": [stores(return_k="yes")],
    "v: got NoneType, want a tensor of torch.float32 as for k": [stores(v=None)],
    f"v: got torch.float16 on cpu with 3 dimensions, {WANT_V}": [stores(v=heads(13, 2, 12, torch.float16))],
    "v: got shape (13, 3, 12), want (13, 2, 12) as for k, except for head_dim": [stores(v=heads(13, 3, 12))],
    "v: got shape (12, 2, 12), want (13, 2, 12) as for k, except for head_dim": [stores(v=heads(12, 2, 12))],
    "cache.layout: got 'NDH', want one of 'NHD', 'HND'": [stores(cache_layout="NDH")],
    "key_cache: got NoneType, want a tensor of torch.float32 as for k": [stores(key_cache=None)],
    "value_cache: got torch.bfloat16, want a tensor of torch.float32 as for v":
        [stores(value_cache=zeros(4, 16, 2, 12, dtype=torch.bfloat16))],
    "key_cache: got a tensor on meta, want cpu as for k": [stores(key_cache=torch.empty(4, 16, 2, 12, device="meta"))],
    f"key_cache: got shape (4, 2, 16, 12), {WANT_NHD}": [stores(key_cache=BY_HEAD)],
    "key_cache: got shape (4, 16, 2, 12), want (blocks, 2, block_size, 12) or (slots, 2, 12) in layout HND":
        [stores(cache_layout="HND")],
    f"value_cache: got shape (4, 16, 2, 8), {WANT_NHD}": [stores(value_cache=zeros(4, 16, 2, 8))],
    f"key_cache: got shape (4, 0, 2, 12), {WANT_NHD}": [stores(key_cache=zeros(4, 0, 2, 12))],
    "value_cache: got 8 blocks of 8 slots, want 4 of 16 as for key_cache": [stores(value_cache=zeros(8, 8, 2, 12))],
    "slot_mapping: got list, want a tensor of int32 or int64": [stores(slot_mapping=[1])],
    "slot_mapping: got a tensor on meta, want cpu as for q":
        [stores(slot_mapping=torch.zeros(13, dtype=torch.int64, device="meta"))],
    "slot_mapping: got shape (14,), want at most (13,), the token count of q": [stores(slot_mapping=torch.arange(14))],
    "slot_mapping[2]: got 64, want < 64, the number of slots of key_cache":
        [stores(slot_mapping=torch.tensor([0, -1, 64, 65]))],
    "slot_mapping[4]: got 9, the slot of token 2, want a slot for each token":
        [stores(slot_mapping=torch.tensor([-1, 5, 9, -1, 9, 7, 5, 9]))],
    "slot_mapping[0]: got 0, want < 0, the number of slots of key_cache":
        [stores(key_cache=zeros(0, 16, 2, 12), value_cache=zeros(0, 16, 2, 12))],
    "k: got the memory of v, want separate memory": [
        stores(k=SAME, v=SAME, inplace=True, return_k=True),
        stores(k=QKV[:, 3:5], v=QKV[:, 4:6], inplace=True, return_k=True),
    ],
    "key_cache: got the memory of value_cache, want separate memory": [
        stores(key_cache=BOTH[..., :12], value_cache=BOTH[..., :12]),
        stores(key_cache=BOTH[..., :12], value_cache=BOTH[..., 6:18]),
    ],
    "value_cache: got a tensor whose elements share memory, want separate elements":
        [stores(value_cache=zeros(4, 1, 2, 12).expand(4, 16, 2, 12))],
    "key_cache: got the memory of k, want separate memory":
        [stores(k=POOL[:13, :2], key_cache=POOL[:, :2], value_cache=POOL[:, 5:])],
    "key_cache: got the memory of v, want separate memory":
        [stores(v=POOL[5:18, 1:3], key_cache=POOL[:, :2], value_cache=POOL[:, 5:])],
    "q: got a tensor whose elements share memory, want separate elements":
        [stores(q=heads(13, 1, 12).expand(13, 3, 12), inplace=True)],
    "q: got the memory of k, want separate memory": [stores(q=QKV[:, :3], k=QKV[:, 2:4], inplace=True)],
    f"k_cache: got NoneType, {WANT_Q}": [moves(k_cache=None)],
    f"k_cache: got shape (4, 16, 2, 8), {WANT_PAGES}": [moves(k_cache=torch.zeros(4, 16, 2, 8))],
    "k_cache: got a tensor whose elements share memory, want separate elements":
        [moves(k_cache=torch.zeros(4, 1, 2, 12).expand(4, 16, 2, 12))],
    "to_positions: got a tensor on meta, want cpu as for k_cache":
        [moves(to_positions=torch.zeros(3, 13, dtype=torch.int64, device="meta"))],
    "from_positions: got NoneType, want DevicePositions, a PositionTable or a tensor of ids":
        [moves(from_positions=None)],
    "to_positions: got 12 tokens, want 13 as in from_positions": [moves(to_positions=THIRTEEN.slice(0, 12))],
    "from_positions: got 2 axes, want 3 as in rotary": [moves(from_positions=EQUAL.slice(0, 13))],
    "slots: got shape (14,), want at most (13,), the token count of from_positions": [moves(slots=torch.arange(14))],
    "k: got 2 heads, want 4 as head_axes in rotary": [calls(packed(4), packed(2), rotary=FOUR_HEADS)],
    "q: got 6 heads, want a multiple of 4 as head_axes in rotary": [calls(packed(6), rotary=FOUR_HEADS)],
    "k_cache: got 1 head, want 4 as head_axes in rotary":
        [moves(k_cache=zeros(64, 1, 16), from_positions=FOUR, to_positions=FOUR, rotary=FOUR_HEADS)],
    **{
        f"positions: got dtype {dtype}, want int32, int64 or float64 ids": [calls(packed(), positions=IDS.to(dtype))]
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.bool, torch.uint8)
    },
    **{
        f"norm.eps: got {eps!r}, want an int or float from 2⁻¹²⁶ to 2¹²⁷": [normed(q_weight=torch.ones(16), eps=eps)]
        for eps in BAD_EPS
    },
    **{
        f"norm.offset: got {offset!r}, want an int or float from -2¹²⁷ to 2¹²⁷":
            [normed(q_weight=torch.ones(16), offset=offset)]
        for offset in BAD_OFFSETS
    },
}  # fmt: skip


ALIKE = "got a rotary with head_axes, want one whose heads all rotate alike"
NEGATIVE = torch.view_as_complex(torch.zeros(16, 2, 16, 2)).conj().imag
UNSUPPORTED: dict[str, Callable[[], Any]] = {
    f"layout 'torchtitan': {ALIKE}": lambda: tables_of(FOUR_HEADS, POSITIONS, "torchtitan"),
    f"angles: {ALIKE}": lambda: angles(FOUR_HEADS, POSITIONS),
    "angles: got precision 'hf', want 'exact'; wrapped angles would differ from those of Transformers": (
        lambda: angles(Rotary(16, precision="hf"), POSITIONS)
    ),
    "q: got a negative view, want inplace=False": calls(NEGATIVE, inplace=True),
    "cos_sin: got a tensor that requires gradients, want one that does not": by_cache(zeros(9, 12).requires_grad_()),
}


@pytest.mark.parametrize("message", UNSUPPORTED)
def test_unsupported_calls_raise_a_precise_error(message: str) -> None:
    with pytest.raises(UnsupportedError, match=f"^{re.escape(message)}$"):
        UNSUPPORTED[message]()


@pytest.mark.parametrize("message", REFUSALS)
def test_invalid_input_raises_a_precise_error(message: str) -> None:
    for call in REFUSALS[message]:
        with pytest.raises(InvalidInputError, match=f"^{re.escape(message)}$"):
            call()


@pytest.mark.parametrize("inplace", [False, True])
def test_tensors_on_the_meta_device_do_not_share_memory(inplace: bool) -> None:
    q, k = packed(3, device="meta"), packed(2, device="meta")
    outs = apply_rotary(q, k, POSITIONS, ROTARY, inplace=inplace)
    meta = {"q": zeros(13, 3, 12), **dict.fromkeys("kv", SAME), **dict.fromkeys(("key_cache", "value_cache"), BY_SLOT)}
    meta = {name: torch.empty_like(x, device="meta") for name, x in meta.items()}
    stored = stores(**meta, slot_mapping=torch.arange(13, device="meta"), return_k=True, inplace=inplace)()
    shapes = [(x.shape, x.device.type) for x in (*outs, *stored)]
    assert shapes == [(shape, "meta") for shape in ((16, 3, 16), (16, 2, 16), (13, 3, 12), (13, 2, 12))]
    with pytest.raises(InvalidInputError, match=r"^k: got the memory of q, want inplace=False$"):
        apply_rotary(q, q, POSITIONS, ROTARY, inplace=True)


@pytest.mark.parametrize("value", ["0", "", None])
def test_triton_on_a_cpu_requires_its_interpreter(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    if value is not None:
        monkeypatch.setenv("TRITON_INTERPRET", value)
    message = "implementation: got 'triton' for tensors on cpu, want 'reference'"
    with pytest.raises(InvalidInputError, match=f"^{message}$"):
        apply_rotary(packed(), None, DEVICE, ROTARY, implementation="triton")


def test_the_largest_and_smallest_ids_are_accepted() -> None:
    for dtype in (torch.int64, torch.float64):
        assert apply_rotary(packed(), None, ids(2**31 - 1, -(2**31), dtype=dtype), ROTARY)[0].shape == (16, 2, 16)
    apply_rotary(packed(), None, ids(2**31 - 0.5, dtype=torch.float64), ROTARY, validate=True)


NAMES = ("angles", "apply_rotary", "cos_sin", "rerotate", "rotate_and_store", "DevicePositions", "Norm")
ROTATE = "apply_rotary(torch.ones(3, 1, 8), None, torch.arange(6).reshape(2, 3), Rotary(head_dim=8)"
WITHOUT: dict[str, tuple[str, str, list[str]]] = {
    "rotations": ("torch", "", [f"mmpos.rotary.{name}" for name in NAMES]),
    "attention": (
        "torch", "assert mmpos.encodings.Sinusoidal(4).table(0).tolist() == [0, 1, 0, 1]",
        ["mmpos.encodings.SelfAttention"],
    ),
    'implementation "triton"': (
        "triton", f"import torch; from mmpos.rotary import apply_rotary; {ROTATE})",
        [f'{ROTATE}, implementation="triton")'],
    ),
}  # fmt: skip
"""For each user, the package that it needs, code that works without it, and expressions that report the pip command."""


@pytest.mark.parametrize("user", WITHOUT)
def test_without_a_package_the_rest_works_and_the_error_contains_the_pip_command(user: str) -> None:
    package, works, refused = WITHOUT[user]
    want = 'install it with: pip install "multimodal-positions[all]" (in a clone: pip install ".[all]")'
    code = f"""
import os, sys
sys.modules["{package}"], os.environ["TRITON_INTERPRET"] = None, "1"
import mmpos.rotary
from mmpos.rotary import Rotary
assert Rotary(head_dim=8).pair_axis.tolist() == [0, 1, 0, 1]
{works}
for expression in {refused}:
    try:
        eval(expression)
    except ImportError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == (f"{user}: {package} is not installed; {want}\n" * len(refused), "")


TENSORS: dict[str, tuple[tuple[int, ...], Callable[[Any], Callable[[], Any]]]] = {
    "inplace: got q": ((16, 2, 16), lambda x: calls(x, packed(), inplace=True)),
    "inplace: got k": ((16, 2, 16), lambda x: calls(packed(), x, inplace=True)),
    "inplace: got norm.q_weight": ((16,), lambda x: calls(packed(), packed(), norm=Norm(x), inplace=True)),
    "inplace: got norm.k_weight": ((16,), lambda x: calls(packed(), packed(), norm=Norm(None, x), inplace=True)),
    "q": ((13, 3, 12), lambda x: stores(q=x)),
    "k": ((13, 2, 12), lambda x: stores(k=x)),
    "v": ((13, 2, 12), lambda x: stores(v=x)),
    "key_cache": ((4, 16, 2, 12), lambda x: stores(key_cache=x)),
    "value_cache": ((4, 16, 2, 12), lambda x: stores(value_cache=x)),
    "k_cache": ((4, 16, 2, 12), lambda x: moves(k_cache=x)),
    "norm.q_weight": ((12,), lambda x: stores(norm=Norm(x))),
    "norm.k_weight": ((12,), lambda x: stores(norm=Norm(None, x))),
    "cos_sin": ((9, 12), by_cache),
}
"""The names of tensors in error messages, their shapes, and calls that take them."""


@pytest.mark.parametrize("name", [name for name in TENSORS if name != "cos_sin"])
def test_calls_in_place_and_stores_under_autograd_are_not_supported(name: str) -> None:
    shape, make = TENSORS[name]
    call, want = make(torch.ones(shape).requires_grad_()), "got a tensor that requires gradients, want torch.no_grad()"
    message = f"{name} that requires gradients, want inplace=False" if "inplace" in name else f"{name}: {want}"
    with pytest.raises(UnsupportedError, match=f"^{re.escape(message)}$") as caught:
        call()
    assert isinstance(caught.value, NotImplementedError)
    with torch.no_grad():
        call()


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")  # torch warns when forward mode loads its formulas
@pytest.mark.parametrize("name", ["q", "norm.k_weight", "cos_sin", "v", "key_cache"])
def test_forward_mode_gradients_are_refused(name: str) -> None:
    shape, make = TENSORS[name]
    x = torch.ones(shape)
    with pytest.raises(UnsupportedError, match=f"^{name}: got a forward-mode tangent, want reverse-mode gradients$"):
        torch.func.jvp(lambda x: make(x)()[0], (x,), (x,))
    with pytest.raises(UnsupportedError, match=f"^{name}: got a forward-mode tangent"), forward_ad.dual_level():
        make(forward_ad.make_dual(x, x.clone()))()


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")
def test_tangents_are_detected_without_a_current_level_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(16, 2, 16)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x.clone())
        monkeypatch.setattr(memory, "forward_ad", SimpleNamespace(unpack_dual=forward_ad.unpack_dual))
        assert memory.has_tangent(dual)
        assert not memory.has_tangent(x)


@pytest.mark.parametrize("name", ["key_cache", "k_cache"])
def test_caches_with_2_to_the_31_slots_exceed_the_limit(name: str) -> None:
    cache = torch.zeros(1).expand(2**27, 16, 2, 12)
    call = moves(k_cache=cache) if name == "k_cache" else stores(key_cache=cache, value_cache=cache)
    with pytest.raises(LimitExceededError, match=f"^{name}: got 2147483648 slots, want <= 2147483647$"):
        call()


def test_tensors_that_are_only_read_may_share_memory() -> None:
    same = heads(13, 2, 12)
    assert stores(k=same, v=same, inplace=True)()[1] is None
    assert stores(k=same, v=same, return_k=True)()[1].shape == same.shape


def test_slots_on_a_device_are_checked_only_with_validate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # values are not checked, as on a device
    beyond, twice = torch.tensor([3, 64]), torch.tensor([3, 2, -1, -1, 3])
    stores(slot_mapping=beyond)()
    moves(slots=twice)()
    with pytest.raises(InvalidInputError, match=r"^slot_mapping\[1\]: got 64, want < 64, the number of slots"):
        stores(slot_mapping=beyond, validate=True)()
    with pytest.raises(InvalidInputError, match=r"^slots\[4\]: got 3, the slot of token 0, want"):
        moves(slots=twice, validate=True)()
