"""cos and sin from an engine's cache: the bits of the engines' formula, for all forms of positions and both ways."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rotary_oracle import channels, heads, packed, pair_axes
from tolerance import assert_within, gamma
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from mmpos import Grid, InvalidInputError, MmposError, PositionTable, SegmentTable, Text, UnsupportedError, place
from mmpos.rotary import DevicePositions, Rotary, YaRN, apply_rotary, cos_sin, rotate_and_store
from mmpos.rotary.device import constants, position_ids
from mmpos.rotary.operators import norm_rotate, rotate
from mmpos.rotary.reference import AUTO, REFERENCE, TRITON

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
    "whole heads": Rotary(24, axes=3, allocation="sections", mrope_section=[5, 4, 3]),  # no power of two: in pieces
    "whole, adjacent": Rotary(24, axes=3, allocation="sections", mrope_section=[5, 4, 3], pairing="adjacent"),
}
ROTARY = ROTARIES["sections"]


def cache_of(dtype: torch.dtype = FLOAT32, rows: int = ROWS, width: int = 12) -> Tensor:
    """Rows that no frequencies give: nothing but these numbers can have been used."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(7)).to(dtype).to(DEVICE)


def engines(x: Tensor, ids: Tensor, cache: Tensor, rotary: Rotary, *, inverse: bool = False) -> Tensor:
    """vLLM's rotary_embedding, thread by thread: x and the row as float32, products in float32, one rounding."""
    out, wide, rows = x.detach().cpu().clone(), x.detach().float().cpu().numpy(), cache.float().cpu().numpy()
    pairs = rotary.rotary_dim // 2
    for token, row in enumerate(ids.T.tolist()):
        for j, (axis, first, second) in enumerate(zip(pair_axes(rotary), *channels(rotary), strict=True)):
            cos, sin = rows[row[axis], j], rows[row[axis], pairs + j]
            sin = -sin if inverse else sin
            a, b = wide[token, :, first], wide[token, :, second]
            out[token, :, first] = torch.from_numpy(a * cos - b * sin).to(x.dtype)
            out[token, :, second] = torch.from_numpy(b * cos + a * sin).to(x.dtype)
    return out.to(x.device)


def tensors(dtype: torch.dtype = FLOAT32) -> tuple[Tensor, Tensor]:
    return heads(13, 3, 20, dtype).to(DEVICE), heads(13, 1, 20, dtype, seed=1).to(DEVICE)


def ids_of(table: PositionTable = TABLE) -> Tensor:
    return torch.from_numpy(table.dense()).to(DEVICE)


# Triton's interpreter truncates to bfloat16 where a GPU rounds.
@pytest.mark.parametrize(
    ("way", "dtype", "of_cache"),
    [
        (way, dtype, of_cache)
        for way in WAYS
        for dtype in (FLOAT32, FLOAT16, BFLOAT16)
        for of_cache in (FLOAT32, FLOAT16, BFLOAT16)
        if way != "triton" or dtype != BFLOAT16 or DEVICE.type == "cuda"
    ],
)
def test_every_dtype_has_the_bits_of_the_engines_formula(way: Any, dtype: Any, of_cache: Any) -> None:
    cache, (q, k) = cache_of(of_cache), tensors(dtype)
    options: Any = {"cos_sin": cache, "implementation": way}
    for got, x in zip(apply_rotary(q, k, TABLE, ROTARY, **options), (q, k), strict=True):
        assert got is not None
        assert got.dtype == dtype
        assert torch.equal(got, engines(x, ids_of(), cache, ROTARY))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ROTARIES)
def test_every_allocation_and_pairing_reads_the_row_of_its_axis_both_ways(name: str, way: Any) -> None:
    rotary = ROTARIES[name]
    q, cache = heads(13, 3, rotary.head_dim).to(DEVICE), cache_of(width=rotary.rotary_dim)
    for conjugate in (False, True):
        got, _ = apply_rotary(q, None, TABLE, rotary, cos_sin=cache, implementation=way, conjugate=conjugate)
        assert torch.equal(got, engines(q, ids_of(), cache, rotary, inverse=conjugate))


