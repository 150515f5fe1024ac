"""Rotate q and k in plain torch: compute cos and sin of positions, rotate, and normalise before or after.

Tests compare the kernel and the extension with this module, which also handles all inputs that these do not support.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import NoneType
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from mmpos.errors import InvalidInputError
from mmpos.positions.table_rows import AXES
from mmpos.rotary.memory import Form, check_floats
from mmpos.support.checks import boolean

SIN = (0.7853981256484985, -0.08074536919593811, 0.002489871811121702, -3.587715036701411e-05)
COS = (-0.3084251284599304, 0.015854327008128166, -0.0003259416262153536, 3.5311541068949737e-06)
"""Coefficients, exact in float32, of sin(πu/4) = u·S(u²) and cos(πu/4) = 1 + u²·C(u²) on −1 <= u <= 1.

They were fitted by least squares on Chebyshev nodes; the errors of the polynomials alone are 1.3e-9 and 6e-11.
"""

MASK = 0xFFFFFFFF

TABLE_INTEGER, TABLE_FRACTIONAL, DENSE_INTEGER, DENSE_FIXED = range(4)
"""Modes of a positions tensor: a table with integer or fractional ids, or (axes, tokens) integers or units of 2⁻³²."""

REFERENCE, TRITON, AUTO = range(3)
"""Implementations: plain torch; the Triton kernel; the C extension for tensors that it supports, else plain torch."""

CPU_BLOCK = 256
"""Number of tokens per block in which cos and sin are computed on a CPU."""


class RotationArguments(NamedTuple):
    """Arguments of a rotation other than q and k, in the argument order of the operators.

    Args:
        positions: a table or dense ids, depending on mode.
        frequencies: (3, pairs) int64 words of exact turns, (pairs,) float32 as in Transformers, or an engine's cache:
            (rows, 2·pairs) floats whose row i holds cos and then sin of id i. If groups of heads have their own
            frequencies: (groups, 3, pairs) words or (groups, 1, pairs) float32.
        pair_axis: (pairs,) int32 axis of each pair, −1 if it is not rotated; or (groups, pairs): the heads of each
            tensor are split into equal groups of consecutive heads, one per row.
        mode: TABLE_INTEGER, TABLE_FRACTIONAL, DENSE_INTEGER or DENSE_FIXED.
        adjacent: whether pair j consists of channels (2j, 2j + 1) instead of (j, j + pairs).
        attention_factor: factor by which cos and sin are multiplied.
        conjugate: whether to rotate by the negative angles.
        implementation: REFERENCE, TRITON or AUTO.
    """

    positions: Tensor
    frequencies: Tensor
    pair_axis: Tensor
    mode: int
    adjacent: bool
    attention_factor: float
    conjugate: bool
    implementation: int

    @property
    def from_table(self) -> bool:
        """Whether positions are a table instead of dense ids."""
        return self.mode in (TABLE_INTEGER, TABLE_FRACTIONAL)

    @property
    def fractional(self) -> bool:
        """Whether ids may be fractions."""
        return self.mode in (TABLE_FRACTIONAL, DENSE_FIXED)

    @property
    def as_hf(self) -> bool:
        """Whether angles are float32 products as in Transformers."""
        return self.frequencies.dtype == torch.float32 and self.frequencies.dim() != 2

    @property
    def cache_rows(self) -> int:
        """Number of rows of an engine's cache of cos and sin; 0 without such a cache."""
        return self.frequencies.shape[0] if self.frequencies.is_floating_point() and not self.as_hf else 0

    @property
    def axes(self) -> int:
        """Number of position axes."""
        rows = self.positions.shape[0]
        return (rows - AXES) // 4 if self.from_table else rows

    @property
    def scaled(self) -> bool:
        """Whether cos and sin are multiplied by an attention factor."""
        return self.attention_factor != 1.0

    @property
    def num_pairs(self) -> int:
        """Number of rotated channel pairs."""
        return self.pair_axis.shape[-1]

    @property
    def head_groups(self) -> int:
        """Number of groups of heads that rotate differently; 0 if all heads rotate alike."""
        return self.pair_axis.shape[0] if self.pair_axis.dim() == 2 else 0

    @property
    def own_frequencies(self) -> bool:
        """Whether each group of heads has its own frequencies."""
        return self.frequencies.dim() == 3


def fixed_positions(positions: Tensor, mode: int, tokens: int) -> Tensor:
    """Convert a table or dense ids to (axes, tokens) int64 positions in units of 2⁻³², rounded down."""
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


