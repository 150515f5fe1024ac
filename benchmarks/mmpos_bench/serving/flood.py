"""A load of equal requests from one core, many times faster than a client of gRPC sends them: HTTP/2 as bytes.

Of what comes back only the headers of frames are read: a call has ended when its stream has, and was answered if that
had data, since an error is headers alone.
"""

from __future__ import annotations

import socket
import struct
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from selectors import EVENT_READ, DefaultSelector
from time import perf_counter, sleep

from mmpos.errors import ServiceError
from mmpos_bench.serving.processes import Tell

_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_MAX_CONCURRENT_STREAMS, _INITIAL_WINDOW_SIZE = 3, 4
_HEADER = struct.Struct(">BHBBI")  # of a frame: its length in two fields, kind, flags, stream
_LARGEST = 2**31 - 1  # window
_FIRST_WINDOW, _FRAME_SIZE = 65_535, 16_384  # of either side until it says otherwise, and without asking
_TICK = 0.001  # seconds between two looks at what is due
_PATIENCE = 30.0  # seconds for the first word of a server, and for its last answers


@dataclass(frozen=True)
class Flood:
    """A request, and how often to send it."""

    address: str
    path: str
    request: bytes
    seconds: float  # how long new calls begin
    rate: float | None  # calls per second in all, whatever becomes of them; None is a new one for each that ends
    connections: int  # over which calls take turns
    in_flight: int  # calls on each of them, at most; fewer if the server says so


@dataclass(frozen=True)
class Flooded:
    """Counts of calls; each that was sent was answered, refused, reset or lost."""

    offered: float  # calls sent per second
    answers: float  # per second, until the last call had ended
    sent: int
    answered: int  # got a message
    refused: int  # those whose stream the server ended without a message
    reset: int  # those that it ended by RST_STREAM
    lost: int  # those whose connection ended, or that were not answered in time
    missed: int  # due while no connection could take one more, so that they were not sent


def flood(load: Flood, begun: Callable[[], None] = lambda: None) -> Flooded:
    """Send the calls from this process.

    Args:
        load: to send.
        begun: called when the connections stand and the time begins.

    Raises:
        ServiceError: there is no server of HTTP/2.
    """
    with DefaultSelector() as selector:
        try:
            return _Run(load, selector).run(begun)
        except OSError as error:
            raise ServiceError(f"{load.address}: got {error}, want a server of HTTP/2") from None
        finally:
            for key in list(selector.get_map().values()):
                key.data.socket.close()


def tell_flood(tell: Tell, load: Flood) -> None:
    """Send the calls, tell when the time begins, and then the counts."""
    tell(flood(load, lambda: tell("begun")))


