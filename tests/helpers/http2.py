"""An HTTP/2 client for traffic that gRPC clients never send: partial messages, closed windows, malformed metadata."""

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

STATUSES = {str(code.value[0]).encode(): code.name for code in grpc.StatusCode}
"""Status names by their numbers on the wire."""

CLOSED, OPEN, RESET = "closed", "open", "reset"
"""Outcomes of calls without a status: the connection ended, the call timed out, or the stream was reset."""


def message(raw: bytes, length: int | None = None, *, compressed: bool = False) -> bytes:
    """Frame a message as gRPC does; ``length`` replaces the true length."""
    return struct.pack(">BI", compressed, len(raw) if length is None else length) + raw


class Connection:
    """A connection to a server.

    Args:
        address: HOST:PORT.
        window: bytes that the server may send on each stream before a window update.
        source: local address to connect from; "" for the default.
    """

    def __init__(self, address: str, *, window: int = 65_535, source: str = "") -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), 300, (source, 0) if source else None)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received: dict[int, bytes] = {}  # received data and status messages, by stream
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

    def flush(self) -> None:
        """Send the pending frames."""
        self.socket.sendall(self.h2.data_to_send())

    def call(self, path: bytes | str, *metadata: tuple[bytes, bytes], left_out: str = "") -> int:
        """Begin a call, without the header ``left_out``, and return its stream."""
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
        """Send a call's bytes unless the server ends the call; without ``wait``, stop when the window is full."""
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

    def ended(self, stream: int) -> tuple[str, bytes]:
        """Wait for the end of a call, and return its status name and all received data, including the status message.

        Raises:
            ConnectionError: the connection ended first.
        """
        while stream not in self._ends:
            if not self._receive():
                raise ConnectionError(f"closed after {self._received.get(stream)!r}")
        return self._ends[stream], self._received.get(stream, b"")

    def statuses(self, calls: int, seconds: float = 1.0) -> list[tuple[str, bytes]]:
        """Wait at most ``seconds`` for ``calls`` calls to end, and return for each what ``ended`` returns."""
        deadline, alive = time.monotonic() + seconds, True
        with suppress(TimeoutError):
            while alive and len(self._ends) < calls:
                self.socket.settimeout(max(deadline - time.monotonic(), 0.001))
                alive = self._receive()
        ends = [(status, self._received.get(stream, b"")) for stream, status in self._ends.items()]
        return ends + [(OPEN if alive else CLOSED, b"")] * (calls - len(ends))

    def closed(self) -> bool:
        """Wait until the server closes the connection."""
        with suppress(ConnectionError):
            while self._receive():
                pass
        return True

    def _receive(self) -> bool:
        """Process the next bytes; return False when the connection has ended."""
        data = self.socket.recv(65_536)
        if not data:
            return False
        with suppress(H2Error):  # the server may respond to malformed frames with malformed frames
            for event in self.h2.receive_data(self._without_goaway(data)):
                self._take(event)
        with suppress(ConnectionError):  # the next read reports that the connection has ended
            self.flush()
        return True

    def _without_goaway(self, data: bytes) -> bytes:
        """Return the complete frames except GOAWAY (type 7), after which h2 would ignore the open calls."""
        self._pending += data
        frames = b""
        while len(self._pending) >= 9 and len(self._pending) >= (size := 9 + int.from_bytes(self._pending[:3], "big")):
            frame, self._pending = self._pending[:size], self._pending[size:]
            frames += b"" if frame[3] == 7 else frame
        return frames

    def _take(self, event: Any) -> None:
        if isinstance(event, events.StreamReset):
            self._ends.setdefault(event.stream_id, RESET)
        elif isinstance(event, events.DataReceived):
            self._received[event.stream_id] = self._received.get(event.stream_id, b"") + event.data
            if event.flow_controlled_length:
                self.h2.increment_flow_control_window(event.flow_controlled_length)
        elif isinstance(event, events.ResponseReceived | events.TrailersReceived):
            headers = dict(event.headers)
            http = headers.get(b":status", b"200")
            if b"grpc-status" in headers or http != b"200":
                number = headers.get(b"grpc-status", b"HTTP " + http)
                self._ends[event.stream_id] = STATUSES.get(number, number.decode())
                data = self._received.get(event.stream_id, b"")
                self._received[event.stream_id] = data + headers.get(b"grpc-message", b"")
