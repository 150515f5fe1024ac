"""Bad input to rotate_and_store: every refusal says what, got and want, and nothing is written."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rotary_oracle import heads, packed
from torch import Tensor

from mmpos import InvalidInputError, LimitExceededError, UnsupportedError
from mmpos.rotary import Rotary, apply_rotary, rotate_and_store

TABLE = packed("rope-tie").slice(4, 17)
ROTARY = Rotary(12)


def cache_of(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def calls(**changed: Any) -> Callable[[], Any]:
    """rotate_and_store of good arguments but for some."""
    q, k, v = (heads(13, n, 12, seed=n) for n in (3, 2, 2))
    good: dict[str, Any] = {
        "q": q,
        "k": k,
        "v": v,
        "positions": TABLE,
        "rotary": ROTARY,
        "slot_mapping": torch.arange(13),
    }
    good |= {"key_cache": cache_of((4, 16, 2, 12)), "value_cache": cache_of((4, 16, 2, 12))}
    return lambda: rotate_and_store(**(good | changed))


BY_HEAD = cache_of((4, 2, 16, 12))
BOTH = cache_of((4, 16, 2, 24))
SAME = cache_of((13, 2, 12))
QKV = cache_of((13, 7, 12))
POOL = cache_of((64, 7, 12))
WANT_NHD = "want (blocks, block_size, 2, 12) or (slots, 2, 12) in layout NHD"
WANT_V = "want torch.float32 on cpu with 3 as k"
REFUSALS: dict[str, tuple[Callable[[], Any], str]] = {
    # k and v
    "no k": (calls(k=None), "k: got None, want a tensor: apply_rotary rotates q alone"),
    "no q": (calls(q=None), "q: got NoneType, want a tensor of float32, bfloat16 or float16"),
    "words for a flag": (calls(return_k="yes"), "return_k: got 'yes', want True or False"),
    "no v": (calls(v=None), "v: got NoneType, want a tensor of torch.float32 as k"),
    "dtype of v": (
        calls(v=heads(13, 2, 12, torch.float16)),
        f"v: got torch.float16 on cpu with 3 dimensions, {WANT_V}",
    ),
    "device of v": (
        calls(v=torch.empty(13, 2, 12, device="meta")),
        f"v: got torch.float32 on meta with 3 dimensions, {WANT_V}",
    ),
    "dimensions of v": (calls(v=heads((1, 13), 2, 12)), f"v: got torch.float32 on cpu with 4 dimensions, {WANT_V}"),
    "heads of v": (
        calls(v=heads(13, 3, 12)),
        "v: got shape (13, 3, 12), want that of k, (13, 2, 12), but for head_dim",
    ),
    "tokens of v": (
        calls(v=heads(12, 2, 12)),
        "v: got shape (12, 2, 12), want that of k, (13, 2, 12), but for head_dim",
    ),
    "tokens of k": (
        calls(k=heads(12, 2, 12)),
        "k: got shape (12, 2, 12), want that of q, (13, 3, 12), but for the heads",
    ),
    "head_dim": (calls(rotary=Rotary(16)), "q: got head_dim 12, want 16 as in rotary"),
    "positions": (
        calls(positions=torch.zeros(2, 9, dtype=torch.int32)),
        "positions: got 9 tokens, want 13 as in q",
    ),
    # caches
    "layout": (calls(cache_layout="NDH"), "cache_layout: got 'NDH', want one of 'NHD', 'HND'"),
    "not a cache": (calls(key_cache=None), "key_cache: got NoneType, want a tensor of torch.float32 as k"),
    "dtype of a cache": (
        calls(value_cache=cache_of((4, 16, 2, 12), torch.bfloat16)),
        "value_cache: got torch.bfloat16, want torch.float32 as v",
    ),
    "device of a cache": (
        calls(key_cache=torch.empty(4, 16, 2, 12, device="meta")),
        "key_cache: got a tensor on meta, want cpu as k",
    ),
    "the other layout": (calls(key_cache=BY_HEAD), f"key_cache: got shape (4, 2, 16, 12), {WANT_NHD}"),
    "the other layout, HND": (
        calls(cache_layout="HND"),
        "key_cache: got shape (4, 16, 2, 12), want (blocks, 2, block_size, 12) or (slots, 2, 12) in layout HND",
    ),
    "channels of a cache": (
        calls(value_cache=cache_of((4, 16, 2, 8))),
        f"value_cache: got shape (4, 16, 2, 8), {WANT_NHD}",
    ),
    "blocks of nothing": (calls(key_cache=cache_of((4, 0, 2, 12))), f"key_cache: got shape (4, 0, 2, 12), {WANT_NHD}"),
    "flat cache": (calls(key_cache=cache_of((64, 24))), f"key_cache: got shape (64, 24), {WANT_NHD}"),
    "k and v together": (
        calls(key_cache=cache_of((4, 2, 16, 2, 12))),
        f"key_cache: got shape (4, 2, 16, 2, 12), {WANT_NHD}",
    ),
    "blocks of v": (
        calls(value_cache=cache_of((8, 8, 2, 12))),
        "value_cache: got 8 blocks of 8 slots, want 4 of 16 as key_cache",
    ),
    # slots
    "not slots": (calls(slot_mapping=[1]), "slot_mapping: got list, want a tensor of int32 or int64"),
    "float slots": (
        calls(slot_mapping=torch.zeros(13)),
        "slot_mapping: got torch.float32, want a tensor of int32 or int64",
    ),
    "device of slots": (
        calls(slot_mapping=torch.zeros(13, dtype=torch.int64, device="meta")),
        "slot_mapping: got a tensor on meta, want cpu as q",
    ),
    "too many slots": (
        calls(slot_mapping=torch.arange(14)),
        "slot_mapping: got shape (14,), want at most (13,), the tokens of q",
    ),
    "slots in rows": (
        calls(slot_mapping=torch.arange(13).view(13, 1)),
        "slot_mapping: got shape (13, 1), want at most (13,), the tokens of q",
    ),
    "a slot behind the caches": (
        calls(slot_mapping=torch.tensor([0, -1, 64, 65])),
        "slot_mapping[2]: got 64, want < 64, the slots of key_cache",
    ),
    "slots for two tokens": (
        calls(slot_mapping=torch.tensor([-1, 5, 9, -1, 9, 7, 5, 9])),
        "slot_mapping[4]: got 9, the slot of token 2, want one of its own: a slot of two tokens holds some of each",
    ),
    "a slot of no cache": (
        calls(key_cache=cache_of((0, 16, 2, 12)), value_cache=cache_of((0, 16, 2, 12))),
        "slot_mapping[0]: got 0, want < 0, the slots of key_cache",
    ),
    # memory
    "k as v": (
        calls(k=SAME, v=SAME, inplace=True, return_k=True),
        "k: got the memory of v, want memory of its own",
    ),
    "one cache twice": (
        calls(key_cache=BOTH[..., :12], value_cache=BOTH[..., :12]),
        "key_cache: got the memory of value_cache, want memory of its own",
    ),
    "caches that overlap": (
        calls(key_cache=BOTH[..., :12], value_cache=BOTH[..., 6:18]),
        "key_cache: got the memory of value_cache, want memory of its own",
    ),
    "an expanded cache": (
        calls(value_cache=cache_of((4, 1, 2, 12)).expand(4, 16, 2, 12)),
        "value_cache: got a tensor whose elements share memory, want each by itself",
    ),
    "k in the cache": (
        calls(k=POOL[:13, :2], key_cache=POOL[:, :2], value_cache=POOL[:, 5:]),
        "key_cache: got the memory of k, want memory of its own",
    ),
    "v in the cache of keys": (
        calls(v=POOL[5:18, 1:3], key_cache=POOL[:, :2], value_cache=POOL[:, 5:]),
        "key_cache: got the memory of v, want memory of its own",
    ),
    "q expanded, in place": (
        calls(q=heads(13, 1, 12).expand(13, 3, 12), inplace=True),
        "q: got a tensor whose elements share memory, want each by itself",
    ),
    "k in q, in place": (
        calls(q=QKV[:, :3], k=QKV[:, 2:4], inplace=True),
        "q: got the memory of k, want memory of its own",
    ),
    "v in k, in place": (
        calls(k=QKV[:, 3:5], v=QKV[:, 4:6], inplace=True, return_k=True),
        "k: got the memory of v, want memory of its own",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_bad_input_is_refused_with_what_got_and_want(name: str) -> None:
    call, message = REFUSALS[name]
    with pytest.raises(InvalidInputError, match=f"^{re.escape(message)}$"):
        call()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_caches_of_8_bits_need_scales(dtype: torch.dtype) -> None:
    message = f"key_cache: got {dtype}, which needs scales, want k_scale beside it, or torch.float32 as k"
    with pytest.raises(UnsupportedError, match=f"^{re.escape(message)}$"):
        calls(key_cache=cache_of((4, 16, 2, 12), dtype))()


@pytest.mark.parametrize("scale", [{}, {"v_scale": torch.ones(())}])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fnuz])
def test_caches_of_other_8_bits_are_not_supported(dtype: torch.dtype, scale: dict[str, Tensor]) -> None:
    message = f"value_cache: got {dtype}, want torch.float8_e4m3fn or torch.float8_e5m2 with v_scale, "
    with pytest.raises(UnsupportedError, match=f"^{re.escape(message + 'or torch.float32 as v')}$"):
        calls(value_cache=cache_of((4, 16, 2, 12), dtype), **scale)()


SHAPES: dict[str, tuple[int, ...]] = {"q": (13, 3, 12), "k": (13, 2, 12), "v": (13, 2, 12)}
SHAPES |= {"key_cache": (4, 16, 2, 12), "value_cache": (4, 16, 2, 12), "q_norm_weight": (12,), "k_norm_weight": (12,)}


@pytest.mark.parametrize("name", SHAPES)
def test_gradients_are_not_supported(name: str) -> None:
    tensor = torch.ones(SHAPES[name])
    call = calls(**{name: tensor.requires_grad_()})
    message = f"{name}: got a tensor that requires gradients, want torch.no_grad(): none are made"
    with pytest.raises(UnsupportedError, match=f"^{re.escape(message)}$"):
        call()
    with torch.no_grad():
        assert call()[0].shape == (13, 3, 12)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")  # torch's own, as forward mode loads its formulas
@pytest.mark.parametrize("name", ["v", "key_cache", "k_norm_weight"])
def test_forward_mode_gradients_are_refused(name: str) -> None:
    tensor = torch.ones(SHAPES[name])
    with pytest.raises(UnsupportedError, match=f"^{name}: got a forward-mode tangent, want reverse-mode gradients$"):
        torch.func.jvp(lambda x: calls(**{name: x})()[0], (tensor,), (tensor,))


def test_more_slots_than_32_bits_count_are_beyond_the_limit() -> None:
    cache = torch.zeros(1).expand(2**27, 16, 2, 12)
    with pytest.raises(LimitExceededError, match=r"^key_cache: got 2147483648 slots, want <= 2147483647$"):
        calls(key_cache=cache, value_cache=cache)()


def test_views_that_share_nothing_may_lie_in_one_memory() -> None:
    arena = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    qkv, pool = arena[: 13 * 84].view(13, 7, 12), arena[1200:4272].view(64, 4, 12)
    q, k, v = qkv.split([3, 2, 2], dim=1)
    want_q, want_k = apply_rotary(q, k, TABLE, ROTARY)
    kept = v.clone()
    out, k_out = calls(
        q=q, k=k, v=v, key_cache=pool[:, :2], value_cache=pool[:, 2:], inplace=True, return_k=True,
    )()  # fmt: skip
    assert torch.equal(out, want_q)
    assert torch.equal(k_out, want_k)  # type: ignore[arg-type]
    assert torch.equal(pool[:13, :2], want_k)  # type: ignore[arg-type]
    assert torch.equal(pool[:13, 2:], kept)


def test_tensors_of_the_meta_device_lie_nowhere_and_share_nothing() -> None:
    shapes = {name: SHAPES[name] for name in ("q", "k", "v", "key_cache", "value_cache")}
    meta: dict[str, Any] = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    q, k = calls(**meta, slot_mapping=torch.arange(13, device="meta"), return_k=True)()
    assert (q.shape, k.shape, q.device.type) == ((13, 3, 12), (13, 2, 12), "meta")


def test_what_is_not_written_may_share_memory() -> None:
    same = heads(13, 2, 12)
    assert calls(k=same, v=same, inplace=True)()[1] is None
    assert calls(k=same, v=same, return_k=True)()[1].shape == same.shape
