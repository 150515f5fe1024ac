"""The rotation in C against the plain torch reference, bit by bit, in both widths of vectors; and what it declines."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import settled
from rotary_oracle import BY_AXES, INT32_MAX, INT32_MIN, ROTARIES, heads, packed, table_of
from torch import Tensor

from mmpos.rotary import DevicePositions, Rotary, YaRN, apply_rotary, cpu
from mmpos.rotary.device import constants, position_ids
from mmpos.rotary.reference import AUTO, RotationArguments
from mmpos.support import native

if native.core is None:
    pytest.skip("the extension was not built", allow_module_level=True)

CORE = native.core
CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
PAIRINGS = ("half", "adjacent")
WIDTHS = pytest.mark.parametrize("wide", [True, False], ids=["wide", "plain"])


def source(positions: Any, rotary: Rotary) -> tuple[Any, ...]:
    ids, adjacent = position_ids(positions, CPU), rotary.pairing == "adjacent"
    frequencies, pair_axis = constants(rotary, CPU)
    rotation = RotationArguments(
        ids.tensor, frequencies, pair_axis, ids.mode, adjacent, rotary.attention_factor, False, AUTO
    )
    made = cpu.angles_of(rotation, ids.tokens)
    assert made is not None
    return made


def turn(tensors: Any, given: Any, *, pairing: str = "half", conjugate: bool = False, wide: bool = True) -> bool:
    """All tokens, by the extension alone."""
    tokens = tensors[0].shape[0] * tensors[0].shape[1]
    return CORE.rotate(tensors, given, None, 0, tokens, pairing == "adjacent", conjugate, wide)


def assert_same(got: Tensor, want: Tensor) -> None:
    """Equal bits; NaN where there is NaN, whose bits torch itself writes in several ways."""
    assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())
    assert torch.equal(got.isnan(), want.isnan())
    a, b = (x.nan_to_num(0.0, torch.inf, -torch.inf).view(torch.uint8) for x in (got.contiguous(), want.contiguous()))
    assert torch.equal(a, b)


def assert_agrees(x: Tensor, positions: Any, rotary: Rotary, *, conjugate: bool = False, wide: bool = True) -> None:
    """(tokens, heads, head_dim), out of place and in place."""
    want, _ = apply_rotary(x, None, positions, rotary, conjugate=conjugate, implementation="reference")
    options: dict[str, Any] = {"pairing": rotary.pairing, "conjugate": conjugate, "wide": wide}
    out, same = torch.full_like(want, torch.nan), x.clone()
    four, fresh, kept = (cpu._bits(tensor.unsqueeze(0)) for tensor in (x, out, same))
    given = source(positions, rotary)
    assert turn((four, fresh), given, **options)
    assert_same(out, want)
    assert turn((kept, kept), given, **options)
    assert torch.equal(same.nan_to_num(1e9), want.nan_to_num(1e9))


# The map.


@WIDTHS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("rotary_dim", [2, 6, 8, 14, 16, 24, 32, 40, 66, 80, 128])
def test_any_number_of_pairs_agrees(rotary_dim: int, pairing: Any, dtype: torch.dtype, wide: bool) -> None:
    for rest in (0, 6):
        rotary = Rotary(rotary_dim + rest, rotary_dim=rotary_dim, axes=1, pairing=pairing)
        ids = torch.tensor([[0, 1, -1, 77, INT32_MAX, INT32_MIN, 123_456_789]])
        assert_agrees(heads(7, 3, rotary.head_dim, dtype), ids, rotary, wide=wide)


@settled
@given(
    ids=st.lists(
        st.tuples(st.integers(INT32_MIN, INT32_MAX - 1), st.integers(0, INT32_MAX), st.integers(1, INT32_MAX)),
        min_size=1,
        max_size=9,
    ),
    inv_freq=st.lists(st.floats(-100, 100), min_size=1, max_size=20),
    rest=st.integers(0, 3),
    form=st.sampled_from(["table", "int32", "int64", "float64"]),
    pairing=st.sampled_from(PAIRINGS),
    dtype=st.sampled_from(DTYPES),
    conjugate=st.booleans(),
    wide=st.booleans(),
)
def test_any_ids_and_frequencies_agree(
    ids: list[tuple[int, int, int]], inv_freq: list[float], rest: int, form: str, pairing: Any, dtype: torch.dtype,
    conjugate: bool, wide: bool,
) -> None:  # fmt: skip
    values = [whole + Fraction(part % bottom, bottom) for whole, part, bottom in ids]
    rotary = Rotary(
        2 * (len(inv_freq) + rest), rotary_dim=2 * len(inv_freq), axes=1, inv_freq=inv_freq, pairing=pairing
    )
    positions: Any = table_of([[value] for value in values])
    if form != "table":
        kind: Any = getattr(torch, form)
        positions = torch.tensor([[min(max(float(v), INT32_MIN), INT32_MAX) for v in values]], dtype=torch.float64)
        positions = positions if form == "float64" else positions.floor().to(kind)
    assert_agrees(heads(len(ids), 2, rotary.head_dim, dtype), positions, rotary, conjugate=conjugate, wide=wide)


@WIDTHS
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_every_sort_of_number_agrees(pairing: Any, wide: bool) -> None:
    every_third = torch.arange(0, 3 << 14, 3, dtype=torch.int32)  # all exponents, all low bits, and no infinity
    bits = torch.cat((every_third, every_third + (1 << 15)))
    bits[:6] = torch.tensor([0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7FFF])
    numbers = bits.to(torch.int16).view(torch.bfloat16).view(8, -1, 16)
    rotary = Rotary(32, axes=1, pairing=pairing, inv_freq=[1.0] * 16)
    for other in (-0.0, 3e38, -1e-39, torch.inf):
        pair = numbers, torch.full_like(numbers, other)
        x = torch.cat(pair, -1) if pairing == "half" else torch.stack(pair, -1).flatten(-2)
        assert_agrees(x, torch.arange(8)[None], rotary, wide=wide)
    assert_agrees(x.float(), torch.arange(8)[None], rotary, wide=wide)


@pytest.mark.parametrize("conjugate", [False, True])
@pytest.mark.parametrize("name", ROTARIES)
def test_every_allocation_agrees(name: str, conjugate: bool) -> None:
    rotary = ROTARIES[name]
    x = heads(32, 2, rotary.head_dim, torch.bfloat16)
    assert_agrees(x, packed(BY_AXES[rotary.axes], 9_000_000), rotary, conjugate=conjugate)


@WIDTHS
def test_the_attention_factor_is_multiplied_as_the_reference_does(wide: bool) -> None:
    rotary = Rotary(20, rotary_dim=12, scaling=YaRN(4.0, 32768))
    for positions in (packed("rope-tie-fractional", 70_000), torch.randint(INT32_MIN, INT32_MAX, (2, 32))):
        assert_agrees(heads(32, 3, 20), positions, rotary, wide=wide)


# The tensors.

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda x: x,
    "a slice of fused heads": lambda x: x[:, :, 1:4],
    "every second token": lambda x: x[:, ::2],
    "every second head": lambda x: x[:, :, ::2],
    "a part of the channels": lambda x: x[..., 3:19],
    "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "sequences inside": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "one token for all": lambda x: x[:1, :1].expand(3, 26, -1, -1),
    "one token each": lambda x: x[:, :1],
    "one sequence": lambda x: x[:1],
    "every second channel": lambda x: x[..., ::2],
    "channels outside": lambda x: x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0),
    "one channel for all": lambda x: x[..., :1].expand(-1, -1, -1, 24),
}


def auto_and_reference(monkeypatch: pytest.MonkeyPatch, *arguments: Any, **options: Any) -> tuple[Any, Any]:
    """apply_rotary by the extension and nothing else, and by the reference."""
    want = apply_rotary(*arguments, **options, implementation="reference")
    with monkeypatch.context() as patch:
        patch.setattr("mmpos.rotary.reference.rotate", None)
        return apply_rotary(*arguments, **options), want


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("view", VIEWS)
def test_any_strides_agree_in_place_and_out_of_place(
    view: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = heads((3, 26), 6, 24, dtype)
    q = VIEWS[view](whole)
    k = q[:, :, :1]
    ids = torch.arange(q.shape[0] * q.shape[1]).mul(1_000_003).remainder(INT32_MAX).view(1, *q.shape[:2])
    for pairing in PAIRINGS:
        rotary = Rotary(q.shape[3], rotary_dim=10, axes=1, pairing=pairing)  # type: ignore[arg-type]
        got, want = auto_and_reference(monkeypatch, q, k, ids, rotary)
        assert_same(got[0], want[0])
        assert_same(got[1], want[1])
        if "for all" in view:
            continue
        fresh = whole.clone()
        mine = torch.as_strided(fresh, q.shape, q.stride(), q.storage_offset()) if q._base is not None else fresh
        expected = mine.clone()
        expected.copy_(apply_rotary(mine, None, ids, rotary, implementation="reference")[0])
        outside = fresh.clone()
        torch.as_strided(outside, q.shape, mine.stride(), mine.storage_offset()).copy_(expected)
        assert apply_rotary(mine, None, ids, rotary, inplace=True)[0] is mine
        assert torch.equal(fresh, outside)


@pytest.mark.parametrize("layout", ["thd", "bshd", "bhsd"])
def test_layouts_and_gradients_agree(layout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    table, rotary = packed("rope-tie-v2").pad(13), Rotary(20, rotary_dim=16)
    shape = {"thd": (39, 3, 20), "bshd": (3, 13, 3, 20), "bhsd": (3, 3, 13, 20)}[layout]
    found = []
    for implementation in ("reference", "auto"):
        q, k = (torch.randn(shape, generator=torch.Generator().manual_seed(i)).requires_grad_() for i in (1, 2))
        with monkeypatch.context() as patch:
            if implementation == "auto":
                patch.setattr("mmpos.rotary.reference.rotate", None)
            q_out, k_out = apply_rotary(q, k, table, rotary, layout=layout, implementation=implementation)
            assert k_out is not None
            torch.autograd.backward([q_out, k_out], [q_out.detach().sin(), k_out.detach().cos()])
        found.append((q_out.detach(), k_out.detach(), q.grad, k.grad))
    for got, want in zip(found[1], found[0], strict=True):
        assert got is not None
        assert want is not None
        assert_same(got, want)


@pytest.mark.parametrize("axes", BY_AXES)
@pytest.mark.parametrize("precision", ["exact", "hf"])
def test_every_form_of_positions_goes_by_the_extension(
    precision: Any, axes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = packed(BY_AXES[axes])
    ids = torch.from_numpy(table.dense()).to(torch.float64)
    rotary = Rotary(24, axes=axes, precision=precision)
    q, k = heads(32, 2, 24, torch.bfloat16), heads(32, 1, 24, torch.bfloat16, seed=1)
    forms: list[Any] = [table, DevicePositions.from_table(table, capacity=64), ids, ids.view(axes, 1, 32)]
    forms += [ids.floor().to(torch.int32), ids.floor().to(torch.int64), ids.floor().to(torch.int32).T.contiguous().T]
    for positions in forms:
        got, want = auto_and_reference(monkeypatch, q, k, positions, rotary)
        assert_same(got[0], want[0])
        assert_same(got[1], want[1])


def test_threads_agree_with_one_and_a_range_writes_its_own_tokens() -> None:
    rotary, ids = Rotary(64, axes=1), torch.arange(1100, dtype=torch.int32).repeat(4).view(1, 4, 1100)
    q = heads((4, 1100), 9, 64, torch.bfloat16)
    want, _ = apply_rotary(q, None, ids, rotary, implementation="reference")
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            assert_same(apply_rotary(q, None, ids, rotary)[0], want)
        pools = cpu._pool.cache_info().currsize
        for tokens in (300, 500, 800):  # worth one, two and three threads more
            apply_rotary(q[:, :tokens], None, ids[:, :, :tokens], rotary)
        assert cpu._pool.cache_info().currsize == pools, "tensors of every size keep threads of their own"
    finally:
        torch.set_num_threads(before)
    out = torch.full_like(q, torch.nan)
    given = source(ids, rotary)
    for first, stop in ((0, 0), (1090, 1111), (4400, 4400), (3300, 3301)):
        assert CORE.rotate((cpu._bits(q), cpu._bits(out)), given, None, first, stop, False, False, True)
        wanted = torch.full_like(q, torch.nan).flatten(0, 1)
        wanted[first:stop] = want.flatten(0, 1)[first:stop]
        assert_same(out.flatten(0, 1), wanted)
        out.fill_(torch.nan)


@pytest.mark.slow
def test_a_thread_that_outlives_the_main_one_still_rotates() -> None:
    code = """
