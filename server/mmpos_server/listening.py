"""Listening addresses: TCP ports, unix sockets and those of systemd, and the options of the transport."""

from __future__ import annotations

import errno
import os
import resource
import socket
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
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
    "GRACE_SECONDS",
    "IDLE_SECONDS",
    "MAX_METADATA_BYTES",
    "Listen",
    "Uds",
    "address",
    "bind",
    "inherited",
    "inherits",
    "local",
    "notify",
    "transport_options",
    "warn",
]


@dataclass(frozen=True)
class Listen:
    """Addresses that a server listens on, with TLS and tokens.

    Args:
        host: address or name of this machine.
        port: port of gRPC; 0 picks a free one.
        tls: files of an encrypted port; None is plain text.
        reuse_port: whether other processes may listen on the port too; set for workers only.
        tcp: whether to listen on a port at all.
        uds: unix socket to listen on as well, never encrypted.
        token_file: file of client names and tokens; None admits everybody who can connect.

    Raises:
        InvalidInputError: tokens would cross a network without TLS, or certificates are given without a port.
    """

    host: str = "127.0.0.1"
    port: int = 0
    tls: TlsFiles | None = None
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
    """Format HOST:PORT as clients write it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def local(listen: Listen) -> bool:
    """Check whether only clients on this machine can reach the addresses."""
    return not listen.tcp or is_loopback(listen.host)


def warn(listen: Listen, logs: Logs) -> None:
    """Log warnings: a port open to everybody, and secret files that every user of this machine can read."""
    if not local(listen):
        target = address(listen.host, listen.port)
        if listen.tls is None:
            logs.warning("anybody on the network may call, and read the traffic: no TLS, no tokens", address=target)
        elif listen.token_file is None and listen.tls.client_ca is None:
            logs.warning("anybody on the network may call: no tokens, no certificates of clients", address=target)
    for name, path in (("token-file", listen.token_file), ("tls-key", listen.tls.key if listen.tls else None)):
        if path is not None and path.exists() and path.stat().st_mode & stat.S_IROTH:
            logs.warning("every user of this machine may read a secret", setting=name, file=str(path))


def bind(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    """Bind a socket to a port without listening, to check that the port is free or to reserve it.

    Raises:
        InvalidInputError: the port is taken, or the host is not of this machine.
    """
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise InvalidInputError(f"host: got {host!r} ({error.strerror}), want an address of this machine") from None
    reserved = socket.socket(family, kind, protocol)
    try:
        # As the transport does: otherwise the last connections of a server that just ended would hold the port.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(target)
    except OSError as error:
        reserved.close()
        if error.errno == errno.EADDRINUSE:
            raise InvalidInputError(
                f"port: got {port}, which is taken on {host}, want a free one (0 picks one)"
            ) from None
        raise InvalidInputError(f"port: got {address(host, port)} ({error.strerror}), want one to listen on") from None
    return reserved


IDLE_SECONDS, GRACE_SECONDS = 600.0, 600.0
"""Time of a connection without a call; and time of its calls after its client was asked for a new connection."""

MAX_METADATA_BYTES = 16 * 1024
"""Most bytes of the headers of a call."""


def transport_options(config: ServerConfig, *, reuse_port: bool) -> list[tuple[str, int]]:
    """Return the channel arguments of a server; the public headers of gRPC document all but max_pending_requests.

    Args:
        config: settings of the server.
        reuse_port: whether other processes may listen on the port too.
    """
    connections = config.connections
    return [
        ("grpc.max_receive_message_length", config.limits.request_bytes),
        ("grpc.max_send_message_length", -1),
        # Identity only: a compressed message has no size limit that is known before it is unpacked.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        # Equal, since the transport refuses some calls between the two by chance.
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        # On by default, so that a second server on the port would silently take half of the calls.
        ("grpc.so_reuseport", int(reuse_port)),
        ("grpc.max_allowed_incoming_connections", min(connections.max_connections, _most_connections())),
        ("grpc.server_handshake_timeout_ms", _milliseconds(connections.receive_seconds)),
        ("grpc.max_connection_idle_ms", _milliseconds(IDLE_SECONDS)),
        ("grpc.max_connection_age_ms", _milliseconds(connections.age_seconds)),
        ("grpc.max_connection_age_grace_ms", _milliseconds(GRACE_SECONDS)),
        # Calls that Python has not taken yet: beyond these the core drops calls of anybody (by default 1000), so that
        # one client that opens calls and ends them at once would shut out others.
        ("grpc.server.max_pending_requests", 20_000),
        ("grpc.server.max_pending_requests_hard_limit", 40_000),
        # Per connection; further calls of a client wait until one ends.
        ("grpc.max_concurrent_streams", 256),
        # Clients may ping every 10 s, also between calls; the server pings every minute.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
    ]


def _milliseconds(seconds: float) -> int:
    return min(max(1, round(1000 * seconds)), 2**31 - 1)


def _most_connections() -> int:
    """Return the most connections that leave some open files for everything else."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**31 - 1 if files == resource.RLIM_INFINITY else max(16, files - 128)


