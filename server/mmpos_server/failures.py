"""From an exception to the status that a client gets, so that nothing of the server's inside leaks out."""

from __future__ import annotations

from dataclasses import dataclass

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
from mmpos.rpc.errors import OUTPUT_BYTES, RETRY_AFTER, OutputError, shortened, to_status

__all__ = ["Failure", "NotFoundError", "failure", "public"]


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
