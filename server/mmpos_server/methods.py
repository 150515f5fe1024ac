"""Descriptions of RPC methods, and the gRPC status of each exception."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError

from mmpos.errors import (
    InvalidInputError,
    LimitExceededError,
    MmposError,
    ServiceError,
    ServiceOverloadedError,
    ServiceTimeoutError,
    ServiceUnavailableError,
    UnsupportedError,
)
from mmpos.rpc.errors import OUTPUT_BYTES, RETRY_AFTER, OutputError, put_error, shortened, to_status
from mmpos.rpc.fields import required

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from mmpos.errors import MmposError
    from mmpos_server.admission import Pool
    from mmpos_server.call import Call

__all__ = [
    "Failure",
    "Method",
    "NotFoundError",
    "Run",
    "Twin",
    "answering",
    "failure",
    "public",
    "queried",
    "streamed",
]


Run = Callable[[Any, Any, "Call"], Awaitable[None]]
"""Reads the request, fills the response; what it raises becomes the status."""


@dataclass(frozen=True)
class Twin:
    """The stream form of a method.

    Args:
        name: its name.
        request: type of an item.
        response: type of its answer.
        run: reads an item, fills its answer.
        refuse: fills the answer of an item that failed, from the item and the error.
    """

    name: str
    request: type[Message]
    response: type[Message]
    run: Run
    refuse: Callable[[Any, Any, MmposError], None]


@dataclass(frozen=True)
class Method:
    """One method, and its stream twin if it has one.

    Args:
        service: full name of its service, such as "mmpos.rpc.v1.PositionService".
        name: its name.
        request: type of the request.
        response: type of the response.
        run: from one to the other.
        twin: its stream form.
        admitted: whether it takes a place; what asks whether the server lives is answered however much there is to do.
        pool: the threads that do most of its work.
    """

    service: str
    name: str
    request: type[Message]
    response: type[Message]
    run: Run
    twin: Twin | None = None
    admitted: bool = True
    pool: Pool = "place"


def queried(run: Run, field: str) -> Run:
    """What answers requests with a query, and responses with that field, by a function from the one to the other."""

    async def whole(request: Any, response: Any, call: Call) -> None:
        await run(required("", request, "query"), answering(response, field), call)

    return whole


def streamed(name: str, request: type[Message], response: type[Message], run: Run) -> Twin:
    """The stream form of a method of ours: items have an id besides, and an error of their own."""

    async def item(request: Any, response: Any, call: Call) -> None:
        response.id = request.id
        await run(request, response, call)

    def refuse(request: Any, response: Any, error: MmposError) -> None:
        response.id = request.id
        put_error(response.error, error)

    return Twin(name, request, response, item, refuse)


def answering(response: Any, field: str) -> Any:
    """The field of a response that is to be filled; it is set, even if nothing will be in it."""
    target = getattr(response, field)
    target.SetInParent()
    return target


class NotFoundError(InvalidInputError):
    """A request names what is not here, in a protocol that has a status of its own for it: NOT_FOUND."""


_KNOWN = (
    InvalidInputError,
    LimitExceededError,
    ServiceOverloadedError,
    ServiceTimeoutError,
    ServiceUnavailableError,
    UnsupportedError,
)


@dataclass(frozen=True)
class Failure:
    """How a call fails.

    Args:
        status: name of the gRPC status.
        message: its details.
        metadata: trailing metadata.
    """

    status: str
    message: str
    metadata: tuple[tuple[str, str], ...] = ()

    @property
    def code(self) -> grpc.StatusCode:
        """The status."""
        return grpc.StatusCode[self.status]


def public(error: Exception, request_id: str) -> MmposError:
    """The error that a client may see: its own mistakes as they are, the server's by the id of the request only."""
    if isinstance(error, DecodeError):
        return InvalidInputError("request: got bytes that are not such a message, want valid protobuf")
    if isinstance(error, _KNOWN):
        return error
    return ServiceError(f"internal error, request {request_id}")


def failure(error: Exception, request_id: str) -> Failure:
    """The status of an error, cut to what a header holds."""
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
