"""From positions to cos and sin in plain torch: integer turns, exact for every int32 id and every fraction."""

from __future__ import annotations

import math

import torch
from torch import Tensor

SIN = (0.7853981256484985, -0.08074536919593811, 0.002489871811121702, -3.587715036701411e-05)
COS = (-0.3084251284599304, 0.015854327008128166, -0.0003259416262153536, 3.5311541068949737e-06)
"""Coefficients, exact in float32, of sin(πu/4) = u·S(u²) and cos(πu/4) = 1 + u²·C(u²) on −1 <= u <= 1.

Least squares on Chebyshev nodes; the polynomials alone err by 1.3e-9 and 6e-11.
"""

MASK = 0xFFFFFFFF

TABLE_INTEGER, TABLE_FRACTIONAL, DENSE_INTEGER, DENSE_FIXED = range(4)
"""What a positions tensor holds: a placed table, or (axes, tokens) ids as integers or in units of 2⁻³²."""


def fixed_positions(positions: Tensor, mode: int, tokens: int) -> Tensor:
    """(axes, tokens) int64 positions in units of 2⁻³²: the integer part, and the fraction rounded down.

    Args:
        positions: what the mode says.
        mode: TABLE_INTEGER, TABLE_FRACTIONAL, DENSE_INTEGER or DENSE_FIXED.
        tokens: tokens of a table.
    """
    if mode == DENSE_FIXED:
        return positions
    if mode == DENSE_INTEGER:
        return positions.to(torch.int64) << 32
    token = torch.arange(tokens, device=positions.device)
    column = positions[:, torch.searchsorted(positions[0].contiguous(), token, right=True) - 1]
    offset, skip, height, width, denominator = column[:5]
    index = skip + (token - offset)
    rows = index // width
    origin, step_frame, step_row, step_col = (column[5 + i :: 4] for i in range(4))
    numerator = origin + (rows // height) * step_frame + (rows % height) * step_row + (index % width) * step_col
    if mode == TABLE_INTEGER:
        return numerator << 32
    whole = torch.div(numerator, denominator, rounding_mode="floor")
    return (whole << 32) + ((numerator - whole * denominator) << 32) // denominator


def fixed_from_float(ids: Tensor) -> Tensor:
    """int64 positions in units of 2⁻³² from float64 ids, fractions rounded down."""
    whole = ids.floor()
    return (whole.to(torch.int64) << 32) + ((ids - whole) * 2.0**32).to(torch.int64)


def turns(fixed: Tensor, pair_axis: Tensor, tau: Tensor) -> Tensor:
    """Angles as fractions of a turn.

    With a position I + f/2³² and a frequency (hi·2³² + lo)/2⁶⁴ turns per id, the angle modulo one turn is
    I·hi + ⌊I·lo/2³²⌋ + ⌊f·hi/2³²⌋ in units of 2⁻³² turn, below 3.41 units from the truth.

    Args:
        fixed: (axes, tokens) int64 positions in units of 2⁻³²: I·2³² + f.
        pair_axis: (pairs,) int64 axis of each pair.
        tau: (2, pairs) int64 words hi and lo of each frequency, 0 to 2³² − 1.

    Returns:
        (tokens, pairs) int64, 0 to 2³² − 1.
    """
    chosen = fixed[pair_axis].T
    whole, fraction = chosen >> 32, chosen & MASK
    hi, lo = tau
    # ⌊I·lo/2³²⌋ of a signed I, by halves of lo, since the whole product may pass 63 bits.
    low = (whole * (lo >> 16) + ((whole * (lo & 0xFFFF)) >> 16)) >> 16
    part = ((fraction * (hi >> 16)) + ((fraction * (hi & 0xFFFF)) >> 16)) >> 16
    return (whole * hi + low + part) & MASK


def cos_sin_of_turns(turn: Tensor) -> tuple[Tensor, Tensor]:
    """float32 cos and sin of angles in units of 2⁻³² turn, within 1.2e-7; the same bits on every device."""
    quadrant = (turn + (1 << 29)) >> 30
    # The remainder lies within an eighth of a turn and becomes u in [−1, 1] with one rounding.
    u = (turn - (quadrant << 30)).to(torch.float32) * 2.0**-29
    z = u * u
    sin = u * (SIN[0] + z * (SIN[1] + z * (SIN[2] + z * SIN[3])))
    cos = 1.0 + z * (COS[0] + z * (COS[1] + z * (COS[2] + z * COS[3])))
    odd = (quadrant & 1).bool()
    cos, sin = torch.where(odd, sin, cos), torch.where(odd, cos, sin)
    cos = torch.where(((quadrant + 1) & 2).bool(), -cos, cos)
    return cos, torch.where((quadrant & 2).bool(), -sin, sin)


def cos_sin_as_hf(fixed: Tensor, pair_axis: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """float32 cos and sin of the float32 product of id and frequency, as Transformers computes them."""
    angle = as_float(fixed)[pair_axis].T * inv_freq
    return angle.cos(), angle.sin()


def as_float(fixed: Tensor) -> Tensor:
    """float32 ids from fixed point, rounded once."""
    return fixed.to(torch.float32) * 2.0**-32


def angles_of_turns(turn: Tensor) -> Tensor:
    """float32 angles within [−π, π]."""
    signed = torch.where(turn >= 1 << 31, turn - (1 << 32), turn)
    return (signed.to(torch.float64) * (2 * math.pi * 2.0**-32)).to(torch.float32)
