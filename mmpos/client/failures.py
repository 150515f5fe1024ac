"""The one place where an error of gRPC becomes one of ours."""

from __future__ import annotations

from typing import Any

import grpc

from mmpos.errors import MmposError, ServiceError, ServiceOverloadedError, ServiceUnavailableError
from mmpos.rpc.errors import OUTPUT_BYTES, RETRY_AFTER, OutputError, from_status

# What grpc.aio itself says where a stream ends while a request is written: it forgets the status that came
# (grpc/grpc#36066). Asking again finds it, if it was more than a broken connection.
_FAILED_WRITE = "Internal error from Core"

# What a server's transport says of a call that it dropped before anything looked at it, as too many were waiting.
_DROPPED = "CANCELLED"


# What grpc says of a connection that TLS does not let be, and what is wrong then.
_UNTRUSTED = {
    "CERTIFICATE_VERIFY_FAILED": "tls.root_certificates: got a server whose certificate they do not vouch for",
    "Hostname Verification Check failed": "tls.server_name: got a server whose certificate has other names",
    "WRONG_VERSION_NUMBER": "tls: got a server that does not encrypt, want tls=None",
    "Failed to create security handshaker": "tls: got certificates that cannot be used, want PEM",
    "ls handshake failed": "tls: got no connection",
}

# What grpc says, as a ValueError, of a call on a channel that another thread has closed meanwhile.
_CLOSED = "Cannot invoke RPC"


class UntrustedError(ServiceUnavailableError):
    """A connection that TLS does not let be, which waiting does not change."""


def closed() -> ServiceError:
    """What to say of a call whose channel was closed under it."""
    return ServiceError("CANCELLED: the client was closed")


def was_closed(error: ValueError) -> bool:
    """Whether this is how grpc refuses a call on a closed channel, and no mistake of an argument."""
    return str(error).startswith(_CLOSED)


def error_of(error: grpc.RpcError) -> MmposError:
    """The error of a call that failed, of either kind of channel."""
    failed: Any = error
    code = failed.code()
    if code is None:
        return ServiceError(f"UNKNOWN: {failed.details()}")
    if code is grpc.StatusCode.INTERNAL and failed.details() == _FAILED_WRITE:
        return ServiceUnavailableError("stream: got a connection that broke while a request was written")
    if code is grpc.StatusCode.CANCELLED and failed.details() == _DROPPED:
        return ServiceOverloadedError("max_pending: got more calls than the server takes, want fewer at once")
    details, trailing = failed.details() or "", failed.trailing_metadata()
    if code is grpc.StatusCode.UNAVAILABLE:
        for sign, wrong in _UNTRUSTED.items():
            if sign in details:
                return UntrustedError(f"{wrong} ({details})")
    needed = _number(trailing, OUTPUT_BYTES)
    if needed is not None:
        return OutputError(details, needed)
    wait = _number(trailing, RETRY_AFTER)
    return from_status(code.name, details, None if wait is None else wait / 1000)


def _number(metadata: Any, name: str) -> int | None:
    """What a server says in trailing metadata, if it does: a number that is not negative."""
    for key, value in metadata or ():
        if key == name:
            try:
                return max(int(value), 0)
            except ValueError:
                return None
    return None
