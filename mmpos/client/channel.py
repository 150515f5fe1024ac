"""Base class of the two clients: their arguments, a channel per process and event loop, and conversion of errors."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import grpc

from mmpos.client.options import Options
from mmpos.errors import (
    LimitExceededError,
    MmposError,
    ServiceError,
    ServiceTimeoutError,
    ServiceUnavailableError,
    UnsupportedError,
)
from mmpos.rpc.errors import RETRY_AFTER, from_status

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from typing import Self

    from mmpos.client.options import Tls

_SERVICES = [{"service": f"mmpos.rpc.v1.{name}Service"} for name in ("Info", "Position", "Rotary", "Sequence")]

_STREAMS = [
    {"service": "mmpos.rpc.v1.PositionService", "method": "StreamPlace"},
    {"service": "mmpos.rpc.v1.SequenceService", "method": "StreamBuild"},
]

_CHANNEL = {
    # Set no limit here, since the server limits the size of its answers.
    "grpc.max_receive_message_length": -1,
    # gRPC retries a call only while it buffers the request, by default up to 256 KiB.
    "grpc.per_rpc_retry_buffer_size": 2**31 - 1,
    "grpc.keepalive_time_ms": 30_000,
    "grpc.keepalive_timeout_ms": 10_000,
    "grpc.keepalive_permit_without_calls": 1,
    "grpc.http2.max_pings_without_data": 0,
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 5_000,
    # Ignore settings from DNS records.
    "grpc.service_config_disable_resolution": 1,
    # Use separate connections, so that none is shared with a parent process.
    "grpc.use_local_subchannel_pool": 1,
}


class OpenChannel:
    """A client's channel, and whether a server has answered; if it disappears later, it is probably restarting."""

    def __init__(self, channel: Any) -> None:
        self.channel, self.answered = channel, False
        self.method = cache(channel.unary_unary)  # gRPC prepares a method once for many calls


class ProcessChannels:
    """A client's channels, by process and, if there is one, by event loop.

    A channel that a parent opened before a fork stays unused and unclosed in the child, since using or closing it would
    affect the parent's connection.
    """

    def __init__(self) -> None:
        self._open: dict[tuple[int, AbstractEventLoop | None], OpenChannel] = {}
        self._closed = False

    def get(self, connect: Callable[[], Any], loop: AbstractEventLoop | None = None) -> OpenChannel:
        """Return the channel of this process and event loop, and open it if there is none.

        Raises:
            ServiceError: the client was closed.
            UnsupportedError: this process was forked after a call, so gRPC would hang.
        """
        if self._closed:
            raise ServiceError("client: got a call after close(), want an open client")
        key = (os.getpid(), loop)
        opened = self._open.get(key)
        if opened is None:
            self._check(key[0])
            # There is no lock, since a fork could copy a held lock: the second of two threads drops the channel it
            # opened.
            new = OpenChannel(connect())
            opened = self._open.setdefault(key, new)
            if opened is not new:
                new.channel.close()
        return opened

    def _check(self, process: int) -> None:
        """Drop the channels of closed event loops; refuse to open a channel in a forked process."""
        for key in list(self._open):
            pid, loop = key
            if pid == process and loop is not None and loop.is_closed():
                self._open.pop(key, None)
            elif pid != process and os.environ.get("GRPC_ENABLE_FORK_SUPPORT", "").lower() not in ("1", "true", "yes"):
                raise UnsupportedError(
                    "fork: the client made a call before the fork; set GRPC_ENABLE_FORK_SUPPORT=1 before grpc is "
                    "imported, use the start method 'spawn', or make no call before the fork"
                )

    def close(self, loop: AbstractEventLoop | None = None) -> Any:
        """Refuse later calls; remove and return the channel of this process and event loop, or None."""
        self._closed = True
        opened = self._open.pop((os.getpid(), loop), None)
        return None if opened is None else opened.channel


