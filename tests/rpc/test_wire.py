"""Objects survive the round trip through messages, errors name wrong fields, and the generated code is up to date."""

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clients import failure
from message_strategies import for_each, messages, places
from results import assert_equal
from scheme_properties import every_scheme

from mmpos import SCHEMES, Grid, ImageProcessor, SegmentTable, SequenceBuilder, Text, schemes
from mmpos.client import Decode, Dense, PositionsQuery
from mmpos.errors import (
    InvalidInputError,
    LimitExceededError,
    MmposError,
    ServiceError,
    ServiceOverloadedError,
    ServiceTimeoutError,
    ServiceUnauthenticatedError,
    ServiceUnavailableError,
    UnsupportedError,
)
from mmpos.rotary import NTK, DynamicNTK, Linear, Linspace, Llama3, LongRoPE, PRoPE, Rotary, YaRN
from mmpos.rpc import errors, positions, rotary, sequences, tensors
from mmpos.rpc.v1 import error_pb2, positions_pb2, rotary_pb2, scheme_pb2, sequences_pb2, table_pb2, tensor_pb2

SEGMENTS = SegmentTable.from_documents([[Text(3), Grid(2, 3), Text(2)], [Grid(4, 4), Text(1)]])
BUILDER = SequenceBuilder(images=ImageProcessor("pillow"))

SCHEME_OBJECTS: list[schemes.Scheme] = [
    *every_scheme(), schemes.RopeTieV2(rounding="floor"), schemes.V2PE(stride=16), schemes.VideoRope(delta=3),
    schemes.Grid2D(axes=3, first=1),
    schemes.Grid2D(order="merged", spatial_merge_size=3), schemes.XDRope(axes=3, counting="batch", first_image=7),
    schemes.MRopeQwen25(tokens_per_second=Fraction(25, 2)), schemes.MRopeTransformers(tokens_per_second=4),
    schemes.TMRope(tokens_per_second=Fraction(25, 2), engine="serving", seconds_per_chunk=Fraction(3, 2)),
    schemes.TMRopeQwen3(engine="serving"),
]  # fmt: skip
ROTARIES = [
    Rotary(128), Rotary(64, theta=[1e4, 2e4], allocation="split"), Rotary(64, theta=[2e4], axes=1),
    Rotary(128, allocation="mrope-interleaved"), Rotary(128, allocation="sections", mrope_section=[16, 24, 24]),
    Rotary(8, allocation=[0, 1, 0, 1], pairing="adjacent", precision="hf"), Rotary(8, allocation=[1, 2, -1, -1]),
    Rotary(8, axes=4, allocation="heads", head_axes=[0, 0, 1, -1]), Rotary(16, allocation=[1, 0] * 4, axes_dim=[8, 8]),
    Rotary(128, allocation="axial", axes_dim=[16, 56, 56], pairing="adjacent"),
    Rotary(16, rotary_dim=8, inv_freq=[1, 0.5, 0.25, 0.125]),
    Rotary(8, kv_heads=3, allocation=[0, 1, -1] * 4, inv_freq=[0.5] * 12),
    Rotary(64, theta=5e5, scaling=YaRN(4, 2048, beta_fast=16, truncate=False)),
    Rotary(64, scaling=LongRoPE([1.0] * 32, [2.0] * 32, 100, 4), length=200),
    Rotary(64, scaling=DynamicNTK(2, 100), length=1000), Rotary(64, scaling=Llama3(8, 1, 4, 8192)),
    *(Rotary(64, scaling=scaling) for scaling in (NTK(2), Linear(2), PRoPE(0.25), Linspace(1.5))),
    Rotary(64, axes=3, scaling=[NTK(2), None, LongRoPE([1.0] * 32, [2.0] * 32, 100)], length=200),
]  # fmt: skip


