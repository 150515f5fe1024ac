"""Mistakes between documents: ids not reset, or reset inside one; deltas forgotten, or of another document."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mmpos.analysis.diagnosis.case import Case, Guess
from mmpos.positions.rows import FIRST_TOKEN
from mmpos.support.checks import IntArray


def not_reset(case: Case) -> Iterator[Guess]:
    """Packed documents that go on from the one before."""
    if case.positions.num_documents < 2:
        return
    words = "ids are not reset: documents go on {} of the one before"
    grown: list[tuple[str, IntArray]] = [("at the number of tokens", case.positions.lengths)]
    if case.deltas is not None:
        grown.insert(0, ("at the next position", case.positions.lengths + case.deltas))
    if case.positions.lengths.all():
        highest = np.maximum.reduceat(case.want.max(axis=0), case.positions.documents[FIRST_TOKEN])
        grown.append(("at the maximum plus one", np.floor(highest).astype(np.int64) + 1 - case.start))
    for where, ids in grown:
        before = np.cumsum(ids) - ids
        placed = case.placed(start=case.start + before)
        found = case.want + before[case.document] if placed is None else placed
        yield Guess(words.format(where), found)


def reset(case: Case) -> Iterator[Guess]:
    """Ids that begin anew inside a document."""
    start = case.start[case.document]
    again = (case.got == start).all(axis=0) & (case.index > 0) & case.wrong
    if not again[case.first]:
        return
    token = np.arange(again.size)
    since = np.maximum.accumulate(np.where(again | (case.index == 0), token, 0))
    shift = np.where(again[since], start - case.want[:, since], 0)
    words = "ids are reset inside a document: they begin anew at this token"
    yield Guess(words, case.want + shift, evidence=int(again.sum()))


def delta_forgotten(case: Case) -> Iterator[Guess]:
    """Token indexes from the first difference on, as when decoding goes on at the number of tokens."""
    delta = case.want[0, case.first] - case.counted[case.first]
    words = f"from the first difference on ids are the token's index: the delta {delta:g} is forgotten"
    yield Guess(words, np.where(case.late, case.counted, case.want))


def delta_of_another(case: Case) -> Iterator[Guess]:
    """Token index plus the delta of another document, from the first difference on."""
    if case.deltas is None:
        return
    used = case.got[0, case.first] - case.counted[case.first]
    own = int(case.document[case.first])
    for other in np.flatnonzero(case.deltas == used)[:1].tolist():
        words = f"the delta {used:g} of documents[{other}] is used for documents[{own}], from the first difference on"
        yield Guess(words, np.where(case.late, case.counted + used, case.want))
