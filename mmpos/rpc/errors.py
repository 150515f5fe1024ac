"""Errors as gRPC statuses and messages and back, and the bearer tokens of calls."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from ipaddress import ip_address

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
from mmpos.rpc.v1 import error_pb2 as pb

STATUS: dict[type[MmposError], str] = {
    InvalidInputError: "INVALID_ARGUMENT",
    UnsupportedError: "UNIMPLEMENTED",
    LimitExceededError: "RESOURCE_EXHAUSTED",
    ServiceUnavailableError: "UNAVAILABLE",
    ServiceTimeoutError: "DEADLINE_EXCEEDED",
    ServiceOverloadedError: "RESOURCE_EXHAUSTED",
    ServiceUnauthenticatedError: "UNAUTHENTICATED",
    ServiceError: "INTERNAL",
}
"""The gRPC status of each error; the first error of a status is what the status means."""

RETRY_AFTER = "grpc-retry-pushback-ms"
"""Trailing metadata of a refusal for overload: milliseconds after which to try again."""

OUTPUT_BYTES = "mmpos-output-bytes"
"""Trailing metadata of a refusal because the tensors of the answer do not fit their region: the bytes they need."""

RETRIED = "mmpos-previous-attempts"
"""Trailing metadata of an answer to a request that was sent before: how often. An earlier attempt may still be at work,
and use the shared memory that the request named."""

LONGEST = 1500
"""Most bytes of a message: statuses travel in headers, percent-encoded, and clients refuse headers beyond 8 KiB."""

_MEANING = {status: error for error, status in reversed(STATUS.items())}
# Of proxies in front of a server; ours knows whom it lets in, and lets them do everything.
_MEANING["PERMISSION_DENIED"] = ServiceUnauthenticatedError

_CODES: dict[type[MmposError], pb.ErrorCode.ValueType] = {
    InvalidInputError: pb.ERROR_CODE_INVALID_INPUT,
    UnsupportedError: pb.ERROR_CODE_UNSUPPORTED,
    LimitExceededError: pb.ERROR_CODE_LIMIT_EXCEEDED,
    ServiceError: pb.ERROR_CODE_INTERNAL,
}


class OutputError(InvalidInputError):
    """Error of an answer whose tensors do not fit their region of shared memory.

    Args:
        message: what, got and want.
        needed: the bytes they need.
    """

    def __init__(self, message: str, needed: int) -> None:
        super().__init__(message)
        self.needed = needed


def to_status(error: MmposError) -> tuple[str, str]:
    """Convert an error to the name of its status and details."""
    return next(status for kind, status in STATUS.items() if isinstance(error, kind)), str(error)


def from_status(status: str, message: str, retry_after: float | None = None) -> MmposError:
    """Convert a status to its error.

    Args:
        status: name of the gRPC status.
        message: its details.
        retry_after: seconds, if the server said when to come back.
    """
    if status == "RESOURCE_EXHAUSTED" and retry_after is not None:
        return ServiceOverloadedError(message, retry_after)
    if status in _MEANING and status != "INTERNAL":
        return _MEANING[status](message)
    return ServiceError(f"{status}: {message}")


def shortened(message: str) -> str:
    """Shorten a message to what can be sent: errors may repeat a caller's words at length."""
    raw = message.encode(errors="backslashreplace")  # half a character cannot be sent
    return raw.decode() if len(raw) <= LONGEST else raw[:LONGEST].decode(errors="ignore") + "…"


def put_error(message: pb.Error, error: MmposError) -> None:
    """Fill a message with the error of one item."""
    message.code = next((code for kind, code in _CODES.items() if isinstance(error, kind)), pb.ERROR_CODE_INTERNAL)
    message.message = shortened(str(error))


def get_error(message: pb.Error) -> MmposError:
    """Read the error of one item; one of a kind that is not known here is a ServiceError."""
    kind = next((kind for kind, code in _CODES.items() if code == message.code), ServiceError)
    return kind(message.message)


AUTHORIZATION = "authorization"
"""Metadata in which a token travels, as "Bearer TOKEN"."""

TOKEN_CHARACTERS = "a-z, A-Z, 0-9 and -._~+/, and = at its end"
"""Characters of a token, in words for errors."""

_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*", re.ASCII)
_SCHEME = "bearer "


def is_token(text: str) -> bool:
    """Check whether the text has the alphabet of tokens (RFC 6750, section 2.1), which is TOKEN_CHARACTERS."""
    return _TOKEN.fullmatch(text) is not None


def file_version(status: os.stat_result) -> tuple[int, int, int, int]:
    """Version of a file of tokens, which changes when the file does.

    The inode is part of it: a secret of Kubernetes changes with its symbolic link, perhaps to a file of the same
    age.
    """
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size


def put_token(token: str) -> tuple[str, str]:
    """Make the pair of metadata that carries a token."""
    return AUTHORIZATION, f"Bearer {token}"


def get_token(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """Read the token of a call; None if there is none, or more than one."""
    values = [value for key, value in metadata if key == AUTHORIZATION]
    if len(values) != 1 or not isinstance(values[0], str) or not values[0].lower().startswith(_SCHEME):
        return None
    return values[0][len(_SCHEME) :].strip(" ")


def is_loopback(host: str) -> bool:
    """Check whether what is sent to this host stays on this machine."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
