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
from mmpos.rpc.bearer import is_loopback
from mmpos_server.certificates import Tls
from mmpos_server.config import ServerConfig

if TYPE_CHECKING:
    from mmpos_server.logs import Logs

__all__ = [
    "Listen",
    "Uds",
    "address",
    "bind",
    "bind_http",
    "inherited",
    "inherits",
    "local",
    "notify",
    "transport_options",
    "warn",
]


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


def bind_http(listen: Listen) -> socket.socket:
    """A socket on the port for HTTP, likewise."""
    assert listen.http_port is not None
    try:
        return bind(listen.host, listen.http_port, reuse_port=listen.reuse_port)
    except InvalidInputError as error:
        raise InvalidInputError(f"http-{error}") from None


def transport_options(config: ServerConfig, *, reuse_port: bool) -> list[tuple[str, int]]:
    """Channel arguments of a server.

    Args:
        config: its settings.
        reuse_port: whether other processes may listen on the port, too.
    """
    connections = config.connections
    return [
        # Lanes say how many calls are taken; one more waits. To refuse one in Python costs the event loop more than
        # half of what an answer does: beyond twice the capacity it would do nothing else. The transport drops one in a
        # fifteenth of the time.
        ("grpc.server.max_pending_requests", 0),
        ("grpc.server.max_pending_requests_hard_limit", 1),
        ("grpc.max_receive_message_length", config.limits.request_bytes),
        ("grpc.max_send_message_length", -1),
        # None but the identity: what a small message unpacks to has no limit that is known before.
        ("grpc.compression_enabled_algorithms_bitset", 1),
        # On by default, and then a second server on the port starts and silently takes half of the calls.
        ("grpc.so_reuseport", int(reuse_port)),
        ("grpc.max_allowed_incoming_connections", min(connections.max_connections, _most_connections())),
        ("grpc.server_handshake_timeout_ms", _milliseconds(connections.receive_seconds)),
        ("grpc.max_connection_idle_ms", _milliseconds(connections.idle_seconds)),
        ("grpc.max_connection_age_ms", _milliseconds(connections.age_seconds)),
        ("grpc.max_connection_age_grace_ms", _milliseconds(connections.grace_seconds)),
        # Of one connection; a client that has more of them begins the next when one ends.
        ("grpc.max_concurrent_streams", 1024),
        # Clients may ask every 10 s whether the server is there, also between calls; the server asks every minute.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
    ]


def _milliseconds(seconds: float) -> int:
    return min(max(1, round(1000 * seconds)), 2**31 - 1)


def _most_connections() -> int:
    """As many as leave some files to the process for everything else."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**31 - 1 if files == resource.RLIM_INFINITY else max(16, files - 128)


_LONGEST = 107  # bytes of a path that sockaddr_un of Linux holds, without the zero after it


@dataclass(frozen=True)
class Uds:
    """Where a unix socket is, and who may use it.

    Args:
        path: of the socket; a stale one there is replaced.
        mode: its permissions; to connect is to write.

    Raises:
        InvalidInputError: a path that is too long for a socket, or a mode that is none.
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
        """As clients write it."""
        return f"unix:{self.path}"

    def check(self) -> None:
        """See that a server can be there.

        Raises:
            InvalidInputError: a live server has it, or something else is there, or its folder is not.
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
            raise InvalidInputError(f"uds: got {self.path}, where something else is, want a free path")
        with socket.socket(socket.AF_UNIX) as found:
            found.settimeout(1.0)
            try:
                found.connect(os.fspath(self.path))
            except ConnectionRefusedError:
                return  # whoever made it is gone
            except OSError:
                pass  # somebody is there, with a full queue or not for us
        raise InvalidInputError(f"uds: got {self.path}, which is taken, want a free one")

    def listen(self, add: Callable[[str], object]) -> Callable[[], None]:
        """Have a socket listened on.

        It is made in a folder that nobody else can enter, and put in its place when its permissions are right. So the
        process's umask, which all threads share, stays as it is; and gRPC, which in the end deletes whatever is at
        the path that it was given, finds nothing there.

        Args:
            add: listens on an address of gRPC.

        Returns:
            What removes the socket, if it is still this one that is at the path.

        Raises:
            InvalidInputError: see ``check``, or the folder cannot be written to.
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
        """Make the socket in the folder and move it from there; gives what tells it from others."""
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            # A name of its own also for who reads it when the number stands for another folder.
            name = Path(folder).name
            # By the number of the folder, so that a long path of it makes none that is too long.
            add(f"unix:/proc/self/fd/{fd}/{name}")
            os.chmod(name, self.mode, dir_fd=fd)
            made = _identity(os.stat(name, dir_fd=fd))
            os.rename(name, self.path, src_dir_fd=fd)
        finally:
            os.close(fd)
        return made


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


_FIRST = 3  # the first descriptor that systemd hands over


def inherits() -> bool:
    """Whether systemd hands a listening socket to this process."""
    return os.environ.get("LISTEN_PID") == str(os.getpid())


def inherited() -> socket.socket | None:
    """Take this socket, if there is one."""
    return socket.socket(fileno=_FIRST) if inherits() else None


def notify(state: str) -> None:
    """Tell the service manager a state such as ``READY=1``; without one, do nothing."""
    place = os.environ.get("NOTIFY_SOCKET")
    if place:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.sendto(state.encode(), "\0" + place[1:] if place.startswith("@") else place)
