"""Compare the positions that were read from keys with those that were meant."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from mmpos.analysis.diagnosis.diagnosis import Diagnosis, diagnose, first_difference, fractions_of
from mmpos.analysis.diagnosis.shapes import table_of_ids
from mmpos.analysis.probe.confidence import Reading
from mmpos.errors import InvalidInputError
from mmpos.positions.place import place
from mmpos.positions.table import PositionTable
from mmpos.positions.table_rows import FIRST_TOKEN
from mmpos.rotary.frequencies import Float64Array
from mmpos.schemes import Scheme
from mmpos.segments.table import SegmentTable
from mmpos.support.checks import counted, host_array, instance, int_array

NEAR = 1e-9
"""Distance of ids that is no difference: fractions are floats here."""

OVERWRITTEN = (
    "look how such tokens enter the cache: never written, overwritten, without the attention factor, or turned by "
    "another rotation"
)


def check(
    reading: Reading,
    documents: SegmentTable | PositionTable | npt.ArrayLike,
    scheme: str | Scheme | None = None,
    start: npt.ArrayLike = 0,
) -> Diagnosis:
    """Compare a reading with the positions that were meant, in the words of ``diagnose``.

    A token whose key no id explains differs. Ids that nothing but noise or slow pairs hide are not compared: the
    Diagnosis has the number of their tokens as ``unknown_tokens``, and counts as compared the tokens of which all ids
    are known, or, if there is a difference, any. Where ids are relative and another row or document would begin below
    zero, the reference's own began too late.

    Args:
        reading: of as many tokens as the documents have, padding left out.
        documents: what the keys are of; mistakes in placing are found only for a SegmentTable. Or (axes, tokens) or
            (tokens,) the integers that the engine was given.
        scheme: for a SegmentTable, a name or a scheme object; "rope-tie" if not given.
        start: for a SegmentTable, id of each document's first token, one or (documents,).

    Raises:
        InvalidInputError: other numbers of tokens or axes; no id that could be told.
    """
    instance("reading", reading, Reading, "mmpos.analysis.probe.read")
    table = _table(documents, scheme, start, reading.axes)
    documents = documents if isinstance(documents, SegmentTable) else table
    if (table.axes, table.num_tokens) != (reading.axes, reading.num_tokens):
        got = f"{reading.axes} axes and {counted(reading.num_tokens, 'token')}"
        raise InvalidInputError(f"reading: got {got}, want {table.axes} axes and {table.num_tokens}, as documents have")
    known = reading.known
    if not known.any():
        raise InvalidInputError(f"reading: got no id that could be told, want one; {' '.join(reading.notes)}")
    want = table.dense(dtype=np.float64)
    ids = np.where(known, reading.position_ids, 0) / reading.denominators
    if reading.reference is not None:
        ids += want[:, [reading.reference]]
        ids += _late(reading, ids - want, want, table)
    found = diagnose(np.where(known, ids, want), documents, scheme, start, tolerance=NEAR)
    differ = known & (np.abs(ids - want) > NEAR)
    wrong = differ.any(axis=0) | ~reading.explained
    unknown = int((~known.all(axis=0) & ~wrong).sum())
    if not wrong.any():
        return replace(found, num_tokens=reading.num_tokens - unknown, unknown_tokens=unknown)
    first, document = int(wrong.argmax()), np.repeat(np.arange(table.num_documents), table.lengths)
    cause = {"cause": found.cause, "remedy": found.remedy, "explained": found.explained}
    if found.equal:
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
        **cause,
    )


def _late(reading: Reading, off: Float64Array, want: Float64Array, table: PositionTable) -> float:
    """Return by how much the reference's row began too late: else another row or document would begin below zero."""
    begins = np.unique(np.concatenate([reading.row_offsets[:-1], table.documents[FIRST_TOKEN]]))
    begins = begins[begins < reading.num_tokens]
    told = reading.known.any(axis=1)
    known, off, want = reading.known[told][:, begins].all(axis=0), off[told][:, begins], want[told][:, begins]
    below = known & (off == off[:1]).all(axis=0) & (want >= 0).all(axis=0) & (want + off < 0).any(axis=0)
    return float(-off[0, below].min(initial=0))


def _table(
    documents: SegmentTable | PositionTable | npt.ArrayLike,
    scheme: str | Scheme | None,
    start: npt.ArrayLike,
    axes: int,
) -> PositionTable:
    """Place documents, or make the table of ids that an engine was given."""
    if isinstance(documents, SegmentTable):
        return place(documents, "rope-tie" if scheme is None else scheme, start)
    if scheme is not None or np.ndim(start) or start != 0:
        got = "a table" if isinstance(documents, PositionTable) else "ids"
        raise InvalidInputError(f"scheme, start: got one with {got}, want a SegmentTable, or none of them")
    if isinstance(documents, PositionTable):
        return documents
    array = host_array("documents", documents)
    if array.ndim == 1:
        array = np.tile(array, (axes, 1))
    array = int_array("documents", array, (axes, None))
    return table_of_ids(array, None, np.array([array.shape[1]]), "what the engine was given")
