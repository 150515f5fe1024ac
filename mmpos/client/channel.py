"""gRPC channels: target, options, error conversion, waiting for servers, and trace context."""

from __future__ import annotations

import ipaddress
import json
import os
import random
import re
import socket
import sys
from collections.abc import Callable, Iterable
from time import monotonic
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import grpc

from mmpos.client.options import Pair, host_and_port
from mmpos.errors import (
    LimitExceededError,
    MmposError,
    ServiceError,
    ServiceOverloadedError,
    ServiceUnavailableError,
    UnsupportedError,
)
from mmpos.rpc.errors import RETRY_AFTER, from_status

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

    from mmpos.client.options import Destination

__all__ = ["traced"]


C = TypeVar("C")

FIRST_BACKOFF, BACKOFF_FACTOR, MAX_BACKOFF = 0.1, 3, 2.0
"""Seconds before the second attempt, the factor for each further wait, and the maximum wait."""

_STREAMS = [
    {"service": "mmpos.rpc.v1.PositionService", "method": "StreamPlace"},
    {"service": "mmpos.rpc.v1.SequenceService", "method": "StreamBuild"},
]

_OPTIONS = {
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


class OpenChannel(Generic[C]):
    """A client's channel, with its unary methods, which gRPC prepares once for many calls.

    Args:
        channel: the gRPC channel.
    """

    def __init__(self, channel: C) -> None:
        self.channel = channel
        self._methods: dict[str, Any] = {}

    def method(self, path: str) -> Any:
        """Return a callable that takes and returns bytes, for the method with this path."""
        method = self._methods.get(path)
        if method is None:
            channel: Any = self.channel
            method = self._methods[path] = channel.unary_unary(path)
        return method


class ProcessChannels(Generic[C]):
    """A client's channels, by process and, if there is one, by event loop.

    A channel that a parent opened before a fork stays unused and unclosed in the child, since using or closing it would
    affect the parent's connection.
    """

    def __init__(self) -> None:
        self._open: dict[tuple[int, AbstractEventLoop | None], OpenChannel[C]] = {}

    def get(
        self, connect: Callable[[], C], close: Callable[[C], object], loop: AbstractEventLoop | None = None
    ) -> OpenChannel[C]:
        """Return the channel of this process and event loop, and open it if there is none.

        Raises:
            UnsupportedError: this process was forked after a call, so gRPC would hang.
        """
        key = (os.getpid(), loop)
        connection = self._open.get(key)
        if connection is None:
            if any(pid != key[0] for pid, _ in list(self._open)) and not _fork_support():
                raise UnsupportedError(
                    "fork: the client made a call before the fork; set GRPC_ENABLE_FORK_SUPPORT=1 before grpc is "
                    "imported, use the start method 'spawn', or make no call before the fork"
                )
            # There is no lock, since a fork could copy a held lock: the second of two threads drops the channel it
            # opened.
            opened = OpenChannel(connect())
            connection = self._open.setdefault(key, opened)
            if connection is not opened:
                close(opened.channel)
        return connection

    def pop(self, loop: AbstractEventLoop | None = None) -> C | None:
        """Remove and return the channel of this process and event loop."""
        connection = self._open.pop((os.getpid(), loop), None)
        return None if connection is None else connection.channel

    def forget_closed_loops(self) -> None:
        """Drop the channels of closed event loops."""
        for pid, loop in list(self._open):
            if pid == os.getpid() and loop is not None and loop.is_closed():
                self._open.pop((pid, loop), None)


def _fork_support() -> bool:
    return os.environ.get("GRPC_ENABLE_FORK_SUPPORT", "").lower() in ("1", "true", "yes")


def service_config(attempts: int, balanced: bool) -> dict[str, object]:
    """Return the gRPC service config, which sets retries and load balancing."""
    retry = {
        "maxAttempts": attempts,
        "initialBackoff": f"{FIRST_BACKOFF}s",
        "backoffMultiplier": BACKOFF_FACTOR,
        "maxBackoff": f"{MAX_BACKOFF}s",
        # A server that sends GOAWAY cancels calls that arrived at that moment and have not begun.
        "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED"],
    }
    config: dict[str, object] = {
        # Streams resend unanswered items on a new stream; the more specific entry takes precedence.
        "methodConfig": [{"name": _STREAMS}, {"name": [{}], "retryPolicy": retry} if attempts > 1 else {"name": [{}]}],
        # A server that dies fails all its calls at the same time, so up to 500 retries must be possible without a
        # success.
        "retryThrottling": {"maxTokens": 1000, "tokenRatio": 1},
    }
    if balanced:
        config["loadBalancingConfig"] = [{"round_robin": {}}]
        config["healthCheckConfig"] = {"serviceName": ""}
    return config