def fixed_ids(positions: Tensor, mode: int, tokens: int) -> Tensor:
    """Compute ``fixed_positions`` and append a row of zeros, the ids on axis −1."""
    fixed = fixed_positions(positions, mode, tokens)
    return torch.cat((fixed, fixed.new_zeros((1, fixed.shape[1]))))


def fixed_from_fractions(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Convert int64 fractions to int64 positions in units of 2⁻³², rounded down."""
    whole = torch.div(numerator, denominator, rounding_mode="floor")
    return (whole << 32) + ((numerator - whole * denominator) << 32) // denominator


def fixed_from_float(ids: Tensor) -> Tensor:
    """Convert float64 ids to int64 positions in units of 2⁻³², rounded down."""
    whole = ids.floor()
    return (whole.to(torch.int64) << 32) + ((ids - whole) * 2.0**32).to(torch.int64)


def turns(fixed: Tensor, pair_axis: Tensor, tau: Tensor, fractional: bool = True) -> Tensor:
    """Compute angles as fractions of a turn.

    For a position I + f/2³² and a frequency of n + (hi·2³² + lo)/2⁶⁴ turns per id, the angle modulo one turn is I·hi +
    ⌊I·lo/2³²⌋ + f·n + ⌊f·hi/2³²⌋ in units of 2⁻³² turn. Each of the three floors loses less than one unit, and the
    rounding of the frequency loses at most a quarter. A fraction that is not a multiple of 2⁻³² is rounded down by less
    than 2⁻³² of an id, which loses less than ω/2π units at ω rad per id. The total error is below 3.25 + ω/2π units:
    3.41 for 1 rad, and 5,004 units (7.3e-6 rad) for LTX's 31,416 rad, whose ids are exact if they are halves, quarters
    and so on. The whole turns n affect fractions only.

    Args:
        fixed: (axes, tokens) int64 positions I·2³² + f in units of 2⁻³²; they must come from ``fixed_ids`` if pair_axis
            contains −1.
        pair_axis: (pairs,) or (groups, pairs) int64 axis of each pair.
        tau: (3, pairs) or (groups, 3, pairs) int64 words hi, lo and n of each frequency; hi and lo are from 0 to 2³² −
            1.
        fractional: whether positions may have fractions.

    Returns:
        (tokens, pairs) or (tokens, groups, pairs) int64 from 0 to 2³² − 1.
    """
    hi, lo, rounds = tau.unbind(-2)
    whole = (fixed >> 32).T[:, pair_axis]
    # ⌊I·lo/2³²⌋ for signed I, computed from the halves of lo because the full product may exceed 63 bits.
    turn = (whole * (lo & 0xFFFF)).bitwise_right_shift_(16).add_(whole * (lo >> 16)).bitwise_right_shift_(16)
    turn += whole.mul_(hi)
    if fractional:
        fraction = (fixed & MASK).T[:, pair_axis]
        part = (fraction * (hi & 0xFFFF)).bitwise_right_shift_(16)
        turn += part.add_(fraction * (hi >> 16)).bitwise_right_shift_(16)
        turn += fraction.mul_(rounds)
    return turn.bitwise_and_(MASK)


def cos_sin(rotation: RotationArguments, tokens: int) -> tuple[Tensor, Tensor]:
    """Compute (tokens, pairs) float32 cos and sin, times the attention factor; conjugate is ignored.

    If heads rotate differently, the shape is (tokens, groups, pairs).
    """
    positions = rotation.positions
    if rotation.cache_rows and rotation.mode == DENSE_INTEGER:
        positions = positions.clamp(-1, rotation.cache_rows)  # ids beyond 32 bits would wrap to the rows of other ids
    fixed = fixed_ids(positions, rotation.mode, tokens)
    axis = rotation.pair_axis.to(torch.int64)

    def cos_sin_of(block: Tensor) -> tuple[Tensor, Tensor]:
        if rotation.cache_rows:
            return cos_sin_from_cache(block[:-1] >> 32, axis, rotation.frequencies)
        if rotation.as_hf:
            return cos_sin_as_hf(block, axis, rotation.frequencies)
        return cos_sin_of_turns(turns(block, axis, rotation.frequencies, rotation.fractional))

    # On a CPU, compute blocks that fit its cache. On a device, and in graphs, which would unroll the loop, compute
    # everything at once.
    if fixed.device.type != "cpu" or torch.compiler.is_compiling():
        cos, sin = cos_sin_of(fixed)
    else:
        cos = torch.empty((tokens, *axis.shape), dtype=torch.float32)
        sin = torch.empty_like(cos)
        for start in range(0, tokens, CPU_BLOCK):
            block = slice(start, start + CPU_BLOCK)
            cos[block], sin[block] = cos_sin_of(fixed[:, block])
    factor = rotation.attention_factor
    return (cos.mul_(factor), sin.mul_(factor)) if rotation.scaled else (cos, sin)


def cos_sin_between(start: RotationArguments, stop: RotationArguments, tokens: int) -> tuple[Tensor, Tensor]:
    """Compute cos and sin of the rotation from one position to another, with the shape of ``cos_sin``.

    Exact turns are subtracted, so the result is the exact difference of the two rotations, which is the identity for
    equal positions. The difference of float32 angles as in Transformers would be rounded; their cos and sin are
    combined instead.

    Args:
        start: the rotation at the old positions; its attention factor and conjugate are ignored.
        stop: the rotation at the new positions, with the same frequencies.
        tokens: number of leading tokens.
    """
    axis = stop.pair_axis.to(torch.int64)
    before, after = (fixed_ids(x.positions, x.mode, tokens)[:, :tokens] for x in (start, stop))
    if stop.as_hf:
        (cos, sin), (other_cos, other_sin) = (cos_sin_as_hf(x, axis, stop.frequencies) for x in (after, before))
        return cos * other_cos + sin * other_sin, sin * other_cos - cos * other_sin
    new, old = (turns(x, axis, stop.frequencies) for x in (after, before))
    return cos_sin_of_turns(new.sub_(old).bitwise_and_(MASK))


def cos_sin_of_turns(turn: Tensor) -> tuple[Tensor, Tensor]:
    """Compute float32 cos and sin of angles in units of 2⁻³² turn, within 1.2e-7 and bit-equal on every device."""
    turn = turn.to(torch.int32)
    quadrant = (turn + (1 << 29)) >> 30
    # The remainder is at most an eighth of a turn and is scaled to u in [−1, 1] with one rounding.
    u = (turn - (quadrant << 30)).to(torch.float32).mul_(2.0**-29)
    z = u * u
    sin = _polynomial(SIN, z).mul_(u)
    cos = _polynomial(COS, z).mul_(z).add_(1.0)
    odd = (quadrant & 1).bool()
    # Each sign is −1 in two of the four quadrants: bit 1 of quadrant for sin, bit 1 of quadrant + 1 for cos.
    cos_sign, sin_sign = (1 - ((quadrant + 1) & 2)), (1 - (quadrant & 2))
    return torch.where(odd, sin, cos).mul_(cos_sign), torch.where(odd, cos, sin).mul_(sin_sign)


def _polynomial(coefficients: tuple[float, float, float, float], z: Tensor) -> Tensor:
    """Compute c0 + z·(c1 + z·(c2 + z·c3)) with every product and sum rounded."""
    c0, c1, c2, c3 = coefficients
    return (z * c3).add_(c2).mul_(z).add_(c1).mul_(z).add_(c0)


def cos_sin_as_hf(fixed: Tensor, pair_axis: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """Compute float32 cos and sin of the float32 product of id and frequency, as in Transformers."""
    angle = as_float(fixed).T[:, pair_axis] * inv_freq.view(-1, pair_axis.shape[-1])
    return angle.cos(), angle.sin()


def cos_sin_from_cache(ids: Tensor, pair_axis: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
    """Read float32 cos and sin, (tokens, *pair_axis.shape), from a cache; they are NaN for ids without a row.

    Args:
        ids: (axes, tokens) int64 ids.
        pair_axis: (pairs,) or (groups, pairs) int64 axis of each pair; −1 reads the row of id 0.
        cache: (rows, 2·pairs) cos of all pairs, then sin, in any floating dtype.
    """
    missing = (ids < 0) | (ids >= cache.shape[0])
    ids, axis_of_column = ids.masked_fill(missing, 0), torch.cat((pair_axis, pair_axis), -1)

    def rows(axis: int) -> Tensor:
        values = cache.index_select(0, ids[axis]).to(torch.float32).masked_fill_(missing[axis, :, None], torch.nan)
        return values if pair_axis.dim() == 1 else values.unsqueeze(1)

    # Reading whole rows, axis by axis, is faster than reading single elements.
    values = torch.where(axis_of_column < 0, cache[0].to(torch.float32), rows(0))
    for axis in range(1, ids.shape[0]):
        values = torch.where(axis_of_column == axis, rows(axis), values)
    cos, sin = values.chunk(2, dim=-1)
    return cos, sin


def as_float(fixed: Tensor) -> Tensor:
    """Convert fixed-point ids to float32 with one rounding."""
    return fixed.to(torch.float32) * 2.0**-32


def angles_of_turns(turn: Tensor) -> Tensor:
    """Convert angles in units of 2⁻³² turn to float32 rad within [−π, π]."""
    signed = torch.where(turn >= 1 << 31, turn - (1 << 32), turn)
    return (signed.to(torch.float64) * (2 * math.pi * 2.0**-32)).to(torch.float32)


LEAST_EPS = 2.0**-126
"""Smallest normal float32: the kernel flushes smaller numbers to zero, whose inverse root is infinite."""

LARGEST = 2.0**127
"""Largest power of two in float32: larger values may overflow to infinity, and infinity times 0 is NaN."""


class Norm(NamedTuple):
    """RMSNorm of each head: x / √(mean(x²) + eps) · (weight + offset), over all its channels.

    The call that uses a norm checks its values.

    Source: arXiv 1910.07467 (RMSNorm).

    Attributes:
        q_weight: (head_dim,) float32, bfloat16 or float16; with None, q is not normalised.
        k_weight: the same for k.
        eps: added to the mean of squares; from 2⁻¹²⁶ to 2¹²⁷.
        offset: added to the weights; 1.0 for Gemma, which stores the factor minus 1.0.
        after: whether to normalise after the rotation instead of before it.
    """

    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    eps: float = 1e-6
    offset: float = 0.0
    after: bool = False

    @property
    def is_none(self) -> bool:
        """Whether nothing is normalised."""
        return self.q_weight is None and self.k_weight is None

    def factors(self) -> list[Tensor | None]:
        """Return the (head_dim,) float32 weights of q and k, including the offset."""
        return [
            None if w is None else w.to(torch.float32) + self.offset if self.offset else w.to(torch.float32)
            for w in (self.q_weight, self.k_weight)
        ]


NO_NORM = Norm()


def check_norm(
    q: Form, k: Form | type, q_weight: Form | type, k_weight: Form | type, eps: object, offset: object, after: object
) -> tuple[float, float, bool]:
    """Check a norm against the forms of q and k; return eps, offset and after, as in ``NO_NORM`` without weights.

    Raises:
        InvalidInputError: a weight does not match q or k, or a number is out of range.
        UnsupportedError: a weight has a forward-mode tangent.
    """
    boolean("norm.after", after)
    if not (isinstance(eps, int | float) and LEAST_EPS <= eps <= LARGEST):
        raise InvalidInputError(f"norm.eps: got {eps!r}, want an int or float from 2⁻¹²⁶ to 2¹²⁷")
    if not (isinstance(offset, int | float) and abs(offset) <= LARGEST):
        raise InvalidInputError(f"norm.offset: got {offset!r}, want an int or float from -2¹²⁷ to 2¹²⁷")
    if k is NoneType and k_weight is not NoneType:
        raise InvalidInputError("norm.k_weight: got a weight without k, want None")
    weights = [(name, weight) for name, weight in (("q", q_weight), ("k", k_weight)) if weight is not NoneType]
    for name, form in weights:
        weight = check_floats(f"norm.{name}_weight", form)
        if weight.shape != q.shape[-1:]:
            raise InvalidInputError(f"norm.{name}_weight: got shape {tuple(weight.shape)}, want {tuple(q.shape[-1:])}")
        if weight.device != q.device:
            raise InvalidInputError(
                f"norm.{name}_weight: got a tensor on {weight.device}, want {q.device} as for {name}"
            )
    return (float(eps), float(offset), bool(after)) if weights else NO_NORM[2:]


def rotate_all(
    q: Tensor, k: Tensor, q_out: Tensor, k_out: Tensor, rotation: RotationArguments, norm: Norm = NO_NORM
) -> None:  # fmt: skip
    """Normalise and rotate q and k, (batch, seq, heads, head_dim), into q_out and k_out, which may be q and k."""
    if q.shape[0] * q.shape[1]:
        heads_of = head_rotation_of(rotation, *q.shape[:2])
        for x, out, weight in zip((q, k), (q_out, k_out), norm.factors(), strict=True):
            rotate(x, out, heads_of, rotation.num_pairs, norm, weight)


HeadRotation: TypeAlias = Callable[[Tensor], Tensor]
"""Function that rotates float32 heads, (batch, seq, heads, head_dim), and keeps unrotated channels."""


def rotate(
    x: Tensor, out: Tensor, rotation: HeadRotation, pairs: int, norm: Norm = NO_NORM, weight: Tensor | None = None
) -> None:
    """Rotate the first 2·pairs channels of heads and copy the others; with a weight, normalise before or after.

    Everything is computed in float32 and rounded once at the end. Products and sums are rounded separately, as in the
    kernel, so both give the same bits.

    Args:
        x: (batch, seq, heads, head_dim) with any floating dtype and strides.
        out: the same shape; it may be x.
        rotation: function that rotates heads.
        pairs: number of channel pairs that are rotated.
        norm: provides eps and the order of norm and rotation.
        weight: (head_dim,) float32 weight including the offset; with None, x is not normalised.
    """
    width = 2 * pairs if weight is None else x.shape[-1]
    value = x[..., :width].to(torch.float32)
    value = rotation(value) if norm.after else rotation(normalised(value, weight, norm.eps))
    value = normalised(value, weight, norm.eps) if norm.after else value
    if out.data_ptr() != x.data_ptr():
        out[..., width:].copy_(x[..., width:])
    out[..., :width].copy_(value)


def head_rotation_of(rotation: RotationArguments, batch: int, seq: int) -> HeadRotation:
    """Return a function that rotates the heads of (batch, seq) tokens."""
    cos, sin = (x.unflatten(0, (batch, seq)) for x in cos_sin(rotation, batch * seq))
    return head_rotation(cos, -sin if rotation.conjugate else sin, rotation.adjacent)


def head_rotation(cos: Tensor, sin: Tensor, adjacent: bool) -> HeadRotation:
    """Return a function that rotates heads by (batch, seq, pairs) float32 cos and sin.

    With (batch, seq, groups, pairs), heads are split into groups of consecutive heads, each with its own cos and sin.
    """
    cos, sin = (x.reshape(*x.shape[:2], -1, 1, x.shape[-1]) for x in (cos, sin))
    groups, width = cos.shape[2], 2 * cos.shape[-1]

    def rotate_heads(value: Tensor) -> Tensor:
        heads = value[..., :width].unflatten(2, (groups, value.shape[2] // groups))
        first, second = (heads[..., 0::2], heads[..., 1::2]) if adjacent else heads.chunk(2, dim=-1)
        both = first * cos - second * sin, second * cos + first * sin
        rotated = torch.stack(both, -1).flatten(-2) if adjacent else torch.cat(both, -1)
        return torch.cat((rotated.flatten(2, 3), value[..., width:]), -1)

    return rotate_heads


def norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float, forward: HeadRotation | None, backward: HeadRotation
) -> tuple[Tensor, Tensor]:
    """Compute the float32 gradients of ``rotate`` with a weight.

    For y = rotated(x · r · w) with r = 1/√(mean(x²) + eps), let g be the gradient of y rotated back. The gradient of w
    is the sum of g · x · r over tokens and heads, and the gradient of x is r · (g·w − x·r · mean(g·w · x·r)). If the
    norm comes after the rotation, x is the rotated input, g is the gradient of y, and the gradient of x is rotated
    back.

    Args:
        grad: gradient of the output, (batch, seq, heads, head_dim).
        x: input of ``rotate``, with the same shape.
        weight: (head_dim,) float32 weight including the offset.
        eps: added to the mean of squares.
        forward: the rotation if the norm comes after it; None if the norm comes first.
        backward: the inverse rotation.

    Returns:
        gradients of x and of the weight.
    """
    gradient, value = grad.to(torch.float32), x.to(torch.float32)
    gradient, value = (backward(gradient), value) if forward is None else (gradient, forward(value))
    scale = value.square().mean(-1, keepdim=True).add(eps).rsqrt()
    value = value * scale
    weight_grad, gradient = (gradient * value).sum((0, 1, 2)), gradient * weight
    gradient = (gradient - value * (gradient * value).mean(-1, keepdim=True)) * scale
    return gradient if forward is None else backward(gradient), weight_grad


def normalised(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Normalise float32 heads with a weight that includes the offset; without a weight, return x unchanged."""
    return x if weight is None else x * x.square().mean(-1, keepdim=True).add(eps).rsqrt() * weight
