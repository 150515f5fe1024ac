"""The connections of this process, found among its sockets: gRPC lists none, counts no bytes of any and closes none."""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import unquote

__all__ = ["Peer", "close", "connections", "peer_of"]

_FOLDER = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
_TCP_INFO = getattr(socket, "TCP_INFO", None)
_RECEIVED = 128  # where tcpi_bytes_received stands in struct tcp_info of Linux


class Peer(NamedTuple):
    """The other end of a connection."""

    host: str
    port: int


def peer_of(name: str) -> Peer | None:
    """The peer that gRPC calls by such a name; None for one without a port, as on a unix socket."""
    kind, _, place = name.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return None
    host, _, port = unquote(place).rpartition(":")
    return Peer(host.strip("[]"), int(port))


def connections(ports: Collection[int]) -> dict[Peer, int]:
    """The peers that are connected to these ports of this process, and the bytes that each has sent (0 if unknown)."""
    return {peer: _received(found) for peer, found in _accepted(ports)}


def close(peers: Collection[Peer], ports: Collection[int]) -> None:
    """Close connections of these peers to these ports; what they were doing is cancelled."""
    for peer, found in _accepted(ports):
        if peer in peers:
            with suppress(OSError):
                found.shutdown(socket.SHUT_RDWR)


def _accepted(ports: Collection[int]) -> Iterator[tuple[Peer, socket.socket]]:
    for name in os.listdir(_FOLDER):
        with suppress(OSError):
            # A duplicate stays what it is if the other is closed meanwhile, and its number taken by something else.
            fd = os.dup(int(name))
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                os.close(fd)
                continue
            with socket.socket(fileno=fd) as found:
                if found.family in (socket.AF_INET, socket.AF_INET6) and found.getsockname()[1] in ports:
                    host, port = found.getpeername()[:2]
                    yield Peer(host.removeprefix("::ffff:"), port), found


def _received(found: socket.socket) -> int:
    if _TCP_INFO is None:
        return 0
    info = found.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _RECEIVED + 8)
    return int(struct.unpack_from("=Q", info, _RECEIVED)[0]) if len(info) >= _RECEIVED + 8 else 0
