"""A rotation in every implementation: the reference equals 60-digit phases, and all others have the reference's bits.

The implementations are the reference, "auto" (without a GPU, the C extension) and "triton": on a GPU, in Triton's
interpreter, or with ``--kernels=machine`` as compiled PTX. test_rotary_compile.py adds torch.compile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import placed
from rotary_oracle import (
    BY_AXES,
    BY_HEAD,
    DTYPES,
    FORMS,
    INT32_MAX,
    INT32_MIN,
    ROTARIES,
    SCHEMES,
    VIEWS,
    assert_rotated,
    channels,
    dense,
    device_heads,
    packed,
    pair_axes,
    table_of,
)
from store_oracle import DEVICE, assert_same_bits
from tolerance import ARITHMETIC, EXACT, FREQUENCY, assert_within, cos_sin, rotations, truncation
from torch import Tensor

from mmpos import Grid, PositionTable, SegmentTable, Text, place
from mmpos.rotary import Cache, DevicePositions, Norm, Rotary, YaRN, apply_rotary, kernel, rotate_and_store, split_qkv
from mmpos.rotary import cos_sin as tables_of
from mmpos.rotary.device import frequencies_of
from mmpos.rotary.kernel import tiling

PAIRINGS = ("half", "adjacent")
EVERY = pytest.mark.parametrize("way", ["reference", "auto", "triton"])

own_tiling = tiling.tiles

pytestmark = pytest.mark.usefixtures("few_programs", "poison")  # tilings are tested separately


def one(x: Tensor, positions: Any, rotary: Rotary, way: Any = "auto", **options: Any) -> Tensor:
    """Return the rotated q of a call without k."""
    out, none = apply_rotary(x, None, positions, rotary, implementation=way, **options)
    assert none is None
    return out


def everything(way: Any, q: Tensor, k: Tensor, positions: Any, rotary: Rotary, **options: Any) -> list[Tensor]:
    """Return rotated q and k and the gradients of both, from incoming gradients drawn with seed 9."""
    q, k = q.detach().requires_grad_(), k.detach().requires_grad_()
    q_out, k_out = apply_rotary(q, k, positions, rotary, implementation=way, **options)
    assert k_out is not None
    incoming = [device_heads(x.shape[:-2], *x.shape[-2:], dtype=x.dtype, seed=9) for x in (q_out, k_out)]
    return [q_out.detach(), k_out.detach(), *torch.autograd.grad((q_out, k_out), (q, k), incoming)]


def assert_agrees(
    way: Any, q: Tensor, k: Tensor, positions: Any, rotary: Rotary, like: Any = None, **options: Any
) -> list[Tensor]:
    """Assert that outputs and gradients have the bits and strides of the reference, and that inputs do not change."""
    before = q.clone(), k.clone()
    want = everything("reference", q, k, positions if like is None else like, rotary, **options)
    for got, expected in zip(everything(way, q, k, positions, rotary, **options), want, strict=True):
        assert_same_bits(got, expected, truncation(way, q.dtype))
        assert got.stride() == expected.stride()
    assert torch.equal(q, before[0])
    assert torch.equal(k, before[1])
    return want


def assert_true(results: list[Tensor], q: Tensor, k: Tensor, positions: Any, rotary: Rotary, back: bool = True) -> None:
    """Assert that outputs are rotated by the exact phases, and gradients by the negative ones."""
    grads = [device_heads(x.shape[:-2], *x.shape[-2:], dtype=x.dtype, seed=9) for x in (q, k)]
    for got, x, conjugate in zip(results, (q, k, *grads), (not back, not back, back, back), strict=True):
        assert_rotated(got, x, positions, rotary, conjugate=conjugate)


# Allocations, tables and ids.

SLOW = ("MHRoPE", "two heads per axis", "an unrotated head", "scaled", "out of order, partial")


@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(name, way, marks=[pytest.mark.slow] * (way == "triton" and name in SLOW))
        for name in (*ROTARIES, *BY_HEAD)
        for way in ("auto", "triton")
    ],
)
def test_every_allocation_agrees(name: str, way: str, tile: Any) -> None:
    tile(32, 1)
    rotaries = {**ROTARIES, **BY_HEAD}
    order = list(rotaries).index(name)
    for i, pairing in enumerate(PAIRINGS[order % 2 :: 2] if way == "triton" else PAIRINGS):
        rotary = replace(rotaries[name], pairing=pairing)  # type: ignore[arg-type]
        count, dtype = rotary.own_heads or 1, DTYPES[(order + i) % 3]
        table = packed(BY_AXES[rotary.axes], 70_000)
        q, k = device_heads(32, 2 * count, rotary.head_dim, dtype), device_heads(32, count, rotary.head_dim, dtype, 1)
        assert_true(assert_agrees(way, q, k, table, rotary), q, k, table, rotary)


@pytest.mark.parametrize(
    ("scheme", "view", "way"),
    [(scheme, view, way) for scheme in SCHEMES for view in VIEWS for way in ("reference", "auto")]
    + [(scheme, list(VIEWS)[i % len(VIEWS)], "triton") for i, scheme in enumerate(SCHEMES)],
)
def test_every_table_and_every_form_of_it_agree(scheme: str, view: str, way: str, tile: Any) -> None:
    tile(64, 1)
    rotary, table = Rotary(8, axes=SCHEMES[scheme]), VIEWS[view](packed(scheme, 9_000_000))
    q, k = device_heads(table.num_tokens, 2, 8), device_heads(table.num_tokens, 1, 8, seed=1)
    want = assert_agrees(way, q, k, table, rotary)
    assert_true(want, q, k, table, rotary)
    forms = list(FORMS)[1 : 3 if table.fractional else None]
    for form in forms[len(view) % 2 :: 2] if way == "triton" else forms:  # the interpreter is slow
        assert_agrees(way, q, k, FORMS[form](table), rotary, table)
    if table.fractional:  # float64 can only approximate thirds: rounding down may differ by one unit of 2⁻³²
        assert_within(one(q, dense(table).double(), rotary, way), want[0], rotations(want[0], 2 * EXACT))
    assert_dense(table)


def assert_dense(table: PositionTable) -> None:
    """Assert that the kernel expands a table to the ids of its ``dense``, bit for bit."""
    columns = DevicePositions.from_table(table, DEVICE, table.num_segments + 5).table
    ids = kernel.launch_dense(columns, table.num_tokens, table.axes, table.fractional).cpu().numpy()
    assert (ids.dtype, ids.tobytes()) == (table.dense().dtype, table.dense().tobytes())


WHOLE, PART = st.integers(INT32_MIN, INT32_MAX - 1), st.integers(0, INT32_MAX)
FRACTIONS = st.builds(
    lambda whole, part, below: whole + Fraction(part % below, below), WHOLE, PART, st.integers(1, INT32_MAX)
)


@settings(max_examples=25)
@given(
    ids=st.lists(st.one_of(WHOLE, FRACTIONS, st.just(INT32_MAX)), min_size=1, max_size=9),
    form=st.sampled_from(["table", "int32", "int64", "float64"]),
    inv_freq=st.none() | st.lists(st.floats(-100, 100), min_size=1, max_size=9),
    rest=st.integers(0, 3),
    pairing=st.sampled_from(PAIRINGS),
    dtype=st.sampled_from(DTYPES),
    conjugate=st.booleans(),
)
@pytest.mark.parametrize("way", ["auto", "triton"])
def test_any_ids_and_frequencies_agree(
    way: str, ids: list[Any], form: str, inv_freq: Any, rest: int, pairing: Any, dtype: torch.dtype, conjugate: bool
) -> None:
    pairs = len(inv_freq or [0] * 5)
    rotary = Rotary(2 * (pairs + rest), rotary_dim=2 * pairs, axes=1, inv_freq=inv_freq, pairing=pairing)
    if form == "table":
        positions: Any = table_of([[value] for value in ids])
    else:
        numbers = [min(float(value), INT32_MAX) for value in ids]
        whole = torch.tensor([numbers], dtype=torch.float64, device=DEVICE)
        positions = whole if form == "float64" else whole.floor().to(getattr(torch, form))
    q = device_heads(len(ids), 2, rotary.head_dim, dtype)
    want = one(q, positions, rotary, "reference", conjugate=conjugate)
    assert_same_bits(one(q, positions, rotary, way, conjugate=conjugate), want, truncation(way, dtype))
    if inv_freq is None and form != "float64":  # a float64 is rounded down to a multiple of 2⁻³²
        assert_rotated(want, q, positions, rotary, conjugate=conjugate)


def test_worked_examples_of_both_pairings_and_of_an_axis_for_each_head() -> None:
    position = torch.tensor([[1]], device=DEVICE)
    x = torch.tensor([[[1.0, 0, 1, 0]], [[1.0, 1, 0, 0]]], device=DEVICE)
    adjacent = one(x[:1], position, Rotary(4, axes=1, pairing="adjacent"))
    assert_within(adjacent, [[[0.540302, 0.841471, 0.99995, 0.01]]], 5e-7 + EXACT)  # half a unit of the last digit
    assert_within(one(x[1:], position, Rotary(4, axes=1)), [[[0.540302, 0.99995, 0.841471, 0.01]]], 5e-7 + EXACT)
    rotary = Rotary(4, theta=100.0, allocation="heads", head_axes=[0, 2, 1])
    q = x[1:].expand(1, 6, 4)
    got: Any = apply_rotary(q, q[:, :3], torch.tensor([[1], [2], [3]], device=DEVICE), rotary)
    turned = {  # cos and sin of the id and of a tenth of the id
        1: [0.54030, 0.99500, 0.84147, 0.09983],
        2: [-0.41615, 0.98007, 0.90930, 0.19867],
        3: [-0.98999, 0.95534, 0.14112, 0.29552],
    }
    for out, ids in zip(got, ([1, 1, 3, 3, 2, 2], [1, 3, 2]), strict=True):
        assert_within(out, [[turned[id_] for id_ in ids]], 5.1e-6)


ONE_LADDER = [name for name in ROTARIES if not any(word in name for word in ("axial", "pixtral", "theta", "HoPE"))]


@pytest.mark.parametrize("name", ONE_LADDER)
def test_text_is_rotated_bit_for_bit_as_by_rope_1d(name: str) -> None:
    rotary, q = ROTARIES[name], device_heads(40, 2, ROTARIES[name].head_dim)
    flat = replace(rotary, axes=1, allocation="interleaved", mrope_section=None)
    text = placed([Text(40)], BY_AXES[rotary.axes], 5_000_000)
    assert_same_bits(one(q, text, rotary), one(q, torch.arange(5_000_000, 5_000_040, device=DEVICE)[None], flat))


@EVERY
def test_unrotated_heads_and_pairs_and_their_gradients_stay_unchanged(way: Any) -> None:
    table = packed("videorope", 70_000).slice(5, 14)
    by_head = Rotary(12, axes=3, allocation="heads", head_axes=[1, -1, 2])
    by_pair = Rotary(12, axes=3, allocation=[1, 2, -1, 0, -1, -1])  # HoPE with an additional axis 0
    partial = Rotary(12, axes=3, rotary_dim=6)
    rest: Any = slice(None)
    places: Any = ((slice(1, 2), rest), (rest, [2, 4, 5, 8, 10, 11]), (rest, slice(6, 12)))
    for base, still in zip((by_head, by_pair, partial), places, strict=True):
        for precision in ("exact", "hf"):
            rotary: Rotary = replace(base, precision=precision)
            k = device_heads(9, 3, 12)
            k[0, still[0], still[1]] = torch.nan  # also kept
            out, _, grad, _ = everything(way, k, k, table, rotary)
            for got, x in ((out, k), (grad, device_heads(9, 3, 12, seed=9))):
                assert_same_bits(got[:, *still], x[:, *still])
                changed = (got != x).any(0)
                changed[still] = True
                assert changed.all()


@pytest.mark.parametrize("way", ["auto", "triton"])
@pytest.mark.parametrize("axes", [1, 2, 3, 4])
def test_hf_precision_rotates_by_float32_angles(axes: int, way: Any, tile: Any) -> None:
    tile(32, 1)
    pairing: Any = PAIRINGS[axes % 2]
    rotary = Rotary(24, axes=axes, precision="hf", pairing=pairing, kv_heads=2 if axes > 2 else None)
    q, k, table = device_heads(32, 4, 24), device_heads(32, 2, 24, seed=1), packed(BY_AXES[axes])
    assert table.dense().max() < 20
    slack = ARITHMETIC + cos_sin(20.0, FREQUENCY + 1)
    want = everything("reference", q, k, table, rotary)
    assert_rotated(want[0], q, table, replace(rotary, precision="exact"), slack=slack)
    far = packed(BY_AXES[axes], 100_000)
    for positions in (far, dense(far)):  # the angles are equal, but the libraries' cos and sin differ
        want = everything("reference", q, k, positions, rotary)
        assert_within(everything(way, q, k, positions, rotary), want, [rotations(x, cos_sin()) for x in want])


# Tilings, segments and sizes.


@pytest.mark.parametrize(
    ("block", "shares", "head_axes"),
    [(64, 1, None), (8, 3, None), *(pytest.param(*x, marks=pytest.mark.slow) for x in (
        (4, 7, None), (2, 1, None), (1, 1, None), (64, 1, [1, 0, 1, 1]), (8, 3, [1, 0, 1, 1]), (2, 9, [1, 0, 1, 1]),
    ))],
)  # fmt: skip
def test_every_tiling_agrees(block: int, shares: int, head_axes: Any, tile: Any) -> None:
    tile(block, shares)
    table = packed("rope-tie-v2").slice(4, 17)
    rotary = Rotary(12, rotary_dim=8, allocation="heads" if head_axes else "interleaved", head_axes=head_axes)
    q, k = device_heads(13, 12 if head_axes else 5, 12), device_heads(13, 4, 12, seed=1)
    want = assert_agrees("triton", q, k, DevicePositions.from_table(table, DEVICE, 40), rotary)
    # In place, a head that two programs process would be rotated twice.
    apply_rotary(q, k, table, rotary, inplace=True, implementation="triton")
    assert_same_bits(q, want[0])
    assert_same_bits(k, want[1])


CASES: dict[str, Callable[[], PositionTable]] = {
    "segments of one token": lambda: table_of([[Fraction(7 * i, i % 5 + 1), -i] for i in range(35)]),
    "grids of one row": lambda: placed([Text(1), Grid(1, 1), Text(1), Grid(1, 2)] * 7, "rope-tie"),
    "one long text": lambda: placed([Text(35)], "rope-tie", 2**30),
    "the middle of an image": lambda: placed([Text(5), Grid(20, 20), Text(5)], "rope-tie").slice(211, 246),
    "videos": lambda: placed([Text(2), Grid(2, 3, frames=4), Text(3), Grid(1, 2, frames=3)], "mrope"),
    "segments aligned with blocks": lambda: placed([Text(16), Grid(4, 4)] * 2, "rope-tie"),
    "several blocks of text": lambda: placed([Text(300), Grid(5, 7), Text(178)], "rope-tie", INT32_MAX - 700),
    "several blocks of fractions": lambda: placed([Text(300), Grid(5, 7), Text(250)], "rope-tie-v2", INT32_MIN),
    **{
        f"{n} segments": lambda n=n: placed([Text(1), Grid(1, 2)] * 65, "rope-tie").slice(0, n)  # type: ignore[misc]
        for n in (1, 3, 48, 49, 194)
    },
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_segments_of_any_length_agree(case: str, tile: Any) -> None:
    table = CASES[case]()
    tile(16 if table.num_tokens < 60 else 256, 1)
    rotary, q = Rotary(6, axes=table.axes), device_heads(table.num_tokens, 1, 6)
    assert_dense(table)
    for form in (table, FORMS["spare columns"](table)):
        want = one(q, form, rotary, "reference")
        assert_same_bits(one(q, form, rotary, "triton"), want)
        assert_same_bits(one(q, form, rotary), want)


def test_pairs_and_heads_are_split_among_threads_and_programs() -> None:
    expected = {80: (8, 5), 72: (4, 9), 96: (16, 3), 24: (4, 3), 128: (64, 1), 20: (16, 1), 2: (1, 1)}
    pieces = {head_dim: tiling.pieces_of(head_dim, head_dim // 2, False) for head_dim in expected}
    assert {head_dim: (x.pairs_padded, x.pieces) for head_dim, x in pieces.items()} == expected
    assert tiling.pieces_of(128, 40, False) == tiling.channels_of(128, 40)
    sizes = {1: (4, 20, 1), 256: (4, 20, 1), 1024: (4, 8, 1), 2048: (16, 8, 4), 4096: (16, 4, 4), 10**6: (16, 3, 4)}
    assert {tokens: own_tiling(tokens, 40, 64) for tokens in sizes} == sizes
    assert [own_tiling(10**6, num_heads, 64)[1] for num_heads in (0, 1, 5, 16, 17, 32, 72)] == [1, 1, 1, 1, 2, 2, 5]
    assert [own_tiling(1, num_heads, 64)[1] for num_heads in (0, 1, 5)] == [1, 1, 3]
    assert [own_tiling(2048, 8, pairs)[0] for pairs in (1, 8, 64, 128, 1024, 2048)] == [1024, 128, 16, 8, 1, 1]
    assert [tiling.shares_of(shares, groups) for shares, groups in ((5, 0), (1, 8), (8, 8), (9, 8))] == [5, 8, 8, 16]
    rows = {
        (0, 0, 1, 1, 2, 2): [0, 1, 2],
        (0, 0, 1, 1, 1, 2): [0, 0, 1, 1, 1, 2],
        (0, 0, 0, 0, 1, 1): [0, 0, 1],
        (2, 2): [2],
    }
    for axes, want in rows.items():  # groups consist of consecutive equal heads
        _, pair_axis = frequencies_of(Rotary(6, axes=3, allocation="heads", head_axes=axes))
        assert pair_axis.tolist() == [[axis] * 3 for axis in want]


@EVERY
def test_calls_without_k_heads_or_tokens_agree(way: Any) -> None:
    rotary, table = Rotary(8, rotary_dim=4), packed("rope-tie").slice(4, 9)
    q, k = device_heads(5, 3, 8), device_heads(5, 2, 8, seed=1)
    for some_q, some_k, positions in ((q[:, :0], k, table), (q, k[:, :0], table), (q[:0], k[:0], table.slice(2, 2))):
        want = assert_agrees(way, some_q, some_k, positions, rotary)
        in_place = some_q.clone(), some_k.clone()
        apply_rotary(*in_place, positions, rotary, inplace=True, implementation=way)
        for got, x, out in zip(in_place, (some_q, some_k), want[:2], strict=True):
            assert out.shape == x.shape
            assert_same_bits(got, out)
    nothing = torch.zeros(2, 0, 5, dtype=torch.int32, device=DEVICE)
    assert one(device_heads((0, 5), 2, 8), nothing, rotary, way).shape == (0, 5, 2, 8)


# Layouts, strides and memory.


def as_layout(x: Tensor, layout: str | None) -> Tensor:
    """View a (39, heads, head_dim) tensor in a layout without copying it."""
    if layout == "thd":
        return x
    four = x.view(3, 13, *x.shape[1:])
    return four.transpose(1, 2) if layout == "bhsd" else four


STRIDES: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "heads of a fused qkv": lambda x: (x[:, :4], x[:, 4:6]),
    "heads in turn": lambda x: (x[:, ::2], x[:, 1::2]),
    "heads in reverse order": lambda x: (x[:, 2:6], x[:, :2]),
    "parts of the channels": lambda x: (x[..., :12], x[..., 13:25]),
    "channels in turn": lambda x: (x[:, :4, ::2], x[:, 4:6, 1::2]),
    "channels first": lambda x: (x.permute(2, 0, 1)[:12].permute(1, 2, 0), x[:, :, 12:24]),
}
"""Views of a buffer of 39 tokens, eight heads and 26 channels that share no element."""


LAYOUTS = (("thd", False), ("bshd", False), ("bhsd", False), (None, True), ("bhsd", True))


@pytest.mark.parametrize(
    ("layout", "own", "strides", "way"),
    [(*layout, strides, way) for layout in LAYOUTS for strides in STRIDES for way in ("reference", "auto")]
    + [("bshd", False, strides, "triton") for strides in list(STRIDES)[1:]]
    + [(*layout, "heads of a fused qkv", "triton") for layout in LAYOUTS],
)
def test_views_are_rotated_in_every_layout_and_nothing_else_is_written(
    layout: Any, own: bool, strides: str, way: Any, tile: Any
) -> None:
    tile(64, 1)
    pairing: Any = PAIRINGS[layout == "bshd"]
    table, buffer = packed("rope-tie").pad(13), device_heads(39, 8, 26)
    q, k = (as_layout(x[..., :12], layout) for x in STRIDES[strides](buffer))
    count = (k.shape[1] if layout == "bhsd" else k.shape[-2]) if own else 0
    axes: Any = {"allocation": "heads", "head_axes": [1, 0, 0, 0, 0, 1, 1, 1][:count]} if own else {}
    rotary, before = Rotary(12, rotary_dim=8, pairing=pairing, **axes), buffer.clone()
    fresh = apply_rotary(q, k, table, rotary, layout=layout, implementation=way)
    turned = apply_rotary(q, k, table, rotary, layout=layout, implementation=way, conjugate=True)
    for x, out, back in zip((q, k), fresh, turned, strict=True):
        assert_rotated(out, x, table, rotary, layout=layout)
        assert_rotated(back, x, table, rotary, layout=layout, conjugate=True)
    assert torch.equal(buffer, before)
    in_place = apply_rotary(q, k, table, rotary, layout=layout, inplace=True, implementation=way)
    for x, out, want in zip((q, k), in_place, fresh, strict=True):
        assert out is x
        assert_same_bits(x, want)
        x.zero_()
    for x in (as_layout(y[..., :12], layout) for y in STRIDES[strides](before)):
        x.zero_()
    assert torch.equal(buffer, before)


@EVERY
def test_tokens_and_heads_that_share_memory_are_rotated(way: Any) -> None:
    rotary, table = Rotary(8, rotary_dim=6, pairing="adjacent"), packed("rope-tie").slice(0, 16)
    for x in (device_heads(1, 1, 8).expand(16, 2, 8), device_heads(16, 2, 1).expand(16, 2, 8)):
        assert_agrees(way, x, x[:, :1], table, rotary)


def test_batches_of_padded_tables_are_rotated_in_any_layout_and_keep_their_padding() -> None:
    rotary, table = Rotary(8), packed("rope-tie-v2").pad(13, "left")
    square = device_heads((3, 13), 13, 8)  # as many heads as tokens
    want = one(square.flatten(0, 1), table, rotary).view_as(square)
    padding = torch.from_numpy(packed("rope-tie-v2").padded(13, "left")[1] == 0)
    assert_same_bits(want[padding], square[padding])
    for positions in (table, dense(table), dense(table).view(2, 3, 13)):
        assert_same_bits(one(square, positions, rotary), want)
        turned = one(square.transpose(1, 2), positions, rotary, layout="bhsd")
        assert_same_bits(turned.transpose(1, 2), want)


@EVERY
def test_the_values_of_a_negative_view_are_rotated(way: Any) -> None:
    whole = device_heads(32, 2, 16)
    negative = torch.view_as_complex(torch.stack((whole, whole), -1)).conj().imag
    assert negative.is_neg()
    assert_same_bits(one(negative, packed("rope-tie"), Rotary(16), way), one(-whole, packed("rope-tie"), Rotary(16)))


# Autograd.


def test_only_tensors_that_require_gradients_receive_gradients() -> None:
    rotary, table, grad = Rotary(8), packed("rope-tie"), device_heads(32, 3, 8, seed=5)
    for wanted in ((True, False), (False, True)):
        q, k = (device_heads(32, 3, 8, seed=i).requires_grad_(want) for i, want in enumerate(wanted))
        outs = apply_rotary(q, k, table, rotary)
        assert [x is not None and x.requires_grad for x in outs] == [True, True]
        torch.autograd.backward([x for x in outs if x is not None], [grad, grad])
        assert [x.grad is not None for x in (q, k)] == [*wanted]
        assert_rotated(q.grad if wanted[0] else k.grad, grad, table, rotary, conjugate=True)
    k.grad = None
    apply_rotary(q[:, :0], k, table, rotary)[1].backward(grad)  # type: ignore[union-attr]
    assert_rotated(k.grad, grad, table, rotary, conjugate=True)


def test_autograd_detects_changed_tables_and_tensors_rotated_in_place() -> None:
    rotary, positions = Rotary(8), DevicePositions.from_table(packed("rope-tie"), DEVICE)
    q, grad = device_heads(32, 2, 8).requires_grad_(), device_heads(32, 2, 8, seed=5)
    out = one(q, positions, rotary)
    positions.refresh(packed("rope-tie", 500))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(grad)
    for way in ("reference", "auto", "triton"):
        x = q * 1
        saved = x.sin()
        with torch.no_grad():
            one(x, packed("rope-tie"), rotary, way, inplace=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            saved.sum().backward()


def test_inference_tensors_are_rotated_in_place_and_do_not_affect_training() -> None:
    rotary, table = Rotary(8, theta=12345.0), packed("rope-tie")
    with torch.inference_mode():
        q = device_heads(32, 2, 8)
        want = one(q, table, rotary)
        assert_same_bits(one(q, table, rotary, inplace=True), want)
    x = device_heads(32, 2, 8).requires_grad_()
    one(x, table, rotary).sum().backward()  # the constants of the rotation are no inference tensors


# An engine's cache of cos and sin.

SECTIONS: Any = {"rotary_dim": 12, "axes": 3, "allocation": "sections", "mrope_section": [2, 3, 1]}
CACHED = {
    "sections": Rotary(20, **SECTIONS),
    "adjacent": Rotary(20, **SECTIONS, pairing="adjacent"),
    "mrope-interleaved": Rotary(20, rotary_dim=12, axes=3, allocation="mrope-interleaved", mrope_section=[2, 2, 2]),
    "whole heads": Rotary(24, axes=3, allocation="sections", mrope_section=[5, 4, 3]),  # 12 pairs, processed in pieces
    "by head": Rotary(20, rotary_dim=12, axes=3, allocation="heads", head_axes=[2, -1]),
}
THIRTEEN = place(SegmentTable.from_documents([[Text(3), Grid(2, 3), Text(2)], [Text(2)]]), "mrope")
ROWS = 8
"""One more than the largest id."""


def rows_of(width: int, dtype: torch.dtype = torch.float32, rows: int = ROWS) -> Tensor:
    """Return random rows that no frequencies can produce."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(7)).to(dtype).to(DEVICE)


