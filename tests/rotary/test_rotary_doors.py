"""Doors of rotations: every refusal is an error of mmpos that says what, got and want, and nothing is written."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from rotary_oracle import heads
from torch import Tensor

from mmpos import (
    Grid,
    InvalidInputError,
    LimitExceededError,
    MmposError,
    SegmentTable,
    Text,
    UnsupportedError,
    place,
)
from mmpos.rotary import Cache, DevicePositions, Norm, Rotary, angles, apply_rotary, rerotate, rotate_and_store
from mmpos.rotary import cos_sin as tables_of

ROTARY = Rotary(head_dim=16)
POSITIONS = place(SegmentTable.from_documents([[Text(3), Grid(2, 3), Text(2)], [Text(5)]]))
EQUAL = place(SegmentTable.from_documents([[Text(2), Grid(2, 3)], [Text(8)]]))
FOUR = place(SegmentTable.from_documents([[Text(4)]] * 4))
DEVICE = DevicePositions.from_table(POSITIONS)
IDS = torch.from_numpy(POSITIONS.dense())


def zeros(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    return torch.zeros(shape, dtype=dtype, device=device)


def packed(heads: int = 2, head_dim: int = 16, **options: Any) -> Any:
    return zeros(16, heads, head_dim, **options)


def calls(q: Any, k: Any = None, positions: Any = DEVICE, rotary: Rotary = ROTARY, **options: Any) -> Callable[[], Any]:
    return lambda: apply_rotary(q, k, positions, rotary, **options)


def ids(*values: float, dtype: torch.dtype) -> Tensor:
    """Two axes and sixteen tokens, of which the last ones have these ids."""
    found = torch.zeros(2, 16, dtype=dtype)
    found[1, 16 - len(values) :] = torch.tensor(values, dtype=dtype)
    return found


def fused(q_from: int, k_from: int) -> tuple[Tensor, Tensor]:
    """q with four heads and k with two, views of one buffer of eight heads."""
    buffer = zeros(16, 8, 16)
    return buffer[:, q_from : q_from + 4], buffer[:, k_from : k_from + 2]


def normed(**norm: Any) -> Callable[[], Any]:
    return calls(packed(), packed(), norm=Norm(**norm))


def ones(*shape: int) -> Any:
    return torch.ones(shape)


THIRTEEN = place(SegmentTable.from_documents([[Text(3), Grid(2, 3), Text(2)], [Text(2)]]), "mrope")
SECTIONS = Rotary(20, rotary_dim=12, axes=3, allocation="sections", mrope_section=[2, 3, 1])


def by_cache(cos_sin: Any, positions: Any = THIRTEEN, rotary: Rotary = SECTIONS) -> Callable[[], Any]:
    return calls(zeros(13, 2, 20), zeros(13, 1, 20), positions, rotary, cos_sin=cos_sin)


THREE_AXES = Rotary(12, axes=3)
FIELDS = {"cache_layout": "layout"} | {name: name for name in Cache._fields}


def stores(**changed: Any) -> Callable[[], Any]:
    """rotate_and_store with good arguments and fields of the cache but for some."""
    q, k, v = (heads(13, n, 12, seed=n) for n in (3, 2, 2))
    good: dict[str, Any] = {"q": q, "k": k, "v": v, "positions": THIRTEEN, "rotary": THREE_AXES}
    good |= {"slot_mapping": torch.arange(13), "key_cache": zeros(4, 16, 2, 12), "value_cache": zeros(4, 16, 2, 12)}
    good |= changed
    cache = {field: good.pop(name) for name, field in FIELDS.items() if name in good and name != "layout"}
    return lambda: rotate_and_store(cache=Cache(**cache), **good)


def eights(**changed: Any) -> Callable[[], Any]:
    """rotate_and_store into caches of 8 bits."""
    good: dict[str, Any] = {"k_scale": torch.ones(()), "v_scale": torch.ones(2)}
    good |= {name: zeros(4, 16, 2, 12).to(E4M3) for name in ("key_cache", "value_cache")}
    return stores(**(good | changed))


def moves(**changed: Any) -> Callable[[], None]:
    """Rerotate with good arguments but for some."""
    good: dict[str, Any] = {"k_cache": zeros(4, 16, 2, 12), "slots": torch.arange(13), "rotary": THREE_AXES}
    good |= {"from_positions": THIRTEEN, "to_positions": THIRTEEN}
    return lambda: rerotate(**(good | changed))


def scaled_moves(scale: Any, **changed: Any) -> Callable[[], None]:
    return moves(**{"k_cache": EIGHT, "k_scale": scale, **changed})


E4M3 = torch.float8_e4m3fn
EIGHT = zeros(4, 16, 2, 12).to(E4M3)
BY_HEAD, BOTH, SAME = zeros(4, 2, 16, 12), zeros(4, 16, 2, 24), zeros(13, 2, 12)
QKV, POOL, ROWS = zeros(13, 7, 12), zeros(64, 7, 12), zeros(4, 16, 2)
PAGES = torch.zeros(4, 16, 2, 16, dtype=torch.uint8)
INLINE, INSIDE = PAGES[..., 12:].view(torch.float32)[..., 0], PAGES[..., 8:12].view(torch.float32)[..., 0]
WANT_NHD = "want (blocks, block_size, 2, 12) or (slots, 2, 12) in layout NHD"
WANT_PAGES = "want (blocks, block_size, heads, 12) or (slots, heads, 12) in layout NHD"
WANT_V = "want torch.float32 on cpu with 3 as k"
WANT_SCALE = "want () or (1,), (2,), one for each head, or (4, 16, 2), one for each slot and head, which are written"
WANT_ROWS = "want (max_position, 12), cos and then sin of each pair of rotary"
WANT_LADDER = "whose axes have frequencies of their own, want one whose pair j has the j-th frequency, as the cache has"
WANT_Q = "want a tensor of float32, bfloat16 or float16"
REFUSALS: dict[str, tuple[Callable[[], Any], str]] = {
    # q and k
    "head_dim": (calls(packed(head_dim=32)), "q: got head_dim 32, want 16 as in rotary"),
    "head_dim of k": (
        calls(packed(), packed(head_dim=32)),
        "k: got shape (16, 2, 32), want that of q, (16, 2, 16), but for the heads",
    ),
    "no q": (calls(None, packed()), f"q: got NoneType, {WANT_Q}"),
    "float64 q": (calls(packed(dtype=torch.float64)), f"q: got torch.float64, {WANT_Q}"),
    "dtypes": (
        calls(packed(), packed(dtype=torch.bfloat16)),
        "k: got torch.bfloat16 on cpu with 3 dimensions, want torch.float32 on cpu with 3 as q",
    ),
    "devices": (
        calls(packed(), packed(device="meta")),
        "k: got torch.float32 on meta with 3 dimensions, want torch.float32 on cpu with 3 as q",
    ),
    "tokens of k": (
        calls(packed(), zeros(15, 2, 16)),
        "k: got shape (15, 2, 16), want that of q, (16, 2, 16), but for the heads",
    ),
    # layouts
    "two dimensions": (
        calls(zeros(16, 16)),
        "q: got shape (16, 16), want (tokens, heads, head_dim) or (batch, seq, heads, head_dim)",
    ),
    "thd": (calls(zeros(1, 16, 2, 16), layout="thd"), "q: got shape (1, 16, 2, 16), want (tokens, heads, head_dim)"),
    "bshd": (calls(packed(), layout="bshd"), "q: got shape (16, 2, 16), want (batch, seq, heads, head_dim)"),
    "bhsd": (calls(packed(), layout="bhsd"), "q: got shape (16, 2, 16), want (batch, heads, seq, head_dim)"),
    "unknown layout": (calls(packed(), layout="sbhd"), "layout: got 'sbhd', want one of 'thd', 'bshd', 'bhsd'"),
    # positions
    "no positions": (
        calls(packed(), positions=None),
        "positions: got NoneType, want DevicePositions, a PositionTable or a tensor of ids",
    ),
    "axes of a table": (
        calls(packed(), rotary=Rotary(16, axes=3)),
        "positions: got 2 axes, want 3 as in rotary",
    ),
    "axes of ids": (calls(packed(), positions=IDS[:1]), "positions: got 1 axis, want 2 as in rotary"),
    "tokens of a table": (calls(zeros(15, 2, 16)), "positions: got 16 tokens, want 15 as in q"),
    "tokens of ids": (calls(packed(), positions=IDS[:, 1:]), "positions: got 15 tokens, want 16 as in q"),
    "heads of k before seq": (
        calls(zeros(2, 4, 8, 16), zeros(2, 2, 8, 16)),
        "k: got shape (2, 2, 8, 16), want that of q, (2, 4, 8, 16), but for the heads; "
        'heads before seq are layout="bhsd"',
    ),
    "heads before seq": (
        calls(zeros(2, 4, 17, 16), positions=torch.zeros(2, 2, 17, dtype=torch.int32)),
        "positions: got 34 tokens, want 8 as in q; heads and seq would fit if they were exchanged, see layout",
    ),
    "heads before seq, and told so": (
        calls(zeros(2, 8, 4, 16), positions=torch.zeros(2, 2, 8, dtype=torch.int32), layout="bhsd"),
        "positions: got 16 tokens, want 8 as in q; heads and seq would fit if they were exchanged, see layout",
    ),
    "one dimension of ids": (
        calls(packed(), positions=IDS[0]),
        "positions: got shape (16,), want (axes, tokens) or (axes, batch, seq)",
    ),
    "no axis of ids": (
        calls(packed(), positions=IDS[:0]),
        "positions: got shape (0, 16), want (axes, tokens) or (axes, batch, seq)",
    ),
    "unequal documents": (
        calls(zeros(2, 8, 2, 16)),
        "positions: got documents of unequal tokens, want 8, the seq of q; pad the table, or use layout thd",
    ),
    "documents of another length": (
        calls(zeros(2, 8, 2, 16), positions=FOUR),
        "positions: got documents of 4 tokens, want 8, the seq of q; pad the table, or use layout thd",
    ),
    "ids of another length": (
        calls(zeros(2, 2, 8, 16), positions=IDS.reshape(2, 4, 4), layout="bhsd"),
        "positions: got documents of 4 tokens, want 8, the seq of q; pad the table, or use layout thd",
    ),
    "table on another device": (
        calls(packed(), positions=DEVICE.to("meta")),
        "positions: got a tensor on meta, want cpu as q",
    ),
    # ids
    **{
        f"{dtype} ids": (
            calls(packed(), positions=IDS.to(dtype)),
            f"positions: got dtype {dtype}, want int32, int64 or float64 ids",
        )
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.bool, torch.uint8)
    },
    "id 2**31": (
        calls(packed(), positions=ids(2**31, dtype=torch.int64)),
        "positions: got ids from 0 to 2147483648, want finite ids within int32",
    ),
    "huge float id": (
        calls(packed(), positions=ids(1e20, dtype=torch.float64)),
        "positions: got ids from 0 to 100000000000000000000, want finite ids within int32",
    ),
    "infinite id": (
        calls(packed(), positions=ids(-float("inf"), dtype=torch.float64)),
        "positions: got ids from -inf to 0, want finite ids within int32",
    ),
    "nan": (
        calls(packed(), positions=ids(float("nan"), dtype=torch.float64)),
        "positions: got ids from nan to nan, want finite ids within int32",
    ),
    # in place
    "expanded": (
        calls(zeros(16, 1, 16).expand(16, 2, 16), inplace=True),
        "q: got a tensor whose elements share memory, want inplace=False",
    ),
    "overlapping": (
        calls(packed(), zeros(1000).as_strided((16, 2, 16), (24, 16, 1)), inplace=True),
        "k: got a tensor whose elements share memory, want inplace=False",
    ),
    **{
        f"k within q, {q_from} and {k_from}": (
            calls(*fused(q_from, k_from), inplace=True),
            "k: got the memory of q, want inplace=False",
        )
        for q_from, k_from in ((0, 0), (0, 2), (0, 3), (1, 0), (4, 3), (4, 6))
    },
    "k is q": (calls(x := packed(), x, inplace=True), "k: got the memory of q, want inplace=False"),
    # implementations
    "unknown implementation": (
        calls(packed(), implementation="cuda"),
        "implementation: got 'cuda', want one of 'auto', 'reference', 'triton'",
    ),
    "words for a flag": (calls(packed(), inplace="no"), "inplace: got 'no', want True or False"),
    "a list for a flag": (calls(packed(), conjugate=[]), "conjugate: got [], want True or False"),
    # the rotary
    "no rotary": (
        calls(packed(), rotary=None),  # type: ignore[arg-type]
        "rotary: got NoneType, want a Rotary, as mmpos.rotary.Rotary gives it",
    ),
    "no rotary of cos and sin": (
        lambda: tables_of(None, DEVICE),  # type: ignore[arg-type]
        "rotary: got NoneType, want a Rotary, as mmpos.rotary.Rotary gives it",
    ),
    "no rotary of angles": (
        lambda: angles({"head_dim": 16}, DEVICE),  # type: ignore[arg-type]
        "rotary: got dict, want a Rotary, as mmpos.rotary.Rotary gives it",
    ),
    # allocations    # the norm
    "norm, shape": (normed(q_weight=ones(12)), "norm.q_weight: got shape (12,), want (16,)"),
    "norm, shape of k": (normed(k_weight=ones(1, 16)), "norm.k_weight: got shape (1, 16), want (16,)"),
    "norm, dtype": (
        normed(q_weight=ones(16).double()),
        "norm.q_weight: got torch.float64, want a tensor of float32, bfloat16 or float16",
    ),
    "norm, a number": (
        normed(q_weight=1.0),
        "norm.q_weight: got float, want a tensor of float32, bfloat16 or float16",
    ),
    "norm, device": (normed(k_weight=ones(16).to("meta")), "norm.k_weight: got a tensor on meta, want cpu as k"),
    **{
        f"norm, eps {eps!r}": (
            normed(q_weight=ones(16), eps=eps),
            f"norm.eps: got {eps!r}, want an int or float from 2⁻¹²⁶ to 2¹²⁷",
        )
        for eps in (0.0, 1e-39, float("nan"), float("inf"), 1e39, 10**400, "1e-6")
    },
    **{
        f"norm, offset {offset}": (
            normed(q_weight=ones(16), offset=offset),
            f"norm.offset: got {offset}, want an int or float from -2¹²⁷ to 2¹²⁷",
        )
        for offset in (float("inf"), -1e39)
    },
    "norm, order": (normed(q_weight=ones(16), after="after"), "norm.after: got 'after', want True or False"),
    "norm without k": (
        calls(packed(), norm=Norm(k_weight=ones(16))),
        "norm.k_weight: got a weight without k, want None",
    ),
    "norm, a weight alone": (
        calls(packed(), norm=ones(16)),
        "norm: got Tensor, want a Norm, as mmpos.rotary.Norm gives it",
    ),
    # an engine's cache of cos and sin
    "cos_sin, rows": (by_cache(zeros(7, 12)), "cos_sin: got 7 rows, want > 7, the largest id"),
    "cos_sin, rows of a device table": (
        by_cache(zeros(7, 12), DevicePositions.from_table(THIRTEEN)),
        "cos_sin: got 7 rows, want > 7, the largest id",
    ),
    "cos_sin, negative id": (
        by_cache(zeros(9, 12), torch.from_numpy(THIRTEEN.dense()) - 1),
        "positions: got id -1, want >= 0: cos_sin has rows of ids from 0",
    ),
    "cos_sin, fractions": (
        by_cache(zeros(9, 12), torch.from_numpy(THIRTEEN.dense()).double()),
        "positions: got fractional ids, want integers: cos_sin has rows of whole ids alone",
    ),
    "cos_sin, width": (by_cache(zeros(9, 20)), f"cos_sin: got shape (9, 20), {WANT_ROWS}"),
    "cos_sin, no rows": (by_cache(zeros(0, 12)), f"cos_sin: got shape (0, 12), {WANT_ROWS}"),
    "cos_sin, dtype": (by_cache(zeros(9, 12).double()), f"cos_sin: got torch.float64, {WANT_Q}"),
    "cos_sin, two tensors": (by_cache((zeros(9, 6),) * 2), f"cos_sin: got tuple, {WANT_Q}"),
    "cos_sin, device": (by_cache(zeros(9, 12, device="meta")), "cos_sin: got a tensor on meta, want cpu as q"),
    "cos_sin, strides": (by_cache(zeros(12, 9).T), "cos_sin: got strides (1, 9), want a contiguous tensor"),
    "cos_sin, axial": (
        by_cache(zeros(9, 12), rotary=Rotary(20, rotary_dim=12, axes=3, allocation="axial")),
        f"cos_sin: got a rotary of allocation 'axial', {WANT_LADDER}",
    ),
    "cos_sin, theta of each axis": (
        by_cache(zeros(9, 12), rotary=Rotary(20, rotary_dim=12, axes=3, theta=(1e4, 1e2, 1e3))),
        f"cos_sin: got a rotary of allocation 'interleaved', {WANT_LADDER}",
    ),
    # caches
    # k and v
    "store: no k": (stores(k=None), "k: got None, want a tensor: apply_rotary rotates q alone"),
    "store: words for a flag": (stores(return_k="yes"), "return_k: got 'yes', want True or False"),
    "store: no v": (stores(v=None), "v: got NoneType, want a tensor of torch.float32 as k"),
    "store: dtype of v": (
        stores(v=heads(13, 2, 12, torch.float16)),
        f"v: got torch.float16 on cpu with 3 dimensions, {WANT_V}",
    ),
    "store: heads of v": (
        stores(v=heads(13, 3, 12)),
        "v: got shape (13, 3, 12), want that of k, (13, 2, 12), but for head_dim",
    ),
    "store: tokens of v": (
        stores(v=heads(12, 2, 12)),
        "v: got shape (12, 2, 12), want that of k, (13, 2, 12), but for head_dim",
    ),
    # caches
    "store: layout": (stores(cache_layout="NDH"), "cache.layout: got 'NDH', want one of 'NHD', 'HND'"),
    "store: not a cache": (stores(key_cache=None), "key_cache: got NoneType, want a tensor of torch.float32 as k"),
    "store: dtype of a cache": (
        stores(value_cache=zeros(4, 16, 2, 12, dtype=torch.bfloat16)),
        "value_cache: got torch.bfloat16, want torch.float32 as v",
    ),
    "store: device of a cache": (
        stores(key_cache=torch.empty(4, 16, 2, 12, device="meta")),
        "key_cache: got a tensor on meta, want cpu as k",
    ),
    "store: the other layout": (stores(key_cache=BY_HEAD), f"key_cache: got shape (4, 2, 16, 12), {WANT_NHD}"),
    "store: the other layout, HND": (
        stores(cache_layout="HND"),
        "key_cache: got shape (4, 16, 2, 12), want (blocks, 2, block_size, 12) or (slots, 2, 12) in layout HND",
    ),
    "store: channels of a cache": (
        stores(value_cache=zeros(4, 16, 2, 8)),
        f"value_cache: got shape (4, 16, 2, 8), {WANT_NHD}",
    ),
    "store: blocks of nothing": (
        stores(key_cache=zeros(4, 0, 2, 12)),
        f"key_cache: got shape (4, 0, 2, 12), {WANT_NHD}",
    ),
    "store: blocks of v": (
        stores(value_cache=zeros(8, 8, 2, 12)),
        "value_cache: got 8 blocks of 8 slots, want 4 of 16 as key_cache",
    ),
    # slots
    "store: not slots": (stores(slot_mapping=[1]), "slot_mapping: got list, want a tensor of int32 or int64"),
    "store: device of slots": (
        stores(slot_mapping=torch.zeros(13, dtype=torch.int64, device="meta")),
        "slot_mapping: got a tensor on meta, want cpu as q",
    ),
    "store: too many slots": (
        stores(slot_mapping=torch.arange(14)),
        "slot_mapping: got shape (14,), want at most (13,), the tokens of q",
    ),
    "store: a slot behind the caches": (
        stores(slot_mapping=torch.tensor([0, -1, 64, 65])),
        "slot_mapping[2]: got 64, want < 64, the slots of key_cache",
    ),
    "store: slots for two tokens": (
        stores(slot_mapping=torch.tensor([-1, 5, 9, -1, 9, 7, 5, 9])),
        "slot_mapping[4]: got 9, the slot of token 2, want one of its own: a slot of two tokens holds some of each",
    ),
    "store: a slot of no cache": (
        stores(key_cache=zeros(0, 16, 2, 12), value_cache=zeros(0, 16, 2, 12)),
        "slot_mapping[0]: got 0, want < 0, the slots of key_cache",
    ),
    # memory
    "store: k as v": (
        stores(k=SAME, v=SAME, inplace=True, return_k=True),
        "k: got the memory of v, want memory of its own",
    ),
    "store: one cache twice": (
        stores(key_cache=BOTH[..., :12], value_cache=BOTH[..., :12]),
        "key_cache: got the memory of value_cache, want memory of its own",
    ),
    "store: caches that overlap": (
        stores(key_cache=BOTH[..., :12], value_cache=BOTH[..., 6:18]),
        "key_cache: got the memory of value_cache, want memory of its own",
    ),
    "store: an expanded cache": (
        stores(value_cache=zeros(4, 1, 2, 12).expand(4, 16, 2, 12)),
        "value_cache: got a tensor whose elements share memory, want each by itself",
    ),
    "store: k in the cache": (
        stores(k=POOL[:13, :2], key_cache=POOL[:, :2], value_cache=POOL[:, 5:]),
        "key_cache: got the memory of k, want memory of its own",
    ),
    "store: v in the cache of keys": (
        stores(v=POOL[5:18, 1:3], key_cache=POOL[:, :2], value_cache=POOL[:, 5:]),
        "key_cache: got the memory of v, want memory of its own",
    ),
    "store: q expanded, in place": (
        stores(q=heads(13, 1, 12).expand(13, 3, 12), inplace=True),
        "q: got a tensor whose elements share memory, want each by itself",
    ),
    "store: k in q, in place": (
        stores(q=QKV[:, :3], k=QKV[:, 2:4], inplace=True),
        "q: got the memory of k, want memory of its own",
    ),
    "store: v in k, in place": (
        stores(k=QKV[:, 3:5], v=QKV[:, 4:6], inplace=True, return_k=True),
        "k: got the memory of v, want memory of its own",
    ),
    "8 bits: a number": (eights(k_scale=0.5), "k_scale: got float, want a tensor of float32"),
    "8 bits: dtype": (eights(v_scale=torch.ones(2).half()), "v_scale: got torch.float16, want a tensor of float32"),
    "8 bits: device": (
        eights(k_scale=torch.ones((), device="meta")),
        "k_scale: got a tensor on meta, want cpu as the cache",
    ),
    "8 bits: shape": (eights(v_scale=torch.ones(3)), f"v_scale: got shape (3,), {WANT_SCALE}"),
    "8 bits: zero": (eights(k_scale=torch.zeros(1)), "k_scale[0]: got 0.0, want a finite number > 0"),
    "8 bits: negative": (eights(v_scale=torch.tensor([1.0, -1.0])), "v_scale[1]: got -1.0, want a finite number > 0"),
    "8 bits: for a cache of 32 bits": (
        eights(key_cache=torch.zeros(4, 16, 2, 12)),
        "k_scale: got scales for a cache of torch.float32, want None",
    ),
    "8 bits: q in place": (
        eights(q_scale=torch.ones(13, 3), inplace=True),
        "q_scale: got scales beside inplace=True, want inplace=False: q becomes float8_e4m3fn",
    ),
    "8 bits: no tensor for q": (eights(q_scale=1.0), "q_scale: got float, want a tensor of float32"),
    "8 bits: shape of q": (
        eights(q_scale=torch.ones(13, 2)),
        "q_scale: got shape (13, 2) on cpu, want (13, 3) on cpu, q without head_dim",
    ),
    "8 bits: one memory for both": (
        eights(k_scale=ROWS, v_scale=ROWS),
        "k_scale: got the memory of v_scale, want memory of its own",
    ),
    "8 bits: expanded": (
        eights(k_scale=torch.ones(1, 1, 2).expand(4, 16, 2)),
        "k_scale: got a tensor whose elements share memory, want each by itself",
    ),
    "8 bits: within the cache": (
        eights(key_cache=PAGES[..., :12].view(E4M3), k_scale=INSIDE),
        "key_cache: got the memory of k_scale, want memory of its own",
    ),
    "rerotate: layout": (moves(cache_layout="NDH"), "cache_layout: got 'NDH', want one of 'NHD', 'HND'"),
    "rerotate: no cache": (moves(k_cache=None), "k_cache: got NoneType, want a tensor"),
    "rerotate: dtype": (
        moves(k_cache=torch.zeros(4, 16, 2, 12, dtype=torch.float64)),
        "k_cache: got torch.float64, want float32, bfloat16, float16, float8_e4m3fn or float8_e5m2: "
        "bytes that hold 8-bit floats are view(torch.float8_e4m3fn)",
    ),
    "rerotate: head_dim": (moves(k_cache=torch.zeros(4, 16, 2, 8)), f"k_cache: got shape (4, 16, 2, 8), {WANT_PAGES}"),
    "rerotate: expanded": (
        moves(k_cache=torch.zeros(4, 1, 2, 12).expand(4, 16, 2, 12)),
        "k_cache: got a tensor whose elements share memory, want each by itself",
    ),
    "rerotate: device of ids": (
        moves(to_positions=torch.zeros(3, 13, dtype=torch.int64, device="meta")),
        "to_positions: got a tensor on meta, want cpu as k_cache",
    ),
    "rerotate: not positions": (
        moves(from_positions=None),
        "from_positions: got NoneType, want DevicePositions, a PositionTable or a tensor of ids",
    ),
    "rerotate: length": (
        moves(to_positions=THIRTEEN.slice(0, 12)),
        "to_positions: got 12 tokens, want 13 as in from_positions",
    ),
    "rerotate: axes of from": (
        moves(from_positions=EQUAL.slice(0, 13)),
        "from_positions: got 2 axes, want 3 as in rotary",
    ),
    "rerotate: device of slots": (
        moves(slots=torch.zeros(13, dtype=torch.int64, device="meta")),
        "slots: got a tensor on meta, want cpu as from_positions",
    ),
    "rerotate: too many slots": (
        moves(slots=torch.arange(14)),
        "slots: got shape (14,), want at most (13,), the tokens of from_positions",
    ),
    "rerotate: a slot of two tokens": (
        moves(slots=torch.tensor([3, 5, -1, 3, -1])),
        "slots[3]: got 3, the slot of token 0, want one of its own: a slot of two tokens holds some of each",
    ),
    "rerotate: no scale": (
        moves(k_cache=EIGHT),
        "k_scale: got None for a cache of torch.float8_e4m3fn, want its scales: a rotation may need larger ones",
    ),
    "rerotate: a scale for 32 bits": (
        moves(k_scale=torch.ones(2)),
        "k_scale: got Tensor for a cache of torch.float32, want None",
    ),
    "rerotate: layout of scales": (scaled_moves(torch.ones(4, 2, 16)), f"k_scale: got shape (4, 2, 16), {WANT_SCALE}"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_bad_input_is_refused_with_what_got_and_want(name: str) -> None:
    call, message = REFUSALS[name]
    with pytest.raises(InvalidInputError, match=f"^{re.escape(message)}$") as caught:
        call()
    assert isinstance(caught.value, MmposError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("inplace", [False, True])
def test_tensors_of_the_meta_device_lie_nowhere_and_share_nothing(inplace: bool) -> None:
    q, k = packed(3, device="meta"), packed(2, device="meta")
    turned = apply_rotary(q, k, POSITIONS, ROTARY, inplace=inplace)
    assert [(x.shape, x.device.type) for x in turned if x is not None] == [((16, 3, 16), "meta"), ((16, 2, 16), "meta")]
    with pytest.raises(InvalidInputError, match=r"^k: got the memory of q, want inplace=False$"):
        apply_rotary(q, q, POSITIONS, ROTARY, inplace=True)


@pytest.mark.parametrize("argument", ["q", "k", "norm.q_weight", "norm.k_weight"])
def test_in_place_under_autograd_is_not_supported(argument: str) -> None:
    tensors = {"q": packed(), "k": packed(), "norm.q_weight": ones(16), "norm.k_weight": ones(16)}
    tensors[argument].requires_grad_()
    q, k, *weights = tensors.values()
    message = f"inplace: got {argument} that requires gradients, want inplace=False"
    with pytest.raises(UnsupportedError, match=f"^{message}$") as caught:
        apply_rotary(q, k, DEVICE, ROTARY, norm=Norm(*weights), inplace=True)
    assert isinstance(caught.value, NotImplementedError)
    with torch.no_grad():
        assert apply_rotary(q, k, DEVICE, ROTARY, norm=Norm(*weights), inplace=True) == (q, k)


def test_triton_on_a_cpu_needs_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    message = "implementation: got 'triton' for tensors on cpu, want 'reference' there"
    for value in ("0", ""):
        monkeypatch.setenv("TRITON_INTERPRET", value)
        with pytest.raises(InvalidInputError, match=f"^{message}$"):
            apply_rotary(packed(), None, DEVICE, ROTARY, implementation="triton")
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(InvalidInputError, match=f"^{message}$"):
        apply_rotary(packed(), None, DEVICE, ROTARY, implementation="triton")


def test_the_farthest_ids_are_legal() -> None:
    for dtype in (torch.int64, torch.float64):
        assert apply_rotary(packed(), None, ids(2**31 - 1, -(2**31), dtype=dtype), ROTARY)[0].shape == (16, 2, 16)
    apply_rotary(packed(), None, ids(2**31 - 0.5, dtype=torch.float64), ROTARY, validate=True)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize(
    "views",
    [
        lambda x: (x[..., :4, :], x[..., 4:6, :]),
        lambda x: (x[..., 2:6, :], x[..., :2, :]),
        lambda x: (x[..., ::2, :], x[..., 1::2, :]),
        lambda x: (x[..., :1, :], x[..., 1:, :]),
        lambda x: (x[:1], x[1:]),
        lambda x: (x[:, :4], x[:, 4:]),
        lambda x: (x[..., :16], x[..., 16:]),
    ],
    ids=["q k v", "k q", "alternating", "one and many", "batches", "tokens", "channels"],
)
def test_views_of_one_buffer_that_share_nothing_are_rotated_in_place(views: Any, layout: Any) -> None:
    def q_and_k() -> list[Tensor]:
        buffer = torch.randn(2, 8, 8, 32, generator=torch.Generator().manual_seed(0))
        return [x if layout == "bshd" else x.transpose(1, 2) for x in views(buffer)]

    q, k = q_and_k()
    batch, seq = q.shape[0], q.shape[1 if layout == "bshd" else 2]
    rotary = Rotary(head_dim=q.shape[-1])
    some = place(SegmentTable.from_documents([[Text(seq)]] * batch))
    expected = apply_rotary(q, k, some, rotary, layout=layout)
    rotated_q, rotated_k = apply_rotary(q, k, some, rotary, layout=layout, inplace=True)
    assert rotated_q is q
    assert rotated_k is k
    assert torch.equal(q, expected[0])
    assert torch.equal(k, expected[1])  # type: ignore[arg-type]


WITHOUT = """
import sys
sys.modules["{missing}"] = None
"""


def without(missing: str, code: str) -> None:
    """Run code where a package cannot be imported."""
    command = [sys.executable, "-c", WITHOUT.format(missing=missing) + code]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


def test_without_torch_frequencies_work_and_the_rest_names_the_command() -> None:
    code = """
