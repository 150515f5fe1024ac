"""Positions: from lists, spans and token ids to dense ids, and the questions that a table answers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from mmpos.positions.place import place
from mmpos.segments.table import SegmentTable
from mmpos_bench.cases import Case, Contestant, Later, Options, Role
from mmpos_bench.curves import curves
from mmpos_bench.peers.engine_loop import engine_loop
from mmpos_bench.proofs import equal
from mmpos_bench.reference import loop_ids
from mmpos_bench.tokens import from_ids
from mmpos_bench.views import PADDED, VIEWS, padded, views
from mmpos_bench.workloads import WORKLOADS, Document, counts

__all__ = ["cases"]

Array = npt.NDArray[Any]

_LISTS, _FRESH, _IDS = "from lists to dense ids", "dense() in a new array", "from token ids to dense ids"
_KINDS: tuple[tuple[str, type[np.number[Any]]], ...] = (
    ("rope-tie", np.int32),
    ("mrope", np.int32),
    ("rope-tie", np.int64),
    ("rope-tie-v2", np.float64),
)


def cases(options: Options) -> Iterator[Later]:
    """Every case of the suite; the workloads are no smaller when it is quick, the curves are shorter."""
    workloads = [(f"{name}: {title}", documents) for name, (title, documents) in WORKLOADS.items()]
    yield from (Later(_LISTS, title, partial(from_lists, title, given, options)) for title, given in workloads)
    for scheme, kind in _KINDS:
        group = f"dense(out=), {scheme}, {kind.__name__}"
        yield from (
            Later(group, title, partial(filled, group, title, given, scheme, kind)) for title, given in workloads
        )
    yield from (Later(_FRESH, title, partial(fresh, title, given)) for title, given in workloads)
    yield from (Later(_IDS, title, partial(from_ids, _IDS, title, given, options)) for title, given in workloads)
    yield from (Later(VIEWS, title, partial(views, title, given)) for title, given in workloads)
    yield from (Later(PADDED, title, partial(padded, title, given)) for title, given in workloads)
    yield from curves(options)


def from_lists(title: str, documents: list[Document], options: Options) -> Case:
    """Everything that a caller pays for, and its parts: the table from Python lists, the positions, the ids."""
    segments = SegmentTable.from_documents(documents)
    table = place(segments, "rope-tie")
    tie, mrope = loop_ids(documents, "rope-tie"), loop_ids(documents, "mrope")
    limit = np.empty(tie.shape, np.int32)

    def whole(scheme: str) -> Array:
        return place(SegmentTable.from_documents(documents), scheme).dense()

    def table_alone() -> None:
        equal(place(SegmentTable.from_documents(documents), "rope-tie").dense(), tie)

    contestants = [
        Contestant("fill of two axes", partial(limit.fill, 1), Role.LIMIT),
        Contestant("mmpos, rope-tie", partial(whole, "rope-tie"), proof=lambda: equal(whole("rope-tie"), tie)),
        Contestant("mmpos, mrope", partial(whole, "mrope"), proof=lambda: equal(whole("mrope"), mrope)),
        Contestant("table, a part", partial(SegmentTable.from_documents, documents), Role.PART, table_alone),
        Contestant(
            "place, a part",
            partial(place, segments, "rope-tie"),
            Role.PART,
            lambda: equal(place(segments, "rope-tie").dense(), tie),
        ),
        Contestant("dense, a part", table.dense, Role.PART, lambda: equal(table.dense(), tie)),
    ]
    if options.peers.get("loop per image", "engine_loop"):
        proof = partial(_loop_is_right, documents, mrope)
        contestants.append(Contestant("loop per image", partial(engine_loop, documents), Role.PEER, proof))
    return Case(_LISTS, title, tuple(contestants), counts(documents) | {"bytes": limit.nbytes})


def filled(group: str, title: str, documents: list[Document], scheme: str, dtype: type[np.number[Any]]) -> Case:
    """Ids into memory that is there, against filling it with one number."""
    table, want = place(SegmentTable.from_documents(documents), scheme), loop_ids(documents, scheme)
    out = np.zeros(want.shape, dtype)
    contestants = (
        Contestant("fill", partial(out.fill, 1), Role.LIMIT),
        Contestant("dense(out=)", partial(table.dense, out), proof=lambda: equal(table.dense(out), want)),
    )
    work = counts(documents) | {"bytes": out.nbytes}
    return Case(group, title, contestants, work)


def fresh(title: str, documents: list[Document]) -> Case:
    """Ids into a new array, against a new array filled with one number."""
    table, want = place(SegmentTable.from_documents(documents), "rope-tie"), loop_ids(documents, "rope-tie")
    contestants = (
        Contestant("fill of a new array", partial(np.full, want.shape, 1, np.int32), Role.LIMIT),
        Contestant("dense()", table.dense, proof=lambda: equal(table.dense(), want)),
    )
    return Case(_FRESH, title, contestants, counts(documents) | {"bytes": want.size * 4})


def _loop_is_right(documents: list[Document], want: Array) -> None:
    ids, deltas = engine_loop(documents)
    equal(ids, want)
    equal(deltas, place(SegmentTable.from_documents(documents), "mrope").deltas)
