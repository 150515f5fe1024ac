"""Documents given as segments, spans or input_ids, as messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from mmpos.rpc.fields import (
    chosen,
    get_seconds,
    in_columns,
    integer_lists,
    integers,
    optional,
    path,
    put_integers,
    put_rational,
    required,
)
from mmpos.rpc.queries import InputIds, Spans
from mmpos.rpc.tables import get_segments, put_segments
from mmpos.rpc.tensors import DATA_TYPES, get_tensor, put_tensor
from mmpos.rpc.v1 import positions_pb2 as pb
from mmpos.segments.kinds import rationals
from mmpos.segments.table import SegmentTable
from mmpos.support.checks import boolean, host_array, int_array, integer

if TYPE_CHECKING:
    from mmpos.rpc.memory import Memory


_NUMBERS = ("image_token_id", "video_token_id", "spatial_merge_size", "row_token_id", "last_row_token_id")


def put_source(
    message: pb.PositionsQuery, source: SegmentTable | Spans | InputIds, memory: Memory | None = None
) -> None:
    """Fill the source of a query; memory: as for ``put_tensor``."""
    if isinstance(source, SegmentTable):
        message.segments.SetInParent()
        put_segments(message.segments, source)
    elif isinstance(source, Spans):
        _put_spans(message.spans, source)
    else:
        _put_input_ids(message.input_ids, source, memory)


def get_source(name: str, message: pb.PositionsQuery, memory: Memory | None = None) -> SegmentTable | Spans | InputIds:
    """The source of a query; memory: as for ``get_tensor``."""
    source = chosen(path(name, "source"), message, "source")
    if source == "input_ids":
        return _get_input_ids(message.input_ids, memory)
    found: SegmentTable | Spans | InputIds = _GET[source](getattr(message, source))
    return found


def _put_spans(message: pb.Spans, spans: Spans) -> None:
    put_integers(message.lengths, int_array("lengths", spans.lengths, (None,)))
    put_integers(message.offsets, int_array("offsets", spans.offsets, (None,)))
    put_integers(message.grid_thw, int_array("grid_thw", spans.grid_thw, (len(message.offsets), 3)))
    if spans.documents is not None:
        put_integers(message.documents, int_array("documents", spans.documents, (len(message.offsets),)))
    _put_seconds(message, spans.seconds_per_frame)
    message.row_separator = boolean("row_separator", spans.row_separator)
    message.SetInParent()


def _get_spans(message: pb.Spans) -> Spans:
    lengths, offsets, grid_thw, documents = integer_lists(message, "lengths", "offsets", "grid_thw", "documents")
    return Spans(
        lengths,
        offsets,
        in_columns("grid_thw", grid_thw, 3),
        documents if documents.size else None,
        seconds_per_frame=get_seconds("seconds_per_frame", message.seconds_per_frame),
        row_separator=message.row_separator,
    )


def _put_input_ids(message: pb.InputIds, source: InputIds, memory: Memory | None) -> None:
    put_tensor(message.input_ids, _whole("input_ids", source.input_ids), memory)
    for field in ("image_grid_thw", "video_grid_thw"):
        grids = getattr(source, field)
        if grids is not None:
            put_integers(getattr(message, field), int_array(field, grids, (None, 3)))
    for field in _NUMBERS:
        value = getattr(source, field)
        if value is not None:
            setattr(message, field, integer(field, value, minimum=-(2**63), maximum=2**63 - 1))
    if source.cu_seqlens is not None:
        put_integers(message.cu_seqlens, int_array("cu_seqlens", source.cu_seqlens, (None,)))
    if source.attention_mask is not None:
        put_tensor(message.attention_mask, _whole("attention_mask", source.attention_mask), memory)
    _put_seconds(message, source.seconds_per_frame)
    message.frames_apart = boolean("frames_apart", source.frames_apart)


def _get_input_ids(message: pb.InputIds, memory: Memory | None) -> InputIds:
    mask = optional(message, "attention_mask")
    return InputIds(
        get_tensor("input_ids", required("", message, "input_ids"), memory=memory),
        integers(message.image_grid_thw, columns=3, name="image_grid_thw") if message.image_grid_thw else None,
        integers(message.video_grid_thw, columns=3, name="video_grid_thw") if message.video_grid_thw else None,
        cu_seqlens=integers(message.cu_seqlens) if message.cu_seqlens else None,
        attention_mask=None if mask is None else get_tensor("attention_mask", mask, memory=memory),
        seconds_per_frame=get_seconds("seconds_per_frame", message.seconds_per_frame),
        frames_apart=message.frames_apart,
        **{field: optional(message, field) for field in _NUMBERS},
    )


def _whole(name: str, values: Any) -> Any:
    """Integers as a type that travels; anything else as it is, for the domain to refuse."""
    array = host_array(name, values)
    if array.dtype.kind == "b":
        return array.astype(np.uint8)
    return array.astype(np.int64) if array.dtype.kind in "iu" and array.dtype.name not in DATA_TYPES else array


def _put_seconds(message: pb.Spans | pb.InputIds, seconds: Any) -> None:
    for value in rationals("seconds_per_frame", seconds):
        put_rational(message.seconds_per_frame.add(), value)


_GET: dict[str, Callable[[Any], Any]] = {
    "segments": lambda message: get_segments("", message),
    "spans": _get_spans,
}
