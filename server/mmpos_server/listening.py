"""Where and how a server listens, and to whom: address, TLS, tokens, and what it tells the transport."""

from __future__ import annotations

import errno
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from mmpos.errors import InvalidInputError
from mmpos.wire.bearer import is_loopback
from mmpos_server.unix_socket import Uds

__all__ = ["Listen", "Tls", "address", "bind", "bind_http", "local", "transport_options"]


@dataclass(frozen=True)
class Tls:
    """Files of a server that encrypts.

    Args:
        cert: its certificate chain, PEM.
        key: the key of it, PEM.
        client_ca: certificates of those that sign clients; given, clients must have one.
    """

    cert: Path
    key: Path
    client_ca: Path | None = None

    def credentials(self) -> grpc.ServerCredentials:
        """The credentials of a port.

        Raises:
            InvalidInputError: a file cannot be read, or certificate and key do not belong together.
        """
        cert, key = _read("tls-cert", self.cert), _read("tls-key", self.key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.cert, self.key)
        except (ssl.SSLError, OSError) as error:
            raise InvalidInputError(
                f"tls-cert: got {self.cert} with {self.key} ({error}), want a PEM certificate and its key"
            ) from None
        ca = None
        if self.client_ca is not None:
            ca = _read("tls-client-ca", self.client_ca)
            try:
                context.load_verify_locations(self.client_ca)
            except ssl.SSLError as error:
                raise InvalidInputError(
                    f"tls-client-ca: got {self.client_ca} ({error}), want PEM certificates"
                ) from None
        return grpc.ssl_server_credentials([(key, cert)], ca, require_client_auth=ca is not None)


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
        http_port: of the Open Inference Protocol over HTTP, on the same host; 0 picks one, None is none.

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
    http_port: int | None = None

    @property
    def has_ports(self) -> bool:
        """Whether it listens on anything but a unix socket."""
        return self.tcp or self.http_port is not None

    def __post_init__(self) -> None:
        if self.tls is not None and not self.has_ports:
            raise InvalidInputError(
                f"tls-cert: got {self.tls.cert} with a unix socket alone, which is never encrypted, want --port, too"
            )
        if self.token_file is not None and self.has_ports and self.tls is None and not is_loopback(self.host):
            raise InvalidInputError(
                f"token-file: got {self.token_file} for {self.host} without TLS, where others could read the tokens, "
                "want --tls-cert and --tls-key, or a loopback host"
            )


def address(host: str, port: int) -> str:
    """HOST:PORT, as clients write it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def local(listen: Listen) -> bool:
    """Whether only this machine can reach what listens there."""
    return not listen.has_ports or is_loopback(listen.host)


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


def bind_http(listen: Listen) -> socket.socket:
    """A socket on the port for HTTP, likewise."""
    assert listen.http_port is not None
    try:
        return bind(listen.host, listen.http_port, reuse_port=listen.reuse_port)
    except InvalidInputError as error:
        raise InvalidInputError(f"http-{error}") from None


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


def _read(name: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidInputError(f"{name}: got {path} ({error.strerror}), want a file that can be read") from None
