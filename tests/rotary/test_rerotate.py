"""rerotate: keys in whole caches against the oracle of rotations by what lies between two tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rotary_oracle import BY_AXES, DTYPES, ROTARIES, assert_rotated, heads, ids_of, lengths, packed, rotated
from rotary_oracle import table_of as positions_at
from store_oracle import CACHES, DEVICE, Held, assert_holds, assert_same_bits, filled, nearest
from tolerance import ARITHMETIC, assert_within, unit
from torch import Tensor

from mmpos import PositionTable
from mmpos.rotary import DevicePositions, Rotary, YaRN, apply_rotary, rerotate

WAYS = ("reference", "triton")
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
ROTARY = Rotary(12, rotary_dim=8)
HERE, THERE = packed("rope-tie-fractional", 70_000).slice(4, 17), packed("rope-tie-fractional", 11).slice(9, 22)
SLOTS = [40, 41, 3, -1, 7, 0, 63, -1, 22, 21, -9, 5, 16]
"""Of 13 tokens, in a cache of 64: out of order, first and last, and three tokens that are not stored."""

pytestmark = pytest.mark.usefixtures("few_programs")


def between(here: PositionTable | Tensor, there: PositionTable | Tensor) -> list[list[Fraction]]:
    """Compute the exact distance by which each token moves on each axis."""
    pairs = zip(ids_of(here), ids_of(there), strict=True)
    return [[Fraction(b) - Fraction(a) for a, b in zip(*pair, strict=True)] for pair in pairs]


def put(cache: Held, keys: Tensor, slots: list[int]) -> None:
    """Write keys of tokens where they belong."""
    for key, slot in zip(keys, slots, strict=True):
        if slot >= 0:
            cache.at(cache.key, slot).copy_(key)


def taken(cache: Held, slots: list[int]) -> Tensor:
    """(tokens, heads, head_dim) keys of slots that there are."""
    return torch.stack([cache.at(cache.key, slot) for slot in slots if slot >= 0])


def moved(
    way: Any,
    keys: Tensor,
    here: Any = HERE,
    there: Any = THERE,
    rotary: Rotary = ROTARY,
    cache: Held | None = None,
    slots: list[int] = SLOTS,
    **options: Any,
) -> Tensor:
    """Keys that lay in a cache while they were turned; nothing else in it has changed."""
    cache = cache or CACHES["k and v by page"](4, 16, keys.shape[1], keys.shape[2], keys.dtype)
    put(cache, keys.to(DEVICE), slots)
    want = deepcopy(cache)
    at = torch.tensor(slots, device=DEVICE)
    layout: Any = cache.layout
    rerotate(cache.key, at, here, there, rotary, cache_layout=layout, implementation=way, **options)
    got = taken(cache, slots)
    put(want, got, [slot for slot in slots if slot >= 0])
    assert_holds(cache, want)
    return got


def kept(x: Any, slots: list[int] = SLOTS) -> Any:
    """Those of the tokens that have a slot."""
    return [row for row, slot in zip(x, slots, strict=True) if slot >= 0]


def assert_moved(got: Tensor, keys: Tensor, here: Any, there: Any, rotary: Rotary, slots: list[int] = SLOTS) -> None:
    """Every key is turned by what lies between, with one rounding."""
    assert_rotated(got, torch.stack(kept(keys.to(DEVICE), slots)), kept(between(here, there), slots), rotary)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pairing", ["half", "adjacent"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_pairing_is_turned_with_one_rounding(dtype: torch.dtype, pairing: Any, way: str) -> None:
    rotary, keys = Rotary(12, rotary_dim=8, pairing=pairing), heads(13, 2, 12, dtype)
    got = moved(way, keys, rotary=rotary)
    if way == "triton" and dtype == torch.bfloat16 and DEVICE.type == "cpu":
        # Triton's interpreter truncates to bfloat16 where a GPU rounds.
        assert_same_bits(got, moved("reference", keys, rotary=rotary), 1)
    else:
        assert_moved(got, keys, HERE, THERE, rotary)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CACHES)
def test_every_cache_is_turned_where_it_lies_and_nowhere_else(name: str, way: str) -> None:
    for blocks, size in ((13, 5),) if way == "triton" else ((64, 1), (4, 16), (1, 64), (13, 5)):
        keys = heads(13, 2, 12, torch.float16)
        got = moved(way, keys, cache=CACHES[name](blocks, size, 2, 12, torch.float16))
        assert_moved(got, keys, HERE, THERE, ROTARY)


@pytest.mark.parametrize("name", ROTARIES)
def test_every_allocation_is_turned(name: str) -> None:
    rotary = ROTARIES[name]
    scheme = BY_AXES[rotary.axes]
    here, there = packed(scheme, 3).slice(4, 17), packed(scheme, 800).slice(0, 13)
    keys = heads(13, 2, rotary.head_dim)
    assert_moved(moved("reference", keys, here, there, rotary), keys, here, there, rotary)


@pytest.mark.parametrize("way", WAYS)
def test_an_attention_factor_is_not_multiplied_again(way: str) -> None:
    rotary = Rotary(12, axes=2, scaling=YaRN(4.0, 64))
    plain = Rotary(12, axes=2, inv_freq=rotary.inv_freq_array.tolist())
    keys = heads(13, 2, 12)
    assert rotary.attention_factor != 1
    assert_moved(moved(way, keys, rotary=rotary), keys, HERE, THERE, plain)


@pytest.mark.parametrize("way", WAYS)
def test_ids_as_far_apart_as_32_bits_allow_are_turned_exactly(way: str) -> None:
    low, high, rotary = -(2**31), 2**31 - 1, Rotary(8)
    here = torch.tensor([[low, high, 0], [high, -1, low]], dtype=torch.int32, device=DEVICE)
    there = torch.tensor([[high, low, high], [low, 2**30, 12345]], dtype=torch.int64, device=DEVICE)
    keys = heads(3, 2, 8)
    assert_moved(moved(way, keys, here, there, rotary, slots=[5, 9, 2]), keys, here, there, rotary, [5, 9, 2])


FORMS: Mapping[str, Callable[[PositionTable], Any]] = {
    "table": lambda table: table,
    "device": lambda table: DevicePositions.from_table(table, DEVICE, 40),
    "ids": lambda table: torch.from_numpy(table.dense()).to(DEVICE),
    "fractional ids": lambda table: torch.from_numpy(table.dense()).double().to(DEVICE),
}


@pytest.mark.parametrize(("one", "other"), [("table", "ids"), ("ids", "device"), ("fractional ids", "table")])
def test_two_forms_of_positions_go_together(one: str, other: str) -> None:
    here, there, keys = packed("rope-tie", 9).slice(4, 17), packed("rope-tie", 40).slice(2, 15), heads(13, 2, 12)
    for way in WAYS:
        got = moved(way, keys, FORMS[one](here), FORMS[other](there))
        assert_moved(got, keys, here, there, ROTARY)


@settings(max_examples=30)
@given(
    st.lists(st.tuples(*[st.fractions(-(2**31), 2**31 - 2, max_denominator=720)] * 4), min_size=1, max_size=6),
    st.sampled_from(sorted(ROTARIES)),
)
def test_any_ids_are_turned_by_what_lies_between(ids: list[tuple[Fraction, ...]], name: str) -> None:
    rotary = ROTARIES[name]
    rows = [[position[axis % 2] for axis in range(rotary.axes)] for position in ids]
    goals = [[position[2 + axis % 2] for axis in range(rotary.axes)] for position in ids]
    here, there = positions_at(rows), positions_at(goals)
    keys, slots = heads(len(ids), 1, rotary.head_dim), list(range(len(ids)))[::-1]
    assert_moved(moved("reference", keys, here, there, rotary, slots=slots), keys, here, there, rotary, slots)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [*DTYPES, *FLOAT8])
def test_keys_that_stay_where_they_are_keep_their_numbers(dtype: torch.dtype, way: str) -> None:
    keys = heads(13, 2, 12).to(dtype)
    scale = torch.tensor(0.25, device=DEVICE) if dtype in FLOAT8 else None
    got = moved(way, keys, HERE, HERE, k_scale=scale)
    assert torch.equal(got.float().cpu(), torch.stack(kept(keys)).float())


@pytest.mark.parametrize("way", WAYS)
def test_as_transformers_has_it_the_difference_of_two_rotations_is_applied(way: str) -> None:
    rotary = Rotary(12, precision="hf")
    here, there = packed("rope-tie", 9).slice(4, 17), packed("rope-tie", 90_000).slice(2, 15)
    keys = heads(13, 2, 12)
    at_first, directly = (apply_rotary(keys, None, table, rotary)[0] for table in (here, there))
    got = moved(way, at_first, here, there, rotary)
    room = 6 * (ARITHMETIC + unit(torch.float32)) * torch.from_numpy(lengths(keys.double().numpy(), rotary))
    assert_within(got.cpu().double(), torch.stack(kept(directly)).double(), torch.stack(kept(room)))


@pytest.mark.parametrize("way", WAYS)
def test_no_tokens_no_blocks_and_nothing_to_turn_are_legal(way: Any) -> None:
    empty = filled(0, 16, 2, 12, dtype=torch.float32)
    none, nowhere = torch.zeros(0, dtype=torch.int64, device=DEVICE), torch.full((13,), -1, device=DEVICE)
    rerotate(empty, nowhere, HERE, THERE, ROTARY, implementation=way)
    rerotate(empty, none, HERE.slice(2, 2), THERE.slice(3, 3), ROTARY, implementation=way)
    for slots in ([-1] * 13, [-1] * 12 + [7]):
        cache, want = (CACHES["NHD"](4, 16, 2, 12, torch.float32) for _ in range(2))
        rerotate(cache.key, torch.tensor(slots[:12], device=DEVICE), HERE, THERE, ROTARY, implementation=way)
        assert_holds(cache, want)


def test_a_cache_of_the_meta_device_lies_nowhere() -> None:
    scale = torch.ones(4, 16, 2, device="meta")
    cache = torch.empty(4, 16, 2, 12, dtype=torch.float8_e4m3fn, device="meta")
    rerotate(cache, torch.arange(13, device="meta"), HERE, THERE, ROTARY, k_scale=scale)


# Caches of 8 bits.


def of_8_bits(dtype: torch.dtype) -> Tensor:
    """Keys of a cache with every size of number, of which some pairs outgrow the largest when they are turned."""
    largest = torch.finfo(dtype).max
    size = largest * 2.0 ** -torch.arange(13.0)
    keys = torch.where(size[:, None, None] == largest, largest, heads(13, 2, 12) * size[:, None, None])
    return keys.clamp(-largest, largest).to(dtype)


@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("way", WAYS)
def test_keys_of_8_bits_are_rounded_once_and_none_outgrows_the_largest(dtype: torch.dtype, way: str) -> None:
    keys, slots = of_8_bits(dtype), list(range(13))
    got = moved(way, keys, slots=slots, k_scale=torch.full((2,), 0.3, device=DEVICE)).cpu().double()
    before = keys.double().numpy()
    truth = torch.from_numpy(rotated(before, between(HERE, THERE), ROTARY))
    room = ARITHMETIC * torch.from_numpy(lengths(before, ROTARY))
    assert ((got >= nearest(truth - room, dtype)) & (got <= nearest(truth + room, dtype))).all()
    assert (truth.abs() > torch.finfo(dtype).max).any()


@pytest.mark.parametrize("name", ["HND", "all layers in a block", "a pool of slots"])
@pytest.mark.parametrize("way", WAYS)
def test_scales_of_slots_grow_where_a_turned_key_needs_it(name: str, way: str) -> None:
    dtype = torch.float8_e4m3fn
    keys, slots = of_8_bits(dtype), list(range(20, 33))
    cache = CACHES[name](4, 16, 2, 12, dtype)
    scale = torch.full(cache.key.shape[:-1], 0.375, device=DEVICE)
    got = moved(way, keys, cache=cache, slots=slots, k_scale=scale).cpu().double()
    at = Held(scale, scale, (), cache.layout, cache.block_size)
    scales = torch.stack([at.at(scale.unsqueeze(-1), slot) for slot in slots]).squeeze(-1).cpu()
    truth = torch.from_numpy(rotated(keys.double().numpy(), between(HERE, THERE), ROTARY)) * 0.375
    growth = truth.abs().amax(-1).div(0.375 * 448).clamp(min=1)
    assert_within(scales.double(), 0.375 * growth, 1e-6 * growth)
    assert ((scales == 0.375) == (growth == 1)).all()
    assert (growth[0] > 1).all()
    assert float(scale.sum()) == pytest.approx(0.375 * (scale.numel() - 26) + float(scales.sum()))
    # Half a step of 3 bits of mantissa, or of the least number.
    step = torch.maximum(truth.abs() * 2.0**-4, 2.0**-10 * scales[..., None])
    assert ((got * scales[..., None] - truth).abs() <= step * (1 + 1e-5)).all()


def test_all_implementations_give_the_same_8_bits() -> None:
    for dtype in FLOAT8:
        for scale in (torch.tensor([0.3]), torch.rand(4, 16, 2, generator=torch.Generator().manual_seed(0))):
            scales = [scale.clone().to(DEVICE) for _ in WAYS]
            one, other = (moved(way, of_8_bits(dtype), k_scale=x) for way, x in zip(WAYS, scales, strict=True))
            assert_same_bits(one, other)
            assert_same_bits(scales[0], scales[1])


@pytest.mark.parametrize("way", WAYS)
def test_what_autograd_has_saved_is_known_to_have_changed(way: Any) -> None:
    cache, factor = torch.ones(4, 16, 2, 12, device=DEVICE), torch.zeros((), requires_grad=True, device=DEVICE)
    total = (factor * cache).sum()
    rerotate(cache, torch.arange(13, device=DEVICE), HERE, THERE, ROTARY, implementation=way)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()
