"""Curves of the positions suite: how time per token goes with tokens, images, their size, documents and axes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mmpos.positions.place import place
from mmpos.segments.table import SegmentTable
from mmpos.support.checks import counted
from mmpos_bench.cases import Case, Contestant, Later, Options, Point, Role
from mmpos_bench.peers.engine_loop import engine_loop
from mmpos_bench.proofs import equal
from mmpos_bench.reference import loop_ids
from mmpos_bench.timing import Budget
from mmpos_bench.tokens import from_ids
from mmpos_bench.workloads import Document, counts, workload

__all__ = ["curves"]


class Shape(NamedTuple):
    """Of a workload: documents, tokens of each, images in each, and their side."""

    documents: int
    tokens: int
    images: int
    side: int


_BUDGET = Budget(0.25, 11)
_SCHEMES = {"flatten": 1, "rope-tie": 2, "mrope": 3}

Array = npt.NDArray[Any]


def curves(options: Options) -> Iterator[Later]:
    """All curves, point by point; a quick one has its first two points."""

    def first(values: list[int]) -> list[int]:
        return values[:2] if options.quick else values

    million = 2**14 if options.quick else 2**20
    for tokens in first([2**10, 2**12, 2**14, 2**16, 2**18, 2**20, 2**22]):
        name, point = f"{tokens:,} tokens", Point("tokens, an image of 16×16 in every 320", tokens)
        shape = Shape(1, tokens, tokens // 320, 16)
        yield _later("dense(out=) over tokens", name, partial(_written, shape, "rope-tie", point, options))
        yield _later("from token ids, over tokens", name, partial(_from_ids, shape, point, options))
    for images in first([0, 1, 10, 100, 1000, 10_000]):
        shape, point = Shape(1, million, images, 8), Point(f"images of 8×8 in {million:,} tokens", images)
        yield _later("from lists, over images", counted(images, "image", ","), partial(_whole, shape, point, options))
    for side in first([2, 4, 8, 16, 32, 64, 128, 256, 512]):
        shape = Shape(1, million, max(1, million // 2 // side**2), side)
        point = Point(f"side of the images that are half of {million:,} tokens", side)
        make = partial(_written, shape, "rope-tie", point, options)
        yield _later("dense(out=) over the size of images", f"{side}×{side}", make)
    for count in first([1, 4, 16, 64, 256, 1024, 4096]):
        shape = Shape(count, million // count, 1, 8)
        point = Point(f"documents of one image of 8×8, {million:,} tokens in all", count)
        yield _later(
            "from lists, over documents", counted(count, "document", ","), partial(_whole, shape, point, options)
        )
    for scheme, axes in _SCHEMES.items():
        make = partial(_written, Shape(1, million, million // 640, 16), scheme, Point("axes", axes), options)
        yield _later("dense(out=) over axes", f"{axes}: {scheme}", make)


def _later(group: str, name: str, make: Callable[[str, str], Case]) -> Later:
    return Later(group, name, partial(make, group, name))


def _from_ids(shape: Shape, point: Point, options: Options, group: str, name: str) -> Case:
    return replace(from_ids(group, name, workload(*shape), options, point), budget=_budget(options))


def _written(shape: Shape, scheme: str, point: Point, options: Options, group: str, name: str) -> Case:
    """Placing, and ids into memory that is there, against filling it."""
    documents = workload(*shape)
    segments, want = SegmentTable.from_documents(documents), loop_ids(documents, scheme)
    table, out = place(segments, scheme), np.zeros(want.shape, np.int32)
    contestants = (
        Contestant("fill", partial(out.fill, 1), Role.LIMIT),
        Contestant("dense(out=)", partial(table.dense, out), proof=lambda: equal(table.dense(out), want)),
        Contestant(
            "place, a part",
            partial(place, segments, scheme),
            Role.PART,
            lambda: equal(place(segments, scheme).dense(), want),
        ),
    )
    work = counts(documents) | {"bytes": out.nbytes, "ids": out.size}
    return Case(
        group,
        name,
        contestants,
        work,
        "ids" if point.axis == "axes" else "tokens",
        point,
        _budget(options),
    )


def _whole(shape: Shape, point: Point, options: Options, group: str, name: str) -> Case:
    """From Python lists to new ids, with the table from spans beside, against a fill and the loop per image."""
    documents = workload(*shape)
    want = loop_ids(documents, "mrope")
    limit, spans = np.empty(want.shape, np.int32), _spans(documents)

    def from_lists() -> Array:
        return place(SegmentTable.from_documents(documents), "mrope").dense()

    def from_spans() -> Array:
        return place(SegmentTable.from_spans(*spans), "mrope").dense()

    contestants = [
        Contestant("fill", partial(limit.fill, 1), Role.LIMIT),
        Contestant("mmpos, from lists", from_lists, proof=lambda: equal(from_lists(), want)),
        Contestant("mmpos, from spans", from_spans, proof=lambda: equal(from_spans(), want)),
    ]
    if options.peers.get("loop per image", "engine_loop"):
        loop = partial(engine_loop, documents)
        contestants.append(Contestant("loop per image", loop, Role.PEER, lambda: equal(loop()[0], want)))
    work = counts(documents) | {"bytes": limit.nbytes}
    return Case(group, name, tuple(contestants), work, point=point, budget=_budget(options))


def _spans(documents: list[Document]) -> tuple[Array, Array, Array, Array]:
    """Lengths, offsets, grids and owners, as inference engines hold them."""
    segments = SegmentTable.from_documents(documents)
    grids = np.flatnonzero(segments.kind == 1)
    owner = np.repeat(np.arange(len(documents)), np.diff(segments.segment_offsets))
    ends = np.append(0, np.cumsum(segments.lengths))
    firsts = ends[segments.segment_offsets]
    return np.diff(firsts), ends[grids] - firsts[owner[grids]], segments.extents[:, grids].T.copy(), owner[grids]


def _budget(options: Options) -> Budget | None:
    return None if options.quick else _BUDGET
