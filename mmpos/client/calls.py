"""Calls, written once as data: where each goes, what it sends, and how its answer is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, TypeVar

from google.protobuf.message import EncodeError

from mmpos.client.info import ServerInfo, get_info
from mmpos.client.options import Options
from mmpos.errors import InvalidInputError, LimitExceededError, MmposError, ServiceError
from mmpos.rpc.positions import get_result, put_query
from mmpos.rpc.queries import InputIds, PositionsQuery, PositionsResult, Spans, View
from mmpos.rpc.v1 import info_pb2, positions_pb2
from mmpos.segments.table import SegmentTable

if TYPE_CHECKING:
    import numpy.typing as npt

    from mmpos.positions.table import PositionTable
    from mmpos.rpc.tensors import Memory
    from mmpos.schemes import Scheme

T = TypeVar("T")

Errors = Literal["raise", "return"]

Ask = Callable[[Any], Callable[[Any], T]]
"""Fills the query of a request, and gives what reads the answer."""


def _raise(error: MmposError) -> NoReturn:
    raise error


@dataclass(frozen=True)
class Call(Generic[T]):
    """A unary call.

    Args:
        path: of the method.
        request: the message, serialised.
        response: the type of the answer.
        decode: makes the result of the answer, or raises what the server says of it.
        refused: makes a result of the error of the whole call.
        waits: whether it waits for a server that is gone.
    """

    path: str
    request: bytes
    response: Any
    decode: Callable[[Any], T]
    refused: Callable[[MmposError], T] = _raise
    waits: bool = True


@dataclass(frozen=True)
class Method:
    """A method with a stream twin.

    Args:
        path: of the unary method.
        request: its request, with a field ``query``.
        response: its response.
        stream_path: of the stream.
        stream_request: its request, with fields ``id`` and ``query``.
        stream_response: its response, with fields ``id``, ``error`` and that of the answer.
        answer: the field of both responses that holds the answer.
    """

    path: str
    request: Any
    response: Any
    stream_path: str
    stream_request: Any
    stream_response: Any
    answer: str

    def call(self, ask: Ask[T]) -> Call[T]:
        """The unary call that asks this."""
        request = self.request()
        request.query.SetInParent()
        decode = ask(request.query)
        return Call(self.path, serialised(request), self.response, lambda got: decode(getattr(got, self.answer)))


PLACE = Method(
    "/mmpos.rpc.v1.PositionService/Place",
    positions_pb2.PlaceRequest,
    positions_pb2.PlaceResponse,
    "/mmpos.rpc.v1.PositionService/StreamPlace",
    positions_pb2.StreamPlaceRequest,
    positions_pb2.StreamPlaceResponse,
    "positions",
)


def place(
    options: Options,
    segments: SegmentTable | Spans | InputIds,
    scheme: str | Scheme | None = None,
    start: npt.ArrayLike = 0,
    strict: bool | None = None,
    *,
    views: Sequence[View] = (),
) -> Call[PositionTable]:
    """The positions of documents, as ``mmpos.place`` gives them.

    Args:
        segments: the documents, as a SegmentTable, Spans or InputIds.
        scheme: a name from mmpos.SCHEMES or a scheme object; None: that of the profile.
        start: id of each document's first token, one for all or (documents,).
        strict: whether two grids without text between are an error; None: the scheme decides.
        views: what to make of the placed table, in this order: Take, Window, Decode, Shard, Pad.

    Returns:
        A new PositionTable.

    Raises:
        MmposError: what ``mmpos.place`` and the views raise; LimitExceededError also for a limit of the server.
        ServiceError: no answer.
    """
    if not isinstance(segments, SegmentTable | Spans | InputIds):
        raise InvalidInputError(f"segments: got {type(segments).__name__}, want a SegmentTable")
    found = query(options, PositionsQuery(segments, scheme, start, strict, views))

    def decode(answer: Any) -> PositionTable:
        table = found.decode(answer).table
        if table is None:
            raise ServiceError("answer: got ids, want a table")
        return table

    return Call(found.path, found.request, found.response, decode)


def query(options: Options, query: PositionsQuery) -> Call[PositionsResult]:
    """The answer to a query, as its ``run`` gives it, but for what it leaves to the profile.

    Args:
        query: which documents, which scheme, which views, table or ids.

    Raises:
        MmposError: what ``query.run`` raises; LimitExceededError also for a limit of the server.
        ServiceError: no answer.
    """
    return PLACE.call(ask_positions(options, query))


def info(options: Options) -> Call[ServerInfo]:
    """Version, schemes, limits and profiles of the server."""
    request = serialised(info_pb2.GetInfoRequest())
    return Call("/mmpos.rpc.v1.InfoService/GetInfo", request, info_pb2.GetInfoResponse, get_info)


def healthy(options: Options, service: str = "") -> Call[bool]:
    """Whether the server says that it serves; False also where none answers.

    Args:
        service: full name of a service, such as "mmpos.rpc.v1.PositionService"; empty: the whole server.
    """
    from grpc_health.v1 import health_pb2 as health

    def refused(error: MmposError) -> bool:
        if isinstance(error, ServiceError):
            return False
        raise error

    if not isinstance(service, str):
        raise InvalidInputError(f"service: got {service!r}, want a name")
    request = serialised(health.HealthCheckRequest(service=service))
    serving = health.HealthCheckResponse.SERVING
    response = health.HealthCheckResponse
    return Call(
        "/grpc.health.v1.Health/Check", request, response, lambda got: got.status == serving, refused, waits=False
    )


def ask_positions(options: Options, query: PositionsQuery) -> Ask[PositionsResult]:
    """What asks for positions."""
    if not isinstance(query, PositionsQuery):
        raise InvalidInputError(f"query: got {type(query).__name__}, want a PositionsQuery")

    memory = options.memory

    def ask(message: Any) -> Callable[[Any], PositionsResult]:
        put_query(message, query, options.profile, memory)
        if memory is not None and query.dense is not None:
            memory.answer(message)
        return lambda answer: _read_positions(answer, memory)

    return ask


@contextmanager
def trusting() -> Iterator[None]:
    """Where an answer is read: what is wrong with it is no fault of the caller."""
    try:
        yield
    except MmposError as error:
        raise ServiceError(f"answer: {error}") from error


def serialised(message: Any) -> bytes:
    """The bytes of a message.

    Raises:
        LimitExceededError: 2 GiB or more, which no message may have.
    """
    try:
        data: bytes = message.SerializeToString()
    except (EncodeError, ValueError) as error:
        raise LimitExceededError(f"request: got {message.ByteSize()} bytes, want less than 2 GiB ({error})") from None
    return data


def _read_positions(answer: Any, memory: Memory | None) -> PositionsResult:
    with trusting():
        return get_result("positions", answer, memory)
