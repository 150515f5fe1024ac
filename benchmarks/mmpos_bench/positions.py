"""Positions: dense ids from lists, spans and token ids, and how the time to compute them scales with size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from mmpos.positions.place import place
from mmpos.positions.table import PositionTable
from mmpos.segments.kinds import Grid, Text
from mmpos.segments.placeholders import Placeholders
from mmpos.segments.table import GRID, SegmentTable
from mmpos.support.checks import Array, IntArray, counted
from mmpos_bench.peers.positions import engine_loop, load_rope_index
from mmpos_bench.suites import Comparison, Lineup, Role, SuiteOptions, giving, limit
from mmpos_bench.timing import Budget
from mmpos_bench.workloads import SMALL, Document, counts, loop_ids, tokens_of, workload

LineUp = Callable[[list[Document], SuiteOptions], Lineup]
Derive = Callable[[PositionTable], PositionTable | tuple[Array, IntArray]]

_TEXT, _IMAGE, _MERGE = 1, 7, 2  # token ids; patches merged along each side


def cases(options: SuiteOptions) -> Iterator[Comparison]:
    """Yield single requests and operations on their tables, then requests of growing size."""
    groups: list[tuple[str, LineUp]] = [
        ("small, from lists to dense ids", from_lists),
        ("small, from token ids to dense ids", from_ids),
    ]
    for group, line_up in groups:
        yield from (Comparison(group, name, partial(line_up, documents, options)) for name, documents in SMALL.items())
    request = workload(1, 1024, 2, 16)
    for name, (derive, columns) in _DERIVED.items():
        yield Comparison("small, from a table", name, partial(derived, request, derive, columns))
    sequences, token = workload(256, 64, 0, 1), [*range(64, 256 * 65, 65)]
    line_up_all = partial(derived, sequences, PositionTable.decode, token)
    yield Comparison("small, from a table", "decode of 256 sequences", line_up_all)
    for n in [1, 2**4, 2**8, 2**12, 2**16, 2**20][: 2 if options.quick else None]:
        documents = workload(1, n, n // 320, 16)
        line_up = partial(lists_or_spans, documents, options)
        yield Comparison("from lists, over tokens", counted(n, "token", ","), line_up, budget=Budget(0.25, 11))


def derived(documents: list[Document], derive: Derive, columns: Sequence[int]) -> Lineup:
    """Line up an operation on a position table, with a copy of its result as the limit.

    Args:
        documents: documents from which to build the table.
        derive: the operation, which returns a table or the result of ``padded``.
        columns: the result's token indices into the documents, after each document is extended by one text token;
            larger indices stand for padding, whose ids are 0.
    """
    table = place(SegmentTable.from_documents(documents), "rope-tie")
    longer = loop_ids([[*document, Text(1)] for document in documents], "rope-tie")
    want = np.concatenate([longer, np.zeros((2, max(columns)))], axis=1)[:, columns]
    result = derive(table)
    arrays = (result.table, result.documents) if isinstance(result, PositionTable) else result

    def read(result: PositionTable | tuple[Array, IntArray]) -> Array:
        return result.dense() if isinstance(result, PositionTable) else result[0][:, 0]

    contestants = [
        limit("copy of the result", lambda: [array.copy() for array in arrays]),
        giving("mmpos", partial(derive, table), want, read=read),
    ]
    return Lineup(contestants, counts(documents) | {"bytes": sum(array.nbytes for array in arrays)})


_PADDED = [*range(1024), *range(1025, 1101)]

_DERIVED: Mapping[str, tuple[Derive, Sequence[int]]] = {
    "slice": (lambda table: table.slice(100, 900), range(100, 900)),
    "take, two ranges": (lambda table: table.take([0, 600], [100, 900]), [*range(100), *range(600, 900)]),
    "window": (lambda table: table.window([0], [256], [256]), range(256, 512)),
    "shard, one of two": (lambda table: table.shard(0, 2), [*range(256), *range(768, 1024)]),
    "pad": (lambda table: table.pad(1100), _PADDED),
    "padded, ids and mask": (lambda table: table.padded(1100), _PADDED),
    "decode": (PositionTable.decode, [1024]),
}
"""Operations on a table of 1,024 tokens, with the token indices of their results."""


def from_lists(documents: list[Document], options: SuiteOptions) -> Lineup:
    """Line up dense ids from Python lists, and the individual stages: segment table, positions and dense ids."""
    make = partial(SegmentTable.from_documents, documents)
    tie, mrope = loop_ids(documents, "rope-tie"), loop_ids(documents, "mrope")
    table, out = place(make(), "rope-tie"), np.empty(tie.shape, np.int32)
    contestants = [
        limit("fill of two axes", partial(out.fill, 1)),
        giving("mmpos, rope-tie", lambda: place(make(), "rope-tie").dense(), tie),
        giving("mmpos, mrope", lambda: place(make(), "mrope").dense(), mrope),
        giving("table, a part", make, tie, Role.PART, lambda segments: place(segments, "rope-tie").dense()),
        giving("place, a part", partial(place, make(), "rope-tie"), tie, Role.PART, PositionTable.dense),
        giving("dense, a part", table.dense, tie, Role.PART),
    ]
    if options.peers:
        want = mrope, place(make(), "mrope").deltas
        contestants.append(giving("loop per image", partial(engine_loop, documents), want, Role.PEER))
    return Lineup(contestants, counts(documents) | {"bytes": out.nbytes})


def from_ids(documents: list[Document], options: SuiteOptions) -> Lineup:
    """Line up dense ids computed from a batch of token ids, with Transformers as a peer.

    The limit copies the token ids and fills as much memory as the result occupies.
    """
    input_ids, grid_thw = token_ids_of(documents)
    mrope = loop_ids(documents, "mrope")
    read, written = np.empty_like(input_ids), np.empty(mrope.shape, np.int32)

    def copy_and_fill() -> None:
        np.copyto(read, input_ids)
        written.fill(1)

    def ours(scheme: str) -> npt.NDArray[np.number]:
        segments = SegmentTable.from_input_ids(
            input_ids, Placeholders(image=_IMAGE), grid_thw, spatial_merge_size=_MERGE
        )
        return place(segments, scheme).dense()

    contestants = [
        limit("copy of token ids, and fill", copy_and_fill),
        giving("mmpos, mrope", partial(ours, "mrope"), mrope),
        giving("mmpos, rope-tie", partial(ours, "rope-tie"), loop_ids(documents, "rope-tie")),
    ]
    if rope_indexes := options.peer("Transformers", load_rope_index):
        for name, call in rope_indexes(input_ids, _IMAGE, grid_thw).items():
            contestants.append(giving(name, call, mrope, Role.OURS if name == "rope_index" else Role.PEER))
    return Lineup(contestants, counts(documents) | {"bytes": read.nbytes + written.nbytes})


def token_ids_of(documents: list[Document]) -> tuple[IntArray, IntArray]:
    """Build (batch, seq) token ids of documents of equal length, and (images, 3) grids before merging."""
    parts = [part for document in documents for part in document]
    kinds = np.array([_IMAGE if isinstance(part, Grid) else _TEXT for part in parts], np.int64)
    before_merging = [(1, part.height * _MERGE, part.width * _MERGE) for part in parts if isinstance(part, Grid)]
    input_ids = kinds.repeat(list(map(tokens_of, parts))).reshape(len(documents), -1)
    return input_ids, np.array(before_merging, np.int64).reshape(-1, 3)


def lists_or_spans(documents: list[Document], options: SuiteOptions) -> Lineup:
    """Line up dense ids from Python lists and from spans, with a fill as the limit and the loop per image as a peer."""
    want, segments = loop_ids(documents, "mrope"), SegmentTable.from_documents(documents)
    out, held = np.empty(want.shape, np.int32), spans(segments)
    contestants = [
        limit("fill", partial(out.fill, 1)),
        giving("mmpos, from lists", lambda: place(SegmentTable.from_documents(documents), "mrope").dense(), want),
        giving("mmpos, from spans", lambda: place(SegmentTable.from_spans(*held), "mrope").dense(), want),
    ]
    if options.peers:
        loop = partial(engine_loop, documents)
        contestants.append(giving("loop per image", loop, want, Role.PEER, lambda result: result[0]))
    return Lineup(contestants, counts(documents) | {"bytes": out.nbytes})


def spans(segments: SegmentTable) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Describe documents as inference engines do: document lengths, and each image's offset, grid and document."""
    grids = np.flatnonzero(segments.kind == GRID)
    owner = np.repeat(np.arange(segments.num_documents), np.diff(segments.segment_offsets))[grids]
    ends = np.append(0, np.cumsum(segments.lengths))
    firsts = ends[segments.segment_offsets]
    return np.diff(firsts), ends[grids] - firsts[owner], segments.extents.T[grids].copy(), owner
