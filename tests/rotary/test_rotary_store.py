"""Compare rotate_and_store with loops over tokens for every cache, layout, dtype and implementation."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from rotary_oracle import DTYPES, packed
from rotary_oracle import heads as heads_on_host
from store_oracle import CACHES, DEVICE, Held, assert_holds, assert_same_bits, filled, flat, write
from tolerance import truncation
from torch import Tensor

from mmpos import Grid, InvalidInputError, PositionTable, SegmentTable, Text, place
from mmpos.rotary import Cache, Norm, Rotary, apply_rotary, operators, paged, rotate_and_store
from mmpos.rotary.device import ids_on, rotation_of
from mmpos.rotary.kernel import tiling
from mmpos.rotary.reference import NO_NORM, REFERENCE, TRITON

WAYS = ("auto", "triton")
PAIRINGS = ("half", "adjacent")
TABLE = packed("rope-tie-fractional", 70_000).slice(4, 17)
ROTARY = Rotary(12, rotary_dim=8)
SLOTS = [40, 41, 3, -1, 7, 0, 63, -1, 22, 21, -9, 5, 16]
"""Unordered slots for 13 tokens in a 64-slot cache, including the first and last slot; three tokens have no slot."""


own_tiles = tiling.tiles

pytestmark = pytest.mark.usefixtures("few_programs")


def heads(*args: Any, **options: Any) -> Tensor:
    """Return random q, k or v on the device."""
    return heads_on_host(*args, **options).to(DEVICE)


def qkv(tokens: int = 13, dtype: torch.dtype = torch.float32, dim: int = 12, v_dim: int = 12) -> list[Tensor]:
    """Return q with three heads, and k and v with two."""
    return [heads(tokens, n, d, dtype, seed) for seed, (n, d) in enumerate(((3, dim), (2, dim), (2, v_dim)))]


def assert_stored(way: str, tensors: list[Tensor], cache: Held, slots: Tensor, **options: Any) -> None:
    """Call rotate_and_store, and compare q, the returned k and whole caches with apply_rotary and a loop."""
    q, k, v = tensors
    slots = slots.to(DEVICE)
    options = {"positions": TABLE, "rotary": ROTARY, **options}
    shared = {name: options[name] for name in options if name not in ("inplace", "return_k")}
    want, layout = deepcopy(cache), options.get("layout")  # deepcopy keeps views that share memory
    # The kernel adds the squares of a norm in a different order; otherwise all implementations give the same bits.
    judge: Any = way if "norm" in options else "reference"
    q_want, k_want = apply_rotary(q, k, implementation=judge, **shared)
    write(want, flat(k_want, layout), flat(v, layout), slots.flatten().tolist())
    before = {name: x.clone() for name, x in zip("qkv", tensors, strict=True)}
    arguments: Any = {"implementation": way, "cache": cache.with_slots(slots), **options}
    q_got, k_got = rotate_and_store(q, k, v, **arguments)
    tolerance = truncation(way, q.dtype)
    assert_same_bits(q_got, q_want, tolerance)
    assert_holds(cache, want, tolerance)
    assert_same_bits(v, before["v"])
    if options.get("return_k"):
        assert_same_bits(k_got, k_want, tolerance)
    else:
        assert k_got is None
    if options.get("inplace"):
        assert q_got is q
        assert k_got is (k if options.get("return_k") else None)
    else:
        assert q_got.stride() == q_want.stride()
        assert_same_bits(q, before["q"])
    if not (options.get("inplace") and options.get("return_k")):
        assert_same_bits(k, before["k"])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cache", CACHES)
def test_every_cache_layout_is_written_in_place_and_only_at_its_slots(cache: str, way: str) -> None:
    for blocks, size in ((13, 5),) if way == "triton" else ((64, 1), (4, 16), (1, 64), (13, 5)):
        assert_stored(way, qkv(), CACHES[cache](blocks, size, 2, 12, torch.float32), torch.tensor(SLOTS))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_pairing_is_stored(dtype: torch.dtype, pairing: Any, way: str) -> None:
    rotary = Rotary(12, rotary_dim=4, pairing=pairing)
    assert_stored(way, qkv(dtype=dtype), CACHES["HND"](4, 16, 2, 12, dtype), torch.tensor(SLOTS), rotary=rotary)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("normed", "pairing", "offset"),
    [("q", "half", 1.0), ("k", "half", 0.0), ("qk", "half", 0.0), ("qk", "adjacent", 1.0)],
)
def test_a_norm_is_applied_to_q_and_k_but_not_to_v(normed: str, pairing: Any, offset: float, way: str) -> None:
    q_weight, k_weight = (heads(1, 1, 12, seed=ord(x)).flatten() if x in normed else None for x in "qk")
    norm = Norm(q_weight, k_weight, 1e-5, offset)
    options = {"rotary": Rotary(12, rotary_dim=8, pairing=pairing), "norm": norm, "inplace": offset == 1}
    cache = CACHES["k and v side by side"](4, 16, 2, 12, torch.float16)
    assert_stored(way, qkv(dtype=torch.float16), cache, torch.tensor(SLOTS), return_k=normed == "qk", **options)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("layout", "inplace", "return_k"),
    [("thd", False, False), ("thd", True, True), ("bshd", True, False), ("bshd", False, True), ("bhsd", True, True)],
)
def test_views_of_a_fused_qkv_are_stored_in_every_layout(
    layout: str, inplace: bool, return_k: bool, way: str, tile: Any
) -> None:
    tile(64, 1)
    fused = heads(39, 7, 12)
    views = fused if layout == "thd" else fused.view(3, 13, 7, 12)
    q, k, v = (x.transpose(1, 2) if layout == "bhsd" else x for x in views.split([3, 2, 2], dim=-2))
    slots = torch.arange(39).flip(0)
    slots[[3, 30]] = -1
    options: Any = {"layout": layout, "inplace": inplace, "return_k": return_k}
    mapping = slots if layout == "thd" else slots.view(3, 13)
    cache, table = CACHES["HND"](4, 16, 2, 12, torch.float32), packed("rope-tie").pad(13)
    assert_stored(way, [q, k, v], cache, mapping, positions=table, **options)


@pytest.mark.parametrize("way", WAYS)
def test_tokens_past_the_end_of_slot_mapping_are_rotated_but_not_stored(way: str) -> None:
    for count in (0, 5):
        cache, slots = CACHES["HND"](4, 16, 2, 12, torch.float32), torch.tensor(SLOTS[:count], dtype=torch.int64)
        assert_stored(way, qkv(), cache, slots)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("dim", "v_dim"), [(6, 10), (24, 16)])
def test_v_may_have_a_different_head_dim_from_k(dim: int, v_dim: int, way: str) -> None:
    q, k, v = qkv(dim=dim, v_dim=v_dim)
    key, value = filled(4, 16, 2, dim, dtype=torch.float32), filled(4, 2, 16, v_dim, dtype=torch.float32)
    cache = Held(key, value.transpose(1, 2), (key, value), "NHD", 16)
    assert_stored(way, [q, k, v], cache, torch.tensor(SLOTS), rotary=Rotary(dim))


@pytest.mark.parametrize("way", WAYS)
def test_q_k_and_v_with_any_strides_are_stored(way: str) -> None:
    q = heads(26, 6, 24)[1::2, ::2, ::2]
    k = heads(12, 2, 13, seed=1).permute(2, 1, 0)
    v = heads(1, 1, 12, seed=2).expand(13, 2, 12)
    assert_stored(way, [q, k, v], CACHES["NHD"](4, 16, 2, 12, torch.float32), torch.tensor(SLOTS), return_k=True)


@pytest.mark.parametrize("way", WAYS)
def test_calls_without_tokens_blocks_or_valid_slots_are_accepted(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "tiles", own_tiles)
    none, slots = torch.zeros(0, dtype=torch.int64), torch.tensor(SLOTS)
    for cache in (CACHES["NHD"], CACHES["k and v side by side"])[: 2 - (way == "triton")]:
        assert_stored(way, qkv(0), cache(4, 16, 2, 12, torch.float32), none, positions=TABLE.slice(4, 4), return_k=True)
        assert_stored(way, qkv(), cache(0, 16, 2, 12, torch.float32), torch.full_like(slots, -1))
        assert_stored(way, qkv(), cache(4, 16, 2, 12, torch.float32), torch.full_like(slots, -1), return_k=True)


# The kernel.


# Prefill and decoding.


def gathered(cache: Held, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return the k and v stored in slots, in the order of the slots."""
    keys, values = ([cache.at(view, slot) for slot in slots.tolist()] for view in (cache.key, cache.value))
    return torch.stack(keys), torch.stack(values)


