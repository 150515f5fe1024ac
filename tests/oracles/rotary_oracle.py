"""The oracle of rotations: complex numbers times 60-digit phases, written from the formula, not from mmpos."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache
from typing import Any

import mpmath
import numpy as np
import numpy.typing as npt
import torch
from mpmath import mp
from oracle import Document, exact
from store_oracle import DEVICE, flat
from tolerance import ARITHMETIC
from torch import Tensor

from mmpos import Grid, PositionTable, SegmentTable, Text, place
from mmpos.rotary import DevicePositions, Linspace, Rotary, YaRN

Ids = Sequence[Sequence[Fraction | int]]
"""One id per axis for each token."""

Array = npt.NDArray[Any]
Real = npt.NDArray[np.float64]

DIGITS = 60

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1


def pair_axes(rotary: Rotary) -> list[int]:
    """Return the axis of each pair, −1 for an unrotated pair."""
    pairs, axes, allocation = rotary.rotary_dim // 2, rotary.axes, rotary.allocation
    interleaved = [j % axes for j in range(pairs)]
    if not isinstance(allocation, str):
        return list(allocation)
    section = rotary.mrope_section or [dim // 2 for dim in rotary.axes_dim or [2 * (pairs // axes)] * axes]
    if allocation == "mrope-interleaved":
        return [j % 3 if j < 3 * section[j % 3] else 0 for j in range(pairs)]
    if allocation == "sections" or rotary.axes_dim is not None:
        return [axis for axis in range(axes) for _ in range(section[axis])]
    return interleaved if allocation == "interleaved" else sorted(interleaved)


def frequencies(rotary: Rotary) -> list[Any]:
    """Return the frequency of each pair in rad per position; scaled frequencies are mmpos's, see test_frequencies."""
    if rotary.scaling is not None or rotary.inv_freq is not None:
        return [mp.mpf(float(value)) for value in rotary.inv_freq_array]
    values = []
    axes = pair_axes(rotary)
    pairs, seen = len(axes), [0] * rotary.axes
    for j, axis in enumerate(axes):
        exponent = Fraction(j, pairs)
        if rotary.allocation == "axial" or rotary.axes_dim is not None:
            exponent = Fraction(seen[axis], axes.count(axis))
        elif rotary.allocation == "pixtral":
            exponent = Fraction(2 * seen[axis] + axis, pairs)
        theta = rotary.theta if isinstance(rotary.theta, float) else rotary.theta[axis]
        omega = mp.mpf(theta) ** (-mp.mpf(exponent.numerator) / exponent.denominator)
        values.append(omega if axis >= 0 else mp.mpf(0))
        seen[axis] += 1
    return values


def phases(ids: Ids, rotary: Rotary) -> Real:
    """Return (tokens, pairs) angles, reduced modulo one turn before rounding to float64."""
    with mpmath.workdps(DIGITS):
        omegas, axes = frequencies(rotary), pair_axes(rotary)
        rows = [[_phase(position[a], omega) for a, omega in zip(axes, omegas, strict=True)] for position in ids]
    return np.array(rows, np.float64).reshape(len(rows), len(axes))


@cache
def _phase(position: Fraction | int, omega: Any) -> float:
    """Return one angle, reduced modulo one turn; tests ask for the same angles for every dtype, pairing and tensor."""
    value = Fraction(position)
    return float(mp.fmod(mp.mpf(value.numerator) / value.denominator * omega, 2 * mp.pi))


def phases_by_head(ids: Ids, rotary: Rotary) -> Real:
    """Return (tokens, kv_heads, pairs) angles; one head if all rotate alike."""
    pairs = rotary.rotary_dim // 2
    if rotary.kv_heads is not None:  # the heads share the layout of one long head
        channels = 2 * pairs * rotary.kv_heads
        rotary = replace(rotary, head_dim=channels, rotary_dim=channels, kv_heads=None)
        return phases(ids, rotary).reshape(len(ids), -1, pairs)
    axes = rotary.head_axes
    alone = [rotary] if axes is None else [replace(rotary, allocation=[a] * pairs, head_axes=None) for a in axes]
    return np.stack([phases(ids, head) for head in alone], axis=1)


def channels(rotary: Rotary) -> tuple[list[int], list[int]]:
    """Return the first and the second channel of each pair."""
    pairs = rotary.rotary_dim // 2
    if rotary.pairing == "adjacent":
        return [2 * j for j in range(pairs)], [2 * j + 1 for j in range(pairs)]
    return list(range(pairs)), [j + pairs for j in range(pairs)]


