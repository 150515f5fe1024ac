"""Paged caches: rotate_and_store and rerotate are compared with loops over tokens and 60-digit phases, cell by cell."""

from __future__ import annotations

from copy import deepcopy
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rotary_oracle import BY_HEAD, DTYPES, FORMS, ROTARIES, assert_rotated, ids_of, lengths, packed, table_of
from rotary_oracle import device_heads as heads
from store_oracle import CACHES, DEVICE, Held, assert_holds, assert_same_bits, filled, flat, write
from tolerance import ARITHMETIC, INTERPRETED, assert_within, truncation, unit
from torch import Tensor

from mmpos.rotary import Cache, Norm, Rotary, YaRN, apply_rotary, paged, rerotate, rotate_and_store
from mmpos.rotary.kernel import tiling

STORES = pytest.mark.parametrize("way", ["auto", "triton"])
MOVES = pytest.mark.parametrize("way", ["reference", "triton"])
TABLE = packed("rope-tie-fractional", 70_000).slice(4, 17)
NEW = packed("rope-tie-fractional", 11).slice(9, 22)
ROTARY = Rotary(12, rotary_dim=8)
SLOTS = [40, 41, 3, -1, 7, 0, 63, -1, 22, 21, -9, 5, 16]
"""Unordered slots for 13 tokens in a 64-slot cache, including the first and last slot; three tokens have no slot."""

own_tiles = tiling.tiles

pytestmark = pytest.mark.usefixtures("few_programs", "poison")


