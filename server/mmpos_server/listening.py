"""Listen on TCP ports and unix sockets, and set the options of the transport."""

from __future__ import annotations

import errno
import os
import resource
import socket
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mmpos.errors import InvalidInputError
from mmpos.rpc.errors import is_loopback
from mmpos_server.access import TlsFiles
from mmpos_server.config import ServerConfig

if TYPE_CHECKING:
    from mmpos_server.telemetry import Logs

__all__ = [
    "AGE_SECONDS",
    "GRACE_SECONDS",
    "IDLE_SECONDS",
    "MAX_METADATA_BYTES",
    "RECEIVE_SECONDS",
    "Listen",
    "address",
    "bind",
    "bind_uds",
    "local",
    "notify",
    "transport_options",
    "warn",
]


@dataclass(frozen=True)
class Listen:
    """Addresses that a server listens on, with TLS and tokens.

    Args:
        host: address or name of this machine on which to listen.
        port: gRPC port; 0 picks a free one.
        tls: files for an encrypted port; with None, the port is not encrypted.
        reuse_port: whether other processes may listen on the same port; set for workers only.
        tcp: whether to listen on a TCP port at all.
        uds: path of an additional unix socket, which is never encrypted and only for the user of this process.
        token_file: file with client names and tokens; None admits every client that can connect.

    Raises:
        InvalidInputError: tokens would be sent over a network without TLS, or there are certificates but no port.
    """

    host: str = "127.0.0.1"
    port: int = 0
    tls: TlsFiles | None = None
    reuse_port: bool = False
    tcp: bool = True
    uds: Path | None = None
    token_file: Path | None = None

    def __post_init__(self) -> None:
        if self.tls is not None and not self.tcp:
            raise InvalidInputError("tls-cert requires --port: a unix socket is never encrypted")
        if self.token_file is not None and self.tcp and self.tls is None and not is_loopback(self.host):
            raise InvalidInputError(
                "token-file requires --tls-cert and --tls-key, or a loopback host; "
                f"others could read the tokens on {self.host}"
            )


def address(host: str, port: int) -> str:
    """Format HOST:PORT as clients expect it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def local(listen: Listen) -> bool:
    """Return whether only clients on this machine can reach the addresses."""
    return not listen.tcp or is_loopback(listen.host)


def warn(listen: Listen, logs: Logs) -> None:
    """Warn about a port that is open to everybody and about secret files that every user of this machine can read."""
    if not local(listen):
        target = address(listen.host, listen.port)
        if listen.tls is None:
            logs.warning("anybody on the network may call and read the traffic: no TLS, no tokens", address=target)
        elif listen.token_file is None and listen.tls.client_ca is None:
            logs.warning("anybody on the network may call: no tokens, no client certificates", address=target)
    for name, path in (("token-file", listen.token_file), ("tls-key", listen.tls.key if listen.tls else None)):
        if path is not None and path.exists() and path.stat().st_mode & stat.S_IROTH:
            logs.warning("every user of this machine may read a secret", setting=name, file=str(path))


def bind(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    """Bind a socket to a port without listening, to check that the port is free or to reserve it.

    Raises:
        InvalidInputError: the port is in use, or the host is not on this machine.
    """
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise InvalidInputError(f"host: got {host!r} ({error.strerror}), want an address of this machine") from None
    reserved = socket.socket(family, kind, protocol)
    try:
        # The transport does this too: otherwise, the last connections of a server that just ended would block the port.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(target)
    except OSError as error:
        reserved.close()
        if error.errno == errno.EADDRINUSE:
            raise InvalidInputError(f"port: {port} is in use on {host}, want a free port (0 picks one)") from None
        raise InvalidInputError(
            f"port: got {address(host, port)} ({error.strerror}), want an address to listen on"
        ) from None
    return reserved


RECEIVE_SECONDS = 30.0
"""Maximum seconds for a handshake, and from the start of a call until its request, or the first item of its stream, has
arrived.
"""

IDLE_SECONDS, AGE_SECONDS, GRACE_SECONDS = 600.0, 3600.0, 600.0
"""Seconds for which an idle connection stays open, age in seconds at which the server asks the client of a connection
to open a new one, and seconds that calls may last on a closing connection.
"""

MAX_METADATA_BYTES = 16 * 1024
"""Maximum size in bytes of a call's headers."""


