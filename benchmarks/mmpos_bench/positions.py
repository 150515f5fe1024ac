"""Positions: from lists, spans and token ids to dense ids, tables from a table, and how all of it grows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mmpos.positions.place import place
from mmpos.positions.table import PositionTable
from mmpos.segments.kinds import Grid
from mmpos.segments.table import GRID, SegmentTable
from mmpos.support.checks import counted
from mmpos_bench.peers.positions import engine_loop, load_rope_index
from mmpos_bench.proofs import equal
from mmpos_bench.results import Point
from mmpos_bench.suites import Case, Contestant, Lineup, Options, Role, giving
from mmpos_bench.timing import Budget
from mmpos_bench.workloads import WORKLOADS, Document, counts, loop_ids, workload

__all__ = ["cases"]

Array = npt.NDArray[Any]

_KINDS: tuple[tuple[str, type[np.number[Any]]], ...] = (
    ("rope-tie", np.int32),
    ("mrope", np.int32),
    ("rope-tie", np.int64),
    ("rope-tie-v2", np.float64),
)
_TEXT, _IMAGE, _MERGE = 1, 7, 2  # token ids; patches merged along each side
_RANKS, _PADDING, _RANGES, _RANGE = 2, 64, 16, 100
_CURVE = Budget(0.25, 11)


def cases(options: Options) -> Iterator[Case]:
    """Every case of the suite; the workloads are no smaller when it is quick, the curves are shorter."""
    workloads = [(f"{name}: {title}", documents) for name, (title, documents) in WORKLOADS.items()]
    groups: dict[str, Callable[[list[Document]], Lineup]] = {
        "from lists to dense ids": partial(from_lists, options=options)
    }
    for scheme, kind in _KINDS:
        groups[f"dense(out=), {scheme}, {kind.__name__}"] = partial(filled, scheme=scheme, dtype=kind)
    groups["dense() in a new array"] = fresh
    groups["from token ids to dense ids"] = partial(from_ids, options=options)
    for group, line_up in groups.items():
        yield from (Case(group, title, partial(line_up, documents)) for title, documents in workloads)
    for title, documents in workloads:
        yield Case("tables from a table", title, partial(views, documents), "segments")
    yield from (Case("padded ids and mask", title, partial(padded, documents)) for title, documents in workloads)
    yield from curves(options)


def from_lists(documents: list[Document], options: Options) -> Lineup:
    """Everything that a caller pays for, and its parts: the table from Python lists, the positions, the ids."""
    segments = SegmentTable.from_documents(documents)
    table = place(segments, "rope-tie")
    tie, mrope = loop_ids(documents, "rope-tie"), loop_ids(documents, "mrope")
    limit, make = np.empty(tie.shape, np.int32), partial(SegmentTable.from_documents, documents)

    def whole(scheme: str) -> Array:
        return place(make(), scheme).dense()

    contestants = [
        Contestant("fill of two axes", partial(limit.fill, 1), Role.LIMIT),
        giving("mmpos, rope-tie", partial(whole, "rope-tie"), tie),
        giving("mmpos, mrope", partial(whole, "mrope"), mrope),
        giving("table, a part", make, tie, Role.PART, lambda made: place(made, "rope-tie").dense()),
        giving("place, a part", partial(place, segments, "rope-tie"), tie, Role.PART, PositionTable.dense),
        giving("dense, a part", table.dense, tie, Role.PART),
    ]

    def loop_is_right() -> None:
        ids, deltas = engine_loop(documents)
        equal(ids, mrope)
        equal(deltas, place(segments, "mrope").deltas)

    if options.peers.wanted:
        contestants.append(Contestant("loop per image", partial(engine_loop, documents), Role.PEER, loop_is_right))
    return Lineup(contestants, counts(documents) | {"bytes": limit.nbytes})


def filled(documents: list[Document], scheme: str, dtype: type[np.number[Any]], *, placing: bool = False) -> Lineup:
    """Ids into memory that is there, and perhaps placing alone, against filling the memory with one number."""
    segments, want = SegmentTable.from_documents(documents), loop_ids(documents, scheme)
    table, out = place(segments, scheme), np.zeros(want.shape, dtype)
    contestants = [
        Contestant("fill", partial(out.fill, 1), Role.LIMIT),
        giving("dense(out=)", partial(table.dense, out), want),
    ]
    if placing:
        make = partial(place, segments, scheme)
        contestants.append(giving("place, a part", make, want, Role.PART, PositionTable.dense))
    return Lineup(contestants, counts(documents) | {"bytes": out.nbytes, **({"ids": out.size} if placing else {})})


def fresh(documents: list[Document]) -> Lineup:
    """Ids into a new array, against a new array filled with one number."""
    table, want = place(SegmentTable.from_documents(documents), "rope-tie"), loop_ids(documents, "rope-tie")
    limit = Contestant("fill of a new array", partial(np.full, want.shape, 1, np.int32), Role.LIMIT)
    return Lineup([limit, giving("dense()", table.dense, want)], counts(documents) | {"bytes": want.size * 4})


def from_ids(documents: list[Document], options: Options) -> Lineup:
    """From the token ids of a batch, as a tokenizer and a processor leave them, against reading them and writing as
    many bytes as the result has, and against Transformers.
    """
    parts = [part for document in documents for part in document]
    grids = [part for part in parts if isinstance(part, Grid)]
    lengths = [part.height * part.width if isinstance(part, Grid) else part.length for part in parts]
    kinds = np.array([_IMAGE if isinstance(part, Grid) else _TEXT for part in parts], np.int64)
    input_ids = kinds.repeat(lengths).reshape(len(documents), -1)  # documents are of equal length
    before_merging = [(1, grid.height * _MERGE, grid.width * _MERGE) for grid in grids]
    grid_thw = np.array(before_merging, np.int64).reshape(-1, 3)
    mrope, tie = loop_ids(documents, "mrope"), loop_ids(documents, "rope-tie")
    read, written = np.empty_like(input_ids), np.empty(mrope.shape, np.int32)

    def limit() -> None:
        np.copyto(read, input_ids)
        written.fill(1)

    def ours(scheme: str) -> Array:
        segments = SegmentTable.from_input_ids(input_ids, grid_thw, image_token_id=_IMAGE, spatial_merge_size=_MERGE)
        return place(segments, scheme).dense()

    contestants = [
        Contestant("copy of token ids, and fill", limit, Role.LIMIT),
        giving("mmpos, mrope", partial(ours, "mrope"), mrope),
        giving("mmpos, rope-tie", partial(ours, "rope-tie"), tie),
    ]
    if rope_index := options.peers.get("Transformers", load_rope_index):
        contestants.append(giving("Transformers", rope_index(input_ids, _IMAGE, grid_thw), mrope, Role.PEER))
    return Lineup(contestants, counts(documents) | {"bytes": read.nbytes + written.nbytes})


def views(documents: list[Document]) -> Lineup:
    """Tables from a table, against a copy of it; documents are of equal length, and end in text."""
    table, ids = place(SegmentTable.from_documents(documents), "rope-tie"), loop_ids(documents, "rope-tie")
    tokens, axes = table.num_tokens, len(ids)
    length, begin, stop = tokens // len(documents), tokens // 4, tokens // 2
    per_document = ids.reshape(axes, len(documents), length)
    starts = np.arange(_RANGES) * (tokens // _RANGES)
    stops = starts + _RANGE
    taken = np.concatenate([ids[:, a:b] for a, b in zip(starts, stops, strict=True)], axis=1)
    block = length // (2 * _RANKS)
    zigzag = np.concatenate([per_document[:, :, :block], per_document[:, :, -block:]], axis=2).reshape(axes, -1)
    longer = np.pad(per_document, ((0, 0), (0, 0), (0, _PADDING))).reshape(axes, -1)
    # Parts, since each is another question: none of them is faster than another.
    part = partial(giving, role=Role.PART, read=PositionTable.dense)
    contestants = [
        Contestant("copy of the table", table.table.copy, Role.LIMIT),
        part("slice of a quarter", lambda: table.slice(begin, stop), ids[:, begin:stop]),
        part(f"take of {_RANGES} ranges of {_RANGE}", lambda: table.take(starts, stops), taken),
        # The next token follows the text on all axes.
        part("decode of a token each", table.decode, per_document[:, :, -1] + 1),
        part(f"shard, 1 of {_RANKS}", lambda: table.shard(0, _RANKS), zigzag),
        part(f"pad by {_PADDING} tokens each", lambda: table.pad(length + _PADDING), longer),
    ]
    return Lineup(contestants, counts(documents) | {"segments": table.num_segments, "bytes": table.table.nbytes})


def padded(documents: list[Document]) -> Lineup:
    """The ids and the mask of a padded batch, against filling both."""
    table, ids = place(SegmentTable.from_documents(documents), "rope-tie"), loop_ids(documents, "rope-tie")
    length = table.max_seqlen + _PADDING
    shape = len(ids), len(documents), length
    want = np.pad(ids.reshape(*shape[:2], -1), ((0, 0), (0, 0), (_PADDING, 0)))
    mask = np.pad(np.ones((len(documents), length - _PADDING), np.int64), ((0, 0), (_PADDING, 0)))

    def prove() -> None:
        got_ids, got_mask = table.padded(length, "left")
        equal(got_ids, want)
        equal(got_mask, mask)

    def limit() -> None:
        np.full(shape, 1, np.int32)
        np.full(mask.shape, 1, np.int64)

    contestants = (
        Contestant("fill of new ids and mask", limit, Role.LIMIT),
        Contestant("padded()", lambda: table.padded(length, "left"), proof=prove),
    )
    return Lineup(contestants, counts(documents) | {"bytes": want.size * 4 + mask.nbytes})


class Shape(NamedTuple):
    """The sizes of a workload: documents, tokens of each, images in each, and their side."""

    documents: int
    tokens: int
    images: int
    side: int


def curves(options: Options) -> Iterator[Case]:
    """Time per token over tokens, images, their size, documents and axes; a quick curve has two points."""

    def first(values: list[int]) -> list[int]:
        return values[:2] if options.quick else values

    dense, whole = partial(filled, dtype=np.int32, placing=True), partial(_from_lists_or_spans, options=options)
    million = 2**14 if options.quick else 2**20
    for tokens in first([2**10, 2**12, 2**14, 2**16, 2**18, 2**20, 2**22]):
        name, point = f"{tokens:,} tokens", Point("tokens, an image of 16×16 in every 320", tokens)
        shape = Shape(1, tokens, tokens // 320, 16)
        yield _on_curve("dense(out=) over tokens", name, partial(dense, scheme="rope-tie"), shape, point)
        yield _on_curve("from token ids, over tokens", name, partial(from_ids, options=options), shape, point)
    for images in first([0, 1, 10, 100, 1000, 10_000]):
        name, point = counted(images, "image", ","), Point(f"images of 8×8 in {million:,} tokens", images)
        yield _on_curve("from lists, over images", name, whole, Shape(1, million, images, 8), point)
    for side in first([2, 4, 8, 16, 32, 64, 128, 256, 512]):
        shape = Shape(1, million, max(1, million // 2 // side**2), side)
        name, point = f"{side}×{side}", Point(f"side of the images that are half of {million:,} tokens", side)
        yield _on_curve("dense(out=) over the size of images", name, partial(dense, scheme="rope-tie"), shape, point)
    for count in first([1, 4, 16, 64, 256, 1024, 4096]):
        name, shape = counted(count, "document", ","), Shape(count, million // count, 1, 8)
        point = Point(f"documents of one image of 8×8, {million:,} tokens in all", count)
        yield _on_curve("from lists, over documents", name, whole, shape, point)
    for axes, scheme in enumerate(("flatten", "rope-tie", "mrope"), 1):
        line_up, shape = partial(dense, scheme=scheme), Shape(1, million, million // 640, 16)
        yield _on_curve("dense(out=) over axes", f"{axes}: {scheme}", line_up, shape, Point("axes", axes), "ids")


def _on_curve(
    group: str, name: str, line_up: Callable[[list[Document]], Lineup], shape: Shape, point: Point, unit: str = "tokens"
) -> Case:
    return Case(group, name, lambda: line_up(workload(*shape)), unit, point, _CURVE)


def _from_lists_or_spans(documents: list[Document], options: Options) -> Lineup:
    """From Python lists to new ids, with the table from spans beside, against a fill and the loop per image."""
    want = loop_ids(documents, "mrope")
    limit, spans = np.empty(want.shape, np.int32), _spans(documents)
    contestants = [
        Contestant("fill", partial(limit.fill, 1), Role.LIMIT),
        giving("mmpos, from lists", lambda: place(SegmentTable.from_documents(documents), "mrope").dense(), want),
        giving("mmpos, from spans", lambda: place(SegmentTable.from_spans(*spans), "mrope").dense(), want),
    ]
    if options.peers.wanted:
        loop = partial(engine_loop, documents)
        contestants.append(Contestant("loop per image", loop, Role.PEER, lambda: equal(loop()[0], want)))
    return Lineup(contestants, counts(documents) | {"bytes": limit.nbytes})


def _spans(documents: list[Document]) -> tuple[Array, Array, Array, Array]:
    """Lengths, offsets, grids and owners, as inference engines hold them."""
    segments = SegmentTable.from_documents(documents)
    grids = np.flatnonzero(segments.kind == GRID)
    owner = np.repeat(np.arange(len(documents)), np.diff(segments.segment_offsets))
    ends = np.append(0, np.cumsum(segments.lengths))
    firsts = ends[segments.segment_offsets]
    return np.diff(firsts), ends[grids] - firsts[owner[grids]], segments.extents[:, grids].T.copy(), owner[grids]