import mmpos, mmpos.rotary
from mmpos.rotary import Rotary
assert Rotary(head_dim=8).pair_axis.tolist() == [0, 1, 0, 1]
for name in ("angles", "apply_rotary", "cos_sin", "rerotate", "rotate_and_store", "DevicePositions", "Norm"):
    try:
        getattr(mmpos.rotary, name)
    except ImportError as error:
        assert str(error) == 'rotations: torch is not installed, want pip install "multimodal-positions[all]"', error
    else:
        raise AssertionError(name)
"""
    without("torch", code)


def test_without_triton_the_reference_works_and_the_kernel_names_the_command() -> None:
    code = """
import os, torch
os.environ["TRITON_INTERPRET"] = "1"
from mmpos.rotary import Rotary, apply_rotary
q, ids = torch.ones(3, 1, 8), torch.arange(6).reshape(2, 3)
apply_rotary(q, None, ids, Rotary(head_dim=8))
try:
    apply_rotary(q, None, ids, Rotary(head_dim=8), implementation="triton")
except ImportError as error:
    want = 'want pip install "multimodal-positions[all]"'
    assert str(error) == f'implementation "triton": triton is not installed, {want}', error
else:
    raise AssertionError
"""
    without("triton", code)


FORWARD: dict[str, Callable[[Tensor], Any]] = {
    "q": lambda x: calls(x)(),
    "norm.k_weight": lambda x: calls(packed(), packed(), norm=Norm(None, x))(),
    "cos_sin": lambda x: by_cache(x)(),
    "v": lambda x: stores(v=x)(),
    "key_cache": lambda x: stores(key_cache=x)(),
}
SHAPES: dict[str, tuple[int, ...]] = {"q": (16, 2, 16), "norm.k_weight": (16,), "cos_sin": (9, 12), "v": (13, 2, 12)}
SHAPES |= {"key_cache": (4, 16, 2, 12)}


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")  # torch's own, as forward mode loads its formulas
@pytest.mark.parametrize("name", FORWARD)
def test_forward_mode_gradients_are_refused(name: str) -> None:
    x = torch.ones(SHAPES[name])
    with pytest.raises(UnsupportedError, match=f"^{name}: got a forward-mode tangent, want reverse-mode gradients$"):
        torch.func.jvp(lambda x: FORWARD[name](x)[0], (x,), (x,))


def test_memory_is_judged_by_the_distance_of_tensors_whose_shapes_and_strides_are_the_same() -> None:
    fused, ids = torch.zeros(4, 6, 8), torch.zeros(2, 4, dtype=torch.int32)
    for start, apart in ((1, False), (2, True), (1, False), (4, True)):
        q, k = fused[:, :2], fused[:, start : start + 2]
        if apart:
            apply_rotary(q, k, ids, Rotary(8), inplace=True)
        else:
            with pytest.raises(InvalidInputError, match="k: got the memory of q"):
                apply_rotary(q, k, ids, Rotary(8), inplace=True)


# Caches.


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_caches_of_8_bits_need_scales(dtype: torch.dtype) -> None:
    message = f"key_cache: got {dtype}, which needs scales, want k_scale beside it, or torch.float32 as k"
    with pytest.raises(UnsupportedError, match=f"^{re.escape(message)}$"):
        stores(key_cache=zeros(4, 16, 2, 12).to(dtype))()


@pytest.mark.parametrize("scale", [{}, {"v_scale": torch.ones(())}])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fnuz])
def test_caches_of_other_8_bits_are_not_supported(dtype: torch.dtype, scale: dict[str, Tensor]) -> None:
    message = f"value_cache: got {dtype}, want torch.float8_e4m3fn or torch.float8_e5m2 with v_scale, "
    with pytest.raises(UnsupportedError, match=f"^{re.escape(message + 'or torch.float32 as v')}$"):
        stores(value_cache=zeros(4, 16, 2, 12).to(dtype), **scale)()


def storing(name: str, x: Tensor) -> Callable[[], Any]:
    return stores(**{name: x})


NEEDING: dict[str, Callable[[Tensor], Callable[[], Any]]] = {
    **{name: partial(storing, name) for name in ("q", "k", "v", "key_cache", "value_cache")},
    "norm.q_weight": lambda x: stores(norm=Norm(x)),
    "norm.k_weight": lambda x: stores(norm=Norm(None, x)),
    "k_cache": lambda x: moves(k_cache=x),
}


@pytest.mark.parametrize("name", NEEDING)
def test_gradients_of_what_is_stored_are_not_supported(name: str) -> None:
    shape = (12,) if "weight" in name else (4, 16, 2, 12) if "cache" in name else (13, 3 if name == "q" else 2, 12)
    call = NEEDING[name](torch.ones(shape).requires_grad_())
    message = f"{name}: got a tensor that requires gradients, want torch.no_grad(): none are made"
    with pytest.raises(UnsupportedError, match=f"^{re.escape(message)}$"):
        call()
    with torch.no_grad():
        call()


@pytest.mark.parametrize("name", ["key_cache", "k_cache"])
def test_more_slots_than_32_bits_count_are_beyond_the_limit(name: str) -> None:
    cache = torch.zeros(1).expand(2**27, 16, 2, 12)
    call = moves(k_cache=cache) if name == "k_cache" else stores(key_cache=cache, value_cache=cache)
    with pytest.raises(LimitExceededError, match=f"^{name}: got 2147483648 slots, want <= 2147483647$"):
        call()


def test_caches_of_the_meta_device_lie_nowhere_and_share_nothing() -> None:
    shapes: dict[str, tuple[int, ...]] = {"q": (13, 3, 12), "k": (13, 2, 12), "v": (13, 2, 12)}
    shapes |= dict.fromkeys(("key_cache", "value_cache"), (4, 16, 2, 12))
    meta: dict[str, Any] = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    q, k = stores(**meta, slot_mapping=torch.arange(13, device="meta"), return_k=True)()
    assert (q.shape, k.shape, q.device.type) == ((13, 3, 12), (13, 2, 12), "meta")


def test_what_is_not_written_may_share_memory() -> None:
    same = heads(13, 2, 12)
    assert stores(k=same, v=same, inplace=True)()[1] is None
    assert stores(k=same, v=same, return_k=True)()[1].shape == same.shape


def test_scales_may_lie_beside_the_keys_of_their_page() -> None:
    eights(key_cache=PAGES[..., :12].view(E4M3), k_scale=INLINE)()
    assert (INLINE.flatten()[:26] > 0).all()
    assert (INLINE.flatten()[26:] == 0).all()


def test_scales_that_the_host_does_not_look_at_are_refused_if_validated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # as little is known of those on a device
    eights(k_scale=torch.zeros(()))()
    with pytest.raises(InvalidInputError, match=r"^k_scale: got 0.0, want a finite number > 0$"):
        eights(k_scale=torch.zeros(()), validate=True)()


def test_scales_that_do_not_change_may_be_one_tensor() -> None:
    one = torch.ones(())
    caches = [eights(k_scale=one, v_scale=one), eights(k_scale=one, v_scale=one.clone())]
    assert len({call()[0].shape for call in caches}) == 1


def test_scales_that_lie_in_the_cache_are_refused_and_beside_the_keys_they_are_not() -> None:
    pages = torch.zeros(4, 16, 2, 16, dtype=torch.uint8)  # 12 channels, then the scale as 4 bytes
    keys, scales = pages[..., :12].view(E4M3), pages[..., 12:].view(torch.float32)[..., 0]
    scales.fill_(0.5)
    scaled_moves(scales, k_cache=keys)()
    inside = pages[..., 8:12].view(torch.float32)[..., 0]
    with pytest.raises(InvalidInputError, match=r"^k_cache: got the memory of k_scale, want memory of its own$"):
        scaled_moves(inside, k_cache=keys)()


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fnuz])
def test_keys_of_other_dtypes_of_8_bits_are_not_moved(dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedError, match=f"^k_cache: got {dtype}, want float32, "):
        moves(k_cache=torch.zeros(4, 16, 2, 12, dtype=dtype))()


@pytest.mark.parametrize("way", ["reference", "triton"])
def test_scales_and_slots_to_move_that_the_host_does_not_look_at_are_checked_if_validated(
    way: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # as little is known of those on a device
    scaled_moves(torch.zeros(()), implementation="reference")()
    with pytest.raises(InvalidInputError, match=r"^k_scale: got 0.0, want a finite number > 0$"):
        scaled_moves(torch.zeros(()), validate=True, implementation=way)()
    with pytest.raises(InvalidInputError, match=r"^slots\[1\]: got 64, want < 64, the slots of k_cache$"):
        moves(slots=torch.tensor([3, 64]), validate=True, implementation=way)()
