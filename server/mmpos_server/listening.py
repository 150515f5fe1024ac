"""Where and how a server listens, and to whom: address, TLS, tokens, and what it tells the transport."""

from __future__ import annotations

import errno
import socket
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mmpos.errors import InvalidInputError
from mmpos.wire.bearer import is_loopback
from mmpos_server.certificates import Tls
from mmpos_server.unix_socket import Uds

if TYPE_CHECKING:
    from mmpos_server.logs import Logs

__all__ = ["Listen", "address", "bind", "local", "transport_options", "warn"]


@dataclass(frozen=True)
class Listen:
    """Where a server listens, and to whom.

    Args:
        host: address or name of this machine.
        port: 0 picks one.
        tls: files of an encrypted port; None is plain text.
        reuse_port: whether other processes may listen on the port, too: set for workers only.
        tcp: whether there is a port at all.
        uds: a unix socket to listen on, too, never encrypted.
        token_file: names and tokens of those who may call; None is everybody who can connect.

    Raises:
        InvalidInputError: tokens would cross a network that others can read, or certificates are for nothing.
    """

    host: str = "127.0.0.1"
    port: int = 0
    tls: Tls | None = None
    reuse_port: bool = False
    tcp: bool = True
    uds: Uds | None = None
    token_file: Path | None = None

    def __post_init__(self) -> None:
        if self.tls is not None and not self.tcp:
            raise InvalidInputError(
                f"tls-cert: got {self.tls.cert} with a unix socket alone, which is never encrypted, want --port, too"
            )
        if self.token_file is not None and self.tcp and self.tls is None and not is_loopback(self.host):
            raise InvalidInputError(
                f"token-file: got {self.token_file} for {self.host} without TLS, where others could read the tokens, "
                "want --tls-cert and --tls-key, or a loopback host"
            )


def address(host: str, port: int) -> str:
    """HOST:PORT, as clients write it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def local(listen: Listen) -> bool:
    """Whether only this machine can reach what listens there."""
    return not listen.tcp or is_loopback(listen.host)


def warn(listen: Listen, logs: Logs) -> None:
    """Write what is allowed, and seldom meant: a port open to everybody, and secrets that every user here can read."""
    if not local(listen):
        place = address(listen.host, listen.port)
        if listen.tls is None:
            logs.warning("anybody on the network may call, and may read it: no TLS, no tokens", address=place)
        elif listen.token_file is None and listen.tls.client_ca is None:
            logs.warning("anybody on the network may call: no tokens, no certificates of clients", address=place)
    for name, path in (("token-file", listen.token_file), ("tls-key", listen.tls.key if listen.tls else None)):
        if path is not None and path.exists() and path.stat().st_mode & stat.S_IROTH:
            logs.warning("every user of this machine may read a secret", setting=name, file=str(path))


def bind(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    """A socket on the port that does not listen: it finds out who else is there, or keeps the port.

    Raises:
        InvalidInputError: somebody else has it, or it cannot be had.
    """
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise InvalidInputError(f"host: got {host!r} ({error.strerror}), want an address of this machine") from None
    found = socket.socket(family, kind, protocol)
    try:
        # As the transport does: without it, the last connections of a server that just ended would hold the port.
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        found.bind(place)
    except OSError as error:
        found.close()
        if error.errno == errno.EADDRINUSE:
            raise InvalidInputError(
                f"port: got {port}, which is taken on {host}, want a free one (0 picks one)"
            ) from None
        raise InvalidInputError(f"port: got {address(host, port)} ({error.strerror}), want one to listen on") from None
    return found


def transport_options(request_bytes: int, *, reuse_port: bool, pending: int = 1024) -> list[tuple[str, int]]:
    """Channel arguments of a server.

    Args:
        request_bytes: most bytes of a request.
        reuse_port: whether other processes may listen on the port, too.
        pending: most calls that wait for the event loop; those beyond end with CANCELLED.
    """
    return [
        # To refuse a call in Python costs the event loop more than half of what an answer does: beyond twice the
        # capacity it would do nothing else. The transport drops one in a fifteenth of the time, without the loop.
        ("grpc.server.max_pending_requests", pending),
        ("grpc.server.max_pending_requests_hard_limit", pending),
        ("grpc.max_receive_message_length", request_bytes),
        ("grpc.max_send_message_length", -1),
        # On by default, and then a second server on the port starts and silently takes half of the calls.
        ("grpc.so_reuseport", int(reuse_port)),
        # Clients may ask every 10 s whether the server is there, also between calls; the server asks every minute.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
    ]
