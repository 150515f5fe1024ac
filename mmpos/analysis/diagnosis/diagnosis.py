"""Compare the ids of a pipeline with a scheme, find the first difference, and name the mistake that explains it."""

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
        equal: whether all ids that were compared agree; the fields after num_documents are then empty.
        scheme: name of the scheme, with the parameters that are not the defaults.
        num_tokens: tokens that were compared, padding left out.
        num_documents: their documents.
        different_tokens: tokens of which an id differs.
        different_documents: documents with such a token.
        document: the first document with such a token.
        token: its first such token, counted from the document's first.
        what: what this token is, such as "row 0, column 1 of a grid of width 3 (segment 1)".
        axis: the first axis on which it differs.
        got: its ids as they came, one per row of the ids; none where there is no such token, NaN for an id that is
            unknown.
        want: its ids in the scheme, one per axis, exactly; likewise.
        cause: the mistake that explains the difference, if one is known that does.
        remedy: what to do about that mistake.
        explained: how many of the different tokens have exactly the ids that the mistake gives.
        unknown_tokens: tokens of which an id is unknown and was not compared, where ids are read from keys.
        wrong: (tokens,) which tokens differ, document after document; None where all are equal.
        owner: (tokens,) the document of each.
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

    @property
    def sentences(self) -> tuple[str, ...]:
        """The result in words: all equal; or the first difference, the count, the cause and the remedy."""
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
        """The sentences about cause and remedy; none where all is equal."""
        if self.equal:
            return ()
        if self.cause is None:
            many = self.different_tokens > 1
            why = "no known mistake gives the first two differences" if many else "one token alone proves no mistake"
            return (f"Cause unknown: {why}.",)
        part = f" (so {self.explained} of the {self.different_tokens})"
        cause = f"Cause{'' if self.explained == self.different_tokens else part}: {self.cause}."
        return cause, f"To do: {self.remedy}."

    def __str__(self) -> str:
        return " ".join(self.sentences)

    @property
    def token_map(self) -> str:
        """A map of right and wrong tokens, as HTML; empty where all are equal."""
        if self.wrong is None or self.owner is None:
            return ""
        offsets = np.searchsorted(self.owner, np.arange(self.num_documents + 1))
        return html.token_map(self.wrong, offsets, ("right", "wrong"))

    def _repr_html_(self) -> str:
        """Show the sentences and the map of tokens in a notebook."""
        return html.paragraphs(self.sentences) + self.token_map


