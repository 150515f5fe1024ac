"""How far phases are from the truth, id by id: float32 angles, those of Transformers, and integer turns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError
from mmpos.rotary import Rotary
from mmpos.rotary.frequencies import Exact, Float32Array, Float64Array, UInt64Array, fixed_point_turns
from mmpos.support.checks import INT32_MAX, IntArray, first_bad, int_array

__all__ = ["PhaseErrors", "exact_turns", "float32_angles", "phase_errors", "true_turns", "turns_rest"]

_WINDOW = 512
_MASK = 2**32 - 1
_TURN = 2 * np.pi


@dataclass(frozen=True, eq=False)
class PhaseErrors:
    """The largest errors up to each id, in rad, over all pairs; angles that are whole turns apart are the same.

    Args:
        ids: (points,) ascending.
        float32: (points,) of frequencies that are right to the last bit of float32, times ids in float32.
        hf: (points,) of the operations of Transformers: frequencies made in float32, times ids in float32.
        exact: (points,) of the turns that mmpos takes: 32 bits, from frequencies of 64 bits.
    """

    ids: IntArray
    float32: Float64Array
    hf: Float64Array
    exact: Float64Array


def phase_errors(rotary: Rotary, ids: npt.ArrayLike | None = None, window: int = _WINDOW) -> PhaseErrors:
    """The largest errors of phases up to each id, by trying the ids right below it.

    Args:
        rotary: the frequencies; ids are integers, so axes and allocation play no part.
        ids: (points,) ascending, 0 to 2³¹ − 1; None is ten to a decade, and the last of them.
        window: how many ids below each are tried, where errors are largest; those between are not.

    Raises:
        InvalidInputError: no ids, or ids outside the bounds or not ascending.
    """
    points = _decades() if ids is None else int_array("ids", ids, (None,))
    first_bad("ids", points, minimum=0, maximum=INT32_MAX)
    if not points.size or (np.diff(points) < 0).any():
        raise InvalidInputError(f"ids: got {points.tolist()}, want ascending ids, at least one")
    rounded, rest = rotary.inv_freq_array.astype(np.float32), turns_rest(rotary)
    largest = np.empty((3, points.size))
    for i, top in enumerate(points.tolist()):
        near = np.arange(max(0, top - window + 1), top + 1)
        truth = true_turns(near, rotary.turns, rest)
        largest[:, i] = (
            _angle_errors(float32_angles(near, rounded), truth).max(),
            _angle_errors(float32_angles(near, rotary.inv_freq_float32), truth).max(),
            _turn_errors(exact_turns(near, rotary.turns), truth).max(),
        )
    return PhaseErrors(points, *np.maximum.accumulate(largest, axis=1))


def _decades() -> IntArray:
    return np.append(np.rint(10 ** (np.arange(94) / 10)).astype(np.int64), INT32_MAX)


def turns_rest(rotary: Rotary) -> IntArray:
    """(pairs,) what rounding to the 64 bits of ``rotary.turns`` left, either sign, in units of 2⁻⁹⁶ turn."""
    with Exact().context():
        finer = fixed_point_turns([value * 2**32 for value in rotary.exact_inv_freq])
    return finer.astype(np.uint32).view(np.int32).astype(np.int64)


def true_turns(ids: IntArray, turns: UInt64Array, rest: IntArray) -> UInt64Array:
    """(ids, pairs) angles in units of 2⁻⁶⁴ turn, modulo one turn, within 1.25 units for ids within int32."""
    rows = ids[:, None]
    found: UInt64Array = rows.astype(np.uint64) * turns + ((rows * rest) >> 32).astype(np.uint64)
    return found


def exact_turns(ids: IntArray, turns: UInt64Array) -> IntArray:
    """(ids, pairs) angles in units of 2⁻³² turn: I·hi + ⌊I·lo/2³²⌋, as ``mmpos.rotary.reference.turns`` has them."""
    hi, lo = (turns >> np.uint64(32)).astype(np.int64), (turns & np.uint64(_MASK)).astype(np.int64)
    rows = ids[:, None]
    found: IntArray = (rows * hi + ((rows * lo) >> 32)) & _MASK
    return found


def float32_angles(ids: IntArray, inv_freq: Float32Array) -> Float32Array:
    """(ids, pairs) float32 products of ids and frequencies, as ``mmpos.rotary.reference.cos_sin_as_hf`` has them."""
    return ids.astype(np.float32)[:, None] * inv_freq


def _angle_errors(angles: Float32Array, truth: UInt64Array) -> Float64Array:
    """In rad, from float32 angles in rad; float64 is wide enough to compare them."""
    turns = angles.astype(np.float64) / _TURN - truth.astype(np.float64) * 2.0**-64
    errors: Float64Array = np.abs(turns - np.rint(turns)) * _TURN
    return errors


def _turn_errors(turns: IntArray, truth: UInt64Array) -> Float64Array:
    """In rad, from turns in units of 2⁻³²; the difference is an integer."""
    units = ((turns.astype(np.uint64) << np.uint64(32)) - truth).view(np.int64)
    errors: Float64Array = np.abs(units.astype(np.float64)) * (_TURN * 2.0**-64)
    return errors
