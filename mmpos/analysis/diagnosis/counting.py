"""Mistakes of counting: token indexes for ids, another start, ids of the neighbour, a constant too much."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mmpos.analysis.diagnosis.case import Case, Guess
from mmpos.support.checks import INT32_MAX


def token_index(case: Case) -> Iterator[Guess]:
    """1-D ids, of the document, of the whole batch, or of the padded row."""
    words = "ids are the token's index{}: 1-D ids, which know no images"
    counts = {
        " in its document": case.index,
        " in the whole batch, not restarted at a document": np.arange(case.index.size),
    }
    if case.column is not None:
        counts[" in its padded row"] = case.column
    for where, count in counts.items():
        for first in sorted({0, 1, *case.start[:1].tolist()}):
            yield Guess(words.format(where), count + first)


def start(case: Case) -> Iterator[Guess]:
    """Documents that begin at another id."""
    if case.offset is None or not case.offset.is_integer() or abs(case.offset) > 2 * INT32_MAX:
        return  # no start is so far from another
    first = case.start + int(case.offset)
    ids = case.placed(start=first)
    if case.segments is None:
        ids = case.want + case.offset
    if ids is not None:
        document = case.document[case.first]
        yield Guess(f"documents start at {first[document]}, not at {case.start[document]}", ids)


def one_token_off(case: Case) -> Iterator[Guess]:
    """Every token has the ids of its neighbour, as if ids had been shifted like labels."""
    token = np.arange(case.index.size)
    for step, neighbour in ((1, "after"), (-1, "before")):
        words = f"every token has the ids of the one {neighbour} it"
        moved = case.index + step
        inside = (moved >= 0) & (moved < case.positions.lengths[case.document])
        shifted = case.want[:, np.where(inside, token + step, token)]
        yield Guess(words, np.where(inside, shifted, 0))
        yield Guess(words, np.roll(case.want, -step, axis=1))
        if step > 0 and case.deltas is not None:
            following = case.positions.next_positions[case.document]
            yield Guess(words, np.where(inside, shifted, following))


def constant(case: Case) -> Iterator[Guess]:
    """From the first difference to the end of the document, the same too much or too little."""
    if not case.offset:
        return
    amount, way = f"{abs(case.offset):g}", "large" if case.offset > 0 else "small"
    words = f"from the first difference to the end of the document, ids are {amount} too {way}"
    yield Guess(words, np.where(case.late, case.want + case.offset, case.want))
