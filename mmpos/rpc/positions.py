"""Conversion of schemes, segment tables, position tables, queries and results to messages and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message

from mmpos.errors import InvalidInputError, LimitExceededError, UnsupportedError
from mmpos.positions.table import Layout, PositionTable, Side
from mmpos.positions.table_rows import AXES, MAX_AXES
from mmpos.rpc.queries import (
    Decode,
    Dense,
    InputIds,
    Pad,
    PositionsQuery,
    PositionsResult,
    Shard,
    Spans,
    Take,
    View,
    Window,
)
from mmpos.rpc.tensors import (
    DATA_TYPES,
    chosen,
    enum,
    get_rational,
    get_seconds,
    get_tensor,
    in_columns,
    integer_lists,
    integers,
    optional,
    path,
    put_integers,
    put_rational,
    put_tensor,
    required,
)
from mmpos.rpc.v1 import positions_pb2 as pb
from mmpos.rpc.v1 import scheme_pb2, table_pb2, tensor_pb2
from mmpos.schemes import RATIONAL_PARAMETERS, SCHEMES, Scheme
from mmpos.schemes import get_scheme as named_scheme
from mmpos.schemes.base import changed_parameters
from mmpos.segments.kinds import CLIP, NO_FRAME, TILE, rationals
from mmpos.segments.placeholders import CropMarkers, Placeholders
from mmpos.segments.table import SegmentTable
from mmpos.support import native
from mmpos.support.checks import (
    INT32_MAX,
    INT32_MIN,
    IntArray,
    boolean,
    counted,
    first_bad,
    host_array,
    int_array,
    integer,
    one_of,
    shown,
)

if TYPE_CHECKING:
    from mmpos.rpc.beside import Beside


A = TypeVar("A", bound=npt.NDArray[Any])
D = TypeVar("D")
E = TypeVar("E", bound=int)
T = TypeVar("T")


def parameters(scheme: type[Scheme]) -> list[str]:
    """List the names of a scheme's parameters; those of mmpos's own schemes are also fields of its message."""
    return [field.name for field in fields(scheme) if field.init] if is_dataclass(scheme) else []


def put_scheme(message: scheme_pb2.Scheme, scheme: str | Scheme) -> None:
    """Fill a message with a scheme.

    Raises:
        UnsupportedError: the scheme is an object of the caller's own class, which servers know only by name.
    """
    if isinstance(scheme, str):
        message.name = scheme
        return
    if SCHEMES.get(getattr(scheme, "name", "")) is not type(scheme):
        want = "want one of mmpos.SCHEMES, or the name of the server's own scheme, with the parameters of a profile"
        raise UnsupportedError(f"scheme: got {type(scheme).__name__}(), {want}")
    message.name = scheme.name
    for name, value in changed_parameters(scheme).items():
        if name in RATIONAL_PARAMETERS:
            put_rational(getattr(message, name), value)
        else:
            setattr(message, name, value)


def get_scheme(name: str, message: scheme_pb2.Scheme, schemes: Mapping[str, type[Scheme]] = SCHEMES) -> Scheme:
    """Read the scheme, one of ``schemes``, from a message.

    Raises:
        InvalidInputError: the name is unknown, or a parameter is wrong or belongs to another scheme.
        UnsupportedError: no scheme can represent the layout.
    """
    default = named_scheme(message.name, schemes)
    if message.ByteSize() == len(message.name) + 2:  # only the name
        return default
    scheme = type(default)
    values: dict[str, Any] = {field.name: value for field, value in message.ListFields() if field.name != "name"}
    for parameter in sorted(values.keys() - set(parameters(scheme))):
        raise InvalidInputError(f"{path(name, parameter)}: scheme {message.name!r} has no such parameter")
    for parameter in values.keys() & RATIONAL_PARAMETERS:
        rate = get_rational(path(name, parameter), values[parameter])
        values[parameter] = rate if rate.denominator > 1 else int(rate)
    return scheme(**values)


_LISTS = (
    "kind", "frames", "height", "width", "segments_per_document", "row_separator_segments", "extra_tokens",
    "first_frame_segments", "first_frames",
)  # fmt: skip


def put_segments(message: table_pb2.SegmentTable, segments: SegmentTable) -> None:
    """Fill a message with a segment table."""
    put_integers(message.kind, segments.kind + np.uint8(1))
    frames, height, width = segments.extents
    if (frames != 1).any():
        put_integers(message.frames, frames)
    put_integers(message.height, height)
    put_integers(message.width, width)
    put_integers(message.segments_per_document, segments.segment_offsets[1:] - segments.segment_offsets[:-1])
    if segments.seconds_per_frame is not None:
        for numerator, denominator in segments.seconds_per_frame.T.tolist():
            message.seconds_per_frame.add(numerator=numerator, denominator=denominator)
    if segments.row_separator is not None:
        put_integers(message.row_separator_segments, np.flatnonzero(segments.row_separator))
    if segments.extra_tokens is not None:
        put_integers(message.extra_tokens, segments.extra_tokens[segments.kind >= CLIP])
    if segments.first_frame is not None:
        (named,) = (segments.first_frame != NO_FRAME).nonzero()
        put_integers(message.first_frame_segments, named)
        put_integers(message.first_frames, segments.first_frame[named])


def get_segments(name: str, message: table_pb2.SegmentTable) -> SegmentTable:
    """Read the segment table from a message.

    Raises:
        InvalidInputError: the lists differ in length, or SegmentTable refuses them.
    """
    plain = None if native.core is None else native.core.segments(message.SerializeToString())
    if plain is not None:
        kinds, sides_of_all, firsts = plain
        return SegmentTable(
            np.frombuffer(kinds, np.uint8), native.int64(sides_of_all).reshape(3, -1), native.int64(firsts)
        )
    kind, *sides, per_document, separators, extra, named, frames = integer_lists(message, *_LISTS)
    kind = kind - 1
    unknown = kind.view(np.uint64) > TILE
    if unknown.any():
        i = int(unknown.argmax())
        want = ", ".join(table_pb2.SegmentKind.keys()[1:])
        raise InvalidInputError(f"{path(name, 'kind')}[{i}]: got {kind[i] + 1}, want one of {want}")
    extents = np.ones((3, kind.size), np.int64)
    for axis, values in enumerate(sides):
        if values.size == kind.size:
            extents[axis] = values
        elif values.size or axis > 0:
            field = path(name, _LISTS[1 + axis])
            raise InvalidInputError(f"{field}: got {values.size} numbers, want {kind.size}, one for each segment")
    if named.size != frames.size:
        want = f"{named.size}, one for each of first_frame_segments"
        raise InvalidInputError(f"{path(name, 'first_frames')}: got {counted(frames.size, 'number')}, want {want}")
    first_bad(path(name, "first_frames"), frames, minimum=NO_FRAME + 1, maximum=INT32_MAX)
    offsets = np.zeros(per_document.size + 1, np.int64)
    np.cumsum(per_document, out=offsets[1:])
    return SegmentTable(
        kind.astype(np.uint8),
        extents,
        offsets,
        _seconds(name, message, kind.size),
        _scattered(path(name, "row_separator_segments"), separators, True, np.zeros(kind.size, np.bool_)),
        _extra_tokens(name, extra, kind),
        _scattered(path(name, "first_frame_segments"), named, frames, np.full(kind.size, NO_FRAME, np.int64)),
    )


def _seconds(name: str, message: table_pb2.SegmentTable, segments: int) -> IntArray | None:
    times = message.seconds_per_frame
    if not times:
        return None
    if len(times) != segments:
        raise InvalidInputError(
            f"{path(name, 'seconds_per_frame')}: got {len(times)}, want {segments}, one for each segment"
        )
    return np.array([[time.numerator for time in times], [time.denominator for time in times]], np.int64)


def _scattered(name: str, where: IntArray, values: IntArray | bool, array: A) -> A | None:
    """Write values into an array at the listed segments; return None if there are none."""
    if not where.size:
        return None
    first_bad(name, where, minimum=0, maximum=array.size - 1)
    if (where[1:] <= where[:-1]).any():
        raise InvalidInputError(f"{name}: got {shown(where)}, want ascending indices")
    array[where] = values
    return array


def _extra_tokens(name: str, numbers: IntArray, kind: IntArray) -> IntArray | None:
    (detailed,) = (kind >= CLIP).nonzero()
    if numbers.size not in (0, detailed.size):
        want = f"{detailed.size}, one for each clip, thumbnail and tile"
        raise InvalidInputError(f"{path(name, 'extra_tokens')}: got {counted(numbers.size, 'number')}, want {want}")
    if not numbers.any():
        return None
    extra = np.zeros(kind.size, np.int64)
    extra[detailed] = numbers
    return extra


def put_table(message: table_pb2.PositionTable, positions: PositionTable) -> None:
    """Fill a message with a position table."""
    message.table = positions.table.astype("<i8", copy=False).tobytes()
    message.documents = positions.documents.astype("<i8", copy=False).tobytes()
    message.num_tokens = positions.num_tokens
    message.axes = positions.axes
    message.fractional = positions.fractional
    message.scheme = positions.scheme


def get_table(name: str, message: table_pb2.PositionTable) -> PositionTable:
    """Read the position table from a message, sharing the message's bytes.

    Raises:
        InvalidInputError: the bytes do not fit the axes, or PositionTable.from_arrays refuses them.
        LimitExceededError: the table has more tokens than cu_seqlens can count, or ids outside int32.
    """
    if not 1 <= message.axes <= MAX_AXES:
        raise InvalidInputError(f"{path(name, 'axes')}: got {message.axes}, want 1 to {MAX_AXES}")
    if message.num_tokens > INT32_MAX:
        raise LimitExceededError(f"{path(name, 'num_tokens')}: got {message.num_tokens}, want at most 2**31 - 1")
    return PositionTable.from_arrays(
        _rows(path(name, "table"), message.table, AXES + 4 * message.axes),
        _rows(path(name, "documents"), message.documents, 4),
        message.num_tokens,
        fractional=message.fractional,
        scheme=message.scheme,
    )


def _rows(name: str, data: bytes, rows: int) -> IntArray:
    if len(data) % (8 * rows):
        raise InvalidInputError(f"{name}: got {len(data)} bytes, want a multiple of {8 * rows}, {rows} rows of int64")
    return np.frombuffer(data, "<i8").astype(np.int64, copy=False).reshape(rows, -1)


def _put_spans(message: pb.Spans, spans: Spans) -> None:
    put_integers(message.lengths, int_array("lengths", spans.lengths, (None,)))
    put_integers(message.offsets, int_array("offsets", spans.offsets, (None,)))
    put_integers(message.grid_thw, int_array("grid_thw", spans.grid_thw, (len(message.offsets), 3)))
    if spans.documents is not None:
        put_integers(message.documents, int_array("documents", spans.documents, (len(message.offsets),)))
    _put_seconds(message, spans.seconds_per_frame)
    message.row_separator = boolean("row_separator", spans.row_separator)
    if spans.kind is not None:
        put_integers(message.kind, int_array("kind", spans.kind, (len(message.offsets),)) + 1)
    if spans.extra_tokens is not None:
        put_integers(message.extra_tokens, int_array("extra_tokens", spans.extra_tokens, (len(message.offsets),)))
    message.SetInParent()


def _get_spans(message: pb.Spans) -> Spans:
    lists = integer_lists(message, "lengths", "offsets", "grid_thw", "documents", "kind", "extra_tokens")
    lengths, offsets, grid_thw, documents, kind, extra = lists
    return Spans(
        lengths,
        offsets,
        in_columns("grid_thw", grid_thw, 3),
        documents if documents.size else None,
        seconds_per_frame=get_seconds("seconds_per_frame", message.seconds_per_frame),
        row_separator=message.row_separator,
        kind=kind - 1 if kind.size else None,
        extra_tokens=extra if extra.size else None,
    )


def _put_input_ids(message: pb.InputIds, source: InputIds, beside: Beside | None) -> None:
    put_tensor(message.input_ids, _whole("input_ids", source.input_ids), beside)
    for field in ("image_grid_thw", "video_grid_thw"):
        grids = getattr(source, field)
        if grids is not None:
            put_integers(getattr(message, field), int_array(field, grids, (None, 3)))
    if source.placeholders != Placeholders():
        put_placeholders(message.placeholders, source.placeholders)
    if source.spatial_merge_size is not None:
        message.spatial_merge_size = integer("spatial_merge_size", source.spatial_merge_size, maximum=INT32_MAX)
    if source.cu_seqlens is not None:
        put_integers(message.cu_seqlens, int_array("cu_seqlens", source.cu_seqlens, (None,)))
    if source.attention_mask is not None:
        put_tensor(message.attention_mask, _whole("attention_mask", source.attention_mask), beside)
    _put_seconds(message, source.seconds_per_frame)
    if source.audio_lengths is not None:
        put_integers(message.audio_lengths, int_array("audio_lengths", source.audio_lengths, (None,)))
    message.frames_apart = boolean("frames_apart", source.frames_apart)


def _get_input_ids(message: pb.InputIds, beside: Beside | None) -> InputIds:
    mask = optional(message, "attention_mask")
    return InputIds(
        get_tensor("input_ids", required("", message, "input_ids"), beside=beside),
        get_placeholders(message.placeholders),
        integers(message.image_grid_thw, columns=3, name="image_grid_thw") if message.image_grid_thw else None,
        integers(message.video_grid_thw, columns=3, name="video_grid_thw") if message.video_grid_thw else None,
        cu_seqlens=integers(message.cu_seqlens) if message.cu_seqlens else None,
        attention_mask=None if mask is None else get_tensor("attention_mask", mask, beside=beside),
        seconds_per_frame=get_seconds("seconds_per_frame", message.seconds_per_frame),
        frames_apart=message.frames_apart,
        audio_lengths=integers(message.audio_lengths) if message.audio_lengths else None,
        spatial_merge_size=optional(message, "spatial_merge_size"),
    )


def put_placeholders(message: table_pb2.Placeholders, placeholders: Placeholders) -> None:
    """Write placeholders into a message."""
    values = {name: value for name, value in asdict(placeholders).items() if value is not None}
    message.CopyFrom(table_pb2.Placeholders(**values))


def get_placeholders(message: table_pb2.Placeholders) -> Placeholders:
    """Read placeholders from a message."""
    ids = {name: optional(message, name) for name in ("image", "video", "audio")}
    crops, rows = optional(message, "crops"), integers(message.rows).tolist()
    return Placeholders(
        **ids,
        rows=rows or None,
        crops=None if crops is None else CropMarkers(*(getattr(crops, field.name) for field in fields(CropMarkers))),
    )


def _whole(name: str, values: npt.ArrayLike) -> npt.NDArray[np.generic]:
    """Cast integers to a type that can be sent; leave other values unchanged, to be refused when they are used."""
    array = host_array(name, values)
    if array.dtype.kind == "b":
        return array.astype(np.uint8)
    return array.astype(np.int64) if array.dtype.kind in "iu" and array.dtype.name not in DATA_TYPES else array


def _put_seconds(message: pb.Spans | pb.InputIds, seconds: Sequence[Fraction | float | None] | None) -> None:
    for value in rationals("seconds_per_frame", seconds):
        put_rational(message.seconds_per_frame.add(), value)


_LAYOUTS: dict[pb.ShardLayout.ValueType, Layout] = {
    pb.SHARD_LAYOUT_ZIGZAG: "zigzag",
    pb.SHARD_LAYOUT_CONTIGUOUS: "contiguous",
    pb.SHARD_LAYOUT_ZIGZAG_SEQUENCE: "zigzag-sequence",
    pb.SHARD_LAYOUT_CONTIGUOUS_SEQUENCE: "contiguous-sequence",
}
_SIDES: dict[pb.Side.ValueType, Side] = {pb.SIDE_LEFT: "left", pb.SIDE_RIGHT: "right"}
_IDS = {tensor_pb2.DATA_TYPE_UNSPECIFIED: None} | {DATA_TYPES[name]: name for name in ("int32", "int64", "float64")}


def put_query(
    message: pb.PositionsQuery, query: PositionsQuery, profile: str | None = None, beside: Beside | None = None
) -> None:
    """Fill a message with a query; see ``put_tensor`` for beside."""
    if isinstance(query.source, SegmentTable):
        message.segments.SetInParent()
        put_segments(message.segments, query.source)
    elif isinstance(query.source, Spans):
        _put_spans(message.spans, query.source)
    else:
        _put_input_ids(message.input_ids, query.source, beside)
    if profile is not None:
        message.profile = profile
    if query.scheme is not None:
        put_scheme(message.scheme, query.scheme)
    _put_one_or_each(message, "start", query.start)
    if query.strict is not None:
        message.strict = boolean("strict", query.strict)
    for view in query.views:
        _put_view(message.views.add(), view)
    if query.dense is not None:
        message.dense.SetInParent()
        if query.dense.dtype is not None:
            message.dense.dtype = _number("dtype", _IDS, np.dtype(query.dense.dtype).name)
        put_integers(message.dense.axes, query.dense.axes or ())


def get_query(
    name: str,
    message: pb.PositionsQuery,
    beside: Beside | None = None,
    schemes: Mapping[str, type[Scheme]] = SCHEMES,
) -> PositionsQuery:
    """Read the query from a message; fields left to a profile are None; see ``get_tensor`` for beside.

    Raises:
        InvalidInputError: a field is missing, unknown or wrong; the message names it.
        UnsupportedError: a field has an unsupported value; the message names it.
    """
    kind, dense = chosen(path(name, "source"), message, "source"), optional(message, "dense")
    source: SegmentTable | Spans | InputIds
    if kind == "input_ids":
        source = _get_input_ids(message.input_ids, beside)
    else:
        source = _get_spans(message.spans) if kind == "spans" else get_segments("", message.segments)
    return PositionsQuery(
        source=source,
        scheme=get_scheme(path(name, "scheme"), message.scheme, schemes) if message.HasField("scheme") else None,
        start=_one_or_each(name, message, "start", 0),
        strict=optional(message, "strict"),
        views=[_get_view(path(name, f"views[{i}]"), view) for i, view in enumerate(message.views)],
        dense=None if dense is None else _get_dense(path(name, "dense"), dense),
    )


def put_result(message: pb.Positions, result: PositionsResult, beside: Beside | None = None) -> None:
    """Fill a message with a result; see ``put_tensor`` for beside."""
    if result.table is not None:
        put_table(message.table, result.table)
    if result.dense is not None:
        put_tensor(message.dense, result.dense, beside)
    if result.next_positions is not None and result.deltas is not None:
        put_integers(message.next_positions, result.next_positions)
        put_integers(message.deltas, result.deltas)
    put_integers(message.cu_seqlens, result.cu_seqlens)


def get_result(name: str, message: pb.Positions, beside: Beside | None = None) -> PositionsResult:
    """Read the result from a message; arrays may share the bytes of the message; see ``get_tensor`` for beside."""
    if not message.HasField("table") and not message.HasField("dense"):
        raise InvalidInputError(f"{name}: got neither table nor dense, want one")
    documents = len(message.cu_seqlens) - 1
    known = len(message.next_positions) == documents
    return PositionsResult(
        table=get_table(path(name, "table"), message.table) if message.HasField("table") else None,
        dense=get_tensor(path(name, "dense"), message.dense, beside=beside) if message.HasField("dense") else None,
        next_positions=integers(message.next_positions) if known else None,
        deltas=integers(message.deltas) if known else None,
        cu_seqlens=np.array(message.cu_seqlens, np.int32),
    )


def _put_view(message: pb.View, view: View) -> None:
    if isinstance(view, Take):
        _put_arrays(message.take, view, "starts", "stops")
    elif isinstance(view, Window):
        _put_arrays(message.window, view, "documents", "starts", "lengths")
    elif isinstance(view, Decode):
        _put_one_or_each(message.decode, "steps", view.steps)
    elif isinstance(view, Shard):
        message.shard.layout = _number("layout", _LAYOUTS, view.layout)
        message.shard.world_size = integer("world_size", view.world_size, minimum=1, maximum=INT32_MAX)
        message.shard.rank = integer("rank", view.rank, minimum=0, maximum=view.world_size - 1)
    else:
        message.pad.side = _number("side", _SIDES, view.side)
        if view.length is not None:
            _put_one_or_each(message.pad, "length", view.length)


def _get_view(name: str, message: pb.View) -> View:
    """Read the view from a message."""
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


def _put_arrays(message: Message, view: Take | Window, *fields: str) -> None:
    message.SetInParent()
    for field in fields:
        put_integers(getattr(message, field), int_array(field, getattr(view, field), (None,)))


def _put_one_or_each(message: Message, field: str, value: npt.ArrayLike) -> None:
    message.SetInParent()
    if not isinstance(value, int) and host_array(field, value).ndim:
        put_integers(getattr(message, f"{field}_per_document"), int_array(field, value, (None,)))
    else:
        setattr(message, field, integer(field, value, minimum=INT32_MIN, maximum=INT32_MAX))


def _one_or_each(name: str, message: Message, field: str, default: D) -> IntArray | int | D:
    each: IntArray = integers(getattr(message, f"{field}_per_document"))
    if each.size and message.HasField(field):
        raise InvalidInputError(f"{path(name, field)} cannot be combined with {field}_per_document")
    return each if each.size else default if not message.HasField(field) else getattr(message, field)


def _number(name: str, meanings: Mapping[E, T], meaning: T) -> E:
    """Look up the enum value with this meaning."""
    numbers = {value: number for number, value in meanings.items() if value is not None}
    return numbers[one_of(name, meaning, numbers)]