def transport_options(config: ServerConfig, *, reuse_port: bool) -> list[tuple[str, int]]:
    """Return the channel arguments of a server; the public headers of gRPC document all but max_pending_requests.

    Args:
        config: settings of the server.
        reuse_port: whether other processes may listen on the same port.
    """
    return [
        ("grpc.max_receive_message_length", config.limits.request_bytes),
        ("grpc.max_send_message_length", -1),
        # Disable compression: the size of a compressed message is unknown until it is unpacked.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        # Make both limits equal because the transport randomly refuses calls between the two.
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        # gRPC enables this by default: a second server on the port would silently take half of the calls.
        ("grpc.so_reuseport", int(reuse_port)),
        ("grpc.max_allowed_incoming_connections", min(config.concurrency.max_connections, _most_connections())),
        ("grpc.server_handshake_timeout_ms", _milliseconds(RECEIVE_SECONDS)),
        ("grpc.max_connection_idle_ms", _milliseconds(IDLE_SECONDS)),
        ("grpc.max_connection_age_ms", _milliseconds(AGE_SECONDS)),
        ("grpc.max_connection_age_grace_ms", _milliseconds(GRACE_SECONDS)),
        # These limit the calls that Python has not accepted yet. Beyond the limit (1000 by default), gRPC drops calls
        # from any client, so one client that opens calls and ends them immediately could shut out the others.
        ("grpc.server.max_pending_requests", 20_000),
        ("grpc.server.max_pending_requests_hard_limit", 40_000),
        # This limit is per connection; a client's further calls wait until one ends.
        ("grpc.max_concurrent_streams", 256),
        # Clients may ping every 10 s, even between calls; the server pings every minute.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
    ]


def _milliseconds(seconds: float) -> int:
    return round(1000 * seconds)


def _most_connections() -> int:
    """Return the maximum number of connections that leaves enough open files for other uses."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**31 - 1 if files == resource.RLIM_INFINITY else max(16, files - 128)


_LONGEST = 107  # maximum length in bytes of a path in sockaddr_un on Linux, without the final zero


def bind_uds(path: Path, add: Callable[[str], object]) -> str:
    """Listen on a unix socket to which only the user of this process may connect; gRPC removes it when it stops.

    Args:
        path: path of the socket; a stale socket is replaced.
        add: function that listens on a gRPC address.

    Returns:
        the address that clients use.

    Raises:
        InvalidInputError: a running server listens on the path, or nothing can listen there.
    """
    try:
        _check_uds(path)
        before = os.umask(0o177)
        try:
            add(f"unix:{path}")
        finally:
            os.umask(before)
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidInputError(f"uds: got {path} ({reason}), want a path to listen on") from None
    return f"unix:{path}"


def _check_uds(path: Path) -> None:
    """Check that no server listens on the path, and that gRPC, which replaces any socket there, may do so."""
    if (size := len(os.fsencode(path))) > _LONGEST:
        raise InvalidInputError(f"uds: got a path of {size} bytes, want <= {_LONGEST}: {path}")
    if not path.parent.is_dir():
        raise InvalidInputError(f"uds: got {path}, want a path in a folder that exists")
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        raise InvalidInputError(f"uds: {path} is not a socket, want a free path")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            return  # its server has ended
        except OSError:
            pass  # a server listens, with a full queue or other permissions
    raise InvalidInputError(f"uds: {path} is in use, want a free path")


def notify(state: str) -> None:
    """Send a state such as ``READY=1`` to the service manager, if there is one."""
    path = os.environ.get("NOTIFY_SOCKET")
    if path:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.sendto(state.encode(), "\0" + path[1:] if path.startswith("@") else path)
