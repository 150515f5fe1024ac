"""Descriptions of RPC methods, and the gRPC status of each exception."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import grpc
from google.protobuf.message import DecodeError

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
from mmpos.rpc.errors import OUTPUT_BYTES, RETRY_AFTER, OutputError, put_error, shortened, to_status
from mmpos.rpc.tensors import required

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from mmpos.rpc.v1 import error_pb2
    from mmpos_server.call import Call

__all__ = [
    "Answering",
    "Failure",
    "Method",
    "NotFoundError",
    "Plain",
    "Run",
    "Twin",
    "answering",
    "failure",
    "public",
    "queried",
    "refused_by",
    "streamed",
]


Run = Callable[[Any, Any, "Call"], None]
"""Function that reads the request and fills the response; an exception becomes the status."""


Plain = tuple[bytes, int, int, int]
"""Answer of a plain request, and its numbers of documents, tokens and images."""

Answering = Callable[[bytes], Plain | None]
"""Function from the bytes of a request to its answer; None where the request must be parsed."""


@dataclass(frozen=True)
class Twin:
    """The stream form of a method.

    Args:
        name: name of the stream method.
        request: type of an item.
        response: type of the answer to an item.
        run: function from an item to its answer.
        refuse: function from a failed item and its error to the answer.
        side_by_side: whether several items of a stream are at work at once, since an item may take long.
        plain: shorter way of plain items, if there is one.
    """

    name: str
    request: type[Message]
    response: type[Message]
    run: Run
    refuse: Callable[[Any, Any, MmposError], None]
    side_by_side: bool = False
    plain: Answering | None = None


@dataclass(frozen=True)
class Method:
    """RPC method, with its stream form if it has one.

    Args:
        service: full name of its service, such as "mmpos.rpc.v1.PositionService".
        name: name of the method.
        request: type of the request.
        response: type of the response.
        run: function from the request to the response.
        twin: stream form of the method.
        admitted: whether a call takes a slot; liveness and readiness are answered under any load.
        plain: shorter way of plain requests, if there is one.
    """

    service: str
    name: str
    request: type[Message]
    response: type[Message]
    run: Run
    twin: Twin | None = None
    admitted: bool = True
    plain: Answering | None = None


def queried(run: Run, field: str) -> Run:
    """Wrap a function from a query to a field of the response as one from request to response."""

    def whole(request: Message, response: Message, call: Call) -> None:
        run(required("", request, "query"), answering(response, field), call)

    return whole


class _Item(Protocol):
    """Request of a stream."""

    id: int


class _ItemAnswer(Protocol):
    """Answer to an item of a stream, which may be an error."""

    id: int

    @property
    def error(self) -> error_pb2.Error:
        """Error of the item."""


def streamed(
    name: str, request: type[Message], response: type[Message], run: Run, *, side_by_side: bool = False
) -> Twin:
    """Return the stream form of a method of mmpos, whose items have an id and may have an error of their own."""

    def item(request: _Item, response: _ItemAnswer, call: Call) -> None:
        response.id = request.id
        run(request, response, call)

    def refuse(request: _Item, response: _ItemAnswer, error: MmposError) -> None:
        response.id = request.id
        put_error(response.error, error)

    return Twin(name, request, response, item, refuse, side_by_side)


def answering(response: Message, field: str) -> Message:
    """Return a field of a response after setting it, so that it is present even if it stays empty."""
    target: Message = getattr(response, field)
    target.SetInParent()
    return target


class NotFoundError(InvalidInputError):
    """Unknown name in a request of a protocol that has the status NOT_FOUND for it."""


_KNOWN = (
    InvalidInputError,
    LimitExceededError,
    ServiceOverloadedError,
    ServiceTimeoutError,
    ServiceUnauthenticatedError,
    ServiceUnavailableError,
    UnsupportedError,
)


@dataclass(frozen=True)
class Failure:
    """Status, details and metadata with which a call fails.

    Args:
        status: name of the gRPC status.
        message: details of the status.
        metadata: trailing metadata.
    """

    status: str
    message: str
    metadata: tuple[tuple[str, str], ...] = ()

    @property
    def code(self) -> grpc.StatusCode:
        """Status as grpc has it."""
        return grpc.StatusCode[self.status]


def public(error: Exception, request_id: str) -> MmposError:
    """Return the error that a client may see: client errors as they are, internal ones by request id only."""
    if isinstance(error, DecodeError):
        return InvalidInputError("request: got bytes that are no message of this method, want valid protobuf")
    if isinstance(error, _KNOWN):
        return error
    return ServiceError(f"internal error, request {request_id}")


def failure(error: Exception, request_id: str) -> Failure:
    """Return the status of an error, its message cut to the size of a header."""
    seen = public(error, request_id)
    status, message = to_status(seen)
    if isinstance(seen, NotFoundError):
        status = "NOT_FOUND"
    metadata: tuple[tuple[str, str], ...] = ()
    if isinstance(seen, ServiceOverloadedError):
        metadata = ((RETRY_AFTER, str(max(1, round(1000 * seen.retry_after)))),)
    if isinstance(seen, OutputError):
        metadata = ((OUTPUT_BYTES, str(seen.needed)),)
    return Failure(status, shortened(message), metadata)


def refused_by(error: Exception) -> str | None:
    """Return the limit that refused a call, as metrics label it; None if the call was not refused."""
    if isinstance(error, ServiceUnauthenticatedError):
        return "unauthenticated"
    if isinstance(error, ServiceUnavailableError):  # also the end of a stream through which nothing came
        return "stopping" if "about to stop" in str(error) else None
    if isinstance(error, ServiceOverloadedError):
        return str(error).partition(":")[0].partition(" of ")[0]
    return None
