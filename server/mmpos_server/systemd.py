"""The two things that systemd and a service say to each other: a socket at the start, and states by datagram."""

from __future__ import annotations

import os
import socket

__all__ = ["inherited", "notify"]

_FIRST = 3  # the first descriptor that systemd hands over


def inherited() -> socket.socket | None:
    """Take the listening socket that systemd hands to this process, if it does."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return None
    return socket.socket(fileno=_FIRST)


def notify(state: str) -> None:
    """Tell the service manager a state such as ``READY=1``; without one, do nothing."""
    place = os.environ.get("NOTIFY_SOCKET")
    if place:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.sendto(state.encode(), "\0" + place[1:] if place.startswith("@") else place)