def native(x: Tensor, ids: Tensor, cache: Tensor, section: tuple[int, ...], *, interleaved: bool) -> Tensor:
    """forward_native of MRotaryEmbedding in vLLM and SGLang: cos and sin in the dtype of x, and so all that follows."""
    rows = cache.to(x.dtype)[ids.long()]  # (3, tokens, rotary_dim)
    cos, sin = rows.chunk(2, dim=-1)
    pairs, merged = cos.shape[-1], []
    for each in (cos, sin):
        if interleaved:
            j = torch.arange(pairs, device=x.device)
            column = torch.where((j % 3 == 1) & (j < 3 * section[1]), each[1], each[0])
            merged.append(torch.where((j % 3 == 2) & (j < 3 * section[2]), each[2], column))
        else:
            merged.append(torch.cat([part[i] for i, part in enumerate(each.split(section, dim=-1))], dim=-1))
    cos, sin = (each.unsqueeze(1) for each in merged)
    first, second = x[..., :pairs], x[..., pairs : 2 * pairs]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, x[..., 2 * pairs :]), dim=-1)


@pytest.mark.parametrize("name", ["sections", "mrope-interleaved"])
def test_native_paths_agree_in_float32_and_round_in_between_in_half_precision(name: str) -> None:
    rotary = ROTARIES[name]
    assert rotary.mrope_section is not None
    for dtype in (FLOAT32, BFLOAT16):
        (q, _), cache = tensors(dtype), cache_of(dtype)
        got, _ = apply_rotary(q, None, TABLE, rotary, cos_sin=cache)
        want = native(q, ids_of(), cache, tuple(rotary.mrope_section), interleaved=name == "mrope-interleaved")
        if dtype == FLOAT32:
            assert torch.equal(got, want)
        else:
            assert not torch.equal(got, want)
            # Three roundings there, of either product and of the sum, and one here.
            room = 4 * gamma(2, dtype) * q.float().abs().amax() * cache.float().abs().amax()
            assert_within(got, want, room.expand(q.shape))


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16])
def test_products_of_half_precision_are_exact_so_that_fused_multiplication_changes_nothing(dtype: Any) -> None:
    """A compiler that contracts x·cos − y·sin leaves one rounding out: that of a product, which is none here."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    x = every[every.isfinite() & (every.float().abs() < 2.0**60) & (every.float().abs() > 2.0**-60)].float()
    for cos in torch.linspace(-1, 1, 37).to(dtype).float():
        assert torch.equal((x * cos).double(), x.double() * cos.double())


def test_a_cache_of_exact_cos_and_sin_gives_the_exact_rotation_without_its_factor_again() -> None:
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
def test_positions_of_every_form_and_layout(way: Any) -> None:
    cache, (q, _) = cache_of(), tensors()
    options: Any = {"cos_sin": cache, "implementation": way}
    want = engines(q, ids_of(), cache, ROTARY)
    for positions in (TABLE, DevicePositions.from_table(TABLE, DEVICE, 9), ids_of(), ids_of().long()):
        got, _ = apply_rotary(q, None, positions, ROTARY, validate=True, **options)
        assert torch.equal(got, want)
    padded, fused = TABLE.pad(11), heads((2, 11), 3, 20).to(DEVICE)
    want = engines(fused.flatten(0, 1), ids_of(padded), cache, ROTARY).view_as(fused)
    mine = fused.transpose(1, 2).clone()
    apply_rotary(mine, None, padded, ROTARY, layout="bhsd", inplace=True, **options)
    assert torch.equal(mine.transpose(1, 2), want)


@pytest.mark.parametrize("way", WAYS)
def test_stored_keys_are_those_of_the_rotation(way: Any) -> None:
    cache, (q, k), slots = cache_of(), tensors(), torch.arange(2, 15, device=DEVICE)
    v, (keys, values) = heads(13, 1, 20, seed=2).to(DEVICE), torch.zeros(2, 4, 4, 1, 20, device=DEVICE)
    out, _ = rotate_and_store(q, k, v, TABLE, ROTARY, keys, values, slots, cos_sin=cache, implementation=way)
    assert torch.equal(out, engines(q, ids_of(), cache, ROTARY))
    assert torch.equal(keys.flatten(0, 1)[2:15], engines(k, ids_of(), cache, ROTARY))
    assert torch.equal(values.flatten(0, 1)[2:15], v)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_turned_back_by_the_same_cache(way: Any) -> None:
    cache, (q, k) = cache_of(BFLOAT16), tensors()
    out = apply_rotary(q.requires_grad_(), k.requires_grad_(), TABLE, ROTARY, cos_sin=cache, implementation=way)
    grads = [heads(13, n, 20, seed=9).to(DEVICE) for n in (3, 1)]
    found = torch.autograd.grad([x for x in out if x is not None], (q, k), grads)
    for got, grad in zip(found, grads, strict=True):
        assert torch.equal(got, engines(grad, ids_of(), cache, ROTARY, inverse=True))


@pytest.mark.parametrize("implementation", [REFERENCE, AUTO, TRITON])
@pytest.mark.parametrize("row", [ROWS, -1, 2**31 - 1, -(2**31), 2**32 + 3, 3 - 2**40])
def test_an_unread_id_without_a_row_makes_its_own_pairs_nan_and_reads_nothing_else(
    row: int, implementation: Any
) -> None:
    ids, (q, k) = ids_of().to(torch.int64, copy=True), tensors()
    cache = cache_of(rows=3 * ROWS)[ROWS : 2 * ROWS]  # within memory that could be read
    ids[1, 4], ids[2, 12] = row, row
    rest = cache, constants(ROTARY, DEVICE)[1], position_ids(ids_of(), DEVICE).mode, False, 1.0, False, implementation
    weight = torch.ones(20, device=DEVICE)
    turned = rotate(q[None], k[None], ids, *rest)
    known = engines(q, ids.clamp(0, ROWS - 1), cache, ROTARY)
    lost = torch.zeros(13, 20, dtype=torch.bool, device=DEVICE)
    for token, axis in ((4, 1), (12, 2)):
        for j, first, second in zip(range(6), *channels(ROTARY), strict=True):
            lost[token, [first, second]] = pair_axes(ROTARY)[j] == axis
    assert torch.equal(turned[0][0].isnan(), lost[:, None].expand(13, 3, 20))
    assert torch.equal(turned[0][0].nan_to_num(0.0), known.masked_fill(lost[:, None], 0.0))
    # Sums of a norm after it are those of known pairs in all other heads.
    normed = norm_rotate(q[None], k[None], weight, None, 1e-6, 0.0, True, ids, *rest)[0][0]
    assert torch.equal(normed.isnan(), lost.any(1)[:, None, None].expand(13, 3, 20))


# Refusals.

IDS = torch.from_numpy(TABLE.dense())
REFUSALS: dict[str, tuple[Any, Any, Rotary, str]] = {
    "rows": (torch.zeros(7, 12), TABLE, ROTARY, "cos_sin: got 7 rows, want > 7, the largest id"),
    "rows of a device table": (
        torch.zeros(7, 12), DevicePositions.from_table(TABLE), ROTARY, "cos_sin: got 7 rows, want > 7, the largest id",
    ),
    "rows of ids": (torch.zeros(5, 12), IDS, ROTARY, "cos_sin: got 5 rows, want > 7, the largest id"),
    "negative id": (
        torch.zeros(9, 12), IDS - 1, ROTARY, "positions: got id -1, want >= 0: cos_sin has rows of ids from 0",
    ),
    "float64 ids": (
        torch.zeros(9, 12), IDS.double(), ROTARY,
        "positions: got fractional ids, want integers: cos_sin has rows of whole ids alone",
    ),
    "fractional scheme": (
        torch.zeros(99, 12), packed("rope-tie-v2").slice(0, 13), Rotary(20, rotary_dim=12),
        "positions: got fractional ids, want integers: cos_sin has rows of whole ids alone",
    ),
    "width": (
        torch.zeros(9, 20), TABLE, ROTARY,
        "cos_sin: got shape (9, 20), want (max_position, 12), cos and then sin of each pair of rotary",
    ),
    "no rows": (
        torch.zeros(0, 12), TABLE, ROTARY,
        "cos_sin: got shape (0, 12), want (max_position, 12), cos and then sin of each pair of rotary",
    ),
    "cos alone": (
        torch.zeros(12), TABLE, ROTARY,
        "cos_sin: got shape (12,), want (max_position, 12), cos and then sin of each pair of rotary",
    ),
    "dtype": (
        torch.zeros(9, 12).double(), TABLE, ROTARY,
        "cos_sin: got torch.float64, want a tensor of float32, bfloat16 or float16",
    ),
    "pair of tensors": (
        (torch.zeros(9, 6),) * 2, TABLE, ROTARY, "cos_sin: got tuple, want a tensor of float32, bfloat16 or float16",
    ),
    "device": (torch.zeros(9, 12, device="meta"), TABLE, ROTARY, "cos_sin: got a tensor on meta, want cpu as q"),
    "strides": (torch.zeros(12, 9).T, TABLE, ROTARY, "cos_sin: got strides (1, 9), want a contiguous tensor"),
    "axial": (
        torch.zeros(9, 12), TABLE, Rotary(20, rotary_dim=12, axes=3, allocation="axial"),
        "cos_sin: got a rotary of allocation 'axial', whose axes have frequencies of their own, want one whose "
        "pair j has the j-th frequency, as the cache has",
    ),
    "pixtral": (
        torch.zeros(9, 12), IDS[:2], Rotary(20, rotary_dim=12, allocation="pixtral"),
        "cos_sin: got a rotary of allocation 'pixtral', whose axes have frequencies of their own, want one whose "
        "pair j has the j-th frequency, as the cache has",
    ),
    "theta of each axis": (
        torch.zeros(9, 12), IDS[:2], Rotary(20, rotary_dim=12, theta=(1e4, 1e2)),
        "cos_sin: got a rotary of allocation 'interleaved', whose axes have frequencies of their own, want one whose "
        "pair j has the j-th frequency, as the cache has",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_what_does_not_fit_is_refused(name: str) -> None:
    cache, positions, rotary, message = REFUSALS[name]
    q, k, pages = heads(13, 2, 20), heads(13, 1, 20), torch.zeros(16, 1, 20)
    with pytest.raises(InvalidInputError) as refused:
        apply_rotary(q, k, positions, rotary, cos_sin=cache)
    assert str(refused.value) == message
    with pytest.raises(InvalidInputError) as refused:
        rotate_and_store(q, k, k, positions, rotary, pages, pages.clone(), torch.arange(13), cos_sin=cache)
    assert str(refused.value) == message
    assert not pages.any()


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")  # torch's own, as forward mode loads its formulas
def test_gradients_of_the_cache_are_refused() -> None:
    q, cache = heads(13, 2, 20), torch.zeros(9, 12)
    with pytest.raises(UnsupportedError, match="cos_sin: got a tensor that requires gradients, want one without"):
        apply_rotary(q, None, TABLE, ROTARY, cos_sin=cache.clone().requires_grad_())
    with pytest.raises(MmposError, match="cos_sin: got a forward-mode tangent"):
        torch.func.jvp(lambda c: apply_rotary(q, None, TABLE, ROTARY, cos_sin=c)[0], (cache,), (cache,))


# torch.compile and the operators.


def test_whole_graphs_with_gradients_take_the_cache_as_an_input() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    rotary = Rotary.from_dict(ROTARY.to_dict())  # of which nothing was asked before

    def attention_input(q: Tensor, cache: Tensor, positions: Any) -> Tensor:
        return apply_rotary(q * 2, None, positions, rotary, cos_sin=cache)[0] + 1

    compiled = torch.compile(attention_input, fullgraph=True, backend=counter)
    for seed, positions in (
        (0, DevicePositions.from_table(TABLE, DEVICE)),
        (1, DevicePositions.from_table(TABLE, DEVICE)),
    ):
        q = heads(13, 3, 20, seed=seed).to(DEVICE).requires_grad_()
        found, want = (call(q, cache_of() + seed, positions) for call in (compiled, attention_input))
        assert torch.equal(found, want)
        grads = [torch.autograd.grad(x.square().sum(), q)[0] for x in (found, want)]
        assert torch.equal(*grads)
    assert counter.frame_count == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_the_operator_passes_torchs_own_checks() -> None:
    q, k = (x[None].requires_grad_() for x in tensors())
    made = position_ids(ids_of(), DEVICE)
    numbers = made.mode, False, 1.0, False, AUTO
    torch.library.opcheck(rotate, (q, k, made.tensor, cache_of(BFLOAT16), constants(ROTARY, DEVICE)[1], *numbers))
