"""Queries about positions, and their answers, as messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mmpos.errors import InvalidInputError, LimitExceededError
from mmpos.positions.rows import MAX_AXES
from mmpos.rpc.fields import chosen, enum, integer_lists, integers, optional, path, put_integers
from mmpos.rpc.queries import Decode, Dense, Pad, PositionsQuery, PositionsResult, Shard, Take, View, Window
from mmpos.rpc.schemes import get_scheme, put_scheme
from mmpos.rpc.sources import get_source, put_source
from mmpos.rpc.tables import get_table, put_table
from mmpos.rpc.tensors import DATA_TYPES, get_tensor, put_tensor
from mmpos.rpc.v1 import positions_pb2 as pb
from mmpos.rpc.v1 import tensor_pb2
from mmpos.segments.table import SegmentTable
from mmpos.support.checks import INT32_MIN, IntArray, int_array, integer, per_document

if TYPE_CHECKING:
    from mmpos.rpc.memory import Memory

_LAYOUTS: dict[Any, Any] = {
    pb.SHARD_LAYOUT_ZIGZAG: "zigzag",
    pb.SHARD_LAYOUT_CONTIGUOUS: "contiguous",
    pb.SHARD_LAYOUT_ZIGZAG_SEQUENCE: "zigzag-sequence",
    pb.SHARD_LAYOUT_CONTIGUOUS_SEQUENCE: "contiguous-sequence",
}
_SIDES: dict[Any, Any] = {pb.SIDE_LEFT: "left", pb.SIDE_RIGHT: "right"}
_IDS = {tensor_pb2.DATA_TYPE_UNSPECIFIED: None} | {DATA_TYPES[name]: name for name in ("int32", "int64", "float64")}


def put_query(
    message: pb.PositionsQuery, query: PositionsQuery, profile: str | None = None, memory: Memory | None = None
) -> None:
    """Fill a message with a query; memory: as for ``put_tensor``."""
    put_source(message, query.source, memory)
    if profile is not None:
        message.profile = profile
    if query.scheme is not None:
        put_scheme(message.scheme, query.scheme)
    if np.ndim(query.start):
        _put_one_or_each(message, "start", _starts(query))
    elif query.start != 0:
        message.start = integer("start", query.start)
    if query.strict is not None:
        message.strict = query.strict
    for view in query.views:
        _put_view(message.views.add(), view)
    if query.dense is not None:
        message.dense.SetInParent()
        if query.dense.dtype is not None:
            message.dense.dtype = _number(_IDS, np.dtype(query.dense.dtype).name)
        put_integers(message.dense.axes, query.dense.axes or ())


def get_query(name: str, message: pb.PositionsQuery, memory: Memory | None = None) -> PositionsQuery:
    """The query of a message; what it leaves to a profile is None; memory: as for ``get_tensor``.

    Raises:
        InvalidInputError: naming the field that is missing, unknown or wrong.
        UnsupportedError: likewise.
    """
    dense = optional(message, "dense")
    return PositionsQuery(
        source=get_source(name, message, memory),
        scheme=get_scheme(path(name, "scheme"), message.scheme) if message.HasField("scheme") else None,
        start=_one_or_each(name, message, "start", 0),
        strict=optional(message, "strict"),
        views=[get_view(path(name, f"views[{i}]"), view) for i, view in enumerate(message.views)],
        dense=None if dense is None else _get_dense(path(name, "dense"), dense),
    )


def put_result(message: pb.Positions, result: PositionsResult, memory: Memory | None = None) -> None:
    """Fill a message with an answer; memory: as for ``put_tensor``."""
    if result.table is not None:
        put_table(message.table, result.table)
    if result.dense is not None:
        put_tensor(message.dense, result.dense, memory)
    if result.next_positions is not None and result.deltas is not None:
        put_integers(message.next_positions, result.next_positions)
        put_integers(message.deltas, result.deltas)
    put_integers(message.cu_seqlens, result.cu_seqlens)


def get_result(name: str, message: pb.Positions, memory: Memory | None = None) -> PositionsResult:
    """The answer of a message; its arrays may be views of the message's bytes; memory: as for ``get_tensor``."""
    if not message.HasField("table") and not message.HasField("dense"):
        raise InvalidInputError(f"{name}: got neither table nor dense, want one of them")
    documents = len(message.cu_seqlens) - 1
    known = len(message.next_positions) == documents
    return PositionsResult(
        table=get_table(path(name, "table"), message.table) if message.HasField("table") else None,
        dense=get_tensor(path(name, "dense"), message.dense, memory=memory) if message.HasField("dense") else None,
        next_positions=integers(message.next_positions) if known else None,
        deltas=integers(message.deltas) if known else None,
        cu_seqlens=np.array(message.cu_seqlens, np.int32),
    )