def array(dtype: str, shape: tuple[int, ...] = (4, 6)) -> np.ndarray[Any, Any]:
    """Return a strided array with big-endian numbers."""
    return np.arange(np.prod(shape)).astype(np.dtype(dtype).newbyteorder(">")).reshape(shape)[..., ::2]


ARRAYS = [array(name) for name in ("uint8", "uint16", "int32", "int64", "float16", "float32", "float64", "complex64")]
TENSORS = [torch.arange(24).to(torch.bfloat16).reshape(4, 6).T, torch.arange(24, dtype=torch.int64)[::2]]
Way = tuple[type[Any], Callable[..., object], Callable[..., object]]
"""A message, and the functions that fill and read it."""

QUERY: Way = positions_pb2.PositionsQuery, positions.put_query, positions.get_query
SEGMENT_TABLE: Way = table_pb2.SegmentTable, positions.put_segments, positions.get_segments
SCHEME: Way = scheme_pb2.Scheme, positions.put_scheme, positions.get_scheme
ROTARY: Way = rotary_pb2.Rotary, rotary.put_rotary, rotary.get_rotary
IDS: Way = rotary_pb2.RotaryPositions, rotary.put_rotary_positions, rotary.get_rotary_positions
ARRAY: Way = tensor_pb2.Tensor, tensors.put_tensor, tensors.get_tensor
TENSOR: Way = tensor_pb2.Tensor, tensors.put_tensor, tensors.get_torch
DOCUMENT: Way = sequences_pb2.Document, sequences.put_parts, sequences.get_parts

OBJECTS: list[tuple[Way, object]] = [
    *((SCHEME, scheme) for scheme in SCHEME_OBJECTS),
    *((ROTARY, rotation) for rotation in ROTARIES),
    *((ARRAY, array) for array in (*ARRAYS, np.array(3, np.int32), np.zeros((0, 4), np.float32))),
    *((TENSOR, tensor) for tensor in TENSORS),
]


def received(way: Way, value: object) -> Any:
    """Return the object that arrives when this one is sent."""
    kind, put, get = way
    message = kind()
    put(message, value)
    return get("name", kind.FromString(message.SerializeToString()))


@pytest.mark.parametrize(("way", "value"), OBJECTS)
def test_every_object_survives_the_round_trip(way: Way, value: Any) -> None:
    native = isinstance(value, np.ndarray)
    assert_equal(received(way, value), value.astype(value.dtype.newbyteorder("=")) if native else value)


REQUESTED = places().map(lambda request: request.query)


@pytest.mark.parametrize(
    "way", [QUERY, SEGMENT_TABLE, SCHEME, ROTARY, IDS, ARRAY, DOCUMENT], ids=lambda way: way[0].__name__
)
def test_whatever_is_read_from_any_message_survives_the_round_trip(way: Way) -> None:
    kind, _, get = way

    def check(message: Any) -> None:
        with suppress(MmposError):
            value = get("name", message)
            assert_equal(received(way, value), value)

    for_each(REQUESTED if way is QUERY else messages(kind), 200, check)


def test_received_arrays_have_the_byte_order_that_the_extension_reads_and_tensors_belong_to_the_caller() -> None:
    assert {received(ARRAY, array).dtype.byteorder for array in ARRAYS} <= {"=", "|"}
    assert memoryview(received(ARRAY, np.arange(3))).format in ("l", "q")
    received(TENSOR, TENSORS[0]).add_(1)


def test_every_scheme_parameter_is_a_field() -> None:
    known = set(scheme_pb2.Scheme.DESCRIPTOR.fields_by_name)
    assert {name for scheme in SCHEMES.values() for name in positions.parameters(scheme)} == known - {"name"}


class Own(schemes.Flatten):
    """A subclass of Flatten."""


def refused(get: Callable[..., object], name: str, kind: type[Any], message: str, /, **fields: Any) -> tuple[Any, str]:
    """Return a call that reads a message with these fields, and the error that it raises."""
    return lambda: get(name, kind(**fields)), message