def rotated(x: Array, ids: Ids, rotary: Rotary, conjugate: bool = False) -> Real:
    """Return (tokens, heads, head_dim) float64: each pair, as a complex number, times exp(iφ) and the attention factor.

    Each kv head serves the same number of adjacent q heads.
    """
    first, second = channels(rotary)
    out, phase = x.astype(np.float64), phases_by_head(ids, rotary) * (-1 if conjugate else 1)
    phase = phase.repeat(x.shape[1] // phase.shape[1], axis=1)
    z = (out[..., first] + 1j * out[..., second]) * np.exp(1j * phase) * rotary.attention_factor
    out[..., first], out[..., second] = z.real, z.imag
    return out


def lengths(x: Array, rotary: Rotary) -> Real:
    """Return the (tokens, heads, head_dim) lengths of each channel's pair; 0 for unrotated channels."""
    first, second = channels(rotary)
    out = np.zeros(x.shape)
    out[..., first] = out[..., second] = np.hypot(x[..., first], x[..., second]) * rotary.attention_factor
    return out


def thd(x: Tensor, layout: str | None) -> Array:
    """Reshape any layout to (tokens, heads, head_dim) float64."""
    return flat(x.detach().double().cpu(), layout).numpy()


def ids_of(positions: PositionTable | Tensor) -> Ids:
    """Return the ids of a table, or of a dense tensor, as fractions."""
    if isinstance(positions, PositionTable):
        return exact(positions)
    return [[Fraction(value) for value in column] for column in positions.reshape(positions.shape[0], -1).T.tolist()]


def assert_rotated(
    got: Tensor | None,
    x: Tensor,
    positions: PositionTable | Tensor | Ids,
    rotary: Rotary,
    *,
    layout: str | None = None,
    conjugate: bool = False,
    slack: float = ARITHMETIC,
) -> None:
    """Assert that every element is the exact value, up to float32 arithmetic and one rounding to its dtype."""
    assert got is not None
    assert (got.shape, got.dtype, got.device) == (x.shape, x.dtype, x.device)
    ids = ids_of(positions) if isinstance(positions, PositionTable | Tensor) else positions
    before = thd(x, layout)
    truth = torch.from_numpy(rotated(before, ids, rotary, conjugate))
    room = torch.from_numpy(slack * lengths(before, rotary))
    assert_rounded(torch.from_numpy(thd(got, layout)), truth, room, x.dtype)


def assert_rounded(got: Tensor, truth: Tensor, room: Tensor, dtype: torch.dtype, truncated: float = 0.0) -> None:
    """Assert that float64 values are exact up to ``room``, one rounding to dtype, and a relative truncation."""
    # Rounding is monotone: a value within ``room`` of the exact value rounds to a number between these two.
    low, high = ((truth + sign * room).to(dtype).double() + sign * truncated * truth.abs() for sign in (-1, 1))
    wrong = ~((got >= low) & (got <= high))
    assert not wrong.any(), f"{wrong.sum()} wrong; first {wrong.nonzero()[0]}: {got[wrong][0]}, want {truth[wrong][0]}"


# Positions: every view of a table, and tables with arbitrary ids.

SCHEMES = {
    "flatten": 1, "v2pe": 1, "rope-tie": 2, "rope-tie-v2": 2, "rope-tie-fractional": 2, "rows": 2,
    "mrope": 3, "mrope-qwen2.5": 3, "videorope": 3, "vrope": 4,
}  # fmt: skip
"""Schemes with text and images, and their axes; v2pe, v2 and fractional have fractional ids, and videorope has negative
ids.
"""

BY_AXES = {1: "v2pe", 2: "rope-tie-fractional", 3: "videorope", 4: "vrope"}
"""The hardest scheme for each number of axes."""


def packed(scheme: str, start: int = 0) -> PositionTable:
    """Place documents of 9, 12 and 11 tokens, with images at the start and at the end, and one image of one column."""
    documents: list[Document] = [
        [Text(3), Grid(2, 2), Text(2)],
        [Grid(3, 2), Text(1), Grid(1, 5)],
        [Text(2), Grid(2, 3), Text(1), Grid(2, 1)],
    ]
    return place(SegmentTable.from_documents(documents), scheme, start)


VIEWS: Mapping[str, Callable[[PositionTable], PositionTable]] = {
    "packed": lambda table: table,
    "padded": lambda table: table.pad(13),
    "left-padded": lambda table: table.pad(side="left"),
    "sliced": lambda table: table.slice(5, 28),  # cuts the first image and the 2 × 3 image
    "sharded": lambda table: table.pad(12).shard(1, 2),
    "pruned": lambda table: table.take(range(0, 32, 3), range(1, 33, 3)),
}
"""Views that cut or pad the 32 tokens of three documents."""


def table_of(ids: Ids) -> PositionTable:
    """Build a table with one token per segment at these ids."""
    axes, tokens = len(ids[0]), len(ids)
    table = np.zeros((5 + 4 * axes, tokens), np.int64)
    table[0], table[2:5] = np.arange(tokens), 1
    for g, position in enumerate(ids):
        denominator = int(np.lcm.reduce([Fraction(value).denominator for value in position]))
        table[4, g] = denominator
        table[5::4, g] = [int(value * denominator) for value in position]
    documents = np.array([[0], [0], [0], [0]])
    return PositionTable(table, documents, tokens, True, "by hand")


def dense(table: PositionTable) -> Tensor:
    """Return the ids of a table on the device."""
    return torch.from_numpy(table.dense()).to(DEVICE)


FORMS: Mapping[str, Callable[[PositionTable], Any]] = {
    "table": lambda table: table,
    "device": lambda table: DevicePositions.from_table(table, DEVICE),
    "spare columns": lambda table: DevicePositions.from_table(table, DEVICE, table.num_segments + 33),
    "ids": dense,
    "int64": lambda table: dense(table).long(),
    "float64": lambda table: dense(table).double(),
    "a batch of one": lambda table: dense(table)[:, None],
    "token first": lambda table: dense(table).T.contiguous().T,
}
"""The forms in which calls take positions; the first three take fractional ids exactly."""

ROTARIES: Mapping[str, Rotary] = {
    "1 axis": Rotary(16, axes=1),
    "interleaved": Rotary(20),
    "interleaved 3": Rotary(24, axes=3),
    "interleaved 4": Rotary(16, axes=4),
    "split": Rotary(20, allocation="split"),
    "split 4": Rotary(18, axes=4, allocation="split"),
    "sections": Rotary(24, allocation="sections", mrope_section=[2, 7, 3]),
    "mrope-interleaved": Rotary(24, allocation="mrope-interleaved", mrope_section=[6, 3, 3]),
    "axial": Rotary(24, allocation="axial"),
    "axial 3": Rotary(24, axes=3, allocation="axial"),
    "axial by axis": Rotary(24, allocation="axial", axes_dim=[4, 14, 6]),
    "axial in turn": Rotary(16, allocation=[1, 0] * 4, axes_dim=[8, 8]),
    "axial, columns first": Rotary(20, allocation=[1] * 4 + [0] * 6, axes_dim=[12, 8], pairing="adjacent"),
    "pixtral": Rotary(16, allocation="pixtral"),
    "vector": Rotary(12, allocation=[1, 1, 0, 1, 0, 0]),
    "HoPE": Rotary(16, axes=3, allocation=[1, 2, 1, 2, 1, 2, -1, -1]),
    "inv_freq": Rotary(8, inv_freq=[0.3, 2.5, 0.0, -1.25]),
    "theta per axis": Rotary(16, theta=[100.0, 5e5], allocation="split"),
    "partial": Rotary(20, rotary_dim=12),
    "partial axial": Rotary(14, rotary_dim=4, allocation="axial"),
    "partial axial by axis": Rotary(20, rotary_dim=14, allocation="axial", axes_dim=[8, 6], theta=[100.0, 5e5]),
}
"""Every allocation, with full and partial rotation, and with head_dims that are and are not powers of two."""

BY_HEAD: Mapping[str, Rotary] = {
    "MHRoPE": Rotary(6, allocation="heads", head_axes=[0, 0, 1, 1, 1, 2, 2, 2]),
    "one head per axis": Rotary(24, allocation="heads", head_axes=[0, 1, 2]),
    "out of order, partial": Rotary(14, rotary_dim=10, axes=3, allocation="heads", head_axes=[2, 0, 1, 0]),
    "two heads per axis": Rotary(8, axes=3, allocation="heads", head_axes=[0, 0, 2, 2]),
    "an unrotated head": Rotary(12, axes=3, allocation="heads", head_axes=[1, -1, 2]),
    "scaled": Rotary(16, allocation="heads", head_axes=[2, 1, 0], scaling=YaRN(4.0, 2048)),
    "own frequencies": Rotary(
        16, allocation=[-1] * 2 + [0, 1, 2] * 10, axes_dim=[20] * 3, scaling=Linspace(np.pi / 2), kv_heads=4
    ),
    "some own frequencies": Rotary(4, axes=1, kv_heads=6, inv_freq=[1.0, 0.5] * 2 + [1.0, 0.25] * 2 + [0.5, 0.25] * 2),
}
"""Rotations whose kv heads have their own axes or frequencies."""


def heads(
    tokens: int | tuple[int, ...], num_heads: int, head_dim: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Tensor:
    """Draw random q or k; the heads are the second-to-last dimension."""
    shape = (tokens,) if isinstance(tokens, int) else tokens
    return torch.randn(*shape, num_heads, head_dim, generator=torch.Generator().manual_seed(seed)).to(dtype)


def device_heads(*args: Any, **options: Any) -> Tensor:
    """Draw random q or k on the device."""
    return heads(*args, **options).to(DEVICE)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw random numbers of a shape that is also the seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)