def channel_options(options: Options) -> list[tuple[str, str | int]]:
    """Return the options for a channel; its service config sets retries and load balancing."""
    retry = {
        "maxAttempts": options.attempts,
        "initialBackoff": "0.1s",
        "backoffMultiplier": 3,
        "maxBackoff": "2s",
        # A server that sends GOAWAY cancels calls that arrived at that moment and have not begun. An overloaded server
        # refuses a call, and says in grpc-retry-pushback-ms when gRPC is to send it again.
        "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED", "RESOURCE_EXHAUSTED"],
    }
    config: dict[str, object] = {
        # The entry of the streams is more specific. gRPC would send them again until their first answer, but grpc.aio
        # loses items meanwhile.
        "methodConfig": [{"name": _STREAMS}, {"name": _SERVICES, "retryPolicy": retry}] if options.attempts > 1 else [],
        # A server that dies fails all its calls at the same time, so up to 500 retries must be possible without a
        # success.
        "retryThrottling": {"maxTokens": 1000, "tokenRatio": 1},
    }
    if options.address.startswith(("dns:", "ipv4:", "ipv6:")):
        config["loadBalancingConfig"] = [{"round_robin": {}}]
        config["healthCheckConfig"] = {"serviceName": ""}
    values: dict[str, str | int] = {**_CHANNEL, "grpc.service_config": json.dumps(config)}
    if options.tls is not None and options.tls.server_name is not None:
        values["grpc.ssl_target_name_override"] = options.tls.server_name
    if options.tls is None and options.token is not None:
        values["grpc.enable_http_proxy"] = 0  # the token stays on this machine
    return list(values.items())


_KEEP: Any = object()


class BaseClient:
    """Client for an mmpos service.

    The first call opens the channel, one per process (and event loop), so a client can be pickled and used by the
    workers of a DataLoader. If a client made a call before a fork, it raises an error in the child, because gRPC would
    hang there, unless GRPC_ENABLE_FORK_SUPPORT=1 was set in the environment before grpc was imported. No call may run
    in another thread while a process forks. Start methods other than "fork" have no such limits.

    gRPC sends a call again if no server answers it (UNAVAILABLE, including a broken connection), after 0.1, 0.3, 0.9 …
    seconds, or if the server is overloaded, after the time that the server asks for. This is safe because no call
    changes anything on the server. If a server that has answered before disappears, it is assumed to be restarting, and
    calls wait for it within their timeout. If no server has ever answered, the call fails after a second or two with an
    error that names the cause. A stream is never sent again.

    A call after ``close``, or after a ``with`` block, raises a ServiceError, and ``healthy`` returns False.

    Args:
        address: "host:port", "unix:path", or, for several servers, a target of gRPC: "dns:///host:port" for all
            replicas behind a name, or "ipv4:ip:port,ip:port". Calls rotate over those that pass their health checks.
        profile: name of the model's settings on the server; None selects the server's default profile.
        timeout: maximum seconds per call, with all attempts; for a stream, maximum seconds per answer.
        attempts: maximum number of attempts per call, 1 to 5; with 1, a call is sent once and waits for no server.
        tls: certificates; None disables TLS.
        token: bearer token sent with every call, or the path of a file that holds only the token and is reread when it
            changes. Without tls, a token is sent only to servers on this machine.

    Raises:
        InvalidInputError: an argument is of the wrong type or out of range.
    """

    def __init__(
        self,
        address: str = "localhost:50051",
        *,
        profile: str | None = None,
        timeout: float = 30.0,
        attempts: int = 4,
        tls: Tls | None = None,
        token: str | os.PathLike[str] | None = None,
    ) -> None:
        unchecked: Any = address, profile, timeout, attempts, tls, token
        self.__setstate__(Options(*unchecked))

    def with_options(self, *, profile: str | None = _KEEP, timeout: float = _KEEP) -> Self:
        """Return a client with other options on the same channel; closing either client closes both.

        Raises:
            InvalidInputError: an option is of the wrong type or out of range.
        """
        options: dict[str, Any] = {"profile": profile, "timeout": timeout}
        client = copy(self)
        client._channels = self._channels
        client._options = replace(self._options, **{name: x for name, x in options.items() if x is not _KEEP})
        return client

    def _open(
        self, secure: Callable[..., Any], insecure: Callable[..., Any], loop: AbstractEventLoop | None = None
    ) -> OpenChannel:
        def connect() -> Any:
            address, tls, options = self._options.address, self._options.tls, channel_options(self._options)
            return insecure(address, options) if tls is None else secure(address, tls.credentials(), options)

        return self._channels.get(connect, loop)

    def _settings(self, opened: OpenChannel, *, waits: bool = True) -> dict[str, Any]:
        token = self._options.token
        return {
            "metadata": None if token is None else (token.pair(),),
            "wait_for_ready": waits and opened.answered and self._options.attempts > 1,
        }

    def __getstate__(self) -> Options:
        return self._options

    def __setstate__(self, options: Options) -> None:
        self._options = options
        self._channels = ProcessChannels()

    def __repr__(self) -> str:
        name, options = type(self).__name__, self._options
        return f"{name}({options.address!r}, profile={options.profile!r}, timeout={options.timeout:g})"