def names(enum: Any, first: int = 0) -> str:
    """List the names of an enum as errors do."""
    return ", ".join(enum.keys()[first:])


query = partial(refused, positions.get_query, "query", positions_pb2.PositionsQuery)
segments = partial(refused, positions.get_segments, "segments", table_pb2.SegmentTable)
table = partial(refused, positions.get_table, "table", table_pb2.PositionTable)
tensor = partial(refused, tensors.get_tensor, "q", tensor_pb2.Tensor)
rotation = partial(refused, rotary.get_rotary, "rotary", rotary_pb2.Rotary)


def view(message: str, **fields: Any) -> tuple[Any, str]:
    return query(f"query.views[0]{message}", spans=SPANS, views=[fields])


def part(message: str, **fields: Any) -> tuple[Any, str]:
    return refused(sequences.get_parts, "", sequences_pb2.Document, f"parts[0]{message}", parts=[fields])


SPANS = positions_pb2.Spans(lengths=[4])
SHARD = positions_pb2.Shard(world_size=1, layout=99)  # type: ignore[arg-type]
GRID: dict[str, Any] = {"kind": [2], "height": [1], "width": [2], "segments_per_document": [1]}
CLIP: dict[str, Any] = {"kind": [5], "height": [1], "width": [2], "segments_per_document": [1]}
KINDS, TYPES = names(table_pb2.SegmentKind, 1), names(tensor_pb2.DataType, 1)
WANT = "want 1, one for each"
DENSE = "DATA_TYPE_UNSPECIFIED, DATA_TYPE_INT32, DATA_TYPE_INT64, DATA_TYPE_FLOAT64"
STRIDE: dict[str, Any] = {"spans": SPANS, "scheme": {"name": "rope-tie", "stride": 4}}
SAME: dict[str, Any] = {"first_frame_segments": [0, 0], "first_frames": [1, 2]}
LEAST: dict[str, Any] = {"first_frame_segments": [0], "first_frames": [-(2**31)]}
REFUSED: list[tuple[Callable[[], object], str]] = [
    query("query.source: got none, want one of segments, spans, input_ids"),
    view(": got none, want one of take, window, decode, shard, pad"),
    view(f".shard.layout: got 99, want one of {names(positions_pb2.ShardLayout, 1)}", shard=SHARD),
    view(".pad.side: got SIDE_UNSPECIFIED, want one of SIDE_LEFT, SIDE_RIGHT", pad={}),
    query(f"query.dense.dtype: got DATA_TYPE_FLOAT16, want one of {DENSE}", spans=SPANS, dense={"dtype": 4}),
    query("query.start cannot be combined with start_per_document", spans=SPANS, start=1, start_per_document=[1]),
    query("input_ids: got none, want a Tensor", input_ids={}),
    query("grid_thw: got 2 numbers, want groups of 3", spans={"lengths": [4], "grid_thw": [1, 2]}),
    query("seconds_per_frame[0].denominator: got 0, want >= 1", spans={"seconds_per_frame": [{"numerator": 1}]}),
    query("query.scheme.stride: scheme 'rope-tie' has no such parameter", **STRIDE),
    segments(f"segments.kind[0]: got 8, want one of {KINDS}", kind=[8]),
    segments(f"segments.width: got 0 numbers, {WANT} segment", kind=[1], height=[1]),
    segments("segment_offsets: got [0], want 0 first and 1 last", kind=[1], height=[1], width=[2]),
    segments("segments.row_separator_segments[0]: got 1, want <= 0", **GRID, row_separator_segments=[1]),
    segments(f"segments.extra_tokens: got 2 numbers, {WANT} clip, thumbnail and tile", **CLIP, extra_tokens=[1, 0]),
    segments(f"segments.first_frames: got 0 numbers, {WANT} of first_frame_segments", **GRID, first_frame_segments=[0]),
    segments("segments.first_frame_segments: got [0, 0], want ascending indices", **GRID, **SAME),
    segments("segments.first_frames[0]: got -2147483648, want >= -2147483647", **GRID, **LEAST),
    segments(f"segments.seconds_per_frame: got 2, {WANT} segment", **GRID, seconds_per_frame=[{}, {}]),
    tensor(f"q.dtype: got DATA_TYPE_UNSPECIFIED, want one of {TYPES}"),
    tensor(f"q.dtype: got 77, want one of {TYPES}", dtype=77),
    tensor("q.data: got 4 bytes, want 12 for shape (3,) with 4-byte numbers", dtype=2, shape=[3], data=b"1234"),
    tensor(f"q.data: got 0 bytes, want {2**66} for shape ({2**62}, 4) with 4-byte numbers", dtype=2, shape=[2**62, 4]),
    tensor("q.shape: got (-1,), want sizes >= 0", dtype=2, shape=[-1]),
    tensor("q.shape: got 9 axes, want at most 8", dtype=2, shape=[1] * 9, data=b"1234"),
    table("table.axes: got 0, want 1 to 16"),
    table("table.table: got 8 bytes, want a multiple of 104, 13 rows of int64", axes=2, table=b"12345678"),
    table("table.documents: got 1 bytes, want a multiple of 32, 4 rows of int64", axes=2, documents=b"1"),
    part(": got none, want one of text, token_ids, image, image_size, grid, pixels, audio, clip"),
    part(".image_size.height: got 0, want 1 to 2147483647", image_size={"width": 3}),
    part(".grid: Grid.width: got 0, want >= 1", grid={"height": 3}),
    part(".clip.seconds_per_frame.denominator: got 0, want >= 1", clip={"seconds_per_frame": {"numerator": 1}}),
    part(
        ".token_ids.dtype: got DATA_TYPE_FLOAT32, want one of DATA_TYPE_INT32, DATA_TYPE_INT64", token_ids={"dtype": 6}
    ),
    rotation(f"rotary.pairing: got 9, want one of {names(rotary_pb2.Pairing)}", head_dim=8, pairing=9),
    rotation("rotary.allocation cannot be combined with pair_axis", head_dim=8, allocation="split", pair_axis=[0]),
    # Arguments of queries, and objects that cannot be sent.
    (partial(Dense, "nonsense"), "dtype: got 'nonsense', want int32, int64, float64 or None"),
    (partial(Dense, axes=()), "axes: got no axes, want at least one axis, or None for all"),
    (partial(PositionsQuery, []), "source: got list, want a SegmentTable, Spans or InputIds"),  # type: ignore[arg-type]
    (partial(PositionsQuery, SEGMENTS, views=[3]), "views[0]: got int, want Take, Window, Decode, Shard or Pad"),  # type: ignore[list-item]
    (PositionsQuery(SEGMENTS, views=[Decode(2), Decode(-1)]).run, "views[1]: steps: got -1, want >= 0"),
    (partial(received, IDS, [[0, 1]]), "positions: got list, want a PositionTable or a tensor of ids for a service"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message[:50] for _, message in REFUSED])
