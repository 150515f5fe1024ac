"""HTTP/2 for what no client of gRPC would send: half messages, windows that stay shut, broken metadata."""

from __future__ import annotations

import socket
import struct
import time
from contextlib import suppress
from typing import Any

import grpc
from h2 import events
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.exceptions import H2Error
from h2.settings import SettingCodes

__all__ = ["Connection", "closed_at_once", "message"]

STATUSES = {str(code.value[0]).encode(): code.name for code in grpc.StatusCode}
"""Names of statuses by their numbers on the wire."""

CLOSED, OPEN, RESET = "closed", "open", "reset"
"""Ends of calls without a status: with their connection, not in time, and by a frame."""

_GOODBYE = 7
"""Type of the frame GOAWAY."""


def message(raw: bytes, length: int | None = None, *, compressed: bool = False) -> bytes:
    """A message as gRPC frames it; with a length, one that claims to have so many bytes."""
    return struct.pack(">BI", compressed, len(raw) if length is None else length) + raw


class Connection:
    """A connection to a server.

    Args:
        address: HOST:PORT.
        window: bytes of each stream that the server may send before it is told that they were taken.
        source: address of this machine to call from; "" is the usual one.
    """

    def __init__(self, address: str, *, window: int = 65_535, source: str = "") -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), 60, (source, 0) if source else None)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._said: dict[int, bytes] = {}  # messages of statuses, and all else that came, by stream
        self._ends: dict[int, str] = {}
        self._pending = b""
        self.h2 = H2Connection(
            H2Configuration(
                header_encoding=None,
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
                validate_inbound_headers=False,
            )
        )
        self.h2.initiate_connection()
        self.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: window})
        try:
            self.flush()
        except ConnectionError:
            self.socket.close()
            raise

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def flush(self, more: bytes = b"") -> None:
        """Send the frames that are ready, and these bytes behind them."""
        self.socket.sendall(self.h2.data_to_send() + more)

    def call(self, path: bytes | str, *metadata: tuple[bytes, bytes], left_out: str = "") -> int:
        """Begin a call, without one of its headers; gives its stream."""
        head = {
            ":method": b"POST",
            ":scheme": b"http",
            ":path": path.encode() if isinstance(path, str) else path,
            ":authority": b"localhost",
            "te": b"trailers",
            "content-type": b"application/grpc",
        }
        stream = self.h2.get_next_available_stream_id()
        pairs = [(name.encode(), value) for name, value in head.items() if name != left_out]
        self.h2.send_headers(stream, [*pairs, *metadata])
        self.flush()
        return stream

    def send(self, stream: int, raw: bytes, *, end: bool = True, wait: bool = True) -> None:
        """Send bytes of a call, until the server has ended it; without waiting, only what the server takes at once."""
        while raw and stream not in self._ends:
            room = min(self.h2.local_flow_control_window(stream), self.h2.max_outbound_frame_size)
            if room > 0:
                self.h2.send_data(stream, raw[:room])
                self.flush()
                raw = raw[room:]
            elif not wait:
                return
            elif not self._receive():
                raise ConnectionError(CLOSED)
        if end and stream not in self._ends:
            self.h2.end_stream(stream)
            self.flush()

    def open(self, stream: int, size: int) -> None:
        """Let the server send so many bytes more of a stream."""
        self.h2.increment_flow_control_window(size, stream)
        self.flush()

    def ended(self, stream: int) -> tuple[str, bytes]:
        """Wait for the end of a call: the name of its status, and all that came, its message among it.

        Raises:
            ConnectionError: the connection ended before.
        """
        while stream not in self._ends:
            if not self._receive():
                raise ConnectionError(f"closed after {self._said.get(stream)!r}")
        return self._ends[stream], self._said.get(stream, b"")

    def statuses(self, calls: int, seconds: float = 1.0) -> list[tuple[str, bytes]]:
        """Wait for the ends of so many calls, as far as they come in time: those that ``ended`` gives."""
        deadline, alive = time.monotonic() + seconds, True
        with suppress(TimeoutError):
            while alive and len(self._ends) < calls:
                self.socket.settimeout(max(deadline - time.monotonic(), 0.001))
                alive = self._receive()
        found = [(status, self._said.get(stream, b"")) for stream, status in self._ends.items()]
        return found + [(OPEN if alive else CLOSED, b"")] * (calls - len(found))

    def closed(self) -> bool:
        """Wait until the server closes the connection."""
        with suppress(ConnectionError):
            while self._receive():
                pass
        return True

    def _receive(self) -> bool:
        """Take what comes next; False at the end of the connection."""
        data = self.socket.recv(65_536)
        if not data:
            return False
        with suppress(H2Error):  # what we broke may be answered in kind
            for event in self.h2.receive_data(self._without_goodbye(data)):
                self._take(event)
        with suppress(ConnectionError):  # the end of the connection comes next
            self.flush()
        return True

    def _without_goodbye(self, data: bytes) -> bytes:
        """Take whole frames but those that say that the connection will end: h2 reads none of the calls after them."""
        self._pending += data
        frames = b""
        while len(self._pending) >= 9 and len(self._pending) >= (size := 9 + int.from_bytes(self._pending[:3], "big")):
            frame, self._pending = self._pending[:size], self._pending[size:]
            frames += b"" if frame[3] == _GOODBYE else frame
        return frames

    def _take(self, event: Any) -> None:
        if isinstance(event, events.StreamReset):
            self._ends.setdefault(event.stream_id, RESET)
        elif isinstance(event, events.DataReceived):
            self._said[event.stream_id] = self._said.get(event.stream_id, b"") + event.data
            if event.flow_controlled_length:
                self.h2.increment_flow_control_window(event.flow_controlled_length)
        elif isinstance(event, events.ResponseReceived | events.TrailersReceived):
            headers = dict(event.headers)
            http = headers.get(b":status", b"200")
            if b"grpc-status" in headers or http != b"200":
                number = headers.get(b"grpc-status", b"HTTP " + http)
                self._ends[event.stream_id] = STATUSES.get(number, number.decode())
                said = self._said.get(event.stream_id, b"")
                self._said[event.stream_id] = said + headers.get(b"grpc-message", b"")


def closed_at_once(address: str) -> bool:
    """Whether a server closes a connection that does nothing."""
    try:
        with Connection(address) as connection:
            return connection.closed()
    except ConnectionError:  # before its first frames were sent
        return True
