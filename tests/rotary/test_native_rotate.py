"""The rotation in C, with and without a norm: the bits of the reference in both widths of vectors; what it declines.

numpy and the compiler round sums, products, quotients and roots of float32 as IEEE 754 says, one by one, so the bits
are those of every processor.
"""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import settled
from rotary_oracle import BY_AXES, INT32_MAX, INT32_MIN, ROTARIES, heads, packed, table_of
from torch import Tensor
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]

from mmpos.rotary import DevicePositions, Norm, Rotary, YaRN, apply_rotary, cpu
from mmpos.rotary.device import ids_on, rotation_of
from mmpos.rotary.reference import DENSE_FIXED, DENSE_INTEGER, TABLE_FRACTIONAL, TABLE_INTEGER
from mmpos.support import native

if native.core is None:
    pytest.skip("the extension was not built", allow_module_level=True)

CORE = native.core
CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
PAIRINGS = ("half", "adjacent")
SHORTER = {"longest": 0, "not longest": 128, "short": 64}
"""Flags of csrc/rotate.c, by the vectors that are left."""
WIDTHS = pytest.mark.parametrize("vectors", SHORTER)
NORMED = pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
EPS = 1e-5


def weight(size: int) -> Tensor:
    return torch.linspace(-0.5, 2, size)


@np.errstate(over="ignore", invalid="ignore")
def normalised(x: Tensor, w: Tensor) -> Tensor:
    """Heads in float32: squares of channel c in the partial sum of c mod 16, then those 8, 4, 2 and 1 apart added."""
    value = x.float().numpy()
    sums = np.zeros((*value.shape[:-1], 16), np.float32)
    for c in range(value.shape[-1]):
        sums[..., c % 16] += value[..., c] * value[..., c]
    for half in (8, 4, 2, 1):
        sums = sums[..., :half] + sums[..., half:]
    scale = np.float32(1) / np.sqrt(sums / np.float32(value.shape[-1]) + np.float32(EPS))
    return torch.from_numpy(value * scale) * w


def wanted(x: Tensor, w: Tensor | None, positions: Any, rotary: Rotary, after: bool = False, **options: Any) -> Tensor:
    """The norm in the order of C, and the rotation of the reference, rounded once."""
    value = x.float() if w is None or after else normalised(x, w)
    turned = apply_rotary(value, None, positions, rotary, implementation="reference", **options)[0]
    return (turned if w is None or not after else normalised(turned, w)).to(x.dtype)


def source(positions: Any, rotary: Rotary) -> tuple[Any, ...]:
    ids = ids_on(positions, rotary, CPU)
    return cpu.source_of(rotation_of(ids, rotary), ids.tokens, rotary.head_dim)


def assert_same(got: Tensor | None, want: Tensor | None) -> None:
    """Equal bits; NaN where there is NaN, whose bits torch itself writes in several ways."""
    assert got is not None
    assert want is not None
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    assert torch.equal(got.isnan(), want.isnan())
    a, b = (x.contiguous().nan_to_num(0.0, torch.inf, -torch.inf).view(torch.uint8) for x in (got, want))
    assert torch.equal(a, b)


def assert_agrees(
    x: Tensor, positions: Any, rotary: Rotary, w: Tensor | None = None, *, conjugate: bool = False,
    vectors: str = "longest", after: bool = False,
) -> None:  # fmt: skip
    """(tokens, heads, head_dim) by the extension alone, out of place and in place."""
    want = wanted(x, w, positions, rotary, after, conjugate=conjugate)
    norm = None if w is None else (EPS, w.numpy())
    flags = (
        cpu.ADJACENT * (rotary.pairing == "adjacent")
        | cpu.CONJUGATE * conjugate
        | SHORTER[vectors]
        | cpu.NORM_AFTER * after
    )
    for out in (torch.full_like(x, torch.nan), x.clone()):
        start = x if out.isnan().all() else out
        goes = None if start is out else to_dlpack(out)
        assert CORE.rotate((to_dlpack(start), goes), source(positions, rotary), norm, 0, 1, flags)
        assert_same(out, want)


# The map.


