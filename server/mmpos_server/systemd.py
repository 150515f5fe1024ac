"""The two things that systemd and a service say to each other: a socket at the start, and states by datagram."""

from __future__ import annotations

import os
import socket

__all__ = ["inherited", "inherits", "notify"]

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
