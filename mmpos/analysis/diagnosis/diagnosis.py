"""Comparison of a pipeline's ids with a scheme: the first difference, and the mistake that explains it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from mmpos.analysis.diagnosis.deviation import Deviation, Flags
from mmpos.analysis.diagnosis.mistakes import MISTAKES
from mmpos.analysis.diagnosis.shapes import Array, read_ids
from mmpos.errors import InvalidInputError
from mmpos.positions.place import place
from mmpos.positions.table import PositionTable, Side
from mmpos.positions.table_rows import DELTA, NEXT_POSITION
from mmpos.schemes import Scheme, get_scheme
from mmpos.segments.table import PAD, SegmentTable
from mmpos.support import html
from mmpos.support.checks import INT32_MIN, IntArray, counted, finite, host_array, per_document


@dataclass(frozen=True)
class Diagnosis:
    """The result of comparing ids with a scheme: equal, or where they first differ and why.

    Args:
        equal: whether all compared ids agree; the fields after num_documents are then empty.
        scheme: name of the scheme, with its non-default parameters.
        num_tokens: number of compared tokens, without padding.
        num_documents: number of compared documents.
        different_tokens: number of tokens with an id that differs.
        different_documents: number of documents with such a token.
        document: the first document with such a token.
        token: index in that document of the first token that differs.
        what: description of this token, such as "row 0, column 1 of a grid of width 3 (segment 1)".
        axis: the first axis on which this token differs.
        got: received ids of this token, one per row of the ids; empty if the received document has no such token, NaN
            for an unknown id.
        want: exact ids of this token in the scheme, one per axis; empty if the scheme's document has no such token.
        cause: the mistake that explains the difference; None if no known mistake does.
        remedy: how to fix that mistake.
        explained: number of tokens that differ and have exactly the ids that the mistake produces.
        unknown_tokens: number of tokens that were not compared because an id could not be read from their keys.
        wrong: (tokens,) whether each token differs, document after document; None if all are equal.
        owner: (tokens,) the document of each token.
        segment_starts: (segments,) the first token of each segment; None if all ids are equal.
    """

    equal: bool
    scheme: str
    num_tokens: int
    num_documents: int
    different_tokens: int = 0
    different_documents: int = 0
    document: int | None = None
    token: int | None = None
    what: str | None = None
    axis: int | None = None
    got: tuple[int | float, ...] | None = None
    want: tuple[Fraction, ...] | None = None
    cause: str | None = None
    remedy: str | None = None
    explained: int = 0
    unknown_tokens: int = 0
    wrong: Flags | None = field(default=None, repr=False, compare=False)
    owner: IntArray | None = field(default=None, repr=False, compare=False)
    segment_starts: IntArray | None = field(default=None, repr=False, compare=False)

    @property
    def sentences(self) -> tuple[str, ...]:
        """The result in sentences: all equal, or the first difference, the counts, the cause and the remedy."""
        return (*self.difference, *self.explanation)

    @property
    def difference(self) -> tuple[str, ...]:
        """The sentences without cause and remedy."""
        documents = counted(self.num_documents, "document")
        if self.equal and self.unknown_tokens and not self.num_tokens:
            known = f"All ids that could be read are those of {self.scheme}."
            return known, f"The ids of {counted(self.unknown_tokens, 'token')} could not be read."
        unknown = f"The ids of {counted(self.unknown_tokens, 'more token')} could not be read."
        hidden = (unknown,) if self.unknown_tokens else ()
        if self.equal:
            return (f"All {counted(self.num_tokens, 'token')} of {documents} have the ids of {self.scheme}.", *hidden)
        got, want = (_position(ids) if ids else "no token" for ids in (self.got, self.want))
        first = (
            f"documents[{self.document}], token {self.token}, is {self.what}: got {got}, want {want} in {self.scheme}."
        )
        tokens = counted(self.num_tokens, "token")
        count = f"{self.different_tokens} of {tokens} differ, in {self.different_documents} of {documents}."
        return first, count, *hidden

    @property
    def explanation(self) -> tuple[str, ...]:
        """The sentences about cause and remedy; none if all ids are equal."""
        if self.equal:
            return ()
        if self.cause is None:
            if self.different_tokens > 1:
                return ("Cause unknown: no known mistake reproduces the first two differences.",)
            return ("Cause unknown: a single wrong token does not identify a mistake.",)
        part = f" of {self.explained} of the {self.different_tokens} differences"
        cause = f"Cause{'' if self.explained == self.different_tokens else part}: {self.cause}."
        return cause, f"To do: {self.remedy}."

    def __str__(self) -> str:
        return " ".join(self.sentences)

    @property
    def token_map(self) -> str:
        """A map of right and wrong tokens, as HTML; empty if all ids are equal."""
        if self.wrong is None or self.owner is None or self.segment_starts is None:
            return ""
        offsets = np.searchsorted(self.owner, np.arange(self.num_documents + 1))
        return html.token_map(self.wrong, offsets, self.segment_starts, ("right", "wrong"))

    def _repr_html_(self) -> str:
        """Show the sentences and the map of tokens in a notebook."""
        return html.paragraphs(self.sentences) + self.token_map


def first_difference(
    positions: PositionTable, wrong: Flags, owner: IntArray, index: IntArray, **fields: Any
) -> Diagnosis:
    """Build the diagnosis for tokens that differ.

    Args:
        positions: the table that they differ from.
        wrong: (tokens,) whether each token differs.
        owner: (tokens,) the document of each token.
        index: (tokens,) the index of each token in its document.
        fields: other fields of the diagnosis; they take precedence over those derived from the table.
    """
    first, count = int(wrong.argmax()), int(wrong.sum())
    counts = {"different_tokens": count, "different_documents": np.unique(owner[wrong]).size}
    if fields.get("cause") is not None:
        fields = {"explained": count, **fields}
    where = {"document": int(owner[first]), "token": int(index[first]), "wrong": wrong, "owner": owner}
    compared = {"scheme": positions.scheme, "num_tokens": wrong.size, "num_documents": positions.num_documents}
    return Diagnosis(**{"equal": False, **compared, **counts, **where, **fields})


def segment_starts(documents: SegmentTable | PositionTable) -> IntArray:
    """Return the (segments,) first token of each segment."""
    return (
        documents.offset if isinstance(documents, PositionTable) else np.cumsum(documents.lengths) - documents.lengths
    )


def fractions_of(positions: PositionTable, token: int) -> tuple[Fraction, ...]:
    """Return the exact ids of a token, one per axis."""
    numerators, denominators = positions.slice(token, token + 1).rationals()
    return tuple(Fraction(value, int(denominators[0])) for value in numerators[:, 0].tolist())


def _position(values: Sequence[Fraction | int | float]) -> str:
    words = [
        "unknown" if value != value else str(int(value)) if value == value // 1 else str(value) for value in values
    ]
    return words[0] if len(words) == 1 else f"({', '.join(words)})"


def diagnose(
    ids: npt.ArrayLike,
    documents: SegmentTable | PositionTable,
    scheme: str | Scheme | None = None,
    start: npt.ArrayLike = 0,
    *,
    attention_mask: npt.ArrayLike | None = None,
    side: Side = "right",
    tolerance: float = 0.0,
) -> Diagnosis:
    """Compare ids with a scheme, find the first token that differs, and name the mistake behind it.

    >>> from mmpos.segments import Grid, SegmentTable, Text
    >>> segments = SegmentTable.from_documents([[Text(1), Grid(1, 2), Text(1)]])
    >>> diagnose([[0, 2, 2, 4], [0, 3, 5, 7]], segments).got
    (2, 3)

    A cause is computed, not guessed: each known mistake is applied to these documents, and is named only if it
    reproduces the first two differences. A mistake that reproduces every received id is preferred.

    Args:
        ids: (axes, tokens) packed, (axes, batch, length) padded, or either without axes if all axes have the same ids;
            integers or floats, as a list, an array or a tensor on the host. A shape that fits both is read as packed
            unless attention_mask is passed. If the ids have one more row, (axes + 1, 1, tokens) or (axes + 1, batch,
            length), the first is the text row, from which Transformers reads the documents of a pack.
        documents: the documents of the ids; placement mistakes are found only for a SegmentTable.
        scheme: with a SegmentTable, a name or a scheme object; None means "rope-tie".
        start: with a SegmentTable, the id of each document's first token: one for all documents, or (documents,).
        attention_mask: (batch, length) of 0s and 1s; without it, padding is taken from the table, or else from side.
        side: "left" or "right".
        tolerance: how far an id may be from the exact one; 0 compares float64 values for equality.

    Raises:
        InvalidInputError: ids are not numbers, or their shape does not match the documents.
        UnsupportedError, LimitExceededError: as for place.
    """
    tolerance = finite("tolerance", tolerance, minimum=0)
    padded, segments, placed_by = _placed(documents, scheme, start)
    array = host_array("ids", ids)
    text_row = array.ndim == 3 and len(array) == padded.axes + 1
    by_default = segments is not None and scheme is None
    rows, mask = read_ids(array[1:] if text_row else array, padded, attention_mask, side, array.shape, by_default)
    positions = without_padding(padded)
    first_ids = per_document("start", start, padded.num_documents, minimum=INT32_MIN) if segments else starts(positions)
    received = np.broadcast_to(rows, (positions.axes, positions.num_tokens))
    case = Deviation(received, positions, first_ids, tolerance, segments, placed_by, mask)
    if case.wrong.any():
        return different(case, len(rows))
    if text_row:
        ((text,), _) = read_ids(array[:1], padded, attention_mask, side)
        if (text != case.index).any():
            return _different_text_row(case, text)
    return Diagnosis(True, positions.scheme, positions.num_tokens, positions.num_documents)


def _placed(
    documents: SegmentTable | PositionTable, scheme: str | Scheme | None, start: npt.ArrayLike
) -> tuple[PositionTable, SegmentTable | None, Scheme | None]:
    """Return the table with its padding, the segments without padding, and the scheme."""
    if isinstance(documents, PositionTable):
        for name, passed in (("scheme", scheme is not None), ("start", np.ndim(start) or start != 0)):
            if passed:
                raise InvalidInputError(f"{name} cannot be combined with a PositionTable, which is already placed")
        return documents, None, None
    if not isinstance(documents, SegmentTable):
        raise InvalidInputError(f"documents: got {type(documents).__name__}, want a SegmentTable or a PositionTable")
    chosen = get_scheme("rope-tie" if scheme is None else scheme)
    keep = documents.kind != PAD
    segments = documents
    if not keep.all():
        names = ("seconds_per_frame", "row_separator", "extra_tokens", "first_frame")
        arrays = [getattr(documents, name) for name in names]
        segments = SegmentTable(
            documents.kind[keep],
            documents.extents[:, keep],
            np.concatenate([[0], np.cumsum(keep)])[documents.segment_offsets],
            *(None if array is None else array[..., keep] for array in arrays),
        )
    return place(documents, chosen, start), segments, chosen


def without_padding(positions: PositionTable) -> PositionTable:
    """Return the table without its padding."""
    keep = ~positions.is_padding
    if keep.all():
        return positions
    starts = positions.offset[keep]
    return positions.take(starts, starts + positions.segment_lengths[keep])


def starts(positions: PositionTable) -> IntArray:
    """Return the (documents,) first ids, 0 for a document without a next position."""
    header = positions.documents
    return np.where(positions.resumable, header[NEXT_POSITION] - header[DELTA] - positions.lengths, 0)


def different(case: Deviation, rows: int) -> Diagnosis:
    """Diagnose ids that differ, and find the cause; rows is the number of rows of the received ids."""
    token = case.first
    return first_difference(
        case.positions,
        case.wrong,
        case.document,
        case.index,
        what=case.positions.describe(token, case.segments),
        axis=int((~case.near(case.want[:, token : token + 1].T, case.got[:, token : token + 1].T)).argmax()),
        got=tuple(case.received[:rows, token].tolist()),
        want=fractions_of(case.positions, token),
        segment_starts=segment_starts(case.segments or case.positions),
        **find_cause(case),
    )


def _different_text_row(case: Deviation, text: Array) -> Diagnosis:
    """Diagnose a text row that does not count the tokens of each document, when all other rows agree."""
    wrong = text != case.index
    token, cause = int(wrong.argmax()), None
    repeated = next((axis for axis, row in enumerate(case.received) if (text == row).all()), None)
    if (text == np.arange(text.size)).all():
        cause = "the text row is not reset at each document, so Transformers reads the pack as one document"
    elif repeated is not None:
        cause = (
            f"the text row repeats axis {repeated}, and Transformers starts a new document wherever that axis does not "
            "increase by 1"
        )
    return first_difference(
        case.positions,
        wrong,
        case.document,
        case.index,
        scheme=f"the text row of {case.positions.scheme}",
        what=case.positions.describe(token, case.segments),
        axis=0,
        got=(text[token].item(),),
        want=(Fraction(int(case.index[token])),),
        segment_starts=segment_starts(case.segments or case.positions),
        cause=cause,
        remedy=cause and "count the tokens of each document from 0, as position_ids(text_row=True) does",
    )


def find_cause(case: Deviation) -> dict[str, Any]:
    """Return the Diagnosis fields cause, remedy and explained, or an empty dict if no mistake explains the ids.

    The first mistake that reproduces every received id is chosen, or else the one that explains the most tokens.
    Mistakes are fitted to the first difference, which therefore proves nothing: a mistake must reproduce the second
    difference as well, and agree with more tokens than the scheme does, not counting those that it was fitted to.
    """
    best, most = dict[str, Any](), 0
    wrong = np.flatnonzero(case.wrong)
    right = case.wrong.size - wrong.size
    for mistake in MISTAKES:
        for guess in mistake.guesses(case):
            if guess.ids is None or not _agrees(case, guess.ids, wrong[:2]).all():
                continue
            agrees = _agrees(case, guess.ids, slice(None))
            beyond = int(agrees.sum()) - right - guess.evidence
            if beyond > 0 and (beyond > most or agrees.all()):
                explained = int((agrees & case.wrong).sum())
                best = {"cause": guess.cause, "remedy": mistake.remedy, "explained": explained}
                most = beyond
                if agrees.all():
                    return best
    return best


def _agrees(case: Deviation, ids: Array, tokens: slice | IntArray) -> Flags:
    """Return (tokens,) flags: whether each token has the ids that a mistake produces."""
    return case.near(case.rounded(ids[..., tokens]), case.got[:, tokens])