class _Run:
    """A load under way."""

    def __init__(self, load: Flood, selector: DefaultSelector) -> None:
        self._load, self._selector = load, selector
        host, _, port = load.address.rpartition(":")
        self._host = host.strip("[]"), int(port)
        headers = [(":method", "POST"), (":scheme", "http"), (":path", load.path), (":authority", load.address)]
        headers += [("te", "trailers"), ("content-type", "application/grpc")]
        self._headers = b"".join(_literal(*header) for header in headers)
        self._body = b"\0" + len(load.request).to_bytes(4, "big") + load.request
        self._counts: Counter[str] = Counter()
        self._open = deque(self._connect() for _ in range(load.connections))  # those that take new calls

    def run(self, begun: Callable[[], None]) -> Flooded:
        load, counts = self._load, self._counts
        end = perf_counter() + _PATIENCE
        while not all(connection.ready for connection in self._open):
            self._look(_TICK)
            if perf_counter() > end:
                raise TimeoutError("no SETTINGS")
        begun()
        begin, due, seconds = perf_counter(), 0, 0.0
        while seconds < load.seconds:
            if load.rate is None:
                for connection in self._open:
                    while connection.room > 0:
                        connection.call()
            self._flush()
            if load.rate is not None:
                sleep(_TICK)  # what comes in between is looked at together
            self._look(_TICK if load.rate is None else 0)
            seconds = perf_counter() - begin
            if load.rate is not None:
                before, due = due, int(load.rate * min(seconds, load.seconds))
                self._send(due - before)
        self._open.clear()
        end = perf_counter() + _PATIENCE
        while any(connection.pending for connection in self._all()) and perf_counter() < end:
            self._flush()
            self._look(_TICK)
        ended = perf_counter() - begin
        counts["lost"] += sum(len(connection.pending) for connection in self._all())
        names = "sent", "answered", "refused", "reset", "lost", "missed"
        offered, answers = round(counts["sent"] / seconds, 1), round(counts["answered"] / ended, 1)
        return Flooded(offered, answers, *(counts[name] for name in names))

    def _send(self, calls: int) -> None:
        """Begin so many calls, each on the next connection that takes one."""
        for _ in range(calls):
            for _ in range(len(self._open)):
                self._open.rotate(-1)
                if self._open[0].room > 0:
                    self._open[0].call()
                    break
            else:
                self._counts["missed"] += 1

    def _look(self, wait: float) -> None:
        """Take what has come, and put a new connection in the place of one that ends."""
        for key, _ in self._selector.select(wait):
            connection: _Connection = key.data
            connection.receive()
            if not connection.leaving:
                continue
            if connection in self._open:
                self._open[self._open.index(connection)] = self._connect()
            if connection.closed or not connection.pending:
                self._counts["lost"] += len(connection.pending)
                self._selector.unregister(connection.socket)
                connection.socket.close()

    def _flush(self) -> None:
        for connection in self._all():
            connection.flush()

    def _all(self) -> list[_Connection]:
        return [key.data for key in self._selector.get_map().values()]

    def _connect(self) -> _Connection:
        connection = _Connection(self._host, self._headers, self._body, self._load.in_flight, self._counts)
        self._selector.register(connection.socket, EVENT_READ, connection)
        return connection