def channel_options(destination: Destination) -> list[tuple[str, str | int]]:
    """Return the options for a channel."""
    first = destination.addresses[0]
    balanced = len(destination.addresses) > 1 or first.startswith("dns:")
    config = json.dumps(service_config(destination.attempts, balanced))
    options: dict[str, str | int] = {**_OPTIONS, "grpc.service_config": config}
    host = host_and_port(first)
    if len(destination.addresses) > 1:
        options["grpc.default_authority"] = first
    if destination.tls is not None:
        name = destination.tls.server_name
        if name is None and len(destination.addresses) > 1 and host is not None:
            name = host.host
        if name is not None:
            options["grpc.ssl_target_name_override"] = name
    if destination.token is not None and destination.tls is None:
        options["grpc.enable_http_proxy"] = 0  # the token stays on this machine
    return list(options.items())


def target(addresses: tuple[str, ...]) -> str:
    """Return the gRPC target: a single address unchanged, several resolved, since gRPC does not accept a list of names.

    Raises:
        ServiceUnavailableError: a name cannot be resolved.
    """
    if len(addresses) == 1:
        return addresses[0]
    resolved = [_resolve(f"addresses[{i}]", address) for i, address in enumerate(addresses)]
    if all(any(ip.version == 4 for ip, _ in entries) for entries in resolved):
        pairs = [f"{ip}:{port}" for entries in resolved for ip, port in entries if ip.version == 4]
        return "ipv4:" + ",".join(dict.fromkeys(pairs))
    # A list has one address family: IPv4 addresses are mapped to IPv6.
    pairs = [f"[{ip if ip.version == 6 else f'::ffff:{ip}'}]:{port}" for entries in resolved for ip, port in entries]
    return "ipv6:" + ",".join(dict.fromkeys(pairs))


