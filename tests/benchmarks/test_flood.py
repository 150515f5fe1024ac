"""The load of equal requests: what becomes of its calls is counted, whatever the server does with them."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    DataReceived,
    Event,
    PingAckReceived,
    RequestReceived,
    SettingsAcknowledged,
    StreamEnded,
    StreamReset,
)
from h2.settings import SettingCodes, Settings

from mmpos.errors import ServiceError
from mmpos_bench.serving.flood import Flood, Flooded, flood, tell_flood
from mmpos_bench.serving.processes import working

PATH = "/a.very.long.name.of.a.package." + "of.which.a.length.takes.more.than.seven.bits." * 3 + "Service/Method"


@dataclass
class Toy:
    """A server of HTTP/2 in threads: its turns tell what becomes of one call after the other, the last for good.

    `answer` and `refuse` end a stream with a message and without, and `last` is an answer after which the connection
    ends; `reset`, `goaway` and `close` do as they say, the last two to the connection, whose call is then lost.
    """

    turns: list[str]
    settings: dict[SettingCodes, int] = field(default_factory=dict)
    taken: list[str] = field(default_factory=list)
    bodies: set[bytes] = field(default_factory=set)
    headers: set[tuple[tuple[bytes, bytes], ...]] = field(default_factory=set)
    acknowledged: Counter[type[Event]] = field(default_factory=Counter)
    answer: bytes = bytes(15)
    most: int = 0
    address: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def serve(self, peer: socket.socket) -> None:
        with peer, suppress(ConnectionError):
            h2 = H2Connection(H2Configuration(client_side=False, header_encoding=None))
            h2.local_settings = Settings(client=False, initial_values=self.settings)
            h2.initiate_connection()
            h2.ping(b"whoareu?")
            bodies: dict[int, bytes] = {}
            going = True
            while going:
                peer.sendall(h2.data_to_send())
                if not (came := peer.recv(65_536)):
                    return
                for event in h2.receive_data(came):
                    going = going and self.on(h2, event, bodies)
            peer.sendall(h2.data_to_send())

    def on(self, h2: H2Connection, event: Event, bodies: dict[int, bytes]) -> bool:
        """Whether the connection goes on."""
        if isinstance(event, RequestReceived):
            self.headers.add(tuple(event.headers))
            bodies[event.stream_id] = b""
            self.most = max(self.most, len(bodies))
        elif isinstance(event, DataReceived):
            bodies[event.stream_id] += event.data
            h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, SettingsAcknowledged | PingAckReceived):
            self.acknowledged[type(event)] += 1
        elif isinstance(event, StreamReset):
            raise AssertionError(f"got a reset of {event.stream_id}, want none")
        elif isinstance(event, StreamEnded):
            self.bodies.add(bodies.pop(event.stream_id))
            with self.lock:
                turn = self.turns[min(len(self.taken), len(self.turns) - 1)]
                self.taken.append(turn)
            return self.take(h2, event.stream_id, turn)
        return True

    def take(self, h2: H2Connection, stream: int, turn: str) -> bool:
        if turn == "reset":
            h2.reset_stream(stream, ErrorCodes.REFUSED_STREAM)
        elif turn == "goaway":
            h2.close_connection(last_stream_id=stream - 2)
        elif turn == "refuse":
            h2.send_headers(stream, [(":status", "200"), ("grpc-status", "8")], end_stream=True)
        elif turn in ("answer", "last"):
            h2.send_headers(stream, [(":status", "200"), ("content-type", "application/grpc")])
            h2.send_data(stream, self.answer)
            h2.send_headers(stream, [("grpc-status", "0")], end_stream=True)
            if turn == "last":
                h2.close_connection()
        return turn not in ("goaway", "close", "last")


@contextmanager
def served(*turns: str, **settings: int) -> Iterator[Toy]:
    toy = Toy(list(turns), {SettingCodes[name]: value for name, value in settings.items()})
    threads = []

    def accept() -> None:
        with suppress(OSError):
            while True:
                peer, _ = listener.accept()
                threads.append(threading.Thread(target=toy.serve, args=(peer,)))
                threads[-1].start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        toy.address = f"127.0.0.1:{listener.getsockname()[1]}"
        threads.append(threading.Thread(target=accept))
        threads[0].start()
        yield toy
        listener.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()


def load(
    address: str, rate: float | None, *, request: bytes = b"ab", connections: int = 2, in_flight: int = 3
) -> Flood:
    return Flood(address, PATH, request, 0.2, rate, connections, in_flight)


def became(found: Flooded) -> tuple[int, int, int, int]:
    assert found.sent == found.answered + found.refused + found.reset + found.lost
    return found.answered, found.refused, found.reset, found.lost


def turned(toy: Toy) -> tuple[int, int, int, int]:
    """The same, as the server knows it."""
    turns = Counter(toy.taken)
    return turns["answer"] + turns["last"], turns["refuse"], turns["reset"], turns["goaway"] + turns["close"]


@pytest.mark.parametrize("rate", [None, 500.0])
def test_each_call_that_is_answered_counts_once(rate: float | None) -> None:
    with served("answer") as toy, working() as (worker,):
        worker.start(tell_flood, load(toy.address, rate))
        assert worker.receive() == "begun"
        found = worker.receive()
        authority = (b":authority", toy.address.encode())
    assert became(found) == turned(toy)
    assert toy.bodies == {b"\0\0\0\0\2ab"}
    assert toy.acknowledged == {SettingsAcknowledged: 2, PingAckReceived: 2}
    assert toy.headers == {
        (
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", PATH.encode()),
            authority,
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
        )
    }
    if rate is None:
        assert found.sent >= 6
        assert found.missed == 0
    else:
        assert found.sent + found.missed == 100


@pytest.mark.parametrize("rate", [None, 500.0])
def test_a_server_of_grpc_answers(rate: float | None) -> None:
    requests: list[bytes] = []

    def echo(request: bytes, _: object) -> bytes:
        requests.append(request)
        return request

    class Handler(grpc.GenericRpcHandler):
        def service(self, handler_call_details: Any) -> Any:
            if handler_call_details.method != PATH:
                return None
            return grpc.unary_unary_rpc_method_handler(echo)

    server = grpc.server(ThreadPoolExecutor(2), handlers=[Handler()])
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    found = flood(load(address, rate, request=bytes(100_000)))  # more than the windows are at first
    assert became(found) == (len(requests), 0, 0, 0)
    assert set(requests) == {bytes(100_000)}
    found = flood(Flood(address, "/no/Method", b"", 0.1, None, 1, 1))
    assert became(found) == (0, found.sent, 0, 0)
    server.stop(None).wait()


def test_errors_and_resets_are_told_apart_from_answers() -> None:
    with served("refuse", "refuse", "reset", "answer", "reset", "reset", "answer") as toy:
        found = flood(load(toy.address, 500.0, in_flight=100))
    assert toy.taken == toy.turns + ["answer"] * 93
    assert became(found) == turned(toy)


def test_a_connection_that_ends_is_followed_by_another() -> None:
    # One call at a time: of more, those that the server has not read are lost as well.
    turns = ["answer", "goaway", "answer", "close", "last", "goaway", "reset", "last", "last", "answer"]
    with served(*turns) as toy:
        found = flood(load(toy.address, None, connections=1, in_flight=1))
    assert became(found) == turned(toy)


def test_the_limits_of_the_server_are_kept() -> None:
    request = bytes(range(256)) * 10
    with served("answer", MAX_CONCURRENT_STREAMS=2, INITIAL_WINDOW_SIZE=1000) as toy:
        found = flood(load(toy.address, None, request=request, connections=1, in_flight=9))
    assert became(found) == turned(toy)
    assert toy.most == 2
    assert toy.bodies == {b"\0\0\0\x0a\0" + request}


def test_the_server_is_told_that_answers_were_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmpos_bench.serving.flood._LARGEST", 100_000)  # bytes, which are twenty answers
    with served("answer") as toy:
        toy.answer = bytes(5000)
        found = flood(load(toy.address, None, connections=1, in_flight=1))
    assert became(found) == turned(toy)


def test_calls_that_no_connection_takes_are_missed() -> None:
    # An answer comes no sooner than the next look at what is due, so that at most one call goes with each.
    with served("answer") as toy:
        found = flood(load(toy.address, 100_000.0, connections=1, in_flight=1))
    assert became(found) == turned(toy)
    assert found.sent + found.missed == 20_000
    assert found.missed > 0


def test_without_a_server_nothing_is_sent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(ServiceError, match=rf"{address}: got .*refused, want a server of HTTP/2"):
        flood(load(address, None))