def slots_of(*slots: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(slots, dtype=dtype, device=DEVICE)


def qkv(tokens: int = 13, dtype: torch.dtype = torch.float32, dim: int = 12, v_dim: int = 12) -> list[Tensor]:
    """Return q with three heads, and k and v with two."""
    return [heads(tokens, n, d, dtype, seed=seed) for seed, (n, d) in enumerate(((3, dim), (2, dim), (2, v_dim)))]


def assert_stored(way: str, tensors: list[Tensor], cache: Held, slots: Tensor, **options: Any) -> None:
    """Call rotate_and_store, and compare q, the returned k and whole caches with apply_rotary and a loop."""
    q, k, v = tensors
    options = {"positions": TABLE, "rotary": ROTARY, **options}
    shared = {name: options[name] for name in options if name not in ("inplace", "return_k")}
    want, layout = deepcopy(cache), options.get("layout")  # deepcopy keeps views that share memory
    # The kernel adds the squares of a norm in a different order; otherwise all implementations give the same bits.
    judge: Any = way if options.get("norm") is not None else "reference"
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


def some_norm(names: str, after: bool) -> Norm | None:
    """Return a norm of the named tensors, or None."""
    q_weight, k_weight = (heads(1, 1, 12, seed=ord(x)).flatten() if x in names else None for x in "qk")
    return Norm(q_weight, k_weight, 1e-5, 0.5, after) if names else None


@pytest.mark.parametrize(
    ("cache", "way"),
    [(name, "auto") for name in CACHES]
    + [(name, "triton") for name in ("NHD", "k and v by page, HND")]
    + [pytest.param(name, "triton", marks=pytest.mark.slow) for name in CACHES],
)
def test_every_cache_is_written_only_at_its_slots(cache: str, way: str) -> None:
    for blocks, size in ((13, 5),) if way == "triton" else ((64, 1), (4, 16), (1, 64), (13, 5)):
        assert_stored(way, qkv(), CACHES[cache](blocks, size, 2, 12, torch.float32), slots_of(*SLOTS))


@settings(max_examples=32)
@given(
    way=st.sampled_from(["auto", "auto", "auto", "triton"]),
    cache=st.sampled_from(sorted(CACHES)),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(["thd", "bshd", "bhsd"]),
    rotary_dim=st.sampled_from([4, 8, 12]),
    pairing=st.sampled_from(["half", "adjacent"]),
    norm=st.builds(some_norm, st.sampled_from(["", "", "q", "k", "qk"]), st.booleans()),
    count=st.sampled_from([39, 39, 20, 0]),
    kind=st.sampled_from([torch.int32, torch.int64]),
    inplace=st.booleans(),
    return_k=st.booleans(),
)
def test_views_of_a_fused_qkv_are_stored(
    way: str, cache: str, dtype: torch.dtype, layout: str, rotary_dim: int, pairing: Any, norm: Any, count: int,
    kind: torch.dtype, inplace: bool, return_k: bool,
) -> None:  # fmt: skip
    fused = heads(39, 7, 12, dtype)
    views = fused if layout == "thd" else fused.view(3, 13, 7, 12)
    tensors = [x.transpose(1, 2) if layout == "bhsd" else x for x in views.split([3, 2, 2], dim=-2)]
    slots = torch.arange(39, device=DEVICE, dtype=kind).flip(0)[:count]  # the tokens after them are not stored
    slots[3::27] = -1
    options: Any = {"layout": layout, "inplace": inplace, "return_k": return_k, "norm": norm}
    mapping = slots.view(3, 13) if layout != "thd" and count == 39 else slots
    held, table = CACHES[cache](4, 16, 2, 12, dtype), packed("rope-tie").pad(13)
    rotary = Rotary(12, rotary_dim=rotary_dim, pairing=pairing)
    assert_stored(way, tensors, held, mapping, positions=table, rotary=rotary, **options)


@STORES
def test_q_k_and_v_with_any_strides_and_head_dims_are_stored(way: str) -> None:
    q, k, v = heads(26, 6, 24)[1::2, ::2, ::2], heads(12, 2, 13, seed=1).permute(2, 1, 0), heads(1, 1, 12, seed=2)
    cache = CACHES["NHD"](4, 16, 2, 12, torch.float32)
    assert_stored(way, [q, k, v.expand(13, 2, 12)], cache, slots_of(*SLOTS), return_k=True)
    for dim, v_dim in ((6, 10), (24, 16)):
        key, value = filled(4, 16, 2, dim, dtype=torch.float32), filled(4, 2, 16, v_dim, dtype=torch.float32)
        cache = Held(key, value.transpose(1, 2), (key, value), "NHD", 16)
        assert_stored(way, qkv(dim=dim, v_dim=v_dim), cache, slots_of(*SLOTS), rotary=Rotary(dim))


@STORES
def test_calls_without_tokens_blocks_or_valid_slots_are_accepted(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "tiles", own_tiles)
    none, nowhere = slots_of(), slots_of(*[-1] * 13)
    for cache in (CACHES["NHD"], CACHES["k and v side by side"])[: 2 - (way == "triton")]:
        assert_stored(way, qkv(0), cache(4, 16, 2, 12, torch.float32), none, positions=TABLE.slice(4, 4), return_k=True)
        assert_stored(way, qkv(), cache(0, 16, 2, 12, torch.float32), nowhere)
        assert_stored(way, qkv(), cache(4, 16, 2, 12, torch.float32), nowhere, return_k=True)


@pytest.mark.slow
@STORES
def test_caches_with_more_than_2_to_the_31_elements_are_written(way: Any) -> None:
    blocks = 2**31 // (16 * 2 * 12) + 3
    q, k, v = qkv(dtype=torch.float16)
    torch.use_deterministic_algorithms(False)  # no poison: the system does not allocate memory that is never written
    key, value = (torch.empty(blocks, 16, 2, 12, dtype=torch.float16, device=DEVICE) for _ in range(2))
    slots = torch.arange(16 * blocks - 13, 16 * blocks, device=DEVICE)
    rotate_and_store(q, k, v, TABLE, ROTARY, Cache(key, value, slots), implementation=way)
    assert_same_bits(key[-1, 3:], apply_rotary(q, k, TABLE, ROTARY)[1])
    assert_same_bits(value[-1, 3:], v)


# rerotate.


def put(cache: Held, keys: Tensor, slots: list[int]) -> None:
    """Write the keys of tokens to their slots."""
    for key, slot in zip(keys, slots, strict=True):
        if slot >= 0:
            cache.at(cache.key, slot).copy_(key)


def taken(cache: Held, slots: list[int]) -> Tensor:
    """Return the (tokens, heads, head_dim) keys in all slots >= 0."""
    return torch.stack([cache.at(cache.key, slot) for slot in slots if slot >= 0])


def moved(
    way: Any, keys: Tensor, old: Any = TABLE, new: Any = NEW, rotary: Rotary = ROTARY, cache: Held | None = None,
    slots: list[int] = SLOTS,
) -> Tensor:  # fmt: skip
    """Rerotate keys in a cache and return them; assert that nothing else in the cache has changed."""
    cache = cache or CACHES["k and v by page"](4, 16, keys.shape[1], keys.shape[2], keys.dtype)
    put(cache, keys, slots)
    want = deepcopy(cache)
    nhd = cache.key.transpose(1, 2) if cache.layout == "HND" else cache.key
    rerotate(nhd, slots_of(*slots), old, new, rotary, implementation=way)
    got = taken(cache, slots)
    put(want, got, [slot for slot in slots if slot >= 0])
    assert_holds(cache, want)
    return got


def kept(x: Any, slots: list[int] = SLOTS) -> Any:
    """Return the rows of the tokens that have a slot."""
    return [row for row, slot in zip(x, slots, strict=True) if slot >= 0]


def assert_moved(got: Tensor, keys: Tensor, old: Any, new: Any, rotary: Rotary, slots: list[int] = SLOTS) -> None:
    """Assert that every key is rotated by the exact difference of its positions and rounded once."""
    pairs = zip(ids_of(old), ids_of(new), strict=True)
    between = [[Fraction(b) - Fraction(a) for a, b in zip(*pair, strict=True)] for pair in pairs]
    assert_rotated(got, torch.stack(kept(keys, slots)), kept(between, slots), rotary)


@MOVES
@pytest.mark.parametrize("pairing", ["half", "adjacent"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_pairing_is_rerotated_with_one_rounding(dtype: torch.dtype, pairing: Any, way: str) -> None:
    rotary, keys = Rotary(12, rotary_dim=8, pairing=pairing), heads(13, 2, 12, dtype)
    got = moved(way, keys, rotary=rotary)
    if way == "triton" and dtype == torch.bfloat16 and INTERPRETED:  # the interpreter truncates
        assert_same_bits(got, moved("reference", keys, rotary=rotary), 1)
    else:
        assert_moved(got, keys, TABLE, NEW, rotary)
    assert_same_bits(moved(way, keys, TABLE, TABLE, rotary), torch.stack(kept(keys)))


@MOVES
@pytest.mark.parametrize("name", CACHES)
def test_every_cache_is_rerotated_in_place_and_only_at_its_slots(name: str, way: str) -> None:
    keys = heads(13, 2, 12, torch.float16)
    got = moved(way, keys, cache=CACHES[name](13, 5, 2, 12, torch.float16))
    assert_moved(got, keys, TABLE, NEW, ROTARY)


@MOVES
def test_fewer_slots_than_positions_move_the_first_tokens(way: str) -> None:
    keys = heads(13, 2, 12, torch.float16)
    assert_same_bits(moved(way, keys[:3], slots=SLOTS[:3]), moved(way, keys)[:3])


SCALED = BY_HEAD["scaled"]  # its factor is not applied again
FAST = BY_HEAD["own frequencies"]  # its frequencies multiply the error of a fraction


@settings(max_examples=30)
@given(
    st.lists(st.tuples(*[st.fractions(-(2**31), 2**31 - 2, max_denominator=720)] * 4), min_size=1, max_size=6),
    st.sampled_from([one for one in (*ROTARIES.values(), *BY_HEAD.values()) if one not in (SCALED, FAST)]),
)
@pytest.mark.parametrize("way", ["reference", pytest.param("triton", marks=pytest.mark.slow)])
def test_any_ids_are_rerotated_by_their_difference(way: str, ids: list[tuple[Fraction, ...]], rotary: Rotary) -> None:
    old, new = (
        table_of([[position[at + axis % 2] for axis in range(rotary.axes)] for position in ids]) for at in (0, 2)
    )
    keys, slots = heads(len(ids), rotary.own_heads or 1, rotary.head_dim), list(range(len(ids)))[::-1]
    assert_moved(moved(way, keys, old, new, rotary, slots=slots), keys, old, new, rotary, slots)


@MOVES
def test_forms_factors_and_the_largest_distances_are_rerotated_exactly(way: str) -> None:
    keys, plain = heads(13, 2, 12), Rotary(12, axes=2, scaling=YaRN(4.0, 64))
    assert plain.attention_factor != 1  # it is not applied again
    unscaled = Rotary(12, axes=2, inv_freq=plain.inv_freq_array.tolist())
    assert_moved(moved(way, keys, rotary=plain), keys, TABLE, NEW, unscaled)
    old, new = packed("rope-tie", 9).slice(4, 17), packed("rope-tie", 40).slice(2, 15)
    for one, other in (("table", "ids"), ("ids", "spare columns"), ("float64", "table")):
        assert_moved(moved(way, keys, FORMS[one](old), FORMS[other](new)), keys, old, new, ROTARY)
    low, high, rotary = -(2**31), 2**31 - 1, Rotary(8)
    start = torch.tensor([[low, high, 0], [high, -1, low]], dtype=torch.int32, device=DEVICE)
    stop = torch.tensor([[high, low, high], [low, 2**30, 12345]], dtype=torch.int64, device=DEVICE)
    keys = heads(3, 2, 8)
    assert_moved(moved(way, keys, start, stop, rotary, slots=[5, 9, 2]), keys, start, stop, rotary, [5, 9, 2])


@MOVES
def test_hf_precision_applies_the_difference_of_two_rotations(way: str) -> None:
    rotary, keys = Rotary(12, precision="hf"), heads(13, 2, 12)
    old, new = packed("rope-tie", 9).slice(4, 17), packed("rope-tie", 90_000).slice(2, 15)
    at_old, at_new = (apply_rotary(keys, None, table, rotary)[0] for table in (old, new))
    room = 6 * (ARITHMETIC + unit(torch.float32)) * torch.from_numpy(lengths(keys.cpu().double().numpy(), rotary))
    got = moved(way, at_old, old, new, rotary)
    assert_within(got.cpu().double(), torch.stack(kept(at_new)).cpu().double(), torch.stack(kept(room)))


@MOVES
def test_empty_caches_and_slots_are_accepted(way: Any) -> None:
    empty = filled(0, 16, 2, 12, dtype=torch.float32)
    rerotate(empty, slots_of(*[-1] * 13), TABLE, NEW, ROTARY, implementation=way)
    rerotate(empty, slots_of(), TABLE.slice(2, 2), NEW.slice(3, 3), ROTARY, implementation=way)
    cache, want = (CACHES["NHD"](4, 16, 2, 12, torch.float32) for _ in range(2))
    rerotate(cache.key, slots_of(*[-1] * 12), TABLE, NEW, ROTARY, implementation=way)
    assert_holds(cache, want)
    rerotate(torch.empty(4, 16, 2, 12, device="meta"), torch.arange(13, device="meta"), TABLE, NEW, ROTARY)


# Slots that are not checked, as on a device and in compiled graphs.

BEYOND = [3, 64, 2**31, 2**40 + 5, -(2**40), 63, -1, 2**63 - 1, 0, -(2**63), 128, 9, 65]


@pytest.mark.parametrize("way", ["reference", "triton"])
@pytest.mark.parametrize("slots", [BEYOND, [5, 64, 100], [-1] * 13])
def test_nothing_is_written_outside_a_cache(slots: list[int], way: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "check_slots", lambda *_: None)
    wholes = [filled(2, 13, 16, 2, 12, dtype=torch.float32) for _ in range(2)]  # with memory before and after the cache
    cache, want = (Held(x[0, 4:8], x[1, 4:8], (x,), "NHD", 16) for x in wholes)
    q, k, v = qkv()
    rotate_and_store(q, k, v, TABLE, ROTARY, cache.with_slots(slots_of(*slots)), implementation=way)
    rotated = apply_rotary(k, None, TABLE, ROTARY, implementation="reference")[0]
    inside = [slot if slot < 64 else -1 for slot in slots]
    write(want, rotated, v, inside)
    assert_holds(cache, want)
    rerotate(cache.key, slots_of(*slots), TABLE, TABLE, ROTARY, implementation=way)
    assert_holds(cache, want)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("way", ["reference", "auto", "triton"])
def test_autograd_detects_that_saved_tensors_were_written(way: Any, inplace: bool) -> None:
    cache, (q, k, v) = CACHES["NHD"](4, 16, 2, 12, torch.float32), qkv()
    factor = torch.zeros((), requires_grad=True, device=DEVICE)
    saved = [(factor * x).sum() for x in (cache.key, cache.value, *([q, k] if inplace else []))]
    slots = torch.arange(13, device=DEVICE)
    options: Any = {"inplace": inplace, "return_k": inplace}
    rotate_and_store(q, k, v, TABLE, ROTARY, cache.with_slots(slots), implementation=way, **options)
    saved.append((factor * cache.key).sum())
    rerotate(cache.key, slots, TABLE, NEW, ROTARY, implementation=way)
    for total in saved:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            total.backward()
