"""From positions to cos and sin in plain torch: integer turns, exact for every int32 id and every fraction."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mmpos.positions.rows import AXES

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
    offset, skip, height, width, denominator = column[:AXES]
    index = skip + (token - offset)
    rows = index // width
    origin, step_frame, step_row, step_col = (column[AXES + i :: 4] for i in range(4))
    numerator = origin + (rows // height) * step_frame + (rows % height) * step_row + (index % width) * step_col
    if mode == TABLE_INTEGER:
        return numerator << 32
    return fixed_from_fractions(numerator, denominator)


def fixed_from_fractions(numerator: Tensor, denominator: Tensor) -> Tensor:
    """int64 positions in units of 2⁻³² from int64 fractions, rounded down."""
    whole = torch.div(numerator, denominator, rounding_mode="floor")
    return (whole << 32) + ((numerator - whole * denominator) << 32) // denominator


def fixed_from_float(ids: Tensor) -> Tensor:
    """int64 positions in units of 2⁻³² from float64 ids, fractions rounded down."""
    whole = ids.floor()
    return (whole.to(torch.int64) << 32) + ((ids - whole) * 2.0**32).to(torch.int64)


def turns(fixed: Tensor, pair_axis: Tensor, tau: Tensor, fractional: bool = True) -> Tensor:
    """Angles as fractions of a turn.

    With a position I + f/2³² and a frequency n + (hi·2³² + lo)/2⁶⁴ turns per id, the angle modulo one turn is
    I·hi + ⌊I·lo/2³²⌋ + f·n + ⌊f·hi/2³²⌋ in units of 2⁻³² turn, below 3.41 units from the truth for at most
    one rad per id. Whole turns n count at fractions only.

    Args:
        fixed: (axes, tokens) int64 positions in units of 2⁻³²: I·2³² + f.
        pair_axis: (pairs,) int64 axis of each pair.
        tau: (3, pairs) int64 words hi, lo and n of each frequency; hi and lo are 0 to 2³² − 1.
        fractional: whether any position may have a fraction.

    Returns:
        (tokens, pairs) int64, 0 to 2³² − 1.
    """
    hi, lo, rounds = tau
    whole = (fixed >> 32).T[:, pair_axis]
    # ⌊I·lo/2³²⌋ of a signed I, by halves of lo, since the whole product may pass 63 bits.
    turn = (whole * (lo & 0xFFFF)).bitwise_right_shift_(16).add_(whole * (lo >> 16)).bitwise_right_shift_(16)
    turn += whole.mul_(hi)
    if fractional:
        fraction = (fixed & MASK).T[:, pair_axis]
        part = (fraction * (hi & 0xFFFF)).bitwise_right_shift_(16)
        turn += part.add_(fraction * (hi >> 16)).bitwise_right_shift_(16)
        turn += fraction.mul_(rounds)
    return turn.bitwise_and_(MASK)


def cos_sin(fixed: Tensor, pair_axis: Tensor, tau: Tensor, fractional: bool = True) -> tuple[Tensor, Tensor]:
    """float32 cos and sin, (tokens, pairs), of exact angles; arguments as for ``turns``."""
    return cos_sin_of_turns(turns(fixed, pair_axis, tau, fractional))


def cos_sin_of_turns(turn: Tensor) -> tuple[Tensor, Tensor]:
    """float32 cos and sin of angles in units of 2⁻³² turn, within 1.2e-7; the same bits on every device."""
    turn = turn.to(torch.int32)
    quadrant = (turn + (1 << 29)) >> 30
    # The remainder lies within an eighth of a turn and becomes u in [−1, 1] with one rounding.
    u = (turn - (quadrant << 30)).to(torch.float32).mul_(2.0**-29)
    z = u * u
    sin = _polynomial(SIN, z).mul_(u)
    cos = _polynomial(COS, z).mul_(z).add_(1.0)
    odd = (quadrant & 1).bool()
    # Signs are −1 in two of the four quadrants: bit 1 of the quadrant for sin, of the next one for cos.
    cos_sign, sin_sign = (1 - ((quadrant + 1) & 2)), (1 - (quadrant & 2))
    return torch.where(odd, sin, cos).mul_(cos_sign), torch.where(odd, cos, sin).mul_(sin_sign)


def _polynomial(coefficients: tuple[float, float, float, float], z: Tensor) -> Tensor:
    """c0 + z·(c1 + z·(c2 + z·c3)), every product and sum rounded."""
    c0, c1, c2, c3 = coefficients
    return (z * c3).add_(c2).mul_(z).add_(c1).mul_(z).add_(c0)


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
