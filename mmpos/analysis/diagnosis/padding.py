"""Mistakes of padded batches: padding elsewhere than thought, or counted as tokens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mmpos.analysis.diagnosis.case import Case, Guess
from mmpos.positions.rows import FIRST_TOKEN


def other_side(case: Case) -> Iterator[Guess]:
    """Ids padded on the other side than token ids are."""
    if case.column is None:
        return
    lengths = case.positions.lengths
    before = (case.column - case.index)[case.positions.documents[FIRST_TOKEN]]
    left = np.where(before > 0, 0, case.length - lengths)
    index = case.column - left[case.document]
    inside = (index >= 0) & (index < lengths[case.document])
    ids = case.want[:, np.where(inside, case.begin + index, 0)]
    for outside in (0, 1):  # what padding has in most batches
        yield Guess("ids are padded on the other side than the tokens", np.where(inside, ids, outside))


def counted(case: Case) -> Iterator[Guess]:
    """Ids that began with the padding before the first token."""
    if case.column is None:
        return
    ids = case.placed(start=case.start + (case.column - case.index)[case.positions.documents[FIRST_TOKEN]])
    if ids is not None:
        yield Guess("left padding is counted: ids begin with it, not with the first real token", ids)