def test_errors_name_the_invalid_field(call: Callable[[], object], message: str) -> None:
    assert failure(call) == (InvalidInputError, message)


def test_other_errors_have_their_own_type() -> None:
    with pytest.raises(UnsupportedError, match=r"^scheme: got Own\(\), want one of mmpos.SCHEMES, or the name"):
        received(SCHEME, Own())
    with pytest.raises(LimitExceededError, match=r"^table.num_tokens: got 2147483648, want at most"):
        table("", axes=2, num_tokens=2**31)[0]()


def test_a_sequence_has_margins_of_0_and_1_and_as_many_tokens_as_segments() -> None:
    message = sequences_pb2.Sequence()
    sequences.put_sequence(message, BUILDER.build(["a", Grid(1, 2)]))
    message.ClearField("image_margins")  # like older servers, which support no other margins
    assert sequences.get_sequence("sequence", message).image_margins == (1, 1)
    message.image_margins.extend([1, 2])
    with pytest.raises(InvalidInputError, match=r"^sequence\.image_margins: got \[1, 2\], want two numbers of 0"):
        sequences.get_sequence("sequence", message)
    message.input_ids.CopyFrom(tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_INT32, shape=[1], data=b"1234"))
    with pytest.raises(InvalidInputError, match=r"sequence\.input_ids: got 1 token, 5 in segments and 5"):
        sequences.get_sequence("sequence", message)


