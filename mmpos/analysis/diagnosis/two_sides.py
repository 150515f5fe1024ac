"""Compare the positions of two sides, as of a rollout and its trainer, and name the mistake between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from mmpos.analysis.diagnosis.deviation import Deviation
from mmpos.analysis.diagnosis.diagnosis import (
    Diagnosis,
    different,
    first_difference,
    fractions_of,
    starts,
    without_padding,
)
from mmpos.analysis.diagnosis.shapes import table_of_ids
from mmpos.analysis.fingerprint import read_ids
from mmpos.errors import InvalidInputError
from mmpos.positions.table import PositionTable
from mmpos.positions.table_rows import FIRST_TOKEN
from mmpos.support.checks import Array, IntArray, counted, naming
from mmpos.support.ragged import ragged_arange

__all__ = ["Positions", "same_positions"]

Positions: TypeAlias = PositionTable | npt.ArrayLike | Mapping[str, Any]
"""A table, ids, or a mapping with the arguments of ``mmpos.fingerprint`` by their names."""

_ARGUMENTS = ("position_ids", "attention_mask", "cu_seqlens", "denominators")


def same_positions(a: Positions, b: Positions) -> Diagnosis:
    """Compare the positions of documents, and name the first difference and the mistake behind it.

    They are equal where ``mmpos.fingerprint`` gives equal ones. Otherwise the diagnosis has document, token, axis,
    the ids of a as got, those of b as want, and the cause: documents in another order or of other lengths, or a mistake
    that ``mmpos.diagnose`` finds without a scheme.

    >>> a = {"position_ids": [[0, 0, 1, 2]], "attention_mask": [[0, 1, 1, 1]]}
    >>> same_positions(a, [0, 1, 2]).equal
    True
    >>> print(same_positions([1, 2, 3], [0, 1, 2]).sentences[0])
    documents[0], token 0, is one of 3 tokens: got 1, want 0 in b.

    Args:
        a: the positions in doubt: a PositionTable, ids of a shape that ``mmpos.fingerprint`` takes, or a mapping with
            its arguments position_ids, attention_mask, cu_seqlens and denominators.
        b: those that they should be, likewise; a table says in words where the first difference lies.

    Raises:
        InvalidInputError: as for ``mmpos.fingerprint``; other numbers of documents or axes.
    """
    got, want = _read("a", a), _read("b", b)
    for noun, count, wanted in (
        ("document", got.lengths.size, want.lengths.size),
        ("axis", len(got.ids), want.positions.axes),
    ):
        if count != wanted:
            longer = a if count > wanted else b
            one_row_more = noun == "axis" and abs(count - wanted) == 1 and not isinstance(longer, PositionTable)
            hint = "; Transformers' text row is no axis: leave it out, as position_ids[1:]" if one_row_more else ""
            raise InvalidInputError(f"a: got {counted(count, noun)}, want {wanted}, as b has{hint}")
    wrong = [d for d, (one, other) in enumerate(zip(got.fingerprints, want.fingerprints, strict=True)) if one != other]
    if not wrong:
        return Diagnosis(True, want.label, want.positions.num_tokens, want.positions.num_documents)
    if (got.lengths != want.lengths).any():
        diagnosis = _of_other_lengths(got, want)
    else:
        case = Deviation(got.ids, want.positions, want.starts)
        if not case.wrong.any():
            raise InvalidInputError(
                f"a: got fractions in documents[{wrong[0]}] that float64 cannot tell from b's, want others"
            )
        diagnosis = different(case, rows=len(got.ids))
    if not isinstance(b, PositionTable) and diagnosis.want:
        length = want.lengths[diagnosis.document or 0]
        diagnosis = replace(diagnosis, what=f"one of {counted(int(length), 'token')}")
    if sorted(got.fingerprints) != sorted(want.fingerprints):
        return diagnosis
    other = want.fingerprints.index(got.fingerprints[wrong[0]])
    return replace(
        diagnosis,
        cause=f"documents stand in another order: documents[{wrong[0]}] has the ids of documents[{other}]",
        remedy="compare documents by their keys, or put both sides in one order",
        explained=diagnosis.different_tokens,
    )


@dataclass(frozen=True, eq=False)
class _Side:
    """The positions of one side, padding left out.

    Args:
        ids: (axes, tokens) ids as they came.
        lengths: (documents,) tokens of each document.
        fingerprints: those of the documents.
        label: what a diagnosis calls the positions.
        positions: the table of them.
        starts: (documents,) first id of each document.
    """

    ids: Array
    lengths: IntArray
    fingerprints: list[str]
    label: str
    positions: PositionTable
    starts: IntArray


def _read(name: str, side: Positions) -> _Side:
    if isinstance(side, PositionTable):
        positions = without_padding(side)
        prints, first = read_ids(positions).fingerprints(), starts(positions)
        return _Side(positions.dense(), positions.lengths, prints, positions.scheme, positions, first)
    arguments: dict[str, Any] = {"position_ids": side}
    if isinstance(side, Mapping):
        arguments = dict(side)
        if "position_ids" not in arguments or not arguments.keys() <= set(_ARGUMENTS):
            got = ", ".join(map(str, arguments)) or "none"
            raise InvalidInputError(f"{name}: got the arguments {got}, want position_ids, and of {_ARGUMENTS[1:]}")
    with naming(name, joint="."):
        exact = read_ids(**arguments)
        ids = exact.numerators if exact.denominators is None else exact.numerators / exact.denominators
        positions = table_of_ids(exact.numerators, exact.denominators, exact.lengths, "b")
    first = np.zeros(positions.num_documents, np.int64)
    full = positions.lengths > 0
    first[full] = np.floor(ids[0, positions.documents[FIRST_TOKEN, full]])
    return _Side(ids, positions.lengths, exact.fingerprints(), name, positions, first)


def _of_other_lengths(got: _Side, want: _Side) -> Diagnosis:
    """The first difference of the first document that has another number of tokens than it should."""
    first = int((got.lengths != want.lengths).argmax())
    most = np.maximum(got.lengths, want.lengths)
    document, index = ragged_arange(most)
    wrong = (index >= got.lengths[document]) | (index >= want.lengths[document])
    mine, theirs = (index + (side.lengths.cumsum() - side.lengths)[document] for side in (got, want))
    both = np.flatnonzero(~wrong)
    unlike = got.ids[:, mine[both]] != want.positions.dense()[:, theirs[both]]
    wrong[both] = unlike.any(axis=0)
    at = int((wrong & (document == first)).argmax())
    ids: tuple[int | float, ...] = ()
    exact: tuple[Fraction, ...] = ()
    what = "one token too many"
    if index[at] < got.lengths[first]:
        ids = tuple(got.ids[:, mine[at]].tolist())
    if index[at] < want.lengths[first]:
        exact, what = fractions_of(want.positions, int(theirs[at])), want.positions.describe(int(theirs[at]))
    axis = next((axis for axis, (one, other) in enumerate(zip(ids, exact, strict=False)) if one != float(other)), None)
    tokens = f"{counted(int(got.lengths[first]), 'token')} and should have {want.lengths[first]}"
    return first_difference(
        want.positions,
        wrong,
        document,
        index,
        scheme=want.label,
        document=first,
        token=int(index[at]),
        what=what,
        axis=axis,
        got=ids,
        want=exact,
        cause=f"documents[{first}] has {tokens}",
        remedy="give both sides the same tokens, and a mask of those that are padding",
    )