# The messages of grpc for a failed TLS handshake, and their causes.
_UNTRUSTED = {
    "CERTIFICATE_VERIFY_FAILED": "tls.root_certificates: cannot verify the server's certificate",
    "Hostname Verification Check failed": "tls.server_name: the server's certificate is valid only for other names",
    "WRONG_VERSION_NUMBER": "tls: the server does not use TLS, want tls=None",
    "Failed to create security handshaker": "tls: the certificates are invalid, want PEM",
    "ls handshake failed": "tls: the handshake failed",
}

# How the messages of grpc begin if it cannot connect, with the reason at their end; and those of a broken connection.
_ABSENT = ("failed to connect", "errors resolving", "connections to all backends failing")
_BROKEN = ("Socket closed", "Connection reset")
_LAST = re.compile(r"ipv[46]:(\S+): ")

# The message of the server's transport for a request that is too large, which no handler of the server sees.
_TOO_LARGE = re.compile(r"larger than max \((\d+) vs\. (\d+)\)")


def closed() -> ServiceError:
    """Return the error of a call on a channel that another thread or task has closed."""
    return ServiceError("CANCELLED: the client was closed")


def lost_status(error: grpc.RpcError) -> bool:
    """Return whether grpc.aio lost the status of a stream that ended during a write (grpc/grpc#36066)."""
    failed: Any = error
    return bool(failed.code() is grpc.StatusCode.INTERNAL and failed.details() == "Internal error from Core")


def failure(error: grpc.RpcError, path: str, options: Options, answered: bool) -> MmposError:
    """Convert the error of a failed call or stream; ``answered`` is whether a server has answered before."""
    failed: Any = error
    code, details, wait = failed.code(), failed.details() or "", _milliseconds(failed.trailing_metadata())
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        method, cause = path.rpartition("/")[2], "" if details == "Deadline Exceeded" else f" ({details})"
        late = f"timeout: {method} got no answer from {options.address} within {options.timeout:g} s{cause}"
        return ServiceTimeoutError(late)
    if code is grpc.StatusCode.UNAVAILABLE:
        return ServiceUnavailableError(_reason(details, options, answered))
    if lost_status(error):
        return ServiceUnavailableError("the connection broke while a request was written")
    if large := _TOO_LARGE.search(details):
        want = f"want at most {large[2]} in one request to this server"
        return LimitExceededError(f"limits.request_bytes: got {large[1]}, {want}")
    return from_status("UNKNOWN" if code is None else code.name, details, None if wait is None else wait / 1000)


def _reason(details: str, options: Options, answered: bool) -> str:
    """Describe why no server can be reached, and what to do, in place of grpc's message."""
    for pattern, message in _UNTRUSTED.items():
        if pattern in details:
            return f"{message} ({details})"
    absent, broken = details.startswith(_ABSENT), not answered and any(word in details for word in _BROKEN)
    if not (absent or broken):
        return details
    reason, hint = details.rpartition(": ")[2].rstrip("]") if absent else details, ""
    if broken and options.tls is None:
        hint = " (a server that requires TLS closes it: tls=Tls(...))"
    elif broken and options.tls is not None and options.tls.certificate is None:
        hint = " (a server that requires client certificates closes it: Tls(..., certificate, key))"
    elif broken:
        hint = " (a server that does not trust tls.certificate closes it)"
    elif (last := _LAST.search(details)) and (where := unquote(last[1])) not in options.address:
        hint = f" at {where}, the last address tried"  # gRPC does not report why the others failed
    want = "want a running server: start one with mmpos serve, or pass another address"
    return f"{options.address}: got {reason}{hint}, {want}"


def _milliseconds(metadata: Iterable[tuple[str, str | bytes]] | None) -> int | None:
    """Read from trailing metadata after which time the server wants a retry, or None if it wants none."""
    return next((int(value) for key, value in metadata or () if key == RETRY_AFTER and value.isdigit()), None)