def _resolve(name: str, address: str) -> list[tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]]:
    server = host_and_port(address)
    assert server is not None
    try:
        entries = socket.getaddrinfo(server.host, server.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ServiceUnavailableError(f"{name}: cannot resolve {address!r} ({error})") from None
    return [(ipaddress.ip_address(entry[4][0]), server.port) for entry in entries]


# The message of grpc.aio if a stream ends while a request is being written; grpc.aio then loses the stream's status
# (grpc/grpc#36066). A second attempt finds the status, unless the connection merely broke.
_FAILED_WRITE = "Internal error from Core"

# The message of a server's transport for a call that it dropped unread because too many calls were waiting.
_DROPPED = "CANCELLED"


# The messages of grpc for a failed TLS handshake, and their causes.
_UNTRUSTED = {
    "CERTIFICATE_VERIFY_FAILED": "tls.root_certificates: cannot verify the server's certificate",
    "Hostname Verification Check failed": "tls.server_name: the server's certificate is valid only for other names",
    "WRONG_VERSION_NUMBER": "tls: the server does not use TLS, want tls=None",
    "Failed to create security handshaker": "tls: the certificates are invalid, want PEM",
    "ls handshake failed": "tls: the handshake failed",
}

# The message of the server's transport for a request that is too large, which no handler of the server sees.
_TOO_LARGE = re.compile(r"larger than max \((\d+) vs\. (\d+)\)")

# The message of grpc's ValueError for a call on a channel that another thread has closed.
_CLOSED = "Cannot invoke RPC"


class UntrustedError(ServiceUnavailableError):
    """TLS refuses the connection, so waiting does not help."""


def closed() -> ServiceError:
    """Return the error for a call on a channel that was closed during the call."""
    return ServiceError("CANCELLED: the client was closed")


def was_closed(error: ValueError) -> bool:
    """Return whether grpc raised this error because the channel is closed, and not because of a wrong argument."""
    return str(error).startswith(_CLOSED)


def unreadable() -> MmposError:
    """Return the error for an answer that is not a message, worded like gRPC's error for streams."""
    return from_status("INTERNAL", "Exception deserializing response!")


def error_of(error: grpc.RpcError) -> MmposError:
    """Convert the error of a failed call, from either kind of channel."""
    failed: Any = error
    code = failed.code()
    if code is None:
        return ServiceError(f"UNKNOWN: {failed.details()}")
    if code is grpc.StatusCode.INTERNAL and failed.details() == _FAILED_WRITE:
        return ServiceUnavailableError("stream: the connection broke while a request was written")
    if code is grpc.StatusCode.CANCELLED and failed.details() == _DROPPED:
        return ServiceOverloadedError(
            "call: the server dropped it: make fewer calls at once, or send requests and read answers in time"
        )
    details, trailing = failed.details() or "", failed.trailing_metadata()
    if code is grpc.StatusCode.UNAVAILABLE:
        for pattern, message in _UNTRUSTED.items():
            if pattern in details:
                return UntrustedError(f"{message} ({details})")
    if large := _TOO_LARGE.search(details):
        want = f"want at most {large[2]} in one request to this server"
        return LimitExceededError(f"limits.request_bytes: got {large[1]}, {want}")
    wait = _number(trailing, RETRY_AFTER)
    return from_status(code.name, details, None if wait is None else wait / 1000)


def _number(metadata: Iterable[tuple[str, str | bytes]] | None, name: str) -> int | None:
    """Read a nonnegative number from trailing metadata; return None if there is none."""
    for key, value in metadata or ():
        if key == name:
            try:
                return max(int(value), 0)
            except ValueError:
                return None
    return None


_PAUSE = 0.3

_BROKEN = ("Socket closed", "Connection reset")

# How the messages of grpc begin if it cannot connect; the reason is at their end.
_ABSENT = ("failed to connect", "errors resolving", "connections to all backends failing")


class Reach:
    """Record of whether the servers of a client have ever answered it.

    If a server that has answered disappears, it is probably restarting, and calls wait for it. If no server has ever
    answered, the address is probably wrong, and waiting would only hide this. TLS errors are permanent, so no call
    waits after one.

    Args:
        destination: addresses of the servers.
    """

    def __init__(self, destination: Destination) -> None:
        self._destination, self._answered = destination, False

    def answered(self) -> None:
        """Record that a server has answered."""
        self._answered = True

    def patience(self, timeout: float) -> Patience:
        """Start the clock of a call."""
        return Patience(timeout, self)

    def waits(self, error: MmposError) -> bool:
        """Return whether to retry a call that failed with this error while time is left."""
        absent = isinstance(error, ServiceUnavailableError) and not isinstance(error, UntrustedError)
        return absent and self._answered and self._destination.attempts > 1

    def explained(self, error: MmposError) -> MmposError:
        """Describe why no server can be reached, and what to do, in place of grpc's message."""
        message = str(error)
        absent, broken = message.startswith(_ABSENT), not self._answered and any(word in message for word in _BROKEN)
        if type(error) is not ServiceUnavailableError or not (absent or broken):
            return error
        reason, tls, hint = message.rpartition(": ")[2].rstrip("]") if absent else message, self._destination.tls, ""
        if broken and tls is None:
            hint = " (a server that requires TLS closes it: tls=Tls(...))"
        elif broken and tls is not None:
            hint = " (a server that does not trust tls.certificate closes it)"
            if tls.certificate is None:
                hint = " (a server that requires client certificates closes it: Tls(..., certificate, key))"
        want = "want a running server: start one with mmpos serve, or pass another address"
        return ServiceUnavailableError(f"{','.join(self._destination.addresses)}: got {reason}{hint}, {want}")


class Patience:
    """The time left for one call, or for one answer in a stream.

    Args:
        timeout: seconds from now.
        reach: whether the servers have ever answered.
    """

    def __init__(self, timeout: float, reach: Reach) -> None:
        self._end, self._reach = monotonic() + timeout, reach

    @property
    def left(self) -> float:
        """Seconds left, always above 0."""
        return max(self._end - monotonic(), 0.001)

    def pause(self, error: MmposError) -> float | None:
        """Return the seconds to wait before the next attempt, or None to give up."""
        pause = _PAUSE * random.uniform(0.8, 1.2)
        return pause if self._reach.waits(error) and self.left > pause else None


def traced(metadata: tuple[Pair, ...]) -> tuple[Pair, ...]:
    """Add the trace context of the current OpenTelemetry span, if there is one, to the metadata of a call.

    The keys are defined by W3C Trace Context, unless the process or OTEL_PROPAGATORS sets other propagators.
    """
    # A process that has not imported OpenTelemetry has no span, so OpenTelemetry is not imported here either.
    if "opentelemetry.trace" not in sys.modules:
        return metadata
    from opentelemetry import trace

    if not trace.get_current_span().get_span_context().is_valid:
        return metadata
    from opentelemetry.propagate import inject

    carrier: dict[str, str] = {}
    inject(carrier)
    return (*metadata, *carrier.items())
