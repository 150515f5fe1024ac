"""Fingerprints of positions, which let a trainer verify that it uses the same positions as the rollout.

The ids of a document have one canonical form, however they are stored: the ids of the first token, then the steps from
each token to the next, run-length encoded. The ids can be recovered from the form, so two documents have the same form
if and only if their ids are equal. A fingerprint is a BLAKE2b hash of the form.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from hashlib import blake2b
from itertools import pairwise
from math import lcm
from typing import Any

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError
from mmpos.positions.table import PositionTable
from mmpos.positions.table_rows import MAX_AXES
from mmpos.support.checks import INT32_MAX, INT32_MIN, Array, IntArray, counted, first_bad, host_array, int_array, shown

__all__ = ["ExactIds", "fingerprint", "read_ids"]

_VERSION = "mmpos2"
"""Prefix of every fingerprint; its number changes with the canonical form."""

_PERSON = _VERSION.encode()


def fingerprint(
    position_ids: PositionTable | npt.ArrayLike,
    *,
    attention_mask: npt.ArrayLike | None = None,
    cu_seqlens: npt.ArrayLike | None = None,
    denominators: npt.ArrayLike | None = None,
) -> list[str]:
    """Compute a fingerprint of each document's positions.

    Two fingerprints are equal if the documents have the same number of tokens, the same number of axes and equal ids,
    and differ otherwise. Padding and its side, packing, the order of documents, dtype, and how a table divides a
    document into segments do not matter.

    >>> from mmpos.positions.place import place
    >>> from mmpos.segments import Grid, SegmentTable, Text
    >>> positions = place(SegmentTable.from_documents([[Text(3), Grid(2, 3)], [Text(2)]]))
    >>> fingerprint(positions)[1]
    'mmpos2:bcd96cc24167aed4e89ee1cd0cffe055'
    >>> ids, mask = positions.padded(side="left")
    >>> fingerprint(positions) == fingerprint(ids, attention_mask=mask)
    True

    Args:
        position_ids: a table; or ids on the host, from numpy or torch: (axes, batch, length), (axes, tokens) for packed
            documents or a single one, or (tokens,) for one axis; (batch, length) for one axis is accepted with an
            attention_mask of the same shape. Integers or floats; a float is read as the first convergent of its
            continued fraction that equals it in float64, which is n/d itself if d² is below 2**52 / |n/d|. Leave out a
            text row, which is not an axis.
        attention_mask: (batch, length), or (tokens,) for packed ids, of 0s and 1s; the ids of tokens masked by 0 are
            ignored.
        cu_seqlens: (documents + 1,) index of the first token of each packed document, counting padding, then the total;
            with None, each row of a batch is one document, and packed ids are a single document.
        denominators: denominators of integer ids, as returned by ``PositionTable.rationals``: one for all ids, or an
            array with the shape of position_ids without the axes.

    Returns:
        "mmpos2:" and 32 hexadecimal digits for each document; the number is the version of the canonical form.

    Raises:
        InvalidInputError: the shapes of the arguments do not match; ids are not numbers, are outside int32, or have no
            denominator below 2**31.
    """
    return read_ids(position_ids, attention_mask, cu_seqlens, denominators).fingerprints()


@dataclass(frozen=True, eq=False)
class ExactIds:
    """Exact ids of the tokens of packed documents, without padding.

    Args:
        numerators: (axes, tokens) int64, or int32 without denominators.
        denominators: (axes, tokens) or (1, tokens) int64; None if all are 1.
        lengths: (documents,) number of tokens in each document.
    """

    numerators: Array
    denominators: IntArray | None
    lengths: IntArray

    def fingerprints(self) -> list[str]:
        """Compute the fingerprint of each document, as ``fingerprint`` does."""
        stops = self.lengths.cumsum()
        start, steps = self._steps((stops - self.lengths)[self.lengths > 0])
        runs = np.concatenate([[start[1:] - start[:-1]], steps])
        edges = [0, *start.searchsorted(stops).tolist()]
        return [_hash(_form(len(self.numerators), runs[:, begin:end])) for begin, end in pairwise(edges)]

    def _steps(self, first: IntArray) -> tuple[IntArray, Array]:
        """Find where runs of equal steps begin; a run also begins at the first and the second token of a document.

        Args:
            first: first tokens of documents; their step is their id.

        Returns:
            (runs + 1,) first token of each run, then the number of tokens; and (axes, runs) steps, modulo 2**32. With
            denominators, the steps are (3 · axes, runs): steps rounded down, then numerators and denominators of the
            remainders, in lowest terms.
        """
        new = np.zeros(self.numerators.shape[1] + 1, np.bool_)
        new[first] = new[first + 1] = new[-1] = True
        for row in self.numerators:  # work row by row, since numpy allocates small arrays faster
            steps = row[1:] - row[:-1]
            new[2:-1] |= steps[1:] != steps[:-1]
        for row in () if self.denominators is None else self.denominators:
            other = row[1:] != row[:-1]
            new[1:-1] |= other
            new[2:-1] |= other[:-1]
        start = new.nonzero()[0]
        at, before_at, at_first = start[:-1], start[:-1] - 1, start.searchsorted(first)
        ids, before = self.numerators.take(at, axis=1), self.numerators.take(before_at, axis=1)
        before[:, at_first] = 0
        if self.denominators is None:
            return start, ids - before
        over, over_before = self.denominators.take(at, axis=1), self.denominators.take(before_at, axis=1)
        steps = _differences(ids, over, before, over_before)
        different = np.zeros(start.size, np.bool_)
        different[at_first] = different[at_first + 1] = different[-1] = True
        different[1:-1] |= (steps[:, 1:] != steps[:, :-1]).any(axis=0)
        return start[different], steps[:, different[:-1]]


def _differences(a: IntArray, over_a: IntArray, b: IntArray, over_b: IntArray) -> IntArray:
    """Return (3 · axes, n) differences of fractions: integer parts modulo 2**32, then remainders as fractions."""
    integers, rest = np.divmod(a, over_a)
    integers_b, rest_b = np.divmod(b, over_b)
    same = over_a == over_b
    over = np.where(same, over_a, over_a * over_b)  # the products are below 2**62
    rest = np.where(same, rest - rest_b, rest * over_b - rest_b * over_a)
    carry, rest = np.divmod(rest, over)
    common = np.gcd(rest, over)
    return np.concatenate([(integers - integers_b + carry).astype(np.int32), rest // common, over // common])


def _form(axes: int, runs: Array) -> bytes:
    """Serialize the (1 + steps, runs) counts and steps of a document, without remainders if all are 0."""
    fractional = len(runs) > 1 + axes and bool(runs[1 + axes : 1 + 2 * axes].any())
    form = runs.astype("<i8") if fractional else runs[: 1 + axes].astype("<i4")
    return bytes([axes, fractional]) + form.tobytes()


def _hash(form: bytes) -> str:
    return f"{_VERSION}:{blake2b(form, digest_size=16, person=_PERSON).hexdigest()}"


def read_ids(
    position_ids: PositionTable | npt.ArrayLike,
    attention_mask: npt.ArrayLike | None = None,
    cu_seqlens: npt.ArrayLike | None = None,
    denominators: npt.ArrayLike | None = None,
) -> ExactIds:
    """Read exact ids in any accepted shape; arguments and errors are those of ``fingerprint``."""
    if isinstance(position_ids, PositionTable):
        others = {"attention_mask": attention_mask, "cu_seqlens": cu_seqlens, "denominators": denominators}
        for name, argument in others.items():
            if argument is not None:
                raise InvalidInputError(f"{name} cannot be combined with a PositionTable")
        return _table_ids(position_ids)
    array = _host_array("position_ids", position_ids)
    if array.dtype.kind not in "iuf" or not 1 <= array.ndim <= 3:
        got = f"{array.dtype} of shape {array.shape}"
        want = "integers or floats of shape (axes, tokens) or (axes, batch, length)"
        raise InvalidInputError(f"position_ids: got {got}, want {want}")
    mask = None if attention_mask is None else _mask(attention_mask)
    if array.ndim == 1 or (array.ndim == 2 and mask is not None and mask.shape == array.shape):
        array = array[None]
    if not 1 <= len(array) <= MAX_AXES:
        raise InvalidInputError(f"position_ids: got {counted(len(array), 'axis')}, want 1 to {MAX_AXES}")
    shape = array.shape[1:]
    rows = shape[0] if len(shape) == 2 else 1
    if mask is not None and (mask.size != array[0].size or len(np.atleast_2d(mask)) != rows):
        raise InvalidInputError(f"attention_mask: got shape {mask.shape}, want {shape}, the shape of position_ids")
    edges = np.arange(rows + 1) * shape[-1] if cu_seqlens is None else _edges(cu_seqlens, rows, shape[-1])
    over = None if denominators is None else _denominators(denominators, array, mask)
    array, columns = array.reshape(len(array), -1), np.arange(edges[-1])
    if mask is not None and not mask.all():
        columns, edges = mask.ravel().nonzero()[0], np.append(0, mask.cumsum())[edges]
        array, over = array.take(columns, axis=1), None if over is None else over[columns]
    lengths = np.diff(edges)
    with np.errstate(invalid="ignore"):
        ids = array.astype(np.int32)
    if over is None and (ids == array).all():
        return ExactIds(ids, None, lengths)
    if array.dtype.kind == "f":
        return ExactIds(*_fractions(array.astype(np.float64, copy=False)), lengths)
    over = np.ones(columns.size, np.int64) if over is None else over
    return ExactIds(_within_int32(array, over, columns), over[None], lengths)


def _table_ids(positions: PositionTable) -> ExactIds:
    over = None
    if positions.fractional:
        ids, denominators = positions.rationals()
        over = denominators[None]
    else:
        ids = positions.dense()
    padding = positions.is_padding
    if not padding.any():
        return ExactIds(ids, over, positions.lengths)
    tokens = positions.per_token(~padding).nonzero()[0]
    over = None if over is None else over.take(tokens, axis=1)
    return ExactIds(ids.take(tokens, axis=1), over, positions.real_lengths)


def _host_array(name: str, value: Any) -> Array:
    """Convert to numpy without gradients; refuse a tensor on a device, or one whose dtype may have rounded ids."""
    if hasattr(value, "detach"):
        if value.device.type != "cpu":
            raise InvalidInputError(f"{name}: got a tensor on {value.device}, want a tensor on the CPU; call .cpu()")
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype.startswith(("bfloat16", "float8")):
            got = f"{dtype}, which rounds integers{' above 256' if dtype == 'bfloat16' else ''}"
            want = f"int32, int64, float32 or float64 that was never cast to {dtype}"
            raise InvalidInputError(f"{name}: got {got}, want {want}")
        value = value.detach()
    return host_array(name, value)


def _mask(attention_mask: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    flags = _host_array("attention_mask", attention_mask)
    mask = flags if flags.dtype == np.bool_ else np.asarray(flags == 1)
    valid = flags.dtype.kind in "biuf" and 1 <= flags.ndim <= 2
    if not valid or np.count_nonzero(flags) != np.count_nonzero(mask):
        raise InvalidInputError("attention_mask must hold only 0 and 1, in the shape (batch, length) or (tokens,)")
    return mask


def _edges(cu_seqlens: npt.ArrayLike, rows: int, length: int) -> IntArray:
    """Return the (documents + 1,) first column of each packed document, then the total."""
    edges = int_array("cu_seqlens", _host_array("cu_seqlens", cu_seqlens), (None,))
    if rows > 1:
        raise InvalidInputError(f"cu_seqlens requires packed position_ids, got a batch of {rows} rows")
    if not edges.size or edges[0] or (edges[1:] < edges[:-1]).any() or edges[-1] != length:
        raise InvalidInputError(f"cu_seqlens: got {shown(edges)}, want ascending integers from 0 to {length}")
    return edges


def _denominators(denominators: npt.ArrayLike, array: Array, mask: npt.NDArray[np.bool_] | None) -> IntArray:
    """Return the (columns,) denominators of integer ids; masked columns are not checked."""
    if array.dtype.kind == "f":
        raise InvalidInputError(f"denominators requires integer position_ids, got {array.dtype}")
    over = _host_array("denominators", denominators)
    over = int_array("denominators", over, array.shape[1:] if over.ndim else ())
    over = np.broadcast_to(over, array.shape[1:]).reshape(-1)
    first_bad("denominators", over if mask is None else np.where(mask.ravel(), over, 1), minimum=1, maximum=INT32_MAX)
    return over


def _within_int32(numerators: Array, over: IntArray, columns: IntArray) -> IntArray:
    if numerators.dtype == np.uint64:
        # This maximum is outside int32 as well, and does not wrap around in int64.
        numerators = np.minimum(numerators, np.uint64(np.iinfo(np.int64).max))
    ids = numerators.astype(np.int64, copy=False)
    beyond = (ids < INT32_MIN * over) | (ids > INT32_MAX * over)
    if beyond.any():
        axis, token = divmod(int(beyond.argmax()), columns.size)
        got = Fraction(int(ids[axis, token]), int(over[token]))
        raise InvalidInputError(f"position_ids: got {got} in column {columns[token]}, want ids within int32")
    return ids


def _fractions(values: npt.NDArray[np.float64]) -> tuple[IntArray, IntArray]:
    """Return numerators and denominators of floats, with one denominator for all if possible."""
    low, high = float(values.min()), float(values.max())
    if not (low >= INT32_MIN and high <= INT32_MAX):  # this is true for NaN as well
        raise InvalidInputError("position_ids must be finite and within int32")
    over, numerators = 1, np.rint(values)
    while not (fits := numerators / over == values).all():
        over = lcm(over, int(_convergents(values.reshape(-1)[[fits.argmin()]])[1][0]))
        if max(-low, high) * over**2 >= 2**52:
            return _convergents(values)
        numerators = np.rint(values * over)
    return numerators.astype(np.int64), np.full((1, values.shape[1]), over)


def _convergents(values: npt.NDArray[np.float64]) -> tuple[IntArray, IntArray]:
    """Return numerators and denominators: the first convergent of each float's continued fraction that equals it.

    A fraction n/d with d² below 2**52 / |n/d| is recovered exactly.
    """
    whole = np.floor(values)
    rest = values - whole
    # Compute convergents p/q of the fractional part until whole + p/q equals the float.
    p, q, p_before, q_before = np.zeros_like(rest), np.ones_like(rest), np.ones_like(rest), np.zeros_like(rest)
    inexact = rest > 0
    while inexact.any():
        inverse = np.divide(1, rest, where=inexact, out=np.ones_like(rest))
        digit = np.floor(inverse)
        p, p_before = np.where(inexact, digit * p + p_before, p), np.where(inexact, p, p_before)
        q, q_before = np.where(inexact, digit * q + q_before, q), np.where(inexact, q, q_before)
        if (q > INT32_MAX).any():
            got = values.flat[(q > INT32_MAX).argmax()]
            raise InvalidInputError(f"position_ids: got {got!r}, want fractions with denominators below 2**31")
        rest = inverse - digit
        inexact &= (whole * q + p) / q != values
    over = q.astype(np.int64)
    return whole.astype(np.int64) * over + p.astype(np.int64), over
