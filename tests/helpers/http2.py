"""HTTP/2 as bytes, for what no client of gRPC would send: half messages, windows that stay shut, broken metadata."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

__all__ = ["Connection", "closed_at_once", "message"]

_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _WINDOW = 0, 1, 3, 4, 6, 8
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1


def message(raw: bytes, length: int | None = None, *, compressed: bool = False) -> bytes:
    """A message as gRPC frames it; with a length, one that claims to have so many bytes."""
    return struct.pack(">BI", compressed, len(raw) if length is None else length) + raw


def _literal(name: bytes, value: bytes) -> bytes:
    """A header that is written out, never indexed, without Huffman's code."""
    return b"\x10" + b"".join(_integer(len(text), 7) + text for text in (name, value))


def _integer(value: int, bits: int) -> bytes:
    most = (1 << bits) - 1
    if value < most:
        return bytes([value])
    parts, value = [most], value - most
    while value >= 128:
        parts.append(value % 128 + 128)
        value //= 128
    return bytes([*parts, value])


class Connection:
    """A connection to a server.

    Args:
        address: HOST:PORT.
        window: bytes of each stream that the server may send before it is told that they were taken.
    """

    def __init__(self, address: str, *, window: int = 65_535) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.settimeout(60)
        self._next, self._read = 1, b""
        self._initial, self._windows = (
            65_535,
            {0: 65_535},
        )  # bytes that the server takes: of a stream, of each and of all
        self._ended: set[int] = set()
        self._waiting: list[tuple[int, int, int, bytes]] = []  # frames that came while a window was shut
        try:
            self.socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            # No table of headers, so that those of the server can be read without one; and the window.
            self.frame(_SETTINGS, 0, 0, struct.pack(">HIHI", 1, 0, 4, window))
        except ConnectionError:
            self.socket.close()
            raise

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        """Send one frame."""
        header = struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream)
        self.socket.sendall(header + payload)

    def call(self, path: bytes | str, *metadata: tuple[bytes, bytes]) -> int:
        """Begin a call; gives its stream."""
        path = path.encode() if isinstance(path, str) else path
        headers = [
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", path),
            (b":authority", b"localhost"),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
            *metadata,
        ]
        stream, self._next = self._next, self._next + 2
        self.frame(_HEADERS, _END_HEADERS, stream, b"".join(_literal(*header) for header in headers))
        return stream

    def send(self, stream: int, raw: bytes, *, end: bool = True) -> None:
        """Send bytes of a call, as soon as the server takes them and until it has ended the call."""
        while raw and stream not in self._ended:
            while (room := min(self._windows[0], self._windows.setdefault(stream, self._initial), 16_384)) <= 0:
                if (frame := self._frame()) is None:
                    raise ConnectionError("closed")
                self._waiting.append(frame)
                if stream in self._ended:
                    return
            piece, raw = raw[:room], raw[room:]
            self._windows[0] -= len(piece)
            self._windows[stream] -= len(piece)
            self.frame(_DATA, 0, stream, piece)
        if end and stream not in self._ended:
            self.frame(_DATA, _END_STREAM, stream, b"")

    def open(self, stream: int, size: int) -> None:
        """Let the server send so many bytes more, of a stream or with 0 of the connection."""
        self.frame(_WINDOW, 0, stream, struct.pack(">I", size))

    def reset(self, stream: int) -> None:
        """Cancel a call."""
        self.frame(_RESET, 0, stream, struct.pack(">I", 8))

    def receive(self) -> tuple[int, int, int, bytes] | None:
        """The next frame of the server: kind, flags, stream, payload; None at the end."""
        return self._waiting.pop(0) if self._waiting else self._frame()

    def _frame(self) -> tuple[int, int, int, bytes] | None:
        """The next frame that comes; pings and settings are answered, and what is in it taken."""
        header = self._exactly(9)
        if header is None:
            return None
        size = int.from_bytes(header[:3], "big")
        kind, flags, stream = struct.unpack(">BBI", header[3:])
        stream &= 0x7FFF_FFFF
        payload = self._exactly(size)
        if payload is None:
            return None
        if kind in (_SETTINGS, _PING) and not flags & _ACK:
            self.frame(kind, _ACK, 0, payload if kind == _PING else b"")
        if kind == _RESET or (kind in (_DATA, _HEADERS) and flags & _END_STREAM):
            self._ended.add(stream)
        if kind == _DATA and payload:
            self.open(0, len(payload))
        elif kind == _WINDOW:
            self._windows[stream] = self._windows.get(stream, self._initial) + int.from_bytes(payload, "big")
        elif kind == _SETTINGS:
            for name, value in struct.iter_unpack(">HI", payload):
                if name == 4:
                    self._windows = {
                        at: size + (value - self._initial if at else 0) for at, size in self._windows.items()
                    }
                    self._initial = value
        return kind, flags, stream, payload

    def ended(self, stream: int) -> bytes:
        """All that came of a stream until it ended, headers as they are packed.

        Raises:
            ConnectionError: the connection ended before.
        """
        received = b""
        while (frame := self.receive()) is not None:
            kind, flags, of, payload = frame
            if of == stream:
                received += payload
                if kind == _RESET or flags & _END_STREAM:
                    return received
        raise ConnectionError(f"closed after {received!r}")

    def closed(self) -> bool:
        """Wait until the server closes the connection."""
        with suppress(ConnectionError):
            while self.receive() is not None:
                pass
        return True

    def _exactly(self, size: int) -> bytes | None:
        while len(self._read) < size:
            more = self.socket.recv(65_536)
            if not more:
                return None
            self._read += more
        part, self._read = self._read[:size], self._read[size:]
        return part


def closed_at_once(address: str) -> bool:
    """Whether a server closes a connection that does nothing."""
    try:
        with Connection(address) as connection:
            return connection.closed()
    except ConnectionError:  # before its first frames were sent
        return True
