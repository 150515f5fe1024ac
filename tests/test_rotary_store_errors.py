"""Bad input to rotate_and_store: every refusal says what, got and want, and nothing is written."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rotary_oracle import heads, packed
from store_oracle import CACHES, Cache, assert_holds, write
from torch import Tensor

from mmpos import InvalidInputError, LimitExceededError, UnsupportedError
from mmpos.rotary import Rotary, apply_rotary, paged, rotate_and_store, store_operator
from mmpos.rotary.operator import REFERENCE, TRITON
from mmpos.rotary.sources import frequencies_of, source_of

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


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
def test_caches_of_8_bits_need_scales_and_are_not_supported(dtype: torch.dtype) -> None:
    message = f"key_cache: got {dtype}, which needs scales, want torch.float32 as k"
    with pytest.raises(UnsupportedError, match=f"^{re.escape(message)}$"):
        calls(key_cache=cache_of((4, 16, 2, 12), dtype))()


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


# Slots that no door has seen: those on a device are read by nobody before they are used.


def unseen(cache: Cache, slots: Tensor, implementation: int) -> tuple[Tensor, Tensor, Tensor]:
    """The operator itself, with k, v and the rotated k that it should store."""
    q, k, v = (heads(13, n, 12, seed=n) for n in (3, 2, 2))
    source = source_of(TABLE, q.device)
    store_operator.rotate_and_store(
        q[None], k[None], v[None], cache.key, cache.value, slots, *arguments(source, implementation)
    )
    turned = apply_rotary(k, None, TABLE, ROTARY, implementation="reference")[0]
    return k, v, turned


def arguments(source: Any, implementation: int) -> tuple[Any, ...]:
    numbers = source.mode, False, 1.0, False, implementation
    return False, None, None, None, None, source.positions, *frequencies_of(ROTARY), *numbers


BEYOND = [3, 64, 2**31, 2**40 + 5, -(2**40), 63, -1, 2**63 - 1, 0, -(2**63), 128, 9, 65]


@pytest.mark.parametrize("implementation", [REFERENCE, TRITON])
def test_nothing_is_written_beyond_a_cache(implementation: int) -> None:
    cache, want = (CACHES["NHD"](4, 16, 2, 12, torch.float32) for _ in range(2))
    _, v, turned = unseen(cache, torch.tensor(BEYOND), implementation)
    write(want, turned, v, [slot if slot < 64 else -1 for slot in BEYOND])
    assert_holds(cache, want)


@pytest.mark.parametrize("slots", [BEYOND, [-1] * 13, [7] + [-1] * 12, list(range(13)), [0, -1, 5]], ids=str)
@pytest.mark.parametrize("name", CACHES)
def test_the_plain_write_that_waits_for_nothing_writes_the_same(name: str, slots: list[int]) -> None:
    cache, want = (CACHES[name](4, 16, 2, 12, torch.float32) for _ in range(2))
    k, v = heads(13, 2, 12), heads(13, 2, 12, seed=1)
    write(want, k, v, [slot if slot < 64 else -1 for slot in slots])
    pages = [paged.pages_of("cache", x, cache.layout, ("x", k[None])) for x in (cache.key, cache.value)]  # type: ignore[arg-type]
    rows = [x[: len(slots)] for x in (k, v)]
    paged._write_waiting_for_nothing(pages, rows, torch.tensor(slots))
    assert_holds(cache, want)


def test_validated_slots_are_refused_where_the_host_does_not_look() -> None:
    pages = cache_of((4, 16, 2, 12))
    with pytest.raises(InvalidInputError, match=r"^slot_mapping\[1\]: got 64, want < 64, the slots of key_cache$"):
        paged.slots_of(torch.tensor([[3, 64]], dtype=torch.int32), 1, 2, pages, validate=True)


@pytest.mark.parametrize("implementation", ["auto", "triton"])
def test_what_autograd_has_saved_of_a_cache_is_known_to_have_changed(implementation: str) -> None:
    cache = CACHES["NHD"](4, 16, 2, 12, torch.float32)
    saved = torch.zeros((), requires_grad=True) * cache.key
    calls(key_cache=cache.key, value_cache=cache.value, implementation=implementation)()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()
