"""What follows from a placed table, as engines ask for it: chunks, ranges, next tokens, shards and padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from mmpos.positions.place import place
from mmpos.positions.table import PositionTable
from mmpos.segments.table import SegmentTable
from mmpos_bench.cases import Case, Contestant, Role
from mmpos_bench.proofs import equal
from mmpos_bench.reference import loop_ids
from mmpos_bench.workloads import Document, counts

__all__ = ["PADDED", "VIEWS", "padded", "views"]

VIEWS, PADDED = "tables from a table", "padded ids and mask"

_SCHEME, _RANKS, _PADDING, _RANGES, _RANGE = "rope-tie", 2, 64, 16, 100

Array = npt.NDArray[Any]
Question = tuple[str, Callable[[], PositionTable], Array]


def views(title: str, documents: list[Document]) -> Case:
    """Tables from a table, against a copy of it."""
    table, ids = place(SegmentTable.from_documents(documents), _SCHEME), loop_ids(documents, _SCHEME)
    contestants = [Contestant("copy of the table", table.table.copy, Role.LIMIT)]
    for name, call, want in _questions(table, ids, len(documents)):
        # Parts, since each is another question: none of them is faster than another.
        contestants.append(Contestant(name, call, Role.PART, partial(_proved, call, want)))
    work = counts(documents) | {"segments": table.num_segments, "bytes": table.table.nbytes}
    return Case(VIEWS, title, tuple(contestants), work, "segments")


def _proved(call: Callable[[], PositionTable], want: Array) -> None:
    equal(call().dense(), want)


def _questions(table: PositionTable, ids: Array, documents: int) -> Iterator[Question]:
    """Name, call and ids wanted; documents are of equal length."""
    tokens = table.num_tokens
    length, begin, stop = tokens // documents, tokens // 4, tokens // 2
    per_document = ids.reshape(len(ids), documents, length)
    yield "slice of a quarter", lambda: table.slice(begin, stop), ids[:, begin:stop]
    starts = np.arange(_RANGES) * (tokens // _RANGES)
    stops = starts + _RANGE
    taken = np.concatenate([ids[:, a:b] for a, b in zip(starts, stops, strict=True)], axis=1)
    yield f"take of {_RANGES} ranges of {_RANGE}", lambda: table.take(starts, stops), taken
    # The ids of a document end in text, so that the next one follows on all axes.
    yield "decode of a token each", table.decode, per_document[:, :, -1] + 1
    block = length // (2 * _RANKS)
    zigzag = np.concatenate([per_document[:, :, :block], per_document[:, :, -block:]], axis=2)
    yield f"shard, 1 of {_RANKS}", lambda: table.shard(0, _RANKS), zigzag.reshape(len(ids), -1)
    padded = np.pad(per_document, ((0, 0), (0, 0), (0, _PADDING))).reshape(len(ids), -1)
    yield f"pad by {_PADDING} tokens each", lambda: table.pad(length + _PADDING), padded


def padded(title: str, documents: list[Document]) -> Case:
    """The ids and the mask of a padded batch, against filling both."""
    table, ids = place(SegmentTable.from_documents(documents), _SCHEME), loop_ids(documents, _SCHEME)
    shape = (len(ids), len(documents), table.max_seqlen + _PADDING)
    length = shape[2]
    want = np.pad(ids.reshape(*shape[:2], -1), ((0, 0), (0, 0), (_PADDING, 0)))
    mask = np.pad(np.ones((shape[1], length - _PADDING), np.int64), ((0, 0), (_PADDING, 0)))

    def prove() -> None:
        got_ids, got_mask = table.padded(length, "left")
        equal(got_ids, want)
        equal(got_mask, mask)

    def limit() -> None:
        np.full(shape, 1, np.int32)
        np.full(shape[1:], 1, np.int64)

    contestants = (
        Contestant("fill of new ids and mask", limit, Role.LIMIT),
        Contestant("padded()", lambda: table.padded(length, "left"), proof=prove),
    )
    work = counts(documents) | {"bytes": want.size * 4 + mask.nbytes}
    return Case(PADDED, title, contestants, work)
