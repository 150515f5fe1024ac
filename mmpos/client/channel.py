"""Channels: their target, their options, and one of them per process, or per event loop, opened when first used."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from mmpos.client.options import Endpoint, host_and_port
from mmpos.errors import ServiceUnavailableError, UnsupportedError

C = TypeVar("C")

FIRST_BACKOFF, BACKOFF_FACTOR, MAX_BACKOFF = 0.1, 3, 2.0
"""Seconds before the second attempt, what the wait is multiplied by, and its most."""

_STREAMS = [
    {"service": "mmpos.rpc.v1.PositionService", "method": "StreamPlace"},
    {"service": "mmpos.rpc.v1.SequenceService", "method": "StreamBuild"},
]

_OPTIONS = {
    # Answers may be as large as the server lets them.
    "grpc.max_receive_message_length": -1,
    # A call is retried only while its request is kept, of which gRPC keeps 256 KiB by itself.
    "grpc.per_rpc_retry_buffer_size": 2**31 - 1,
    "grpc.keepalive_time_ms": 30_000,
    "grpc.keepalive_timeout_ms": 10_000,
    "grpc.keepalive_permit_without_calls": 1,
    "grpc.http2.max_pings_without_data": 0,
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 5_000,
    # No settings from DNS records.
    "grpc.service_config_disable_resolution": 1,
    # Connections of its own: none is shared with a process that it was forked from.
    "grpc.use_local_subchannel_pool": 1,
}


class Channels(Generic[C]):
    """The channels of a client, by process, and by event loop where there is one.

    A channel that a parent opened before a fork stays here, unused and unclosed: both would touch its connection.
    """

    def __init__(self) -> None:
        self._open: dict[tuple[int, Hashable], C] = {}

    def get(self, connect: Callable[[], C], close: Callable[[C], object], loop: Hashable = None) -> C:
        """The channel of this process and event loop, opened now if there is none.

        Raises:
            UnsupportedError: in a forked child of a process that called, where gRPC would hang.
        """
        key = (os.getpid(), loop)
        if key not in self._open:
            if any(pid != key[0] for pid, _ in list(self._open)) and not _fork_support():
                raise UnsupportedError(
                    "fork: got a client that called before the fork, want GRPC_ENABLE_FORK_SUPPORT=1 in the "
                    "environment before grpc is imported, the start method 'spawn', or no call before the fork"
                )
            # No lock, which a fork could copy while it is held: who comes second drops what it opened.
            opened = connect()
            if self._open.setdefault(key, opened) is not opened:
                close(opened)
        return self._open[key]

    def pop(self, loop: Hashable = None) -> C | None:
        """The channel of this process and event loop, which is no longer kept."""
        return self._open.pop((os.getpid(), loop), None)

    def forget(self, dead: Callable[[Any], bool]) -> None:
        """Drop the channels of event loops that are gone."""
        for key in [key for key in list(self._open) if key[0] == os.getpid() and dead(key[1])]:
            self._open.pop(key, None)


def _fork_support() -> bool:
    return os.environ.get("GRPC_ENABLE_FORK_SUPPORT", "").lower() in ("1", "true", "yes")


def service_config(attempts: int, balanced: bool) -> dict[str, Any]:
    """What gRPC does by itself: retries, and which server gets a call."""
    retry = {
        "maxAttempts": attempts,
        "initialBackoff": f"{FIRST_BACKOFF}s",
        "backoffMultiplier": BACKOFF_FACTOR,
        "maxBackoff": f"{MAX_BACKOFF}s",
        # A server that says good-bye cancels what reached it in that moment and was not begun.
        "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED"],
    }
    config: dict[str, Any] = {
        # Streams resend what has no answer, on a new stream; the more specific entry counts.
        "methodConfig": [{"name": _STREAMS}, {"name": [{}], "retryPolicy": retry} if attempts > 1 else {"name": [{}]}],
        # A server that dies fails all its calls at once, so up to 500 may be retried before a success.
        "retryThrottling": {"maxTokens": 1000, "tokenRatio": 1},
    }
    if balanced:
        config["loadBalancingConfig"] = [{"round_robin": {}}]
        config["healthCheckConfig"] = {"serviceName": ""}
    return config


def channel_options(endpoint: Endpoint) -> list[tuple[str, Any]]:
    """The options of a channel."""
    first = endpoint.addresses[0]
    balanced = len(endpoint.addresses) > 1 or first.startswith("dns:")
    options: dict[str, Any] = _OPTIONS | {
        "grpc.service_config": json.dumps(service_config(endpoint.attempts, balanced))
    }
    found = host_and_port(first)
    if len(endpoint.addresses) > 1:
        options["grpc.default_authority"] = first
    if endpoint.tls is not None:
        name = endpoint.tls.server_name
        if name is None and len(endpoint.addresses) > 1 and found is not None:
            name = found[0]
        if name is not None:
            options["grpc.ssl_target_name_override"] = name
    if endpoint.token is not None and endpoint.tls is None:
        options["grpc.enable_http_proxy"] = 0  # the token stays on this machine
    return list(options.items())


def target(addresses: tuple[str, ...]) -> str:
    """What gRPC connects to: one address as it is, several as numbers, since it takes no list of names.

    Raises:
        ServiceUnavailableError: a name that is not known.
    """
    if len(addresses) == 1:
        return addresses[0]
    resolved = [_resolve(f"addresses[{i}]", address) for i, address in enumerate(addresses)]
    if all(any(ip.version == 4 for ip, _ in found) for found in resolved):
        pairs = [f"{ip}:{port}" for found in resolved for ip, port in found if ip.version == 4]
        return "ipv4:" + ",".join(dict.fromkeys(pairs))
    # A list is of one family: addresses of version 4 go into one of version 6 in their mapped form.
    pairs = [f"[{ip if ip.version == 6 else f'::ffff:{ip}'}]:{port}" for found in resolved for ip, port in found]
    return "ipv6:" + ",".join(dict.fromkeys(pairs))


def _resolve(name: str, address: str) -> list[tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]]:
    found = host_and_port(address)
    assert found is not None
    try:
        entries = socket.getaddrinfo(*found, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ServiceUnavailableError(f"{name}: got {address!r}, want a host that is known ({error})") from None
    return [(ipaddress.ip_address(entry[4][0]), found[1]) for entry in entries]
