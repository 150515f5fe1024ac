"""Random messages: arbitrary ones that the protocol can encode, and mostly valid ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hostile_images import encoded
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from mmpos import SCHEMES, Grid, Placeholders, SegmentTable, Text
from mmpos.client import Decode, Dense, InputIds, Pad, PositionsQuery, Shard, Spans, Take, Window
from mmpos.rpc.positions import put_query
from mmpos.rpc.v1 import info_pb2, positions_pb2, rotary_pb2, sequences_pb2, tensor_pb2

T = TypeVar("T")
M = TypeVar("M", bound=Message)

REQUESTS: Mapping[str, tuple[type[Any], type[Any]]] = {
    "InfoService/GetInfo": (info_pb2.GetInfoRequest, info_pb2.GetInfoResponse),
    "PositionService/Place": (positions_pb2.PlaceRequest, positions_pb2.PlaceResponse),
    "SequenceService/Build": (sequences_pb2.BuildRequest, sequences_pb2.BuildResponse),
    "RotaryService/CosSin": (rotary_pb2.CosSinRequest, rotary_pb2.CosSinResponse),
    "RotaryService/Rotate": (rotary_pb2.RotateRequest, rotary_pb2.RotateResponse),
}
"""Request and response of every unary call."""

STREAMS: Mapping[str, tuple[type[Any], type[Any]]] = {
    "PositionService/StreamPlace": (positions_pb2.StreamPlaceRequest, positions_pb2.StreamPlaceResponse),
    "SequenceService/StreamBuild": (sequences_pb2.StreamBuildRequest, sequences_pb2.StreamBuildResponse),
}
"""Request and response of every stream."""

Fields = dict[str, object]

_NAMES = st.sampled_from(["", "default", "bytes", "floor", "raster", "merged", "yarn", "linear", "axial", *SCHEMES])
_EDGES = st.sampled_from([0, 1, 2, 3, 4, 255, 256, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, -1, -(2**31), -(2**63)])
_FLOATS = st.sampled_from([0.0, -0.0, 1.0, 1e-300, 1e300, float("inf"), float("-inf"), float("nan")]) | st.floats()
# Without these fields, no other field has an effect; other tests leave them out.
_NEEDED = {"query", "q", "positions", "input_ids"}


def messages(kind: type[Any]) -> st.SearchStrategy[Any]:
    """Draw any encodable message of this type; most of them are nonsense."""
    return _fields(kind.DESCRIPTOR).map(lambda fields: kind(**fields))


def _fields(descriptor: Descriptor) -> st.SearchStrategy[Fields]:
    oneofs = [oneof for oneof in descriptor.oneofs if not oneof.name.startswith("_")]
    alone = [field for field in descriptor.fields if not any(field in oneof.fields for oneof in oneofs)]
    plain = st.fixed_dictionaries(
        {field.name: _value(field) for field in alone if field.name in _NEEDED},
        optional={field.name: _value(field) for field in alone if field.name not in _NEEDED},
    )
    choices = [
        st.one_of(st.just({}), *(st.fixed_dictionaries({field.name: _value(field)}) for field in oneof.fields))
        for oneof in oneofs
    ]
    return st.tuples(plain, *choices).map(lambda drawn: {k: v for fields in drawn for k, v in fields.items()})


def _value(field: FieldDescriptor) -> st.SearchStrategy[object]:
    one = _scalar(field)
    return st.lists(one, max_size=4) if field.is_repeated else one


def _scalar(field: FieldDescriptor) -> st.SearchStrategy[object]:
    if field.message_type is not None:
        return _fields(field.message_type)
    if field.enum_type is not None:
        return st.sampled_from(sorted(field.enum_type.values_by_number)) | st.sampled_from([99, -1, 2**31 - 1])
    if field.type == field.TYPE_INT32:
        return _EDGES.filter(lambda n: -(2**31) <= n < 2**31)
    if field.type == field.TYPE_INT64:
        return _EDGES
    if field.type == field.TYPE_UINT64:
        return st.integers(0, 2**64 - 1)
    return {
        field.TYPE_BOOL: st.booleans(),
        field.TYPE_STRING: _NAMES | st.text(max_size=4),
        field.TYPE_BYTES: st.binary(max_size=200) | st.just(picture()),
        field.TYPE_DOUBLE: _FLOATS,
    }[field.type]


# Mostly valid messages.

_small = st.integers(1, 6)


def _one_of(*numbers: int) -> st.SearchStrategy[Any]:
    """Draw one of these enum numbers; the result is Any because each enum has its own type."""
    return st.sampled_from(numbers)


@functools.cache
def picture(kind: str = "PNG", size: tuple[int, int] = (30, 20)) -> bytes:
    """Encode a small image file."""
    return encoded(Image.new("RGB", size, (10, 200, 30)), kind)


def tensor(values: npt.ArrayLike, dtype: str = "int64") -> tensor_pb2.Tensor:
    """Encode numbers as a tensor message."""
    array = np.asarray(values, dtype)
    number = tensor_pb2.DataType.Value(f"DATA_TYPE_{dtype.upper()}")
    return tensor_pb2.Tensor(dtype=number, shape=array.shape, data=array.tobytes())


_texts = st.builds(Text, _small)
_grids = st.builds(Grid, _small, _small, frames=st.sampled_from([1, 1, 1, 2]))
_documents = st.builds(
    lambda text, pairs: [text, *chain(*pairs)], _texts, st.lists(st.tuples(_grids, _texts), max_size=3)
)
_tables = st.lists(_documents, max_size=3).map(SegmentTable.from_documents)
_sources = st.one_of(
    _tables,
    _tables,
    st.builds(lambda h, w, at, n: Spans([at + h * w + 1, n], [at], [[1, h, w]], [0]), _small, _small, _small, _small),
    st.builds(lambda h, w: InputIds([1, 2, *[9] * (h * w), 3], Placeholders(9), [[1, h, w]]), _small, _small),
)
_few = st.lists(st.integers(0, 8), min_size=2, max_size=2)
_layouts = st.sampled_from(["zigzag", "contiguous", "zigzag-sequence", "contiguous-sequence"])
# Views with small arguments, many of which do not fit the documents.
_views = st.one_of(
    st.builds(Take, _few.map(sorted), st.lists(st.integers(8, 16), min_size=2, max_size=2)),
    st.builds(Window, st.just([0, 0]) | _few, _few, _few),
    st.builds(Decode, _small),
    st.builds(Shard, st.integers(0, 1), st.just(2), _layouts),
    st.builds(Pad, st.none() | st.sampled_from([16, 64, 128]), st.sampled_from(["left", "right"])),
)


def places() -> st.SearchStrategy[positions_pb2.PlaceRequest]:
    """Draw batches that most schemes can place."""
    dense = st.builds(Dense, st.sampled_from([None, "int32", "int64", "float64"]))
    views, schemes = st.lists(_views, max_size=2), st.none() | st.sampled_from(list(SCHEMES))
    start = st.just(0) | st.integers(-3, 1000)
    return st.builds(PositionsQuery, _sources, schemes, start, views=views, dense=st.none() | dense).map(_request)


def _request(query: PositionsQuery) -> positions_pb2.PlaceRequest:
    request = positions_pb2.PlaceRequest()
    put_query(request.query, query)
    return request


_parts = st.one_of(
    st.text(min_size=1, max_size=8).map(lambda text: sequences_pb2.Part(text=text)),
    st.lists(st.integers(0, 255), min_size=1, max_size=5).map(lambda ids: sequences_pb2.Part(token_ids=tensor(ids))),
    st.sampled_from(["PNG", "JPEG", "WEBP", "GIF"]).map(lambda kind: sequences_pb2.Part(image=picture(kind))),
    st.builds(
        lambda h, w: sequences_pb2.Part(image_size=sequences_pb2.ImageSize(height=20 * h, width=20 * w)), _small, _small
    ),
    st.builds(lambda h, w: sequences_pb2.Part(grid=sequences_pb2.Grid(height=h, width=w)), _small, _small),
)


@st.composite
def builds(draw: st.DrawFn) -> sequences_pb2.BuildRequest:
    """Draw a few documents, each with a few parts of any type."""
    documents = draw(st.lists(st.lists(_parts, max_size=4), max_size=3))
    query = sequences_pb2.SequencesQuery(start=draw(st.integers(0, 9)), patches=draw(st.booleans()))
    query.documents.extend(sequences_pb2.Document(parts=parts) for parts in documents)
    return sequences_pb2.BuildRequest(query=query)


@st.composite
def rotations(draw: st.DrawFn) -> rotary_pb2.RotateRequest:
    """Draw queries with four tokens and two heads, and matching ids."""
    dtype = draw(st.sampled_from(["float32", "float16"]))
    ids = draw(st.lists(st.lists(st.integers(-5, 10**6), min_size=4, max_size=4), min_size=2, max_size=2))
    request = rotary_pb2.RotateRequest(layout=draw(_one_of(0, 1)), conjugate=draw(st.booleans()))
    request.q.CopyFrom(tensor(np.ones((4, 2, 8)), dtype))
    request.positions.ids.CopyFrom(tensor(ids, draw(st.sampled_from(["int32", "int64", "float64"]))))
    rotary = rotary_pb2.Rotary(head_dim=8, pairing=draw(_one_of(0, 1, 2)), precision=draw(_one_of(0, 1, 2)))
    request.rotary.rotary.CopyFrom(rotary)
    return request


def tables(rotate: rotary_pb2.RotateRequest) -> rotary_pb2.CosSinRequest:
    """Request cos and sin for the same tokens and rotation."""
    return rotary_pb2.CosSinRequest(positions=rotate.positions, rotary=rotate.rotary)


LIKELY: Mapping[str, st.SearchStrategy[Any]] = {
    "InfoService/GetInfo": st.just(info_pb2.GetInfoRequest()),
    "PositionService/Place": places(),
    "SequenceService/Build": builds(),
    "RotaryService/CosSin": rotations().map(tables),
    "RotaryService/Rotate": rotations(),
}
"""Mostly valid requests, by call."""


# Examples drawn from the strategies.


def for_each(strategy: st.SearchStrategy[T], number: int, function: Callable[[T], object]) -> None:
    """Call the function with ``number`` examples, which are the same in every run."""
    health = list(HealthCheck)
    chosen = settings(max_examples=number, derandomize=True, deadline=None, database=None, suppress_health_check=health)

    @chosen
    @given(strategy)
    def once(example: T) -> None:
        function(example)

    once()


def corpus(method: str, number: int) -> list[bytes]:
    """Encode mostly valid messages, for tests to mutate."""
    requests: list[bytes] = []
    for_each(LIKELY[method], number, lambda request: requests.append(request.SerializeToString()))
    return requests
