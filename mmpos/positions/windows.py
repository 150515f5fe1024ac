"""Windows of documents, and the tokens after their ends: pieces of a table, and text at its next positions."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mmpos.errors import LimitExceededError
from mmpos.positions import ranges
from mmpos.positions.columns import FIRST_TOKEN, NEXT_POSITION, Columns
from mmpos.support.checks import INT32_MAX, IntArray, first_bad, int_array, per_document

Pieces = tuple[IntArray, IntArray, IntArray]
"""What ``ranges.assemble`` takes: columns, the document of each, and the documents' next positions and deltas."""


def window(table: Columns, documents: npt.ArrayLike, starts: npt.ArrayLike, lengths: npt.ArrayLike) -> Pieces:
    """One window of tokens per entry, as a document of its own; see PositionTable.window."""
    documents = int_array("documents", documents, (None,))
    first_bad("documents", documents, minimum=0, maximum=table.num_documents - 1)
    starts = int_array("starts", starts, (documents.size,))
    first_bad("starts", starts, minimum=0, maximum=INT32_MAX)
    lengths = int_array("lengths", lengths, (documents.size,))
    first_bad("lengths", lengths, minimum=0, maximum=INT32_MAX)
    first, known = table.documents[FIRST_TOKEN][documents], table.lengths[documents]
    stops = starts + lengths
    columns, _, owner = ranges.cut(
        table.table, table.num_tokens, first + np.minimum(starts, known), first + np.minimum(stops, known)
    )
    header = table.documents[NEXT_POSITION:, documents]
    beyond = np.flatnonzero((stops > known) & (lengths > 0))
    if beyond.size:
        skipped = np.maximum(starts - known, 0)[beyond]
        begin = table.next_positions[documents[beyond]] + skipped
        count = np.minimum(lengths, stops - known)[beyond]
        header[0, beyond] = begin + count
        _check_ids(begin + count - 1, documents[beyond])
        columns = np.concatenate([columns, ranges.text(table.axes, begin, count)], axis=1)
        owner = np.concatenate([owner, beyond])
        order = np.argsort(owner, kind="stable")
        columns, owner = columns[:, order], owner[order]
    return columns, owner, header


def decode(table: Columns, steps: npt.ArrayLike) -> Pieces:
    """The next tokens of every document; see PositionTable.decode."""
    steps = per_document("steps", steps, table.num_documents, minimum=0)
    grows = np.flatnonzero(steps)
    header = table.documents[NEXT_POSITION:].copy()
    if grows.size:
        header[0] = table.next_positions + steps
        _check_ids(header[0, grows] - 1, grows)
    count = steps[grows]
    return ranges.text(table.axes, header[0, grows] - count, count), grows, header


def _check_ids(last: IntArray, documents: IntArray) -> None:
    if last.max() > INT32_MAX:
        i = int(last.argmax())
        raise LimitExceededError(f"documents[{documents[i]}]: got id {last[i]}, want at most 2**31 - 1")
