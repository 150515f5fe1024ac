"""Comparison of the positions that were read from keys with the intended ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from mmpos.analysis.diagnosis.deviation import Flags
from mmpos.analysis.diagnosis.diagnosis import Diagnosis, diagnose, first_difference, fractions_of, segment_starts
from mmpos.analysis.diagnosis.shapes import table_of_ids
from mmpos.errors import InvalidInputError
from mmpos.positions.place import place
from mmpos.positions.table import PositionTable
from mmpos.positions.table_rows import FIRST_TOKEN
from mmpos.rotary.frequencies import Float64Array
from mmpos.schemes import Scheme
from mmpos.segments.table import SegmentTable
from mmpos.support.checks import counted, host_array, instance, int_array
from mmpos_probe.confidence import Reading

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
    known or, if there is a difference, those with at least one known id. If ids are relative and another row or
    document would begin below zero, the row of the reference token is taken to begin too late.

    Args:
        reading: a reading of all tokens of the documents, without padding.
        documents: the documents of the keys, or the ids that were passed to the engine, as (axes, tokens) or (tokens,)
            integers; placement mistakes are found only for a SegmentTable.
        scheme: with a SegmentTable, a name or a scheme object; None means "rope-tie".
        start: with a SegmentTable, the id of each document's first token: one for all, or (documents,).

    Raises:
        InvalidInputError: the numbers of tokens or axes differ, or the reading contains no known id.
    """
    instance("reading", reading, Reading, "mmpos_probe.read")
    table = _table(documents, scheme, start, reading.axes)
    documents = documents if isinstance(documents, SegmentTable) else table
    if (table.axes, table.num_tokens) != (reading.axes, reading.num_tokens):
        got = f"{reading.axes} axes and {counted(reading.num_tokens, 'token')}"
        raise InvalidInputError(f"reading: got {got}, want {table.axes} axes and {table.num_tokens}, as in documents")
    known = _known(reading)
    want = table.dense(dtype=np.float64)
    ids = np.where(known, reading.position_ids, 0) / reading.denominators
    if reading.reference is not None:
        ids += want[:, [reading.reference]]
        ids += _late(reading, ids - want, want, table)
    diagnosis = diagnose(np.where(known, ids, want), documents, scheme, start, tolerance=NEAR)
    differ = known & (np.abs(ids - want) > NEAR)
    wrong = differ.any(axis=0) | ~reading.explained
    unknown = int((~known.all(axis=0) & ~wrong).sum())
    if not wrong.any():
        return replace(diagnosis, num_tokens=reading.num_tokens - unknown, unknown_tokens=unknown)
    first, document = int(wrong.argmax()), np.repeat(np.arange(table.num_documents), table.lengths)
    cause = {"cause": diagnosis.cause, "remedy": diagnosis.remedy, "explained": diagnosis.explained}
    if diagnosis.equal:
        cause = {"cause": f"no id explains the keys of {counted(int(wrong.sum()), 'token')}", "remedy": OVERWRITTEN}
    return first_difference(
        table,
        wrong,
        document,
        np.arange(table.num_tokens) - table.documents[FIRST_TOKEN, document],
        num_tokens=int((known.any(axis=0) | wrong).sum()),
        unknown_tokens=unknown,
        what=table.describe(first, documents if isinstance(documents, SegmentTable) else None),
        axis=int((~known[:, first] | differ[:, first]).argmax()),
        got=tuple(np.where(known[:, first] & reading.explained[first], ids[:, first], np.nan).tolist()),
        want=fractions_of(table, first),
        segment_starts=segment_starts(documents),
        **cause,
    )


def _late(reading: Reading, off: Float64Array, want: Float64Array, table: PositionTable) -> float:
    """Return by how much the reference's row must begin too late so that no row or document begins below zero."""
    begins = np.unique(np.concatenate([reading.row_offsets[:-1], table.documents[FIRST_TOKEN]]))
    begins = begins[begins < reading.num_tokens]
    axes = reading.known.any(axis=1)
    known, off, want = reading.known[axes][:, begins].all(axis=0), off[axes][:, begins], want[axes][:, begins]
    below = known & (off == off[:1]).all(axis=0) & (want >= 0).all(axis=0) & (want + off < 0).any(axis=0)
    return float(-off[0, below].min(initial=0))


def _known(reading: Reading) -> Flags:
    """Return whether each id is known, (axes, tokens); refuse a reading without known ids."""
    if not reading.known.any():
        raise InvalidInputError(f"reading: got no known id, want at least one; {' '.join(reading.notes)}")
    return reading.known


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
    array = host_array("documents", documents)
    if array.ndim == 1:
        array = np.tile(array, (axes, 1))
    array = int_array("documents", array, (axes, None))
    return table_of_ids(array, None, np.array([array.shape[1]]), "the ids passed to the engine")