def _starts(query: PositionsQuery) -> IntArray:
    if isinstance(query.source, SegmentTable):
        return per_document("start", query.start, query.source.num_documents, minimum=INT32_MIN)
    return int_array("start", query.start, (None,))


def _put_view(message: pb.View, view: View) -> None:
    if isinstance(view, Take):
        _put_arrays(message.take, view, "starts", "stops")
    elif isinstance(view, Window):
        _put_arrays(message.window, view, "documents", "starts", "lengths")
    elif isinstance(view, Decode):
        _put_one_or_each(message.decode, "steps", view.steps)
    elif isinstance(view, Shard):
        message.shard.rank, message.shard.world_size = view.rank, view.world_size
        message.shard.layout = _number(_LAYOUTS, view.layout)
    else:
        message.pad.side = _number(_SIDES, view.side)
        if view.length is not None:
            _put_one_or_each(message.pad, "length", view.length)


def get_view(name: str, message: pb.View) -> View:
    """The view of a message."""
    kind = chosen(name, message, "view")
    inner = getattr(message, kind)
    name = path(name, kind)
    if kind == "take":
        return Take(*integer_lists(inner, "starts", "stops"))
    if kind == "window":
        return Window(*integer_lists(inner, "documents", "starts", "lengths"))
    if kind == "decode":
        return Decode(_one_or_each(name, inner, "steps", 1))
    if kind == "shard":
        return Shard(inner.rank, inner.world_size, enum(name, inner, "layout", _LAYOUTS))
    return Pad(_one_or_each(name, inner, "length", None), enum(name, inner, "side", _SIDES))


def _get_dense(name: str, message: pb.Dense) -> Dense:
    if len(message.axes) > MAX_AXES:
        raise LimitExceededError(f"{path(name, 'axes')}: got {len(message.axes)} rows, want at most {MAX_AXES}")
    return Dense(enum(name, message, "dtype", _IDS), tuple(message.axes) or None)


def _put_arrays(message: Any, view: Any, *fields: str) -> None:
    message.SetInParent()
    for field in fields:
        put_integers(getattr(message, field), getattr(view, field))


def _put_one_or_each(message: Any, field: str, value: Any) -> None:
    message.SetInParent()
    if np.ndim(value):
        put_integers(getattr(message, f"{field}_per_document"), value)
    else:
        setattr(message, field, value)


def _one_or_each(name: str, message: Any, field: str, default: int | None) -> Any:
    each: IntArray = integers(getattr(message, f"{field}_per_document"))
    if each.size and message.HasField(field):
        raise InvalidInputError(f"{path(name, field)}: got it and {field}_per_document, want one of them")
    return each if each.size else default if not message.HasField(field) else getattr(message, field)


def _number(meanings: dict[Any, Any], meaning: Any) -> Any:
    """The enum value that stands for this."""
    found = [number for number, value in meanings.items() if value == meaning]
    if not found:
        raise InvalidInputError(f"dtype: got {meaning}, want one of {', '.join(filter(None, meanings.values()))}")
    return found[0]
