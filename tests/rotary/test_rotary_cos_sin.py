"""cos and sin from an engine's cache: results are bit-equal to the engines' formula for all forms of positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rotary_oracle import channels, heads, pair_axes
from tolerance import INTERPRETED
from torch import Tensor

from mmpos import Grid, PositionTable, SegmentTable, Text, place
from mmpos.rotary import Cache, DevicePositions, Rotary, YaRN, apply_rotary, cos_sin, rotate_and_store
from mmpos.rotary.device import ids_on, rotation_of
from mmpos.rotary.operators import rotate
from mmpos.rotary.reference import AUTO, NO_NORM, REFERENCE, TRITON

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WAYS = ("reference", "auto", "triton")
FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16

pytestmark = pytest.mark.usefixtures("few_programs", "poison")

TABLE = place(SegmentTable.from_documents([[Text(3), Grid(2, 3), Text(2)], [Text(2)]]), "mrope")
ROWS = 8
"""One more than the largest id."""

ROTARIES = {
    "sections": Rotary(20, rotary_dim=12, axes=3, allocation="sections", mrope_section=[2, 3, 1]),
    "mrope-interleaved": Rotary(20, rotary_dim=12, axes=3, allocation="mrope-interleaved", mrope_section=[2, 2, 2]),
    "adjacent": Rotary(20, rotary_dim=12, axes=3, allocation="sections", mrope_section=[2, 3, 1], pairing="adjacent"),
    "whole heads": Rotary(24, axes=3, allocation="sections", mrope_section=[5, 4, 3]),  # 12 pairs, processed in pieces
    "whole heads, adjacent": Rotary(24, axes=3, allocation="sections", mrope_section=[5, 4, 3], pairing="adjacent"),
}
ROTARY = ROTARIES["sections"]


def cache_of(dtype: torch.dtype = FLOAT32, rows: int = ROWS, width: int = 12) -> Tensor:
    """Return random rows that no frequencies can produce."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(7)).to(dtype).to(DEVICE)


def engines(x: Tensor, ids: Tensor, cache: Tensor, rotary: Rotary, *, inverse: bool = False) -> Tensor:
    """Rotate as vLLM's rotary_embedding does: with x, the row and products in float32, rounding once."""
    out, x32, rows = x.detach().cpu().clone(), x.detach().float().cpu().numpy(), cache.float().cpu().numpy()
    pairs = rotary.rotary_dim // 2
    for token, row in enumerate(ids.T.tolist()):
        for j, (axis, first, second) in enumerate(zip(pair_axes(rotary), *channels(rotary), strict=True)):
            cos, sin = rows[row[axis], j], rows[row[axis], pairs + j]
            sin = -sin if inverse else sin
            a, b = x32[token, :, first], x32[token, :, second]
            out[token, :, first] = torch.from_numpy(a * cos - b * sin).to(x.dtype)
            out[token, :, second] = torch.from_numpy(b * cos + a * sin).to(x.dtype)
    return out.to(x.device)


def tensors(dtype: torch.dtype = FLOAT32) -> tuple[Tensor, Tensor]:
    return heads(13, 3, 20, dtype).to(DEVICE), heads(13, 1, 20, dtype, seed=1).to(DEVICE)


def ids_of(table: PositionTable = TABLE) -> Tensor:
    return torch.from_numpy(table.dense()).to(DEVICE)


# Triton's interpreter truncates to bfloat16, whereas a GPU rounds.
@pytest.mark.parametrize(
    ("way", "dtype", "cache_dtype"),
    [
        (way, dtype, cache_dtype)
        for way in WAYS
        for dtype in (FLOAT32, FLOAT16, BFLOAT16)
        for cache_dtype in (FLOAT32, FLOAT16, BFLOAT16)
        if way != "triton" or dtype != BFLOAT16 or not INTERPRETED
    ],
)
def test_every_dtype_is_bit_equal_to_the_engines_formula(way: Any, dtype: Any, cache_dtype: Any) -> None:
    cache, (q, k) = cache_of(cache_dtype), tensors(dtype)
    options: Any = {"cos_sin": cache, "implementation": way}
    for got, x in zip(apply_rotary(q, k, TABLE, ROTARY, **options), (q, k), strict=True):
        assert got is not None
        assert got.dtype == dtype
        assert torch.equal(got, engines(x, ids_of(), cache, ROTARY))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ROTARIES)
def test_every_allocation_and_pairing_reads_the_rows_of_its_axes(name: str, way: Any) -> None:
    rotary = ROTARIES[name]
    q, cache = heads(13, 3, rotary.head_dim).to(DEVICE), cache_of(width=rotary.rotary_dim)
    for conjugate in (False, True):
        got, _ = apply_rotary(q, None, TABLE, rotary, cos_sin=cache, implementation=way, conjugate=conjugate)
        assert torch.equal(got, engines(q, ids_of(), cache, rotary, inverse=conjugate))


