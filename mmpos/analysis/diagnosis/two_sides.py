"""Comparison of the positions of two sides, such as a rollout and its trainer."""

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
"""A table, ids, or a mapping from argument names of ``mmpos.fingerprint`` to values."""

_ARGUMENTS = ("position_ids", "attention_mask", "cu_seqlens", "denominators")


def same_positions(a: Positions, b: Positions) -> Diagnosis:
    """Compare the positions of two sides, find the first difference, and name the mistake behind it.

    Positions are equal if their fingerprints are (``mmpos.fingerprint``). Otherwise the diagnosis contains document,
    token, axis, the ids of ``a`` as got, the ids of ``b`` as want, and the cause: documents in a different order,
    documents of different lengths, or a mistake that ``mmpos.diagnose`` finds without a scheme.

    >>> a = {"position_ids": [[0, 0, 1, 2]], "attention_mask": [[0, 1, 1, 1]]}
    >>> same_positions(a, [0, 1, 2]).equal
    True
    >>> print(same_positions([1, 2, 3], [0, 1, 2]).sentences[0])
    documents[0], token 0, is one of 3 tokens: got 1, want 0 in b.

    Args:
        a: the positions to check: a PositionTable, ids of a shape that ``mmpos.fingerprint`` accepts, or a mapping with
            its arguments position_ids, attention_mask, cu_seqlens and denominators.
        b: the reference, of any of the same types; only a PositionTable lets the diagnosis describe the token in words.

    Raises:
        InvalidInputError: as for ``mmpos.fingerprint``; or the numbers of documents or axes differ.
    """
    got, want = _read("a", a), _read("b", b)
    for noun, count, wanted in (
        ("document", got.lengths.size, want.lengths.size),
        ("axis", len(got.ids), want.positions.axes),
    ):
        if count != wanted:
            longer = a if count > wanted else b
            one_row_more = noun == "axis" and abs(count - wanted) == 1 and not isinstance(longer, PositionTable)
            hint = "; Transformers' text row is not an axis: pass position_ids[1:]" if one_row_more else ""
            raise InvalidInputError(f"a: got {counted(count, noun)}, want {wanted}, as in b{hint}")
    wrong = [d for d, (one, other) in enumerate(zip(got.fingerprints, want.fingerprints, strict=True)) if one != other]
    if not wrong:
        return Diagnosis(True, want.label, want.positions.num_tokens, want.positions.num_documents)
    if (got.lengths != want.lengths).any():
        diagnosis = _of_other_lengths(got, want)
    else:
        case = Deviation(got.ids, want.positions, want.starts)
        if not case.wrong.any():
            raise InvalidInputError(
                f"a: the fractions of documents[{wrong[0]}] differ from those of b, but not in float64"
            )
        diagnosis = different(case, rows=len(got.ids))
    if not isinstance(b, PositionTable) and diagnosis.want:
        length = want.lengths[diagnosis.document or 0]
        diagnosis = replace(diagnosis, what=f"one of {counted(int(length), 'token')}", segment_starts=None)
    if sorted(got.fingerprints) != sorted(want.fingerprints):
        return diagnosis
    other = want.fingerprints.index(got.fingerprints[wrong[0]])
    return replace(
        diagnosis,
        cause=f"documents are in another order: documents[{wrong[0]}] has the ids of documents[{other}]",
        remedy="match documents by key, or put both sides in the same order",
        explained=diagnosis.different_tokens,
    )


@dataclass(frozen=True, eq=False)
class _Side:
    """The positions of one side, without padding.

    Args:
        ids: (axes, tokens) received ids.
        lengths: (documents,) number of tokens in each document.
        fingerprints: one for each document.
        label: the name of the positions in a diagnosis.
        positions: the position table.
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
            raise InvalidInputError(f"{name}: got the arguments {got}, want position_ids and any of {_ARGUMENTS[1:]}")
    with naming(name, joint="."):
        exact = read_ids(**arguments)
        ids = exact.numerators if exact.denominators is None else exact.numerators / exact.denominators
        positions = table_of_ids(exact.numerators, exact.denominators, exact.lengths, "b")
    first = np.zeros(positions.num_documents, np.int64)
    full = positions.lengths > 0
    first[full] = np.floor(ids[0, positions.documents[FIRST_TOKEN, full]])
    return _Side(ids, positions.lengths, exact.fingerprints(), name, positions, first)


def _of_other_lengths(got: _Side, want: _Side) -> Diagnosis:
    """Diagnose the first document with a different number of tokens."""
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
        remedy="pass the same tokens on both sides, with a mask of the padding",
    )