@pytest.mark.parametrize(
    ("name", "way"),
    [(name, "auto") for name in CACHES] + [pytest.param(name, "triton", marks=pytest.mark.slow) for name in CACHES],
)
def test_chunked_prefill_and_decoding_fill_the_cache_like_the_whole_sequence(name: str, way: Any) -> None:
    documents: list[list[Text | Grid]] = [[Text(5), Grid(3, 4), Text(3)], [Grid(2, 5), Text(4)]]
    prompts = place(SegmentTable.from_documents(documents), "rope-tie")
    longer: list[list[Text | Grid]] = [[Text(5), Grid(3, 4), Text(6)], [Grid(2, 5), Text(7)]]
    whole = place(SegmentTable.from_documents(longer), "rope-tie")
    cache = CACHES[name](12, 4, 2, 12, torch.bfloat16)
    q, k, v = (heads(whole.num_tokens, n, 12, torch.bfloat16, seed) for seed, n in enumerate((3, 2, 2)))
    # Blocks are assigned alternately, starting with the last block, so no request has consecutive blocks.
    slots = torch.tensor(
        [4 * (11 - 2 * (i // 4)) + i % 4 for i in range(23)] + [4 * (10 - 2 * (i // 4)) + i % 4 for i in range(17)],
        device=DEVICE,
    )
    q_got = torch.empty_like(q)

    def step(positions: PositionTable | Tensor, tokens: Tensor) -> None:
        step_cache, qkv = cache.with_slots(slots[tokens]), (q[tokens], k[tokens], v[tokens])
        q_got[tokens], _ = rotate_and_store(*qkv, positions, ROTARY, step_cache, implementation=way)

    first, second = torch.arange(40).split([23, 17])
    step(prompts.slice(0, 9), first[:9])  # within the image
    step(prompts.slice(9, 20), first[9:20])
    step(prompts.slice(20, 34), second[:14])
    for i in range(3):
        step(torch.from_numpy(prompts.decode(1).dense()).to(DEVICE) + i, torch.stack([first[20 + i], second[14 + i]]))
    q_want, k_want = apply_rotary(q, k, whole, ROTARY, implementation=way)
    k_got, v_got = gathered(cache, slots)
    assert_same_bits(q_got, q_want)
    assert_same_bits(k_got, k_want)
    assert_same_bits(v_got, v)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_caches_with_more_than_2_to_the_31_elements_are_written(way: Any) -> None:
    blocks = 2**31 // (16 * 2 * 12) + 3
    q, k, v = qkv(dtype=torch.float16)
    # The system does not allocate memory that is never written.
    key, value = (torch.empty(blocks, 16, 2, 12, dtype=torch.float16, device=DEVICE) for _ in range(2))
    slots = torch.arange(16 * blocks - 13, 16 * blocks, device=DEVICE)
    rotate_and_store(q, k, v, TABLE, ROTARY, Cache(key, value, slots), implementation=way)
    _, k_want = apply_rotary(q, k, TABLE, ROTARY)
    assert_same_bits(key[-1, 3:], k_want)
    assert_same_bits(value[-1, 3:], v)


# Slots that are not checked, as on a device.


def store_unchecked(cache: Held, slots: Tensor, implementation: int) -> tuple[Tensor, Tensor]:
    """Call the operator without argument checks; return v and the rotated k that it should store."""
    q, k, v = qkv()
    table = packed("rope-tie").slice(4, 17)
    rotation = rotation_of(ids_on(table, ROTARY, DEVICE), ROTARY, implementation=implementation)
    caches = cache.key, cache.value, slots.to(DEVICE), False
    operators.rotate_and_store(q[None], k[None], v[None], *caches, *NO_NORM, *rotation)
    return v, apply_rotary(k, None, table, ROTARY, implementation="reference")[0]


BEYOND = [3, 64, 2**31, 2**40 + 5, -(2**40), 63, -1, 2**63 - 1, 0, -(2**63), 128, 9, 65]


@pytest.mark.parametrize("implementation", [REFERENCE, TRITON])
@pytest.mark.parametrize("slots", [BEYOND, [5, 64, 100], [-1] * 13])
def test_nothing_is_written_outside_a_cache(slots: list[int], implementation: int) -> None:
    cache, want = (CACHES["NHD"](4, 16, 2, 12, torch.float32) for _ in range(2))
    v, k = store_unchecked(cache, torch.tensor(slots), implementation)
    write(want, k, v, [slot if slot < 64 else -1 for slot in slots])
    assert_holds(cache, want)


def test_validate_refuses_slots_that_the_host_did_not_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # values are not checked, as on a device
    pages, slots = torch.zeros(4, 16, 2, 12), torch.tensor([[3, 64]], dtype=torch.int32)
    assert torch.equal(paged.slots_of(slots, 1, 2, pages, validate=False), slots[0])
    with pytest.raises(InvalidInputError, match=r"^slot_mapping\[1\]: got 64, want < 64, the number of slots"):
        paged.slots_of(slots, 1, 2, pages, validate=True)
    twice = torch.tensor([3, 2, -1, -1, 3])
    assert torch.equal(paged.slots_of(twice, 1, 5, pages, validate=False), twice)
    with pytest.raises(InvalidInputError, match=r"^slot_mapping\[4\]: got 3, the slot of token 0, want"):
        paged.slots_of(twice, 1, 5, pages, validate=True)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("implementation", ["auto", "triton"])
def test_autograd_detects_that_saved_tensors_were_written(implementation: Any, inplace: bool) -> None:
    cache = CACHES["NHD"](4, 16, 2, 12, torch.float32)
    q, k, v = qkv()
    options: Any = {"implementation": implementation, "inplace": inplace, "return_k": inplace}
    factor = torch.zeros((), requires_grad=True, device=DEVICE)
    written = [cache.key, cache.value, *([q, k] if inplace else [])]
    saved = [(factor * x).sum() for x in written]
    slots = torch.arange(13, device=DEVICE)
    rotate_and_store(q, k, v, TABLE, ROTARY, cache.with_slots(slots), **options)
    for total in saved:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            total.backward()