@WIDTHS
@pytest.mark.parametrize("normed", ["not", "before", "after"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("rotary_dim", [2, 6, 14, 16, 24, 40, 66, 80, 128])
def test_any_number_of_pairs_and_of_other_channels(
    rotary_dim: int, pairing: Any, dtype: torch.dtype, normed: str, vectors: str
) -> None:
    ids = torch.tensor([[0, 1, -1, 77, INT32_MAX, INT32_MIN, 123_456_789]])
    for rest in (0, 2, 6, 30):
        rotary = Rotary(rotary_dim + rest, rotary_dim=rotary_dim, axes=1, pairing=pairing)
        w = None if normed == "not" else weight(rotary.head_dim)
        assert_agrees(heads(7, 3, rotary.head_dim, dtype), ids, rotary, w, vectors=vectors, after=normed == "after")


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
    vectors=st.sampled_from(list(SHORTER)),
)
def test_any_ids_and_frequencies(
    ids: list[tuple[int, int, int]], inv_freq: list[float], rest: int, form: str, pairing: Any, dtype: torch.dtype,
    conjugate: bool, vectors: str,
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
    assert_agrees(heads(len(ids), 2, rotary.head_dim, dtype), positions, rotary, conjugate=conjugate, vectors=vectors)


@WIDTHS
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_every_sort_of_number(pairing: Any, vectors: str) -> None:
    every_third = torch.arange(0, 3 << 14, 3, dtype=torch.int32)  # all exponents, all low bits, and no infinity
    bits = torch.cat((every_third, every_third + (1 << 15)))
    bits[:6] = torch.tensor([0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7FFF])
    numbers = bits.to(torch.int16).view(torch.bfloat16).view(8, -1, 16)
    rotary = Rotary(32, axes=1, pairing=pairing, inv_freq=[1.0] * 16)
    for other in (-0.0, 3e38, -1e-39, torch.inf):
        pair = numbers, torch.full_like(numbers, other)
        x = torch.cat(pair, -1) if pairing == "half" else torch.stack(pair, -1).flatten(-2)
        assert_agrees(x, torch.arange(8)[None], rotary, vectors=vectors)
    assert_agrees(x.float(), torch.arange(8)[None], rotary, vectors=vectors)


@WIDTHS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pairing", PAIRINGS)
def test_every_sort_of_number_is_normalised(pairing: Any, dtype: torch.dtype, vectors: str) -> None:
    numbers = torch.tensor([0.0, -0.0, 1e-40, 1e-30, -3.0, 1e18, -3e38, torch.inf, -torch.inf, torch.nan])
    rotary, ids = Rotary(48, rotary_dim=32, axes=1, pairing=pairing), torch.arange(10)[None]
    among, w = heads(10, 2, 48), weight(48)
    among[..., 17] = numbers[:, None]
    w[40], w[41] = torch.inf, 0.0
    w[5:7] = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)  # NaN, of all bits
    for x in (numbers[:, None, None].repeat(1, 2, 48), among):
        for each in (weight(48), w):
            assert_agrees(x.to(dtype), ids, rotary, each, vectors=vectors)


@pytest.mark.parametrize("name", ROTARIES)
def test_every_allocation_with_a_factor(name: str) -> None:
    rotary = ROTARIES[name]
    x, table = heads(32, 2, rotary.head_dim, torch.bfloat16), packed(BY_AXES[rotary.axes], 9_000_000)
    assert_agrees(x, table, rotary)
    if rotary.inv_freq is None and rotary.rotary_dim > 4:
        scaled = Rotary(rotary.head_dim, axes=rotary.axes, scaling=YaRN(4.0, 32768))
        assert_agrees(x, table, scaled, conjugate=True)


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


@NORMED
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("view", VIEWS)
def test_any_strides_in_place_and_out_of_place(
    view: str, dtype: torch.dtype, normed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = heads((3, 26), 35 if normed else 6, 24, dtype)
    q = VIEWS[view](whole)
    k, w = q[:, :, :1], weight(q.shape[3]) if normed else None
    ids = torch.arange(q.shape[0] * q.shape[1]).mul(1_000_003).remainder(INT32_MAX).view(1, *q.shape[:2])
    rotary = Rotary(q.shape[3], rotary_dim=10, axes=1)
    norm = None if w is None else Norm(w, w - 1, EPS, 1.0)
    q_weight, k_weight = (None, None) if w is None else (w + 1.0, w - 1 + 1.0)
    q_want, k_want = wanted(q, q_weight, ids, rotary), wanted(k, k_weight, ids, rotary)
    with monkeypatch.context() as patch:
        patch.setattr("mmpos.rotary.reference.rotate", None)  # the extension and nothing else
        got = apply_rotary(q, k, ids, rotary, norm=norm)
    assert_same(got[0], q_want)
    assert_same(got[1], k_want)
    if "for all" in view:
        return
    fresh = whole.clone()
    mine = torch.as_strided(fresh, q.shape, q.stride(), q.storage_offset()) if q._base is not None else fresh
    outside = fresh.clone()
    there = torch.as_strided(outside, q.shape, mine.stride(), mine.storage_offset())
    there.copy_(wanted(mine, q_weight, ids, rotary))
    alone = None if w is None else Norm(w, None, EPS, 1.0)
    assert apply_rotary(mine, None, ids, rotary, norm=alone, inplace=True)[0] is mine
    assert torch.equal(fresh, outside)


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
    whole = ids.floor().to(torch.int32)
    forms += [whole, whole.long(), whole.view(axes, 1, 32), whole.T.contiguous().T, whole[:1].expand(axes, -1)]
    for positions in forms:
        want = wanted(q, None, positions, rotary), wanted(k, None, positions, rotary)
        with monkeypatch.context() as patch:
            patch.setattr("mmpos.rotary.reference.rotate", None)
            got = apply_rotary(q, k, positions, rotary)
        for out, expected in zip(got, want, strict=True):
            assert_same(out, expected)


def test_no_norm_of_k_or_of_q_leaves_its_bits_to_the_rotation() -> None:
    rotary, ids, w = Rotary(24, rotary_dim=16, axes=1), torch.arange(13)[None], weight(24)
    for dtype in DTYPES:
        q, k = heads(13, 5, 24, dtype), heads(13, 2, 48, dtype, seed=1)[..., ::2]
        for of_q, of_k in ((w, None), (None, w), (w, w + 1)):
            for after in (False, True):
                got = apply_rotary(q, k, ids, rotary, norm=Norm(of_q, of_k, EPS, after=after))
                assert_same(got[0], wanted(q, of_q, ids, rotary, after))
                assert_same(got[1], wanted(k, of_k, ids, rotary, after))


def test_weights_of_any_dtype_and_strides_and_with_gradients_go_by_the_extension(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, ids, rotary = heads(13, 2, 24), torch.arange(13)[None], Rotary(24, axes=1)
    narrow = weight(48).bfloat16()[::2]
    want = wanted(q, narrow.float(), ids, rotary)
    monkeypatch.setattr("mmpos.rotary.reference.rotate", None)
    for w in (narrow, narrow.float().requires_grad_()):
        assert_same(apply_rotary(q, None, ids, rotary, norm=Norm(w, eps=EPS))[0], want)


@NORMED
def test_threads_agree_with_one(normed: bool) -> None:
    rotary, ids = Rotary(64, axes=1), torch.arange(1100, dtype=torch.int32).repeat(4).view(1, 4, 1100)
    q, w = heads((4, 1100), 9, 64, torch.bfloat16), weight(64) if normed else None
    want, before = wanted(q, w, ids, rotary), torch.get_num_threads()
    norm = None if w is None else Norm(w, eps=EPS)
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            turned, _ = apply_rotary(q.clone(), None, ids, rotary, norm=norm, inplace=True)  # so that a hole shows
            assert_same(turned, want)
        pools = cpu._pool.cache_info().currsize
        for tokens in (300, 500, 800):  # worth one, two and three threads more
            apply_rotary(q[:, :tokens], None, ids[:, :, :tokens], rotary)
        assert cpu._pool.cache_info().currsize == pools, "tensors of every size keep threads of their own"
    finally:
        torch.set_num_threads(before)


def test_a_part_writes_its_own_tokens() -> None:
    rotary, ids = Rotary(64, axes=1), torch.arange(20, dtype=torch.int32).repeat(4).view(1, 4, 20)
    q = heads((4, 20), 9, 64, torch.bfloat16)
    want, given = wanted(q, None, ids, rotary), source(ids, rotary)
    for part, parts, first, stop in ((0, 1, 0, 80), (0, 3, 0, 26), (1, 3, 26, 53), (2, 3, 53, 80), (7, 81, 6, 7)):
        out, expected = torch.full_like(q, torch.nan), torch.full_like(q, torch.nan).flatten(0, 1)
        assert CORE.rotate((to_dlpack(q), to_dlpack(out)), given, None, part, parts, 0)
        expected[first:stop] = want.flatten(0, 1)[first:stop]
        assert_same(out.flatten(0, 1), expected)


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


@pytest.mark.parametrize("norm", [None, Norm(weight(24).half(), weight(24))])
def test_what_the_extension_declines_and_all_without_it_goes_by_the_reference(
    norm: Norm | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k = heads(32, 3, 24).half(), heads(32, 2, 24).half()
    want = apply_rotary(q, k, packed("rope-tie"), Rotary(24), norm=norm, implementation="reference")
    for core in (CORE, None):
        monkeypatch.setattr(native, "core", core)
        for got, expected in zip(apply_rotary(q, k, packed("rope-tie"), Rotary(24), norm=norm), want, strict=True):
            assert_same(got, expected)


def test_what_the_extension_declines_in_the_end_goes_by_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    q, table = heads(32, 3, 24), packed("rope-tie")
    want, _ = apply_rotary(q, None, table, Rotary(24), implementation="reference")
    monkeypatch.setattr(native, "core", SimpleNamespace(rotate=lambda *_: False))
    assert_same(apply_rotary(q.clone(), None, table, Rotary(24), inplace=True)[0], want)


X = torch.zeros(1, 4, 2, 16)
WEIGHT = np.ones(16, np.float32)
ROTARY = Rotary(16, axes=2)
CONSTANTS: bytes = source(torch.zeros(2, 4, dtype=torch.int32), ROTARY)[4]
TABLE = packed("rope-tie").take([0], [4]).table
COS = np.ones((4, 8), np.float32)


def dense(
    ids: Any = None, mode: int = DENSE_INTEGER, tokens: Any = 4, row: Any = 0, constants: Any = CONSTANTS
) -> dict[str, Any]:
    return {"given": (np.zeros((2, 4), np.int32) if ids is None else ids, mode, tokens, row, constants)}


def capsule(*shape: int, dtype: torch.dtype = torch.int32, **options: Any) -> dict[str, Any]:
    """Ids in a capsule, which say their tokens themselves."""
    return dense(to_dlpack(torch.zeros(shape, dtype=dtype)), tokens=0, **options)


def numbers(**changed: int) -> dict[str, Any]:
    """Constants of which some whole numbers are others."""
    names = ("pairs", "groups", "axes", "channels")
    values = {**dict(zip(names, struct.unpack("=4q", CONSTANTS[:32]), strict=True)), **changed}
    return dense(constants=struct.pack("=4q", *(values[name] for name in names)) + CONSTANTS[32:])


def with_axis(axis: int) -> dict[str, Any]:
    return dense(constants=CONSTANTS[:-4] + struct.pack("=i", axis))


def cos_sin(cos: Any = COS, sin: Any = COS, groups: Any = 1) -> dict[str, Any]:
    return {"given": (cos, sin, groups)}


DECLINED: dict[str, dict[str, Any]] = {
    "two dimensions": {"x": X[0, 0]},
    "five dimensions": {"x": X[None]},
    "three dimensions with heads first": {"x": X[0], "flags": cpu.HEADS_FIRST},
    "float64": {"x": X.double()},
    "float16": {"x": X.half()},
    "int16": {"x": X.short()},
    "strided channels": {"x": torch.zeros(1, 4, 2, 32)[..., ::2]},
    "no capsule": {"tensors": (X, X)},
    "other channels": {"x": X[..., :15]},
    "other tokens": {"x": X[:, :3]},
    "no tokens": {"x": X[:, :0]},
    "no heads": {"x": X[:, :, :0]},
    "an out of another shape": {"out": torch.zeros(1, 4, 1, 16)},
    "an out of another dtype": {"out": X.bfloat16()},
    "an out of strided channels": {"out": torch.zeros(1, 4, 2, 32)[..., ::2]},
    "k of another dtype": {"k": X.bfloat16()},
    "k of fewer dimensions": {"k": X[0]},
    "k of other tokens": {"k": torch.zeros(1, 5, 1, 16)},
    "k of other channels": {"k": torch.zeros(1, 4, 1, 18)},
    "k without an out": {"tensors": tuple(to_dlpack(X) for _ in range(3))},
    "no tensors": {"tensors": ()},
    "too many tensors": {"tensors": tuple(to_dlpack(X) for _ in range(6))},
    "a part below 0": {"part": -1},
    "a part past the last": {"part": 2, "parts": 2},
    "no parts": {"parts": 0},
    "too many parts": {"parts": (1 << 20) + 1},
    "a part beyond int64": {"part": 1 << 70},
    "a list for the source": {"given": list(dense()["given"])},
    "a source of other length": {"given": dense()["given"][:2]},
    "ids of other tokens": dense(np.zeros((2, 5), np.int32)),
    "ids of one dimension": dense(np.zeros(4, np.int32)),
    "float ids": dense(np.zeros((2, 4))),
    "ids of another axis": dense(np.zeros((3, 4), np.int32)),
    "rows of strided ids": dense(np.zeros((2, 8), np.int32)[:, ::2]),
    "too many axes": dense(np.zeros((9, 4), np.int32), constants=numbers(axes=9)["given"][4]),
    "narrow fixed point": dense(mode=DENSE_FIXED),
    "an unknown mode": dense(mode=4),
    "a mode below 0": dense(mode=-1),
    "tokens in a float": dense(tokens=4.0),
    "a row in a float": dense(row=4.0),
    "rows of other tokens": {**dense(row=4), "x": X.view(2, 2, 2, 16)},
    "ids in a capsule, of other tokens": capsule(2, 5),
    "ids in a capsule, of rows of other tokens": {**capsule(2, 1, 4), "x": X.view(2, 2, 2, 16)},
    "ids in a capsule, of one dimension": capsule(8),
    "ids in a capsule, of four dimensions": capsule(2, 1, 1, 4),
    "ids in a capsule, of another axis": capsule(3, 4),
    "no axes in a capsule": capsule(0, 4),
    "no tokens in a capsule": {**capsule(2, 0), "x": X[:, :0]},
    "floats in a capsule": capsule(2, 4, dtype=torch.float32),
    "narrow ids in a capsule": capsule(2, 4, dtype=torch.int16),
    "rows of strided ids in a capsule": dense(to_dlpack(torch.zeros(2, 8, dtype=torch.int32)[:, ::2])),
    "a batch of strided ids in a capsule": {
        **dense(to_dlpack(torch.zeros(2, 2, 4, dtype=torch.int32)[..., :2])),
        "x": X.view(2, 2, 2, 16),
    },
    "narrow fixed point in a capsule": capsule(2, 4, mode=DENSE_FIXED),
    "a table of a batch in a capsule": dense(to_dlpack(torch.from_numpy(TABLE.copy())[:, None]), TABLE_INTEGER),
    "ids beyond int32": {**dense(np.full((2, 4), 1 << 31)), "flags": cpu.CHECKED},
    "ids below int32": {**dense(np.full((2, 4), -(1 << 31) - 1)), "flags": cpu.CHECKED},
    "a narrow table": dense(TABLE.astype(np.int32), TABLE_INTEGER),
    "a table without columns": dense(TABLE[:, :0], TABLE_INTEGER),
    "a table without axes": dense(TABLE[:5], TABLE_INTEGER),
    "a table of an axis more": dense(np.concatenate([TABLE, TABLE[-4:]]), TABLE_INTEGER),
    "constants in a list": dense(constants=[1.0] * 8),
    "few constants": dense(constants=CONSTANTS[:64]),
    "constants without the last axis": dense(constants=CONSTANTS[:-4]),
    "constants and one byte": dense(constants=CONSTANTS + b"0"),
    "no pairs": numbers(pairs=0),
    "more pairs than constants": numbers(pairs=9),
    "no groups": numbers(groups=0),
    "many groups": numbers(groups=1 << 61),
    "other channels than those of constants": numbers(channels=18),
    "a pair of an axis past the last": with_axis(2),
    "a pair of an axis below none": with_axis(-2),
    "cos of other tokens": cos_sin(np.ones((5, 8), np.float32), np.ones((5, 8), np.float32)),
    "cos in float64": cos_sin(COS.astype(np.float64), COS.astype(np.float64)),
    "sin of other tokens": cos_sin(sin=np.ones((3, 8), np.float32)),
    "sin of other pairs": cos_sin(sin=np.ones((4, 7), np.float32)),
    "cos of no pairs": cos_sin(COS[:, :0], COS[:, :0]),
    "more pairs than channels": cos_sin(*[np.ones((4, 9), np.float32)] * 2),
    "cos of no groups": cos_sin(groups=0),
    "groups that do not divide cos": cos_sin(groups=3),
    "groups that do not divide heads": cos_sin(groups=4),
    "a norm in a list": {"norm": [1e-6, WEIGHT]},
    "a norm without a weight": {"norm": (1e-6,)},
    "a norm of two tensors for one": {"norm": (1e-6, WEIGHT, WEIGHT)},
    "a norm of one tensor for two": {"norm": (1e-6, WEIGHT), "k": X[:, :, :1]},
    "a whole eps": {"norm": (1, WEIGHT)},
    "a weight of fewer channels": {"norm": (1e-6, WEIGHT[:15])},
    "a weight in float64": {"norm": (1e-6, WEIGHT.astype(np.float64))},
    "a weight of int16": {"norm": (1e-6, WEIGHT.astype(np.int16))},
    "a weight in a row": {"norm": (1e-6, WEIGHT[None])},
    "a strided weight": {"norm": (1e-6, np.ones(32, np.float32)[::2])},
    "a weight in a tuple": {"norm": (1e-6, tuple(WEIGHT))},
    "an out whose tokens share memory": {"out": torch.zeros(1, 4, 2, 16)[:, :1].expand(X.shape), "flags": cpu.APART},
    "an out whose heads overlap": {"out": torch.zeros(200).as_strided(X.shape, (64, 32, 15, 1)), "flags": cpu.APART},
    "outs that share memory": {"k": X, "k_out": "out", "flags": cpu.APART},
}


GIVEN = dense()["given"]


def attempt(
    x: Any = X, out: Any = None, k: Any = None, k_out: Any = None, tensors: Any = None, norm: Any = None,
    given: Any = GIVEN, part: int = 0, parts: int = 1, flags: int = 0,
) -> bool:  # fmt: skip
    out = torch.full_like(x, 7) if out is None else out
    before = out.clone()
    made = (x, out) if k is None else (x, out, k, out if k_out == "out" else torch.zeros_like(k))
    tensors = tuple(map(to_dlpack, made)) if tensors is None else tensors
    done = CORE.rotate(tensors, given, norm, part, parts, flags)
    assert done or torch.equal(out, before)
    return done


def test_what_is_declined_is_taken_without_its_flaw() -> None:
    assert attempt()
    assert attempt(**cos_sin())
    assert attempt(**cos_sin(groups=2))
    assert attempt(**with_axis(-1))  # which is none
    assert attempt(**dense(TABLE, TABLE_INTEGER))
    assert attempt(**dense(TABLE, TABLE_FRACTIONAL))
    assert attempt(**dense(np.zeros((2, 4), np.int64), DENSE_FIXED))
    assert attempt(**dense(row=4))
    assert attempt(x=X.view(2, 2, 2, 16), **dense(row=2))
    assert attempt(**dense(np.full((2, 4), (1 << 31) - 1)), flags=cpu.CHECKED)
    assert attempt(**capsule(2, 4))
    assert attempt(x=X.view(2, 2, 2, 16), **capsule(2, 2, 2, dtype=torch.int64))
    assert attempt(**dense(to_dlpack(torch.from_numpy(TABLE.copy())), TABLE_INTEGER))
    assert attempt(x=X[0])
    assert attempt(x=X.transpose(1, 2).contiguous(), flags=cpu.HEADS_FIRST)
    assert attempt(k=torch.zeros(1, 4, 1, 16), flags=cpu.APART)
    assert attempt(x=X.bfloat16())
    assert attempt(part=3, parts=4)
    assert attempt(norm=(1e-6, WEIGHT))
    assert attempt(norm=(1e-6, None, WEIGHT), k=torch.zeros(1, 4, 1, 16))


@pytest.mark.parametrize("case", DECLINED)
def test_anything_else_is_declined_and_nothing_written(case: str) -> None:
    assert not attempt(**DECLINED[case])


def test_any_numbers_in_a_table_are_read_without_harm() -> None:
    draw = np.random.default_rng(0)
    for _ in range(300):
        table = draw.choice(np.array([0, 1, -1, 3, -(2**63), 2**63 - 1, 2**31]), TABLE.shape)
        assert attempt(**dense(table, int(draw.integers(2))))


def test_other_arguments_are_a_type_error() -> None:
    given, both = GIVEN, (to_dlpack(X), to_dlpack(X))
    for arguments in ((), (both, given), ([*both], given, None, 0, 1, 0), (both, given, None, 0, 1.0, 0)):
        with pytest.raises(TypeError, match="rotate takes"):
            CORE.rotate(*arguments)
