"""Conversion of errors to gRPC statuses and messages and back, and the bearer tokens of calls."""

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
"""gRPC status of each error; a status converts back to its first error."""

RETRY_AFTER = "grpc-retry-pushback-ms"
"""Trailing metadata of an overloaded server: milliseconds after which to try again."""

LONGEST = 1500
"""Maximum message size in bytes: it travels percent-encoded in a header, and clients refuse headers above 8 KiB."""

_MEANING = {status: error for error, status in reversed(STATUS.items())}
# Sent only by proxies: mmpos authenticates clients, and lets authenticated clients do anything.
_MEANING["PERMISSION_DENIED"] = ServiceUnauthenticatedError

_CODES: dict[type[MmposError], pb.ErrorCode.ValueType] = {
    InvalidInputError: pb.ERROR_CODE_INVALID_INPUT,
    UnsupportedError: pb.ERROR_CODE_UNSUPPORTED,
    LimitExceededError: pb.ERROR_CODE_LIMIT_EXCEEDED,
    ServiceError: pb.ERROR_CODE_INTERNAL,
}


def to_status(error: MmposError) -> tuple[str, str]:
    """Convert an error to the name and details of a status."""
    return next(status for kind, status in STATUS.items() if isinstance(error, kind)), str(error)


def from_status(status: str, message: str, retry_after: float | None = None) -> MmposError:
    """Convert the name and details of a status, and the seconds after which to retry, if any, to an error."""
    if status == "RESOURCE_EXHAUSTED" and retry_after is not None:
        return ServiceOverloadedError(message, retry_after)
    if status in _MEANING and status != "INTERNAL":
        return _MEANING[status](message)
    return ServiceError(f"{status}: {message}")


def shortened(message: str) -> str:
    """Shorten a message to a size that can be sent, since errors may quote long input."""
    raw = message.encode(errors="backslashreplace")  # half a character cannot be sent
    return raw.decode() if len(raw) <= LONGEST else raw[:LONGEST].decode(errors="ignore") + "…"


def put_error(message: pb.Error, error: MmposError) -> None:
    """Fill a message with the error of one item."""
    message.code = next((code for kind, code in _CODES.items() if isinstance(error, kind)), pb.ERROR_CODE_INTERNAL)
    message.message = shortened(str(error))


def get_error(message: pb.Error) -> MmposError:
    """Read the error of one item; an unknown kind becomes a ServiceError."""
    kind = next((kind for kind, code in _CODES.items() if code == message.code), ServiceError)
    return kind(message.message)


AUTHORIZATION = "authorization"
"""Metadata key of the token; the value is "Bearer TOKEN"."""

TOKEN_CHARACTERS = "a-z, A-Z, 0-9 and -._~+/, and = at its end"
"""Characters allowed in a token, as shown in error messages."""

_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*", re.ASCII)
_SCHEME = "bearer "


def is_token(text: str) -> bool:
    """Return whether text consists only of TOKEN_CHARACTERS, the token characters of RFC 6750, section 2.1."""
    return _TOKEN.fullmatch(text) is not None


def file_version(status: os.stat_result) -> tuple[int, int, int, int]:
    """Return what changes with a file: also its inode, since a new Kubernetes secret may be a link to an older file."""
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size


def put_token(token: str) -> tuple[str, str]:
    """Return the metadata pair that carries a token."""
    return AUTHORIZATION, f"Bearer {token}"


def get_token(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """Read the token of a call; return None unless there is exactly one."""
    values = [value for key, value in metadata if key == AUTHORIZATION]
    if len(values) != 1 or not isinstance(values[0], str) or not values[0].lower().startswith(_SCHEME):
        return None
    return values[0][len(_SCHEME) :].strip(" ")


def is_loopback(host: str) -> bool:
    """Return whether traffic to this host stays on this machine."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
