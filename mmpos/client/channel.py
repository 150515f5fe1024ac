"""gRPC channels: target, options, one channel per process and event loop, and conversion of errors."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import socket
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import grpc

from mmpos.client.options import host_and_port
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

    from mmpos.client.options import Options

_SERVICES = [{"service": f"mmpos.rpc.v1.{name}Service"} for name in ("Info", "Position", "Rotary", "Sequence")]

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
    """A client's channel.

    Args:
        channel: the gRPC channel.
    """

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        self.answered = False
        """Whether a server has answered. If it disappears later, it is probably restarting, and calls wait for it."""
        self._methods: dict[str, Any] = {}

    def method(self, path: str) -> Any:
        """Return a callable that takes and returns bytes; gRPC prepares it once for many calls."""
        method = self._methods.get(path)
        if method is None:
            method = self._methods[path] = self.channel.unary_unary(path)
        return method


class ProcessChannels:
    """A client's channels, by process and, if there is one, by event loop.

    A channel that a parent opened before a fork stays unused and unclosed in the child, since using or closing it would
    affect the parent's connection.
    """

    def __init__(self) -> None:
        self._open: dict[tuple[int, AbstractEventLoop | None], OpenChannel] = {}

    def get(self, connect: Callable[[], Any], loop: AbstractEventLoop | None = None) -> OpenChannel:
        """Return the channel of this process and event loop, and open it if there is none.

        Raises:
            UnsupportedError: this process was forked after a call, so gRPC would hang.
        """
        key = (os.getpid(), loop)
        opened = self._open.get(key)
        return self._connected(key, connect) if opened is None else opened

    def _connected(self, key: tuple[int, AbstractEventLoop | None], connect: Callable[[], Any]) -> OpenChannel:
        pid, loop = key
        for other in list(self._open):
            if other[0] == pid and other[1] is not None and other[1].is_closed():
                self._open.pop(other, None)
            elif other[0] != pid and os.environ.get("GRPC_ENABLE_FORK_SUPPORT", "").lower() not in ("1", "true", "yes"):
                raise UnsupportedError(
                    "fork: the client made a call before the fork; set GRPC_ENABLE_FORK_SUPPORT=1 before grpc is "
                    "imported, use the start method 'spawn', or make no call before the fork"
                )
        # There is no lock, since a fork could copy a held lock: the second of two threads drops the channel it opened.
        # In an event loop, no other task runs meanwhile.
        opened = OpenChannel(connect())
        kept = self._open.setdefault(key, opened)
        if kept is not opened and loop is None:
            opened.channel.close()
        return kept

    def pop(self, loop: AbstractEventLoop | None = None) -> Any:
        """Remove and return the channel of this process and event loop, or None."""
        opened = self._open.pop((os.getpid(), loop), None)
        return None if opened is None else opened.channel


def service_config(attempts: int, balanced: bool) -> dict[str, object]:
    """Return the gRPC service config, which sets retries and load balancing."""
    retry = {
        "maxAttempts": attempts,
        "initialBackoff": "0.1s",
        "backoffMultiplier": 3,
        "maxBackoff": "2s",
        # A server that sends GOAWAY cancels calls that arrived at that moment and have not begun. An overloaded server
        # refuses a call, and says in grpc-retry-pushback-ms when gRPC shall send it again.
        "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED", "RESOURCE_EXHAUSTED"],
    }
    config: dict[str, object] = {
        "methodConfig": [{"name": _SERVICES, "retryPolicy": retry}] if attempts > 1 else [],
        # A server that dies fails all its calls at the same time, so up to 500 retries must be possible without a
        # success.
        "retryThrottling": {"maxTokens": 1000, "tokenRatio": 1},
    }
    if balanced:
        config["loadBalancingConfig"] = [{"round_robin": {}}]
        config["healthCheckConfig"] = {"serviceName": ""}
    return config


def channel_options(options: Options) -> list[tuple[str, str | int]]:
    """Return the options for a channel."""
    first, several = options.addresses[0], len(options.addresses) > 1
    config = json.dumps(service_config(options.attempts, several or first.startswith("dns:")))
    values: dict[str, str | int] = {**_CHANNEL, "grpc.service_config": config}
    if several:
        values["grpc.default_authority"] = first
    if options.tls is not None:
        host = host_and_port(first) if several else None
        name = options.tls.server_name or (host and host[0])
        if name is not None:
            values["grpc.ssl_target_name_override"] = name
    elif options.token is not None:
        values["grpc.enable_http_proxy"] = 0  # the token stays on this machine
    return list(values.items())


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
    host, port = server
    try:
        entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ServiceUnavailableError(f"{name}: cannot resolve {address!r} ({error})") from None
    return [(ipaddress.ip_address(entry[4][0]), port) for entry in entries]


# The message of grpc.aio if a stream ends while a request is being written; grpc.aio then loses the stream's status
# (grpc/grpc#36066).
_FAILED_WRITE = "Internal error from Core"

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

# The message of the server's transport for a request that is too large, which no handler of the server sees.
_TOO_LARGE = re.compile(r"larger than max \((\d+) vs\. (\d+)\)")


def closed() -> ServiceError:
    """Return the error of a call on a channel that another thread or task has closed."""
    return ServiceError("CANCELLED: the client was closed")


def failure(error: grpc.RpcError, path: str, options: Options, answered: bool) -> MmposError:
    """Convert the error of a failed call or stream, from either kind of channel.

    Args:
        error: error of gRPC.
        path: method that was called.
        options: options of the client.
        answered: whether the server has answered an earlier call.
    """
    failed: Any = error
    code, details, metadata = failed.code(), failed.details() or "", failed.trailing_metadata()
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        cause = "" if details == "Deadline Exceeded" else f" ({details})"
        return late(path, options, cause)
    if code is grpc.StatusCode.UNAVAILABLE:
        return _unavailable(details, options, answered)
    if code is grpc.StatusCode.INTERNAL and details == _FAILED_WRITE:
        return ServiceUnavailableError("the connection broke while a request was written")
    if large := _TOO_LARGE.search(details):
        want = f"want at most {large[2]} in one request to this server"
        return LimitExceededError(f"limits.request_bytes: got {large[1]}, {want}")
    wait = _number(metadata, RETRY_AFTER)
    return from_status("UNKNOWN" if code is None else code.name, details, None if wait is None else wait / 1000)


def late(path: str, options: Options, cause: str = "") -> ServiceTimeoutError:
    """Return the error for a call that got no answer within the timeout of the client."""
    method, servers = path.rpartition("/")[2], ",".join(options.addresses)
    return ServiceTimeoutError(f"timeout: {method} got no answer from {servers} within {options.timeout:g} s{cause}")


def _unavailable(details: str, options: Options, answered: bool) -> ServiceUnavailableError:
    """Describe why no server can be reached, and what to do, in place of grpc's message."""
    for pattern, message in _UNTRUSTED.items():
        if pattern in details:
            return ServiceUnavailableError(f"{message} ({details})")
    absent, broken = details.startswith(_ABSENT), not answered and any(word in details for word in _BROKEN)
    if not (absent or broken):
        return ServiceUnavailableError(details)
    reason, tls, hint = details.rpartition(": ")[2].rstrip("]") if absent else details, options.tls, ""
    if broken and tls is None:
        hint = " (a server that requires TLS closes it: tls=Tls(...))"
    elif broken and tls is not None and tls.certificate is None:
        hint = " (a server that requires client certificates closes it: Tls(..., certificate, key))"
    elif broken:
        hint = " (a server that does not trust tls.certificate closes it)"
    want = "want a running server: start one with mmpos serve, or pass another address"
    return ServiceUnavailableError(f"{','.join(options.addresses)}: got {reason}{hint}, {want}")


def _number(metadata: Iterable[tuple[str, str | bytes]] | None, name: str) -> int | None:
    """Read a number from trailing metadata; return None if there is none that is at least 0."""
    for key, value in metadata or ():
        if key == name and value.isdigit():
            return int(value)
    return None
