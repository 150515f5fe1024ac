"""Fingerprints of positions, by which a trainer sees that it has those of the rollout.

The digest of a document holds two sums in the field of integers modulo P = 2**61 - 1, each at a fixed random point x:

    sum over tokens i and axes a of  x**i · c_a · (id(a, i) + k)

with c_a and k fixed and random, i counted from the document's first token without padding, and a fraction n/d as n
times the inverse of d. What is equal in all tokens has equal sums, however it is cut; of two documents of n tokens
that differ somewhere, each sum is equal for at most n + 16 of the P points that could have been drawn, so that both are
for one pair in 2**82 at a million tokens. To differ is meant in the field: ids n/d and m/e do, unless P divides
n·e - m·d. That is below P for integers within int32, and for numerators up to 2**40 over denominators below 2**20.
The points are public: a digest is no proof against someone who wants to deceive. The sum over an affine segment is
closed, and parts of a document add up.

Source: R. M. Karp and M. O. Rabin, Efficient randomized pattern-matching algorithms, 1987.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from hashlib import sha256
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from mmpos.errors import InvalidInputError
from mmpos.positions.expand import expand
from mmpos.positions.table import PositionTable
from mmpos.positions.table_rows import FIRST_SEGMENT, MAX_AXES
from mmpos.support import native
from mmpos.support.checks import INT32_MAX, INT32_MIN, Array, IntArray, counted, first_bad, host_array, int_array, shown
from mmpos.support.ragged import ragged_arange

__all__ = ["DenseIds", "Runs", "fingerprint", "merge", "read_ids"]

Field: TypeAlias = npt.NDArray[np.uint64]
"""Elements of the field, below P."""

P = 2**61 - 1

_ROOT = "mmpos.fingerprint 1"
"""Beginning of what all constants are hashed from; its number changes with the meaning of a digest."""

_KNOWN_POWERS = 256
"""Powers of a point that C is given."""


def fingerprint(
    position_ids: PositionTable | npt.ArrayLike,
    *,
    attention_mask: npt.ArrayLike | None = None,
    cu_seqlens: npt.ArrayLike | None = None,
    denominators: npt.ArrayLike | None = None,
    tokens: npt.ArrayLike | None = None,
) -> list[bytes]:
    """Compute a digest of 16 bytes of the positions of every document.

    Two digests are equal if the documents have as many tokens, as many axes and equal ids, and different otherwise but
    for a chance of less than 1 in 2**80. So it is for integers, and for fractions with numerators up to 2**40 and
    denominators below 2**20; others n/d and m/e count as equal where 2**61 - 1 divides n·e - m·d. Padding, its side,
    packing, the order of documents, dtype, and how a table cuts a document into segments do not count. A table takes
    O(segments), ids one pass.

    >>> from mmpos.positions.place import place
    >>> from mmpos.segments import Grid, SegmentTable, Text
    >>> positions = place(SegmentTable.from_documents([[Text(3), Grid(2, 3)], [Text(2)]]))
    >>> ids, mask = positions.padded(side="left")
    >>> fingerprint(positions) == fingerprint(ids, attention_mask=mask)
    True

    Args:
        position_ids: a table; or ids on the host, of numpy or torch: (axes, batch, length), (axes, tokens) packed or of
            one document, or (tokens,) of one axis; with an attention_mask of its shape also (batch, length) of one
            axis. Integers, or floats, each of which stands for the first convergent of its continued fraction that is
            that number in float64: n/d itself, where d² is below 2**52 / |n/d|. Leave out a text row, which is no axis.
        attention_mask: (batch, length), or (tokens,) of packed ids, of 0 and 1; tokens under a 0 are left out, whatever
            stands there.
        cu_seqlens: (documents + 1,) first token of each packed document, padding included, then the total, below 2**31;
            None takes each row of a batch, or all tokens, for one document.
        denominators: what integer ids are numerators over, as ``PositionTable.rationals`` has them: one for all, or
            of the shape of ids without axes.
        tokens: (tokens,) for ids of a part, as of a context-parallel rank: which tokens of the whole batch, flat, they
            are, as ``shard_indices`` gives them. The mask and cu_seqlens are then those of the whole. The digests
            of all parts become those of the documents by ``merge``.

    Returns:
        16 bytes for each document, of an empty one all zero; a new list.

    Raises:
        InvalidInputError: arguments that do not fit each other; ids that are no numbers, are beyond int32, or have no
            denominator below 2**31.
    """
    if isinstance(position_ids, PositionTable):
        if any(each is not None for each in (attention_mask, cu_seqlens, denominators, tokens)):
            raise InvalidInputError("position_ids: got a PositionTable with other arguments, want it alone")
        return _table_digests(position_ids)
    ids = read_ids(position_ids, attention_mask, cu_seqlens, denominators, tokens)
    return _digests(ids)


def merge(parts: Sequence[Sequence[bytes]]) -> list[bytes]:
    """Merge the digests of parts that hold every token of the documents once, in any order.

    >>> from mmpos.positions.place import place
    >>> from mmpos.segments import SegmentTable, Text
    >>> positions = place(SegmentTable.from_documents([[Text(8)], [Text(4)]]))
    >>> whole = {"cu_seqlens": positions.cu_seqlens}
    >>> places = [positions.shard_indices(rank, 2) for rank in range(2)]
    >>> parts = [fingerprint(positions.dense()[:, tokens], tokens=tokens, **whole) for tokens in places]
    >>> merge(parts) == fingerprint(positions)
    True

    Args:
        parts: of every part what ``fingerprint(…, tokens=…)`` gave.

    Raises:
        InvalidInputError: no parts, parts with different numbers of documents, or something else than digests.
    """
    if not isinstance(parts, Sequence) or not parts:
        got = "none" if isinstance(parts, Sequence) else type(parts).__name__
        raise InvalidInputError(f"parts: got {got}, want a list of the digests of at least one part")
    for i, part in enumerate(parts):
        if not isinstance(part, Sequence):
            raise InvalidInputError(f"parts[{i}]: got {type(part).__name__}, want a list of digests")
        if len(part) != len(parts[0]):
            raise InvalidInputError(f"parts[{i}]: got {counted(len(part), 'digest')}, want {len(parts[0])}")
        for d, digest in enumerate(part):
            if not isinstance(digest, bytes) or len(digest) != 16:
                raise InvalidInputError(f"parts[{i}][{d}]: got {digest!r}, want 16 bytes")
    sums = np.zeros((len(parts[0]), 2), np.uint64)
    for i, part in enumerate(parts):
        more = np.frombuffer(b"".join(part), "<u8").reshape(sums.shape)
        if (more >= P).any():
            d = int((more >= P).any(axis=1).argmax())
            raise InvalidInputError(f"parts[{i}][{d}]: got {part[d]!r}, want two sums below 2**61 - 1")
        sums = (sums + more) % P
    return _as_bytes(sums)


@dataclass(frozen=True, eq=False)
class Runs:
    """Runs of consecutive tokens of documents, padding left out.

    Args:
        first: (runs,) the column of ids where each begins; of a table, its segment.
        tokens: (runs,) how many.
        document: (runs,) of which document.
        index: (runs,) tokens of the document before the run.
        num_documents: documents, those without a run included.
    """

    first: IntArray
    tokens: IntArray
    document: IntArray
    index: IntArray
    num_documents: int

    @property
    def columns(self) -> IntArray:
        """(tokens,) the column of every token, run after run."""
        return ragged_arange(self.tokens, self.first)[1]

    @property
    def lengths(self) -> IntArray:
        """(documents,) tokens of each document."""
        return np.bincount(self.document, self.tokens, self.num_documents).astype(np.int64)


@dataclass(frozen=True, eq=False)
class DenseIds:
    """Ids of the tokens of documents, with or without padding between them.

    Args:
        array: (axes, columns) int32, int64, float32 or float64 ids; numerators where there are denominators.
        denominators: (columns,) of all axes, or None.
        runs: which columns are tokens, and of which documents.
    """

    array: Array
    denominators: IntArray | None
    runs: Runs

    def fractions(self) -> tuple[IntArray, IntArray]:
        """Give exact ids as (axes, tokens) numerators and denominators, run after run.

        Raises:
            InvalidInputError: ids that fingerprint refuses.
        """
        columns = self.runs.columns
        ids = self.array[:, columns]
        if ids.dtype.kind == "f":
            return _convergents(ids.astype(np.float64, copy=False))
        over = np.ones(columns.size, np.int64)
        if self.denominators is not None:
            over = self.denominators[columns]
            every = np.ones(self.denominators.size, np.int64)
            every[columns] = over
            first_bad("denominators", every, minimum=1, maximum=INT32_MAX)
        beyond = (ids < INT32_MIN * over) | (ids > INT32_MAX * over)
        if beyond.any():
            axis, token = divmod(int(beyond.argmax()), columns.size)
            got = Fraction(int(ids[axis, token]), int(over[token]))
            raise InvalidInputError(f"position_ids: got {got} in column {columns[token]}, want ids within int32")
        return ids.astype(np.int64, copy=False), np.broadcast_to(over, ids.shape)


def read_ids(
    position_ids: npt.ArrayLike,
    attention_mask: npt.ArrayLike | None = None,
    cu_seqlens: npt.ArrayLike | None = None,
    denominators: npt.ArrayLike | None = None,
    tokens: npt.ArrayLike | None = None,
) -> DenseIds:
    """Read ids from any of the shapes, with the arguments and errors of ``fingerprint``."""
    array = host_array("position_ids", _on_host("position_ids", position_ids))
    attention_mask, cu_seqlens = _on_host("attention_mask", attention_mask), _on_host("cu_seqlens", cu_seqlens)
    denominators, tokens = _on_host("denominators", denominators), _on_host("tokens", tokens)
    if array.dtype.kind not in "iuf" or not 1 <= array.ndim <= 3:
        got = f"{array.dtype} of shape {array.shape}"
        want = "integers or floats of shape (axes, tokens) or (axes, batch, length)"
        raise InvalidInputError(f"position_ids: got {got}, want {want}")
    mask = None if attention_mask is None else _mask(attention_mask)
    one_axis = tokens is None and array.ndim == 2 and mask is not None and mask.shape == array.shape
    if array.ndim == 1 or one_axis:
        array = array[None]
    if not 1 <= len(array) <= MAX_AXES:
        raise InvalidInputError(f"position_ids: got {counted(len(array), 'axis')}, want 1 to {MAX_AXES}")
    if array.dtype == np.uint64:
        array = np.minimum(array, np.uint64(np.iinfo(np.int64).max))  # no id either, and does not wrap around
    if array.dtype not in (np.int32, np.int64, np.float32, np.float64):
        array = array.astype(np.float64 if array.dtype.kind == "f" else np.int64)
    part = None if tokens is None else int_array("tokens", tokens, (array[0].size,))
    shape = array.shape[1:] if part is None or mask is None else mask.shape
    edges = _edges(cu_seqlens, shape, part)
    if mask is not None and (mask.size != edges[-1] or (part is None and _rows(mask.shape) != _rows(shape))):
        want = "those of the whole" if part is not None else f"{shape}, as position_ids"
        raise InvalidInputError(f"attention_mask: got shape {mask.shape}, want {want}")
    over = None if denominators is None else _denominators(denominators, array)
    array = array.reshape(len(array), -1)
    first, lengths = edges[:-1], edges[1:] - edges[:-1]
    runs = _runs(first, *((first, lengths) if mask is None or mask.all() else _under(mask, edges)))
    if part is not None:
        first_bad("tokens", part, minimum=0, maximum=int(edges[-1]) - 1)
        runs = _regrouped(runs, part)
    return DenseIds(array, over, runs)


def _on_host(name: str, value: Any) -> Any:
    """Leave the gradient of a tensor out; refuse one that would be copied from a device, or that may be rounded."""
    if not hasattr(value, "detach"):
        return value
    if value.device.type != "cpu":
        raise InvalidInputError(f"{name}: got a tensor on {value.device}, want one on the host, as its .cpu() is")
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype.startswith(("bfloat16", "float8")):
        got = f"{dtype}, which rounds integers{' above 256' if dtype == 'bfloat16' else ''}"
        raise InvalidInputError(f"{name}: got {got}, want int32, int64, float32 or float64 that was never cast to it")
    return value.detach()


def _mask(attention_mask: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    flags = host_array("attention_mask", attention_mask)
    mask = flags if flags.dtype == np.bool_ else np.asarray(flags == 1)
    sound = flags.dtype.kind in "biuf" and 1 <= flags.ndim <= 2
    if not sound or np.count_nonzero(flags) != np.count_nonzero(mask):
        raise InvalidInputError("attention_mask: got other than 0 and 1, (batch, length) or (tokens,), want these")
    return mask


def _rows(shape: tuple[int, ...]) -> int:
    return shape[0] if len(shape) == 2 else 1


def _edges(cu_seqlens: npt.ArrayLike | None, shape: tuple[int, ...], part: IntArray | None) -> IntArray:
    """(documents + 1,) first token of every document of the whole batch, flat, then the total."""
    rows, length = _rows(shape), shape[-1]
    if cu_seqlens is None:
        if part is not None and len(shape) != 2:
            raise InvalidInputError("cu_seqlens: got none with tokens of a part, want those of the whole")
        return np.arange(rows + 1) * length
    edges = int_array("cu_seqlens", cu_seqlens, (None,))
    if rows > 1:
        raise InvalidInputError(f"cu_seqlens: got one for a batch of {rows} rows, want packed ids, or no cu_seqlens")
    if not edges.size or edges[0] or (edges[1:] < edges[:-1]).any() or (part is None and edges[-1] != length):
        total = "the total" if part is not None else str(length)
        raise InvalidInputError(f"cu_seqlens: got {shown(edges)}, want ascending integers from 0 to {total}")
    first_bad("cu_seqlens", edges, maximum=INT32_MAX)
    return edges


def _denominators(denominators: npt.ArrayLike, array: Array) -> IntArray:
    """(columns,) denominators of integer ids, with anything where there is no token, not yet checked."""
    if array.dtype.kind == "f":
        raise InvalidInputError(f"denominators: got some for ids of {array.dtype}, want integer numerators, or none")
    given = host_array("denominators", denominators)
    over = int_array("denominators", given, array.shape[1:] if given.ndim else ())
    return np.broadcast_to(over, array.shape[1:]).reshape(-1)


def _under(mask: npt.NDArray[np.bool_], edges: IntArray) -> tuple[IntArray, IntArray]:
    """Find the runs of tokens under a mask, none across an edge: the first of each, and how many."""
    flags = mask.ravel()
    cuts = np.concatenate([edges, (flags[1:] != flags[:-1]).nonzero()[0] + 1])
    cuts.sort()
    first = cuts[:-1]
    tokens = (cuts[1:] - first) * flags.take(first, mode="clip")  # of an empty document the first may be past the end
    keep = tokens.nonzero()[0]
    return first[keep], tokens[keep]


def _runs(starts: IntArray, first: IntArray, tokens: IntArray) -> Runs:
    """Make the runs of documents that have their first column, or segment, here; all in order."""
    document = starts.searchsorted(first, side="right") - 1
    before = np.zeros(tokens.size + 1, np.int64)
    tokens.cumsum(out=before[1:])
    index = before[:-1] - before[first.searchsorted(starts)][document]
    return Runs(first, tokens, document, index, starts.size)


def _regrouped(runs: Runs, part: IntArray) -> Runs:
    """Find the runs of a part of the tokens."""
    first, tokens, document, index = (
        np.append(column, 0)  # an empty run for what stands before all others
        for column in (runs.first, runs.tokens, runs.document, runs.index)
    )
    run = runs.first.searchsorted(part, side="right") - 1
    inside = part < (first + tokens)[run]
    document, index = document[run], part - first[run] + index[run]
    new = ~inside
    new[:1] = True
    new[1:] |= ~inside[:-1] | (document[1:] != document[:-1]) | (index[1:] != index[:-1] + 1)
    start = new.nonzero()[0]
    lengths = np.diff(start, append=part.size)
    keep = inside[start]
    start = start[keep]
    return Runs(start, lengths[keep], document[start], index[start], runs.num_documents)


def _convergents(values: npt.NDArray[np.float64]) -> tuple[IntArray, IntArray]:
    """Give numerators and denominators: of every float the first convergent of its continued fraction that is it.

    A fraction n/d with d² below 2**52 / |n/d| comes back as it was.
    """
    if not ((values >= INT32_MIN) & (values <= INT32_MAX)).all():  # nan is neither
        raise InvalidInputError("position_ids: got numbers that are not finite or beyond int32, want position ids")
    whole = np.floor(values)
    numerators, denominators = whole.astype(np.int64), np.ones(values.shape, np.int64)
    at = np.flatnonzero(values != whole)
    if not at.size:
        return numerators, denominators
    value, back = np.unique(values.flat[at], return_inverse=True)
    base = np.floor(value)
    rest = value - base
    # Convergents p/q of what is left after the whole number, until the quotient is the float.
    p, q, p_before, q_before = np.zeros(value.size), np.ones(value.size), np.ones(value.size), np.zeros(value.size)
    open_ = np.ones(value.size, np.bool_)
    while open_.any():
        with np.errstate(divide="ignore", invalid="ignore"):
            inverse = np.where(open_, 1 / rest, 1.0)
        digit = np.floor(inverse)
        p, p_before = np.where(open_, digit * p + p_before, p), np.where(open_, p, p_before)
        q, q_before = np.where(open_, digit * q + q_before, q), np.where(open_, q, q_before)
        if not (q <= INT32_MAX).all():
            got = value[int((q > INT32_MAX).argmax())]
            raise InvalidInputError(f"position_ids: got {got!r}, want fractions with denominators below 2**31")
        rest = inverse - digit
        open_ &= (base * q + p) / q != value
    numerators.flat[at] = (base * q + p).astype(np.int64)[back]
    denominators.flat[at] = q.astype(np.int64)[back]
    return numerators, denominators


def _table_digests(positions: PositionTable) -> list[bytes]:
    """Digests of the documents of a table, from its segments."""
    real = (~positions.is_padding).nonzero()[0]
    runs = _runs(positions.documents[FIRST_SEGMENT], real, positions.segment_lengths[real])
    over = positions.denominator if positions.fractional else None
    sums = _sums_by_c(positions.table, True, over, runs, positions.axes)
    if sums is not None:
        return _as_bytes(sums)
    numerators = np.empty((positions.axes, positions.num_tokens), np.int64)
    expand(positions.table, positions.num_tokens, False, numerators, range(positions.axes))
    runs = replace(runs, first=positions.offset[real])
    over = positions.per_token(positions.denominator)[runs.columns]
    return _as_bytes(_sums(numerators[:, runs.columns], over, runs))


def _digests(ids: DenseIds) -> list[bytes]:
    """Digests of the documents of ids."""
    sums = _sums_by_c(ids.array, False, ids.denominators, ids.runs, len(ids.array))
    return _as_bytes(_sums(*ids.fractions(), ids.runs) if sums is None else sums)


def _as_bytes(sums: npt.NDArray[np.int64] | Field) -> list[bytes]:
    data = sums.astype("<u8").tobytes()
    return [data[i : i + 16] for i in range(0, len(data), 16)]


def _sums_by_c(source: Array, placed: bool, over: IntArray | None, runs: Runs, axes: int) -> IntArray | None:
    """(documents, 2) sums of ids, or of the segments of a table; None where C declines."""
    if native.core is None:
        return None
    rows = np.empty((4, runs.first.size), np.int64)
    rows[0], rows[1], rows[2], rows[3] = runs.first, runs.tokens, runs.document, runs.index
    sums = np.zeros((runs.num_documents, 2), np.int64)
    return sums if native.core.sums(source, placed, rows, over, _first_powers(), _factors(axes), sums, True) else None


def _sums(numerators: IntArray, denominators: IntArray, runs: Runs) -> Field:
    """(documents, 2) sums of fractions, (axes, tokens) run after run: the formula of this module."""
    count = len(numerators)
    owner, index = ragged_arange(runs.tokens, runs.index)
    document = runs.document[owner]
    ids = _times((numerators % P).astype(np.uint64), _inverses(denominators).astype(np.uint64))
    sums = np.zeros((runs.num_documents, 2), np.uint64)
    for j, factors in enumerate(_factors(count).astype(np.uint64)):
        value = np.full(index.size, factors[count])
        for axis in range(count):
            value = (value + _times(factors[axis], ids[axis])) % P
        value = _times(_powers_at(_constant(f"point {j}"), index), value)
        halves = np.zeros((2, runs.num_documents), np.uint64)  # sums of 2**31 tokens fit
        np.add.at(halves[0], document, value & 0xFFFFFFFF)
        np.add.at(halves[1], document, value >> 32)
        sums[:, j] = (_times(halves[1] % P, np.uint64(2**32)) + halves[0] % P) % P
    return sums


def _times(a: Field | np.uint64, b: Field | np.uint64) -> Field:
    """Multiply in the field, by halves of 32 bits: 2**61 is 1 there, and 2**64 is 8."""
    low, mask = np.uint64(32), np.uint64(2**32 - 1)
    a_high, a_low, b_high, b_low = a >> low, a & mask, b >> low, b & mask
    middle = a_high * b_low + a_low * b_high
    lowest = a_low * b_low
    total = 8 * (a_high * b_high) + (middle >> 29) + ((middle & (2**29 - 1)) << low) + (lowest >> 61) + (lowest & P)
    return np.asarray(total % P, np.uint64)


def _inverses(values: IntArray) -> IntArray:
    """Inverses in the field of integers from 1 on."""
    if (values == 1).all():
        return values
    each, where = np.unique(values, return_inverse=True)
    return np.array([pow(value, -1, P) for value in each.tolist()], np.int64)[where].reshape(values.shape)


def _powers(base: int, count: int) -> Field:
    """(count,) powers, from the zeroth on."""
    powers = np.ones(1, np.uint64)
    while powers.size < count:
        powers = np.append(powers, _times(powers, np.uint64(pow(base, powers.size, P))))
    return powers[:count]


def _powers_at(base: int, exponents: IntArray) -> Field:
    """Powers of any exponents, as products of two out of 2**16 each."""
    high, low = np.divmod(exponents, 2**16)
    large = _powers(pow(base, 2**16, P), int(high.max(initial=0)) + 1)
    return _times(large[high], _powers(base, int(low.max(initial=0)) + 1)[low])


@cache
def _first_powers() -> IntArray:
    """(2, 256) powers of both points."""
    return np.stack([_powers(_constant(f"point {j}"), _KNOWN_POWERS) for j in range(2)]).astype(np.int64)


@cache
def _factors(axes: int) -> IntArray:
    """(2, axes + 1) for both points the factor c_a of each axis, and their sum times k, which every token adds."""
    rows = []
    for point in range(2):
        factors = [_constant(f"axis {axis} at point {point}") for axis in range(axes)]
        rows.append([*factors, sum(factors) * _constant(f"shift at point {point}") % P])
    return np.array(rows, np.int64)


@cache
def _constant(name: str) -> int:
    return int.from_bytes(sha256(f"{_ROOT}: {name}".encode()).digest()[:16], "little") % P
