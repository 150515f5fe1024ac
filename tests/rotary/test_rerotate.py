"""rerotate: keys in caches are compared with an oracle that rotates by the difference of two position tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rotary_oracle import BY_AXES, DTYPES, ROTARIES, assert_rotated, heads, ids_of, lengths, packed
from rotary_oracle import table_of as positions_at
from store_oracle import CACHES, DEVICE, Held, assert_holds, assert_same_bits, filled
from tolerance import ARITHMETIC, INTERPRETED, assert_within, unit
from torch import Tensor

from mmpos import PositionTable
from mmpos.rotary import DevicePositions, Rotary, YaRN, apply_rotary, rerotate

WAYS = ("reference", "triton")
ROTARY = Rotary(12, rotary_dim=8)
OLD, NEW = packed("rope-tie-fractional", 70_000).slice(4, 17), packed("rope-tie-fractional", 11).slice(9, 22)
SLOTS = [40, 41, 3, -1, 7, 0, 63, -1, 22, 21, -9, 5, 16]
"""Unordered slots for 13 tokens in a 64-slot cache, including the first and last slot; three tokens have no slot."""

pytestmark = pytest.mark.usefixtures("few_programs")


def between(old: PositionTable | Tensor, new: PositionTable | Tensor) -> list[list[Fraction]]:
    """Compute the exact distance between the old and new position of each token on each axis."""
    pairs = zip(ids_of(old), ids_of(new), strict=True)
    return [[Fraction(b) - Fraction(a) for a, b in zip(*pair, strict=True)] for pair in pairs]


def put(cache: Held, keys: Tensor, slots: list[int]) -> None:
    """Write the keys of tokens to their slots."""
    for key, slot in zip(keys, slots, strict=True):
        if slot >= 0:
            cache.at(cache.key, slot).copy_(key)


def taken(cache: Held, slots: list[int]) -> Tensor:
    """Return the (tokens, heads, head_dim) keys in all slots >= 0."""
    return torch.stack([cache.at(cache.key, slot) for slot in slots if slot >= 0])


def moved(
    way: Any,
    keys: Tensor,
    old: Any = OLD,
    new: Any = NEW,
    rotary: Rotary = ROTARY,
    cache: Held | None = None,
    slots: list[int] = SLOTS,
) -> Tensor:
    """Rerotate keys in a cache and return them; assert that nothing else in the cache has changed."""
    cache = cache or CACHES["k and v by page"](4, 16, keys.shape[1], keys.shape[2], keys.dtype)
    put(cache, keys.to(DEVICE), slots)
    want = deepcopy(cache)
    nhd = cache.key.transpose(1, 2) if cache.layout == "HND" else cache.key
    rerotate(nhd, torch.tensor(slots, device=DEVICE), old, new, rotary, implementation=way)
    got = taken(cache, slots)
    put(want, got, [slot for slot in slots if slot >= 0])
    assert_holds(cache, want)
    return got


def kept(x: Any, slots: list[int] = SLOTS) -> Any:
    """Return the rows of the tokens that have a slot."""
    return [row for row, slot in zip(x, slots, strict=True) if slot >= 0]


def assert_moved(got: Tensor, keys: Tensor, old: Any, new: Any, rotary: Rotary, slots: list[int] = SLOTS) -> None:
    """Assert that every key is rotated by the difference of its positions and rounded once."""
    assert_rotated(got, torch.stack(kept(keys.to(DEVICE), slots)), kept(between(old, new), slots), rotary)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pairing", ["half", "adjacent"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_pairing_is_rerotated_with_one_rounding(dtype: torch.dtype, pairing: Any, way: str) -> None:
    rotary, keys = Rotary(12, rotary_dim=8, pairing=pairing), heads(13, 2, 12, dtype)
    got = moved(way, keys, rotary=rotary)
    if way == "triton" and dtype == torch.bfloat16 and INTERPRETED:
        # Triton's interpreter truncates to bfloat16, whereas a GPU rounds.
        assert_same_bits(got, moved("reference", keys, rotary=rotary), 1)
    else:
        assert_moved(got, keys, OLD, NEW, rotary)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CACHES)
def test_every_cache_layout_is_rerotated_in_place_and_only_at_its_slots(name: str, way: str) -> None:
    for blocks, size in ((13, 5),) if way == "triton" else ((64, 1), (4, 16), (1, 64), (13, 5)):
        keys = heads(13, 2, 12, torch.float16)
        got = moved(way, keys, cache=CACHES[name](blocks, size, 2, 12, torch.float16))
        assert_moved(got, keys, OLD, NEW, ROTARY)


@pytest.mark.parametrize("name", ROTARIES)
def test_every_allocation_is_rerotated(name: str) -> None:
    rotary = ROTARIES[name]
    scheme = BY_AXES[rotary.axes]
    old, new = packed(scheme, 3).slice(4, 17), packed(scheme, 800).slice(0, 13)
    keys = heads(13, 2, rotary.head_dim)
    assert_moved(moved("reference", keys, old, new, rotary), keys, old, new, rotary)


@pytest.mark.parametrize("way", WAYS)
def test_an_attention_factor_is_not_applied_again(way: str) -> None:
    rotary = Rotary(12, axes=2, scaling=YaRN(4.0, 64))
    plain = Rotary(12, axes=2, inv_freq=rotary.inv_freq_array.tolist())
    keys = heads(13, 2, 12)
    assert rotary.attention_factor != 1
    assert_moved(moved(way, keys, rotary=rotary), keys, OLD, NEW, plain)


@pytest.mark.parametrize("way", WAYS)
def test_the_largest_distances_of_int32_ids_are_rerotated_exactly(way: str) -> None:
    low, high, rotary = -(2**31), 2**31 - 1, Rotary(8)
    old = torch.tensor([[low, high, 0], [high, -1, low]], dtype=torch.int32, device=DEVICE)
    new = torch.tensor([[high, low, high], [low, 2**30, 12345]], dtype=torch.int64, device=DEVICE)
    keys = heads(3, 2, 8)
    assert_moved(moved(way, keys, old, new, rotary, slots=[5, 9, 2]), keys, old, new, rotary, [5, 9, 2])


FORMS: Mapping[str, Callable[[PositionTable], Any]] = {
    "table": lambda table: table,
    "device": lambda table: DevicePositions.from_table(table, DEVICE, 40),
    "ids": lambda table: torch.from_numpy(table.dense()).to(DEVICE),
    "fractional ids": lambda table: torch.from_numpy(table.dense()).double().to(DEVICE),
}


@pytest.mark.parametrize(("one", "other"), [("table", "ids"), ("ids", "device"), ("fractional ids", "table")])
def test_old_and_new_positions_may_have_different_forms(one: str, other: str) -> None:
    old, new, keys = packed("rope-tie", 9).slice(4, 17), packed("rope-tie", 40).slice(2, 15), heads(13, 2, 12)
    for way in WAYS:
        got = moved(way, keys, FORMS[one](old), FORMS[other](new))
        assert_moved(got, keys, old, new, ROTARY)


@settings(max_examples=30)
@given(
    st.lists(st.tuples(*[st.fractions(-(2**31), 2**31 - 2, max_denominator=720)] * 4), min_size=1, max_size=6),
    st.sampled_from(sorted(ROTARIES)),
)
def test_any_ids_are_rerotated_by_their_difference(ids: list[tuple[Fraction, ...]], name: str) -> None:
    rotary = ROTARIES[name]
    rows = [[position[axis % 2] for axis in range(rotary.axes)] for position in ids]
    goals = [[position[2 + axis % 2] for axis in range(rotary.axes)] for position in ids]
    old, new = positions_at(rows), positions_at(goals)
    keys, slots = heads(len(ids), 1, rotary.head_dim), list(range(len(ids)))[::-1]
    assert_moved(moved("reference", keys, old, new, rotary, slots=slots), keys, old, new, rotary, slots)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_whose_old_and_new_positions_are_equal_stay_unchanged(dtype: torch.dtype, way: str) -> None:
    keys = heads(13, 2, 12).to(dtype)
    assert torch.equal(moved(way, keys, OLD, OLD).cpu(), torch.stack(kept(keys)))


@pytest.mark.parametrize("way", WAYS)
def test_hf_precision_applies_the_difference_of_two_rotations(way: str) -> None:
    rotary = Rotary(12, precision="hf")
    old, new = packed("rope-tie", 9).slice(4, 17), packed("rope-tie", 90_000).slice(2, 15)
    keys = heads(13, 2, 12)
    at_old, at_new = (apply_rotary(keys, None, table, rotary)[0] for table in (old, new))
    got = moved(way, at_old, old, new, rotary)
    room = 6 * (ARITHMETIC + unit(torch.float32)) * torch.from_numpy(lengths(keys.double().numpy(), rotary))
    assert_within(got.cpu().double(), torch.stack(kept(at_new)).double(), torch.stack(kept(room)))


@pytest.mark.parametrize("way", WAYS)
def test_empty_caches_empty_slots_and_negative_slots_are_accepted(way: Any) -> None:
    empty = filled(0, 16, 2, 12, dtype=torch.float32)
    none, nowhere = torch.zeros(0, dtype=torch.int64, device=DEVICE), torch.full((13,), -1, device=DEVICE)
    rerotate(empty, nowhere, OLD, NEW, ROTARY, implementation=way)
    rerotate(empty, none, OLD.slice(2, 2), NEW.slice(3, 3), ROTARY, implementation=way)
    for slots in ([-1] * 13, [-1] * 12 + [7]):
        cache, want = (CACHES["NHD"](4, 16, 2, 12, torch.float32) for _ in range(2))
        rerotate(cache.key, torch.tensor(slots[:12], device=DEVICE), OLD, NEW, ROTARY, implementation=way)
        assert_holds(cache, want)


def test_a_cache_on_the_meta_device_is_accepted() -> None:
    cache = torch.empty(4, 16, 2, 12, device="meta")
    rerotate(cache, torch.arange(13, device="meta"), OLD, NEW, ROTARY)


@pytest.mark.parametrize("way", WAYS)
def test_autograd_detects_that_a_saved_cache_was_rerotated(way: Any) -> None:
    cache, factor = torch.ones(4, 16, 2, 12, device=DEVICE), torch.zeros((), requires_grad=True, device=DEVICE)
    total = (factor * cache).sum()
    rerotate(cache, torch.arange(13, device=DEVICE), OLD, NEW, ROTARY, implementation=way)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()
