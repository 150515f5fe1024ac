"""Listen on a TCP port and a unix socket, and set the options of the transport."""

from __future__ import annotations

import errno
import os
import re
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
    from mmpos_server.logs import Logs

__all__ = ["Listen", "address", "bind", "bind_uds", "split", "transport_options", "warn"]


@dataclass(frozen=True)
class Listen:
    """Addresses that a server listens on, with TLS and tokens.

    Args:
        host: address or name of this machine.
        port: gRPC port; 0 picks a free one.
        tls: files for an encrypted port.
        reuse_port: whether other processes may listen on the same port.
        tcp: whether to listen on a port at all.
        uds: path of a unix socket, for the user of this process only.
        token_file: file with client names and tokens; None admits every client.

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
            raise InvalidInputError("--tls-cert requires --listen HOST:PORT: a unix socket is never encrypted")
        if self.token_file is not None and self.tcp and self.tls is None and not is_loopback(self.host):
            raise InvalidInputError(
                "--token-file requires --tls-cert and --tls-key, or a loopback host; "
                f"others could read the tokens on {self.host}"
            )


def address(host: str, port: int) -> str:
    """Format HOST:PORT as clients expect it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split(flag: str, text: str) -> tuple[str, int]:
    """Parse the value HOST:PORT of a flag; a host with colons is in brackets."""
    match = re.fullmatch(r"(?:\[([^\]]+)\]|([^:\[\]]+)):(\d{1,5})", text, re.ASCII)
    if not match or int(match[3]) > 65535:
        raise InvalidInputError(f"{flag}: got {text!r}, want HOST:PORT, such as 127.0.0.1:50051 or [::1]:50051")
    return match[1] or match[2], int(match[3])


def warn(listen: Listen, logs: Logs) -> None:
    """Warn about a port that is open to everybody and about secret files that every user of this machine can read."""
    if listen.tcp and not is_loopback(listen.host):
        target = address(listen.host, listen.port)
        if listen.tls is None:
            logs.warning("anybody on the network may call and read the traffic: no TLS, no tokens", address=target)
        elif listen.token_file is None and listen.tls.client_ca is None:
            logs.warning("anybody on the network may call: no tokens, no client certificates", address=target)
    for path in (listen.token_file, listen.tls and listen.tls.key):
        if path is not None and path.exists() and path.stat().st_mode & stat.S_IROTH:
            logs.warning("every user of this machine may read a secret", file=str(path))


def bind(host: str, port: int, *, reuse_port: bool = False, flag: str = "--listen") -> socket.socket:
    """Bind a socket to a port, to check that the port is free or to reserve it; ``flag`` is for errors."""
    try:
        family, kind, protocol, _, name = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        reserved = socket.socket(family, kind, protocol)
        try:
            # The transport does this too: otherwise, the last connections of an ended server would block the port.
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, reuse_port)
            reserved.bind(name)
        except OSError:
            reserved.close()
            raise
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidInputError(
            f"{flag}: got {address(host, port)} ({reason}), want a free port of this machine (0 picks one)"
        ) from None
    return reserved


def bind_uds(path: Path, add: Callable[[str], object]) -> str:
    """Listen on a unix socket to which only the user of this process may connect; gRPC removes it when it stops.

    Args:
        path: path of the socket; a socket whose server has ended is replaced.
        add: function that listens on a gRPC address.

    Returns:
        the address that clients use.

    Raises:
        InvalidInputError: a running server listens on the path, or nothing can listen there.
    """
    before = os.umask(0o177)
    try:
        # gRPC replaces any socket.
        if path.is_symlink() or (path.exists() and not path.is_socket()):
            raise RuntimeError("not a socket")
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            if path.exists() and probe.connect_ex(os.fspath(path)) != errno.ECONNREFUSED:
                raise RuntimeError("in use")
        add(f"unix:{path}")
    except (OSError, RuntimeError) as error:
        raise InvalidInputError(f"--listen: got unix:{path} ({error}), want a path to listen on") from None
    finally:
        os.umask(before)
    return f"unix:{path}"


def transport_options(config: ServerConfig, *, reuse_port: bool) -> list[tuple[str, int]]:
    """Return the channel arguments of a server; ``reuse_port`` lets other processes listen on the same port."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 1000 if files == resource.RLIM_INFINITY else min(1000, max(16, files - 128))
    return [
        # Connections times streams bound what waits inside gRPC; further calls of a client wait in the client.
        ("grpc.max_allowed_incoming_connections", most),
        ("grpc.max_concurrent_streams", config.streams_per_connection),
        # By default, gRPC counts calls until they are deallocated, and so refuses clients that use all their streams.
        ("grpc.http2.max_deallocating_streams", config.streams_per_connection),
        # Beyond this number of calls that Python has not accepted (1000 by default), gRPC drops calls of any client.
        ("grpc.server.max_pending_requests", 20_000),
        ("grpc.server.max_pending_requests_hard_limit", 40_000),
        ("grpc.max_receive_message_length", config.request_bytes),
        ("grpc.max_send_message_length", -1),
        # Windows that grow with a connection's speed would let one that stalls hold many megabytes.
        ("grpc.http2.bdp_probe", 0),
        # Disable compression: the size of a compressed message is unknown until it is unpacked.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        # Make both limits equal because the transport randomly refuses calls between the two.
        ("grpc.max_metadata_size", 16_384),
        ("grpc.absolute_max_metadata_size", 16_384),
        # gRPC enables this by default: a second server on the port would silently take half of the calls.
        ("grpc.so_reuseport", int(reuse_port)),
        ("grpc.server_handshake_timeout_ms", 30_000),
        ("grpc.max_connection_idle_ms", 600_000),
        ("grpc.max_connection_age_ms", 3_600_000),
        ("grpc.max_connection_age_grace_ms", 600_000),
        # Clients may ping every 10 s, even between calls; the server pings every minute.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
    ]