def first_difference(
    positions: PositionTable, wrong: Flags, owner: IntArray, index: IntArray, **fields: Any
) -> Diagnosis:
    """Make the diagnosis of tokens that differ.

    Args:
        positions: what they differ from.
        wrong: (tokens,) which do.
        owner: (tokens,) the document of each.
        index: (tokens,) its place there.
        fields: of the first difference, and others than those of the positions.
    """
    first, count = int(wrong.argmax()), int(wrong.sum())
    counts = {"different_tokens": count, "different_documents": np.unique(owner[wrong]).size}
    if fields.get("cause") is not None:
        fields = {"explained": count, **fields}
    where = {"document": int(owner[first]), "token": int(index[first]), "wrong": wrong, "owner": owner}
    whole = {"scheme": positions.scheme, "num_tokens": wrong.size, "num_documents": positions.num_documents}
    return Diagnosis(**{"equal": False, **whole, **counts, **where, **fields})


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

    A cause is computed and not guessed: each known mistake is made on these documents, and is named only if it gives
    the first two differences; the first that gives every id that came is preferred.

    Args:
        ids: (axes, tokens) packed, (axes, batch, length) padded, or either without axes, which stands for all
            axes; integers or floats, a list, an array or a tensor on the host. Where a shape can be both,
            it is packed, unless it comes with an attention_mask. With one row more, (axes + 1, 1, tokens) or
            (axes + 1, batch, length), the first is the text row, from which Transformers reads the documents of a pack.
        documents: what the ids are of; mistakes in placing are found only for a SegmentTable.
        scheme: for a SegmentTable, a name or a scheme object; "rope-tie" if not given.
        start: for a SegmentTable, id of each document's first token, one or (documents,).
        attention_mask: (batch, length) of 0 and 1; else padding is where the table has it, or at the side.
        side: "left" or "right".
        tolerance: how far an id may be from the exact one; 0 is exact up to float64.

    Raises:
        InvalidInputError: ids that are no numbers, or of another shape than the documents.
        UnsupportedError, LimitExceededError: as for place.
    """
    tolerance = finite("tolerance", tolerance, minimum=0)
    whole, segments, how = _placed(documents, scheme, start)
    array = host_array("ids", ids)
    text_row = array.ndim == 3 and len(array) == whole.axes + 1
    rows, mask = read_ids(array[1:] if text_row else array, whole, attention_mask, side, array.shape)
    positions = without_padding(whole)
    first_ids = per_document("start", start, whole.num_documents, minimum=INT32_MIN) if segments else starts(positions)
    came = np.broadcast_to(rows, (positions.axes, positions.num_tokens))
    case = Deviation(came, positions, first_ids, tolerance, segments, how, mask)
    if case.wrong.any():
        return different(case, len(rows))
    if text_row:
        ((text,), _) = read_ids(array[:1], whole, attention_mask, side)
        if (text != case.index).any():
            return _different_text_row(case, text)
    return Diagnosis(True, positions.scheme, positions.num_tokens, positions.num_documents)


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
        seconds, separator, extra = documents.seconds_per_frame, documents.row_separator, documents.extra_tokens
        segments = SegmentTable(
            documents.kind[keep],
            documents.extents[:, keep],
            np.concatenate([[0], np.cumsum(keep)])[documents.segment_offsets],
            None if seconds is None else seconds[:, keep],
            None if separator is None else separator[keep],
            None if extra is None else extra[keep],
        )
    return place(documents, how, start), segments, how


def without_padding(positions: PositionTable) -> PositionTable:
    """The table without its padding."""
    keep = ~positions.is_padding
    if keep.all():
        return positions
    starts = positions.offset[keep]
    return positions.take(starts, starts + positions.segment_lengths[keep])


def starts(positions: PositionTable) -> IntArray:
    """(documents,) first ids, 0 where the scheme has no cursor to tell them by."""
    header = positions.documents
    return np.where(positions.resumable, header[NEXT_POSITION] - header[DELTA] - positions.lengths, 0)


def different(case: Deviation, rows: int) -> Diagnosis:
    """The first difference between tokens, and its cause; rows are those of the ids as they came."""
    token = case.first
    return first_difference(
        case.positions,
        case.wrong,
        case.document,
        case.index,
        what=case.positions.describe(token, case.segments),
        axis=int((~case.near(case.want[:, token : token + 1].T, case.got[:, token : token + 1].T)).argmax()),
        got=tuple(case.came[:rows, token].tolist()),
        want=fractions_of(case.positions, token),
        **find_cause(case),
    )


def _different_text_row(case: Deviation, text: Array) -> Diagnosis:
    """The first difference of a text row from tokens counted in their documents, where all other rows agree."""
    wrong = text != case.index
    token, cause = int(wrong.argmax()), None
    alike = next((axis for axis, row in enumerate(case.came) if (text == row).all()), None)
    if (text == np.arange(text.size)).all():
        cause = "the text row counts through the pack, and documents that follow on are one to Transformers"
    elif alike is not None:
        cause = (
            f"the text row repeats axis {alike}, and Transformers begins a new document where that does not count on"
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
        cause=cause,
        remedy=cause and "count the tokens of each document from 0, as position_ids(text_row=True) does",
    )


def find_cause(case: Deviation) -> dict[str, Any]:
    """The fields cause, remedy and explained of a Diagnosis, by the first mistake that gives every id that came; else
    by the one that explains most. None where there is no such mistake.

    A mistake is chosen by the first difference, so that one proves nothing: it must give the second as well, and agree
    with more tokens than the scheme does, by more than those that it was made to fit.
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
    """(tokens,) whether each token has the ids that a mistake gives."""
    return case.near(case.held(ids[..., tokens]), case.got[:, tokens])