def test_a_cache_of_exact_cos_and_sin_reproduces_the_rotation_with_its_factor_applied_once() -> None:
    rotary = Rotary(20, rotary_dim=12, scaling=YaRN(4.0, 4096), axes=3, allocation=[0, 1, 2, 0, 1, 2])
    cos, sin = cos_sin(rotary, torch.arange(ROWS)[None].repeat(3, 1))
    cache = torch.cat((cos, sin), dim=1).to(DEVICE)
    assert rotary.attention_factor != 1.0
    q, k = tensors()
    for way in WAYS:
        options: Any = {"implementation": way}
        got = apply_rotary(q, k, TABLE, rotary, cos_sin=cache, **options)
        want = apply_rotary(q, k, TABLE, rotary, **options)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True) if a is not None and b is not None)


@pytest.mark.parametrize("way", WAYS)
def test_every_form_and_layout_of_positions_agrees_with_the_engines_formula(way: Any) -> None:
    cache, (q, _) = cache_of(), tensors()
    options: Any = {"cos_sin": cache, "implementation": way}
    want = engines(q, ids_of(), cache, ROTARY)
    for positions in (TABLE, DevicePositions.from_table(TABLE, DEVICE, 9), ids_of(), ids_of().long()):
        got, _ = apply_rotary(q, None, positions, ROTARY, validate=True, **options)
        assert torch.equal(got, want)
    padded, fused = TABLE.pad(11), heads((2, 11), 3, 20).to(DEVICE)
    want = engines(fused.flatten(0, 1), ids_of(padded), cache, ROTARY).view_as(fused)
    q = fused.transpose(1, 2).clone()
    apply_rotary(q, None, padded, ROTARY, layout="bhsd", inplace=True, **options)
    assert torch.equal(q.transpose(1, 2), want)


@pytest.mark.parametrize("way", WAYS)
def test_stored_keys_are_rotated_with_the_cache_of_cos_and_sin(way: Any) -> None:
    cache, (q, k), slots = cache_of(), tensors(), torch.arange(2, 15, device=DEVICE)
    v, (keys, values) = heads(13, 1, 20, seed=2).to(DEVICE), torch.zeros(2, 4, 4, 1, 20, device=DEVICE)
    out, _ = rotate_and_store(q, k, v, TABLE, ROTARY, Cache(keys, values, slots), cos_sin=cache, implementation=way)
    assert torch.equal(out, engines(q, ids_of(), cache, ROTARY))
    assert torch.equal(keys.flatten(0, 1)[2:15], engines(k, ids_of(), cache, ROTARY))
    assert torch.equal(values.flatten(0, 1)[2:15], v)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_rotated_back_with_the_same_cache(way: Any) -> None:
    cache, (q, k) = cache_of(BFLOAT16), tensors()
    out = apply_rotary(q.requires_grad_(), k.requires_grad_(), TABLE, ROTARY, cos_sin=cache, implementation=way)
    grads = [heads(13, n, 20, seed=9).to(DEVICE) for n in (3, 1)]
    gradients = torch.autograd.grad([x for x in out if x is not None], (q, k), grads)
    for got, grad in zip(gradients, grads, strict=True):
        assert torch.equal(got, engines(grad, ids_of(), cache, ROTARY, inverse=True))


@pytest.mark.parametrize("implementation", [REFERENCE, AUTO, TRITON])
@pytest.mark.parametrize("row", [ROWS, -1, 2**31 - 1, -(2**31), 2**32 + 3, 3 - 2**40])
def test_an_unchecked_id_beyond_the_cache_makes_only_its_own_pairs_nan(row: int, implementation: Any) -> None:
    ids, (q, k) = ids_of().to(torch.int64, copy=True), tensors()
    cache = cache_of(rows=3 * ROWS)[ROWS : 2 * ROWS]  # memory before and after the cache is readable
    ids[1, 4], ids[2, 12] = row, row
    rotation = rotation_of(ids_on(ids_of(), ROTARY, DEVICE), ROTARY, implementation=implementation)
    arguments = ids, cache, *rotation[2:]
    weight = torch.ones(20, device=DEVICE)
    rotated = rotate(q[None], k[None], *NO_NORM, *arguments)[0][0]
    expected = engines(q, ids.clamp(0, ROWS - 1), cache, ROTARY)
    nan = torch.zeros(13, 20, dtype=torch.bool, device=DEVICE)
    for token, axis in ((4, 1), (12, 2)):
        for j, first, second in zip(range(6), *channels(ROTARY), strict=True):
            nan[token, [first, second]] = pair_axes(ROTARY)[j] == axis
    assert torch.equal(rotated.isnan(), nan[:, None].expand(13, 3, 20))
    assert torch.equal(rotated.nan_to_num(0.0), expected.masked_fill(nan[:, None], 0.0))
    # A norm after the rotation spreads NaN within a head but not to other heads.
    normed = rotate(q[None], k[None], weight, None, 1e-6, 0.0, True, *arguments)[0][0]
    assert torch.equal(normed.isnan(), nan.any(1)[:, None, None].expand(13, 3, 20))
