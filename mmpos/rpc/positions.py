"""Conversion of schemes, segment tables, position tables, queries and results to messages and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message

from mmpos.errors import InvalidInputError, LimitExceededError, UnsupportedError
from mmpos.positions.table import Layout, PositionTable, Side
from mmpos.positions.table_rows import AXES, FIRST_SEGMENT, FIRST_TOKEN, MAX_AXES, NEXT_POSITION, NO_POSITION, OFFSET
from mmpos.rpc.beside import Beside
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
    naming,
    one_of,
    shown,
)

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
    put_each_segments([message], segments, [0, segments.num_documents])


def put_each_segments(messages: Sequence[Any], segments: SegmentTable, documents: Sequence[int]) -> None:
    """Fill each message with the segments of some documents, listed by the first of each message, then their number."""
    offsets = segments.segment_offsets
    first = offsets[documents]

    def put(field: str, values: npt.NDArray[Any], stops: Sequence[int]) -> None:
        numbers = values.tolist()
        for message, begin, stop in zip(messages, stops, stops[1:], strict=False):
            getattr(message, field).extend(numbers[begin:stop])

    def put_some(field: str, some: npt.NDArray[np.bool_], values: npt.NDArray[Any] | None = None) -> None:
        """Write values of some segments, or their indices, counted from the first segment of each message."""
        (index,) = some.nonzero()
        cuts = index.searchsorted(first)
        put(field, index - first[:-1].repeat(np.diff(cuts)) if values is None else values[index], cuts.tolist())

    stops = first.tolist()
    put("kind", segments.kind + np.uint8(1), stops)
    for field, sides in zip(_LISTS[1:4], segments.extents, strict=True):
        if field != "frames" or (sides != 1).any():
            put(field, sides, stops)
    put("segments_per_document", offsets[1:] - offsets[:-1], documents)
    if segments.seconds_per_frame is not None:
        times, alone = segments.seconds_per_frame.T.tolist(), len(messages) == 1
        for message, begin, stop in zip(messages, stops, stops[1:], strict=False):
            if alone or any(numerator for numerator, _ in times[begin:stop]):  # another document may be the timed one
                for numerator, denominator in times[begin:stop]:
                    message.seconds_per_frame.add(numerator=numerator, denominator=denominator)
    if segments.row_separator is not None:
        put_some("row_separator_segments", segments.row_separator)
    if segments.extra_tokens is not None:
        put_some("extra_tokens", segments.kind >= CLIP, segments.extra_tokens)
    if segments.first_frame is not None:
        named = segments.first_frame != NO_FRAME
        put_some("first_frame_segments", named)
        put_some("first_frames", named, segments.first_frame)


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
    if len(times) not in (0, segments):
        want = f"{segments}, one for each segment"
        raise InvalidInputError(f"{path(name, 'seconds_per_frame')}: got {len(times)}, want {want}")
    return np.array([(time.numerator, time.denominator) for time in times], np.int64).T.copy() if times else None


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


def put_table(
    message: table_pb2.PositionTable, positions: PositionTable, part: tuple[IntArray, IntArray, int] | None = None
) -> None:
    """Fill a message with a position table, or with a part of one: its columns, documents and number of tokens."""
    table, documents, num_tokens = part or (positions.table, positions.documents, positions.num_tokens)
    message.table = table.astype("<i8", copy=False).tobytes()
    message.documents = documents.astype("<i8", copy=False).tobytes()
    message.num_tokens = num_tokens
    message.axes = (len(table) - AXES) // 4
    message.fractional = positions.fractional
    message.scheme = positions.scheme


def put_each_result(messages: Sequence[pb.Positions], positions: PositionTable) -> None:
    """Fill each message with the positions of one document."""
    table, documents = positions.table.copy(), positions.documents.copy()
    first = np.append(documents[:NEXT_POSITION], [[positions.num_segments], [positions.num_tokens]], axis=1)
    segments, tokens = first.tolist()
    table[OFFSET] -= first[FIRST_TOKEN, :-1].repeat(np.diff(first[FIRST_SEGMENT]))
    documents[:NEXT_POSITION] = 0
    for d, message in enumerate(messages):
        columns, length = table[:, segments[d] : segments[d + 1]], tokens[d + 1] - tokens[d]
        put_table(message.table, positions, (columns, documents[:, d], length))
        next_position, delta = documents[NEXT_POSITION:, d].tolist()
        if next_position != NO_POSITION:
            message.next_positions.append(next_position)
            message.deltas.append(delta)
        message.cu_seqlens.extend((0, length))


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


def _put_source(message: pb.Spans | pb.InputIds, source: Spans | InputIds, beside: Beside | None) -> None:
    """Fill a message with documents; its fields have the names of their attributes."""
    message.SetInParent()
    for field in message.DESCRIPTOR.fields:
        name, value = field.name, getattr(source, field.name)
        if value is None:
            continue
        if name == "placeholders":
            if value != Placeholders():
                put_placeholders(getattr(message, name), value)
        elif name == "seconds_per_frame":
            for time in rationals(name, value):
                put_rational(message.seconds_per_frame.add(), time)
        elif field.message_type is not None:
            put_tensor(getattr(message, name), _whole(name, value), beside)
        elif field.is_repeated:
            numbers = int_array(name, value, (None, 3) if name.endswith("grid_thw") else (None,))
            put_integers(getattr(message, name), numbers + (name == "kind"))
        elif name == "spatial_merge_size":
            setattr(message, name, integer(name, value, maximum=INT32_MAX))
        else:
            setattr(message, name, boolean(name, value))


def _get_spans(message: pb.Spans) -> Spans:
    lists = integer_lists(message, "lengths", "offsets", "grid_thw", "documents", "kind", "extra_tokens")
    lengths, offsets, grid_thw, documents, kind, extra = lists
    return Spans(
        lengths,
        offsets,
        in_columns("grid_thw", grid_thw, 3),
        documents if documents.size else None,
        seconds_per_frame=get_seconds("seconds_per_frame", message.seconds_per_frame) or None,
        row_separator=message.row_separator,
        kind=kind - 1 if kind.size else None,
        extra_tokens=extra if extra.size else None,
    )


def _get_input_ids(message: pb.InputIds, beside: Beside | None) -> InputIds:
    if not message.HasField("input_ids"):
        required("", message, "input_ids")
    values: dict[str, Any] = {}
    for field, value in message.ListFields():
        name = field.name
        if name == "placeholders":
            values[name] = get_placeholders(value)
        elif name == "seconds_per_frame":
            values[name] = get_seconds(name, value)
        elif field.message_type is not None:
            values[name] = get_tensor(name, value, beside=beside)
        else:
            columns = 3 if name.endswith("grid_thw") else None
            values[name] = integers(value, columns=columns, name=name) if field.is_repeated else value
    return InputIds(**values)


def put_placeholders(message: table_pb2.Placeholders, placeholders: Placeholders) -> None:
    """Write placeholders into a message."""
    values = {name: value for name, value in asdict(placeholders).items() if value is not None}
    message.CopyFrom(table_pb2.Placeholders(**values))


def get_placeholders(message: table_pb2.Placeholders) -> Placeholders:
    """Read placeholders from a message."""
    values: dict[str, Any] = {field.name: value for field, value in message.ListFields()}
    if "rows" in values:
        values["rows"] = tuple(values["rows"])
    if "crops" in values:
        values["crops"] = CropMarkers(*(getattr(values["crops"], field.name) for field in fields(CropMarkers)))
    return Placeholders(**values)


def _whole(name: str, values: npt.ArrayLike) -> npt.NDArray[np.generic]:
    """Cast integers to a type that can be sent; leave other values unchanged, to be refused when they are used."""
    array = host_array(name, values)
    if array.dtype.kind == "b":
        return array.astype(np.uint8)
    return array.astype(np.int64) if array.dtype.kind in "iu" and array.dtype.name not in DATA_TYPES else array


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
    else:
        inner = message.spans if isinstance(query.source, Spans) else message.input_ids
        _put_source(inner, query.source, beside)
    if profile is not None:
        message.profile = profile
    if query.scheme is not None:
        put_scheme(message.scheme, query.scheme)
    _put_one_or_each(message, "start", query.start)
    if query.strict is not None:
        message.strict = boolean("strict", query.strict)
    for i, view in enumerate(query.views):
        with naming(f"views[{i}]"):
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
    scheme: str | Scheme | None = None,
) -> PositionsQuery:
    """Read the query from a message; ``scheme`` is that of a query without one; see ``get_tensor`` for beside.

    Raises:
        InvalidInputError: a field is missing, unknown or wrong; the message names it.
        UnsupportedError: a field has an unsupported value; the message names it.
    """
    kind = message.WhichOneof("source")
    source: SegmentTable | Spans | InputIds
    if kind == "segments":
        source = get_segments("", message.segments)
    elif kind == "input_ids":
        source = _get_input_ids(message.input_ids, beside)
    else:
        chosen(path(name, "source"), message, "source")
        source = _get_spans(message.spans)
    return PositionsQuery(
        source=source,
        scheme=get_scheme(f"{name}.scheme", message.scheme, schemes) if message.HasField("scheme") else scheme,
        start=_one_or_each(name, message, "start", 0) if message.start_per_document else message.start,
        strict=message.strict if message.HasField("strict") else None,
        views=[_get_view(name, i, view) for i, view in enumerate(message.views)],
        dense=_get_dense(f"{name}.dense", message.dense) if message.HasField("dense") else None,
    )


def put_result(message: pb.Positions, result: PositionsResult, beside: Beside | None = None) -> None:
    """Fill a message with a result; see ``put_tensor`` for beside."""
    if result.table is not None:
        put_table(message.table, result.table)
    if result.dense is not None:
        put_tensor(message.dense, result.dense, beside)
    if result.next_positions is not None and result.deltas is not None:
        message.next_positions.extend(result.next_positions.tolist())
        message.deltas.extend(result.deltas.tolist())
    message.cu_seqlens.extend(result.cu_seqlens.tolist())


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
    inner = getattr(message, type(view).__name__.lower())
    inner.SetInParent()
    if isinstance(view, Shard):
        inner.layout = _number("layout", _LAYOUTS, view.layout)
        inner.world_size = integer("world_size", view.world_size, minimum=1, maximum=INT32_MAX)
        inner.rank = integer("rank", view.rank, minimum=0, maximum=view.world_size - 1)
        return
    for field, value in vars(view).items():
        if field == "side":
            inner.side = _number(field, _SIDES, value)
        elif isinstance(view, Take | Window):
            put_integers(getattr(inner, field), int_array(field, value, (None,)))
        elif value is not None:
            _put_one_or_each(inner, field, value)


def _get_view(query: str, index: int, message: pb.View) -> View:
    kind = message.WhichOneof("view")
    if kind is None:
        chosen(path(query, f"views[{index}]"), message, "view")
    name = f"{query}.views[{index}].{kind}"
    if kind == "take":
        return Take(*integer_lists(message.take, "starts", "stops"))
    if kind == "window":
        return Window(*integer_lists(message.window, "documents", "starts", "lengths"))
    if kind == "decode":
        return Decode(_one_or_each(name, message.decode, "steps", 1))
    if kind == "shard":
        shard = message.shard
        return Shard(shard.rank, shard.world_size, enum(name, shard, "layout", _LAYOUTS))
    return Pad(_one_or_each(name, message.pad, "length", None), enum(name, message.pad, "side", _SIDES))


def _get_dense(name: str, message: pb.Dense) -> Dense:
    if len(message.axes) > MAX_AXES:
        raise LimitExceededError(f"{path(name, 'axes')}: got {len(message.axes)} rows, want at most {MAX_AXES}")
    return Dense(enum(name, message, "dtype", _IDS), tuple(message.axes) or None)


def _put_one_or_each(message: Message, field: str, value: npt.ArrayLike) -> None:
    if not isinstance(value, int) and host_array(field, value).ndim:
        put_integers(getattr(message, f"{field}_per_document"), int_array(field, value, (None,)))
    else:
        setattr(message, field, integer(field, value, minimum=INT32_MIN, maximum=INT32_MAX))


def _one_or_each(name: str, message: Message, field: str, default: D) -> IntArray | int | D:
    each = getattr(message, f"{field}_per_document")
    if not each:
        return getattr(message, field) if message.HasField(field) else default
    if message.HasField(field):
        raise InvalidInputError(f"{path(name, field)} cannot be combined with {field}_per_document")
    return integers(each)


def _number(name: str, meanings: Mapping[E, T], meaning: T) -> E:
    """Look up the enum value with this meaning."""
    numbers = {value: number for number, value in meanings.items() if value is not None}
    return numbers[one_of(name, meaning, numbers)]