import threading, torch
from mmpos.rotary import Rotary, apply_rotary

torch.set_num_threads(4)
q, ids, rotary = torch.ones(4096, 8, 64), torch.arange(4096)[None], Rotary(64, axes=1)

def late():
    threading.main_thread().join()
    want = apply_rotary(q, None, ids, rotary, implementation="reference")[0]
    print(torch.equal(apply_rotary(q, None, ids, rotary)[0], want))

threading.Thread(target=late).start()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("True\n", "")


# What it declines.


def test_without_the_extension_auto_is_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    q, ids, rotary = heads(32, 2, 24), torch.arange(64).view(2, 32), Rotary(24)
    want = apply_rotary(q, None, ids, rotary)[0]
    monkeypatch.setattr(native, "core", None)
    assert_same(apply_rotary(q, None, ids, rotary)[0], want)


def test_what_the_extension_declines_the_reference_rotates(monkeypatch: pytest.MonkeyPatch) -> None:
    q = k = heads(32, 3, 24).half()
    monkeypatch.setattr(native, "core", None)
    want = apply_rotary(q, k, packed("rope-tie"), Rotary(24))
    monkeypatch.undo()
    for got, wanted in zip(apply_rotary(q, k, packed("rope-tie"), Rotary(24)), want, strict=True):
        assert got is not None
        assert wanted is not None
        assert_same(got, wanted)