class _Connection:
    """A connection whose streams all carry the same request.

    What the server is sent is kept until `flush`, so that one write has many calls.
    """

    def __init__(
        self, host: tuple[str, int], headers: bytes, body: bytes, in_flight: int, counts: Counter[str]
    ) -> None:
        self.socket = socket.create_connection(host, timeout=_PATIENCE)
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._headers, self._body, self._counts = headers, body, counts
        self._in_flight = self._most = in_flight
        self.ready = self.leaving = self.closed = False  # whether settings came; whether it ends; whether it has
        self.pending: dict[int, str] = {}  # streams that the server has not ended: how they stand if it does now
        self._unsent: dict[int, list[int]] = {}  # those with some of their body unsent: from where, and their window
        self._next, self._window, self._initial, self._taken = 1, _FIRST_WINDOW, _FIRST_WINDOW, 0
        self._rest = b""
        self._out = bytearray(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        self._out += _frame(_SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW_SIZE, _LARGEST))
        self._out += _frame(_WINDOW, 0, 0, (_LARGEST - _FIRST_WINDOW).to_bytes(4, "big"))
        self.flush()

    @property
    def room(self) -> int:
        """Calls that it takes besides; less than one is none."""
        return self._most - len(self.pending) if self.ready else 0

    def call(self) -> None:
        """Begin a call, and send as much of its body as the windows allow."""
        stream, self._next = self._next, self._next + 2
        self._counts["sent"] += 1
        self.pending[stream] = "refused"
        self._out += _frame(_HEADERS, _END_HEADERS, stream, self._headers)
        self._unsent[stream] = [0, self._initial]
        self._go_on(stream)

    def flush(self) -> None:
        """Write what the socket takes."""
        if self._out:
            # Of a broken connection `receive` learns, too.
            with suppress(BlockingIOError, ConnectionError):
                del self._out[: self.socket.send(self._out)]

    def receive(self) -> None:
        """Take what has come."""
        try:
            came = self.socket.recv(2**18)
        except BlockingIOError:
            return
        except ConnectionError:
            came = b""
        if not came:
            if not self.ready:
                raise ConnectionError("a connection that was closed before its SETTINGS")
            self.leaving = self.closed = True
            return
        data, at = self._rest + came, 0
        while at + _HEADER.size <= len(data):
            high, low, kind, flags, stream = _HEADER.unpack_from(data, at)
            end = at + _HEADER.size + (high << 16 | low)
            if end > len(data):
                break
            if kind in (_DATA, _HEADERS):
                if kind == _DATA:
                    self._taken += end - at - _HEADER.size
                    if stream in self.pending:
                        self.pending[stream] = "answered"
                if flags & _END_STREAM:
                    self._end(stream)
            elif kind == _RESET:
                self._end(stream, "reset")
            else:
                self._control(kind, flags, stream, data[at + _HEADER.size : end])
            at = end
        self._rest = data[at:]
        if self._taken > _LARGEST // 2:
            self._out += _frame(_WINDOW, 0, 0, self._taken.to_bytes(4, "big"))
            self._taken = 0

    def _end(self, stream: int, how: str | None = None) -> None:
        """Count the end of a stream, which a server may tell twice: an answer, and a reset since it wants no more."""
        if stands := self.pending.pop(stream, None):
            self._unsent.pop(stream, None)
            self._counts[how or stands] += 1

    def _control(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _PING and not flags & _ACK:
            self._out += _frame(_PING, _ACK, 0, payload)
        elif kind == _SETTINGS and not flags & _ACK:
            self._set(dict(struct.iter_unpack(">HI", payload)))
            self._out += _frame(_SETTINGS, _ACK, 0)
        elif kind == _GOAWAY:
            self.leaving = True
            last = int.from_bytes(payload[:4], "big")
            for unseen in [stream for stream in self.pending if stream > last]:
                self._end(unseen, "lost")
        elif kind == _WINDOW:
            more = int.from_bytes(payload, "big")
            if stream == 0:
                self._window += more
                for unsent in list(self._unsent):
                    self._go_on(unsent)
            elif stream in self._unsent:
                self._unsent[stream][1] += more
                self._go_on(stream)

    def _set(self, settings: dict[int, int]) -> None:
        self.ready = True
        self._most = min(self._in_flight, settings.get(_MAX_CONCURRENT_STREAMS, self._most))
        more = settings.get(_INITIAL_WINDOW_SIZE, self._initial) - self._initial
        self._initial += more
        for unsent in list(self._unsent):
            self._unsent[unsent][1] += more
            self._go_on(unsent)

    def _go_on(self, stream: int) -> None:
        """Send as much of a body as the windows of the stream and of the connection allow."""
        body, (at, window) = self._body, self._unsent[stream]
        while (size := min(len(body) - at, window, self._window, _FRAME_SIZE)) > 0:
            last = at + size == len(body)
            self._out += _frame(_DATA, _END_STREAM if last else 0, stream, body[at : at + size])
            at, window, self._window = at + size, window - size, self._window - size
        if at == len(body):
            del self._unsent[stream]
        else:
            self._unsent[stream] = [at, window]


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return _HEADER.pack(len(payload) >> 16, len(payload) & 0xFFFF, kind, flags, stream) + payload


def _literal(name: str, value: str) -> bytes:
    """A header without indexing, so that the bytes of every call are the same but for its stream."""
    return b"\0" + b"".join(_length(len(text)) + text for text in (name.encode(), value.encode()))


def _length(value: int) -> bytes:
    """A number in the seven bits of a byte, and in as many bytes as it needs besides."""
    if value < 127:
        return bytes([value])
    more, value = [127], value - 127
    while value >= 128:
        more.append(value % 128 + 128)
        value //= 128
    return bytes([*more, value])