_LONGEST = 107  # bytes of a path that sockaddr_un of Linux holds, without the zero after it


@dataclass(frozen=True)
class Uds:
    """Unix socket to listen on: a file that is never open to more users than its mode allows.

    Args:
        path: path of the socket; a stale socket there is replaced.
        mode: permissions of the socket; clients need write permission to connect.

    Raises:
        InvalidInputError: the path is too long for a socket, or the mode is out of range.
    """

    path: Path
    mode: int = 0o600

    def __post_init__(self) -> None:
        size = len(os.fsencode(self.path))
        if size > _LONGEST:
            raise InvalidInputError(f"uds: got a path of {size} bytes, want <= {_LONGEST}: {self.path}")
        if not 0 <= self.mode <= 0o777:
            raise InvalidInputError(f"uds-mode: got {self.mode:o}, want permissions from 0 to 777")

    @property
    def address(self) -> str:
        """Address as clients write it."""
        return f"unix:{self.path}"

    def check(self) -> None:
        """Check that a server can listen on the path.

        Raises:
            InvalidInputError: a live server listens there, the path is no socket, or its folder does not exist.
        """
        try:
            if not self.path.parent.is_dir():
                raise InvalidInputError(f"uds: got {self.path}, want a path in a folder that exists")
            kind = self.path.lstat().st_mode
        except FileNotFoundError:
            return
        except OSError as error:
            raise InvalidInputError(f"uds: got {self.path} ({error.strerror}), want a path to listen on") from None
        if not stat.S_ISSOCK(kind):
            raise InvalidInputError(f"uds: got {self.path}, which is no socket, want a free path")
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(os.fspath(self.path))
            except ConnectionRefusedError:
                return  # its server has ended
            except OSError:
                pass  # a server listens, with a full queue or other permissions
        raise InvalidInputError(f"uds: got {self.path}, which is taken, want a free one")

    def listen(self, add: Callable[[str], object]) -> Callable[[], None]:
        """Listen on the socket.

        The socket is made in a folder that nobody else can enter, and moved to its path when its permissions are
        right. So the umask of the process, which all threads share, stays unchanged; and gRPC, which at its end
        deletes the path that it listened on, finds nothing there.

        Args:
            add: function that listens on an address of gRPC.

        Returns:
            Function that removes the socket, unless another file has replaced it.

        Raises:
            InvalidInputError: as ``check`` does, or the folder cannot be written to.
        """
        self.check()
        try:
            with tempfile.TemporaryDirectory(prefix=".mmpos-", dir=self.path.parent) as folder:
                made = self._make(folder, add)
        except (OSError, RuntimeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise InvalidInputError(f"uds: got {self.path} ({reason}), want a path to listen on") from None

        def remove() -> None:
            with suppress(OSError):
                if _identity(self.path.lstat()) == made:
                    self.path.unlink()

        return remove

    def _make(self, folder: str, add: Callable[[str], object]) -> tuple[int, int]:
        """Make the socket in the folder and move it to its path; returns its device and inode."""
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            # A unique name, in case the number of the folder is reused when gRPC deletes the path.
            name = Path(folder).name
            # By the number of the folder, so that a long path of the folder does not make the address too long.
            add(f"unix:/proc/self/fd/{fd}/{name}")
            os.chmod(name, self.mode, dir_fd=fd)
            made = _identity(os.stat(name, dir_fd=fd))
            os.rename(name, self.path, src_dir_fd=fd)
        finally:
            os.close(fd)
        return made


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


_FIRST = 3  # the first descriptor that systemd passes


def inherits() -> bool:
    """Check whether systemd passes a listening socket to this process."""
    return os.environ.get("LISTEN_PID") == str(os.getpid())


def inherited() -> socket.socket | None:
    """Return the listening socket that systemd passes; None without one."""
    return socket.socket(fileno=_FIRST) if inherits() else None


def notify(state: str) -> None:
    """Send a state such as ``READY=1`` to the service manager, if there is one."""
    path = os.environ.get("NOTIFY_SOCKET")
    if path:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.sendto(state.encode(), "\0" + path[1:] if path.startswith("@") else path)
