"""Compare the kernel, on a GPU or in Triton's interpreter, and the C extension with the torch reference bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import placed, settled
from rotary_oracle import (
    BY_AXES,
    BY_HEAD,
    DTYPES,
    INT32_MAX,
    INT32_MIN,
    ROTARIES,
    SCHEMES,
    VIEWS,
    assert_rotated,
    heads,
    packed,
    table_of,
)
from store_oracle import assert_same_bits
from tolerance import EXACT, INTERPRETED, assert_within, cos_sin, rotations
from torch import Tensor

from mmpos import Grid, PositionTable, Text
from mmpos.rotary import DevicePositions, Rotary, YaRN, apply_rotary, kernel
from mmpos.rotary.kernel import tiling

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAIRINGS = ("half", "adjacent")
WAYS = pytest.mark.parametrize("way", ["auto", "triton"])
"""Without a GPU, the implementation "auto" is the C extension."""
IN_TURNS = [(scheme, list(VIEWS)[i % len(VIEWS)]) for i, scheme in enumerate(SCHEMES)]
"""Every scheme and every view, but not all combinations, since the interpreter is slow."""

own_tiling = tiling.tiles

pytestmark = pytest.mark.usefixtures("few_programs", "poison")  # tilings are tested separately


def integers(x: Tensor) -> Tensor:
    """Return the bits of every element."""
    return x.detach().contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int16).cpu()


def assert_same(got: Tensor | None, want: Tensor | None) -> None:
    """Assert equal bits; allow one ulp for bfloat16 in the interpreter, which truncates instead of rounding."""
    assert got is not None
    assert want is not None
    assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())
    assert not got.isnan().any()
    ulps = 1 if got.dtype == torch.bfloat16 and INTERPRETED else 0
    difference = (integers(got).long() - integers(want).long()).abs()
    assert int(difference.max() if difference.numel() else 0) <= ulps


def device_heads(*args: Any, **options: Any) -> Tensor:
    return heads(*args, **options).to(DEVICE)


def everything(
    implementation: str, q: Tensor, k: Tensor, positions: Any, rotary: Rotary, **options: Any
) -> list[Tensor | None]:
    """Return rotated q and k and the gradients of both."""
    q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
    out = apply_rotary(q, k, positions, rotary, implementation=implementation, **options)  # type: ignore[arg-type]
    assert out[1] is not None
    weights = [device_heads(x.shape[:-2], *x.shape[-2:], dtype=x.dtype, seed=9) for x in out if x is not None]
    torch.autograd.backward(out, weights)  # type: ignore[arg-type]
    return [*out, q.grad, k.grad]


def in_both_ways(q: Tensor, positions: Any, rotary: Rotary) -> tuple[Tensor, Tensor]:
    """Return q as rotated by the kernel and as rotated by the reference."""
    return (
        apply_rotary(q, None, positions, rotary, implementation="triton")[0],
        apply_rotary(q, None, positions, rotary, implementation="reference")[0],
    )


def assert_agrees(way: str, q: Tensor, k: Tensor, positions: Any, rotary: Rotary, **options: Any) -> None:
    """Assert that outputs and gradients of an implementation equal the reference."""
    before = q.clone(), k.clone()
    want = everything("reference", q, k, positions, rotary, **options)
    got = everything(way, q, k, positions, rotary, **options)
    for a, b in zip(got, want, strict=True):
        assert_same(a, b)
    assert torch.equal(q, before[0])
    assert torch.equal(k, before[1])


ALLOCATIONS = [(name, PAIRINGS[i % 2], "triton") for i, name in enumerate([*ROTARIES, "one head per axis"])]
ALLOCATIONS += [(name, pairing, "auto") for name in (*ROTARIES, *BY_HEAD) for pairing in PAIRINGS]


@pytest.mark.parametrize(
    ("name", "pairing", "way"),
    [*ALLOCATIONS, *(pytest.param(name, "adjacent", "triton", marks=pytest.mark.slow) for name in BY_HEAD)],
)
def test_every_allocation_agrees(name: str, pairing: Any, way: str, tile: Any) -> None:
    tile(32, 1)
    rotary = replace(ROTARIES.get(name) or BY_HEAD[name], pairing=pairing)
    kv_heads = len(rotary.head_axes or [0])
    table = packed(BY_AXES[rotary.axes], 70_000)
    q = device_heads(32, (3 if kv_heads == 1 else 2) * kv_heads, rotary.head_dim)
    assert_agrees(way, q, device_heads(32, kv_heads, rotary.head_dim, seed=1), table, rotary)


@WAYS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_every_dtype_agrees(pairing: Any, dtype: torch.dtype, way: str, tile: Any) -> None:
    tile(32, 1)
    conjugate = pairing == "half"
    rotary = Rotary(20, rotary_dim=12, pairing=pairing, scaling=YaRN(4.0, 32768))
    q, k = device_heads(32, 3, 20, dtype), device_heads(32, 1, 20, dtype, seed=1)
    assert_agrees(way, q, k, packed("rope-tie-fractional", 70_000), rotary, conjugate=conjugate)


@pytest.mark.parametrize(("scheme", "view"), IN_TURNS)
def test_every_table_and_its_dense_ids_agree(scheme: str, view: str) -> None:
    table = VIEWS[view](packed(scheme, 3_000_001))
    assert_dense(table)
    rotary = Rotary(8, axes=SCHEMES[scheme])
    q = device_heads(table.num_tokens, 2, 8)
    assert_same(*in_both_ways(q, table, rotary))


@pytest.mark.parametrize(
    ("axes", "view", "way"),
    [
        pytest.param(axes, view, way, marks=[pytest.mark.slow] * (way == "triton" and (axes == 3 or view != "packed")))
        for axes in BY_AXES
        for view in ("packed", "padded", "sliced")
        for way in ("reference", "auto", "triton")
    ],
)
def test_every_form_of_positions_agrees(axes: int, view: str, way: Any, tile: Any) -> None:
    tile(64, 1)
    rotary, table = Rotary(8, axes=axes), VIEWS[view](packed(BY_AXES[axes]))
    tokens = table.num_tokens
    q, k = device_heads(tokens, 2, 8), device_heads(tokens, 1, 8, seed=1)
    ids = torch.from_numpy(table.dense()).to(DEVICE)
    whole, float64 = ids.floor().to(torch.int32), ids.to(torch.float64)
    want = {form: everything("reference", q, k, form, rotary) for form in (table, whole, float64)}
    forms: dict[Any, list[Any]] = {
        table: [table, *(DevicePositions.from_table(table, DEVICE, capacity) for capacity in (None, 100))],
        whole: [whole, whole.long(), whole.double(), whole.view(axes, 1, tokens), whole.T.contiguous().T],
        float64: [float64, float64.view(axes, 1, tokens)],
    }
    for form, same in forms.items():
        for positions in same:
            for a, b in zip(everything(way, q, k, positions, rotary), want[form], strict=True):
                assert_same(a, b)
    # float64 can only approximate thirds, so rounding down may differ by one unit of 2⁻³².
    assert_within(want[float64], want[table], [rotations(x, 2 * EXACT * table.fractional) for x in want[table]])


@settled
@given(
    ids=st.lists(
        st.tuples(
            st.integers(INT32_MIN, INT32_MAX - 1),
            st.integers(0, INT32_MAX),
            st.one_of(st.just(1), st.integers(1, INT32_MAX)),
        ),
        min_size=1,
        max_size=9,
    ),
    inv_freq=st.lists(st.floats(-100, 100), min_size=1, max_size=5),
    pairing=st.sampled_from(PAIRINGS),
)
def test_any_ids_and_frequencies_agree(ids: list[tuple[int, int, int]], inv_freq: list[float], pairing: Any) -> None:
    table = table_of([[whole + Fraction(part % bottom, bottom)] for whole, part, bottom in ids])
    rotary = Rotary(2 * len(inv_freq), axes=1, inv_freq=inv_freq, pairing=pairing)
    q = device_heads(len(ids), 1, rotary.head_dim)
    floors = torch.tensor([[whole for whole, _, _ in ids]], dtype=torch.int32, device=DEVICE)
    for positions in (table, floors):
        assert_same(*in_both_ways(q, positions, rotary))


# Tilings and sizes.

TILINGS = [(64, 1), (8, 3), *(pytest.param(*tiling, marks=pytest.mark.slow) for tiling in ((4, 7), (2, 1), (1, 1)))]


@pytest.mark.parametrize(
    ("num_heads", "head_axes"), [(5, None), pytest.param(12, [1, 0, 1, 1], marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(("block", "shares"), TILINGS)
def test_every_tiling_agrees(block: int, shares: int, num_heads: int, head_axes: Any, tile: Any) -> None:
    tile(block, shares)
    table = packed("rope-tie-v2").slice(4, 17)
    rotary = Rotary(12, rotary_dim=8, allocation="heads" if head_axes else "interleaved", head_axes=head_axes)
    q, k = device_heads(13, num_heads, 12), device_heads(13, 4, 12, seed=1)
    assert_agrees("triton", q, k, DevicePositions.from_table(table, DEVICE, 40), rotary)
    # In place, a head that two programs process would be rotated twice.
    want = apply_rotary(q, k, table, rotary, implementation="reference")
    apply_rotary(q, k, table, rotary, inplace=True, implementation="triton")
    assert_same(q, want[0])
    assert_same(k, want[1])


CASES: dict[str, Callable[[], PositionTable]] = {
    "segments of one token": lambda: table_of([[Fraction(7 * i, i % 5 + 1), -i] for i in range(35)]),
    "grids of one row": lambda: placed([Text(1), Grid(1, 1), Text(1), Grid(1, 2)] * 7, "rope-tie"),
    "one long image": lambda: placed([Grid(5, 7)], "rope-tie-fractional"),
    "one long text": lambda: placed([Text(35)], "rope-tie", 2**30),
    "the middle of an image": lambda: placed([Text(5), Grid(20, 20), Text(5)], "rope-tie").slice(211, 246),
    "videos": lambda: placed([Text(2), Grid(2, 3, frames=4), Text(3), Grid(1, 2, frames=3)], "mrope"),
    "segments aligned with blocks": lambda: placed([Text(16), Grid(4, 4)] * 2, "rope-tie"),
}


@pytest.mark.parametrize("case", CASES)
def test_segments_of_any_length_agree(case: str) -> None:
    table = CASES[case]()
    rotary = Rotary(6, axes=table.axes)
    q = device_heads(table.num_tokens, 1, 6)
    for positions in (table, DevicePositions.from_table(table, DEVICE, table.num_segments + 33)):
        assert_same(*in_both_ways(q, positions, rotary))


@pytest.mark.parametrize("segments", [1, 2, 32, 33, 129])
def test_ids_are_correct_for_any_number_of_segments(segments: int) -> None:
    parts: list[Text | Grid] = [Text(1), Grid(1, 2), Text(2), Grid(2, 1)] * (segments // 4 + 1)
    table = placed(parts[:segments], "rope-tie")
    assert table.num_segments == segments
    columns = DevicePositions.from_table(table, DEVICE, segments + segments % 5).table
    ids = kernel.launch_dense(columns, table.num_tokens, table.axes, table.fractional)
    assert torch.equal(ids.cpu(), torch.from_numpy(table.dense()))


def test_pairs_are_split_into_pieces_if_their_number_is_not_a_power_of_two_and_all_channels_rotate() -> None:
    expected = {80: (8, 5), 72: (4, 9), 96: (16, 3), 24: (4, 3), 128: (64, 1), 20: (16, 1), 2: (1, 1)}
    pieces = {head_dim: tiling.pieces_of(head_dim, head_dim // 2, False) for head_dim in expected}
    assert {head_dim: (x.pairs_padded, x.pieces) for head_dim, x in pieces.items()} == expected
    assert tiling.pieces_of(128, 40, False) == tiling.channels_of(128, 40)


def test_tilings_split_heads_among_programs_until_warps_fill_a_device() -> None:
    sizes = {1: (4, 20, 1), 256: (4, 20, 1), 1024: (4, 8, 1), 2048: (16, 8, 4), 4096: (16, 4, 4), 10**6: (16, 3, 4)}
    assert {tokens: own_tiling(tokens, 40, 64) for tokens in sizes} == sizes
    assert [own_tiling(10**6, num_heads, 64)[1] for num_heads in (0, 1, 5, 16, 17, 32, 72)] == [1, 1, 1, 1, 2, 2, 5]
    assert [own_tiling(1, num_heads, 64)[1] for num_heads in (0, 1, 5)] == [1, 1, 3]
    assert [own_tiling(2048, 8, pairs)[0] for pairs in (1, 8, 64, 128, 1024, 2048)] == [1024, 128, 16, 8, 1, 1]


def test_launches_disable_fusion_of_products_and_sums() -> None:
    seen: dict[str, Any] = {}

    class Kernel:
        def __getitem__(self, grid: tuple[int, int]) -> Any:
            return lambda *arguments, **options: seen.update(options, grid=grid, arguments=arguments)

    tiling.launch(Kernel(), (3, 2), 4, 7, BLOCK=16)
    assert seen == {"grid": (3, 2), "arguments": (7,), "BLOCK": 16, "num_warps": 4, "enable_fp_fusion": False}


# Layouts and strides.


def as_layout(x: Tensor, layout: str) -> Tensor:
    """View a (39, heads, head_dim) tensor in a layout without copying it."""
    if layout == "thd":
        return x
    four = x.view(3, 13, *x.shape[1:])
    return four.transpose(1, 2) if layout == "bhsd" else four


LAYOUTS = [
    ("thd", Rotary(12, rotary_dim=8)),
    ("bshd", Rotary(12, rotary_dim=8, pairing="adjacent")),
    ("bhsd", Rotary(12, rotary_dim=8)),
    *((name, Rotary(12, rotary_dim=8, allocation="heads", head_axes=[1, 0])) for name in ("bshd", "bhsd")),
]


@pytest.mark.parametrize(
    ("layout", "rotary", "way"),
    [
        pytest.param(*case, way, marks=[pytest.mark.slow] * (way == "triton" and case[1].allocation == "heads"))
        for case in LAYOUTS
        for way in ("reference", "auto", "triton")
    ],
)
def test_views_of_a_fused_qkv_are_rotated_in_every_layout_both_out_of_place_and_in_place(
    layout: Any, rotary: Rotary, way: Any
) -> None:
    table, fused = packed("rope-tie").pad(13), device_heads(39, 8, 12)
    before, options = fused.clone(), {"layout": layout, "implementation": way}
    q, k = as_layout(fused[:, :4], layout), as_layout(fused[:, 4:6], layout)
    for conjugate in (True, False):
        fresh = apply_rotary(q, k, table, rotary, conjugate=conjugate, **options)
        for x, out in zip((q, k), fresh, strict=True):
            assert_rotated(out, x, table, rotary, layout=layout, conjugate=conjugate)
    assert torch.equal(fused, before)
    in_place = apply_rotary(q, k, table, rotary, inplace=True, **options)
    for x, out, want in zip((q, k), in_place, fresh, strict=True):
        assert out is x
        assert_same_bits(x, want)
    assert torch.equal(fused[:, 6:], before[:, 6:])
    assert torch.equal(fused[..., 8:], before[..., 8:])
    turned, k_out = apply_rotary(q, None, table, rotary, conjugate=True, inplace=True, **options)
    assert (turned is q, k_out) == (True, None)
    assert_same_bits(k, fresh[1])


def test_any_strides_agree() -> None:
    rotary, table = Rotary(8, rotary_dim=6, pairing="adjacent"), packed("rope-tie").slice(0, 16)
    strided = device_heads(32, 4, 16)[1::2, ::2, ::2]
    backwards = device_heads(8, 2, 16).permute(2, 1, 0)
    broadcast = device_heads(1, 1, 8).expand(16, 2, 8)
    for x in (strided, backwards, broadcast):
        assert_agrees("triton", x, x[:, :1], table, rotary)


@pytest.mark.parametrize("way", ["reference", "auto", "triton"])
def test_calls_without_k_heads_or_tokens_agree(way: Any) -> None:
    rotary, table = Rotary(8, rotary_dim=4), packed("rope-tie").slice(4, 9)
    q, k = device_heads(5, 3, 8), device_heads(5, 2, 8, seed=1)
    assert apply_rotary(q, None, table, rotary, implementation=way)[1] is None
    for some_q, some_k, positions in ((q[:, :0], k, table), (q, k[:, :0], table), (q[:0], k[:0], table.slice(2, 2))):
        assert_agrees(way, some_q, some_k, positions, rotary)
        before = apply_rotary(some_q, some_k, positions, rotary, implementation=way)
        in_place = apply_rotary(some_q.clone(), some_k.clone(), positions, rotary, inplace=True, implementation=way)
        for x, out, same in zip((some_q, some_k), before, in_place, strict=True):
            assert out is not None
            assert out.shape == x.shape
            assert_same_bits(same, out)
    nothing = torch.zeros(2, 0, 5, dtype=torch.int32, device=DEVICE)
    assert apply_rotary(device_heads((0, 5), 2, 8), None, nothing, rotary, implementation=way)[0].shape == (0, 5, 2, 8)


@WAYS
def test_a_call_whose_q_has_no_heads_computes_the_gradient_of_k_alone(way: Any) -> None:
    rotary, table = Rotary(8, rotary_dim=4), packed("rope-tie")
    q, k = device_heads(32, 3, 8), device_heads(32, 2, 8, seed=1).requires_grad_()
    gradients: list[Tensor] = []
    for implementation in ("reference", way):
        out = apply_rotary(q, k, table, rotary, implementation=implementation)[1]
        assert out is not None
        gradients += torch.autograd.grad(out.sin().sum(), k)
    assert torch.equal(gradients[0], gradients[1])


# Precision "hf".


@pytest.mark.parametrize(("axes", "pairing"), [(axes, PAIRINGS[axes % 2]) for axes in BY_AXES])
def test_hf_precision_agrees_within_an_ulp_of_cos_and_sin(pairing: Any, axes: int, tile: Any) -> None:
    tile(32, 1)
    rotary = Rotary(16, axes=axes, precision="hf", pairing=pairing)
    table = packed(BY_AXES[axes], 100_000)
    q, k = device_heads(32, 2, 16), device_heads(32, 1, 16, seed=1)
    ids = torch.from_numpy(table.dense()).to(DEVICE)
    for positions in (table, ids):
        want = everything("reference", q, k, positions, rotary)
        got = everything("triton", q, k, positions, rotary)
        # The angles are equal, but the libraries' cos and sin differ.
        assert_within(got, want, [rotations(x, cos_sin()) for x in want])


# Dense ids on a device.


@pytest.mark.parametrize("start", [INT32_MIN, INT32_MAX - 700])
def test_ids_of_several_blocks_are_bit_equal_to_dense(start: int) -> None:
    assert_dense(placed([Text(300), Grid(5, 7), Text(1), Grid(3, 2), Text(250)], "rope-tie", start))
    assert_dense(placed([Text(300), Grid(5, 7), Text(250)], "rope-tie-v2", start))


def assert_dense(table: PositionTable) -> None:
    positions = DevicePositions.from_table(table, DEVICE, table.num_segments + 5)
    ids = kernel.launch_dense(positions.table, table.num_tokens, table.axes, table.fractional).cpu().numpy()
    want = table.dense()
    assert ids.dtype == want.dtype
    assert np.array_equal(ids, want)
    assert ids.tobytes() == want.tobytes()
