"""The verb: compare ids with a scheme, find the first difference, and look for the mistake that explains it."""

from __future__ import annotations

import sys
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from mmpos.analysis.diagnosis.case import Case
from mmpos.analysis.diagnosis.judging import find_cause
from mmpos.analysis.diagnosis.reading import Dump, read_ids
from mmpos.analysis.diagnosis.result import Diagnosis
from mmpos.errors import InvalidInputError
from mmpos.positions.place import place
from mmpos.positions.rows import DELTA, NEXT_POSITION
from mmpos.positions.table import PositionTable, Side
from mmpos.schemes import Scheme, get_scheme
from mmpos.segments.table import PAD, SegmentTable
from mmpos.support.checks import INT32_MIN, IntArray, integer, per_document

__all__ = ["diagnose"]


def diagnose(
    ids: npt.ArrayLike,
    documents: SegmentTable | PositionTable,
    scheme: str | Scheme | None = None,
    start: npt.ArrayLike = 0,
    *,
    attention_mask: npt.ArrayLike | None = None,
    side: Side = "right",
    padding_id: int | None = None,
    tolerance: float = 0.0,
) -> Diagnosis:
    """Whether ids are those of a scheme, and if not, since which token and by which mistake.

    >>> from mmpos.segments import Grid, SegmentTable, Text
    >>> segments = SegmentTable.from_documents([[Text(1), Grid(1, 2), Text(1)]])
    >>> diagnose([[0, 2, 2, 4], [0, 3, 5, 7]], segments).got
    (2, 3)

    A cause is computed and not guessed: each known mistake is made on these documents, and is named only if it gives
    the first two differences; the first that gives every id that came is preferred.

    Args:
        ids: (axes, tokens) packed, (axes, batch, length) padded, or either without axes, which stands for all
            axes; integers or floats, a list, an array or a tensor on the host. Where a shape can be both,
            it is packed, unless it comes with an attention_mask.
        documents: what the ids are of; mistakes in placing are found only for a SegmentTable.
        scheme: for a SegmentTable, a name or a scheme object; "rope-tie" if not given.
        start: for a SegmentTable, id of each document's first token, one or (documents,).
        attention_mask: (batch, length) of 0 and 1; else padding is where the table has it, or at the side.
        side: "left" or "right".
        padding_id: what padding must have on every axis; None does not compare it.
        tolerance: how far an id may be from the exact one; 0 is exact up to float64.

    Raises:
        InvalidInputError: ids that are no numbers, or of another shape than the documents.
        UnsupportedError, LimitExceededError: as for place.
    """
    if (
        isinstance(tolerance, bool)
        or not isinstance(tolerance, int | float)
        or not 0 <= tolerance <= sys.float_info.max
    ):
        raise InvalidInputError(f"tolerance: got {tolerance!r}, want a number >= 0")
    if padding_id is not None:
        integer("padding_id", padding_id)
    whole, segments, how = _placed(documents, scheme, start)
    dump = read_ids(ids, whole, attention_mask, side)
    positions = _without_padding(whole)
    first_ids = per_document("start", start, whole.num_documents, minimum=INT32_MIN) if segments else _starts(positions)
    came = np.broadcast_to(dump.ids, (positions.axes, positions.num_tokens))
    case = Case(came, positions, first_ids, float(tolerance), segments, how, dump.column, dump.length)
    if case.wrong.any():
        return _different(case, rows=len(dump.ids))
    if padding_id is None:
        return Diagnosis(True, positions.scheme, positions.num_tokens, positions.num_documents)
    if (dump.padding != padding_id).any():
        return _different_padding(dump, positions, padding_id)
    return Diagnosis(True, positions.scheme, positions.num_tokens + dump.padding.shape[1], positions.num_documents)


def _placed(
    documents: SegmentTable | PositionTable, scheme: str | Scheme | None, start: npt.ArrayLike
) -> tuple[PositionTable, SegmentTable | None, Scheme | None]:
    """The table with its padding, the segments without, and the scheme."""
    if isinstance(documents, PositionTable):
        if scheme is not None or np.ndim(start) or start != 0:
            raise InvalidInputError("scheme, start: got one with a PositionTable, which has its own, want none")
        return documents, None, None
    if not isinstance(documents, SegmentTable):
        raise InvalidInputError(f"documents: got {type(documents).__name__}, want a SegmentTable or a PositionTable")
    how = get_scheme("rope-tie" if scheme is None else scheme)
    keep = documents.kind != PAD
    segments = documents
    if not keep.all():
        seconds, separator = documents.seconds_per_frame, documents.row_separator
        segments = SegmentTable(
            documents.kind[keep],
            documents.extents[:, keep],
            np.concatenate([[0], np.cumsum(keep)])[documents.segment_offsets],
            None if seconds is None else seconds[:, keep],
            None if separator is None else separator[keep],
        )
    return place(documents, how, start), segments, how


def _without_padding(positions: PositionTable) -> PositionTable:
    keep = ~positions.is_padding
    if keep.all():
        return positions
    starts = positions.offset[keep]
    return positions.take(starts, starts + positions.segment_lengths[keep])


def _starts(positions: PositionTable) -> IntArray:
    """(documents,) first ids, 0 where the scheme has no cursor to tell them by."""
    header = positions.documents
    return np.where(positions.resumable, header[NEXT_POSITION] - header[DELTA] - positions.lengths, 0)


def _different(case: Case, rows: int) -> Diagnosis:
    """The first difference between tokens, and its cause; rows are those of the ids as they came."""
    token, document = case.first, int(case.document[case.first])
    numerators, denominators = case.positions.slice(token, token + 1).rationals()
    found = find_cause(case)
    return Diagnosis(
        equal=False,
        scheme=case.positions.scheme,
        num_tokens=case.positions.num_tokens,
        num_documents=case.positions.num_documents,
        different_tokens=int(case.wrong.sum()),
        different_documents=np.unique(case.document[case.wrong]).size,
        document=document,
        token=int(case.index[token]),
        what=case.positions.describe(token),
        axis=int((~case.near(case.want[:, token : token + 1].T, case.got[:, token : token + 1].T)).argmax()),
        got=tuple(case.came[:rows, token].tolist()),
        want=tuple(Fraction(value, int(denominators[0])) for value in numerators[:, 0].tolist()),
        cause=found.cause if found else None,
        remedy=found.remedy if found else None,
        explained=found.explained if found else 0,
    )


def _different_padding(dump: Dump, positions: PositionTable, padding_id: int) -> Diagnosis:
    """The first difference in padding, where all tokens agree."""
    wrong = (dump.padding != padding_id).any(axis=0)
    first = int(wrong.argmax())
    document, place_in_row = dump.places[:, first].tolist()
    return Diagnosis(
        equal=False,
        scheme=positions.scheme,
        num_tokens=positions.num_tokens + wrong.size,
        num_documents=positions.num_documents,
        different_tokens=int(wrong.sum()),
        different_documents=np.unique(dump.places[0, wrong]).size,
        document=document,
        token=place_in_row,
        what="padding",
        axis=int((dump.padding[:, first] != padding_id).argmax()),
        got=tuple(dump.padding[:, first].tolist()),
        want=(Fraction(padding_id),) * positions.axes,
        cause="all tokens have their ids, and padding has others than it should",
        remedy="nothing, if padding is masked; or write the id that padding should have",
        explained=int(wrong.sum()),
    )