ERRORS = [
    (InvalidInputError("a"), "INVALID_ARGUMENT", error_pb2.ERROR_CODE_INVALID_INPUT),
    (UnsupportedError("a"), "UNIMPLEMENTED", error_pb2.ERROR_CODE_UNSUPPORTED),
    (LimitExceededError("a"), "RESOURCE_EXHAUSTED", error_pb2.ERROR_CODE_LIMIT_EXCEEDED),
    (ServiceUnavailableError("a"), "UNAVAILABLE", error_pb2.ERROR_CODE_INTERNAL),
    (ServiceTimeoutError("a"), "DEADLINE_EXCEEDED", error_pb2.ERROR_CODE_INTERNAL),
    (ServiceUnauthenticatedError("a"), "UNAUTHENTICATED", error_pb2.ERROR_CODE_INTERNAL),
    (ServiceError("a"), "INTERNAL", error_pb2.ERROR_CODE_INTERNAL),
]


@pytest.mark.parametrize(("error", "status", "code"), ERRORS, ids=repr)
def test_errors_and_statuses_convert_both_ways(error: MmposError, status: str, code: object) -> None:
    assert errors.to_status(error) == (status, "a")
    assert type(errors.from_status(status, "a")) is type(error)
    message = error_pb2.Error()
    errors.put_error(message, error)
    assert (message.code, message.message) == (code, "a")
    kind = ServiceError if isinstance(error, ServiceError) else type(error)
    assert type(errors.get_error(message)) is kind


def test_statuses_without_an_error_of_their_own() -> None:
    assert errors.to_status(ServiceOverloadedError("busy", 2)) == ("RESOURCE_EXHAUSTED", "busy")
    result = errors.from_status("RESOURCE_EXHAUSTED", "busy", 0.5)
    assert isinstance(result, ServiceOverloadedError)
    assert (str(result), result.retry_after) == ("busy", 0.5)
    assert type(errors.from_status("PERMISSION_DENIED", "no")) is ServiceUnauthenticatedError
    assert str(errors.from_status("DATA_LOSS", "gone")) == "DATA_LOSS: gone"


def test_a_message_with_half_a_surrogate_pair_is_escaped() -> None:
    message = error_pb2.Error()
    errors.put_error(message, InvalidInputError("name: got '\ud800', want one"))
    assert message.message == r"name: got '\ud800', want one"


def test_generated_code_is_current(tmp_path: Path) -> None:
    outputs = f"--python_out={tmp_path}", f"--mypy_out={tmp_path}"
    command = [sys.executable, "-m", "grpc_tools.protoc", "-Iproto", *outputs]
    root, folder = Path(__file__).parents[2], "mmpos/rpc/v1"  # the same in proto, and of the generated code
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    sources = [str(path.relative_to(root)) for path in sorted((root / "proto" / folder).glob("*.proto"))]
    subprocess.run([*command, *sources], cwd=root, env=environment, check=True, capture_output=True)
    fresh = {path.name: path.read_text() for path in (tmp_path / folder).iterdir()}
    committed = {path.name: path.read_text() for path in (root / folder).glob("*_pb2.py*")}
    assert len(fresh) == 2 * len(sources)
    assert sorted(committed) == sorted(fresh)
    assert [name for name in fresh if fresh[name] != committed[name]] == [], "run `make proto`"
