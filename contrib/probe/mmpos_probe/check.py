"""Comparison of the positions that were read from keys with the intended ones."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from mmpos import Diagnosis, PositionTable, Scheme, SegmentTable, diagnose, place
from mmpos.errors import InvalidInputError
from mmpos_probe.confidence import Reading
from mmpos_probe.words import Float64Array, counted, host_array

NEAR = 1e-9
"""Largest distance between ids that count as equal, since fractions are floats here."""

OVERWRITTEN = (
    "check how these tokens enter the cache: their keys may be unwritten, overwritten, without the attention factor, "
    "or rotated differently"
)


def check(
    reading: Reading,
    documents: SegmentTable | PositionTable | npt.ArrayLike,
    scheme: str | Scheme | None = None,
    start: npt.ArrayLike = 0,
) -> Diagnosis:
    """Compare a reading with the intended positions, as ``diagnose`` does with ids.

    A token whose key no id explains counts as different. Ids that are hidden only by noise or slow pairs are skipped,
    and the Diagnosis counts their tokens as ``unknown_tokens``. Its ``num_tokens`` counts the tokens whose ids are all
    known or, if there is a difference, those with at least one known id. If ids are relative and another document
    would begin below zero, the document of the reference token is taken to begin too late.

    Args:
        reading: a reading of all tokens of the documents, without padding.
        documents: the documents of the keys, or the ids that were passed to the engine, as (axes, tokens) or (tokens,)
            integers; placement mistakes are found only for a SegmentTable.
        scheme: with a SegmentTable, a name or a scheme object; None means "rope-tie".
        start: with a SegmentTable, the id of each document's first token: one for all, or (documents,).

    Raises:
        InvalidInputError: the numbers of tokens or axes differ, or the reading contains no known id.
    """
    table = _table(documents, scheme, start, reading.axes)
    segments = documents if isinstance(documents, SegmentTable) else None
    if (table.axes, table.num_tokens) != (reading.axes, reading.num_tokens):
        got = f"{reading.axes} axes and {counted(reading.num_tokens, 'token')}"
        raise InvalidInputError(f"reading: got {got}, want {table.axes} axes and {table.num_tokens}, as in documents")
    known = reading.known
    if not known.any():
        raise InvalidInputError(f"reading: got no known id, want at least one; {' '.join(reading.notes)}")
    want = table.dense(dtype=np.float64)
    ids = _absolute(reading, want, table)
    diagnosis = diagnose(np.where(known, ids, want), segments or table, scheme, start, tolerance=NEAR)
    differ = known & (np.abs(ids - want) > NEAR)
    wrong = differ.any(axis=0) | ~reading.explained
    unknown = int((~known.all(axis=0) & ~wrong).sum())
    if not wrong.any():
        return replace(diagnosis, num_tokens=reading.num_tokens - unknown, unknown_tokens=unknown)
    count, first = int(wrong.sum()), int(wrong.argmax())
    diagnosis = _unexplained(diagnosis, count) if diagnosis.equal else diagnosis
    owner = np.repeat(np.arange(table.num_documents), table.lengths)
    numerators, denominators = table.slice(first, first + 1).rationals()
    return replace(
        diagnosis,
        equal=False,
        num_tokens=int((known.any(axis=0) | wrong).sum()),
        different_tokens=count,
        different_documents=np.unique(owner[wrong]).size,
        document=int(owner[first]),
        token=first - int(table.cu_seqlens[owner[first]]),
        what=table.describe(first, segments),
        axis=int((~known[:, first] | differ[:, first]).argmax()),
        got=tuple(np.where(known[:, first] & reading.explained[first], ids[:, first], np.nan).tolist()),
        want=tuple(map(Fraction, numerators[:, 0].tolist(), denominators.tolist() * table.axes)),
        unknown_tokens=unknown,
        wrong=wrong,
        owner=owner,
        segment_starts=table.offset,
    )


def _unexplained(diagnosis: Diagnosis, count: int) -> Diagnosis:
    """Give a diagnosis the cause that no id explains the keys of this many tokens."""
    cause = f"no id explains the keys of {counted(count, 'token')}"
    return replace(diagnosis, cause=cause, remedy=OVERWRITTEN, explained=count)


def _absolute(reading: Reading, want: Float64Array, table: PositionTable) -> Float64Array:
    """Return the (axes, tokens) ids that were read, assuming that the reference token, if any, has its own."""
    ids: Float64Array = np.where(reading.known, reading.position_ids, 0) / reading.denominators
    if reading.reference is None:
        return ids
    ids += want[:, [reading.reference]]
    return ids + _late(reading, ids - want, want, table)


def _late(reading: Reading, off: Float64Array, want: Float64Array, table: PositionTable) -> float:
    """Return by how much the reference's document must begin too late so that no document begins below zero."""
    begins = np.unique(table.cu_seqlens[:-1])
    begins = begins[begins < reading.num_tokens]
    axes = reading.known.any(axis=1)
    known, off, want = reading.known[axes][:, begins].all(axis=0), off[axes][:, begins], want[axes][:, begins]
    below = known & (off == off[:1]).all(axis=0) & (want >= 0).all(axis=0) & (want + off < 0).any(axis=0)
    return float(-off[0, below].min(initial=0))


def _table(
    documents: SegmentTable | PositionTable | npt.ArrayLike,
    scheme: str | Scheme | None,
    start: npt.ArrayLike,
    axes: int,
) -> PositionTable:
    """Place documents, or build a table from the ids that were passed to an engine."""
    if isinstance(documents, SegmentTable):
        return place(documents, "rope-tie" if scheme is None else scheme, start)
    if scheme is not None or np.ndim(start) or start != 0:
        got = "a PositionTable" if isinstance(documents, PositionTable) else "ids"
        raise InvalidInputError(f"{'start' if scheme is None else 'scheme'} requires a SegmentTable, got {got}")
    if isinstance(documents, PositionTable):
        return documents
    ids = host_array("documents", documents)
    if ids.ndim == 1:
        ids = np.tile(ids, (axes, 1))
    if ids.dtype.kind not in "iu" or ids.ndim != 2:
        raise InvalidInputError(f"documents: got {ids.dtype} of shape {ids.shape}, want integers ({axes}, tokens)")
    tokens = ids.shape[1]
    begins = np.ones(tokens, np.bool_)
    begins[1:] = (np.diff(ids.astype(np.int64)) != 1).any(axis=0)
    (starts,) = begins.nonzero()  # text continues wherever all ids increase by 1
    table = np.zeros((5 + 4 * len(ids), starts.size), np.int64)
    table[0], table[3], table[[2, 4]] = starts, np.diff(starts, append=tokens), 1  # offset, width, height, denominator
    table[5::4], table[8::4] = ids[:, starts], 1  # origin and step_col of each axis
    none = np.iinfo(np.int64).min  # no next position and no delta
    scheme = "the ids passed to the engine"
    return PositionTable.from_arrays(table, [[0], [0], [none], [none]], tokens, fractional=False, scheme=scheme)