def engines(x: Tensor, ids: Tensor, cache: Tensor, rotary: Rotary, inverse: bool = False) -> Tensor:
    """Rotate as vLLM's rotary_embedding does: with x, the row and products in float32, rounding once."""
    out, x32, rows = x.detach().cpu().clone(), x.detach().float().cpu().numpy(), cache.float().cpu().numpy()
    pairs, first, second = rotary.rotary_dim // 2, *channels(rotary)
    for token, row in enumerate(ids.T.tolist()):
        for head in range(x.shape[1]):
            if rotary.head_axes is None:
                axes = pair_axes(rotary)
            else:
                axes = [rotary.head_axes[head * len(rotary.head_axes) // x.shape[1]]] * pairs
            at = [row[axis] if axis >= 0 else 0 for axis in axes]
            cos, sin = rows[at, range(pairs)], rows[at, range(pairs, 2 * pairs)] * (-1 if inverse else 1)
            a, b = x32[token, head, first], x32[token, head, second]
            out[token, head, first] = torch.from_numpy(a * cos - b * sin).to(x.dtype)
            out[token, head, second] = torch.from_numpy(b * cos + a * sin).to(x.dtype)
    return out.to(x.device)


@EVERY
@pytest.mark.parametrize("name", CACHED)
def test_cos_and_sin_of_an_engines_cache_are_those_of_its_formula(name: str, way: Any) -> None:
    rotary, ids = CACHED[name], dense(THIRTEEN)
    width, dim, mixed = rotary.rotary_dim, rotary.head_dim, [(torch.float32, torch.bfloat16)]
    for dtype, of_rows in [*zip(DTYPES, DTYPES, strict=True), *mixed][:: 2 if way == "triton" else 1]:
        q, k, rows = device_heads(13, 4, dim, dtype), device_heads(13, 2, dim, dtype, 1), rows_of(width, of_rows)
        results = everything(way, q, k, THIRTEEN, rotary, cos_sin=rows)
        incoming = [device_heads(13, n, dim, dtype, 9) for n in (4, 2)]
        for got, x, inverse in zip(results, (q, k, *incoming), (False, False, True, True), strict=True):
            assert_same_bits(got, engines(x, ids, rows, rotary, inverse), truncation(way, dtype))
    q, k, rows = q.float(), k.float(), rows_of(width)
    want = engines(q, ids, rows, rotary)
    for positions in (DevicePositions.from_table(THIRTEEN, DEVICE, 9), ids, ids.long()):
        assert_same_bits(one(q, positions, rotary, way, cos_sin=rows, validate=True), want)
    none, first = torch.zeros_like(ids[:, :2]), rows[:1].clone()  # a cache with one row
    assert_same_bits(one(q[:2], none, rotary, way, cos_sin=first), engines(q[:2], none, first, rotary))
    v, slots = device_heads(13, 2, 20), torch.arange(2, 15, device=DEVICE)
    cache = Cache(torch.zeros(16, 2, dim, device=DEVICE), torch.zeros(16, 2, 20, device=DEVICE), slots)
    out, _ = rotate_and_store(q, k, v, ids, rotary, cache, cos_sin=rows, implementation=way)
    assert_same_bits(out, want)
    assert_same_bits(cache.key_cache[2:15], engines(k, ids, rows, rotary))


@EVERY
def test_a_cache_of_exact_cos_and_sin_reproduces_the_rotation_with_its_factor_applied_once(way: Any) -> None:
    rotary = Rotary(20, rotary_dim=12, scaling=YaRN(4.0, 4096), axes=3, allocation=[0, 1, 2, 0, 1, 2])
    rows = torch.cat([*tables_of(rotary, torch.arange(ROWS)[None].repeat(3, 1))], dim=1).to(DEVICE)
    q = device_heads(13, 3, 20)
    assert rotary.attention_factor != 1.0
    assert_same_bits(one(q, THIRTEEN, rotary, way, cos_sin=rows), one(q, THIRTEEN, rotary, way))


@EVERY
@pytest.mark.parametrize("row", [ROWS, -1, 2**31 - 1, -(2**31), 2**32 + 3, 3 - 2**40])
def test_an_unchecked_id_beyond_the_cache_makes_only_its_own_pairs_nan(
    row: int, way: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, q, rotary = dense(THIRTEEN).to(torch.int64, copy=True), device_heads(13, 3, 20), CACHED["sections"]
    cache = rows_of(12, rows=3 * ROWS)[ROWS : 2 * ROWS]  # memory before and after the cache is readable
    expected = engines(q, ids, cache, rotary)
    nan = torch.zeros(13, 20, dtype=torch.bool, device=DEVICE)
    for token, axis in ((4, 1), (12, 2)):
        ids[axis, token] = row
        for j, pair in enumerate(zip(*channels(rotary), strict=True)):
            nan[token, list(pair)] = pair_axes(rotary)[j] == axis
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # values are not checked, as on a device
    turned = one(q, ids, rotary, way, cos_sin=cache)
    assert torch.equal(turned.isnan(), nan[:, None].expand(13, 3, 20))
    assert torch.equal(turned.nan_to_num(0.0), expected.masked_fill(nan[:, None], 0.0))
    # A norm after the rotation spreads NaN within a head but not to other heads.
    normed = one(q, ids, rotary, way, cos_sin=cache, norm=Norm(torch.ones(20, device=DEVICE), after=True))
    assert torch.equal(normed.isnan(), nan.any(1)[:, None, None].expand(13, 3, 20))


# A packed qkv.


def separate(qkv: Tensor, gate: bool) -> list[Tensor]:
    """Split qkv into contiguous q, k, v and gate as Qwen3NextAttention does: each q head precedes its gate."""
    rows = qkv.shape[:-1]
    q, k, v = qkv.split([36 * (2 if gate else 1), 24, 24], dim=-1)
    parts = torch.chunk(q.reshape(*rows, -1, 24), 2, dim=-1) if gate else (q.reshape(*rows, -1, 12),)
    q, *gates = (x.clone(memory_format=torch.contiguous_format) for x in parts)
    return [q, k.reshape(*rows, -1, 12).clone(), v.reshape(*rows, -1, 12).clone(), *gates]


@EVERY
@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("rows", [(16,), (2, 8)])
def test_parts_of_a_packed_qkv_are_views_that_are_rotated_like_separate_tensors(
    rows: Any, gate: bool, way: Any
) -> None:
    table = place(SegmentTable.from_documents([[Text(2), Grid(2, 3)]] * 2))
    rotary, norm = Rotary(12, rotary_dim=8), Norm(torch.rand(12, device=DEVICE))
    qkv = device_heads(rows, 1, (10 if gate else 7) * 12).squeeze(-2)
    apart, parts = separate(qkv, gate), split_qkv(qkv, num_heads=3, num_kv_heads=2, head_dim=12, gate=gate)
    assert (parts.gate is not None) == gate
    views = [x for x in parts if x is not None]
    for part, copy in zip(views, apart, strict=True):
        assert torch.equal(part, copy)
        assert part.untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr()
    want = apply_rotary(apart[0], apart[1], table, rotary, norm=norm, implementation=way)
    got = apply_rotary(parts.q, parts.k, table, rotary, norm=norm, implementation=way)
    apply_rotary(parts.q, parts.k, table, rotary, norm=norm, implementation=way, inplace=True)
    for x, expected in zip((*got, *views), (*want, *want, *apart[2:]), strict=True):
        assert_same_bits(x, expected)
