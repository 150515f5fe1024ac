"""Describe RPC methods, and map each exception to its gRPC status."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
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
    ServiceUnauthenticatedError,
    ServiceUnavailableError,
    UnsupportedError,
)
from mmpos.rpc.errors import RETRY_AFTER, shortened, to_status
from mmpos.rpc.tensors import required

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from mmpos_server.call import Call

__all__ = [
    "REQUEST_ID",
    "Answering",
    "Failure",
    "Method",
    "NotFoundError",
    "Plain",
    "Run",
    "failure",
    "public",
    "queried",
    "refused_by",
]


REQUEST_ID = "x-request-id"
"""Metadata key of the request id; a client may set it, and the server returns it with a failure."""

Run = Callable[[Any, Any, "Call"], Coroutine[Any, Any, None]]
"""Coroutine function that reads the request and fills the response; an exception determines the status."""


Plain = tuple[bytes, int, int, int]
"""Answer to a plain request, with its numbers of documents, tokens and images."""

Answering = Callable[[bytes, bool], Plain | None]
"""Function that answers a serialized request, or an item if the flag is set; it returns None if it must be parsed."""


@dataclass(frozen=True)
class Method:
    """An RPC method and, optionally, its streaming form, whose items have an id and whose answers may be errors.

    Args:
        service: full name of the method's service, such as "mmpos.rpc.v1.PositionService".
        name: name of the method; the streaming form has the prefix "Stream".
        request: message type of the request.
        response: message type of the response.
        run: function that writes the response to a request, or the answer to an item.
        item: message types of an item and of its answer; None without a streaming form.
        side_by_side: whether items of one stream run in parallel; set this if an item may take a long time.
        plain: faster path for plain requests and items, or None.
        bulky: whether requests consist of texts and images, which limits.message_bytes does not bound.
        large: whether a call waits for a place for large messages before its request is read.
    """

    service: str
    name: str
    request: type[Message]
    response: type[Message]
    run: Run
    item: tuple[type[Message], type[Message]] | None = None
    side_by_side: bool = False
    plain: Answering | None = None
    bulky: bool = False
    large: bool = False


def queried(run: Run, field: str) -> Run:
    """Turn a function of a query and a field of the response into a function of the request and the response."""

    async def run_request(request: Message, response: Message, call: Call) -> None:
        answer = getattr(response, field)
        answer.SetInParent()  # an empty answer is present, too
        await run(required("", request, "query"), answer, call)

    return run_request


class NotFoundError(InvalidInputError):
    """A request contains an unknown name, and its protocol reports this with the status NOT_FOUND."""


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
    """Status, details and metadata of a failed call.

    Args:
        status: name of the gRPC status.
        message: details of the status.
        request_id: id of the request.
        metadata: trailing metadata.
    """

    status: str
    message: str
    request_id: str
    metadata: tuple[tuple[str, str], ...]

    @property
    def code(self) -> grpc.StatusCode:
        """The grpc status code."""
        return grpc.StatusCode[self.status]


def public(error: Exception, request_id: str) -> MmposError:
    """Return the error to show to a client: the client's own errors unchanged, internal errors only by request id."""
    if isinstance(error, DecodeError):
        return InvalidInputError("request: the bytes are not a protobuf message of this method")
    if isinstance(error, _KNOWN):
        return error
    return ServiceError(f"internal error, request {request_id}")


def failure(error: Exception, request_id: str) -> Failure:
    """Return the status for an error, with the message truncated to the size of a header."""
    shown = public(error, request_id)
    status, message = to_status(shown)
    if isinstance(shown, NotFoundError):
        status = "NOT_FOUND"
    metadata: tuple[tuple[str, str], ...] = ((REQUEST_ID, request_id),)
    if isinstance(shown, ServiceOverloadedError):
        metadata += ((RETRY_AFTER, str(max(1, round(1000 * shown.retry_after)))),)
    elif isinstance(shown, LimitExceededError):
        metadata += ((RETRY_AFTER, "-1"),)  # so that no client tries again
    return Failure(status, shortened(message), request_id, metadata)


def refused_by(error: Exception) -> str | None:
    """Return the metrics label of the limit that refused a call, or None for other errors."""
    if isinstance(error, ServiceUnauthenticatedError):
        return "unauthenticated"
    if isinstance(error, ServiceUnavailableError):  # this is also raised at the end of an idle stream
        return "stopping" if "about to stop" in str(error) else None
    if isinstance(error, ServiceOverloadedError):
        return str(error).partition(":")[0].partition(" ")[0]
    return None
